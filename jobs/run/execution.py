"""One execution of a job over a session's shards: engine start, canary, run loop and conclusion; and what it will take,
estimated before it starts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from relabel.jobs.job import (
    Job,
    ModelRunner,
    OpenRun,
    options_begun_with,
    start_engine,
    start_runner,
    with_auto_resolved,
)
from relabel.jobs.output import grid
from relabel.jobs.run.chunks import ChunkLabeler, ChunkWork, Reuse, earlier_outputs, keep_answers
from relabel.jobs.run.crashes import ends_hanging
from relabel.jobs.run.health import Health
from relabel.jobs.run.loop import IDLE_S, RunLoop, ask_unwritten
from relabel.jobs.run.notices import Graded, GradeWatch, forget_stop, keep_notices, keep_stop
from relabel.jobs.run.progress import LiveFile, Progress, StageSeen
from relabel.jobs.run.results import (
    CANARY_FOLDER,
    CanaryResult,
    RunReport,
    StoredBatches,
    conclude,
    engine_text,
    has_passed,
    refuse_mixing,
)
from relabel.jobs.run.session import COMMITS_IN_FLIGHT, CommitThreads, Session
from relabel.jobs.run.stop import DRAIN_S, start_unless_stopped
from relabel.labelers.engines.fake import Fake, FakeArgs
from relabel.labelers.registry import engine_class
from relabel.manifests.asks import Answer, Ask, Engine, EngineFacts, Request
from relabel.manifests.budgets import BudgetState, Range
from relabel.manifests.chat_templates import DAY, day_of
from relabel.manifests.errors import (
    EngineCrashError,
    GateError,
    LockHeldError,
    MissingExtraError,
    ModelError,
    RelabelError,
    ServerGoneError,
    UsageError,
)
from relabel.manifests.inputs import left_out_text
from relabel.manifests.label_keys import LabelKeys
from relabel.manifests.labels import LabelRow, Pair, QuarantineRow, label_rows
from relabel.manifests.metrics.metric import wilson
from relabel.manifests.models import default_cache_dir, write_json
from relabel.manifests.plan import FileRef, Plan, Receipt, chunk_row_ids, stages_changed
from relabel.manifests.process import device_names
from relabel.manifests.records import checked, digest_of, fault_of, sealed_json
from relabel.manifests.reuse import EarlierOutput, RowPlace, why_nothing
from relabel.manifests.rows import pairs_by_number
from relabel.manifests.run_labels import read_labels
from relabel.manifests.run_manifest import engine_identity, engines_differ
from relabel.manifests.secrets import counted
from relabel.manifests.specs import JobSpec, KeepsModels, PaidByToken, gpus_of, price_of
from relabel.manifests.table_snapshots import TableSnapshot

SEED_FILES = 16
"""Files of earlier labels that are read to know how grades varied before."""
LOCK_RETRY_S = 0.5
"""Pause between two tries to take a lock that is waited for, seconds."""


def label(
    session: Session,
    *,
    on_progress: Callable[[], None] = lambda: None,
    on_engine: Callable[[EngineFacts, list[str]], None] = lambda *_: None,
) -> RunReport:
    """Do a session's work with one engine, and finish the run if it was the last of it.

    Args:
        on_progress: called often while asks are answered.
        on_engine: called once, when the engine has started.
    """
    started_s = time.perf_counter()
    store = session.opened.store
    live_file = LiveFile(store, session.worker, session.execution, session.progress, stays=session.is_part)
    num_jumps = 0

    def turned() -> None:
        nonlocal num_jumps
        on_progress()
        live_file.update()
        if len(session.progress.jumps) > num_jumps:
            num_jumps = len(session.progress.jumps)
            keep_notices(store, session.worker, session.progress.jumps, session.progress.outside)

    work = _EngineWork()
    try:
        begun = _prepare(session)
        engine = None if begun is None else start_unless_stopped(session.stop, lambda: _start(session, work))
        if begun is not None and engine is not None:
            session.progress.engine_starts += 1
            work.start_s = time.perf_counter() - started_s
            _work(session, engine, begun, work, on_engine=on_engine, on_progress=turned)
    except Exception as exc:
        if isinstance(exc, ServerGoneError):
            keep_stop(store, exc)
        is_fault = not isinstance(exc, RelabelError)
        is_crash = is_fault or isinstance(exc, EngineCrashError)
        session.close(crash=(f"{type(exc).__name__}: {exc}" if is_fault else str(exc)) if is_crash else None)
        raise
    finally:
        session.close()
        live_file.close()
        keep_notices(store, session.worker, session.progress.jumps, session.progress.outside)
    report = conclude(session)
    if work.costs is not None:
        report.did["costs"] = work.costs
    report.did |= work.canary
    report.engine_start_s = work.start_s
    report.remarks = work.remarks
    report.seconds = time.perf_counter() - started_s
    return report


@dataclass(slots=True)
class _Begun:
    """What is there before an engine is.

    Args:
        chunks: from the first that has something to ask.
        drawn: the canary's rows; None where they are drawn later, or there is no canary.
    """

    chunks: Iterator[ChunkWork | None]
    drawn: CanarySample | None
    remarks: list[str]


@dataclass(slots=True)
class _EngineWork:
    """What one engine did, for the report: its remarks, its start's seconds, what it cost, the canary's result."""

    remarks: list[str] = field(default_factory=list)
    start_s: float = 0.0
    costs: dict[str, Any] | None = None
    canary: dict[str, Any] = field(default_factory=dict)


def _prepare(session: Session) -> _Begun | None:
    """Do what needs no engine; None if that was all, a stop came, or the budget has no room for an engine's start."""
    if not session.reach():
        return None
    begun = _begin(session)
    if begun is None:
        return None
    if session.allowance is not None and not session.allowance.begin():
        return None
    return begun


