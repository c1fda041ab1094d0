"""The commands `status` and `verify`: the state of an output and its workers, read without changing it."""

import shlex
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pyarrow as pa

from relabel.jobs.commands.options import date_option, log_option, output_option
from relabel.jobs.output import Exit, emit, grid
from relabel.jobs.run.batches import BatchesOut, batches_out
from relabel.jobs.run.notices import Stopped, load_stop, load_warnings
from relabel.jobs.run.progress import WorkerState, asked_for, left_s, left_text, live_states
from relabel.jobs.settings import output_of, priced_args
from relabel.manifests.budgets import BudgetState, Range
from relabel.manifests.errors import ConfigError, ManifestError, UsageError
from relabel.manifests.files import Storage, is_url, path_hint
from relabel.manifests.labels import ANSWERS
from relabel.manifests.plan import PLAN_NAME, Fates, FileRef, template_name
from relabel.manifests.records import LEFT_OUT, as_object, plain, sha256_bytes
from relabel.manifests.run_folder import RunFolder, open_planned
from relabel.manifests.run_manifest import CascadeAudit, load_manifest
from relabel.manifests.secrets import counted, redacted
from relabel.manifests.specs import EngineArgs, RunSpec, price_of, validate_spec
from relabel.manifests.store import read_if_there, shard_lock_name

# ------------------------------------------------------------------------------
# How far a run has come.


SHARDS_SHOWN = 20


@dataclass(frozen=True)
class ShardStatus:
    """A shard; `state` is `done`, `running` (a worker holds it) or `open`."""

    shard: int
    rows: int
    chunks: int
    chunks_done: int
    state: str


@dataclass(frozen=True, kw_only=True)
class StatusResult:
    """How far a run has come.

    Args:
        over_limit: of quarantined rows; None before there is a manifest.
        batches: with the provider; the next run looks for them.
        stages: of asks, with their tokens.
        cost: in money, of the tokens of what is committed and of `lost/`; None where no price is known.
        cost_in_vain: the part of it that is for `lost/`: answers that no label came of.
        kept: answers in the journal of chunks that are not committed; the same engine is not asked for them again.
        stopped: why the last execution ended early; None where it did not.
    """

    name: str
    output: str
    fingerprint: str
    rows: int
    rows_done: int
    labelled: int
    reused: int
    quarantined: int
    quarantined_by_status: Mapping[str, int]
    chunks: int
    chunks_done: int
    is_finished: bool
    over_limit: bool | None
    kept: int
    batches: BatchesOut | None
    stages: dict[str, dict[str, int]]
    budget: BudgetState | None
    cost: float | None
    cost_in_vain: float | None
    cascade: CascadeAudit | None = field(metadata=LEFT_OUT)
    stopped: Stopped | None
    warnings: list[str]
    shards: list[ShardStatus]

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        return as_object(self)

    def lines(self) -> list[str]:
        """The result for people."""
        state = "finished" if self.is_finished else "not finished"
        if self.over_limit:
            state = "over the quarantine limit"
        quarantined = f"{self.quarantined:,}"
        if self.quarantined_by_status:
            by_status = sorted(self.quarantined_by_status.items())
            quarantined += f" ({', '.join(f'{count:,} {name}' for name, count in by_status)})"
        rows = [
            ("rows", f"{self.rows_done:,} of {self.rows:,} done"),
            ("labelled", f"{self.labelled:,}"),
            ("kept", f"{counted(self.kept, 'answer')} more, not asked again by the same engine" * bool(self.kept)),
            ("batches", "" if self.batches is None else self.batches.text),
            ("reused", f"{self.reused:,}"),
            ("quarantined", quarantined),
            ("chunks", f"{self.chunks_done:,} of {self.chunks:,}"),
        ]
        if self.budget is not None:
            rows.append(("budget", self.budget.text))
        if self.cost is not None and (self.budget is None or self.budget.max_cost is None):
            whose = "for the tokens of what is committed"
            if self.cost_in_vain:
                whose = f"with {self.cost_in_vain:,.4f} for answers that no label came of"
            rows.append(("cost", f"{self.cost:,.4f} in money {whose}"))
        if self.cascade is not None:
            rows.append(("cascade", self.cascade.text))
        if self.stopped is not None:
            rows.append(("stopped", self.stopped.text))
        rows += [("warning", warning) for warning in self.warnings]
        rows += self._shard_rows()
        return [f"{self.name}: {state}, {self.output}", grid([(name, text) for name, text in rows if text])]

    def _shard_rows(self) -> list[tuple[str, str]]:
        """How many shards are done, and the first that are not."""
        undone = [shard for shard in self.shards if shard.state != "done"]
        rows = [("shards", f"{len(self.shards) - len(undone):,} of {len(self.shards):,} done")]
        for shard in undone[:SHARDS_SHOWN]:
            rows.append((f"  shard {shard.shard}", f"{shard.state}, {shard.chunks_done:,} of {shard.chunks:,} chunks"))
        if len(undone) > SHARDS_SHOWN:
            rows.append(("  …", f"{len(undone) - SHARDS_SHOWN:,} more open"))
        return rows


