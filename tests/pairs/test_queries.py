"""`relabel pairs queries`: queries cut out of documents or written by a model, with candidates by BM25 or a student,
none like one that is held out.
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("polars")
pytest.importorskip("bm25s")

from relabel.distill.students.model import student_digest
from relabel.jobs.api import TrainedStudent, read_labels
from relabel.jobs.cli import main
from tests.jobs.conftest import Outcome
from tests.pairs.test_context import plain_bm25
from tests.score.conftest import WORDS as KNOWN
from tests.score.conftest import write_tiny_student

ENDS = ("den", "ble", "ton", "ra", "mi", "sk", "lo")
WORDS = ["oak", "lamp", "glass", *(a + b for a in ("gar", "ta", "whe", "bro", "sil", "nor") for b in ENDS)]


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    rng = random.Random(3)
    parts = ([*rng.sample(WORDS, 2), "for sale,", *rng.sample(WORDS, 2), f"n{i % 40}"] for i in range(150))
    titles = dict.fromkeys(map(" ".join, parts))
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


PRODUCTS = (
    "Hamilton Beach gel ice cream maker, 12 cast iron molds (assorted colors), gray",
    "Cuisinart gel ice cream maker - assorted colors, 6 pack",
    "Presto gel ice cream maker with yoga mat, gray",
    "Manduka yoga mat for home, 12 cast iron rings, 4 pack",
    "Gaiam yoga mat (assorted colors), 3 pack",
    "Lodge 12 cast iron skillet, gray",
)


def write_products(docs: Path) -> None:
    table = {"doc_id": [f"p{i}" for i in range(len(PRODUCTS))], "title": PRODUCTS}
    pq.write_table(pa.table(table), docs)


def test_a_query_is_a_whole_phrase_of_several_words(docs: Path) -> None:
    write_products(docs)
    queries = {str(row["query"]) for row in made(docs, "--max-words", "4")}
    assert {"gel ice cream maker", "yoga mat", "assorted colors"} <= queries
    pieces = {"gel ice", "ice cream", "cream maker", "gel ice cream", "ice cream maker"}
    assert not pieces & queries, "each is followed, or preceded, by one and the same word"
    assert "cast iron" not in queries, "a number always comes before"
    assert not {query for query in queries if re.match(r"\d", query)}, "a number counts what follows"
    assert min(len(query.split()) for query in queries) == 2
    assert "mat gray" not in queries, "no phrase goes across a mark"


def test_passages_without_titles_give_no_halves_of_sentences_and_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(5)
    texts = [f"who can {one} {two} before it does" for one, two in (rng.sample(WORDS[:9], 2) for _ in range(150))]
    texts = [f"{text} {number}" for number, text in enumerate(texts)]
    # most documents lack these words, so that only a list of stop words knows them
    others = [f"n{number} rests alone" for number in range(600)]
    table = {"doc_id": [f"d{number}" for number in range(750)], "document": [*texts, *others]}
    pq.write_table(pa.table(table), tmp_path / "passages.parquet")
    queries = {str(row["query"]) for row in made(tmp_path / "passages.parquet", "--queries", "40")}
    said = "the documents have no column `title`"
    assert said in capsys.readouterr().err
    assert queries
    assert all(set(words(query)) <= set(WORDS[:9]) for query in queries)
    made(tmp_path / "passages.parquet", "--queries", "40", "--column", "document")
    assert said not in capsys.readouterr().err, "it was asked for"


@pytest.mark.parametrize(
    ("title", "language", "query"),
    [
        ("Men's Shoes", "english", "men's shoes"),
        ("Men’s Shoes", "english", "men's shoes"),
        ("O'Neill Wetsuit", "english", "o'neill wetsuit"),
        ("Huile, l'eau minérale", "french", "eau minérale"),
    ],
)
def test_a_word_keeps_its_apostrophe_but_none_after_a_stop_word(
    tmp_path: Path, title: str, language: str, query: str
) -> None:
    titles = [f"{title}, n{number}" for number in range(5)]
    pq.write_table(pa.table({"doc_id": titles, "title": titles}), tmp_path / "docs.parquet")
    assert {row["query"] for row in made(tmp_path / "docs.parquet", "--language", language)} == {query}


def test_a_query_resembles_a_held_out_one_whatever_its_apostrophes(tmp_path: Path) -> None:
    titles = [f"Men's Shoes, n{number}, oak lamp" for number in range(5)]
    pq.write_table(pa.table({"doc_id": titles, "title": titles}), tmp_path / "docs.parquet")
    pq.write_table(pa.table({"query": ["men shoes"]}), tmp_path / "held.parquet")
    rows = made(tmp_path / "docs.parquet", "--unlike", str(tmp_path / "held.parquet"))
    assert {row["query"] for row in rows} == {"oak lamp"}


def test_where_all_documents_are_held_out_that_is_what_it_says(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_products(docs)
    held = docs.with_name("held.parquet")
    pq.write_table(pq.read_table(docs).append_column("query", pa.array(["oak lamp"] * len(PRODUCTS))), held)
    with pytest.raises(SystemExit) as ended:
        main(["pairs", "queries", str(docs), "--to", str(docs.with_name("none.parquet")), "--unlike", str(held)])
    assert ended.value.code == 3
    assert f"all documents of --unlike {held}" in capsys.readouterr().err


def test_single_words_are_queries_on_request(docs: Path) -> None:
    write_products(docs)
    queries = {str(row["query"]) for row in made(docs, "--min-words", "1", "--max-words", "1")}
    assert queries == {"gray"}, "the other words are pieces of phrases, or counted"


def test_few_documents_give_no_query_until_a_word_of_one_of_them_will_do(
    docs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    titles = ["wool socks", "oak lamp"]
    pq.write_table(pa.table({"doc_id": ["a", "b"], "title": titles}), docs)

    def refused(*options: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["pairs", "queries", str(docs), "--to", str(docs.with_name("none.parquet")), *options])
        assert ended.value.code == 3
        return capsys.readouterr().err

    said = refused()
    for part in ("of 2 different documents", "in 3 documents or more", "--min-words 1", "--min-documents 1", "--by"):
        assert part in said
    said = refused("--min-words", "1", "--column", "title")
    assert "takes single words" not in said
    assert "names another column" not in said
    assert "--queries-in" in said
    assert {row["query"] for row in made(docs, "--min-documents", "1")} == set(titles)


def test_fewer_queries_than_asked_come_with_the_options_that_give_more(
    docs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    titles = ["wool socks", "wool socks, oak lamp", "wool socks, glass", "wool socks, blue linen summer hat"]
    pq.write_table(pa.table({"doc_id": list("abcd"), "title": titles}), docs)
    assert {row["query"] for row in made(docs)} == {"wool socks"}
    said = capsys.readouterr().err
    assert "asked for 1,200 queries; the 4 different documents give 1. For more: " in said
    for option in ("--min-words 1", "--min-documents 1", "--max-words 4", "--column", "--queries-in", "--by"):
        assert option in said
    assert {row["query"] for row in made(docs, "--min-documents", "1")} == {"wool socks", "oak lamp"}
    more = made(docs, "--min-documents", "1", "--max-words", "4", "--min-words", "1")
    assert {row["query"] for row in more} == {"wool socks", "oak lamp", "glass", "blue linen summer hat"}
    assert "For more: --column" in capsys.readouterr().err, "what was done already is not named again"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--queries-in title --queries 5", "--queries"),
        ("--queries-in title --column title", "--column"),
        ("--queries-in title --language german", "--language"),
        ("--queries-in title --seed 3", "--seed"),
        ("--by out/run --max-words 2", "--max-words"),
        ("--by out/run --queries-in title", "--queries-in"),
        ("--by out/run --min-words 1", "--min-words"),
        ("--allow-partial", "--allow-partial"),
        ("--depth 50", "--depth"),
        ("--min-words 4", "--min-words 4"),
    ],
)
def test_an_option_without_effect_is_refused(
    docs: Path, relabel: Callable[..., Outcome], options: str, named: str
) -> None:
    out = docs.with_name("made.parquet")
    relabel("pairs", "queries", str(docs), "--to", str(out), *options.split()).refused(2, named)
    assert not out.exists()


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
    held["doc_id"] = table["doc_id"].to_pylist()[30:60]  # which name documents whatever their text is there
    pq.write_table(pa.table(held), tmp_path / "held.parquet")
    rows = made(docs, "--queries", "60", "--unlike", str(tmp_path / "held.parquet"))
    assert not {row["title"] for row in rows} & set(held["title"])
    assert not {row["doc_id"] for row in rows} & set(held["doc_id"])
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


def write_job(docs: Path, **changes: object) -> str:
    job = {
        "name": "asked",
        "input": {"path": str(docs), "columns": {"query_id": "doc_id", "query": "doc_id"}, "limit": 60},
        "labeler": {"name": "query", "attempts": 1},
        "engine": {"name": "fake", "args": {"p_garbage": 0.1}},
        "output": str(docs.with_name("asked")),
        "run": {"max_failed_fraction": 1.0},
    }
    path = docs.with_name("asked.yaml")
    path.write_text(json.dumps(job | changes))
    return str(path)


def test_queries_that_a_run_asked_a_model_for_come_with_their_document_and_those_of_the_corpus(
    docs: Path, relabel: Callable[..., Outcome]
) -> None:
    asked = str(docs.with_name("asked"))
    assert relabel("run", write_job(docs)).code == 0
    labels = read_labels(asked, texts=True).to_pylist()
    assert 30 < len(labels) < 60, "some rows have no readable query"
    held = docs.with_name("held.parquet")
    pq.write_table(pa.table({"query": ["nothing like it"], "title": [labels[0]["document"]]}), held)
    made_in = docs.with_name("made.parquet")
    options = f"--by {asked} --to {made_in} --unlike {held} --output json"
    done = relabel("pairs", "queries", str(docs), *options.split())
    rows = pq.read_table(made_in).to_pylist()
    first = {}
    for one in labels[1:]:
        first.setdefault(one["made_query"], one["document"])
    assert {row["query"]: row["title"] for row in rows if row["origin"] == "own"} == first
    titles = pq.read_table(docs)["title"].to_pylist()
    assert {row["title"] for row in rows} & set(titles[60:]), "candidates are of all documents"
    assert (done.json["without_query"], done.json["of_other_documents"]) == (60 - len(labels), 1)
    relabel("evaluate", asked, "--qrels", str(docs)).refused(3, "labeler query gives no grades")
    kept = json.loads(pq.read_schema(made_in).metadata[b"relabel.queries"])
    plan = json.loads((docs.with_name("asked") / "plan.json").read_text())
    assert (kept["by"], kept["run"]) == (asked, plan["fingerprint"])


@pytest.mark.parametrize("fault", ["another labeler", "another corpus", "unfinished"])
def test_a_run_that_holds_no_queries_of_these_documents_is_refused(
    docs: Path, relabel: Callable[..., Outcome], fault: str
) -> None:
    changes = {"labeler": {"name": "complexity"}} if fault == "another labeler" else {}
    more = ("--set", "run.max_tokens=1000") if fault == "unfinished" else ()
    relabel("run", write_job(docs, **changes), *more)
    corpus = docs.with_name("other.parquet")
    pq.write_table(pa.table({"doc_id": ["d1", "d2"], "title": ["oak lamp", "oak glass"]}), corpus)
    source = corpus if fault == "another corpus" else docs
    words = {"another labeler": "complexity", "another corpus": "none of its documents", "unfinished": "not finished"}
    made = relabel("pairs", "queries", str(source), "--by", str(docs.with_name("asked")), "--to", f"{source}.parquet")
    made.refused(3, words[fault])


@pytest.mark.parametrize("margin", [0.9, None])
def test_a_students_candidates_are_the_places_of_its_own_order_of_the_first_by_bm25(
    docs: Path, tmp_path: Path, relabel: Callable[..., Outcome], margin: float | None
) -> None:
    student, rng = write_tiny_student(tmp_path / "tiny"), random.Random(4)
    titles = list(dict.fromkeys("{} {}, {} {}".format(*rng.sample(KNOWN, 4)) for _ in range(150)))
    pq.write_table(pa.table({"doc_id": [f"d{i}" for i in range(len(titles))], "title": titles}), docs)
    options = f"--candidates {student} --depth 20 --queries 15 --rank 0 --rank 5" + f" --margin {margin}" * bool(margin)
    rows = made(docs, *options.split())
    by_query: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_query[str(row["query"])].append(row)
    grade_of = TrainedStudent(str(student))
    hard = [row for row in rows if row["origin"] == "student"]
    assert len(by_query) == 15 <= len(hard)
    for query, held in by_query.items():
        own = held[0]["title"]
        bm25 = plain_bm25(titles, query)
        first = sorted((one for one in range(len(titles)) if bm25[one] > 0), key=lambda one: (-bm25[one], titles[one]))
        seen = list(dict.fromkeys([*(titles[one] for one in first[:20]), own]))
        grades = dict(zip(seen, grade_of.score([(query, title) for title in seen]), strict=True))
        most = (margin or 99) * grades[own]
        ranked = sorted((one for one in seen if grades[one] <= most), key=lambda one: -grades[one])
        expected = [ranked[place] for place in (0, 5) if place < len(ranked) and ranked[place] != own]
        assert [row["title"] for row in held[1:]] == expected
        for row in held[1:]:
            assert row["share"] == pytest.approx(grades[row["title"]] / grades[own], rel=1e-4)
    kept = json.loads(pq.read_schema(docs.with_name("made.parquet")).metadata[b"relabel.queries"])
    assert (kept["student"], kept["depth"]) == (student_digest(student), 20)
    options = f"--candidates {student} --depth 20 --rank 20 --to x.parquet"
    relabel("pairs", "queries", str(docs), *options.split()).refused(2, "--rank 20", "--depth 20")
