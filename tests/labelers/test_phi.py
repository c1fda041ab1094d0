"""The rule map φ(s, a)."""

from __future__ import annotations

import pytest
import yaml

from relabel.manifests.errors import ConfigError
from relabel.manifests.labels import DEFAULT_PHI, check_phi, phi_grade, unreached_grades
from tests.labelers.driving import labeler


def test_the_default_is_the_rule_that_the_specification_gives() -> None:
    for s in range(5):
        for a in range(5):
            weaker = min(4 if s == 0 else s, 4 if a == 0 else a)
            assert phi_grade(DEFAULT_PHI, s, a) == {4: 2, 3: 1, 2: 1, 1: 0}[weaker]
    assert check_phi([list(row) for row in DEFAULT_PHI], grades=3) == DEFAULT_PHI


@pytest.mark.parametrize(
    ("table", "grades", "message"),
    [
        (DEFAULT_PHI[:4], 3, "phi has 4 rows, expected 5"),
        ((*DEFAULT_PHI[:4], (0, 0)), 3, r"phi row 4 \(subject score 4\) has 2 cells, expected 5"),
        (DEFAULT_PHI, 2, r"phi row 0, column 0 .* is 2, expected a grade 0..1"),
        (((0, -1, 0, 0, 0), *DEFAULT_PHI[1:]), 3, "phi row 0, column 1 .* is -1"),
        (((True, 0, 0, 0, 0), *DEFAULT_PHI[1:]), 3, "phi row 0, column 0 .* is True"),
    ],
)
def test_a_table_that_is_off_names_its_cell(table, grades: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_phi(table, grades=grades)


def test_the_spec_checks_the_table_against_the_grades() -> None:
    with pytest.raises(ConfigError, match=r"phi row 0, column 0 .* expected a grade 0\.\.1"):
        labeler("graph-grpo", grades=2, phi=DEFAULT_PHI)
    labeler("graph-grpo", phi=[[0, 1, 2, 0, 1]] * 5)
    labeler("graph-grpo", grades=3)


@pytest.mark.parametrize("grades", [2, 4, 5, 10])
def test_another_number_of_grades_wants_a_map_and_the_error_holds_one_that_is_taken(grades: int) -> None:
    """The built-in map stops at 2: with four grades a teacher that says 3 would disagree with it everywhere, and nobody
    would be reported.
    """
    with pytest.raises(ConfigError, match=r"`labeler\.phi` is missing: .* and there are") as caught:
        labeler("graph-grpo", grades=grades)
    offered = yaml.safe_load(str(caught.value).partition("for instance phi: ")[2])
    labeler("graph-grpo", grades=grades, phi=offered)
    assert (offered[0][0], offered[4][4], offered[1][4]) == (grades - 1, grades - 1, 0)
    assert len(unreached_grades(check_phi(offered, grades=grades), grades)) == max(0, grades - 4)


def test_a_map_that_never_gives_a_grade_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    labeler("graph-grpo")
    assert not caplog.records
    labeler("graph-grpo", grades=5, phi=DEFAULT_PHI)
    assert [record.getMessage() for record in caplog.records] == [
        "labeler.phi gives no pair of scores grade 3 or 4: wherever the teacher writes it, phi_agrees is false."
    ]
