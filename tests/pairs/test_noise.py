"""`relabel pairs context --noisy`: the share that was asked for, of documents that the query has nothing to do with,
the same each time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.manifests.files import Storage
from relabel.manifests.labels import Reads

pytest.importorskip("polars")
pytest.importorskip("bm25s")

from relabel.jobs.pairs.contexts import ContextRule, NoiseRule, with_context
from relabel.manifests.errors import InputError
from relabel.manifests.inputs import open_dataset
from relabel.manifests.specs import InputSpec

WORDS = ["rose", "iron", "pan", "sun", "winter", "lamp", "mug", "tent"]
QUERIES = ["rose winter", "iron pan", "sun lamp", "mug tent", "¿?"]


def make(rows: int = 40, queries: int = 5) -> list[dict[str, Any]]:
    """Rows of five queries; each document is with one query, and shares words with several."""
    return [
        {
            "query_id": f"q{row % queries}",
            "query": QUERIES[row % queries],
            "doc_id": f"d{row}",
            "document": f"{WORDS[row % 8]} {WORDS[row * 3 % 8]} {WORDS[row // 2 % 8]} number {row}",
            "grade": row % 3,
        }
        for row in range(rows)
    ]


def corpus(documents: int = 60) -> list[dict[str, Any]]:
    return [
        {"doc_id": f"c{i}", "document": f"{WORDS[i % 8]} {WORDS[i // 3 % 8]} of the corpus, {i}"}
        for i in range(documents)
    ]


def contexts(
    path: str, share: float | None, *, corpus_path: str | None = None, seed: int = 7, **more: Any
) -> tuple[Any, Any]:
    """One context a query id, and the counts."""
    rule = ContextRule(noise=None if share is None else NoiseRule(share, seed), **more)
    frame, counts = with_context(path, rule, Storage(), corpus_path=corpus_path)
    found: dict[str, set[tuple[str, ...]]] = {}
    for row in frame.collect().to_dicts():
        found.setdefault(row["query_id"], set()).add(tuple(row["context"]))
    assert all(len(held) == 1 for held in found.values()), "one list a query"
    return {query: next(iter(held)) for query, held in found.items()}, counts


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_that_share_of_each_context_is_random_and_the_rest_stays_in_its_place(
    write: Callable[..., str], share: float, k: int
) -> None:
    path, other = write("p.parquet", make()), write("c.parquet", corpus())
    plain, _ = contexts(path, None, k=k, corpus_path=other)
    noisy, counts = contexts(path, share, k=k, corpus_path=other)
    judged = {
        row["query_id"]: {one["document"] for one in make() if one["query_id"] == row["query_id"]} for row in make()
    }
    in_corpus = {row["document"] for row in corpus()}
    replaced = 0
    for query, context in noisy.items():
        assert len(context) == len(plain[query])
        new = [place for place, text in enumerate(context) if text != plain[query][place]]
        assert len(new) == math.floor(share * len(context) + 0.5)
        drawn = {context[place] for place in new}
        assert len(drawn) == len(new)
        assert drawn <= in_corpus - judged[query] - set(plain[query])
        replaced += len(new)
    assert (counts.replaced, counts.context_documents) == (replaced, sum(map(len, plain.values())))


def test_documents_that_a_query_judges_are_no_noise_for_it(write: Callable[..., str]) -> None:
    """Drawn from the pairs themselves, where every document is judged for some query."""
    path = write("p.parquet", make())
    judged = {
        query: {row["document"] for row in make() if row["query_id"] == query}
        for query in {row["query_id"] for row in make()}
    }
    for seed in range(40):
        noisy, _ = contexts(path, 1.0, seed=seed)
        assert all(not judged[query] & set(context) for query, context in noisy.items())


def test_queries_of_one_text_keep_each_others_judged_documents_out(write: Callable[..., str]) -> None:
    rows = make(8, queries=2)
    twin = [{**row, "query_id": "twin", "document": f"rose only for the twin {i}"} for i, row in enumerate(rows[::2])]
    path, other = write("p.parquet", [*rows, *twin]), write("c.parquet", [*corpus(5), *twin])
    for seed in range(20):
        noisy, _ = contexts(path, 1.0, seed=seed, corpus_path=other, k=2)
        assert noisy["q0"] == noisy["twin"]
        assert not {row["document"] for row in twin} & set(noisy["q0"])


@settings(max_examples=12, deadline=None)
@given(order=st.permutations(range(40)), deck=st.permutations(range(60)), seed=st.integers(0, 3))
def test_the_same_for_any_order_of_rows_and_other_queries_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], deck: list[int], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("noise")

    def put(name: str, rows: list[dict[str, Any]]) -> str:
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
        return str(folder / name)

    rows, documents = make(), corpus()
    first, _ = contexts(put("p", rows), 0.5, corpus_path=put("c", documents), seed=seed)
    again, _ = contexts(
        put("p2", [rows[i] for i in order]), 0.5, corpus_path=put("c2", [documents[i] for i in deck]), seed=seed
    )
    assert again == first
    alone, _ = contexts(
        put("p3", [row for row in rows if row["query_id"] == "q1"]), 0.5, corpus_path=str(folder / "c"), seed=seed
    )
    assert alone == {"q1": first["q1"]}


def test_another_seed_draws_others(write: Callable[..., str]) -> None:
    path, other = write("p.parquet", make()), write("c.parquet", corpus())
    assert contexts(path, 1.0, corpus_path=other, seed=1)[0] != contexts(path, 1.0, corpus_path=other, seed=2)[0]


def given_rows() -> list[dict[str, Any]]:
    clicked = {
        "q0": ["clicked a", "clicked b", "clicked c", "clicked d"],
        "q1": [],
        "q2": None,
        "q3": ["clicked x"],
        "q4": ["x", None, "y"],
    }
    return [{**row, "context": clicked[row["query_id"]]} for row in make()]


def test_a_context_that_is_there_is_what_becomes_noisy(write: Callable[..., str]) -> None:
    path, other = write("p.parquet", given_rows()), write("c.parquet", corpus())
    half, counts = contexts(path, 0.5, corpus_path=other)
    assert [len(half[f"q{i}"]) for i in range(5)] == [4, 0, 0, 1, 2]
    assert sum(text.startswith("clicked") for text in half["q0"]) == 2
    assert (counts.replaced, counts.context_documents, counts.queries_without) == (2 + 1 + 1, 7, 2)
    frame, _ = with_context(path, ContextRule(noise=NoiseRule(1.0, 7)), Storage(), corpus_path=other)
    out = frame.collect()
    assert out.columns == list(given_rows()[0]), "no column moves"
    assert [{key: row[key] for key in row if key != "context"} for row in out.to_dicts()] == make()
    assert not [text for row in out["context"].to_list() for text in row if text.startswith("clicked")]


def test_noise_is_cut_like_any_context_and_a_cut_copy_of_a_context_document_is_none(write: Callable[..., str]) -> None:
    rows = [{**row, "context": ["a long document, cut"]} for row in make(4, queries=1)]
    other = write(
        "c.parquet",
        [{"document": f"a long document, cut {i}"} for i in range(9)] + [{"document": "something else, and long too"}],
    )
    noisy, _ = contexts(write("p.parquet", rows), 1.0, corpus_path=other, max_chars=20)
    assert noisy == {"q0": ("something else, and ",)}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            make(8, queries=1),
            "query 'rose winter' wants 3 random documents, and 0 are left that it neither judges nor has for context",
        ),
        (
            [{**row, "context": ["a", str(i)]} for i, row in enumerate(make())],
            "query `q0` has rows with different contexts",
        ),
        ([{**row, "context": "a"} for row in make()], "column `context` holds String; a list of strings is wanted"),
        (
            [{**row, "context": [1]} for row in make()],
            "column `context` holds List(Int64); a list of strings is wanted",
        ),
        ([make()[0], {**make()[0], "query": "else"}], "query `q0` has two texts"),
    ],
)
def test_what_can_not_be_made_noisy_is_named(
    write: Callable[..., str], rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        contexts(write("p.parquet", rows), 1.0)
    assert message in str(caught.value)


def test_the_command_makes_noise_that_a_job_reads(
    relabel: Callable[..., Any], write: Callable[..., str], folder: Path
) -> None:
    write("p.parquet", make())
    write("c.parquet", corpus())
    command = ("pairs", "context", "p.parquet", "--corpus", "c.parquet", "--output", "json")
    done = relabel(*command, "--to", "half.parquet", "--noisy", "0.5", "--seed", "3")
    assert done.code == 0, done
    assert {key: done.json[key] for key in ("noisy", "seed", "replaced", "context_documents")} == {
        "noisy": 0.5, "seed": 3, "replaced": 8, "context_documents": 16,
    }  # fmt: skip
    opened = open_dataset(InputSpec(path=("half.parquet",)), Storage(), reads=Reads(context=True))
    assert opened.columns.context == "context"
    relabel(*command, "--to", "again.parquet", "--noisy", "0.5", "--seed", "3")
    assert (folder / "again.parquet").read_bytes() == (folder / "half.parquet").read_bytes()
    text = relabel("pairs", "context", "half.parquet", "--to", "all.parquet", "--corpus", "c.parquet", "--noisy", "1")
    assert re.search(r"replaced +16\n", text.out)
    for share in ("0", "1.1", "-1", "nan", "half"):
        relabel(*command[:-2], "--to", "x.parquet", "--noisy", share).refused(2, "--noisy")
    relabel("pairs", "context", "half.parquet", "--to", "x.parquet").refused(3, "has a column `context` already")
    assert not (folder / "x.parquet").exists()
