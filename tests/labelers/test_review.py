"""`review`: what is asked of a query's documents at once, which answers are read, and what each row takes of one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from relabel.labelers.query_inputs import CHARS_PER_DOCUMENT, documents_within
from relabel.manifests.asks import Ask, Distribution
from relabel.manifests.errors import VerdictError
from relabel.manifests.labels import Label, Pair
from relabel.manifests.schemas import LabelRow
from tests.labelers.driving import labeler, replay, reply, run_loop


def query_of(documents: list[str], query_id: str = "q1", first: int = 0, **columns: Any) -> list[Pair]:
    """The rows of one query, each with its siblings."""
    rows = tuple(
        Pair(first + i, query_id, "pruning roses", f"d{i + 1}", text, (), columns) for i, text in enumerate(documents)
    )
    return [row._replace(siblings=rows) for row in rows]


def written(sufficient: str, query: str, useful: str, summary: str) -> str:
    return (
        f"<is-sufficient>{sufficient}</is-sufficient>\n<new-query>{query}</new-query>\n"
        f"<useful-docs>{useful}</useful-docs>\n<useful-docs-summary>{summary}</useful-docs-summary>"
    )


def label_of(pair: Pair, text: str, **fields: Any) -> Label:
    label, _ = replay(labeler("review"), pair, [reply(text, **fields)])
    assert label is not None
    return label


NEW = {
    "": "",
    "fresh": "rose pruning month",
    "previous": " When to  PRUNE roses",
    "searched now": "Rose  TOOLS",
    "question": " PRUNING, roses?",
    "signs alone": "?!",
}
USEFUL = {"": [], "1": [1], "3, 1": [3, 1], "1,1": [1, 1], "2": [2], "0": [0], "4": [4], "x": [-1], "1 3": [-1]}


@pytest.mark.parametrize("sufficient", ["yes", "no"])
def test_the_whole_truth_table_of_valid_combinations(sufficient: str) -> None:
    columns: dict[str, Any] = {"previous_queries": ("when to prune roses",), "previous_docs": ("d2", "d9")}
    pair = query_of(["a", "b", "c"], aspect="rose tools", **columns)[0]
    for (kind, query), (useful, numbers), summary in itertools.product(
        NEW.items(), USEFUL.items(), ("", "Two sentences.")
    ):
        is_right = (
            (kind == "" if sufficient == "yes" else kind == "fresh")
            and all(number in (1, 3) for number in numbers)
            and len(set(numbers)) == len(numbers)
            and bool(summary) is bool(numbers)
        )
        text = written(sufficient, query, useful, summary)
        if not is_right:
            with pytest.raises(VerdictError) as caught:
                label_of(pair, text)
            assert caught.value.status == "format"
            continue
        label = label_of(pair, text)
        assert label.grade == int(1 in numbers)
        assert label.columns == {
            "is_sufficient": sufficient == "yes",
            "sufficient_probs": None,
            "sufficient_outside_mass": None,
            "new_query": query or None,
            "useful": [f"d{number}" for number in numbers],
            "summary": summary or None,
        }


def test_each_row_takes_its_own_part_and_the_distribution_is_that_of_no_and_yes() -> None:
    text = written("yes", "", "2", "It says when.")
    found = [
        label_of(pair, text, distributions={"sufficient": Distribution((0.25, 0.75), 0.125)})
        for pair in query_of(["a", "b", "c"])
    ]
    assert [label.grade for label in found] == [0, 1, 0]
    for label in found:
        assert (label.distribution, label.flags) == (None, [])
        assert (label.columns["sufficient_probs"], label.columns["sufficient_outside_mass"]) == ([0.25, 0.75], 0.125)


def test_a_query_is_asked_once_over_all_its_rows() -> None:
    pairs = [*query_of([f"text {i}" for i in range(12)]), *query_of(["other"] * 9, "q2", first=20)]
    rows, asks = run_loop("review", pairs)
    assert asks == 2
    labels = [row for row in rows if isinstance(row, LabelRow)]
    assert len(labels) == 21
    for query_id in ("q1", "q2"):
        (shown,) = {repr(row.columns) for row in labels if row.query_id == query_id}
        (useful,) = {tuple(row.columns["useful"]) for row in labels if row.query_id == query_id}
        assert shown
        assert [row.doc_id for row in labels if row.query_id == query_id and row.grade] == sorted(useful)


def test_documents_without_text_leave_no_way_but_no() -> None:
    ask = next(labeler("review").label(query_of(["", " \n"])[0]))
    assert ask.format is not None
    assert ask.format.sections[0].options == ("no",)
    with pytest.raises(VerdictError):
        label_of(query_of(["", " "])[0], written("yes", "", "", ""))
    assert label_of(query_of(["", " "])[0], written("no", "x", "", "")).grade == 0


def test_as_much_is_shown_as_fits_in_row_order() -> None:
    def room(*lengths: int) -> int:
        return sum(lengths) + CHARS_PER_DOCUMENT * len(lengths)

    three = ["a" * 300, "b" * 300, "c" * 300]
    assert documents_within(three, room(300, 300, 300))[:2] == (tuple(three), room(300, 300, 300))
    cut = documents_within(three, room(300, 250))
    assert (cut.texts, cut.is_cut, cut.num_left_out) == (("a" * 300, "b" * 250), True, 1)
    assert cut.flags == ["document_truncated", "documents_left_out"]
    bare = documents_within(three, room(300, 199))
    assert (bare.texts, bare.is_cut, bare.num_left_out) == (("a" * 300,), False, 2)
    assert documents_within(three, 0).texts == ()


def test_a_document_kept_before_is_marked_in_the_prompt_and_in_its_row() -> None:
    rows = query_of(["a", "b", "c"], previous_docs=("d1", "d3"), previous_summaries=("Old finds.",))
    user = next(labeler("review").label(rows[0])).messages[1]
    assert user.fields == ("query", "previous_summaries", "documents", "documents", "documents", "kept")
    assert user.parts[-2] == "1, 3"
    flags = [label_of(row, written("no", "x", "2", "s")).flags for row in rows]
    assert [("kept_before" in found) for found in flags] == [True, False, True]


def test_a_prompt_that_never_fits_is_given_up() -> None:
    rows, asks = run_loop("review", [query_of(["short"])[0]._replace(query="long " * 9000)], max_prompt_tokens=2000)
    assert [row.status for row in rows] == ["overlong"]
    assert asks == 1


def asked(pair: Pair) -> Ask:
    return next(labeler("review").label(pair))


def test_rows_of_one_query_ask_the_very_same_and_other_columns_ask_another() -> None:
    rows = query_of(["a", "b"])
    subject = labeler("review")
    first, second = (next(subject.label(row)) for row in rows)
    assert first is second
    with_aspect = rows[0]._replace(columns={"aspect": "price"})
    assert next(subject.label(with_aspect)).messages == asked(with_aspect).messages != first.messages
