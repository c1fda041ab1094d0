"""What is written is read back as it was, by us and by ir_measures, whatever ids and numbers it holds."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import ir_measures
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.jobs.convert.conversion import convert
from relabel.jobs.convert.sources import Options
from relabel.manifests.files import Storage
from tests.convert.conftest import rows_of

PLAIN = Options()
IDS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\ufeff"), min_size=1, max_size=8).filter(
    lambda text: len(text.split()) == 1 and text.split()[0] == text
)
GRADES = st.integers(-3, 5)
SCORES = st.floats(allow_nan=False, allow_infinity=False, width=32)
FEW = settings(max_examples=12, deadline=None)


def _pairs(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[tuple[str, str], Any]]:
    return st.dictionaries(st.tuples(IDS, IDS), values, max_size=12)


def _write(path: Path, pairs: dict[tuple[str, str], Any], name: str) -> None:
    rows = [{"query_id": query, "doc_id": doc, name: value} for (query, doc), value in pairs.items()]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _read(path: Path, name: str) -> dict[tuple[str, str], Any]:
    return {(row["query_id"], row["doc_id"]): row[name] for row in rows_of(str(path))} if path.stat().st_size else {}


@FEW
@given(pairs=_pairs(GRADES))
def test_grades_come_back_from_qrels_from_jsonl_and_from_parquet(pairs: dict[tuple[str, str], int]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder / "a.jsonl", pairs, "grade")
        chain = ["a.jsonl", "b.qrels", "c.parquet", "d.qrels", "e.jsonl", "f.parquet", "g.jsonl"]
        for source, target in itertools.pairwise(chain):
            found = convert(str(folder / source), str(folder / target), Storage(), options=PLAIN)
            assert (found.rows, found.written, found.nulls) == (len(pairs), len(pairs), 0)
        assert (folder / "b.qrels").read_bytes() == (folder / "d.qrels").read_bytes()
        assert list(_read(folder / "g.jsonl", "grade").items()) == list(pairs.items())
        lines = (folder / "b.qrels").read_text(encoding="utf-8").split("\n")
        assert [tuple(line.split()) for line in lines if line] == [
            (query, "0", doc, str(grade)) for (query, doc), grade in pairs.items()
        ]
        found_there = {
            (one.query_id, one.doc_id): one.relevance for one in ir_measures.read_trec_qrels(str(folder / "b.qrels"))
        }
        assert found_there == pairs


@FEW
@given(pairs=_pairs(SCORES))
def test_scores_come_back_from_run_files_to_the_last_bit(pairs: dict[tuple[str, str], float]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        columns = {
            "query_id": pa.array([query for query, _ in pairs], pa.string()),
            "doc_id": pa.array([doc for _, doc in pairs], pa.string()),
            "score": pa.array(list(pairs.values()), pa.float32()),
        }
        pq.write_table(pa.table(columns), folder / "a.parquet")
        chain = ["a.parquet", "b.run", "c.parquet", "d.run", "e.jsonl", "f.run"]
        for source, target in itertools.pairwise(chain):
            convert(str(folder / source), str(folder / target), Storage(), options=PLAIN)
        found = {(one.query_id, one.doc_id): one.score for one in ir_measures.read_trec_run(str(folder / "b.run"))}
        assert {pair: pa.scalar(score, pa.float32()).as_py() for pair, score in found.items()} == pairs
        held = _read(folder / "c.parquet", "score")
        assert held == found
        last = {(one.query_id, one.doc_id): one.score for one in ir_measures.read_trec_run(str(folder / "f.run"))}
        assert last == found
        ranks = rows_of(str(folder / "c.parquet"))
        for query in {query for query, _ in pairs}:
            mine = [row for row in ranks if row["query_id"] == query]
            assert [row["rank"] for row in mine] == list(range(1, len(mine) + 1))
            order = [(-row["score"], (*(-byte for byte in row["doc_id"].encode()), math.inf)) for row in mine]
            assert order == sorted(order)


@FEW
@given(rows=st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(-2, 3)), max_size=20))
@pytest.mark.parametrize("rule", ["first", "mean"])
def test_duplicates_are_settled_as_evaluate_settles_them(rows: list[tuple[str, str, int]], rule: Any) -> None:
    from relabel.manifests.gold import grades_by_pair, load_qrels

    with tempfile.TemporaryDirectory() as name:
        source, target = f"{name}/a.qrels", f"{name}/b.qrels"
        Path(source).write_text("".join(f"{query} 0 {doc} {grade}\n" for query, doc, grade in rows))
        found = convert(source, target, Storage(), options=PLAIN, duplicates=rule)
        theirs = grades_by_pair(
            load_qrels(source, Storage(), grade="grade", by="query_id", doc="doc_id", is_by_row=False), rule
        )
        assert (found.duplicates, found.conflicts) == (theirs.num_repeated, theirs.num_conflicts)
        ours = [tuple(line.split()) for line in Path(target).read_text().splitlines()]
        pairs = [(query, doc) for query, _, doc, _ in ours]
        assert len(set(pairs)) == len(pairs) == len(theirs.keys)
        assert [int(grade) for *_, grade in ours] == theirs.grades_of(pairs)
