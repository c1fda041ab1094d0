"""Every error that relabel raises on purpose, and whether the same command may work again.

    RelabelError
    ├── TransientError            the same command again may work
    │   ├── EngineCrashError      the engine process or device is gone; committed work is safe
    │   ├── ServerGoneError       the server that runs the model answers no more, or not for now
    │   │   └── UnreadableError   the engine answers, and nearly nothing of it can be read
    │   ├── PeerLostError         another of the processes that train together is gone; checkpoints are safe
    │   ├── LockHeldError         another process holds the shard
    │   ├── ChannelMovedError     another process moved the channel first; what was published is safe
    │   ├── StoreUnreachableError no good answer from the object store, often enough and long enough
    │   ├── DiskFullError         no space left; committed work is safe
    │   └── NothingNewError       nothing was added to the input yet
    └── TerminalError             the same command again fails the same way
        ├── UsageError            a flag or argument is off
        ├── ConfigError           a spec is off
        ├── InputError            the dataset is off
        ├── ManifestError         what is written down does not match what is there
        │   └── StaleRunError     an output that belongs to another job, or inputs that changed
        ├── StoreError            the file system or object store refuses
        ├── ModelError            a model reference, its files or its tokenizer is off
        ├── MissingExtraError     an optional package or device is absent
        ├── EngineLostError       the engine goes down again and again; committed work is safe
        ├── TrainingError         training can't go on: the loss is not finite, or memory is full
        │   └── SaidElsewhereError another of the processes that train together reports why
        ├── GateError             what is there is whole, and a rule forbids it: signature, downgrade, parity
        └── VerdictError          one answer holds no readable label (a row's fate, never a run's)

A message reports what, where, what was got and expected, and what to do. Lower-level text goes in the chain.
"""

from typing import Literal

FailureStatus = Literal["format", "truncated", "refused", "overlong", "engine", "text"]


class RelabelError(Exception):
    """Base of all errors that relabel raises on purpose."""


class TransientError(RelabelError):
    """The same command again may work."""


class TerminalError(RelabelError):
    """The same command again fails in the same way; something has to change first."""


class EngineCrashError(TransientError):
    """The engine is gone. Chunks that were committed stay; open ones are asked again by the next run."""


class ServerGoneError(TransientError):
    """The server that runs the model is gone, out of credit, or wants no request for long: no row is the reason, and
    another start would not help now. Committed work is safe; the same command goes on once it answers.
    """


class UnreadableError(ServerGoneError):
    """The engine has gone bad: nearly none of its answers can be read, and rows that it labelled before get no label
    when they are asked again. No row is the reason; the rows stay open.
    """


class PeerLostError(TransientError):
    """Another of the processes that train together is gone. Checkpoints that were written are good."""


class LockHeldError(TransientError):
    """Another live process holds the lock."""


class ChannelMovedError(TransientError):
    """Another publisher moved the channel since it was read. Check it, then run the same command again."""


class StoreUnreachableError(TransientError):
    """The object store gave no good answer within the stated limit. Committed work is safe; the same command goes on
    once it answers.
    """


class DiskFullError(TransientError):
    """No space is left. Committed work is safe; the same command goes on once there is space."""


class NothingNewError(TransientError):
    """Nothing was added to the input since the snapshot that was named. The same command works once there is."""


class UsageError(TerminalError, ValueError):
    """A command-line flag or argument is off."""


class ConfigError(TerminalError, ValueError):
    """A spec is off: names the field's path, the value got and what is allowed."""


class InputError(TerminalError, ValueError):
    """The dataset is off: names the file and the column or row."""


class ManifestError(TerminalError, ValueError):
    """A plan, receipt or manifest does not match what is there."""


class StaleRunError(ManifestError):
    """The output belongs to another job, or its inputs changed since they were planned."""


class StoreError(TerminalError, OSError):
    """The file system or object store refuses a read or write."""


class ModelError(TerminalError, ValueError):
    """A model reference, its files or its tokenizer is off."""


class MissingExtraError(TerminalError):
    """An optional package or a device is absent."""


class EngineLostError(TerminalError):
    """The engine went down again and again with nothing done in between. Starting it once more would not help;
    committed work is safe.
    """


class TrainingError(TerminalError):
    """Training can't go on: the loss is not finite, or the device has no memory for it. Checkpoints that were written
    are good.
    """


class SaidElsewhereError(TrainingError):
    """Another of the processes that train together reported why all of them end: here there is nothing to report."""


class GateError(TerminalError):
    """A rule that was asked for forbids it: an unsigned or downgraded bundle, a figure beyond its bound."""


class VerdictError(TerminalError, ValueError):
    """One answer holds no readable label.

    Args:
        status: the quarantine status that the row gets if no further attempt succeeds.
        reason: what is wrong with the answer, for a person.
    """

    def __init__(self, status: FailureStatus, reason: str) -> None:
        super().__init__(status, reason)
        self.status: FailureStatus = status
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.status}: {self.reason}"
