"""`relabel audit --colder`: pairs of two documents of which the biased one must not get the higher grade."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

Relabel = Callable[..., Any]
JudgedBy = Callable[..., str]

ROWS = [
    {
        "query": f"red shoe {number}",
        "document_1": f"red shoe {number} red shoe {number}",
        "document_2": f"It was sold in spring. Of kind {number}.",
    }
    for number in range(6)
]
"""As in ColDeR's files; a judge that counts words falls for the first document."""


def write(name: str, rows: list[dict[str, Any]] = ROWS) -> str:
    path = Path(f"{name}.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("subset", "judge", "moved"),
    [
        ("foil", "CountsWords", 1.0),
        ("poison", "CountsWords", 1.0),
        ("repetition_bias", "CountsWords", 1.0),
        ("answer_importance", "CountsWords", 0.0),
        ("foil", "ReadsGold", 0.0),
    ],
)
def test_a_judge_falls_for_the_document_that_a_biased_ranker_likes(
    relabel: Relabel, judged_by: JudgedBy, folder: Path, subset: str, judge: str, moved: float
) -> None:
    job = judged_by(judge, {"audit": {"require": {"stuffing": 0.0}}})
    outcome = relabel("audit", job, "--colder", write(subset), "--output", "json")
    assert outcome.code == 0  # the job's gates are on probes of its own pairs
    probe, *noise = outcome.json["probes"]
    assert [one["probe"] for one in noise] == ["whitespace", "again"]
    assert (probe["probe"], probe["rows"], probe["moved"]["value"]) == (subset, len(ROWS), moved)
    place = folder / f"out/measurements/ecom/colder-{subset}"
    asked = {row["query_id"]: row["document"] for row in pq.read_table(place / "pairs.parquet").to_pylist()}
    better, worse = ("document_1", "document_2") if subset == "answer_importance" else ("document_2", "document_1")
    assert [asked[f"{number}.original"] for number in range(6)] == [row[better] for row in ROWS]
    assert [asked[f"{number}.{subset}"] for number in range(6)] == [row[worse] for row in ROWS]


def test_a_gate_on_a_subset_holds_as_on_a_probe(relabel: Relabel, judged_by: JudgedBy) -> None:
    job = judged_by("CountsWords")
    outcome = relabel("audit", job, "--colder", write("foil"), "--require", "foil<=0.05")
    assert outcome.code == 5
    assert "foil<=0.05: refused, foil is 1.0000" in outcome.err


def test_what_is_no_file_of_colder_is_refused(relabel: Relabel, judged_by: JudgedBy) -> None:
    job = judged_by("CountsWords")
    relabel("audit", job, "--colder", write("foil", [{"query": "a", "document": "b"}])).refused(3, "document_1")
    odd = [{"query": "a", "document_1": 1, "document_2": "b"}]
    relabel("audit", job, "--colder", write("foil", odd)).refused(3, "holds no text")
    relabel("audit", job, "--colder", "absent.jsonl").refused(3, "absent.jsonl")
    relabel("audit", job, "--colder", write("foil"), "--pairs", "pairs.parquet").refused(2, "--pairs")
    relabel("audit", job, "--colder", write("foil"), "--probe", "padded").refused(2, "--prob")
