"""Leases on a real server: one holder, dead by the server's own dates, taken over on condition; a sleeper that wakes
harms nobody.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest

from relabel.manifests.errors import LockHeldError
from relabel.manifests.store import ObjectRunStore

DEAD_S = 5.0
"""A lease of three seconds is dead by then: the server's dates are whole seconds."""


def test_a_live_lease_is_refused_and_a_dead_one_taken_over_whatever_a_workers_own_clock_says(
    open_fresh: Callable[..., ObjectRunStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of this process is moved where relabel asks for it; requests are signed by the true one, or the server
    would refuse them.
    """
    true, off_s = time.time, [0.0]
    monkeypatch.setattr(
        time,
        "time",
        lambda: true() + (off_s[0] if sys._getframe(1).f_globals.get("__name__", "").startswith("relabel.") else 0.0),
    )
    first = open_fresh(lease_s=3).lock("shard-00000", "shard 0")
    first.acquire()
    second = open_fresh(lease_s=3).lock("shard-00000", "shard 0")
    off_s[0] = 3600.0
    with pytest.raises(LockHeldError, match="shard 0 is being worked on"):
        second.acquire()
    time.sleep(DEAD_S)
    with pytest.raises(LockHeldError):  # its holder lives, and renews it
        second.acquire()
    first._keeper.remove(first)  # as if its process slept
    time.sleep(DEAD_S)
    off_s[0] = -3600.0
    second.acquire()
    assert (first.epoch, second.epoch) == (1, 2)
    first.renew()
    assert first.is_lost
    assert not second.is_lost
    first.release()
    assert second.is_alive()
    second.release()
    assert not second.is_alive()
