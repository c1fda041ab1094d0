"""`status` and `verify`: look at an output without touching it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from jobs.commands.options import date_option, log_option, output_option
from jobs.commands.pull import is_destination, verify_destination
from jobs.exits import Exit
from jobs.output import emit, table
from jobs.planning.job_files import output_of
from manifests.digests import sha256_bytes
from manifests.errors import ManifestError, UsageError
from manifests.records import plain
from manifests.runs.kept_estimates import plan_against_actual
from manifests.runs.plans import PLAN_NAME, load_plan
from manifests.runs.readings import check_readings
from manifests.runs.receipts import FileRef
from manifests.runs.run_folder import RunFolder
from manifests.runs.run_manifest import load_manifest
from manifests.schemas import ANSWERS, LABELS
from manifests.storage.context import Storage
from manifests.storage.run_stores import open_run_store, shard_lock_name

SHARDS_SHOWN = 20
SHOWN_OUTSIDE = 4


@click.command(epilog="Example: relabel status out/ecom")
@click.argument("target", metavar="JOB.YAML|OUTPUT")
@date_option
@log_option
@output_option
def status(target: str, day: str | None, output: str) -> int:
    """Show what is done, open and quarantined. Reads receipts alone, so it costs chunks and never rows."""
    folder = _folder(target, day)
    plan = folder.plan
    found = folder.snapshot()
    tally = found.tally
    shards = []
    attempts = folder.attempts_of_all()
    for number, shard in enumerate(plan.shards):
        done = len(attempts.get(number, ()))
        state = (
            "done"
            if done == len(shard.chunks)
            else "running"
            if folder.store.is_locked(shard_lock_name(number))
            else "open"
        )
        shards.append(
            {"shard": number, "rows": shard.rows, "chunks": len(shard.chunks), "chunks_done": done, "state": state}
        )
    manifest = load_manifest(folder.store)
    result: dict[str, Any] = {
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
        "is_finished": manifest is not None and manifest.receipts_sha256 == found.digest,
        "over_limit": manifest.over_limit if manifest else None,
        "stages": tally.stages,
        "plan_against_actual": plain(plan_against_actual(folder.store, tally)),
        "shards": shards,
    }
    emit(result, _status_text(result), output)
    return Exit.DONE


@click.command(epilog="Example: relabel verify out/ecom")
@click.argument("target", metavar="JOB.YAML|OUTPUT|DEST")
@date_option
@log_option
@output_option
def verify(target: str, day: str | None, output: str) -> int:
    """Prove that no row is lost or doubled, that no committed file changed, and that every label is one.

    Compares multisets of row ids with the plan, each file's sha256 with its receipt, each label with its own
    distribution, and what was kept of the input's first reading (`inputs/`) with the manifest.
    Of a folder that bundles are pulled to, proves that what serves is what was pulled, byte for byte, without network.
    Exits 3 at the first thing that does not hold.
    """
    if is_destination(target):
        return verify_destination(Path(target), output)
    folder = _folder(target, day)
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
    check_readings(folder.store, folder.plan, manifest)
    counted = fates.by_kind()
    said = (manifest.fingerprint, manifest.rows, manifest.quarantined_by_status, manifest.receipts_sha256)
    holds = (folder.plan.fingerprint, counted, fates.quarantined, found.digest)
    if said != holds or (manifest.labels, manifest.quarantine) != (found.labels, found.quarantine):
        raise ManifestError(
            f"{folder.store.root}/manifest.json: does not say what the files hold (rows {plain(manifest.rows)}, in the "
            f"files {plain(counted)}). Move it away and run the same command as before (run, retry, score or merge) to "
            "write it anew."
        )
    files = len(found.labels) + len(found.quarantine) + len(found.answers)
    result = {
        "output": folder.store.root,
        "labelled": counted.labelled,
        "reused": counted.reused,
        "quarantined": counted.quarantined,
        "files": files,
        "rows": counted.in_,
    }
    sums = (
        f"{fates.rows:,} rows in = {fates.labelled:,} labelled + {fates.reused:,} reused + "
        f"{fates.num_quarantined:,} quarantined"
    )
    text = f"{folder.plan.name}: verified. {sums}, {files:,} files unchanged."
    emit(result, text, output)
    return Exit.DONE


def _check_labels(folder: RunFolder, file: FileRef) -> None:
    """Raise if a row of a label file is not a label: no grade, off the scale, probabilities that are none; a grade of a
    labeler that gives none.
    """
    import numpy as np

    grades = int(folder.plan.parts["labeler"]["grades"])
    held = folder.table(file, LABELS, ["grade", "probs"], check_bytes=False)
    where = f"{folder.store.root}/{file.path}"
    values = held["grade"].to_numpy()
    if not grades:
        if held["grade"].null_count < len(values) or held["probs"].null_count < len(values):
            raise ManifestError(f"{where}: holds a grade, of a labeler that gives none.")
        return
    is_on_scale = not held["grade"].null_count and values.min() >= 0 and values.max() < grades
    if not is_on_scale:
        raise ManifestError(f"{where}: holds a label without a grade of 0 to {grades - 1}.")
    probs = [row for row in held["probs"].to_pylist() if row is not None]
    if any(len(row) != grades for row in probs):
        raise ManifestError(f"{where}: holds a distribution that is not over {grades} grades.")
    if probs:
        matrix = np.array(probs)
        if not (np.isfinite(matrix).all() and (matrix >= 0).all() and np.allclose(matrix.sum(axis=1), 1, atol=1e-3)):
            raise ManifestError(f"{where}: holds a distribution that does not sum to 1.")


def _folder(target: str, day: str | None) -> RunFolder:
    root, storage = target, Storage()
    if target.endswith((".yaml", ".yml")) or Path(target).is_file():
        root, storage = output_of(target, day=day)
    elif day is not None:
        raise UsageError(f"--date {day}: {target} is an output, which has no ${{date}}; give its job file.")
    store = open_run_store(root, storage)
    plan = load_plan(store)
    if plan is None:
        raise ManifestError(
            f"{root}: no {PLAN_NAME} there. Give a job file or the output folder of one that was planned."
        )
    return RunFolder(store, plan)


def _against_text(lines: list[dict[str, Any]]) -> str:
    outside = [line for line in lines if not line["is_within"]]
    named = "".join(
        f"; {line['figure']} {line['actual']:,.6g}, planned {line['planned'][1]:,.6g}"
        for line in outside[:SHOWN_OUTSIDE]
    )
    return f"{len(lines) - len(outside):,} of {len(lines):,} figures within their intervals{named}"


def _status_text(result: dict[str, Any]) -> str:
    by_status = ", ".join(f"{count:,} {name}" for name, count in sorted(result["quarantined_by_status"].items()))
    state = (
        "over the quarantine limit" if result["over_limit"] else "finished" if result["is_finished"] else "not finished"
    )
    rows = [
        ("rows", f"{result['rows_done']:,} of {result['rows']:,} done"),
        ("labelled", f"{result['labelled']:,}"),
        ("reused", f"{result['reused']:,}"),
        ("quarantined", f"{result['quarantined']:,}" + (f" ({by_status})" if by_status else "")),
        ("chunks", f"{result['chunks_done']:,} of {result['chunks']:,}"),
    ]
    if result["plan_against_actual"] and result["is_finished"]:
        rows.append(("against plan", _against_text(result["plan_against_actual"])))
    open_shards = [shard for shard in result["shards"] if shard["state"] != "done"]
    rows.append(("shards", f"{len(result['shards']) - len(open_shards):,} of {len(result['shards']):,} done"))
    rows += [
        (f"  shard {shard['shard']}", f"{shard['state']}, {shard['chunks_done']:,} of {shard['chunks']:,} chunks")
        for shard in open_shards[:SHARDS_SHOWN]
    ]
    if len(open_shards) > SHARDS_SHOWN:
        rows.append(("  …", f"{len(open_shards) - SHARDS_SHOWN:,} more open"))
    return f"{result['name']}: {state}, {result['output']}\n" + table(rows)
