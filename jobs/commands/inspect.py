"""`status` and `verify`: look at an output without touching it."""

from __future__ import annotations

import fcntl
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from jobs.commands.options import emit, output_option, table
from jobs.exits import Exit
from jobs.job_files import read_settings
from manifests.errors import ConfigError, ManifestError
from manifests.plans import PLAN_NAME, load_plan
from manifests.runs import RunFolder, load_manifest
from manifests.schemas import LABELS
from manifests.store import LocalStore

SHARDS_SHOWN = 20


@click.command(epilog="Example: relabel status out/ecom")
@click.argument("target", metavar="JOB.YAML|OUTPUT")
@output_option
def status(target: str, output: str) -> int:
    """Show what is done, open and quarantined. Reads receipts alone, so it costs chunks and never rows."""
    folder = _folder(target)
    plan = folder.plan
    found = folder.snapshot()
    tally = found.tally
    shards = []
    for number, shard in enumerate(plan.shards):
        done = len(shard.chunks) - len(folder.pending(number))
        state = "done" if done == len(shard.chunks) else "running" if _is_locked(folder.store, number) else "open"
        shards.append({"shard": number, "rows": shard.rows, "chunks": len(shard.chunks), "chunks_done": done, "state": state})
    manifest = load_manifest(folder.store)
    result: dict[str, Any] = {
        "name": plan.name,
        "output": str(folder.store.root),
        "fingerprint": plan.fingerprint,
        "rows": plan.rows,
        "rows_done": tally.rows,
        "labelled": tally.labelled,
        "quarantined": tally.num_quarantined,
        "quarantined_by_status": tally.quarantined,
        "chunks": plan.num_chunks,
        "chunks_done": tally.chunks_done,
        "is_finished": manifest is not None and manifest["receipts_sha256"] == found.digest,
        "over_limit": manifest["over_limit"] if manifest else None,
        "stages": tally.stages,
        "shards": shards,
    }
    emit(result, _status_text(result), output)
    return Exit.DONE


@click.command(epilog="Example: relabel verify out/ecom")
@click.argument("target", metavar="JOB.YAML|OUTPUT")
@output_option
def verify(target: str, output: str) -> int:
    """Prove that no row is lost or doubled, that no committed file changed, and that every label is one.

    Compares multisets of row ids with the plan, each file's sha256 with its receipt, and each label with its own distribution.
    Exits 3 at the first thing that does not hold.
    """
    folder = _folder(target)
    rows = labels = files = 0
    for shard in range(len(folder.plan.shards)):
        rows += folder.prove_shard(shard, check_bytes=True)
        for receipts in folder.chunk_receipts(shard):
            for receipt in receipts:
                files += sum(1 for file in (receipt.labels, receipt.quarantine) if file)
                if receipt.labels:
                    labels += _check_labels(folder, receipt.labels)
    manifest = load_manifest(folder.store)
    if manifest is None:
        raise ManifestError(f"{folder.store.root}: every chunk is committed but the manifest is missing. Run the job again to write it.")
    found = folder.snapshot()
    tally = found.tally
    counted = {"in": rows, "labelled": labels, "reused": 0, "quarantined": tally.num_quarantined}
    listed = [manifest["fingerprint"], manifest["rows"], manifest["receipts_sha256"], manifest["labels"], manifest["quarantine"]]
    files_now = [[asdict(file) for file in group] for group in (found.labels, found.quarantine)]
    if listed != [folder.plan.fingerprint, counted, found.digest, *files_now]:
        raise ManifestError(
            f"{folder.store.root}/manifest.json: does not say what the receipts say (rows {manifest['rows']}, by receipts {counted}). "
            "Run the job again to write it anew."
        )
    result = {"output": str(folder.store.root), "rows": rows, "labelled": labels, "quarantined": tally.num_quarantined, "files": files}
    sums = f"{rows:,} rows in = {labels:,} labelled + 0 reused + {tally.num_quarantined:,} quarantined"
    text = f"{folder.plan.name}: verified. {sums}, {files:,} files unchanged."
    emit(result, text, output)
    return Exit.DONE


def _check_labels(folder: RunFolder, file: Any) -> int:
    """Rows of a label file; raises if one is no label: no grade, off the scale, probabilities that are none."""
    import numpy as np

    grades = int(folder.plan.parts["labeler"]["grades"])
    held = folder.table(file, LABELS, ["status", "grade", "probs"], check_bytes=False)
    where = f"{folder.store.root}/{file.path}"
    values = held["grade"].to_numpy()
    is_on_scale = not held["grade"].null_count and values.min() >= 0 and values.max() < grades
    if not is_on_scale or set(held["status"].to_pylist()) != {"ok"}:
        raise ManifestError(f"{where}: holds a label without a grade of 0 to {grades - 1}.")
    probs = [row for row in held["probs"].to_pylist() if row is not None]
    if any(len(row) != grades for row in probs):
        raise ManifestError(f"{where}: holds a distribution that is not over {grades} grades.")
    if probs:
        matrix = np.array(probs)
        if not (np.isfinite(matrix).all() and (matrix >= 0).all() and np.allclose(matrix.sum(axis=1), 1, atol=1e-3)):
            raise ManifestError(f"{where}: holds a distribution that does not sum to 1.")
    return int(held.num_rows)


def _folder(target: str) -> RunFolder:
    root = target
    if target.endswith((".yaml", ".yml")) or Path(target).is_file():
        root = read_settings(target)[0].get("output", "")
        if not isinstance(root, str) or not root:
            raise ConfigError(f"{target}: `output` is missing")
    store = LocalStore(root)
    plan = load_plan(store)
    if plan is None:
        raise ManifestError(f"{root}: no {PLAN_NAME} there. Give a job file or the output folder of one that was planned.")
    return RunFolder(store, plan)


def _is_locked(store: LocalStore, shard: int) -> bool:
    """Whether a live process holds the shard, without taking its lock for longer than the look."""
    path = store.path(f"leases/shard-{shard:05d}.lock")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _status_text(result: dict[str, Any]) -> str:
    by_status = ", ".join(f"{count:,} {name}" for name, count in sorted(result["quarantined_by_status"].items()))
    state = "over the quarantine limit" if result["over_limit"] else "finished" if result["is_finished"] else "not finished"
    rows = [
        ("rows", f"{result['rows_done']:,} of {result['rows']:,} done"),
        ("labelled", f"{result['labelled']:,}"),
        ("quarantined", f"{result['quarantined']:,}" + (f" ({by_status})" if by_status else "")),
        ("chunks", f"{result['chunks_done']:,} of {result['chunks']:,}"),
    ]
    open_shards = [shard for shard in result["shards"] if shard["state"] != "done"]
    rows.append(("shards", f"{len(result['shards']) - len(open_shards):,} of {len(result['shards']):,} done"))
    rows += [
        (f"  shard {shard['shard']}", f"{shard['state']}, {shard['chunks_done']:,} of {shard['chunks']:,} chunks")
        for shard in open_shards[:SHARDS_SHOWN]
    ]
    if len(open_shards) > SHARDS_SHOWN:
        rows.append(("  …", f"{len(open_shards) - SHARDS_SHOWN:,} more open"))
    return f"{result['name']}: {state}, {result['output']}\n" + table(rows)
