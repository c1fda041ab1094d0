"""`direct`, `umbrela`, `r1`, `pointwise`, `complexity`: one ask about a pair, and what becomes of its answer."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from relabel.manifests.asks import Distribution
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import Label, Pair
from relabel.manifests.schemas import LabelRow
from tests.labelers.driving import ROSES, fake, labeler, replay, reply, run_loop, walk

THINKING = ("umbrela", "r1")
DECIDING = {"direct": "score", "pointwise": "relevant", "complexity": "complex"}
"""Labelers that generate nothing, with their decision."""
DIST = Distribution((0.1, 0.2, 0.6, 0.1), 0.01)


def label_of(name: str, text: str, **fields: Any) -> Label:
    label, _ = replay(labeler(name), ROSES, [reply(text, **fields)])
    assert label is not None
    return label


@pytest.mark.parametrize("name", THINKING)
def test_a_label_holds_the_grade_the_reasoning_and_the_distribution(name: str) -> None:
    text, found = "<think>Two of 3.</think>\n<score> 1 </score>\n", {"score": DIST}
    label = label_of(name, text, distributions=found, flags=("document_truncated",))
    assert (label.grade, label.reasoning, label.distribution) == (1, "Two of 3.", DIST)
    assert (label.flags, label.intent, label.evidence, label.columns) == (["document_truncated"], None, (), {})
    assert label_of(name, "<think></think><score>0</score>").flags == ["no_distribution"]


@pytest.mark.parametrize(
    ("name", "probs", "grade"),
    [
        ("direct", DIST.probs, 2),
        *((name, *case) for name in ("pointwise", "complexity") for case in (((0.2, 0.8), 1), ((0.5, 0.5), 0))),
    ],
)
def test_where_nothing_is_generated_the_label_is_the_mode_whatever_text_there_is(
    name: str, probs: tuple[float, ...], grade: int
) -> None:
    distribution = Distribution(probs, 0.3)
    for finish in ("stop", "length"):
        found = {DECIDING[name]: distribution}
        label = label_of(name, "<score>0</score>", distributions=found, finish=finish, flags=("document_truncated",))
        assert (label.grade, label.distribution, label.flags) == (grade, distribution, ["document_truncated"])
        assert name == "direct" or distribution.expected == probs[1], "the score is P(yes) over P(yes) and P(no)"


@pytest.mark.parametrize("name", DECIDING)
@pytest.mark.parametrize("probs", [None, (0.5, 0.2, 0.3)])
def test_without_a_distribution_over_its_grades_a_written_one_is_no_label(
    name: str, probs: tuple[float, ...] | None
) -> None:
    with pytest.raises(VerdictError) as caught:
        label_of(name, "yes", distributions={DECIDING[name]: Distribution(probs, 0.0)} if probs else {})
    assert caught.value.status == "engine"


@pytest.mark.parametrize(("name", "grades"), [("umbrela", 4), ("r1", 3), ("direct", 4)])
def test_the_default_scale_is_the_papers(name: str, grades: int) -> None:
    (ask,) = labeler(name).probe()
    assert ask.decisions == (("score", "<score>", tuple(map(str, range(grades)))),)
    assert (ask.prefill, ask.shared_by) == ("<score>" if name == "direct" else "", None)


@pytest.mark.parametrize("grades", range(2, 11))
def test_umbrelas_instructions_name_grades_of_its_own_scale(grades: int) -> None:
    """UMBRELA's "important, but with extra information" is the grade below the highest: 2 of 0 to 3, and 1 where R3A
    has 0 to 2. With two grades, "answers at least in part" leaves no place for either.
    """
    systems = {
        steps: labeler("umbrela", grades=grades, steps=steps).probe()[0].messages[0].text
        for steps in ("umbrela", "r3a")
    }
    for system in systems.values():
        named = [int(grade) for grade in re.findall(r"[Gg]rade (?:is )?(\d)", system)]
        assert named == {2: [], 3: [1, 2, 0]}.get(grades, [1, grades - 2, grades - 1, 0])
        assert "middle" not in system
        assert ("nothing else" in system) == (grades > 2)
    assert ["trusted" in system for system in systems.values()] == [True, False]


def test_five_samples_give_the_vote_and_the_mean() -> None:
    """`samples: 5` through the run loop: the row is the majority's grade and the mean of the five distributions, and
    keeps all five.
    """
    pairs = [ROSES._replace(row_id=i, query_id=f"q{i}", document=f"{i} {ROSES.document}") for i in range(40)]
    rows, asks = run_loop("umbrela", pairs, {"samples": 5, "temperature": 1.0})
    assert asks == 5 * len(pairs)
    split = 0
    for row in rows:
        assert isinstance(row, LabelRow)
        assert row.samples is not None
        assert row.probs == pytest.approx(
            [sum(column) / 5 for column in zip(*(s["probs"] for s in row.samples), strict=True)]
        )
        assert row.outside_mass == pytest.approx(sum(s["outside_mass"] for s in row.samples) / 5)
        assert row.expected_grade == pytest.approx(sum(k * p for k, p in enumerate(row.probs)))
        votes = Counter(sample["grade"] for sample in row.samples)
        assert votes.total() == 5
        most = [grade for grade, count in votes.items() if count == max(votes.values())]
        assert row.grade == max(most, key=lambda grade: (row.probs[grade], -grade))
        split += len(votes) > 1
    assert split > 5, "the samples never disagreed, so the vote was not seen"


@pytest.mark.parametrize("name", ["pointwise", "complexity"])
def test_nothing_is_generated_and_the_word_follows_without_a_space(name: str) -> None:
    (plain,) = labeler(name).probe()
    assert (plain.max_tokens, plain.format, plain.prefill) == (0, None, "<answer>")
    (bare,) = labeler(name, think="empty").probe()
    assert bare.prefill == "<think>\n\n</think>\n\n"
    for ask in (plain, bare):
        assert ask.decisions[0].labels == ("no", "yes")
        assert ask.prefill.endswith(ask.decisions[0].marker)
    assert ["<answer>" in ask.messages[0].text for ask in (plain, bare)] == [True, False]


def test_the_instruction_is_before_query_and_document() -> None:
    (ask,) = labeler("pointwise", instruction="Names a {{ price }}\nand a <shop>.").probe()
    assert "Names a {{ price }}\nand a <shop>." in ask.messages[0].text
    assert ask.messages[1].fields == ("query", "document")


def test_complexity_is_asked_once_a_query_without_a_document_and_labels_every_row() -> None:
    pair = ROSES._replace(document="UNSEEN", context=("UNSEEN",), doc_id="UNSEEN")
    (ask,) = walk(labeler("complexity"), pair, fake())[1]
    assert not any("UNSEEN" in message.text for message in ask.messages)
    queries = ["roses", "compare the pruning of climbing roses with that of shrub roses, and say which tools and when"]
    pairs = [Pair(i, f"q{i % 2}", queries[i % 2], f"d{i}", f"Document {i}.") for i in range(20)]
    rows, asks = run_loop("complexity", pairs)
    assert asks == 2
    for parity in (0, 1):
        assert [row.grade for row in rows[parity::2] if isinstance(row, LabelRow)] == [parity] * 10