def read_status(folder: RunFolder, spec: Mapping[str, Any] | None) -> StatusResult:
    """How far a run has come, from receipts and locks.

    Args:
        spec: plain values of the job, for its prices and its budget; without them those of the manifest count.
    Raises:
        ManifestError: one of a run's files is damaged.
    """
    plan = folder.plan
    manifest = load_manifest(folder.store)
    snapshot = folder.snapshot(manifest=manifest)
    tally = snapshot.tally
    spec = spec or (manifest.spec if manifest else {})
    args = priced_args(spec.get("engine"))
    is_finished = manifest is not None and manifest.receipts_sha256 == snapshot.digest
    limits = _limits_of(spec)
    is_counted = args is not None or limits is not None
    lost = asked_for(folder.lost_receipts() if is_counted else ())
    in_vain = (lost["prompt_tokens"], lost["output_tokens"])
    spent = (tally.tokens[0] + in_vain[0], tally.tokens[1] + in_vain[1])
    return StatusResult(
        name=plan.name,
        output=folder.store.root,
        fingerprint=plan.fingerprint,
        rows=plan.rows,
        rows_done=tally.rows,
        labelled=tally.labelled,
        reused=tally.reused,
        quarantined=tally.num_quarantined,
        quarantined_by_status=tally.quarantined,
        chunks=plan.num_chunks,
        chunks_done=tally.chunks_done,
        is_finished=is_finished,
        over_limit=manifest.over_limit if manifest else None,
        kept=0 if is_finished else _num_kept(folder, snapshot.etags),
        batches=None if is_finished else batches_out(folder.store),
        stages=tally.stages,
        budget=None if limits is None else _budget_of(limits, args, spent),
        cost=None if args is None else price_of(args, *spent),
        cost_in_vain=None if args is None else price_of(args, *in_vain),
        cascade=manifest.cascade if manifest and is_finished else _audit_of(folder, snapshot.labels),
        stopped=None if is_finished else load_stop(folder.store),
        warnings=load_warnings(folder.store),
        shards=_shards_of(folder, snapshot.etags),
    )


def _limits_of(spec: Mapping[str, Any]) -> RunSpec | None:
    """The section of a job that has its budget; None where it has none."""
    try:
        run = validate_spec(RunSpec, spec.get("run") or {}, where="run")
    except ConfigError:  # of a job file that `run` refuses
        return None
    has_budget = run.max_tokens is not None or run.max_cost is not None
    return run if has_budget else None


def _budget_of(limits: RunSpec, args: EngineArgs | None, tokens: tuple[int, int]) -> BudgetState:
    """What is spent of the job's budget.

    Args:
        tokens: prompt and output tokens of what is committed, and of what was lost.
    """
    from relabel.jobs.run.allowance import charge_of

    spent = charge_of(args, *tokens)
    return BudgetState(limits.max_tokens, limits.max_cost, spent.tokens, round(spent.cost, 9))


def _num_kept(folder: RunFolder, etags: Mapping[str, str]) -> int:
    """Answers in the journal of chunks that are not committed."""
    from relabel.jobs.run.answer_journal import num_kept  # with what labels chunks, which a finished run does without

    return num_kept(folder.store, folder.plan.fingerprint, folder.attempts_of_all(etags))


def _audit_of(folder: RunFolder, labels: Sequence[FileRef]) -> CascadeAudit | None:
    """What a cascade's labels lose; None for a run without one."""
    if folder.plan.parts.get("cascade") is None:
        return None
    from relabel.manifests.cascade import audit_of

    return audit_of(folder, labels)


