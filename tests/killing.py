"""A kill that the process of the tests outlives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Killed(BaseException):
    """Stands in for a kill where the process has to go on."""


@contextmanager
def killed_at(place: str, count: int = 1) -> Iterator[None]:
    """What is done in here is killed when it comes to a failpoint for the time of that number."""
    hits = []

    def die(name: str) -> None:
        hits.append(name)
        if name == place and hits.count(name) == count:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("relabel.manifests.failpoints.hit", die)
        with pytest.raises(Killed):
            yield