def _work(
    session: Session,
    engine: ModelRunner,
    begun: _Begun,
    work: _EngineWork,
    *,
    on_engine: Callable[[EngineFacts, list[str]], None],
    on_progress: Callable[[], None],
) -> None:
    """Ask an engine that has started, canary first, and close it."""
    opened, spec = session.opened, session.opened.job.spec
    try:
        forget_stop(opened.store)
        if session.allowance is not None and isinstance(engine, Engine):
            session.allowance.uses(engine)
        facts = engine.facts()
        session.facts = facts
        work.remarks = [*begun.remarks, *work.remarks, *_reuse_remarks(session, facts)]
        on_engine(facts, work.remarks)
        if not spec.run.allow_mixed:
            engines = [*opened.folder.snapshot().engines, asdict(facts)]
            refuse_mixing(engines, output=spec.output, is_begun=True)
        if spec.canary and not session.is_retry and isinstance(engine, Engine):
            work.canary = _pass_canary(engine, session, begun.drawn, facts, on_progress)
        session.progress.started_s = time.perf_counter()
        if isinstance(engine, ChunkLabeler):
            engine.label_chunks(
                begun.chunks,
                session.commit,
                progress=session.progress,
                stop=session.stop,
                on_progress=on_progress,
            )
        else:
            assert isinstance(engine, Engine)
            _ask(engine, session, begun.chunks, on_progress)
            if not session.is_retry:  # rows that failed before are no sample of others
                keep_rates(opened, facts, session.progress, source="run")
    finally:
        engine.close()
    work.costs = engine.costs()


def _start(session: Session, work: _EngineWork) -> ModelRunner:
    """Start an engine like the one that began this output, and note its remarks."""
    opened, started_s = session.opened, time.perf_counter()
    with ends_hanging(
        lambda: started_s,
        opened.job.spec.run.start_timeout_s,
        what="the engine has not started",
        option="run.start_timeout_s",
    ):
        engine, work.remarks = start_runner(with_auto_resolved(opened.job, opened.store))
    if opened.job.spec.engine.args.sends_batches and isinstance(engine, Engine):
        engine.use_records(StoredBatches(opened.store))
    return engine


def _begin(session: Session) -> _Begun | None:
    """Draw the canary's rows and find the first chunk to ask; None if there is none, or a stop came. Chunks whose rows
    are all known are committed, unless a canary comes first.
    """
    spec, drawn, remarks = session.opened.job.spec, None, list[str]()
    is_canary = spec.canary and not session.is_retry
    if is_canary and not has_passed(session.opened.store, None, spec.canary, spec.max_flip_rate):
        if (drawn := _draw_canary(session)) is None:
            return None
        if not drawn[0]:
            remarks.append(
                "canary: no row of these shards is labelled anywhere yet, so there is nothing to compare; it was not "
                "asked"
            )
    chunks = session.chunks()
    # if nothing is asked, no new label joins the old ones, and no canary is needed
    if not (session.reuse.outputs or session.opened.cascade) or (drawn is not None and all(drawn)):
        return _Begun(chunks, drawn, remarks)
    with CommitThreads(session.commit, session.progress, threads=COMMITS_IN_FLIGHT) as commits:
        for work in chunks:
            session.stop.mind(0.0)  # no answer is waited for: what `END_S` leaves is enough for the commits under way
            if session.stop.reason is not None:
                return None
            if work is None:  # too many shards are open
                commits.settle(wait_for_all=True)
                time.sleep(IDLE_S)
            elif work.left:
                return _Begun(itertools.chain([work], chunks), drawn, remarks)
            else:
                session.journal.begins(work)
                commits.add(work)
                commits.settle()
    return None


def _reuse_remarks(session: Session, facts: EngineFacts) -> list[str]:
    """A label's key does not know which version of an engine answered: that is known only once one has started."""
    parts, canary = session.opened.plan.parts, session.opened.job.spec.canary
    advice = f"{'the canary measures' if canary else '`canary: 200` would measure'} whether that matters"
    return [
        f"labels reused from {earlier.path} were made by another engine ({'; '.join(differences)}); {advice}"
        for earlier in session.reuse.outputs
        if (differences := engines_differ([*earlier.found.all_engines, asdict(facts)]))
        and not why_nothing(earlier, parts)
    ]