def _shards_of(folder: RunFolder, etags: Mapping[str, str]) -> list[ShardStatus]:
    attempts = folder.attempts_of_all(etags)
    shards = []
    for number, shard in enumerate(folder.plan.shards):
        chunks_done = len(attempts.get(number, ()))
        state = "done"
        if chunks_done < len(shard.chunks):
            state = "running" if folder.store.is_locked(shard_lock_name(number)) else "open"
        shards.append(
            ShardStatus(
                shard=number,
                rows=shard.rows,
                chunks=len(shard.chunks),
                chunks_done=chunks_done,
                state=state,
            )
        )
    return shards


# ------------------------------------------------------------------------------
# `status --live`: follows a run by its receipts and by what its workers say of themselves.


@dataclass(frozen=True)
class WorkerStatus:
    """A worker, and how long ago it said so, in seconds; `is_stale`: longer than one that works would take."""

    age_s: float
    is_stale: bool
    state: WorkerState

    def lines(self) -> list[str]:
        """The worker for people."""
        state = self.state
        seconds = max(state.seconds, 1e-9)
        age = f"{self.age_s:,.0f} s ago"
        if self.is_stale:
            age = f"stale, last heard of {age}: it is gone, or its engine has been at one step since"
        lines = [
            f"  {state.worker} ({age}): {counted(state.pairs, 'pair')}, {state.live.in_flight:,} in flight, "
            f"{state.live.answers_text()} · {state.prompt_tokens / seconds:,.0f} prompt + "
            f"{state.output_tokens / seconds:,.0f} output tokens/s"
        ]
        if state.live.last_refused is not None:
            lines.append(f"    last refused: {state.live.last_refused.line()}")
        return lines


@dataclass(frozen=True, kw_only=True)
class LiveStatus:
    """A run at one moment.

    Args:
        is_held: a worker is at a shard, whether it has said anything yet or not.
        left_s: seconds until all rows are done, at the workers' rate; None where that is not known.
    """

    name: str
    output: str
    rows: int
    rows_done: int
    chunks: int
    chunks_done: int
    is_held: bool
    workers: list[WorkerStatus]
    left_s: Range | None

    @property
    def is_done(self) -> bool:
        """Every chunk is committed."""
        return self.chunks_done == self.chunks

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        return as_object(self)

    def lines(self) -> list[str]:
        """The result for people."""
        state = "no worker: run the same command again"
        if self.is_done:
            state = "every chunk is committed"
        elif self.is_held:
            state = f"ETA {left_text(self.left_s)}"
        lines = [
            f"{self.name}: {self.rows_done:,} of {self.rows:,} rows committed, {self.chunks_done:,} of "
            f"{self.chunks:,} chunks · {state} · {self.output}"
        ]
        for worker in self.workers:
            lines += worker.lines()
        if self.is_held and not self.workers:
            lines.append("  a worker holds shards and has said nothing yet: its engine is starting")
        return [redacted("\n".join(lines))]


def look(folder: RunFolder) -> LiveStatus:
    """The state of a run now: from one listing of receipts, the live files, and locks where these prove no worker."""
    plan = folder.plan
    attempts = folder.attempts_of_all()
    rows_done = 0
    for shard, chunks in attempts.items():
        rows_done += sum(plan.shards[shard].chunks[chunk] for chunk in chunks)
    states = live_states(folder.store)
    heard = [state for state in states if not state.is_stale]
    pairs = sum(state.pairs for state in heard)
    seconds = max((state.seconds for state in heard), default=0.0)
    return LiveStatus(
        name=plan.name,
        output=folder.store.root,
        rows=plan.rows,
        rows_done=rows_done,
        chunks=plan.num_chunks,
        chunks_done=sum(map(len, attempts.values())),
        is_held=bool(heard) or _has_locked_shard(folder, attempts),
        workers=[WorkerStatus(round(max(0.0, state.age_s), 1), state.is_stale, state) for state in states],
        left_s=left_s(pairs + plan.rows - rows_done, pairs, seconds),
    )


def _has_locked_shard(folder: RunFolder, attempts: Mapping[int, Collection[int]]) -> bool:
    """Whether a worker holds a shard that has chunks to do."""
    for number, shard in enumerate(folder.plan.shards):
        is_open = len(attempts.get(number, ())) < len(shard.chunks)
        if is_open and folder.store.is_locked(shard_lock_name(number)):
            return True
    return False


# ------------------------------------------------------------------------------
# `status` and `verify`: look at an output without touching it.


