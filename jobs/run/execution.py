"""One execution of a job over a session's shards: engine start, canary, run loop and conclusion."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from relabel.jobs.job import start_engine, with_auto_resolved
from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.crashes import ends_hanging
from relabel.jobs.run.estimate import keep_rates
from relabel.jobs.run.loop import IDLE_S, RunLoop, ask_unwritten
from relabel.jobs.run.progress import LiveFile, Progress
from relabel.jobs.run.results import (
    CANARY_FOLDER,
    CanaryResult,
    RunReport,
    StoredBatches,
    conclude,
    has_passed,
    refuse_mixing,
)
from relabel.jobs.run.session import COMMITS_IN_FLIGHT, CommitThreads, Session
from relabel.jobs.run.stop import DRAIN_S, start_unless_stopped
from relabel.manifests.asks import Engine, EngineFacts
from relabel.manifests.errors import EngineCrashError, GateError, LockHeldError, RelabelError, ServerGoneError
from relabel.manifests.labels import LabelRow, Pair, QuarantineRow, label_rows
from relabel.manifests.metrics.metric import wilson
from relabel.manifests.plan import FileRef, Receipt
from relabel.manifests.records import digest_of, sealed_json
from relabel.manifests.reuse import RowPlace, why_nothing
from relabel.manifests.run import engine_identity, engines_differ, read_labels

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
    started, engine_start_s, opened = time.perf_counter(), 0.0, session.opened
    remarks, did, spec = list[str](), dict[str, Any](), opened.job.spec
    live_file = LiveFile(opened.store, session.worker, session.execution, session.progress, stays=session.is_part)

    def turned() -> None:
        on_progress()
        live_file.update()

    try:
        if (
            session.reach()
            and (begun := _begin(session)) is not None
            and (session.allowance is None or session.allowance.begin())
            and (running := start_unless_stopped(session.stop, lambda: _start(session))) is not None
        ):
            session.progress.engine_starts += 1
            chunks, drawn, found = begun
            engine, remarks = running
            engine_start_s = time.perf_counter() - started
            try:
                if session.allowance is not None:
                    session.allowance.uses(engine)
                session.facts = facts = engine.facts()
                remarks = [*found, *remarks, *_reuse_remarks(session, facts)]
                on_engine(facts, remarks)
                if not spec.run.allow_mixed:
                    engines = [*opened.folder.snapshot().engines, asdict(facts)]
                    refuse_mixing(engines, output=spec.output, is_begun=True)
                if spec.canary and not session.is_retry:
                    did |= _pass_canary(engine, session, drawn, facts, turned)
                session.progress.started_s = time.perf_counter()
                if label_chunks := getattr(engine, "label_chunks", None):  # a student labels whole chunks itself
                    label_chunks(
                        chunks, session.commit, progress=session.progress, stop=session.stop, on_progress=turned
                    )
                else:
                    _ask(engine, session, chunks, turned)
                # rows that failed before are no sample of others
                if not session.is_retry and not label_chunks:
                    keep_rates(opened, facts, session.progress, source="run")
            finally:
                engine.close()
            if (costs := engine.costs()) is not None:
                did["costs"] = costs
    except Exception as exc:
        is_fault = not isinstance(exc, RelabelError)
        is_crash = is_fault or isinstance(exc, EngineCrashError)
        session.close(crash=(f"{type(exc).__name__}: {exc}" if is_fault else str(exc)) if is_crash else None)
        raise
    finally:
        session.close()
        live_file.close()
    report = conclude(session)
    report.did |= did
    report.engine_start_s, report.remarks = engine_start_s, remarks
    report.seconds = time.perf_counter() - started
    return report


def _start(session: Session) -> tuple[Engine, list[str]]:
    """Start an engine like the one that began this output."""
    opened, started_s = session.opened, time.perf_counter()
    with ends_hanging(
        lambda: started_s,
        opened.job.spec.run.start_timeout_s,
        what="the engine has not started",
        option="run.start_timeout_s",
    ):
        engine, remarks = start_engine(with_auto_resolved(opened.job, opened.store))
    if opened.job.spec.engine.args.sends_batches:
        engine.use_records(StoredBatches(opened.store))
    return engine, remarks


def _begin(session: Session) -> tuple[Iterator[ChunkWork | None], CanarySample | None, list[str]] | None:
    """Do what needs no engine; None if that was all, or a stop came. Chunks whose rows are all known are committed,
    unless a canary comes first.

    Returns:
        Chunks from the first that has something to ask; the canary's rows; remarks.
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
        return chunks, drawn, remarks
    with CommitThreads(session.commit, session.progress, threads=COMMITS_IN_FLIGHT) as commits:
        for work in chunks:
            session.stop.mind(0.0)  # no answer is waited for: what `END_S` leaves is enough for the commits under way
            if session.stop.reason is not None:
                return None
            if work is None:  # too many shards are open
                commits.settle(wait_for_all=True)
                time.sleep(IDLE_S)
            elif work.left:
                return itertools.chain([work], chunks), drawn, remarks
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
    loop = RunLoop(
        job.labeler,
        job.spec.labeler,
        engine,
        session.commit,
        seed=job.spec.engine.seed,
        progress=session.progress,
        stop=session.stop,
        on_progress=on_progress,
        ask_timeout_s=job.spec.run.ask_timeout_s,
        is_late=job.spec.engine.args.sends_batches,
        journal=session.journal,
        answer_cache=session.reuse.answer_cache,
        allowance=session.allowance,
    )
    try:
        loop.run(chunks)
    except (EngineCrashError, ServerGoneError):
        session.keep_answers(loop.unfinished)
        raise
    session.keep_answers(loop.unfinished)


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
    held = zip((one.label for one in drawn), now, strict=True)
    read = [(label, row) for label, row in held if isinstance(row, LabelRow)]
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
