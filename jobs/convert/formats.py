"""Which form a source has and a target gets: by its suffix where that is clear, else as named."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from relabel.manifests.errors import UsageError
from relabel.manifests.inputs.input_folders import PARQUET_SUFFIXES
from relabel.manifests.inputs.table_files import JSON_SUFFIXES
from relabel.manifests.judging.opened_labels import is_run
from relabel.manifests.runs.plans import PLAN_NAME, ROUNDS_NAME
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import is_url

Format = Literal["labels", "qrels", "run", "jsonl", "parquet"]
SOURCES: tuple[str, ...] = get_args(Format)
TRAJECTORIES: Literal["trajectories"] = "trajectories"
"""A target alone, of several sources: see `trajectories.py`."""
TARGETS: tuple[str, ...] = (*SOURCES[1:], TRAJECTORIES)
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
    """The form of a source.

    Raises:
        UsageError: nothing tells, or a folder holds tables where its name says that it is a run's output.
    """
    found = SUFFIXES.get(PurePosixPath(path).suffix.lower())
    if named is not None:
        return _format_of(named)
    if not is_url(path) and Path(path).is_dir():  # Spark writes folders named like files
        is_labels = any(Path(path, name).exists() for name in (PLAN_NAME, ROUNDS_NAME))  # who reads it refuses rounds
        if found is None and not is_labels and _holds_parquet(Path(path)):
            raise UsageError(
                f"{path}: a folder of Parquet files without {PLAN_NAME}, so no run's output. Say what it is: --from "
                "parquet."
            )
        return "labels" if found is None or is_labels else found
    if found is None and is_run(path, storage):
        return "labels"
    return found or _unclear(path, "--from", SOURCES)


def _holds_parquet(folder: Path) -> bool:
    return any(file.suffix.lower() in PARQUET_SUFFIXES for file in folder.rglob("*"))


def is_trajectories(path: str, named: str | None) -> bool:
    """Whether a target is one of trajectories: it is said to be, or is called `trajectories.jsonl`, whatever stands
    before that and a dot.
    """
    name = PurePosixPath(path).name.lower()
    return named == TRAJECTORIES if named is not None else f".{name}".endswith(".trajectories.jsonl")


def target_format(path: str, named: str | None) -> Format:
    """The form of a target.

    Raises:
        UsageError: nothing tells.
    """
    if named is not None:
        return _format_of(named)
    return SUFFIXES.get(PurePosixPath(path).suffix.lower()) or _unclear(path, "--to", TARGETS)


def _format_of(named: str) -> Format:
    return next(name for name in get_args(Format) if name == named)


def _unclear(path: str, option: str, known: tuple[str, ...]) -> Format:
    suffixes = ", ".join(f"{suffix} ({form})" for suffix, form in SUFFIXES.items())
    raise UsageError(
        f"{path}: its name does not tell its form. Say so with {option} {'|'.join(known)}; known suffixes are "
        f"{suffixes}."
    )