def _ask(engine: Engine, session: Session, chunks: Iterator[ChunkWork | None], on_progress: Callable[[], None]) -> None:
    job = session.opened.job
    watch = None
    if not session.is_retry and session.opened.plan.facts.labeler.grades:
        watch = GradeWatch()
        watch.seed(_graded_before(session))
    loop = RunLoop(
        job.labeler,
        job.spec.labeler,
        engine,
        seed=job.spec.engine.seed,
        ask_timeout_s=job.spec.run.ask_timeout_s,
        is_late=job.spec.engine.args.sends_batches,
        journal=session.journal,
        answer_cache=session.reuse.answer_cache,
        allowance=session.allowance,
        health=Health(
            job.labeler,
            minds_unreadable=job.spec.run.stop_when_unreadable and not session.is_retry,
            is_late=job.spec.engine.args.sends_batches,
        ),
        watch=watch,
    )
    keep = functools.partial(keep_answers, session.opened.store, session.opened.plan.fingerprint, session.facts)
    try:
        loop.label_chunks(
            chunks,
            session.commit,
            progress=session.progress,
            stop=session.stop,
            on_progress=on_progress,
        )
    except (EngineCrashError, ServerGoneError):
        keep(loop.unfinished)
        raise
    keep(loop.unfinished)


def _graded_before(session: Session) -> Iterator[Graded]:
    """Rows that earlier executions have asked and graded: those of the last chunks that are committed. A file that
    can't be read ends them; who needs it says so.
    """
    folder = session.opened.folder
    files = list[FileRef]()
    with contextlib.suppress(OSError, RelabelError):
        for shard in sorted(session.left.seen, reverse=True):
            if len(files) >= SEED_FILES:
                break
            labels = [receipts[0].labels for receipts in folder.chunk_receipts(shard)]
            files = [*(file for file in labels if file is not None), *files]
        for file in files[-SEED_FILES:]:
            table = read_labels(folder, file, ["row_id", "query_id", "grade", "reused"], check_bytes=False)
            for row in table.to_pylist():
                if row["grade"] is not None and not row["reused"]:
                    yield Graded(row["row_id"], row["query_id"], row["grade"])


# ------------------------------------------------------------------------------
# The canary: labelled rows asked again and compared before new labels are added to an output.

_FLOOR = 1e-6
"""Least probability in a KL divergence: distributions are kept as float32, and an engine may round a small one to 0."""


class Drawn(NamedTuple):
    """A row to ask again: its pair now, and the label it has."""

    pair: Pair
    label: LabelRow
    is_own: bool


CanarySample = tuple[list[Drawn], int]
"""The rows drawn, in reading order, and the number of rows that the session would ask."""


class _StoppedError(Exception):
    """A stop was asked for, or a deadline leaves no time for what would come next: asking, or commits alone."""


def _mind_stop(session: Session, num_to_ask: int) -> None:
    session.stop.mind(DRAIN_S if num_to_ask else 0.0)
    if session.stop.reason is not None:
        raise _StoppedError


def _pass_canary(
    engine: Engine, session: Session, drawn: CanarySample | None, facts: EngineFacts, on_progress: Callable[[], None]
) -> dict[str, Any]:
    """Ask the canary's rows, if this engine has not passed here yet, and keep the result next to the labels, in place
    of an earlier one of the same engine. Nothing if a stop came in between.

    Raises:
        GateError: too many grades flipped.
    """
    opened, spec, stop = session.opened, session.opened.job.spec, session.stop
    lock = opened.store.lock("canary", "the canary")
    while True:  # of workers that start together one asks, for minutes; the others use its result
        try:
            lock.acquire()
            break
        except LockHeldError:
            stop.mind(DRAIN_S)
            if stop.reason is not None:
                return {}
            time.sleep(LOCK_RETRY_S)
    try:
        if has_passed(opened.store, asdict(facts), spec.canary, spec.max_flip_rate):
            return {}
        rows, _ = drawn or _draw_canary(session) or ([], 0)
        if not rows:
            return {}
        # without a progress display of its own: no row is shown as in flight
        asked = ask_unwritten(
            opened.job,
            engine,
            [one.pair for one in rows],
            Progress(),
            stop=stop,
            on_progress=on_progress,
            allowance=session.allowance,
        )
        if asked.left:
            return {}
        result = compare(rows, asked.rows, asdict(facts), spec.max_flip_rate, wanted=spec.canary)
        opened.store.put(f"{CANARY_FOLDER}/{digest_of(result.engine)[:16]}.json", sealed_json(asdict(result)))
    finally:
        lock.release()
    if result.flip_rate > result.max_flip_rate:
        raise GateError(
            f"{spec.output}: the canary says no: {result.text}. Old and new labels would be two teachers under one "
            "name, so nothing was committed. Find out what changed in the engine, drop `reuse`, or raise "
            "`max_flip_rate`."
        )
    return {"canary": asdict(result)}


