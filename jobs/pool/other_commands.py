"""What other commands commit of the run that a pool is at, for the pool's line of progress."""

from __future__ import annotations

import contextlib
import time

from jobs.running import sessions
from jobs.running.sessions import Session
from manifests.errors import StoreUnreachableError

HEARD_AFTER_S = 1.0
"""What workers of the pool have committed is heard of by then, seconds."""


class OtherCommands:
    """Lists the receipts now and then; what the pool's own workers have not committed of them is others'.

    The workers' word comes later than their receipts. So what they told is taken off a while after the listing: a row
    of theirs is never said to be another's.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._every_s = sessions.look_at_all_every_s(session.opened.plan)
        self._next_s = time.monotonic() + self._every_s
        self._listed: int | None = None

    def update(self) -> None:
        """Look, if it is time to."""
        now = time.monotonic()
        if now < self._next_s:
            return
        progress, left = self._session.progress, self._session.left
        if self._listed is not None:
            progress.others.saw_in_all(self._listed - progress.rows_committed)
            self._listed, self._next_s = None, now + self._every_s
            return
        self._next_s = now + HEARD_AFTER_S
        with contextlib.suppress(StoreUnreachableError):  # whoever has to do with the labels says so
            seen = self._session.opened.folder.attempts_of_all()
            self._listed = sum(sum(left.done_since(one, seen.get(one, {})).values()) for one in self._session.shards)
