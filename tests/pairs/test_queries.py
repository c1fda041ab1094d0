"""`relabel pairs queries`: queries cut out of documents or written by a model, with candidates by BM25, none like one
that is held out.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("polars")
pytest.importorskip("bm25s")

from relabel.jobs.cli import main
from tests.pairs.test_context import plain_bm25

ENDS = ("den", "ble", "ton", "ra", "mi", "sk", "lo")
WORDS = ["oak", "lamp", "glass", *(a + b for a in ("gar", "ta", "whe", "bro", "sil", "nor") for b in ENDS)]


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    rng = random.Random(3)
    titles = dict.fromkeys(" ".join([*rng.sample(WORDS, 4), "for sale", f"n{i % 40}"]) for i in range(150))
    table = {"doc_id": [f"d{i}" for i in range(len(titles))], "title": list(titles)}
    pq.write_table(pa.table(table), tmp_path / "docs.parquet")
    return tmp_path / "docs.parquet"


def made(docs: Path, *options: str) -> list[dict[str, object]]:
    out = docs.with_name("made.parquet")
    with pytest.raises(SystemExit) as ended:
        main(["pairs", "queries", str(docs), "--to", str(out), "--force", *options])
    assert ended.value.code == 0
    rows: list[dict[str, object]] = pq.read_table(out).to_pylist()
    return rows


def words(text: object) -> list[str]:
    return re.findall(r"\w+", str(text).lower())


def test_a_query_is_cut_out_of_its_document_and_its_candidates_are_those_of_bm25(docs: Path) -> None:
    titles = pq.read_table(docs)["title"].to_pylist()
    rows = made(docs, "--queries", "40", "--rank", "2", "--rank", "9")
    queries = {row["query_id"]: row["query"] for row in rows}
    assert len(queries) == len(set(queries.values())) == 40
    for query_id, query in queries.items():
        (own,) = [row["title"] for row in rows if row["query_id"] == query_id and row["origin"] == "own"]
        assert f" {query} " in f" {own} "
        assert "for" not in words(query), "a word of nearly every document says nothing"
        scores = plain_bm25(titles, str(query))
        ranked = sorted(range(len(titles)), key=lambda one: (-scores[one], titles[one]))
        expected = [titles[ranked[place]] for place in (2, 9) if scores[ranked[place]] > 0]
        assert [row["title"] for row in rows if row["query_id"] == query_id] == [
            own, *(title for title in expected if title != own)
        ]  # fmt: skip


def test_a_margin_leaves_out_what_may_be_as_relevant_as_the_documents_own(docs: Path) -> None:
    titles = pq.read_table(docs)["title"].to_pylist()
    rows = made(docs, "--queries", "40", "--rank", "0", "--margin", "0.8")
    hard = [row for row in rows if row["origin"] == "bm25"]
    assert hard
    for row in hard:
        scores = dict(zip(titles, plain_bm25(titles, str(row["query"])), strict=True))
        (own,) = [one["title"] for one in rows if one["query_id"] == row["query_id"] and one["origin"] == "own"]
        below = [score for score in scores.values() if score <= 0.8 * scores[own]]
        assert scores[row["title"]] == pytest.approx(max(below), rel=1e-6)
        assert row["share"] == pytest.approx(scores[row["title"]] / scores[own], rel=1e-5)


def test_nothing_of_a_held_out_file_is_seen(docs: Path, tmp_path: Path) -> None:
    table = pq.read_table(docs)
    held = {"query": ["oak lamp", "Glass"] * 15, "title": table["title"].to_pylist()[:30]}
    pq.write_table(pa.table(held), tmp_path / "held.parquet")
    rows = made(docs, "--queries", "60", "--unlike", str(tmp_path / "held.parquet"))
    assert not {row["title"] for row in rows} & set(held["title"])
    for query in {str(row["query"]) for row in rows}:
        for other in ({"oak", "lamp"}, {"glass"}):
            assert len(other & set(words(query))) / len(other | set(words(query))) < 0.5, query


def test_queries_that_a_model_wrote_are_taken_as_they_are(docs: Path, tmp_path: Path) -> None:
    table = pq.read_table(docs).slice(0, 20)
    asked = [[f"where to buy {title}?", " "] if i % 2 else None for i, title in enumerate(table["title"].to_pylist())]
    pq.write_table(table.append_column("asked", pa.array(asked)), tmp_path / "asked.parquet")
    rows = made(tmp_path / "asked.parquet", "--queries-in", "asked", "--rank", "1")
    assert {row["query"] for row in rows} == {one[0] for one in asked if one}
    assert [row["title"] for row in rows if row["origin"] == "own"] == table["title"].to_pylist()[1::2]


def test_a_seed_repeats_and_what_decided_it_is_in_the_file(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, again, other = (made(docs, "--queries", "20", "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again != other
    kept = json.loads((pq.read_schema(docs.with_name("made.parquet")).metadata or {})[b"relabel.queries"])
    assert (kept["queries"], kept["seed"], kept["ranks"]) == (20, 2, [1, 4, 14, 49])
    capsys.readouterr()
    assert len(made(docs, "--queries", "5000")) < 5_000
    assert "asked for 5,000" in capsys.readouterr().err
