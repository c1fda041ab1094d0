"""The rule map φ(s, a) → grade, as data: which grade follows from how well the subject and the attribute match.

The labeler checks with it whether a teacher's own grade agrees with its two scores; a student's induced grade
distribution sums over it.

Source: Graph-GRPO, "mapping function over the two scores"; the paper leaves the map open, the default is ours
(`DEFAULT_PHI`).
"""

from __future__ import annotations

from collections.abc import Sequence

from relabel.manifests.errors import ConfigError

PhiTable = tuple[tuple[int, ...], ...]
"""Row = subject score s, column = attribute score a, both 0..4; the cell is a grade 0..K-1."""

NODE_SCORES = 5
"""Scores that a matching node takes: 0 no intent, 1 mismatch, 2 weak, 3 partial, 4 exact."""

DEFAULT_PHI: PhiTable = (
    (2, 0, 1, 1, 2),
    (0, 0, 0, 0, 0),
    (1, 0, 1, 1, 1),
    (1, 0, 1, 1, 1),
    (2, 0, 1, 1, 2),
)
"""A score of 0 asks for nothing, so it counts as 4; then the weaker of the two decides: 4 → 2, 3 or 2 → 1, 1 → 0."""


DEFAULT_GRADES = 3
"""Grades that `DEFAULT_PHI` speaks of; there is none for another scale."""


def default_phi(grades: int, *, key: str) -> PhiTable:
    """The built-in map, where it fits.

    Args:
        grades: number of grades K.
        key: what the user calls the table, for messages.
    Raises:
        ConfigError: K is not 3; shows what to write, with a table of the same rule for K grades.
    """
    if grades == DEFAULT_GRADES:
        return DEFAULT_PHI
    # the default's rule over K grades: 0 counts as 4, the weaker score decides, 1 to 4 spread evenly over the scale
    rows = []
    for subject in range(NODE_SCORES):
        weaker = [min(subject or 4, attribute or 4) for attribute in range(NODE_SCORES)]
        rows.append(str([(score - 1) * (grades - 1) // 3 for score in weaker]))
    raise ConfigError(
        f"`{key}` is missing: the built-in rule map gives grades 0 to {DEFAULT_GRADES - 1}, and there are {grades}. "
        "Say which grade follows from each pair of scores: five rows (subject score 0..4) of five grades "
        f"0..{grades - 1} (attribute score 0..4), for instance phi: [{', '.join(rows)}]"
    )


def unreached_grades(table: PhiTable, grades: int) -> list[int]:
    """Grades that no pair of scores gives."""
    return sorted(set(range(grades)).difference(*table))


def check_phi(table: Sequence[Sequence[int]], *, grades: int) -> PhiTable:
    """Return `table` as a `PhiTable`.

    Args:
        table: five rows (subject score 0..4) of five grades (attribute score 0..4).
        grades: number of grades K; every cell is in 0..K-1.
    Raises:
        ConfigError: a wrong number of rows or columns, or a cell that is not a grade.
    """
    sizes = [len(row) for row in table]
    cells = set[int]().union(*table)
    if sizes != [NODE_SCORES] * NODE_SCORES or not cells <= set(range(grades)):
        raise ConfigError(
            f"phi has rows of {sizes} cells, {sorted(cells)} among them; expected {NODE_SCORES} rows (subject score 0 "
            f"to {NODE_SCORES - 1}) of {NODE_SCORES} grades 0 to {grades - 1} (attribute score 0 to {NODE_SCORES - 1})"
        )
    return tuple(tuple(row) for row in table)


def phi_grade(table: PhiTable, subject: int, attribute: int) -> int:
    """φ(s, a): the grade that follows from the two node scores, each 0..4."""
    return table[subject][attribute]
