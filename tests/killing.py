"""Kills: one that the process of the tests outlives, and one before any change of the disk, also in a fork."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Killed(BaseException):
    """Replaces a kill where the process has to go on."""


@contextmanager
def killed_at(place: str, count: int = 1) -> Iterator[None]:
    """What is done in here is killed when it amounts to a failpoint for the time of that number."""
    hits = []

    def die(name: str) -> None:
        hits.append(name)
        if name == place and hits.count(name) == count:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("relabel.manifests.failpoints.hit", die)
        with pytest.raises(Killed):
            yield


CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.link")
"""Audit events of calls that change the disk, also opening a file to write."""


def die_before_change(number: int) -> None:
    """Have this process killed before its call number so many that changes the disk."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if is_write or event in CHANGES:
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def killed(work: Callable[[], object], *, before_change: int) -> bool:
    """Do the work in a fork that is killed before a change of the disk; whether it was, or ended first."""
    child = os.fork()
    if child == 0:
        die_before_change(before_change)
        code = 1
        with contextlib.suppress(BaseException):
            work()
            code = 0
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), "the work failed before it was killed"
    return code != 0