@click.command(epilog="Example: relabel status out/ecom")
@click.argument("target", metavar="JOB.YAML|OUTPUT")
@click.option(
    "--live",
    is_flag=True,
    help="Follow the run while anybody works on it: what each worker has in flight, was answered and refused, its "
    "tokens/s, and when the run should be done. Exit 20: rows are open and nobody works on them. With --output json: "
    "once.",
)
@date_option
@log_option
@output_option
def status(target: str, live: bool, day: str | None, output: str) -> int:
    """Show what is done, open and quarantined. Reads receipts, and answers kept of open chunks."""
    folder, spec = _opened(target, day)
    if not live:
        return emit(read_status(folder, spec), output)
    is_terminal = sys.stdout.isatty()
    while True:
        moment = look(folder)
        if is_terminal and output == "text":
            click.clear()
        emit(moment, output)
        if moment.is_done:
            return Exit.DONE
        if not moment.is_held:
            return Exit.PARTIAL
        if output == "json":
            return Exit.DONE
        time.sleep(2.0 if is_terminal else 10.0)  # nothing is drawn over in a log


@click.command(epilog="Example: relabel verify out/ecom")
@click.argument("target", metavar="JOB.YAML|OUTPUT|BUNDLE|DEST")
@date_option
@log_option
@output_option
def verify(target: str, day: str | None, output: str) -> int:
    """Prove that no row is lost or doubled, that no committed file changed, and that every label is one.

    Compares multisets of row ids with the plan, each file's sha256 with its receipt, each record (receipts, manifest,
    canary) with its own sha256, and each label with its own distribution.
    Of a bundle, proves that it is what was exported, and of a folder that bundles are pulled to, that the active
    version is what was pulled, byte for byte, without network. Exits 3 at the first fault.
    """
    from relabel.jobs.commands.pull import (  # with rich and HTTP: not for a status
        is_bundle,
        is_destination,
        verify_bundle,
        verify_destination,
    )

    if is_destination(target):
        return verify_destination(Path(target), output)
    if is_bundle(target):
        return verify_bundle(Path(target), output)
    folder, _ = _opened(target, day)
    return emit(verify_run(folder), output)


@dataclass(frozen=True)
class VerifiedRun:
    """A run that was proven whole."""

    name: str
    output: str
    fates: Fates
    num_files: int

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        rows = self.fates.by_kind()
        return {
            "output": self.output,
            "labelled": rows.labelled,
            "reused": rows.reused,
            "quarantined": rows.quarantined,
            "files": self.num_files,
            "rows": rows.in_,
        }

    def lines(self) -> list[str]:
        """The result for people."""
        fates = self.fates
        return [
            f"{self.name}: verified. {fates.rows:,} rows in = {fates.labelled:,} labelled + {fates.reused:,} reused + "
            f"{fates.num_quarantined:,} quarantined, {counted(self.num_files, 'file')} unchanged."
        ]


def verify_run(folder: RunFolder) -> VerifiedRun:
    """Prove a run whole, and that its files say the same.

    Raises:
        ManifestError: it is not; names the first fault.
    """
    labels = _LabelChecks(folder)
    try:
        snapshot, fates = folder.proven_snapshot(labels.add)
    finally:  # of two faults, the one that comes first is named
        labels.check()
    for answers in snapshot.answers:
        folder.table(answers, ANSWERS)
    manifest = load_manifest(folder.store)
    if manifest is None:
        raise ManifestError(
            f"{folder.store.root}: every chunk is committed but the manifest is missing. Run the job again to write it."
        )
    if manifest.plan_sha256 != sha256_bytes(folder.store.read(PLAN_NAME)):
        raise ManifestError(
            f"{folder.store.root}/{PLAN_NAME}: not the plan that the manifest was made of. Restore it from a copy."
        )
    _check_side_records(folder)
    kinds = fates.by_kind()
    is_what_files_hold = (
        manifest.fingerprint == folder.plan.fingerprint
        and manifest.rows == kinds
        and manifest.quarantined_by_status == fates.quarantined
        and manifest.receipts_sha256 == snapshot.digest
        and manifest.labels == snapshot.labels
        and manifest.quarantine == snapshot.quarantine
    )
    if not is_what_files_hold:
        raise ManifestError(
            f"{folder.store.root}/manifest.json: does not say what the files hold (rows {plain(manifest.rows)}, in the "
            f"files {plain(kinds)}). Move it away and run the same command as before (run, retry, score or merge) to "
            "write it again."
        )
    num_files = len(snapshot.labels) + len(snapshot.quarantine) + len(snapshot.answers)
    return VerifiedRun(folder.plan.name, folder.store.root, fates, num_files)


