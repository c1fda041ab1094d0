"""The commands `status` and `verify`: the state of an output and its workers, read without changing it."""

import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from relabel.jobs.commands.options import date_option, log_option, output_option
from relabel.jobs.commands.pull import is_destination, verify_destination
from relabel.jobs.job import output_of, priced_args, read_auto
from relabel.jobs.output import Exit, emit, grid
from relabel.jobs.run.notices import load_stop, load_warnings
from relabel.jobs.run.progress import left_s, left_text, live_states
from relabel.jobs.run.results import load_results
from relabel.jobs.run.session import charge_of, charge_of_receipts
from relabel.manifests.budgets import BudgetState
from relabel.manifests.cascade import audit_of
from relabel.manifests.errors import ConfigError, ManifestError, UsageError
from relabel.manifests.files import Storage
from relabel.manifests.labels import ANSWERS, LABELS
from relabel.manifests.plan import PLAN_NAME, FileRef, template_name
from relabel.manifests.records import plain, sha256_bytes
from relabel.manifests.run_folder import RunFolder, open_planned
from relabel.manifests.run_manifest import load_manifest
from relabel.manifests.secrets import counted, redacted
from relabel.manifests.specs import RunSpec, price_of, validate_spec
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
    plan = folder.plan
    manifest = load_manifest(folder.store)
    found = folder.snapshot(manifest=manifest)
    tally = found.tally
    attempts = folder.attempts_of_all(found.etags)
    spec = spec or (manifest.spec if manifest else {})
    args = priced_args(spec.get("engine"))
    budget = None
    cost = None if args is None else price_of(args, *tally.tokens)
    with contextlib.suppress(ConfigError):  # of a job file that `run` refuses
        run = validate_spec(RunSpec, spec.get("run") or {}, where="run")
        if run.max_tokens is not None or run.max_cost is not None:
            spent = charge_of(args, *tally.tokens).plus(charge_of_receipts(args, folder.lost_receipts()))
            budget = BudgetState(run.max_tokens, run.max_cost, spent.tokens, round(spent.cost, 9))
    shards = []
    undone = []
    for number, shard in enumerate(plan.shards):
        chunks = len(shard.chunks)
        done = len(attempts.get(number, ()))
        state = "done"
        if done < chunks:
            state = "running" if folder.store.is_locked(shard_lock_name(number)) else "open"
            undone.append((f"  shard {number}", f"{state}, {done:,} of {chunks:,} chunks"))
        shards.append({"shard": number, "rows": shard.rows, "chunks": chunks, "chunks_done": done, "state": state})
    is_finished = manifest is not None and manifest.receipts_sha256 == found.digest
    over_limit = manifest.over_limit if manifest else None
    cascade = manifest.cascade if manifest and is_finished else audit_of(folder, found.labels)
    stopped = None if is_finished else load_stop(folder.store)
    warnings = load_warnings(folder.store)
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
        "stopped": plain(stopped),
        "warnings": warnings,
        "shards": shards,
    }
    by_status = ", ".join(f"{count:,} {name}" for name, count in sorted(tally.quarantined.items()))
    has_cost = cost is not None and (budget is None or budget.max_cost is None)
    rows = [
        ("rows", f"{tally.rows:,} of {plan.rows:,} done"),
        ("labelled", f"{tally.labelled:,}"),
        ("reused", f"{tally.reused:,}"),
        ("quarantined", f"{tally.num_quarantined:,}" + (f" ({by_status})" if by_status else "")),
        ("chunks", f"{tally.chunks_done:,} of {plan.num_chunks:,}"),
        ("budget", budget.text if budget else ""),
        ("cost", f"{cost:,.4f} in money for the tokens of what is committed" if has_cost else ""),
        ("cascade", cascade.text if cascade else ""),
        ("stopped", stopped.text if stopped else ""),
        *(("warning", text) for text in warnings),
        ("shards", f"{len(shards) - len(undone):,} of {len(shards):,} done"),
        *undone[:SHARDS_SHOWN],
        ("  …", f"{len(undone) - SHARDS_SHOWN:,} more open" if len(undone) > SHARDS_SHOWN else ""),
    ]
    state = "over the quarantine limit" if over_limit else "finished" if is_finished else "not finished"
    table = grid([(name, text) for name, text in rows if text])
    return emit(result, f"{plan.name}: {state}, {folder.store.root}\n{table}", output)


# ------------------------------------------------------------------------------
# `status --live`: follows a run by its receipts and by what its workers say of themselves.


