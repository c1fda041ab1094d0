"""A student is judged by rows that it did not learn from: the split of its manifest says which these are."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sklearn import metrics

from relabel.distill.students.examples import SIDES, split_queries
from tests.score.conftest import write_tiny_student

JSON = ("--output", "json")
QRELS = ("--qrels", "pairs.parquet")
SPLIT = {"by": "query_id", "seed": 6, "shares": {"dev": 0.25, "test": 0.4}, "sha256": "0" * 64}


def split_student(path: Path, **changes: Any) -> Path:
    """A tiny student whose manifest says how its queries were split."""
    student = write_tiny_student(path)
    held = json.loads((student / "manifest.json").read_text())
    sides = {name: {"rows": 1, "queries": 1} for name in SIDES}
    (student / "manifest.json").write_text(json.dumps({**held, "split": {**SPLIT, **sides, **changes}}))
    return student


def sides_of(pairs: list[dict[str, Any]], key: str = "query_id") -> list[str]:
    found = split_queries([" ".join(str(row[key]).casefold().split()) for row in pairs], dev=0.25, test=0.4, seed=6)
    return [SIDES[side] for side in found.tolist()]


@pytest.fixture(params=["query_id", "query"])
def split_by(
    request: pytest.FixtureRequest,
    relabel: Callable[..., Any],
    score: Callable[..., Any],
    write_pairs: Callable[..., Path],
    write_job: Callable[..., str],
    tmp_path: Path,
) -> str:
    """Finished labels in out/ecom, and in out/scores those of a student whose split is by the column named."""
    write_pairs()
    assert relabel("run", write_job()).code == 0
    assert score(student=split_student(tmp_path / "student", by=request.param)).code == 0
    return str(request.param)


def test_every_command_cuts_all_sets_to_the_students_test_side(
    relabel: Callable[..., Any], committed: Callable[..., Any], pairs: list[dict[str, Any]], split_by: str
) -> None:
    sides = sides_of(pairs, split_by)
    count = Counter(sides)
    assert min(count[name] for name in SIDES) > 0
    for side in SIDES:
        option = () if side == "test" else ("--side", side)
        wanted = [row for row, name in enumerate(sides) if name == side]
        gold = [pairs[row]["grade"] for row in wanted]
        ours, theirs = (
            [label["grade"] for row, label in sorted(committed("labels", output).items()) if row in set(wanted)]
            for output in ("out/ecom", "out/scores")
        )
        both = relabel("evaluate", "out/ecom", "out/scores", *QRELS, *option, *JSON).json
        one = both["comparisons"][0]
        assert one["counts"]["judged"] == one["counts"]["matched"] == len(wanted)
        for role, labels in (("teacher", ours), ("student", theirs)):
            found = one["against_gold"][role]["figures"]["accuracy"]["value"]
            assert found == pytest.approx(metrics.accuracy_score(gold, labels))
        assert both["side"]["side"] == side
        for path in ("out/ecom", "out/scores"):
            assert both["side"]["rows"][path] == {**{name: count[name] for name in SIDES}, "unknown": 0}
        alone = relabel("evaluate", "out/scores", *QRELS, *option, *JSON).json
        assert alone["counts"]["judged"] == len(wanted)
        against = relabel("compare", "out/ecom", "out/scores", *QRELS, *option, *JSON).json
        assert (against["counts"]["both"], against["gold"]["judged"]) == (len(wanted), len(wanted))
    text = relabel("evaluate", "out/ecom", "out/scores", *QRELS).out
    first = (
        f"{count['test']} of {len(pairs)} rows of out/ecom, the student's test side; left out: {count['train']} train"
    )
    for done in (text, relabel("compare", "out/ecom", "out/scores").out):
        assert first in done.split("\n\n")[0]
    assert relabel("report", "out/ecom", "out/scores", "--gold", "pairs.parquet", "--to", "page.html").code == 0
    assert first in html.unescape(Path("page.html").read_text())


@pytest.mark.usefixtures("split_by")
def test_rows_that_taught_the_student_are_judged_on_request_and_said_to_flatter(relabel: Callable[..., Any]) -> None:
    done = relabel("evaluate", "out/ecom", "out/scores", *QRELS, "--side", "all")
    assert re.search("^all 24 rows of out/ecom: .* taught the student, whose figures flatter$", done.out, re.MULTILINE)
    gate = relabel("evaluate", "out/ecom", "out/scores", *QRELS, "--require", "accuracy>=0.0", *JSON).json
    student = gate["comparisons"][0]["against_gold"]["student"]
    assert gate["comparisons"][0]["gates"][0]["value"] == student["figures"]["accuracy"]["value"]


def test_where_the_split_is_not_known_it_is_said_and_no_side_can_be_asked_for(
    relabel: Callable[..., Any],
    score: Callable[..., Any],
    write_pairs: Callable[..., Path],
    write_rows: Callable[..., str],
    random_rows: Callable[..., list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    write_pairs()
    student = split_student(tmp_path / "student")
    assert score(student=student).code == 0
    write_rows(random_rows(12))
    said = {"labels.jsonl": "a label file does not say whether what made it learned from these rows"}
    (student / "manifest.json").write_text((student / "manifest.json").read_text() + "\n")
    said["out/scores"] = "is another one by now, so nobody knows which rows trained it"
    for path, why in said.items():
        gold = ("--qrels", "labels.jsonl", "--label", "label") if path == "labels.jsonl" else QRELS
        done = relabel("evaluate", path, *gold)
        assert re.search(f"^{path}: .*{why}.*may flatter$", done.out.split("\n\n")[0], re.MULTILINE)
        refused = relabel("evaluate", path, *gold, "--side", "test")
        assert refused.code == 2
        assert why in refused.err


def test_a_row_of_a_student_of_two_stages_is_on_test_where_it_taught_neither(
    relabel: Callable[..., Any],
    score: Callable[..., Any],
    write_pairs: Callable[..., Path],
    pairs: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    write_pairs()
    first, second = split_student(tmp_path / "first", seed=4), split_student(tmp_path / "second")
    held = json.loads((second / "manifest.json").read_text())
    (second / "manifest.json").write_text(json.dumps({**held, "model": {"reference": str(first)}}))
    assert score(student=second).code == 0
    keys = [row["query_id"] for row in pairs]
    sides = [split_queries(keys, dev=0.25, test=0.4, seed=seed) for seed in (6, 4)]
    wanted = Counter(SIDES[min(both)] for both in zip(*(one.tolist() for one in sides), strict=True))
    found = relabel("evaluate", "out/scores", *QRELS, "--side", "all", *JSON).json["side"]["rows"]["out/scores"]
    assert {name: number for name, number in found.items() if number} == wanted
