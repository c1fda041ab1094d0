"""What a comparison of two runs, A and B, found: the fields of its JSON, in their order. Differences are B minus A."""

from __future__ import annotations

from dataclasses import dataclass

from relabel.jobs.evaluate.sides import SideCut
from relabel.manifests.metrics.evaluation import Evaluation
from relabel.manifests.metrics.evaluation_of_both import Difference
from relabel.manifests.metrics.metric import MetricValue
from relabel.manifests.metrics.paired_tests import PairedTest


@dataclass(frozen=True)
class ComparedRun:
    """One of the two; `model` and `fingerprint` are digests, the last two count rows."""

    path: str
    name: str
    labeler: str
    model: str
    fingerprint: str
    labelled: int
    quarantined: int


@dataclass(frozen=True)
class RowCounts:
    """Rows by what each run has of them.

    Args:
        both: labelled by both; all that follows in a comparison is of these.
        quarantined_elsewhere_absent: in quarantine in one run, absent from the other.
        repeated: matched rows beyond the first of their pair, where rows are matched by ids.
    """

    both: int
    labelled_a: int
    labelled_b: int
    only_a: int
    only_b: int
    quarantined_a_only: int
    quarantined_b_only: int
    quarantined_both: int
    quarantined_elsewhere_absent: int
    repeated: int


@dataclass(frozen=True)
class GradeTests:
    """Tests that need no gold grades."""

    stuart_maxwell: PairedTest
    bowker: PairedTest


@dataclass(frozen=True)
class McNemar:
    """Rows where one run alone is right, and the test of whether both are right equally often; the rest as in
    `PairedTest`.
    """

    only_a_right: int
    only_b_right: int
    method: str
    statistic: float | None
    df: int | None
    p: float


@dataclass(frozen=True)
class AgainstGold:
    """Both runs by gold grades: matched rows that are judged, that have no grade, that have a null one; and queries of
    the judged.
    """

    qrels: str
    joined_by: str
    judged: int
    unjudged: int
    gold_null: int
    queries: int
    a: Evaluation
    b: Evaluation
    difference: dict[str, Difference]
    mcnemar: McNemar


@dataclass(frozen=True)
class FlipSide:
    """What one run says of a row."""

    grade: int
    expected_grade: float | None
    probs: list[float] | None
    reasoning: str | None


@dataclass(frozen=True)
class Flip:
    """A row whose grade changed; texts are cut, and None where they can't be read any more. `change` is of the expected
    grade.
    """

    row_a: int
    row_b: int
    query_id: str
    doc_id: str
    query: str | None
    document: str | None
    change: float
    a: FlipSide
    b: FlipSide


@dataclass(frozen=True)
class Flips:
    """Rows that changed their grade, and the largest of the changes."""

    rows: int
    up: int
    down: int
    examples: list[Flip]


@dataclass(frozen=True)
class MovedQuery:
    """A query whose mean score changed.

    Args:
        kendall_tau: of the two orders; None where either run scores all rows alike.
        entered_top: documents of B's `top` that are not in A's.
        first_changed: another document comes first.
    """

    query_id: str
    rows: int
    mean_a: float
    mean_b: float
    change: float
    kendall_tau: float | None
    entered_top: int
    top: int
    first_changed: bool


@dataclass(frozen=True)
class QueryMoveCounts:
    """How many queries there are, and how many moved, up or down, have other documents in their
    top, another one first.
    """

    queries: int
    moved: int
    up: int
    down: int
    top_changed: int
    first_changed: int


@dataclass(frozen=True)
class QueriesMoved(QueryMoveCounts):
    """The same, with the depth of the top and the queries that moved furthest."""

    depth: int
    moved_most: list[MovedQuery]


@dataclass(frozen=True)
class RunComparison:
    """Two runs compared.

    Args:
        differences: parts of the recipe that differ, each with its differing names.
        matched_by: how rows were matched, in words.
        grades: of both scales.
        confusion: rows by grade of A, columns by grade of B.
        gold: None where nobody judges.
    """

    a: ComparedRun
    b: ComparedRun
    differences: dict[str, list[str]]
    matched_by: str
    grades: int
    side: SideCut
    counts: RowCounts
    figures: dict[str, MetricValue]
    confusion: list[list[int]]
    tests: GradeTests
    gold: AgainstGold | None
    flips: Flips
    queries: QueriesMoved
    resamples: int
    seed: int
    notes: list[str]
