"""`direct`, `umbrela`, `r1`, `pointwise`, `complexity`: one ask about a pair, and what becomes of its answer."""

import re
from typing import Any

import numpy as np
import pytest

from relabel.manifests.asks import Answer, Ask, Choice, Distribution, Fragment
from relabel.manifests.errors import ConfigError, VerdictError
from relabel.manifests.labels import Label, LabelRow, Pair
from tests.labelers.driving import ROSES, fake, labeler, replay, reply, run_loop, walk

THINKING = ("umbrela", "r1")
DECIDING = {"direct": "score", "pointwise": "relevant", "complexity": "complex"}
"""Labelers that generate nothing, with their decision."""
DIST = Distribution((0.1, 0.2, 0.6, 0.1), 0.01)


def label_of(name: str, text: str, **fields: Any) -> Label:
    label, _ = replay(labeler(name), ROSES, [reply(text, **fields)])
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


# `ensemble`: the label is the mean of what several instructions gave, and each judge can be read from its column.


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


# `r3a`: one conversation, a shared first turn, verbatim evidence, and the paper's ablations as options.


INTENT = "<think>Hm.</think><intent>When to prune.</intent>"
R3A_DIST = {"score": Distribution((0.2, 0.3, 0.5), 0.01)}


def r3a_label(
    text: str, pair: Pair = ROSES, distributions: dict[str, Distribution] = R3A_DIST, **options: Any
) -> Label:
    second = reply(text, distributions=distributions, flags=("first", "second"))
    label, _ = replay(labeler("r3a", **options), pair, [reply(INTENT, flags=("first",)), second])
    return label


def asks_of(pair: Pair = ROSES, **options: Any) -> list[Ask]:
    return walk(labeler("r3a", **options), pair, fake())[1]


def test_the_first_turn_is_the_same_for_all_documents_of_a_query() -> None:
    one, other = asks_of()[0], asks_of(ROSES._replace(row_id=8, doc_id="d2", document="Something else"))[0]
    assert one == other
    assert one.shared_by == "q1"
    assert "document" not in one.messages[-1].fields
    assert one.messages != asks_of(ROSES._replace(context=()))[0].messages


def test_a_label_holds_the_grade_the_span_the_intent_and_the_reasoning() -> None:
    label = r3a_label("<think>Late.</think>\n<extract>Cut to an outward bud.</extract>\n<score>2</score>")
    assert (label.grade, label.intent, label.reasoning) == (2, "When to prune.", "Late.")
    assert [tuple(span) for span in label.evidence] == [(35, 59, "Cut   to an outward bud.")]
    assert (label.distribution, label.flags) == (R3A_DIST["score"], ["first", "second"])


@pytest.mark.parametrize(
    ("extract", "grade", "flag"),
    [("none", 1, "evidence_missing"), ("Climbing", 0, "evidence_unneeded"), ("None", 0, None), ("Climbing", 1, None)],
)
def test_a_grade_and_an_extract_that_do_not_go_together_are_flagged(extract: str, grade: int, flag: str | None) -> None:
    label = r3a_label(f"<think></think><extract>{extract}</extract><score>{grade}</score>")
    assert label.grade == grade
    assert set(label.flags) - {"first", "second"} == ({flag} if flag else set())


def test_a_distribution_that_the_engine_can_not_give_is_flagged() -> None:
    label = r3a_label("<think></think><extract>none</extract><score>0</score>", distributions={})
    assert label.distribution is None
    assert "no_distribution" in label.flags


def test_constrained_evidence_is_one_piece_and_none_for_an_empty_document() -> None:
    full = asks_of(evidence="constrained")[1]
    assert full.format.sections[1] == Fragment("extract", 160, is_constrained=True)
    empty = asks_of(ROSES._replace(document=" \n"), evidence="constrained")[1]
    assert empty.format.sections[1] == Choice("extract", ("none",))


@pytest.mark.parametrize("evidence", ["constrained", "checked"])
def test_an_empty_document_has_no_evidence_but_none(evidence: str) -> None:
    pair = ROSES._replace(document="")
    assert r3a_label("<think></think><extract>NONE</extract><score>0</score>", pair, evidence=evidence).evidence == ()
    with pytest.raises(VerdictError, match="not in the document"):
        r3a_label("<think></think><extract>Cut</extract><score>1</score>", pair, evidence=evidence)


def test_an_invented_extract_is_no_label() -> None:
    with pytest.raises(VerdictError) as caught:
        r3a_label("<think></think><extract>Cut to an inward bud.</extract><score>2</score>")
    assert caught.value.status == "format"
