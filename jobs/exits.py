"""Exit codes: one table, and which error ends in which code."""

from __future__ import annotations

from enum import IntEnum

from relabel.manifests import errors


class Exit(IntEnum):
    """What a scheduler sees. Cron jobs treat 0 and 10 as good, 20 and 75 as 'again later'."""

    DONE = 0
    OUR_FAULT = 1
    USAGE = 2
    BAD_INPUT = 3
    MISSING = 4
    GATE = 5
    NOTHING_TO_DO = 10
    PARTIAL = 20
    OVER_LIMIT = 30
    LOCKED = 75
    STOPPED = 130


_CODES: tuple[tuple[type[errors.RelabelError], Exit], ...] = (
    (errors.UsageError, Exit.USAGE),
    (errors.LockHeldError, Exit.LOCKED),
    (errors.GateError, Exit.GATE),
    (errors.NothingNewError, Exit.NOTHING_TO_DO),
    (errors.TransientError, Exit.PARTIAL),
    (errors.MissingExtraError, Exit.MISSING),
    (errors.ModelError, Exit.MISSING),
    (errors.EngineLostError, Exit.MISSING),
    (errors.RelabelError, Exit.BAD_INPUT),
)
"""The first kind that an error is of decides."""


def exit_for(error: errors.RelabelError) -> Exit:
    """The code for an error that reached the top."""
    return next(code for kind, code in _CODES if isinstance(error, kind))
