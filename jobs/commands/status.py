"""The commands `status` and `verify`: the state of an output and its workers, read without changing it."""

from __future__ import annotations

import collections
import contextlib
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from relabel.jobs.commands.options import date_option, log_option, output_option
from relabel.jobs.commands.pull import is_destination, verify_destination
from relabel.jobs.exits import Exit
from relabel.jobs.job import output_of, priced_args, read_auto
from relabel.jobs.output import emit, grid
from relabel.jobs.run.budget import charge_of, charge_of_receipts
from relabel.jobs.run.progress import WorkerState, left_s, left_text, live_states
from relabel.jobs.run.results import load_results
from relabel.manifests.errors import ConfigError, ManifestError, UsageError
from relabel.manifests.files import Storage
from relabel.manifests.plan import PLAN_NAME, template_name
from relabel.manifests.receipts import FileRef
from relabel.manifests.records import plain, sha256_bytes
from relabel.manifests.reuse import audit_of
from relabel.manifests.run import BudgetState, Range, RunFolder, Tally, load_manifest, open_planned
from relabel.manifests.schemas import ANSWERS, LABELS
from relabel.manifests.secrets import counted, redacted
from relabel.manifests.specs import EngineArgs, RunSpec, price_of, validate_spec
from relabel.manifests.store import read_if_there, shard_lock_name

# ------------------------------------------------------------------------------
# How far a run has come.


SHARDS_SHOWN = 20


def _print_status(folder: RunFolder, spec: Mapping[str, Any] | None, output: str) -> int:
    """Print how far a run has come, from receipts and locks.

    Args:
        spec: plain values of the job, for its prices and its budget; without them those of the manifest count.
    Raises:
        ManifestError: one of a run's files is damaged.
    """
    plan, manifest = folder.plan, load_manifest(folder.store)
    found = folder.snapshot(manifest=manifest)
    tally, attempts = found.tally, folder.attempts_of_all(found.etags)
    spec = spec or (manifest.spec if manifest else {})
    args = priced_args(spec.get("engine"))
    budget, cost = _budget(folder, tally, spec, args), None if args is None else price_of(args, *tally.tokens)
    shards = [
        {
            "shard": number,
            "rows": shard.rows,
            "chunks": len(shard.chunks),
            "chunks_done": len(attempts.get(number, ())),
            "state": _state(folder, number, len(attempts.get(number, ()))),
        }
        for number, shard in enumerate(plan.shards)
    ]
    is_finished = manifest is not None and manifest.receipts_sha256 == found.digest
    over_limit = manifest.over_limit if manifest else None
    cascade = manifest.cascade if manifest and is_finished else audit_of(folder, found.labels)
    result = {
        "name": plan.name,
        "output": folder.store.root,
        "fingerprint": plan.fingerprint,
        "rows": plan.rows,
        "rows_done": tally.rows,
        "labelled": tally.labelled,
        "reused": tally.reused,
        "quarantined": tally.num_quarantined,
        "quarantined_by_status": tally.quarantined,
        "chunks": plan.num_chunks,
        "chunks_done": tally.chunks_done,
        "is_finished": is_finished,
        "over_limit": over_limit,
        "stages": tally.stages,
        "budget": plain(budget),
        "cost": cost,
        **({} if cascade is None else {"cascade": plain(cascade)}),
        "shards": shards,
    }
    by_status = ", ".join(f"{count:,} {name}" for name, count in sorted(tally.quarantined.items()))
    state = "over the quarantine limit" if over_limit else "finished" if is_finished else "not finished"
    rows = [
        ("rows", f"{tally.rows:,} of {plan.rows:,} done"),
        ("labelled", f"{tally.labelled:,}"),
        ("reused", f"{tally.reused:,}"),
        ("quarantined", f"{tally.num_quarantined:,}" + (f" ({by_status})" if by_status else "")),
        ("chunks", f"{tally.chunks_done:,} of {plan.num_chunks:,}"),
    ]
    if budget is not None:
        rows.append(("budget", budget.text))
    if cost is not None and (budget is None or budget.max_cost is None):
        rows.append(("cost", f"{cost:,.4f} in money for the tokens of what is committed"))
    if cascade is not None:
        rows.append(("cascade", cascade.text))
    undone = [one for one in shards if one["state"] != "done"]
    rows.append(("shards", f"{len(shards) - len(undone):,} of {len(shards):,} done"))
    rows += [
        (f"  shard {one['shard']}", f"{one['state']}, {one['chunks_done']:,} of {one['chunks']:,} chunks")
        for one in undone[:SHARDS_SHOWN]
    ]
    if len(undone) > SHARDS_SHOWN:
        rows.append(("  …", f"{len(undone) - SHARDS_SHOWN:,} more open"))
    return emit(result, f"{plan.name}: {state}, {folder.store.root}\n" + grid(rows), output)


