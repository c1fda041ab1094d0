"""`ensemble`: the label is the mean of what several instructions gave, and each judge can be read from its column."""

from __future__ import annotations

import numpy as np
import pytest

from relabel.manifests.asks import Answer, Distribution
from relabel.manifests.errors import ConfigError, VerdictError
from tests.labelers.driving import ROSES, fake, labeler, walk

TWO = {"instructions": ["By facts.", "By {{ taste }} and <score>."], "grades": 3}


def test_the_label_is_the_mean_and_the_column_holds_each_judge() -> None:
    label, asks, answers = walk(labeler("ensemble", grades=4), ROSES, fake())
    judges = np.array([answer.distributions["score"].probs for answer in answers])
    assert len(asks) == len({ask.stage for ask in asks}) == 3
    assert len(np.unique(judges, axis=0)) == 3
    assert label.distribution.probs == pytest.approx(judges.mean(0), abs=1e-12)
    assert label.grade == int(judges.mean(0).argmax())
    assert label.columns["judge_probs"] == pytest.approx(judges.ravel())


def test_prompts_differ_after_the_document_alone_and_an_instruction_is_plain_text() -> None:
    first, second = labeler("ensemble", **TWO).probe()
    assert first.messages[0] == second.messages[0]
    assert first.messages[1].parts[:-1] == second.messages[1].parts[:-1]
    assert "By {{ taste }} and <score>." in second.messages[1].parts[-1]
    assert (first.max_tokens, first.decisions[0].labels) == (0, ("0", "1", "2"))


def test_a_judge_without_a_distribution_leaves_no_label() -> None:
    generator = labeler("ensemble", **TWO).label(ROSES)
    next(generator)
    generator.send(Answer(0, "", "length", {"score": Distribution((0.2, 0.3, 0.5), 0.0)}))
    with pytest.raises(VerdictError, match="no distribution"):
        generator.send(Answer(0, "2", "stop", {}))


@pytest.mark.parametrize("instructions", [["One."], ["One.", "One."], ["One.", " "]])
def test_one_judge_counted_twice_is_no_ensemble(instructions: list[str]) -> None:
    with pytest.raises(ConfigError, match="instructions"):
        labeler("ensemble", instructions=instructions)