def _check_side_records(folder: RunFolder) -> None:
    """Raise if one of the records that no row hangs on is damaged: what was spent, lost, compared and chosen."""
    for digest in folder.plan.parts.get("templates", {}).values():
        template = read_if_there(folder.store, template_name(digest))
        if template is not None and sha256_bytes(template) != digest:
            raise ManifestError(
                f"{folder.store.root}/{template_name(digest)}: not the template that was planned. Restore it from a "
                "copy, or remove it: no label depends on it."
            )
    from relabel.jobs.job import read_auto
    from relabel.manifests.canaries import load_results

    load_results(folder.store)
    list(folder.lost_receipts())
    read_auto(folder.store)


ROWS_CHECKED = 1 << 16
"""Labels that are checked together: of a file of some hundred rows nearly all of the time goes into the calls."""


class _LabelChecks:
    """Checks that the rows of label files are labels, those of many files together."""

    def __init__(self, folder: RunFolder) -> None:
        self._root = folder.store.root
        self._grades = folder.plan.facts.labeler.grades
        self._waiting: list[tuple[FileRef, pa.Table]] = []
        self._num_rows = 0
        self._guard = threading.Lock()

    def add(self, file: FileRef, table: pa.Table) -> None:
        """Check a file, now or with others; may be called from any thread. Raises as `check`."""
        with self._guard:
            self._waiting.append((file, table.select(["grade", "probs"])))
            self._num_rows += table.num_rows
            is_enough = self._num_rows >= ROWS_CHECKED
        if is_enough:
            self.check()

    def check(self) -> None:
        """Check what waits.

        Raises:
            ManifestError: names the first file at fault, and its fault.
        """
        with self._guard:
            waiting = self._waiting
            self._waiting = []
            self._num_rows = 0
        if not waiting or not _fault_of(pa.concat_tables([table for _, table in waiting]), self._grades):
            return
        for file, table in waiting:
            fault = _fault_of(table, self._grades)
            if fault:
                raise ManifestError(f"{self._root}/{file.path}: holds {fault}.")


def _fault_of(table: pa.Table, grades: int) -> str:
    """What is wrong with rows that are to be labels: no grade, off the scale, invalid probabilities; a grade of a
    labeler that gives none. Empty where nothing is.

    Letters: D rows with a distribution, K grades.
    """
    import numpy as np

    given = table["grade"]
    values = given.to_numpy()
    distributions = table["probs"].combine_chunks().drop_null()
    if not grades:
        if len(distributions) or given.null_count < len(values):
            return "a grade, of a labeler that gives none"
        return ""
    if given.null_count or values.min() < 0 or values.max() >= grades:
        return f"a label without a grade of 0 to {grades - 1}"
    if (distributions.value_lengths().to_numpy() != grades).any():
        return f"a distribution that is not over {grades} grades"
    prob_DK = distributions.flatten().to_numpy(zero_copy_only=False).reshape(-1, grades)
    is_share = np.isfinite(prob_DK).all() and (prob_DK >= 0).all()
    if not is_share or not np.allclose(prob_DK.sum(axis=1, dtype=np.float64), 1, atol=1e-3):
        return "a distribution that does not sum to 1"
    return ""


def _opened(target: str, day: str | None) -> tuple[RunFolder, dict[str, Any] | None]:
    """A run's folder, and the plain values of its job if a job file was given."""
    root = target
    storage = Storage()
    spec = None
    if target.endswith((".yaml", ".yml")) or Path(target).is_file():
        root, storage, spec = output_of(target, day=day)
    elif day is not None:
        raise UsageError(f"--date {day}: {target} is an output, which has no ${{date}}; give its job file.")
    what = f"no {PLAN_NAME} there. Give a job file or the output folder of one that was planned."
    if spec is not None:
        what = f"nothing is planned there yet. Begin with `relabel run {shlex.quote(target)}`."
    elif not is_url(root) and not Path(root).exists():
        what = f"no such folder in {Path.cwd()}.{path_hint(root)}"
    return open_planned(root, storage, ManifestError(f"{root}: {what}")), spec
