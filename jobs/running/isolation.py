"""Which rows may have brought an engine down: a group that was in flight at a crash is asked apart, in ever smaller
pieces, until one row is caught alone twice. Deciding only: who asks, and who restarts engines, is said elsewhere
(`crash_journal.py`, `jobs/pool/supervise.py`).

A group is cut into eighths, not halves. Each crash costs the start of an engine (a minute on a GPU) and each innocent
group a few seconds, so that among 512 rows the one is found after 5 crashes instead of 11.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from relabel.manifests.runs.receipts import ChunkId

PIECES = 8
"""Into how many groups a group is cut that brought an engine down."""
TIMES_CAUGHT = 2
"""How often a row must bring an engine down alone before it is not asked any more."""


@dataclass(slots=True)
class ChunkCase:
    """What is held against the rows of one chunk.

    Args:
        groups: row ids to be asked apart, group by group.
        isolated_rows: rows that are not asked any more, by row id, and why.
    """

    groups: list[list[int]] = field(default_factory=list)
    isolated_rows: dict[int, str] = field(default_factory=dict)


def plain_cases(cases: dict[ChunkId, ChunkCase]) -> list[Any]:
    """Cases as JSON holds them."""
    return [[list(chunk), case.groups, list(case.isolated_rows.items())] for chunk, case in cases.items()]


def read_cases(plain: list[Any]) -> dict[ChunkId, ChunkCase]:
    """The inverse of `plain_cases`."""
    return {
        ChunkId(*chunk): ChunkCase(groups, {int(row): why for row, why in isolated_rows})
        for chunk, groups, isolated_rows in plain
    }


class Isolation:
    """Every chunk's case. Row ids are unique in a run, so that one count serves all chunks."""

    def __init__(self) -> None:
        self.cases: dict[ChunkId, ChunkCase] = {}
        self.num_isolated = 0
        self._caught: Counter[int] = Counter()

    @classmethod
    def of(cls, plain: dict[str, Any], still_open: Collection[ChunkId]) -> Isolation:
        """The inverse of `plain`, without the cases of chunks that are done."""
        found = cls()
        found.cases = {chunk: case for chunk, case in read_cases(plain["cases"]).items() if chunk in still_open}
        found.num_isolated = plain["num_isolated"]
        found._caught = Counter({int(row): times for row, times in plain["caught"]})
        return found

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "cases": plain_cases(self.cases),
            "num_isolated": self.num_isolated,
            "caught": list(self._caught.items()),
        }

    def crashed(self, in_flight: dict[ChunkId, list[int]]) -> None:
        """An engine went down at its ordinary work: whatever was in flight is isolated, in groups of an eighth of
        it all.
        """
        size = _piece(sum(map(len, in_flight.values())))
        for chunk, rows in in_flight.items():
            case = self.cases.setdefault(chunk, ChunkCase())
            known = {row for group in case.groups for row in group} | set(case.isolated_rows)
            case.groups += _cut([row for row in rows if row not in known], size)

    def crashed_apart(self, chunk: ChunkId, in_flight: list[int], reason: str) -> int | None:
        """A working engine went down with these rows of one group in flight and nothing else.

        Args:
            in_flight: at least one row.
            reason: how it went down, for the quarantine.
        Returns:
            The row that is isolated by this, if one is.
        """
        case = self.cases.setdefault(chunk, ChunkCase())
        self._drop(case, set(in_flight))
        if len(in_flight) > 1:
            case.groups[:0] = _cut(in_flight, _piece(len(in_flight)))
            return None
        row = in_flight[0]
        if row in case.isolated_rows:  # by another worker that was at the same chunk
            return row
        self._caught[row] += 1
        if self._caught[row] < TIMES_CAUGHT:
            case.groups.insert(0, [row])
            return None
        case.isolated_rows[row] = (
            f"the engine went down {self._caught[row]} times while it was asked this row and nothing else: {reason}"
        )
        self.num_isolated += 1
        return row

    def cleared(self, chunk: ChunkId, rows: list[int]) -> None:
        """Rows that were asked apart were answered: they are as good as any."""
        if chunk in self.cases:
            self._drop(self.cases[chunk], set(rows))
        for row in rows:
            self._caught.pop(row, None)

    def committed(self, chunk: ChunkId) -> None:
        """A chunk is durable: its case is closed."""
        case = self.cases.pop(chunk, None)
        for row in case.isolated_rows if case is not None else ():
            self._caught.pop(row, None)

    @staticmethod
    def _drop(case: ChunkCase, rows: set[int]) -> None:
        case.groups = [left for group in case.groups if (left := [row for row in group if row not in rows])]


def _piece(count: int) -> int:
    return max(1, -(-count // PIECES))


def _cut(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
