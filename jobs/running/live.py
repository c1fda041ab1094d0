"""What goes on inside the chunks under way: asks in flight, what became of the answers, and the engine's own work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from relabel.jobs.output import shown
from relabel.manifests.asks import NO_WORK, Answer, EngineWork

FIRST_ANSWERS = 16
"""So many answers of which none was accepted are worth a word: chance spoils some, and a wrong prompt all."""
MOST = 2**53
"""More of anything than a run counts, and as much as a float holds whole."""
SHOWN_CHARS = 200
MOST_CHARS = 1_000
"""Of an answer's text that is passed on while the run goes on."""


@dataclass(frozen=True, slots=True)
class RefusedAnswer:
    """An answer that could not be read.

    Args:
        attempt: which of the row's attempts at this stage it was, from 1.
        status: what the row would be quarantined as.
        finish: how the engine ended it.
    """

    row_id: int
    stage: str
    attempt: int
    status: str
    finish: str
    reason: str
    text: str

    def line(self) -> str:
        """Which one it was, and the text's first line that is not empty, as a terminal may show it."""
        first = next((line for line in self.text.splitlines() if line.strip()), "") or "(no text)"
        return f"row {self.row_id}, {self.stage}, {self.status}: {_cut(self.reason)}: {_cut(first)}"


@dataclass(slots=True)
class StageSeen:
    """Of one stage's answers: how many, those of them to a first attempt, their tokens, and the sum of the squares of
    the output tokens.
    """

    answers: int = 0
    first_attempts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    output_squares: int = 0

    def add(self, answer: Answer, *, is_first: bool) -> None:
        """Another answer."""
        self.answers += 1
        self.first_attempts += is_first
        self.prompt_tokens += answer.prompt_tokens
        self.cached_tokens += answer.cached_tokens
        self.output_tokens += answer.output_tokens
        self.output_squares += answer.output_tokens**2

    def tokens(self) -> dict[str, int]:
        """By the names that `Progress` has for them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
        }


@dataclass(slots=True)
class Live:
    """Of one worker, or of several together; an answer that several rows share counts once.

    Args:
        in_flight: asks that the engine has.
        refused: answers by the status that their rows would be quarantined as.
        work: what the engine has run, where it tells.
        begun_chunks, begun_rows, rows_in: chunks that are begun and not done, their rows, and those of these that are
            in.
    """

    in_flight: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    last_refused: RefusedAnswer | None = None
    work: EngineWork = NO_WORK
    begun_chunks: int = 0
    begun_rows: int = 0
    rows_in: int = 0

    @property
    def counts(self) -> tuple[int, ...]:
        """All of them, for who checks what was read from a file."""
        rows = self.begun_chunks, self.begun_rows, self.rows_in
        return self.in_flight, self.accepted, *self.refused.values(), *rows

    def count(self, read_as: Sequence[RefusedAnswer | None]) -> None:
        """Count an answer.

        Args:
            read_as: of each row that it is for; None where it could be read, of which one is enough.
        """
        failed = [one for one in read_as if one is not None]
        if failed:
            self.last_refused = failed[-1]
        if len(failed) < len(read_as):
            self.accepted += 1
        else:
            self.refused[failed[-1].status] += 1

    def add(self, other: Live) -> None:
        """Another worker's beside this."""
        self.in_flight += other.in_flight
        self.accepted += other.accepted
        self.refused.update(other.refused)
        self.last_refused = other.last_refused or self.last_refused
        self.work = self.work.plus(other.work)
        self.begun_chunks += other.begun_chunks
        self.begun_rows += other.begun_rows
        self.rows_in += other.rows_in

    def in_short(self) -> Live:
        """The same with no more of the last refused answer than anybody shows."""
        last = self.last_refused
        return self if last is None else replace(self, last_refused=replace(last, text=last.text[:MOST_CHARS]))

    def answers_text(self) -> str:
        """Answers by what became of them: `41 answered: 25 accepted, 16 refused (14 format, 2 truncated)`."""
        refused = self.refused.total()
        by_status = ", ".join(f"{count:,} {status}" for status, count in sorted(self.refused.items()))
        return f"{self.accepted + refused:,} answered: {self.accepted:,} accepted, {refused:,} refused" + (
            f" ({by_status})" if by_status else ""
        )

    def warning(self) -> str | None:
        """What to say where the first answers were all refused."""
        if self.accepted or self.refused.total() < FIRST_ANSWERS or self.last_refused is None:
            return None
        why = "the server or engine does not answer, or refuses"
        if self.refused.keys() - {"engine", "refused", "overlong"}:
            why = "the model may be too small for this labeler, or its room to answer too short"
        return (
            f"none of the first {self.refused.total():,} answers was accepted ({', '.join(sorted(self.refused))}): "
            f"{why}. `relabel ask` shows whole answers. The last one: {self.last_refused.line()}"
        )


def _cut(text: str) -> str:
    line = shown(" ".join(text.split()))
    return line if len(line) <= SHOWN_CHARS else f"{line[:SHOWN_CHARS]}…"
