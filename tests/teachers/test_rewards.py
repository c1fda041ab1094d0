"""What a rollout is worth."""

from __future__ import annotations

import pytest

from relabel.distill.teachers.rewards import graded_reward, node_rewards
from relabel.manifests.labels import Label


@pytest.mark.parametrize(
    ("grade", "gold", "near", "wanted"),
    [(2, 2, 0.2, 1), (1, 2, 0.2, 0.2), (1, 0, 0.0, 0), (0, 2, 0.2, 0), (3, 0, 0.5, 0), (None, 0, 0.5, 0)],
)
def test_a_grade_earns_by_its_distance(grade: int | None, gold: int, near: float, wanted: float) -> None:
    assert graded_reward(grade, gold, near=near) == wanted


def test_nodes_earn_one_by_one() -> None:
    label = Label(2, None, {"subject": 4, "attribute": 1})
    assert node_rewards(label, {"grade": 2, "subject": 3, "attribute": 1}) == (1, -1, 1)
    assert node_rewards(label, {"grade": 0, "subject": 4}, match=2, miss=0) == (0, 2, 0)


def test_an_unreadable_answer_misses_every_node_that_has_gold() -> None:
    assert node_rewards(None, {"grade": 2, "subject": 3, "attribute": 1}) == (-1, -1, -1)
    assert node_rewards(None, {"grade": 2, "subject": None}) == (-1, 0, 0)
