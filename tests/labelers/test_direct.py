"""`direct`: the distribution is the label."""

from __future__ import annotations

import pytest

from relabel.manifests.asks import Answer, Distribution
from relabel.manifests.errors import VerdictError
from tests.labelers.driving import ROSES, labeler


def label_of(answer: Answer):
    generator = labeler("direct").label(ROSES)
    next(generator)
    with pytest.raises(StopIteration) as end:
        generator.send(answer)
    return end.value.value


def test_the_label_is_the_mode_whatever_text_there_is() -> None:
    distribution = Distribution((0.1, 0.2, 0.6, 0.1), 0.01)
    for finish in ("stop", "length"):
        label = label_of(Answer(0, "<score>0</score>", finish, {"score": distribution}, flags=("document_truncated",)))
        assert (label.grade, label.distribution, label.flags) == (2, distribution, ["document_truncated"])


@pytest.mark.parametrize(
    "distributions", [{}, {"score": Distribution((0.5, 0.5), 0.0)}, {"grade": Distribution((0.25,) * 4, 0.0)}]
)
def test_no_distribution_is_no_label(distributions: dict[str, Distribution]) -> None:
    generator = labeler("direct").label(ROSES)
    next(generator)
    with pytest.raises(VerdictError) as caught:
        generator.send(Answer(0, "2", "stop", distributions))
    assert caught.value.status == "engine"


def test_the_ask_generates_nothing() -> None:
    ask = next(labeler("direct").label(ROSES))
    assert (ask.max_tokens, ask.format, ask.prefill, ask.decisions[0].labels) == (
        0,
        None,
        "<score>",
        ("0", "1", "2", "3"),
    )