def _draw_canary(session: Session) -> CanarySample | None:
    """Draw rows to ask again: labels that came from elsewhere first, and this output's own only where those are too
    few.

    From elsewhere are the rows that this session would reuse (its open chunks' texts are read once), those of other
    shards where these are fewer than wanted (read until there are enough), and the rows that this output has reused
    already. Own labels fill what is left: most were made by the very engine that is asked, and would show a change as
    smaller than it is. None if a stop came.
    """
    opened, size = session.opened, session.opened.job.spec.canary
    rng = random.Random(f"{opened.plan.fingerprint} {opened.job.spec.engine.seed}")
    try:
        kept, num_to_ask = _known_rows(session, rng, size)
        labels = session.reuse.labels.take([place for _, place in kept])
        rows = [Drawn(pair, label, False) for (pair, _), label in zip(kept, labels, strict=True)]
        for reused in (True, False):
            if len(rows) < size:
                rows += _own_rows(session, rng, size - len(rows), num_to_ask, reused=reused)
        _mind_stop(session, num_to_ask)
    except _StoppedError:
        return None
    return sorted(rows, key=lambda drawn: drawn.pair.row_id), num_to_ask


def _known_rows(session: Session, rng: random.Random, size: int) -> tuple[list[tuple[Pair, RowPlace]], int]:
    """Rows of open chunks that earlier outputs know: up to `size` of them, drawn evenly; and how many rows of the
    session's own chunks they do not know, which it would ask.
    """
    if not session.reuse.outputs:
        return [], session.left.rows_to_ask()
    opened, mine, kept = session.opened, set(session.shards), list[tuple[Pair, RowPlace]]()
    num_known = num_to_ask = 0
    others = [shard for shard in range(len(opened.plan.shards)) if shard not in mine]
    rng.shuffle(others)
    chunks = (
        (shard, pairs)
        for shard in [*session.shards, *others]
        if shard in mine or num_known < size
        for _, pairs in opened.read(shard, opened.folder.pending(shard))
    )
    for shard, pairs in chunks:
        if shard not in mine and num_known >= size:
            break
        _mind_stop(session, num_to_ask)
        for pair, place in zip(pairs, session.reuse.find(pairs, session.keys.keys(pairs)), strict=True):
            if place is None:
                num_to_ask += shard in mine
                continue
            num_known += 1
            if len(kept) < size:
                kept.append((pair, place))
            elif (at := rng.randrange(num_known)) < size:
                kept[at] = pair, place
    return kept, num_to_ask


def _own_rows(session: Session, rng: random.Random, most: int, num_to_ask: int, *, reused: bool) -> list[Drawn]:
    """Rows of this output that were reused, or that were not, with their pairs: `most` of them, drawn evenly."""
    folder, files = session.opened.folder, list[tuple[Receipt, FileRef]]()
    for shard in range(len(session.opened.plan.shards)):
        _mind_stop(session, num_to_ask)
        attempts = itertools.chain.from_iterable(folder.chunk_receipts(shard))
        files += [(one, one.labels) for one in attempts if one.labels is not None]
    counts = [one.rows_reused if reused else labels.rows - one.rows_reused for one, labels in files]
    ends = np.cumsum([0, *counts])
    wanted = np.array(sorted(rng.sample(range(ends[-1]), min(most, int(ends[-1])))))
    labels_of, ids = dict[int, LabelRow](), dict[int, dict[int, set[int]]]()
    places = np.searchsorted(ends, wanted, side="right") - 1
    for place in np.unique(places).tolist():
        _mind_stop(session, num_to_ask)
        receipt, file = files[place]
        table = read_labels(folder, file)
        of_kind = np.flatnonzero(table["reused"].to_numpy() == reused)
        found = {row.row_id: row for row in label_rows(table.take(of_kind[wanted[places == place] - ends[place]]))}
        labels_of |= found
        ids.setdefault(receipt.shard, {}).setdefault(receipt.chunk, set()).update(found)
    rows: list[Drawn] = []
    for shard, chunks in ids.items():
        for _, pairs in session.opened.read(shard, sorted(chunks), wanted=chunks):
            _mind_stop(session, num_to_ask)
            rows += [Drawn(pair, labels_of[pair.row_id], not reused) for pair in pairs]
    return rows


def compare(
    drawn: list[Drawn],
    now: list[LabelRow | QuarantineRow | None],
    engine: dict[str, Any],
    max_flip_rate: float,
    *,
    wanted: int = 0,
) -> CanaryResult:
    """Hold new rows against the labels that they had; in the same order, at least one."""
    read = [(one.label, row) for one, row in zip(drawn, now, strict=True) if isinstance(row, LabelRow)]
    flips = len(drawn) - len(read) + sum(row.grade != label.grade for label, row in read)
    divergences = [
        math.fsum(p * math.log(max(p, _FLOOR) / max(q, _FLOOR)) for p, q in zip(old, row.probs, strict=True) if p > 0)
        for label, row in read
        if row.probs is not None and (old := label.probs) is not None
    ]
    share, size = np.array(flips / len(drawn)), np.array(len(drawn))
    low, high = (round(float(wilson(share, size, side)), 6) for side in (-1, 1))
    return CanaryResult(
        engine_identity(engine),
        rows=len(drawn),
        own=sum(one.is_own for one in drawn),
        flips=flips,
        unreadable=len(drawn) - len(read),
        flip_rate=round(flips / len(drawn), 6),
        low=low,
        high=high,
        mean_kl=round(math.fsum(divergences) / len(divergences), 6) if divergences else None,
        max_flip_rate=max_flip_rate,
        wanted=wanted,
    )


