"""What other commands commit of the run that a pool is at, for the pool's line of progress."""

from __future__ import annotations

import contextlib
import time

from relabel.jobs.running import sessions
from relabel.jobs.running.sessions import Session
from relabel.manifests.errors import StoreUnreachableError

HEARD_AFTER_S = 1.0
"""What workers of the pool have committed is heard of by then, seconds."""


class OtherCommands:
    """Lists the receipts now and then; what the pool's own workers have not committed of them is others'.

    The workers' word comes later than their receipts: what they have told by the time of the listing is the least that
    is theirs of it, and what they have told a while later is the most.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._every_s = sessions.look_at_all_every_s(session.opened.plan)
        self._next_s = time.monotonic() + self._every_s
        self._listed: tuple[int, int] | None = None

    def update(self) -> None:
        """Look, if it is time to."""
        now = time.monotonic()
        if now < self._next_s:
            return
        progress, left = self._session.progress, self._session.left
        if self._listed is not None:
            listed, told = self._listed
            progress.others.saw_in_all(listed - progress.rows_committed, listed - told)
            self._listed, self._next_s = None, now + self._every_s
            return
        self._next_s = now + HEARD_AFTER_S
        with contextlib.suppress(StoreUnreachableError):  # whoever has to do with the labels says so
            told, seen = progress.rows_committed, self._session.opened.folder.attempts_of_all()
            done = (left.done_since(shard, seen.get(shard, {})) for shard in self._session.shards)
            self._listed = sum(sum(rows.values()) for rows in done), told
