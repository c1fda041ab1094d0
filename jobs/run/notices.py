"""What a reader of a run's labels should know: grades that do not vary any more, distributions over a small share of
the model's mass; and why the last execution ended early. Kept in the output, for `relabel status` and reports.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter, ne
from typing import NamedTuple

from relabel.manifests.errors import RelabelError
from relabel.manifests.labels import MOST_OUTSIDE_MASS
from relabel.manifests.records import checked, plain, readable_json, version_of
from relabel.manifests.secrets import redacted, redacted_values
from relabel.manifests.store import Store, read_if_there

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------
# Grades that varied and are all the same now.

LEAST_ROWS = 100
"""Rows in a row with one grade, before that is worth a warning."""
LEAST_CHANGES = 10
"""Changes from one row to the next before them: in an input that is sorted by grade there are hardly any."""
CHANCE = 1e-9
"""So unlikely must it be, by the queries before, that as many in a row have that one grade alone."""


class Graded(NamedTuple):
    """A row that was asked and has a grade."""

    row_id: int
    query_id: str
    grade: int


@dataclass(slots=True)
class GradeJump:
    """Labels in a row, in the order of their chunks, that have one grade, where those before them varied.

    Args:
        first_row: id of the first of them.
        before: the labels before them, by grade.
    """

    grade: int
    rows: int
    queries: int
    first_row: int
    before: dict[str, int]

    @property
    def text(self) -> str:
        """In a sentence."""
        counts = ", ".join(f"{count:,} of grade {grade}" for grade, count in sorted(self.before.items()))
        return (
            f"from row {self.first_row} on {self.rows:,} labels in a row ({self.queries:,} queries) have grade "
            f"{self.grade}; before them were {counts}. If the input does not say why, the model or its server changed"
        )


class GradeWatch:
    """Watches the grades of one execution, in the order in which its chunks are done.

    Rows of one query are alike, so queries are counted: those whose rows all have one grade, and those that also have
    the grade of the query before.
    """

    def __init__(self) -> None:
        self._before = Counter[int]()
        self._uniform = Counter[int]()
        self._queries = 0
        self._alike = 0
        self._changes = 0
        self._run: list[Graded] = []
        self._run_queries = set[str]()
        self._jump: GradeJump | None = None

    def seed(self, rows: Iterable[Graded]) -> None:
        """Take note of labels of earlier executions."""
        self.add(rows)
        self._jump = None

    def add(self, rows: Iterable[Graded]) -> GradeJump | None:
        """Take note of a chunk's rows, in order.

        Returns:
            What there is to warn of, once; its counts go on while it lasts.
        """
        known = self._jump
        for query_id, group in groupby(rows, key=attrgetter("query_id")):
            self._add_query(query_id, list(group))
        return self._jump if self._jump is not known else None

    def _add_query(self, query_id: str, rows: list[Graded]) -> None:
        grades = [row.grade for row in rows]
        is_uniform = len(set(grades)) == 1
        is_alike = is_uniform and bool(self._run) and self._run[-1].grade == grades[0]
        if not is_alike:
            self._end_run()
        if not is_uniform:
            self._queries += 1
            self._changes += sum(map(ne, grades, grades[1:]))
            self._before.update(grades)
            return
        if not self._run and self._queries:
            self._changes += 1
        self._run_queries.add(query_id)
        if self._jump is not None:
            self._jump.rows += len(rows)
            self._jump.queries = len(self._run_queries)
            return
        self._run += rows
        if self._is_jump():
            first = self._run[0]
            before = {str(grade): count for grade, count in sorted(self._before.items())}
            self._jump = GradeJump(
                first.grade,
                len(self._run),
                len(self._run_queries),
                first.row_id,
                before,
            )

    def _end_run(self) -> None:
        """Count the queries of one grade that have just ended among those before, unless they were a jump."""
        if self._run and self._jump is None:
            num_queries = len(self._run_queries)
            self._queries += num_queries
            self._uniform[self._run[0].grade] += num_queries
            self._alike += num_queries - 1
            self._before[self._run[0].grade] += len(self._run)
        self._run = []
        self._run_queries = set()
        self._jump = None

    def _is_jump(self) -> bool:
        if len(self._run) < LEAST_ROWS or self._changes < LEAST_CHANGES:
            return False
        share = (max(self._uniform[self._run[0].grade], self._alike) + 1) / (self._queries + 2)
        return share ** len(self._run_queries) < CHANCE


# ------------------------------------------------------------------------------
# Mass outside the grades.


@dataclass(slots=True)
class OutsideMass:
    """Of so many labels with a distribution, the sum of the mass that was outside the grades."""

    rows: int = 0
    total: float = 0.0

    def add(self, other: OutsideMass) -> None:
        """Add another execution's."""
        self.rows += other.rows
        self.total += other.total

    @property
    def mean(self) -> float:
        return self.total / self.rows if self.rows else 0.0

    @property
    def text(self) -> str:
        """In a sentence; empty where there is nothing to warn of."""
        if self.mean <= MOST_OUTSIDE_MASS:
            return ""
        return (
            f"on average {self.mean:.2f} of the model's probability was outside the grades ({self.rows:,} labels): "
            "distributions are over the rest alone. Look at whole answers with `relabel ask`"
        )


