"""How long a storage call is tried again: exponential backoff with full jitter, up to a stated limit of tries and
seconds.

This is the only retry policy there is: those of botocore and s3fs are switched off (`filesystems.py`), so that what is
stated here is what happens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from relabel.manifests.errors import StoreUnreachableError

ResultT = TypeVar("ResultT")

MAX_TRIES = 12
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 15.0


class TryAgainError(Exception):
    """No good answer (throttled, a fault of the server, a broken connection, a time-out). Whether the call acted is not
    known.
    """


@dataclass(frozen=True, slots=True)
class Retries:
    """Limits of one kind of call.

    Args:
        limit_s: no try begins later than this after the first, seconds (`Storage.retry_s`).
    """

    limit_s: float
    tries: int = MAX_TRIES

    def call(self, function: Callable[[], ResultT], what: str) -> ResultT:
        """Call until it answers.

        The pause before try k + 1 is drawn evenly from 0 to `min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**(k - 1))`, so that
        many workers that were throttled together do not come back together.

        Args:
            function: may raise TryAgainError; it must be safe to call again then.
            what: what is tried, for the message: a name and a verb.
        Raises:
            StoreUnreachableError: the limit is reached.
        """
        started = time.monotonic()
        for number in range(1, self.tries + 1):
            try:
                return function()
            except TryAgainError as exc:
                waited = time.monotonic() - started
                pause = random.uniform(0.0, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (number - 1)))
                if number == self.tries or waited + pause > self.limit_s:
                    raise StoreUnreachableError(
                        f"{what}: no good answer in {number} tries over {waited:.0f} s (the last: {exc}). What was "
                        "committed is safe; run "
                        "the same command again."
                    ) from exc
            time.sleep(pause)
        raise AssertionError("unreachable: the last try returns or raises")
