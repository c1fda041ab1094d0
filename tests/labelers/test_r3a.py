"""`r3a`: one conversation, a shared first turn, verbatim evidence, and the paper's ablations as options."""

from __future__ import annotations

from typing import Any

import pytest

from relabel.manifests.asks import Ask, Distribution
from relabel.manifests.errors import VerdictError
from relabel.manifests.formats import Choice, Fragment
from relabel.manifests.labels import Label, Pair
from tests.labelers.driving import ROSES, fake, labeler, replay, reply, walk

INTENT = "<think>Hm.</think><intent>When to prune.</intent>"
DIST = {"score": Distribution((0.2, 0.3, 0.5), 0.01)}


def label_of(text: str, pair: Pair = ROSES, distributions: dict[str, Distribution] = DIST, **options: Any) -> Label:
    second = reply(text, distributions=distributions, flags=("first", "second"))
    label, _ = replay(labeler("r3a", **options), pair, [reply(INTENT, flags=("first",)), second])
    assert label is not None
    return label


def asks_of(pair: Pair = ROSES, **options: Any) -> list[Ask]:
    return walk(labeler("r3a", **options), pair, fake())[1]


def tags(ask: Ask) -> list[str]:
    assert ask.format is not None
    return [section.tag for section in ask.format.sections]


def test_the_first_turn_is_the_same_for_all_documents_of_a_query() -> None:
    one, other = asks_of()[0], asks_of(ROSES._replace(row_id=8, doc_id="d2", document="Something else"))[0]
    assert one == other
    assert one.shared_by == "q1"
    assert "document" not in one.messages[-1].fields
    assert one.messages != asks_of(ROSES._replace(context=()))[0].messages


def test_the_second_turn_goes_on_with_the_first_conversation() -> None:
    first, second = asks_of()
    assert second.messages[: len(first.messages)] == first.messages
    assert [m.role for m in second.messages] == ["system", "user", "assistant", "user"]
    answer = second.messages[2]
    assert answer.fields == ("think", "intent")
    assert "".join("".join(answer.parts[::2]).split()) == "<think></think><intent></intent>"
    assert not any("<" in part for part in answer.parts[1::2])
    assert (tags(first), tags(second)) == (["think", "intent"], ["think", "extract", "score"])
    assert second.fragment_source == ROSES.document
    assert second.shared_by is None


def test_a_label_holds_the_grade_the_span_the_intent_and_the_reasoning() -> None:
    label = label_of("<think>Late.</think>\n<extract>Cut to an outward bud.</extract>\n<score>2</score>")
    assert (label.grade, label.intent, label.reasoning) == (2, "When to prune.", "Late.")
    assert [tuple(span) for span in label.evidence] == [(35, 59, "Cut   to an outward bud.")]
    assert (label.distribution, label.flags) == (DIST["score"], ["first", "second"])


@pytest.mark.parametrize(
    ("extract", "grade", "flag"),
    [("none", 1, "evidence_missing"), ("Climbing", 0, "evidence_unneeded"), ("None", 0, None), ("Climbing", 1, None)],
)
def test_a_grade_and_an_extract_that_do_not_go_together_are_flagged(extract: str, grade: int, flag: str | None) -> None:
    label = label_of(f"<think></think><extract>{extract}</extract><score>{grade}</score>")
    assert label.grade == grade
    assert set(label.flags) - {"first", "second"} == ({flag} if flag else set())


def test_a_distribution_that_the_engine_can_not_give_is_flagged() -> None:
    label = label_of("<think></think><extract>none</extract><score>0</score>", distributions={})
    assert label.distribution is None
    assert "no_distribution" in label.flags


def test_without_the_intent_nothing_but_its_tag_goes() -> None:
    """Else two things would change at once, and a lower figure could be the intent's or the first turn's."""
    with_it, without = asks_of(), asks_of(intent=False)
    assert [ask.stage for ask in without] == ["think", "verdict"]
    assert without[0].shared_by == "q1"
    assert without[0].messages == asks_of(ROSES._replace(doc_id="d2", document="Else"), intent=False)[0].messages
    tag = "<intent>what the person wants, in one or two sentences</intent>\n"
    assert without[0].messages[1].text == with_it[0].messages[1].text.replace(tag, "")
    answer = without[1].messages[2]
    assert answer.fields == ("think",)
    assert "".join("".join(answer.parts[::2]).split()) == "<think></think>"
    assert without[1].format == with_it[1].format
    wording = "stated as the intent", "worked out"
    assert without[1].messages[3].text == with_it[1].messages[3].text.replace(*wording)


def test_constrained_evidence_is_one_piece_and_none_for_an_empty_document() -> None:
    full = asks_of(evidence="constrained")[1]
    assert full.format is not None
    assert full.format.sections[1] == Fragment("extract", 160, is_constrained=True)
    empty = asks_of(ROSES._replace(document=" \n"), evidence="constrained")[1]
    assert empty.format is not None
    assert empty.format.sections[1] == Choice("extract", ("none",))


@pytest.mark.parametrize("evidence", ["constrained", "checked"])
def test_an_empty_document_has_no_evidence_but_none(evidence: str) -> None:
    pair = ROSES._replace(document="")
    assert label_of("<think></think><extract>NONE</extract><score>0</score>", pair, evidence=evidence).evidence == ()
    with pytest.raises(VerdictError, match="not in the document"):
        label_of("<think></think><extract>Cut</extract><score>1</score>", pair, evidence=evidence)


def test_an_invented_extract_is_no_label() -> None:
    with pytest.raises(VerdictError) as caught:
        label_of("<think></think><extract>Cut to an inward bud.</extract><score>2</score>")
    assert caught.value.status == "format"
