"""The part of a tree that a router sees: RDR2's own case (appendix D, with ids from 0 and texts of ours), and what
holds for any tree.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.labelers.subtrees import Subtree, read_actions
from relabel.manifests.asks import Ask, Message
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import Label, Pair
from relabel.manifests.trees import COLUMN, Tree
from tests.labelers.driving import fake, labeler, reply, walk
from tests.trees import Sketch, sketches, tree_of


def section(title: str, *below: Sketch | str) -> Sketch:
    return Sketch(title, [one if isinstance(one, Sketch) else Sketch(one, []) for one in below])


def fillers(title: str, count: int) -> Iterable[str]:
    return (f"{title}: filler {number}." for number in range(1, count + 1))


def park() -> Tree:
    """Headings and content have the ids of the paper's page, one higher; gaps that it leaves are filled."""
    planning = section("Initial planning and construction", *fillers("planning", 11))
    nineties, noughties = section("1990s", "A rough decade."), section("2000s", "The tallest coaster opened.")
    tens = section("2010s", *fillers("tens", 8))
    firsts = section("Firsts and ones of a kind", *fillers("firsts", 9))
    records = section("Records", "Tallest coaster.", "Fastest coaster.", "Largest derrick.", "Tallest swing ride.")
    bests = section("Firsts, bests, and other records", firsts, records, section("Awards", *fillers("awards", 2)))
    _, tree = tree_of(
        section(
            "Six Flags Over Texas",
            section("Introduction", "A theme park.", "Who runs it."),
            section("History", planning, nineties, noughties, tens),
            bests,
            section("Events", *fillers("events", 5)),
        )
    )
    return tree


def test_content_that_holds_what_is_new_stays_in_view() -> None:
    listed = section("A list.", section("Its item.", "Deep below."), section("Its other item.", "As deep."))
    _, tree = tree_of(section("T", section("H", listed), section("I", "Else.")))
    texts = [node.text for node in tree.nodes]
    deep = Subtree(tree).light([texts.index("Deep below.")])
    assert {texts[id] for id in deep.lit} == {"A list.", "Its item.", "Deep below."}
    again = deep.expand(texts.index("I")).expand(texts.index("H"))
    assert {texts[id] for id in again.lit} == {"A list.", "Its other item.", "As deep."}


@given(sketch=sketches(), data=st.data())
def test_headings_are_always_visible_and_content_is_expanded_once(sketch: Sketch, data: st.DataObject) -> None:
    _, tree = tree_of(sketch)
    content = [node.id for node in tree.nodes if node.is_content]
    headings = [node.id for node in tree.nodes if not node.is_content]
    subtree = Subtree(tree)
    expanded: set[int] = set()
    for _ in range(data.draw(st.integers(0, 6))):
        before = subtree
        if content and data.draw(st.booleans()):
            matched = data.draw(st.lists(st.sampled_from(content), min_size=1, max_size=3))
            subtree = subtree.light(matched)
            assert set(matched) <= subtree.lit
        else:
            heading = data.draw(st.sampled_from(headings))
            subtree = subtree.expand(heading)
            new = subtree.seen - before.seen
            assert new == subtree.own_content(heading) - before.seen
            assert not new & expanded
            assert (subtree is before) == (not new)
            expanded |= subtree.own_content(heading)
        assert before.seen | subtree.lit == subtree.seen
        visible = {node.id for node in subtree.visible}
        assert visible == {*headings, *subtree.lit}
        assert all(tree.nodes[node.id] is node for node in subtree.visible)
        assert all(above.id in visible for id in subtree.lit for above in tree.ancestors(id))
        assert [node.id for node in subtree.visible] == sorted(visible)
        above = {above.id for id in subtree.lit for above in tree.ancestors(id)}
        assert subtree.collapsed == {heading for heading in headings if heading not in above}
        for heading in headings:
            below = {id for id in content if heading in {one.id for one in tree.ancestors(id)}}
            own = {id for id in below if next(one.id for one in tree.ancestors(id) if not one.is_content) == heading}
            assert own <= subtree.own_content(heading) <= below
            assert bool(subtree.own_content(heading)) == bool(below)


