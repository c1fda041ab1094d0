"""A student as a folder that Hugging Face's libraries load: the relevance head alone, its temperature folded in, and a
card with the Hub's metadata. Read `hub_models.py` for what is in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from relabel.distill.students.student_manifest import read_student_manifest
from relabel.distill.students.student_record import read_student
from relabel.distill.students.students import load_student, student_digest
from relabel.export.bundle_places import locked, made_beside, put_back, switch
from relabel.export.exporting import student_manifest
from relabel.export.hub_cards import CARD_NAME, render_hub_card
from relabel.export.hub_models import HEAD, write_model
from relabel.manifests.digests import readable_json
from relabel.manifests.errors import ConfigError, StaleRunError

RECORD_NAME = "relabel.json"


@dataclass(frozen=True)
class HubFolder:
    """What was made.

    Args:
        library: whose classes load it: `transformers` or `sentence-transformers`.
        left_out: heads beside relevance, which these classes have no place for.
        was_done: it was there already.
    """

    path: Path
    library: str
    left_out: list[str]
    was_done: bool


def export_to_hub_folder(
    path: Path, target: Path, *, licence: str | None, is_replacing: bool, say: Callable[[str], None] = lambda _: None
) -> HubFolder:
    """Write a student's folder for transformers and sentence-transformers.

    Args:
        path: the student's folder.
        licence: SPDX expression.
        is_replacing: take the place of another such folder.
        say: called with progress, a line each.
    Raises:
        ConfigError: it is no encoder.
        StaleRunError: `target` holds something else.
        ManifestError, ModelError, MissingExtraError: the student is not whole, or can't be loaded.
    """
    record = read_student(path)
    if record.kind != "encoder":
        raise ConfigError(
            f"{path}: a student of kind {record.kind} has no class there that answers as it does. Export it to a "
            "bundle, or take an encoder."
        )
    student_manifest(path)  # its files are held against it
    file = path / "manifest.json"
    manifest = read_student_manifest(file.read_bytes(), str(file))
    recipe = {"student": student_digest(path), "relabel": version("relabel-ir"), "licence": licence}
    put_back(target)
    done = _there(target, recipe, is_replacing=is_replacing)
    left_out = [name for name in record.heads if name != HEAD]
    if done is not None:
        return HubFolder(target, done, left_out, was_done=True)
    student = load_student(path)
    with made_beside(target) as folder:
        library = write_model(student, folder, say)
        text = render_hub_card(manifest, record, library, licence)
        (folder / CARD_NAME).write_text(text, encoding="utf-8")
        (folder / RECORD_NAME).write_bytes(readable_json({**recipe, "library": library}))
        with locked(target, waits=True):
            switch(folder, target)
    return HubFolder(target, library, left_out, was_done=False)


def _there(target: Path, recipe: Mapping[str, Any], *, is_replacing: bool) -> str | None:
    """The library of the folder at the target, if it is this very one.

    Raises:
        StaleRunError: something else is there.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    try:
        held = json.loads((target / RECORD_NAME).read_bytes())
        library = str(held.pop("library"))
    except (OSError, ValueError, KeyError, AttributeError) as exc:
        raise StaleRunError(
            f"{target}: holds something that `relabel export --format hf` did not write. Name another --to, or move "
            "it away."
        ) from exc
    if held == recipe:
        return library
    if is_replacing:
        return None
    raise StaleRunError(f"{target}: holds another student's export. Name another --to, or replace it with --replace.")
