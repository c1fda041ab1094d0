"""`route` from input to labels: its tree and passages are read where rows lie together or scattered, are part of a
row's key, and the tree must be there and of its document.
"""

from __future__ import annotations

import json
from typing import Any

from relabel.jobs.exits import Exit
from tests.labelers.test_subtree import section
from tests.reuse.conftest import Days, Row, rows_of
from tests.trees import tree_of

ROUTE: Any = {"name": "route"}


def treed_rows(queries: int, documents: int) -> list[Row]:
    found = []
    for row in rows_of(queries, documents):
        id = row["doc_id"]
        first = section("First", f"{id} says one thing.", f"{id} says another.")
        text, tree = tree_of(section(f"Page {id}", first, section("Second", f"{id} says a third thing.")))
        passages = [f"{id} says another.", f"{id} says a third thing."]
        found.append({**row, "document": text, "tree": tree.values(), "passages": passages})
    return found


def test_trees_are_read_and_only_a_changed_row_is_asked_again(days: Days) -> None:
    rows = treed_rows(5, 4)
    rows = rows[1::2] + rows[::2]
    days.run("mon", rows, labeler=ROUTE)
    labels = days.labels("mon")
    asked = days.asks("mon")["route"]
    assert asked == sum(len(label["steps"]) for label in labels) >= 2 * len(rows)
    for row, label in zip(rows, labels, strict=True):
        steps = [json.loads(step) for step in label["steps"]]
        assert [step["lit"] for step in steps if step["expanded"] is None] == [[2, 3], [5]]
        answered = list(dict.fromkeys(id for step in steps for id in step["answers"]))
        assert label["answer_ids"] == answered
        assert [span["text"] for span in label["evidence"]] == [row["tree"][id]["text"] for id in answered]
        assert label["grade"] == (2 if answered else 1 if label["expand_ids"] else 0)
    assert {label["grade"] for label in labels} > {2}
    changed = [{**row, "passages": row["passages"][:1]} if row["doc_id"] == "d3-1" else row for row in rows]
    days.run("tue", changed, labeler=ROUTE, reuse=["mon"])
    assert [row["doc_id"] for row in days.labels("tue") if not row["reused"]] == ["d3-1"]


def test_an_input_without_trees_is_refused_with_what_makes_them(days: Days) -> None:
    for rows in (rows_of(2, 2), [{**row, "tree": ["a"]} for row in rows_of(2, 2)]):
        code, message = days.call("run", days.job("mon", rows, labeler=ROUTE))
        assert code == Exit.BAD_INPUT
        assert "`tree`" in message
        assert "relabel pairs tree" in message
