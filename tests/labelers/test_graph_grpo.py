"""`graph-grpo`: seven nodes, four distributions, and the rule map's verdict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from relabel.manifests.asks import Distribution
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import DEFAULT_PHI, Label
from tests.labelers.driving import ROSES, fake, labeler, reply, walk

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
    generator = labeler("graph-grpo", **options).label(ROSES)
    next(generator)
    with pytest.raises(StopIteration) as end:
        generator.send(reply(text, distributions=distributions))
    return end.value.value


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


def test_with_two_grades_the_scale_has_no_grades_between() -> None:
    system = labeler("graph-grpo", grades=2, phi=[[0, 1, 1, 0, 1]] * 5).probe()[0].messages[0].text
    assert "between" not in system


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


def test_label_first_sections_and_four_decisions() -> None:
    (ask,) = walk(labeler("graph-grpo"), ROSES, fake())[1]
    assert ask.format is not None
    assert ask.format.sections[0].tag == "preliminary"
    assert ask.format.sections[-1].tag == "score"
    assert [(d.name, d.marker, len(d.labels)) for d in ask.decisions] == [
        ("preliminary", "<preliminary>", 3),
        ("subject", "<subject_score>", 5),
        ("attribute", "<attribute_score>", 5),
        ("score", "<score>", 3),
    ]