def _budget(folder: RunFolder, tally: Tally, spec: Mapping[str, Any], args: EngineArgs | None) -> BudgetState | None:
    with contextlib.suppress(ConfigError):  # of a job file that `run` refuses
        run = validate_spec(RunSpec, spec.get("run") or {}, where="run")
        if run.max_tokens is not None or run.max_cost is not None:
            spent = charge_of(args, *tally.tokens).plus(charge_of_receipts(args, folder.lost_receipts()))
            return BudgetState(run.max_tokens, run.max_cost, spent.tokens, round(spent.cost, 9))
    return None


def _state(folder: RunFolder, shard: int, chunks_done: int) -> str:
    """`done`; `running` while a worker holds the shard; else `open`."""
    if chunks_done == len(folder.plan.shards[shard].chunks):
        return "done"
    return "running" if folder.store.is_locked(shard_lock_name(shard)) else "open"


# ------------------------------------------------------------------------------
# `status --live`: follows a run by its receipts and by what its workers say of themselves.


LOOK_EVERY_S = 2.0
LINE_EVERY_S = 10.0
"""Between two looks where nothing is drawn over: in a log."""


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """A worker's state as it is shown; `age_s` since it was written."""

    age_s: float
    is_stale: bool
    state: WorkerState


@dataclass(frozen=True, slots=True)
class LiveStatus:
    """The state of a run at one moment; the fields of the JSON of `status --live` in their order.

    Args:
        chunks_done: committed.
        rows_done: of them.
        is_held: a worker is at a shard, whether it has said anything yet or not.
        left_s: seconds until all rows are done, at the workers' rate: low, middle, high; None until the rate is known.
    """

    name: str
    output: str
    rows: int
    rows_done: int
    chunks: int
    chunks_done: int
    is_held: bool
    workers: list[WorkerLine]
    left_s: Range | None

    @property
    def is_done(self) -> bool:
        return self.chunks_done == self.chunks

    @property
    def exit(self) -> Exit:
        """`PARTIAL` where rows are open and nobody works on them."""
        return Exit.DONE if self.is_done or self.is_held else Exit.PARTIAL


def look(folder: RunFolder) -> LiveStatus:
    """From one listing of receipts, the live files, and locks where these prove no worker."""
    plan, attempts = folder.plan, folder.attempts_of_all()
    rows_done = sum(plan.shards[shard].chunks[chunk] for shard, done in attempts.items() for chunk in done)
    states = [WorkerLine(round(max(0.0, one.age_s), 1), one.is_stale, one) for one in live_states(folder.store)]
    heard = [line.state for line in states if not line.is_stale]
    pairs = sum(state.pairs for state in heard)
    is_open = (number for number, shard in enumerate(plan.shards) if len(attempts.get(number, ())) < len(shard.chunks))
    return LiveStatus(
        name=plan.name,
        output=folder.store.root,
        rows=plan.rows,
        rows_done=rows_done,
        chunks=plan.num_chunks,
        chunks_done=sum(map(len, attempts.values())),
        is_held=bool(heard) or any(folder.store.is_locked(shard_lock_name(number)) for number in is_open),
        workers=states,
        left_s=left_s(pairs + plan.rows - rows_done, pairs, max((one.seconds for one in heard), default=0.0)),
    )


def live_text(found: LiveStatus) -> str:
    """The same as text."""
    if found.is_done:
        state = "every chunk is committed"
    elif found.is_held:
        state = f"ETA {left_text(found.left_s)}"
    else:
        state = "no worker: run the same command again"
    lines = [
        f"{found.name}: {found.rows_done:,} of {found.rows:,} rows committed, {found.chunks_done:,} of "
        f"{found.chunks:,} chunks · {state} · {found.output}"
    ]
    for line in found.workers:
        live, seconds = line.state.live, max(line.state.seconds, 1e-9)
        prompt, output = line.state.prompt_tokens / seconds, line.state.output_tokens / seconds
        age = f"{line.age_s:,.0f} s ago"
        if line.is_stale:
            age = f"stale, last heard of {age}: it is gone, or its engine has been at one step since"
        lines.append(
            f"  {line.state.worker} ({age}): {line.state.pairs:,} pairs, {live.in_flight:,} in flight, "
            f"{live.answers_text()} · {prompt:,.0f} prompt + {output:,.0f} output tokens/s"
        )
        if live.last_refused is not None:
            lines.append(f"    last refused: {live.last_refused.line()}")
    if found.is_held and not found.workers:
        lines.append("  a worker holds shards and has said nothing yet: its engine is starting")
    return "\n".join(lines)


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
    """Show what is done, open and quarantined. Reads receipts alone, so it costs chunks and never rows."""
    folder, spec = _opened(target, day)
    if live:
        return _follow(folder, output)
    return _print_status(folder, spec, output)


