"""Which of an input's files are others than they were."""

from __future__ import annotations

from typing import Any

from relabel.manifests.inputs.dataset import InputFile
from relabel.manifests.storage.filesystems import absolute_path


def changed_files(planned: list[InputFile], found: tuple[InputFile, ...]) -> list[str]:
    """What differs between the files that were planned and those that are there, a sentence each; empty if nothing
    does.
    """
    if [file.identity for file in planned] == [file.identity for file in found]:
        return []
    before, after = _by_key(planned, list(found))
    remarks = []
    for key in dict.fromkeys([*before, *after]):
        was, now = before.get(key), after.get(key)
        if now is None and was is not None:
            remarks.append(f"{was.path}: planned, now missing")
        elif was is None and now is not None:
            remarks.append(f"{now.path}: new since the plan")
        elif was is not None and now is not None and was.identity != now.identity:
            what = f"{was.rows} rows in {was.size_bytes} bytes, now {now.rows} rows in {now.size_bytes} bytes"
            remarks.append(f"{now.path}: changed since the plan ({what})")
    return remarks or [f"{found[0].path} and the others: read in another order than planned, or a file twice"]


def _by_key(planned: list[InputFile], found: list[InputFile]) -> tuple[dict[Any, InputFile], dict[Any, InputFile]]:
    """Files that are to be compared under one key: their path, their name where the data moved, else their position."""
    for key in _path, _name:
        before, after = {key(file): file for file in planned}, {key(file): file for file in found}
        if before.keys() & after.keys() and len(before) == len(planned) and len(after) == len(found):
            return before, after
    return dict(enumerate(planned)), dict(enumerate(found))


def _path(file: InputFile) -> str:
    return absolute_path(file.path)


def _name(file: InputFile) -> str:
    return file.path.rpartition("/")[2]
