"""File formats of `relabel convert`: which one a source or target has."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Literal, cast, get_args

from relabel.manifests.errors import UsageError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.input_files import PARQUET_SUFFIXES
from relabel.manifests.label_sets import is_run
from relabel.manifests.plan import PLAN_NAME, ROUNDS_NAME
from relabel.manifests.tables import JSON_SUFFIXES

Format = Literal["labels", "qrels", "run", "jsonl", "parquet"]
SOURCES: tuple[str, ...] = get_args(Format)
TARGETS: tuple[str, ...] = SOURCES[1:]
TREC: tuple[Format, ...] = ("qrels", "run")
"""Text forms, in which a pair occurs once."""
SUFFIXES: dict[str, Format] = {
    **dict.fromkeys(PARQUET_SUFFIXES, "parquet"),
    **dict.fromkeys(JSON_SUFFIXES, "jsonl"),
    ".qrels": "qrels",
    ".qrel": "qrels",
    ".run": "run",
}


def source_format(path: str, named: str | None, storage: Storage) -> Format:
    """The form of a source: as named, else by its suffix; a folder with a plan is a run's labels.

    Raises:
        UsageError: the form is unclear.
    """
    if named is not None:
        return cast("Format", named)
    found = SUFFIXES.get(PurePosixPath(path).suffix.lower())
    if not is_url(path) and Path(path).is_dir():  # Spark writes folders named like files
        is_labels = any(Path(path, name).exists() for name in (PLAN_NAME, ROUNDS_NAME))  # who reads it refuses rounds
        return "labels" if found is None or is_labels else found
    if found is None and is_run(path, storage):
        return "labels"
    return found or _unclear(path, "--from", SOURCES)


def target_format(path: str, named: str | None) -> Format:
    """The form of a target: as named, else by its suffix.

    Raises:
        UsageError: the form is unclear.
    """
    if named is not None:
        return cast("Format", named)
    return SUFFIXES.get(PurePosixPath(path).suffix.lower()) or _unclear(path, "--to", TARGETS)


def _unclear(path: str, option: str, known: tuple[str, ...]) -> Format:
    suffixes = ", ".join(f"{suffix} ({form})" for suffix, form in SUFFIXES.items())
    raise UsageError(
        f"{path}: its form is not clear from its name. Name it with {option} {'|'.join(known)}; known suffixes are "
        f"{suffixes}."
    )
