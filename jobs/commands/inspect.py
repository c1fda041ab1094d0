"""`status` and `verify`: look at an output without touching it."""

from __future__ import annotations

import collections
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from relabel.jobs.commands.options import date_option, log_option, output_option
from relabel.jobs.commands.pull import is_destination, verify_destination
from relabel.jobs.commands.run_status import status_of, status_text
from relabel.jobs.commands.status_live import LiveStatus, follow, live_text, look
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit
from relabel.jobs.planning.job_files import output_of
from relabel.jobs.running.auto_options import read_auto
from relabel.jobs.running.canary import load_results
from relabel.manifests.digests import sha256_bytes
from relabel.manifests.errors import ManifestError, UsageError
from relabel.manifests.records import plain
from relabel.manifests.runs.budgets import check_entries
from relabel.manifests.runs.fingerprints import template_name
from relabel.manifests.runs.kept_estimates import load_estimate
from relabel.manifests.runs.kept_readings import check_readings
from relabel.manifests.runs.plans import PLAN_NAME
from relabel.manifests.runs.receipts import FileRef
from relabel.manifests.runs.run_folder import RunFolder, open_planned
from relabel.manifests.runs.run_manifest import load_manifest
from relabel.manifests.schemas import ANSWERS, LABELS
from relabel.manifests.secrets.redaction import redacted
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.run_store_ports import read_if_there


@dataclass(frozen=True)
class VerifiedRun:
    """What `verify` proved of a run: rows by what became of them, and the files that hold them."""

    output: str
    labelled: int
    reused: int
    quarantined: int
    files: int
    rows: int


@click.command(epilog="Example: relabel status out/ecom")
@click.argument("target", metavar="JOB.YAML|OUTPUT")
@click.option(
    "--live",
    is_flag=True,
    help="Follow the run while anybody works on it: what each worker has in flight, was answered and refused, its "
    "tokens/s, and when the run should be done. Exit 20: rows are open and nobody works on them. With --output json: "
    "one look.",
)
@date_option
@log_option
@output_option
def status(target: str, live: bool, day: str | None, output: str) -> int:
    """Show what is done, open and quarantined. Reads receipts alone, so it costs chunks and never rows."""
    folder, engine = _opened(target, day)
    if live:
        return _follow(folder, output)
    found = status_of(folder, engine)
    return emit(plain(found), status_text(found), output)


@click.command(epilog="Example: relabel verify out/ecom")
@click.argument("target", metavar="JOB.YAML|OUTPUT|DEST")
@date_option
@log_option
@output_option
def verify(target: str, day: str | None, output: str) -> int:
    """Prove that no row is lost or doubled, that no committed file changed, and that every label is one.

    Compares multisets of row ids with the plan, each file's sha256 with its receipt, each record (receipts, manifest,
    budget, canary) with its own sha256, each label with its own distribution, and what was kept of the input's first
    reading (`inputs/`) with the manifest.
    Of a folder that bundles are pulled to, proves that what serves is what was pulled, byte for byte, without network.
    Exits 3 at the first thing that does not hold.
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
    check_readings(folder.store, folder.plan, manifest)
    _check_records(folder)
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
    result = VerifiedRun(
        folder.store.root, counted.labelled, counted.reused, counted.quarantined, files, rows=counted.in_
    )
    sums = (
        f"{fates.rows:,} rows in = {fates.labelled:,} labelled + {fates.reused:,} reused + "
        f"{fates.num_quarantined:,} quarantined"
    )
    text = f"{folder.plan.name}: verified. {sums}, {files:,} files unchanged."
    return emit(plain(result), text, output)


def _check_records(folder: RunFolder) -> None:
    """Read the records that no row hangs on: what was spent, lost, estimated, compared and chosen.

    Raises:
        ManifestError: one is damaged.
    """
    for digest in folder.plan.parts.get("templates", {}).values():
        kept = read_if_there(folder.store, template_name(digest))
        if kept is not None and sha256_bytes(kept) != digest:
            raise ManifestError(
                f"{folder.store.root}/{template_name(digest)}: not the template that was planned. Restore it from a "
                "copy, or remove it: only messages show it."
            )
    check_entries(folder.store)
    load_results(folder.store)
    load_estimate(folder.store)
    collections.deque(folder.lost_receipts(), maxlen=0)
    with contextlib.suppress(FileNotFoundError):
        read_auto(folder.store)


def _follow(folder: RunFolder, output: str) -> Exit:
    if output == "json":
        found = look(folder)
        emit(plain(found), "", output)
        return found.exit
    is_terminal = sys.stdout.isatty()

    def show(found: LiveStatus) -> None:
        if is_terminal:
            click.clear()
        emit({}, redacted(live_text(found)), output)

    return follow(folder, show).exit


def _check_labels(folder: RunFolder, file: FileRef) -> None:
    """Raise if a row of a label file is not a label: no grade, off the scale, probabilities that are none; a grade of a
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


def _opened(target: str, day: str | None) -> tuple[RunFolder, Any]:
    """A run's folder, and the plain values of its engine if a job file was given."""
    root, storage, engine = target, Storage(), None
    if target.endswith((".yaml", ".yml")) or Path(target).is_file():
        root, storage, engine = output_of(target, day=day)
    elif day is not None:
        raise UsageError(f"--date {day}: {target} is an output, which has no ${{date}}; give its job file.")
    no_plan = f"{root}: no {PLAN_NAME} there. Give a job file or the output folder of one that was planned."
    return open_planned(root, storage, ManifestError(no_plan)), engine
