"""What several workers of a session read and none writes into is made once."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """`<the session's folder>/<name>`, made by the first that asks; others wait for it. Not to be written into."""
    base = factory.getbasetemp()
    made = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared" / name
    made.parent.mkdir(parents=True, exist_ok=True)
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = made.with_suffix(".done")
        if not done.exists():
            make(made)
            done.touch()
    return made
