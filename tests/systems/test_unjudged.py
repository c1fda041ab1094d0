"""`relabel pairs unjudged`: the pairs of the top k without a label, as input of the job that labelled; and the loop of
two commands that ends with nothing unjudged.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.jobs.conftest import Outcome
from tests.systems.conftest import Collection, write

Relabel = Callable[..., Outcome]


def write_corpus(collection: Collection, path: str = "corpus.parquet") -> str:
    rows = [{"doc_id": doc, "document": f"text of {doc}"} for held in collection.humans.values() for doc in held]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_queries(collection: Collection) -> str:
    rows = [f"{query},words of {query}" for query in collection.queries]
    return write("queries.csv", ["query_id,query", *rows])


def top(collection: Collection, name: str, query: str, k: int = 10) -> set[str]:
    scores = collection.systems[name][query]
    return set(sorted(scores, key=lambda doc: (scores[doc], doc))[-k:])


def test_the_pairs_are_those_of_the_top_without_a_label(collection: Collection, relabel: Relabel) -> None:
    labelled = {query: dict(list(held.items())[:20]) for query, held in collection.judge.items()}
    runs = [collection.write_run(name) for name in ("good", "bad")]
    collection.write_qrels(labelled, "judge.qrels")
    done = relabel(
        "pairs", "unjudged", *runs, "--labels", "judge.qrels", "--corpus", write_corpus(collection),
        "--queries", write_queries(collection), "--to", "more.parquet", "--output", "json",
    )  # fmt: skip
    assert done.code == 0, done
    rows = pq.read_table("more.parquet").to_pylist()
    wanted = {
        (query, doc)
        for query in collection.queries
        for doc in (top(collection, "good", query) | top(collection, "bad", query)) - set(labelled[query])
    }
    assert [(row["query_id"], row["doc_id"]) for row in rows] == sorted(wanted)
    assert all(row["query"] == f"words of {row['query_id']}" for row in rows)
    assert all(row["document"] == f"text of {row['doc_id']}" for row in rows)
    assert (done.json["pairs"], done.json["without_document"]) == (len(wanted), 0)
    assert done.err == ""


def test_a_label_files_own_column_gives_the_texts_of_queries(collection: Collection, relabel: Relabel) -> None:
    rows = [
        {"query_id": query, "query": f"words of {query}", "doc_id": doc, "grade": grade}
        for query, held in collection.judge.items()
        for doc, grade in list(held.items())[:20]
    ]
    pq.write_table(pa.Table.from_pylist(rows), "judge.parquet")
    pq.write_table(pa.Table.from_pylist(rows).drop(["query"]), "bare.parquet")
    words = "--corpus", write_corpus(collection), "--to", "more.parquet"
    run = collection.write_run("good")
    assert relabel("pairs", "unjudged", run, "--labels", "judge.parquet", *words).code == 0
    found = pq.read_table("more.parquet").to_pylist()
    assert found
    assert all(row["query"] == f"words of {row['query_id']}" for row in found)
    refused = relabel("pairs", "unjudged", run, "--labels", "bare.parquet", *words, "--force")
    assert refused.code != 0
    assert "bare.parquet: has no column `query` with texts of queries" in refused.err


def test_pairs_without_the_text_of_their_query_are_reported_with_what_gives_it(
    collection: Collection, relabel: Relabel
) -> None:
    labelled = {query: dict(list(held.items())[:20]) for query, held in collection.judge.items()}
    collection.write_qrels(labelled, "judge.qrels")
    query = next(query for query in collection.queries if top(collection, "good", query) - set(labelled[query]))
    done = relabel(
        "pairs", "unjudged", collection.write_run("good"), "--labels", "judge.qrels",
        "--corpus", write_corpus(collection), "--to", "more.parquet", "--output", "json",
        "--queries", write("queries.csv", ["query_id,query", f"{query},its words"]),
    )  # fmt: skip
    assert done.code == 0, done
    assert done.json["without_query_text"] > 0
    assert "--queries" in done.err


@pytest.mark.parametrize("doc_id", ["doc_id", "sku"])
def test_two_commands_are_repeated_until_all_is_judged(
    folder: Path, relabel: Relabel, write_pairs: Callable[..., Path], write_job: Callable[..., str], doc_id: str
) -> None:
    """A run labels two documents of each query; the others that a system returns are written, labelled with reuse, and
    then nothing is unjudged.
    """
    write_pairs(path="all.parquet")
    every = pq.read_table("all.parquet").rename_columns({"doc_id": doc_id})
    rows = every.to_pylist()
    Path("in").mkdir()
    pq.write_table(every.filter([row[doc_id].endswith(("-0", "-1")) for row in rows]), "in/first.parquet")
    pq.write_table(every.select([doc_id, "title", "body"]), "corpus.parquet")
    lines = [f"{row['query_id']} Q0 {row[doc_id]} 0 {number} t" for number, row in enumerate(rows)]
    write("a.run", lines)
    job = {"input": {"path": "in", "columns": {"gold": "grade", "doc_id": doc_id}}}
    assert relabel("run", write_job({**job, "output": "out/one"}, path="one.yaml")).code == 0
    arguments = ("pairs", "unjudged", "a.run", "--corpus", "corpus.parquet", "--output", "json")
    done = relabel(*arguments, "--labels", "out/one", "--to", "in/second.parquet")
    assert done.code == 0, done
    assert done.json["pairs"] == 12
    second = write_job({**job, "output": "out/two", "reuse": ["out/one"]}, path="two.yaml")
    assert relabel("run", second).code == 0
    rows_of = json.loads((folder / "out/two/manifest.json").read_bytes())["rows"]
    assert (rows_of["labelled"], rows_of["reused"]) == (12, 12)
    last = relabel(*arguments, "--labels", "out/two", "--to", "in/third.parquet")
    assert last.code == 0
    assert last.json["pairs"] == 0


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"--queries": None}, ("judge.qrels: a file of this form has no texts of queries", "--queries")),
        ({"--queries": "other.csv"}, ("other.csv: has the text of none of the queries", "q000")),
        ({"--corpus": "other.parquet"}, ("other.parquet: has none of the", "with the same ids")),
        ({"--queries": "two.csv"}, ("two.csv: query q000 has no text, or two",)),
    ],
)
def test_what_is_missing_is_named(
    collection: Collection, relabel: Relabel, change: dict[str, Any], parts: tuple[str, ...]
) -> None:
    run = collection.write_run("good")
    collection.write_qrels(
        {query: dict(list(held.items())[:5]) for query, held in collection.judge.items()}, "judge.qrels"
    )
    options = {
        "--labels": "judge.qrels",
        "--corpus": write_corpus(collection),
        "--queries": write_queries(collection),
        "--to": "more.parquet",
    }
    write("other.csv", ["query_id,query", "x,y"])
    write("two.csv", ["query_id,query", "q000,y", "q000,z"])
    pq.write_table(pa.Table.from_pylist([{"doc_id": "x", "document": "y"}]), "other.parquet")
    options |= change
    words = [word for option, value in options.items() if value is not None for word in (option, value)]
    relabel("pairs", "unjudged", run, *words).refused(3, *parts)
