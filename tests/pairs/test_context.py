"""`relabel pairs context`: BM25 as an independent count gives it, one list a query, and grades that change nothing."""

import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.manifests.files import Storage
from relabel.manifests.labels import Reads

pytest.importorskip("polars")
pytest.importorskip("bm25s")

from relabel.jobs.pairs.context import Bm25Index, with_context
from relabel.manifests.errors import InputError
from relabel.manifests.inputs import open_dataset
from relabel.manifests.specs import InputSpec

PAIRS = [
    {
        "query_id": "q1",
        "query": "pruning roses",
        "doc_id": "a",
        "title": "Roses",
        "body": "Pruning climbing roses in winter.",
        "grade": 2,
    },
    {
        "query_id": "q2",
        "query": "cast iron pan",
        "doc_id": "b",
        "title": "Pans",
        "body": "How to season a cast iron pan.",
        "grade": 2,
    },
    {"query_id": "q1", "query": "pruning roses", "doc_id": "c", "title": "", "body": "Roses want sun.", "grade": 1},
    {
        "query_id": "q1",
        "query": "pruning roses",
        "doc_id": "b",
        "title": "Pans",
        "body": "How to season a cast iron pan.",
        "grade": 0,
    },
    {"query_id": "q3", "query": "¿?", "doc_id": "e", "title": None, "body": None, "grade": 0},
]


def plain_bm25(texts: list[str], query: str) -> list[float]:
    """Robertson and Zaragoza 2009 with Lucene's idf and no (k1 + 1), k1 = 1.5, b = 0.75, straight from the formula."""
    words = [re.findall(r"\w+", text.lower()) for text in texts]
    mean = sum(map(len, words)) / len(words)
    scores = []
    for document in words:
        counts = Counter(document)
        total = 0.0
        for word in re.findall(r"\w+", query.lower()):
            df = sum(word in other for other in words)
            if counts[word]:
                idf = math.log(1 + (len(words) - df + 0.5) / (df + 0.5))
                total += idf * counts[word] / (counts[word] + 1.5 * (1 - 0.75 + 0.75 * len(document) / mean))
        scores.append(total)
    return scores


vocabulary = st.sampled_from(
    ["rose", "Roses", "prune", "iron", "pan", "cast", "sun", "winter", "a", "1", "é,", "ß", "日本", "x_y", "ROSE"]
)
documents = st.lists(st.lists(vocabulary, max_size=12).map(" ".join), min_size=1, max_size=12, unique=True)


@settings(max_examples=60, deadline=None)
@given(texts=documents, query=st.lists(vocabulary, max_size=5).map(" ".join), k=st.integers(1, 4))
def test_ranks_are_those_of_an_independent_bm25(texts: list[str], query: str, k: int) -> None:
    scores = dict(zip(texts, plain_bm25(texts, query), strict=True))
    best = Bm25Index(texts).best(query, k)
    right = sorted(-score for score in scores.values() if score > 0)[:k]
    assert [scores[text] for text in best] == pytest.approx([-score for score in right], abs=1e-5)
    assert len(set(best)) == len(best)
    assert Bm25Index(texts[::-1]).best(query, k) == best, "the order of the documents does not matter"


def contexts(path: str, **options: Any) -> tuple[list[dict[str, Any]], Any]:
    corpus = options.pop("corpus_path", None)
    frame, counts = with_context(path, Storage(), corpus_path=corpus, **options)
    return frame.collect().to_dicts(), counts


def test_a_small_set_by_hand(write: Callable[..., str]) -> None:
    rows, counts = contexts(write("p.parquet", PAIRS))
    roses = ["Roses\n\nPruning climbing roses in winter.", "Roses want sun."]
    pans = ["Pans\n\nHow to season a cast iron pan."]
    assert [row.pop("context") for row in rows] == [roses, pans, roses, roses, []]
    assert rows == PAIRS
    assert (counts["queries"], counts["queries_without_context"], counts["documents"]) == (3, 1, 3)


def test_a_corpus_takes_the_place_of_the_sets_own_documents(write: Callable[..., str]) -> None:
    corpus = write(
        "c.parquet",
        [{"document": "all about roses"}, {"document": "iron"}, {"document": "all about roses"}, {"document": " "}],
    )
    rows, counts = contexts(write("p.parquet", PAIRS), corpus_path=corpus)
    assert [row["context"] for row in rows] == [
        ["all about roses"],
        ["iron"],
        ["all about roses"],
        ["all about roses"],
        [],
    ]
    assert counts["documents"] == 2


@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.lists(vocabulary, max_size=6).map(" ".join), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    ),
    grades=st.permutations(range(12)),
)
def test_one_list_a_query_and_never_by_grade(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, str, int]], grades: list[int]
) -> None:
    import pyarrow as pa

    folder = tmp_path_factory.mktemp("pairs")
    queries = ["rose prune", "iron pan", "sun", "日本 winter"]
    table = [
        {"query_id": q, "query": queries[q], "doc_id": str(i), "document": text, "grade": grade}
        for i, (q, text, grade) in enumerate(rows)
    ]
    found = []
    for name, given_grades in (("a", [row[2] for row in rows]), ("b", grades)):
        path = folder / f"{name}.parquet"
        pq.write_table(
            pa.Table.from_pylist([{**row, "grade": grade} for row, grade in zip(table, given_grades, strict=False)]),
            path,
        )
        found.append([(row["query_id"], row["doc_id"], row["context"]) for row in contexts(str(path))[0]])
    assert found[0] == found[1]
    assert [(q, d) for q, d, _ in found[0]] == [(row["query_id"], row["doc_id"]) for row in table], (
        "rows stay in their order"
    )
    assert len({(q, tuple(c)) for q, _, c in found[0]}) == len({q for q, _, _ in found[0]})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{**PAIRS[0], "context": ["x"]}], "has a column `context` already"),
        ([PAIRS[0], {**PAIRS[0], "query": "else"}], "query `q1` has two texts"),
        ([{**PAIRS[0], "query_id": None}, PAIRS[0]], "row 0 has no `query_id`"),
        (
            [{"query_id": "q", "qeury": "x", "document": "y"}],
            "no column `query` (PAIRS); it has query_id, qeury, document. Did you mean `qeury`?",
        ),
    ],
)
def test_bad_pairs_are_named(write: Callable[..., str], rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InputError) as caught:
        contexts(write("p.parquet", rows))
    assert message in str(caught.value)


def test_the_command_from_end_to_end_gives_a_job_its_context(
    relabel: Callable[..., Any], write: Callable[..., str], folder: Path
) -> None:
    write("p.parquet", PAIRS)
    done = relabel("pairs", "context", "p.parquet", "--to", "out.parquet", "--output", "json")
    assert done.code == 0, done
    assert (done.json["pairs"], done.json["queries"], done.json["queries_without_context"]) == (5, 3, 1)
    dataset = open_dataset(InputSpec(path=("out.parquet",)), Storage(), reads=Reads(context=True))
    assert dataset.columns.context == "context"
    relabel("pairs", "context", "p.parquet", "--to", "p.parquet", "--force").refused(2, "is in the input")