# `route`: what is asked of which subtree, what an answer may say, and what becomes of lines that it may not.


SKETCH = section(
    "A park",
    section("Introduction", "It lies in Texas.", "A company runs it."),
    section(
        "History",
        section("1990s", "It was a rough decade."),
        section("2000s", "The tallest coaster opened in 2001."),
    ),
    section("Records", "Tallest coaster: Titan.", "Tallest swing ride in the world: SkyScreamer."),
)
DOCUMENT, TREE = tree_of(SKETCH)
IDS = {node.text: node.id for node in TREE.nodes}
PASSAGE = "The tallest coaster opened in 2001."
PAIR = Pair(
    0, "q", "What is the tallest ride?", "d", DOCUMENT, (), {COLUMN: tuple(TREE.values()), "passages": (PASSAGE,)}
)


def say(*actions: str) -> str:
    """`+text` answers by the node of this text, `>text` expands it; everything else is left unchanged."""
    kinds = {"+": "[ANSWER]", ">": "[EXPAND]"}
    return "\n".join(f"{kinds[one[0]]} {IDS[one[1:]]}: {one[1:]}" if one[0] in kinds else one for one in actions)


def label_of(answers: Sequence[str], pair: Pair = PAIR, **options: Any) -> tuple[Label, list[Ask]]:
    walked = labeler("route", **options).label(pair)
    asks = [next(walked)]
    for text in answers:
        try:
            asks.append(walked.send(reply(text)))
        except StopIteration as end:
            return end.value, asks
    raise AssertionError("it asks on")


def as_it_is(pair: Pair) -> Pair:
    """With a sibling, so that `walk` leaves its columns alone."""
    return pair._replace(siblings=(pair,))


def lit(ask: Ask) -> set[str]:
    """Content that a prompt shows."""
    shown = dict(zip(ask.messages[1].fields, ask.messages[1].parts[1::2], strict=True))
    assert shown["query"] == PAIR.query
    return {text for text in ask.messages[1].parts[1::2] if text.endswith(".")}


def test_one_answer_of_the_paper_s_kind_step_by_step() -> None:
    """A passage, an expansion, two answers: the evidence is theirs in the order given."""
    last = "Tallest swing ride in the world: SkyScreamer."
    label, asks = label_of([say(f"+{PASSAGE}", ">Records"), say(f"+{last}")])
    assert [lit(ask) for ask in asks] == [{PASSAGE}, {"Tallest coaster: Titan.", last}]
    assert label.grade == 2
    assert [span.text for span in label.evidence] == [PASSAGE, last]
    assert all(DOCUMENT[span.start : span.end] == span.text for span in label.evidence)
    assert label.columns["answer_ids"] == [IDS[PASSAGE], IDS[last]]
    assert label.columns["expand_ids"] == [IDS["Records"]]
    assert (label.columns["refused"], label.columns["expelled"], label.flags) == (False, 0, [])
    first, second = map(json.loads, label.columns["steps"])
    assert first == {
        "expanded": None, "lit": [IDS[PASSAGE]], "chars": sum(map(len, asks[0].messages[1].parts[3::2])),
        "answers": [IDS[PASSAGE]], "expands": [IDS["Records"]], "refused": False, "expelled": 0,
    }  # fmt: skip
    assert (second["expanded"], len(second["lit"])) == (IDS["Records"], 2)


def test_the_grade_is_two_with_an_answer_one_with_expansions_alone_and_else_zero() -> None:
    assert label_of([say(f"+{PASSAGE}")])[0].grade == 2
    label, asks = label_of([say(">Records"), "[REFUSE]"])
    assert (label.grade, label.columns["refused"], len(asks)) == (1, False, 2)
    label, _ = label_of(["[REFUSE]"])
    assert (label.grade, label.columns["refused"]) == (0, True)


def test_expansions_end_at_their_number_and_are_all_noted() -> None:
    said = say(">Introduction", ">1990s", ">Records")
    label, asks = label_of([said], expansions=0)
    assert (len(asks), label.columns["expand_ids"]) == (1, [IDS["Introduction"], IDS["1990s"], IDS["Records"]])
    label, asks = label_of([said, "[REFUSE]", "[REFUSE]"], expansions=2)
    assert [lit(ask) for ask in asks[1:]] == [{"It lies in Texas.", "A company runs it."}, {"It was a rough decade."}]