def warnings_of(jumps: Sequence[GradeJump], outside: OutsideMass) -> list[str]:
    """All that there is to warn of, a sentence each."""
    texts = [jump.text for jump in jumps]
    if outside.text:
        texts.append(outside.text)
    return texts


# ------------------------------------------------------------------------------
# What is kept of it in the output: `notices/<worker>.json`, where there is something to warn of, and `stopped.json`.

FOLDER = "notices"
STOPPED = "stopped.json"
VERSION = 1


@dataclass(slots=True)
class Notices:
    """What one execution has to warn of."""

    version: int = VERSION
    jumps: list[GradeJump] = field(default_factory=list)
    outside: OutsideMass = field(default_factory=OutsideMass)


@dataclass(slots=True)
class Stopped:
    """Why the last execution ended early: the server or engine was to blame.

    Args:
        at: UTC, by the worker's clock.
        error: its kind.
    """

    version: int
    at: str
    error: str
    message: str

    @property
    def text(self) -> str:
        """In a line."""
        return f"{self.at}: {self.message}"


def keep_notices(store: Store, worker: str, jumps: list[GradeJump], outside: OutsideMass) -> None:
    """Write down what an execution has to warn of; nothing where there is nothing."""
    if warnings_of(jumps, outside):
        _keep(store, f"{FOLDER}/{worker}.json", Notices(VERSION, jumps, outside))


def load_warnings(store: Store, outside: OutsideMass | None = None) -> list[str]:
    """What all executions of an output had to warn of. A file that can't be read is left out.

    Args:
        outside: of all labels, where the caller has read them: executions that were killed, or had too little outside
            to warn of it, noted nothing.
    """
    jumps = list[GradeJump]()
    noted = OutsideMass()
    for name in store.names(FOLDER):
        with contextlib.suppress(ValueError):
            values = json.loads(read_if_there(store, name) or b"{}")
            if version_of(values) == VERSION:
                notices = checked(Notices, values)
                jumps += notices.jumps
                noted.add(notices.outside)
    return warnings_of(jumps, noted if outside is None else outside)


def keep_stop(store: Store, error: RelabelError) -> None:
    """Write down why this execution ends early."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    _keep(store, STOPPED, Stopped(VERSION, now, type(error).__name__, redacted(str(error))))


def load_stop(store: Store) -> Stopped | None:
    """Why the last execution ended early; None where it did not."""
    with contextlib.suppress(ValueError):
        values = json.loads(read_if_there(store, STOPPED) or b"{}")
        if version_of(values) == VERSION:
            return checked(Stopped, values)
    return None


def forget_stop(store: Store) -> None:
    """An execution has begun since."""
    if load_stop(store) is not None:
        with contextlib.suppress(OSError, RelabelError):
            store.remove(STOPPED)


def _keep(store: Store, name: str, record: Notices | Stopped) -> None:
    try:
        store.put(name, readable_json(redacted_values(plain(record))))
    except (OSError, RelabelError) as exc:
        logger.warning("%s/%s: can't be written (%s); going on without", store.root, name, exc)