@click.command(epilog="Example: relabel verify out/ecom")
@click.argument("target", metavar="JOB.YAML|OUTPUT|DEST")
@date_option
@log_option
@output_option
def verify(target: str, day: str | None, output: str) -> int:
    """Prove that no row is lost or doubled, that no committed file changed, and that every label is one.

    Compares multisets of row ids with the plan, each file's sha256 with its receipt, each record (receipts, manifest,
    canary) with its own sha256, and each label with its own distribution.
    Of a folder that bundles are pulled to, proves that the active version is what was pulled, byte for byte, without
    network. Exits 3 at the first fault.
    """
    if is_destination(target):
        return verify_destination(Path(target), output)
    folder, _ = _opened(target, day)
    found = folder.snapshot(believes_manifest=False)
    fates = folder.prove(found, check_bytes=True)
    for labels in found.labels:
        _check_labels(folder, labels)
    for answers in found.answers:
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
    _check_records(folder)
    kinds = fates.by_kind()
    said = (manifest.fingerprint, manifest.rows, manifest.quarantined_by_status, manifest.receipts_sha256)
    holds = (folder.plan.fingerprint, kinds, fates.quarantined, found.digest)
    if said != holds or (manifest.labels, manifest.quarantine) != (found.labels, found.quarantine):
        raise ManifestError(
            f"{folder.store.root}/manifest.json: does not say what the files hold (rows {plain(manifest.rows)}, in the "
            f"files {plain(kinds)}). Move it away and run the same command as before (run, retry, score or merge) to "
            "write it again."
        )
    files = len(found.labels) + len(found.quarantine) + len(found.answers)
    result = {
        "output": folder.store.root,
        "labelled": kinds.labelled,
        "reused": kinds.reused,
        "quarantined": kinds.quarantined,
        "files": files,
        "rows": kinds.in_,
    }
    sums = (
        f"{fates.rows:,} rows in = {fates.labelled:,} labelled + {fates.reused:,} reused + "
        f"{fates.num_quarantined:,} quarantined"
    )
    text = f"{folder.plan.name}: verified. {sums}, {counted(files, 'file')} unchanged."
    return emit(result, text, output)


def _check_records(folder: RunFolder) -> None:
    """Read the records that no row hangs on: what was spent, lost, compared and chosen.

    Raises:
        ManifestError: one is damaged.
    """
    for digest in folder.plan.parts.get("templates", {}).values():
        kept = read_if_there(folder.store, template_name(digest))
        if kept is not None and sha256_bytes(kept) != digest:
            raise ManifestError(
                f"{folder.store.root}/{template_name(digest)}: not the template that was planned. Restore it from a "
                "copy, or remove it: no label depends on it."
            )
    load_results(folder.store)
    collections.deque(folder.lost_receipts(), maxlen=0)
    read_auto(folder.store)


def _follow(folder: RunFolder, output: str) -> Exit:
    if output == "json":
        found = look(folder)
        emit(plain(found), "", output)
        return found.exit
    is_terminal = sys.stdout.isatty()
    while True:
        found = look(folder)
        if is_terminal:
            click.clear()
        emit({}, redacted(live_text(found)), output)
        if found.is_done or not found.is_held:
            return found.exit
        time.sleep(LOOK_EVERY_S if is_terminal else LINE_EVERY_S)


def _check_labels(folder: RunFolder, file: FileRef) -> None:
    """Raise if a row of a label file is not a label: no grade, off the scale, invalid probabilities; a grade of a
    labeler that gives none.
    """
    import numpy as np

    grades = folder.plan.facts.labeler.grades
    given, distributions = folder.table(file, LABELS, ["grade", "probs"], check_bytes=False).columns
    where = f"{folder.store.root}/{file.path}"
    values = given.to_numpy()
    if not grades:
        if given.null_count < len(values) or distributions.null_count < len(values):
            raise ManifestError(f"{where}: holds a grade, of a labeler that gives none.")
        return
    is_on_scale = not given.null_count and values.min() >= 0 and values.max() < grades
    if not is_on_scale:
        raise ManifestError(f"{where}: holds a label without a grade of 0 to {grades - 1}.")
    probs = [row for row in distributions.to_pylist() if row is not None]
    if any(len(row) != grades for row in probs):
        raise ManifestError(f"{where}: holds a distribution that is not over {grades} grades.")
    if probs:
        matrix = np.array(probs)
        if not (np.isfinite(matrix).all() and (matrix >= 0).all() and np.allclose(matrix.sum(axis=1), 1, atol=1e-3)):
            raise ManifestError(f"{where}: holds a distribution that does not sum to 1.")


def _opened(target: str, day: str | None) -> tuple[RunFolder, dict[str, Any] | None]:
    """A run's folder, and the plain values of its job if a job file was given."""
    root, storage, spec = target, Storage(), None
    if target.endswith((".yaml", ".yml")) or Path(target).is_file():
        root, storage, spec = output_of(target, day=day)
    elif day is not None:
        raise UsageError(f"--date {day}: {target} is an output, which has no ${{date}}; give its job file.")
    no_plan = f"{root}: no {PLAN_NAME} there. Give a job file or the output folder of one that was planned."
    return open_planned(root, storage, ManifestError(no_plan)), spec