def test_each_passage_has_a_subtree_and_what_was_shown_is_not_expanded_again() -> None:
    second = "It lies in Texas."
    pair = PAIR._replace(columns={**PAIR.columns, "passages": (PASSAGE, PASSAGE[1:], second, "1990s")})
    label, asks = label_of([say(">Introduction"), say(">2000s"), "[REFUSE]"], pair)
    assert [lit(ask) for ask in asks] == [{PASSAGE}, {second, "A company runs it."}, {second, "A company runs it."}]
    assert label.flags == ["passage_not_found"], "a heading holds no content"
    assert len(label_of(["[REFUSE]"], pair, passages=2)[1]) == 1


def test_without_a_passage_the_headings_are_shown_alone() -> None:
    pair = PAIR._replace(columns={COLUMN: PAIR.columns[COLUMN]})
    label, asks = label_of([say(">Records"), "[REFUSE]"], pair)
    assert lit(asks[0]) == set()
    assert label.columns["expand_ids"] == [IDS["Records"]]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[ANSWER] 99: The tallest coaster", "node 99 is not visible"),
        ("[ANSWER] 2: It lies in Texas.", "node 2 is not visible"),
        ("[ANSWER] 1: Introduction", "node 1 is a heading"),
        ("[EXPAND] 8: The tallest coaster opened", "node 8 is no collapsed heading"),
        ("[EXPAND] 7: 2000s", "node 7 is no collapsed heading"),
        ("[EXPAND] 4: History", "node 4 is no collapsed heading"),
        ("[EXPAND] 0: A park", "node 0 is no collapsed heading"),
        ("[ANSWER] 8: The tallest", "the text does not begin that of node 8"),
        ("[ANSWER] 8: The tallest coaster closed", "the text does not begin that of node 8"),
        ("[ANSWER] 8:", "the text does not begin that of node 8"),
        ("[EXPAND] 9: Records of 1990", "the text does not begin that of node 9"),
        ("[ANSWER] 08: The tallest coaster", "no action"),
        ("[ANSWER]", "no action"),
    ],
)
def test_a_line_that_is_not_legal_is_quarantined_or_kept_and_counted(line: str, why: str) -> None:
    with pytest.raises(VerdictError, match="format") as caught:
        label_of([say(f"+{PASSAGE}", line)])
    assert why in caught.value.reason
    label, _ = label_of([say(f"+{PASSAGE}", line)], expelled="keep")
    assert (label.grade, label.columns["expelled"], label.flags) == (2, 1, ["expelled"])
    label, _ = label_of([line], expelled="keep")
    assert (label.grade, label.columns["expelled"], label.columns["refused"]) == (0, 1, False)


@pytest.mark.parametrize(
    "line", ["[ANSWER] 8: the TALLEST  coaster", "[ANSWER] 8: <The tallest< coaster", "[EXPAND] 9:  records"]
)
def test_case_white_space_and_what_begins_a_control_token_do_not_count_in_a_prefix(line: str) -> None:
    assert read_actions(line, Subtree(TREE).light([8])).fault is None


def test_a_refusal_is_alone_and_prose_is_no_action() -> None:
    both = say(f"+{PASSAGE}", "[REFUSE]")
    with pytest.raises(VerdictError, match="is given together with actions"):
        label_of([both])
    label, _ = label_of([both], expelled="keep")
    assert (label.grade, label.columns["refused"], label.columns["expelled"]) == (2, False, 1)
    for text in ("I would take the second.", "", " \n"):
        with pytest.raises(VerdictError):
            label_of([text])
        label, _ = label_of([text], expelled="keep")
        assert (label.grade, label.columns["refused"], label.columns["expelled"]) == (0, False, 0)
        assert label.flags == ["collapsed"]
    assert label_of(["[REFUSE]\n[REFUSE]"])[0].columns["refused"]


