"""Whose a folder is: a training of the same spec, data and model goes on where it was, others are refused."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from relabel.distill.training.changes import changes, manifest_changes
from relabel.distill.training.checkpoint_folders import list_checkpoints
from relabel.distill.training.curves import CURVES_NAME, PLOT_NAME
from relabel.distill.training.disk_errors import writing
from relabel.distill.training.model_manifests import StoredManifest
from relabel.distill.training.output_locations import CLAIM_NAME, OutputLocation
from relabel.distill.training.unfinished import TrainingRecord, note_record, read_training_record
from relabel.manifests.errors import LockHeldError, StaleRunError
from relabel.manifests.runs.run_manifest import MANIFEST_NAME

_REPLACING = "restart"


def finished(
    held: StoredManifest | None, record: TrainingRecord, start: str, location: OutputLocation, where: str
) -> StoredManifest | None:
    """The manifest that is there, if it is this very training's.

    Raises:
        StaleRunError: it is another one's.
    """
    if held is None or start == "restart":
        return None
    if held.fingerprint != record.fingerprint:
        changed = manifest_changes(held.data, record, location.product)
        known = "; ".join(changed) or f"fingerprint {held.fingerprint[:12]}, this one's is {record.fingerprint[:12]}"
        raise StaleRunError(
            f"{where}: holds a {location.product.kind} of another spec, model or data ({known}). Name another "
            "`output`, or replace it with --restart."
        )
    return held


def claim(location: OutputLocation, record: TrainingRecord, start: str, *, is_replacing: bool) -> None:
    """Make the checkpoints' folder ours, or say whose it is.

    Args:
        is_replacing: note that the model which is at the end of the way is to be replaced: a --resume then knows.
    Raises:
        StaleRunError: checkpoints of another spec, or of this one and nobody said what to do with them.
    """
    folder = location.checkpoints
    if start == "restart":
        if location.url is not None:
            (location.folder / MANIFEST_NAME).unlink(missing_ok=True)
        # nobody's while they go, and the folder is still known as ours
        note_claim(folder, "", is_replacing=False)
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
    check_claim(location, record, start)
    if not list_checkpoints(folder):
        for name in (CURVES_NAME, PLOT_NAME):  # of a training that does not go on
            (folder / name).unlink(missing_ok=True)
    note_claim(folder, record.fingerprint, is_replacing=is_replacing)
    note_record(folder, record)


def check_claim(location: OutputLocation, record: TrainingRecord, start: str) -> None:
    """Look whether the checkpoints that are there may be gone on with; a --restart deletes them.

    Raises:
        StaleRunError: they are of another spec, or of this one and nobody said what to do with them.
    """
    if start == "restart":
        return
    folder = location.checkpoints
    held, _ = claimed(folder)
    left = sorted(path.name for path in folder.glob("checkpoint-*"))
    if left and held != record.fingerprint:
        begun = read_training_record(folder, held)
        changed = [] if begun is None else changes(begun.spec, begun.model, begun.data, record, location.product)
        known = f" ({'; '.join(changed)})" if changed else ""
        raise StaleRunError(
            f"{folder}: {left[-1]} is of another spec, model or data{known}. Restore what changed and give --resume, "
            "name another `output`, or start over with --restart, which deletes it."
        )
    if left and start == "new":
        raise StaleRunError(
            f"{folder}: an unfinished training left {left[-1]}. Continue with --resume, or start over with --restart."
        )


def note_claim(folder: Path, fingerprint: str, *, is_replacing: bool) -> None:
    """Write whose checkpoints these are."""
    with writing(folder, folder):
        (folder / CLAIM_NAME).write_text(fingerprint + "\n" + f"{_REPLACING}\n" * is_replacing, encoding="utf-8")


def claimed(folder: Path) -> tuple[str, bool]:
    """The fingerprint that a folder of checkpoints belongs to, if any, and whether its model replaces another one."""
    file = folder / CLAIM_NAME
    text = file.read_bytes().decode(errors="replace") if file.is_file() else ""  # damaged, it is nobody's
    held, _, rest = text.partition("\n")
    return held, rest.strip() == _REPLACING


def tidy(location: OutputLocation, fingerprint: str) -> None:
    """Remove the checkpoints of a model that is finished: whoever made it was killed while it removed them."""
    if location.url is not None or not location.checkpoints.is_dir():
        return
    if claimed(location.checkpoints) in ((fingerprint, False), ("", False)):
        with contextlib.suppress(LockHeldError), location.locked():
            shutil.rmtree(location.checkpoints)
