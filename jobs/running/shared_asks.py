"""Asks that several rows share: each is asked once, by its key, and its answer is kept for a while, for rows to come
and for later runs.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from relabel.jobs.running.chunks import ChunkWork
from relabel.jobs.running.trajectories import Trajectory
from relabel.manifests.asks import Answer, Ask
from relabel.manifests.runs.known_answers import answer_of
from relabel.manifests.schemas import AnswerRow

SHARED_ANSWERS_KEPT = 4096
"""Answers kept for pairs still to come; rows of a query lie together, so a few would do."""


class AnswerBook(Protocol):
    """Answers that rows share, kept from run to run."""

    def key(self, ask: Ask, round_number: int, sample: int, attempt: int) -> bytes:
        """What the answer to an ask is kept under."""
        ...

    def find(self, key: bytes) -> AnswerRow | None:
        """The answer of an earlier run, if one is known."""
        ...


class AskKeys:
    """Identities of asks under one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._static: dict[object, bytes] = {}
        self._last: tuple[Ask, tuple[int, ...], bytes] | None = None

    def key(self, ask: Ask, round_number: int, sample: int, attempt: int) -> bytes:
        """Identity of an ask, 16 bytes: what is asked, for which sample and attempt, under which seed. The seed is its
        first 63 bits.

        The answer's format is left out: it follows from the stage's name, the decisions and the labeler, which the
        fingerprint names.
        """
        last, which = self._last, (round_number, sample, attempt)
        if last is not None and last[0] is ask and last[1] == which:
            return last[2]  # thousands of rows may share one ask of a hundred thousand characters
        static = (ask.stage, ask.max_tokens, ask.prefill, ask.sampling, ask.decisions, *which)
        head = self._static.get(static)
        if head is None:
            head = self._static[static] = f"{self._seed}|{static!r}".encode()
        digest = blake2b(head, digest_size=16)
        if ask.shared_by is not None:
            digest.update(ask.shared_by.encode("utf-8", "surrogatepass"))
        for message in ask.messages:
            text = "\x1f".join(message.parts)
            digest.update(f"\x1e{message.role}{len(text)}".encode())
            digest.update(text.encode("utf-8", "surrogatepass"))
        self._last = ask, which, digest.digest()
        return self._last[2]


@dataclass(slots=True, eq=False)
class SharedAsk:
    """A shared ask: who waits for it, then its answer; and what the answer is kept under."""

    answer: Answer | None = None
    kept_as: bytes | None = None
    waiters: list[Trajectory] = field(default_factory=list)

    def take_from(self, answer_cache: AnswerBook, trajectory: Trajectory) -> bool:
        """Take the answer of an earlier run, if one had it; the trajectory is the first that asks."""
        work: ChunkWork = trajectory.open.work
        assert trajectory.ask is not None
        self.kept_as = answer_cache.key(trajectory.ask, work.round, trajectory.sample, trajectory.attempt)
        known = answer_cache.find(self.kept_as)
        if known is None:
            return False
        self.answer = answer_of(known)
        work.answers.append(known)
        work.reused_answers += 1
        return True


class SharedAsks(OrderedDict[bytes, SharedAsk]):
    """Shared asks by key; those answered last are at the end."""

    def forget_old(self) -> None:
        """Keep `SHARED_ANSWERS_KEPT` at most, and all that are in flight."""
        while len(self) > SHARED_ANSWERS_KEPT:
            key, oldest = next(iter(self.items()))
            if oldest.answer is None:
                # still in flight: it moves to the end once answered, and the next answer sweeps again
                return
            del self[key]
