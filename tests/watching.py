"""Reports on a training from inside it, at every place where it may be killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs.report.build import BuiltPage, build_report
from relabel.manifests.errors import RelabelError
from relabel.manifests.files import Storage


@contextmanager
def watched(out: Path) -> Iterator[dict[str, list[BuiltPage | RelabelError]]]:
    """What a report on `out` says while the block trains there, by failpoint; it changes no file."""
    seen: dict[str, list[Any]] = {}

    def look(name: str) -> None:
        before = _files(out)
        try:
            found: Any = build_report([str(out)], Storage())
        except RelabelError as exc:
            found = exc
        assert _files(out) == before
        seen.setdefault(name, []).append(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("relabel.manifests.failpoints.hit", look)
        yield seen


def steps_of(found: list[BuiltPage | RelabelError]) -> list[int | str]:
    """The step that each page shows; `finished` where it shows no training, and the name of an error."""
    step: Callable[[BuiltPage], int | str] = lambda page: (  # noqa: E731
        page.unfinished[0].reached.step if page.unfinished else "finished"
    )
    return [step(one) if isinstance(one, BuiltPage) else type(one).__name__ for one in found]


def _files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}
