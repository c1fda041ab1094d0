"""A folder of prompt templates that somebody edits: whenever a file there has another content, something is done
again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import click

from relabel.jobs.output import note
from relabel.manifests.errors import ConfigError
from relabel.manifests.odd_text import one_line

LOOK_EVERY_S = 0.25
"""Between two looks at the files, seconds; a change counts when two looks in a row see the same."""


def again_on_change(folder: Path, do: Callable[[], None], *, pause: Callable[[float], None] = time.sleep) -> NoReturn:
    """Do it, wait until a file is changed, added or removed, do it again, until Ctrl-C.

    Args:
        do: what a template makes impossible it raises as ConfigError, which is said; then the next change is waited
            for.
    """
    seen = _contents(folder)
    while True:
        try:
            do()
        except ConfigError as exc:
            click.echo(one_line(f"relabel: {exc}"), err=True)
        note(f"{folder} is watched: a change there asks again, Ctrl-C ends.")
        found = _next_contents(folder, seen, pause)
        names = sorted(name for name in {*seen, *found} if seen.get(name) != found.get(name))
        note(f"changed: {', '.join(names)}")
        seen = found


def _next_contents(folder: Path, seen: dict[str, bytes], pause: Callable[[float], None]) -> dict[str, bytes]:
    before, found = seen, seen
    while found == seen or found != before:  # an editor may write a file in several steps
        pause(LOOK_EVERY_S)
        before, found = found, _contents(folder)
    return found


def _contents(folder: Path) -> dict[str, bytes]:
    found = {}
    with contextlib.suppress(OSError):  # a folder that is gone holds nothing, and the job says so
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if path.suffix == ".j2" and not path.name.startswith("."):
                    found[path.name] = path.read_bytes()
    return found