# ------------------------------------------------------------------------------
# How fast a model answered a labeler's asks on this device, and how long its answers were: kept in the user's cache
# from its last run or probe. Only estimates read it, so a file that can't be used is ignored with a remark.


PROBE_HINT = "`relabel plan --probe` asks a few rows"
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Rates:
    """Measurements of one run or probe.

    Args:
        key: what they hold for, in full; the file's name is its digest.
        measured: when it ended.
        dtype: in the words of the engine's facts.
        rows: asked, in so many seconds.
        stages: asks and tokens of each.
    """

    key: dict[str, Any]
    source: Literal["run", "probe"]
    measured: str
    dtype: str
    rows: Positive
    seconds: Positive
    stages: dict[str, StageSeen]
    version: Literal[2] = 2

    @property
    def basis(self) -> str:
        """The source of a figure, in words."""
        what = "this model's last run on this device" if self.source == "run" else "a probe"
        return f"{what} ({self.rows:,.0f} rows, {self.measured[:16].replace('T', ' ')} UTC)"


def keep_rates(
    opened: OpenRun, facts: EngineFacts, progress: Progress, *, source: Literal["run", "probe"]
) -> Rates | None:
    """The rates of work that has just ended, kept for later estimates in place of earlier ones; a probe's never replace
    a run's. None where no row was asked. A cache that can't be written ends no run.
    """
    seconds, stages = time.perf_counter() - progress.started_s, dict(progress.stages_seen)
    if not progress.pairs or not any(seen.prompt_tokens for seen in stages.values()):
        return None
    key, path = _kept_for(opened)
    measured = datetime.now(UTC).isoformat(timespec="seconds")
    rates = Rates(key, source, measured, facts.dtype, progress.pairs, seconds, stages)
    held = load_rates(opened)[0] if source == "probe" else None
    if path is not None and (held is None or held.source == "probe"):
        with contextlib.suppress(RelabelError):
            write_json(path, asdict(rates))
    return rates