def look(folder: RunFolder) -> tuple[dict[str, Any], str]:
    """The state of a run at one moment, for JSON and as text: from one listing of receipts, the live files, and locks
    where these prove no worker.

    `is_held`: a worker is at a shard, whether it has said anything yet or not; `left_s`: seconds until all rows are
    done, at the workers' rate.
    """
    plan = folder.plan
    attempts = folder.attempts_of_all()
    workers = live_states(folder.store)
    rows_done = sum(plan.shards[shard].chunks[chunk] for shard, done in attempts.items() for chunk in done)
    chunks_done = sum(map(len, attempts.values()))
    heard = [one for one in workers if not one.is_stale]
    pairs = sum(one.pairs for one in heard)
    is_open = (number for number, shard in enumerate(plan.shards) if len(attempts.get(number, ())) < len(shard.chunks))
    is_held = bool(heard) or any(folder.store.is_locked(shard_lock_name(number)) for number in is_open)
    left = left_s(pairs + plan.rows - rows_done, pairs, max((one.seconds for one in heard), default=0.0))
    found = {
        "name": plan.name,
        "output": folder.store.root,
        "rows": plan.rows,
        "rows_done": rows_done,
        "chunks": plan.num_chunks,
        "chunks_done": chunks_done,
        "is_held": is_held,
        "workers": [
            {"age_s": round(max(0.0, one.age_s), 1), "is_stale": one.is_stale, "state": one} for one in workers
        ],
        "left_s": left,
    }
    state = f"ETA {left_text(left)}" if is_held else "no worker: run the same command again"
    if chunks_done == plan.num_chunks:
        state = "every chunk is committed"
    lines = [
        f"{plan.name}: {rows_done:,} of {plan.rows:,} rows committed, {chunks_done:,} of {plan.num_chunks:,} chunks · "
        f"{state} · {folder.store.root}"
    ]
    for one in workers:
        seconds = max(one.seconds, 1e-9)
        age = f"{max(0.0, one.age_s):,.0f} s ago"
        if one.is_stale:
            age = f"stale, last heard of {age}: it is gone, or its engine has been at one step since"
        lines.append(
            f"  {one.worker} ({age}): {one.pairs:,} pairs, {one.live.in_flight:,} in flight, "
            f"{one.live.answers_text()} · {one.prompt_tokens / seconds:,.0f} prompt + "
            f"{one.output_tokens / seconds:,.0f} output tokens/s"
        )
        if one.live.last_refused is not None:
            lines.append(f"    last refused: {one.live.last_refused.line()}")
    if is_held and not workers:
        lines.append("  a worker holds shards and has said nothing yet: its engine is starting")
    return plain(found), "\n".join(lines)


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
    if not live:
        return _print_status(folder, spec, output)
    is_terminal = sys.stdout.isatty()
    while True:
        found, text = look(folder)
        if is_terminal and output == "text":
            click.clear()
        emit(found, redacted(text), output)
        is_done = found["chunks_done"] == found["chunks"]
        if is_done or not found["is_held"] or output == "json":
            return Exit.DONE if is_done or found["is_held"] else Exit.PARTIAL
        time.sleep(2.0 if is_terminal else 10.0)  # nothing is drawn over in a log


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
    # the records that no row hangs on: what was spent, lost, compared and chosen
    for digest in folder.plan.parts.get("templates", {}).values():
        kept = read_if_there(folder.store, template_name(digest))
        if kept is not None and sha256_bytes(kept) != digest:
            raise ManifestError(
                f"{folder.store.root}/{template_name(digest)}: not the template that was planned. Restore it from a "
                "copy, or remove it: no label depends on it."
            )
    load_results(folder.store)
    list(folder.lost_receipts())
    read_auto(folder.store)
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
    return emit(
        {
            "output": folder.store.root,
            "labelled": kinds.labelled,
            "reused": kinds.reused,
            "quarantined": kinds.quarantined,
            "files": files,
            "rows": kinds.in_,
        },
        f"{folder.plan.name}: verified. {fates.rows:,} rows in = {fates.labelled:,} labelled + {fates.reused:,} reused "
        f"+ {fates.num_quarantined:,} quarantined, {counted(files, 'file')} unchanged.",
        output,
    )


def _check_labels(folder: RunFolder, file: FileRef) -> None:
    """Raise if a row of a label file is not a label: no grade, off the scale, invalid probabilities; a grade of a
    labeler that gives none.
    """
    import numpy as np

    grades = folder.plan.facts.labeler.grades
    fault = ""
    given, distributions = folder.table(file, LABELS, ["grade", "probs"], check_bytes=False).columns
    values = given.to_numpy()
    probs = [row for row in distributions.to_pylist() if row is not None]
    if not grades:
        fault = "a grade, of a labeler that gives none" if probs or given.null_count < len(values) else ""
    elif given.null_count or values.min() < 0 or values.max() >= grades:
        fault = f"a label without a grade of 0 to {grades - 1}"
    elif any(len(row) != grades for row in probs):
        fault = f"a distribution that is not over {grades} grades"
    elif probs:
        matrix = np.array(probs)
        is_one = np.isfinite(matrix).all() and (matrix >= 0).all() and np.allclose(matrix.sum(axis=1), 1, atol=1e-3)
        fault = "" if is_one else "a distribution that does not sum to 1"
    if fault:
        raise ManifestError(f"{folder.store.root}/{file.path}: holds {fault}.")


def _opened(target: str, day: str | None) -> tuple[RunFolder, dict[str, Any] | None]:
    """A run's folder, and the plain values of its job if a job file was given."""
    root = target
    storage = Storage()
    spec = None
    if target.endswith((".yaml", ".yml")) or Path(target).is_file():
        root, storage, spec = output_of(target, day=day)
    elif day is not None:
        raise UsageError(f"--date {day}: {target} is an output, which has no ${{date}}; give its job file.")
    why = ManifestError(f"{root}: no {PLAN_NAME} there. Give a job file or the output folder of one that was planned.")
    return open_planned(root, storage, why), spec