@pytest.mark.parametrize("expelled", ["keep", "quarantine"])
def test_an_answer_that_ran_into_its_limit_is_truncated(expelled: str) -> None:
    walked = labeler("route", expelled=expelled).label(PAIR)
    next(walked)
    with pytest.raises(VerdictError) as caught:
        walked.send(reply(say(f"+{PASSAGE}"), finish="length"))
    assert caught.value.status == "truncated"


def test_a_tree_of_another_document_is_no_verdict() -> None:
    for pair in (PAIR._replace(document=DOCUMENT[1:]), PAIR._replace(columns={})):
        with pytest.raises(VerdictError, match="tree"):
            next(labeler("route").label(pair))


def test_texts_are_cut_until_they_fit_and_ids_stay() -> None:
    long = "word " * 4000 + "end."
    document, tree = tree_of(section("A page", section("One", long, "Short text."), section("Two", long)))
    columns = {COLUMN: tuple(tree.values()), "passages": ("Short text.",)}
    pair = PAIR._replace(document=document, columns=columns)
    label, asks, answers = walk(labeler("route", window_tokens=1000), as_it_is(pair), fake(max_prompt_tokens=700))
    assert "document_truncated" in label.flags
    assert answers[0].finish == "overlong"
    assert len(asks[1].messages[1].text) < len(asks[0].messages[1].text) < 4000
    tries = [answer.finish for answer in answers].index("stop") + 1
    for ask in asks[:tries]:
        assert "Short text." in ask.messages[1].parts
        assert "\t\t3: " in ask.messages[1].text


def row_of(label: Label) -> dict[str, Any]:
    return {"grade": label.grade, **label.columns}


class Exchange(NamedTuple):
    prompt: tuple[Message, ...]
    completion: str


def replay(subject: Any, pair: Pair, row: dict[str, Any]) -> list[Exchange]:
    """The exchanges that led to a label, recalled from its columns, which must lead there again."""
    asker, found = subject.label(pair), list[Exchange]()
    ask = next(asker)
    while True:
        recalled = subject.recall(row, ask, len(found))
        if recalled.answer.finish != "overlong":
            found.append(Exchange(ask.messages, recalled.completion))
        try:
            ask = asker.send(recalled.answer)
        except StopIteration as end:
            if row_of(end.value) != row:
                raise VerdictError("format", "its answers lead to another label") from None
            return found


@settings(max_examples=60, deadline=None)
@given(sketch=sketches(), seed=st.integers(0, 2**63 - 1))
def test_a_label_records_what_was_asked_and_answered(sketch: Sketch, seed: int) -> None:
    document, tree = tree_of(sketch)
    passages = tuple(node.text for node in tree.nodes if node.is_content)[:3]
    pair = PAIR._replace(document=document, columns={COLUMN: tuple(tree.values()), "passages": passages})
    label, asks, answers = walk(labeler("route"), as_it_is(pair), fake(), seed)
    found = replay(labeler("route"), pair, row_of(label))
    assert [one.prompt for one in found] == [ask.messages for ask in asks]
    for _ask, answer, one in zip(asks, answers, found, strict=True):
        same = [line.split(":")[0] for line in answer.text.split("\n")]
        assert sorted(line.split(":")[0] for line in one.completion.split("\n")) == sorted(set(same))


def test_expelled_lines_are_not_recorded() -> None:
    """The legal lines of the same answer are, as if they were alone; a step without legal lines records nothing."""
    said = [say(">Records", "[ANSWER] 99: nowhere", f"+{PASSAGE}", "[REFUSE]"), "[EXPAND] 99: nowhere", "prose"]
    label, _ = label_of([said[0], said[1]], expelled="keep")
    subject = labeler("route", expelled="keep")
    assert [one.completion for one in replay(subject, PAIR, row_of(label))] == [
        "[ANSWER] 8: The tallest coaster opened in\n[EXPAND] 9: Records",
        "",
    ]
    label, _ = label_of([said[2]], expelled="keep")
    assert [one.completion for one in replay(subject, PAIR, row_of(label))] == [""]
    label, _ = label_of(["[REFUSE]\nprose\n[ANSWER]"], expelled="keep")
    assert [one.completion for one in replay(subject, PAIR, row_of(label))] == ["[REFUSE]"]
