"""`graph-grpo`: seven nodes, four distributions, and the rule map's verdict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import yaml

from relabel.manifests.asks import Distribution
from relabel.manifests.errors import ConfigError, VerdictError
from relabel.manifests.labels import DEFAULT_PHI, Label, check_phi, phi_grade, unreached_grades
from tests.labelers.driving import ROSES, labeler, replay, reply

DISTS = {
    "preliminary": Distribution((0.6, 0.2, 0.2), 0.1),
    "subject": Distribution((0.0, 0.1, 0.1, 0.1, 0.7), 0.2),
    "attribute": Distribution((0.9, 0.1, 0.0, 0.0, 0.0), 0.3),
    "score": Distribution((0.1, 0.1, 0.8), 0.4),
}


def answer(**changed: str) -> str:
    contents = {
        "preliminary": "1",
        "query_subject": "roses",
        "query_attribute": "None",
        "product_subject": "a rose",
        "product_attribute": "red",
        "subject_score": "4",
        "attribute_score": "0",
        "score": "2",
    } | changed
    return "\n".join(f"<{tag}>{content}</{tag}>" for tag, content in contents.items())


def label_of(text: str, distributions: dict[str, Distribution] = DISTS, **options: Any) -> Label:
    label, _ = replay(labeler("graph-grpo", **options), ROSES, [reply(text, distributions=distributions)])
    assert label is not None
    return label


def test_a_label_holds_all_seven_nodes_and_the_rule() -> None:
    label = label_of(answer())
    assert (label.grade, label.distribution, label.flags) == (2, DISTS["score"], [])
    assert label.columns == {
        "preliminary": 1,
        "preliminary_probs": [0.6, 0.2, 0.2],
        "preliminary_outside_mass": 0.1,
        "subject": 4,
        "subject_probs": [0.0, 0.1, 0.1, 0.1, 0.7],
        "subject_outside_mass": 0.2,
        "attribute": 0,
        "attribute_probs": [0.9, 0.1, 0.0, 0.0, 0.0],
        "attribute_outside_mass": 0.3,
        "query_subject": "roses",
        "query_attribute": None,
        "product_subject": "a rose",
        "product_attribute": "red",
        "phi_grade": 2,
        "phi_agrees": True,
    }


def test_a_grade_that_the_rule_does_not_give_is_flagged() -> None:
    label = label_of(answer(score="1"))
    assert (label.columns["phi_grade"], label.columns["phi_agrees"], label.flags) == (2, False, ["phi_disagrees"])
    assert label_of(answer(attribute_score="1")).flags == ["phi_disagrees"]
    assert label_of(answer(score="1"), phi=[[1] * 5] * 5).flags == []


PHI = [[(s + a) % 3 for a in range(5)] for s in range(5)]


@pytest.mark.parametrize(("grades", "phi"), [(3, DEFAULT_PHI), (3, PHI), (2, [[0, 1, 1, 0, 1]] * 5)])
def test_the_prompt_says_the_jobs_own_rule_and_a_rule_that_it_does_not_say_flags_nothing(
    grades: int, phi: Sequence[Sequence[int]]
) -> None:
    options = {"grades": grades, "phi": phi}
    says, silent = (
        labeler("graph-grpo", **options, phi_in_prompt=is_shown).probe()[0].messages[0].text
        for is_shown in (True, False)
    )
    stated_rules = [line for line in says.splitlines() if line not in silent.splitlines()]
    assert stated_rules[0] == "The final grade follows from the two scores:"
    read = [re.findall(r"(\d) gives (\d)", line) for line in stated_rules[1:]]
    assert [[int(grade) for _, grade in row] for row in read] == [list(row) for row in phi]
    assert [line.partition(":")[0] for line in stated_rules[1:]] == [f"subject score {s}" for s in range(5)]
    assert [[int(a) for a, _ in row] for row in read] == [list(range(5))] * 5
    label = label_of(answer(score="1"), phi_in_prompt=False)
    assert (label.columns["phi_agrees"], label.flags) == (False, [])


@pytest.mark.parametrize("missing", sorted(DISTS))
def test_one_distribution_missing_is_flagged(missing: str) -> None:
    label = label_of(answer(), {name: d for name, d in DISTS.items() if name != missing})
    assert label.flags == ["no_distribution"]
    assert missing == "score" or label.columns[f"{missing}_probs"] is None


@pytest.mark.parametrize(
    "changed",
    [{"subject_score": "5"}, {"preliminary": "3"}, {"score": "2."}, {"query_subject": " "}, {"attribute_score": ""}],
)
def test_a_node_off_its_scale_is_no_label(changed: dict[str, str]) -> None:
    with pytest.raises(VerdictError) as caught:
        label_of(answer(**changed))
    assert caught.value.status == "format"


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
