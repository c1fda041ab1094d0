"""Specs written when all relative paths counted from the working directory: their work is found where it lies, and
never done again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jobs import log_format
from jobs.planning.spec_places import Places, placed
from manifests.errors import ConfigError, RelabelError

Read = TypeVar("Read")


def old_place(values: Mapping[str, Any], places: Places, *, marks: Sequence[str]) -> str | None:
    """Where a spec's `output` lay by the old rule, if that is elsewhere and something of ours lies there.

    Args:
        values: the spec's plain values.
        marks: files, one of which lies in what is ours.
    """
    output = values.get("output")
    if not isinstance(output, str) or not output or ("output",) in places.outside or places.folder is None:
        return None
    try:
        now, before = placed(output, places.folder), placed(output, places.here)
    except ValueError:  # reported when the spec is read
        return None
    is_ours = now != before and any(Path(before, mark).is_file() for mark in marks)
    return before if is_ours and not (Path(now).is_dir() and Path(now).samefile(before)) else None


def where_it_lives(
    before: str, read: Callable[[Places], Read], places: Places, *, holds: Callable[[Read], bool]
) -> Read:
    """A spec by the rule that leads to its own output.

    Args:
        before: its output by the old rule.
        read: builds it by the rule that the places say.
        holds: whether its output holds this very job's work.
    Raises:
        ConfigError: both rules lead to an output of its own.
    """
    try:
        old = read(places._replace(folder=places.here))
        is_old = holds(old)
    except RelabelError:
        is_old = False
    if not is_old:
        return read(places)
    now = places.folder or ""
    try:
        is_new = holds(read(places))
    except RelabelError:
        is_new = False
    written = os.path.relpath(before, now)
    if is_new:
        raise ConfigError(
            f"{places.where}: its work is in two places: in {before}, where `output` led when paths counted from "
            f"the working directory, and where it leads now that they count from {now}. Keep one: move the other "
            f"away, or name it (`output: {written}`)."
        )
    log_format.say(
        f"{places.where}: continues in {before}, which holds this job. Paths in a spec file count from the file's "
        f"folder, {now}, and no longer "
        f"from the working directory: write them so (`output: {written}`).",
        level="warning",
        event="old_place",
    )
    return old
