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


def exit_for(error: errors.RelabelError) -> Exit:
    """The code for an error that reached the top."""
    if isinstance(error, errors.UsageError):
        return Exit.USAGE
    if isinstance(error, errors.LockHeldError):
        return Exit.LOCKED
    if isinstance(error, errors.GateError):
        return Exit.GATE
    if isinstance(error, errors.NothingNewError):
        return Exit.NOTHING_TO_DO
    if isinstance(error, errors.TransientError):
        return Exit.PARTIAL
    if isinstance(error, errors.MissingExtraError | errors.ModelError | errors.EngineLostError):
        return Exit.MISSING
    return Exit.BAD_INPUT