def load_rates(opened: OpenRun) -> tuple[Rates | None, str]:
    """The rates of this job's model, labeler and device, and their source; where there are none, why, in words."""
    engine, (_, path) = opened.job.spec.engine, _kept_for(opened)
    if engine.args.sends_batches:
        return None, "batches are answered hours later, at no rate of their own"
    if path is None:
        return None, f"rates of engine {engine.name} are not kept; {PROBE_HINT}"
    try:
        rates = checked(Rates, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None, f"no run of this model on this device is known; {PROBE_HINT}"
    except (OSError, ValueError) as exc:
        return None, f"{path} can't be used ({fault_of(exc)})"
    dtype = options_begun_with(opened.job, opened.store).get("dtype", rates.dtype)
    if dtype not in rates.dtype:  # which may name a quantization, too
        return None, f"the last run here was in {rates.dtype}, and this output is in {dtype}"
    return rates, rates.basis


def _kept_for(opened: OpenRun) -> tuple[dict[str, Any], Path | None]:
    """What rates hold for (model, engine with all that changes its speed, device, labeler), and their file; None where
    there is no model whose rates would be worth keeping, or where answers come hours later.
    """
    engine = opened.job.spec.engine
    key = {
        "model": opened.plan.facts.model,
        "engine": {
            "name": engine.name,
            "args": engine.args.model_dump(mode="json", exclude={"cache_dir", *PaidByToken.__annotations__}),
            "chat_template_kwargs": {key: one for key, one in engine.chat_template_kwargs.items() if key != DAY},
        },
        "device": device_names(),
        "labeler": opened.job.spec.labeler.name,
    }
    if not isinstance(engine.args, KeepsModels) or engine.args.sends_batches:
        return key, None
    folder = Path(engine.args.cache_dir) if engine.args.cache_dir else default_cache_dir()
    return key, folder / "rates" / f"{digest_of(key)[:32]}.json"


# ------------------------------------------------------------------------------
# The estimate of a run before it starts: sampled tokens times the rates of the last run or a probe.

CHEAP_BYTES = 256 << 20
"""Up to so much text, reused rows are counted by their keys: a second or two of hashing."""
PLACES, ROWS = 16, 16
"""Neighbouring rows of the sample, as a run asks them, and at how many places."""
PROBE_PLACES, PROBE_ROWS = 2, 8
"""Likewise of a probe: they fill a batch on a CPU, and cost it minutes at most."""
DEFAULT_OUTPUT_SHARE = Range(0.02, 0.25, 1.0)
"""Of a stage's token cap that an answer takes, where no run has measured it."""
OTHER_ROWS = Range(1 / 1.2, 1.0, 1.2)
"""How far other rows' prompts and answers may be off, beyond chance."""
OTHER_TIMES = Range(1 / 1.6, 1.0, 1.6)
"""How far rates may be off: a machine is busier at one time than at another, and batches are fuller."""


def estimate_run(opened: OpenRun, probe: Callable[[], Rates | None] | None = None) -> dict[str, Any]:
    """What the open rows of a run will take, as the result of `plan` has it; each figure is low, expected and high.
    `seconds` are of one worker, without the engine's start, None where no rate is known; `cost` is those at
    `cost_per_gpu_hour`, and tokens at the engine's prices; `basis` names the source of each figure.

    Args:
        probe: measures the engine's rates.
    Raises:
        InputError: a text of the sample can't be read.
    """
    outputs, done = earlier_outputs(opened.job), opened.folder.attempts_of_all()
    pending = {
        number: [chunk for chunk in range(len(shard.chunks)) if chunk not in done.get(number, {})]
        for number, shard in enumerate(opened.plan.shards)
    }
    rows = sum(opened.plan.shards[number].chunks[chunk] for number, chunks in pending.items() for chunk in chunks)
    reused, reused_by = _reused(opened, outputs, pending, rows)
    asked = Range(rows - reused.high, rows - reused.value, rows - reused.low)
    rates, known_from = load_rates(opened)
    if probe is not None and asked.high and (measured := probe()) is not None:
        rates, known_from = measured, measured.basis
    asks, prompt, output = _tokens_a_row(opened, rates) if asked.high else (Range.exact(0.0),) * 3
    prompt, output = asked * prompt, asked * output
    seconds = None if asked.high else Range.exact(0.0)
    if asked.high and rates is not None:
        measured_tokens = sum(seen.prompt_tokens + seen.output_tokens for seen in rates.stages.values())
        seconds = (prompt.plus(output) * (rates.seconds / measured_tokens) * OTHER_TIMES).rounded(3)
    return {
        "rows": rows,
        "rows_reused": reused.rounded(),
        "rows_asked": asked.rounded(),
        "asks": (asked * asks).rounded(),
        "prompt_tokens": prompt.rounded(),
        "output_tokens": output.rounded(),
        "seconds": seconds,
        "cost": _cost(opened.job.spec, seconds, prompt, output),
        "basis": {
            "rows_reused": reused_by,
            "tokens": "a sample of the rows",
            "output_tokens": known_from if rates else "2 to 100 % of each stage's cap",
            "seconds": known_from,
        },
        "reuse": [
            *(_remark(opened, earlier) for earlier in outputs),
            *([] if opened.cascade is None else [opened.cascade.certificate.text]),
        ],
    }


def _reused(
    opened: OpenRun, outputs: list[EarlierOutput], pending: dict[int, list[int]], rows: int
) -> tuple[Range, str]:
    """Rows whose labels are known: counted by their keys if that is cheap, else as many as may be."""
    useful = [earlier for earlier in outputs if not why_nothing(earlier, opened.plan.parts)]
    cascade = opened.cascade
    if not useful and cascade is None:
        return Range.exact(0.0), "no reused output was made in this way" if outputs else "nothing to reuse"
    if opened.plan.text_bytes > CHEAP_BYTES:
        known = sum(one.found.tally.labelled + one.found.tally.reused for one in useful)
        known += 0 if cascade is None else round(rows * cascade.certificate.cheap_share)
        return Range(0.0, min(rows, known), min(rows, known)), "not counted: the text is larger than 256 MiB"
    reuse, keys = Reuse(opened.job, opened.plan, useful), LabelKeys(opened.plan.parts, opened.job.reads)
    count = 0
    for number, chunks in pending.items():
        for _, pairs in opened.read(number, chunks):
            is_known_N = np.array([place is not None for place in reuse.find(pairs, keys.keys(pairs))])
            count += int((is_known_N | (cascade is not None and cascade.places(pairs)[1] == "cheap")).sum())
    return Range.exact(count), "counted"


def _tokens_a_row(opened: OpenRun, rates: Rates | None) -> tuple[Range, Range, Range]:
    """Asks, prompt tokens and output tokens of a row, from a sample of the rows that is asked with made-up answers.

    What rows of a query share is asked once a query, and counts by the plan's queries. Repeated attempts and the length
    of answers are those of the last run or probe.
    """
    job, plan = opened.job, opened.plan
    measured = {} if rates is None else rates.stages
    engine = _CountingEngine(job)
    found = list[tuple[float, float, Range]]()
    for pairs in _sampled(opened, PLACES, ROWS):
        progress = Progress()
        ask_unwritten(job, engine, pairs, progress)
        asks, prompt, output = 0.0, 0.0, Range.exact(0.0)
        for ask in job.labeler.probe():
            seen, before = progress.stages_seen[ask.stage], measured.get(ask.stage)
            share = 1 / len(pairs)
            if ask.shared_by is not None:
                share = plan.queries / plan.rows / len({pair.query_id for pair in pairs})
            length = DEFAULT_OUTPUT_SHARE * ask.max_tokens if ask.max_tokens else Range(0.0, 1.0, 1.0)
            if before is not None:
                share *= before.answers / max(1, before.first_attempts)
                length = OTHER_ROWS * (before.output_tokens / max(1, before.answers))
            asks += seen.answers * share
            prompt += seen.prompt_tokens * share
            output = output.plus(length * (seen.answers * share))
        found.append((asks, prompt, output))
    asks_by_place, prompts_by_place, outputs = zip(*found, strict=True)
    total = functools.reduce(Range.plus, outputs)
    return _mean(asks_by_place), _mean(prompts_by_place) * OTHER_ROWS, total * (1 / len(found))


def _mean(values: Sequence[float]) -> Range:
    """A mean, with two standard errors to both sides."""
    mean = statistics.fmean(values)
    error = 2 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return Range(max(0.0, mean - error), mean, mean + error)


class _CountingEngine(Fake):
    """Answers as the fake engine does, with prompt tokens as the job's engine counts them; characters over four where
    it can't count here.
    """

    def __init__(self, job: Job) -> None:
        made_up = {"name": "fake", "model": None, "args": FakeArgs(), "max_prompt_tokens": 1 << 24}
        super().__init__(job.spec.engine.model_copy(update=made_up))
        self._tokens: dict[int, int] = {}
        counter_class = engine_class(job.spec.engine.name)
        self._count: Callable[[Ask], int] = lambda ask: sum(len(message.text) for message in ask.messages) // 4
        with contextlib.suppress(MissingExtraError, ModelError):
            self._count = counter_class.token_counter(job.spec.engine, overlong=job.spec.input.overlong)

    def submit(self, request: Request) -> None:
        self._tokens[request.id] = self._count(request.ask)
        super().submit(request)

    def poll(self) -> list[Answer]:
        return [replace(one, prompt_tokens=self._tokens.pop(one.request_id)) for one in super().poll()]


def _sampled(opened: OpenRun, places: int, rows: int) -> Iterator[list[Pair]]:
    """Neighbouring rows at some places that the plan's fingerprint draws; of a labeler that reads whole queries, the
    first whole queries of some chunks.
    """
    rng, plan = random.Random(opened.plan.fingerprint), opened.plan
    is_whole = opened.dataset.reads.whole_query
    if is_whole:
        chunks = [(shard, number) for shard in plan.shards for number in range(len(shard.chunks))]
        drawn = rng.sample(chunks, min(places, len(chunks)))
        numbers = [chunk_row_ids(opened.store, shard)[number].tolist() for shard, number in drawn]
    else:
        each = min(rows, max(1, plan.rows // places))
        firsts = sorted(rng.sample(range(plan.rows // each), min(places, plan.rows // each)))
        numbers = [list(range(first * each, (first + 1) * each)) for first in firsts]
    pairs = pairs_by_number(opened.dataset, list(itertools.chain.from_iterable(numbers)))
    for place in numbers:
        found = list(itertools.islice(pairs, len(place)))
        ends = (number for number in range(rows, len(found)) if found[number].query_id != found[number - 1].query_id)
        yield found[: next(ends, None)] if is_whole else found


def _cost(spec: JobSpec, seconds: Range | None, prompt: Range, output: Range) -> Range | None:
    """Of GPUs by the hour and tokens by the million, as far as there are prices; None where there is none, or where the
    hours are not known.
    """
    parts, args = list[Range](), spec.engine.args
    if spec.cost_per_gpu_hour is not None:
        if seconds is None:
            return None
        parts.append(seconds * (gpus_of(args) * spec.cost_per_gpu_hour / 3600))
    prices = (prompt, price_of(args, 1_000_000, 0)), (output, price_of(args, 0, 1_000_000))
    parts += [tokens * (price / 1e6) for tokens, price in prices if price is not None]
    return functools.reduce(Range.plus, parts).rounded(6) if parts else None


def _remark(opened: OpenRun, earlier: EarlierOutput) -> str:
    """What a reused output can give, in a sentence."""
    differences = why_nothing(earlier, opened.plan.parts)
    if not differences:
        tally = earlier.found.tally
        return f"{earlier.path}: {tally.labelled + tally.reused:,} labels made in the same way"
    shown = {part: names for part, names in differences.items() if part != "stages" or len(differences) == 1}
    what = "; ".join(f"{part} ({', '.join(names)})" for part, names in shown.items())
    text = f"{earlier.path}: 0 rows reused, another {what}"
    if "schema" in differences:
        return text
    changed = stages_changed(earlier.plan.parts, opened.plan.parts)
    shared = {ask.stage for ask in opened.job.labeler.probe() if ask.shared_by is not None}
    kept = sorted(shared - set(changed)) if earlier.found.answers else []
    asked = [stage for stage in opened.plan.parts["stages"] if stage not in kept]
    return f"{text}; asked again: {', '.join(asked)}" + (f"; kept: {', '.join(kept)}" if kept else "")


def estimate_text(found: Mapping[str, Any]) -> str:
    """An estimate as people read it, a line for each figure, with 95 % intervals."""
    basis, seconds, cost = found["basis"], found["seconds"], found["cost"]
    tokens = f"{_shown(found['prompt_tokens'])} in, {_shown(found['output_tokens'])} out"
    took = "not known" if seconds is None else f"{_shown(seconds, 1)} of one worker"
    return grid(
        [
            ("reused", f"{_shown(found['rows_reused'])} of {found['rows']:,} open rows ({basis['rows_reused']})"),
            ("asked", f"{_shown(found['rows_asked'])} rows, {_shown(found['asks'])} asks"),
            ("tokens", f"{tokens} (prompts by {basis['tokens']}; answers by {basis['output_tokens']})"),
            ("seconds", f"{took} ({basis['seconds']})"),
            *([] if cost is None else [("cost", f"{_shown(cost, 2)} at the price given")]),
            *(("reuse", remark) for remark in found["reuse"]),
        ]
    )


def _shown(found: Range, digits: int = 0) -> str:
    value = f"{found.value:,.{digits}f}"
    return value if found.low == found.high else f"{value} ({found.low:,.{digits}f} to {found.high:,.{digits}f})"


def probe_rates(opened: OpenRun, *, say: Callable[[str], None]) -> Rates | None:
    """Ask a few rows, keep their rates in the cache, and write nothing else.

    Raises:
        UsageError: the engine hands asks over as batches.
        InputError, ModelError, MissingExtraError, EngineCrashError: as a run does.
    """
    if opened.job.spec.engine.args.sends_batches:
        raise UsageError("--probe: batches (engine.args.batch) are answered hours later. Leave one of the two out.")
    pairs = list(itertools.chain.from_iterable(_sampled(opened, PROBE_PLACES, PROBE_ROWS)))
    job = opened.job.with_args(options_begun_with(opened.job, opened.store))
    engine, remarks = start_engine(job)
    try:
        facts = engine.facts()
        for line in (*remarks, f"probe: {len(pairs):,} rows; {engine_text(job.spec.labeler.name, facts)}"):
            say(line)
        progress = Progress()  # its clock begins when the engine is there
        ask_unwritten(job, engine, pairs, progress)
        return keep_rates(opened, facts, progress, source="probe")
    finally:
        engine.close()


# ------------------------------------------------------------------------------
# A plan in a table.


def plan_text(opened: OpenRun, chunks_open: int, budget: BudgetState | None) -> str:
    """A plan as `plan` shows it: rows, queries, shards, chunks, and what of the budget is gone."""
    found: Plan = opened.plan
    left_out = opened.dataset.left_out
    sizes = [shard.rows for shard in found.shards]
    interval = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
    lies = (
        f"scattered: shards carry row ids, and together read {found.read_ratio:.1f} times the data"
        if found.is_scattered
        else f"together: shards are row ranges (reads: {found.read_ratio:.2f} times the data)"
    )
    return (
        f"{found.name}: {'planned' if opened.was_planned_now else 'planned earlier'}, "
        f"{opened.job.spec.output}/plan.json\n"
    ) + grid(
        [
            ("rows", f"{found.rows:,} in {counted(len(found.files), 'file')}"),
            *([("table", _table_text(opened.dataset.table))] if opened.dataset.table else []),
            *([("left out", left_out_text(left_out))] if left_out else []),
            *(("prompts say", f"{day}, the day of the plan") for day in template_days(opened)),
            ("queries", f"{found.queries:,}, {lies}"),
            ("shards", f"{len(sizes):,} of {interval} rows"),
            ("chunks", f"{found.num_chunks:,}, {chunks_open:,} open"),
            *([("budget", budget.text)] if budget is not None else []),
            ("fingerprint", found.fingerprint[:16]),
        ]
    )


def template_days(opened: OpenRun) -> list[str]:
    """The day that prompts say by their chat template, if it says one."""
    return list(day_of(opened.job.spec.engine.chat_template_kwargs).values())


def _table_text(table: TableSnapshot) -> str:
    since = "" if table.since is None else f", rows added since {table.since}"
    when = "" if table.committed is None else f" of {table.committed:%Y-%m-%dT%H:%M:%SZ}"
    moved = "" if table.snapshot == table.latest else f" (the table is at {table.latest} now)"
    return f"{table.format}, {table.folder}, snapshot {table.snapshot}{when}{since}{moved}"


def table_json(table: TableSnapshot | None) -> dict[str, str | None] | None:
    """A snapshot as the result of `plan` has it."""
    if table is None:
        return None
    when = None if table.committed is None else table.committed.isoformat()
    return {**table.identity, "path": table.folder, "committed": when, "latest": str(table.latest)}
