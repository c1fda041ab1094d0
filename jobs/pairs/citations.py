"""Pairs from citations: what several generated answers to a query cite is likely relevant; what they were shown and
left out, likely not.

Source: R3A's data strategy (methods, section 1): M answers a query; a document cited in at least N of them is a likely
positive, else a hard negative; plus random negatives (M = 5, N = 2). These are guesses to balance a set with, no
grades: the teacher grades the pairs.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relabel.jobs.tables import (
    document_of,
    load_polars,
    refuse_null,
    refuse_two_texts,
    scan,
    translate_polars_errors,
)
from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.files import Storage

KINDS = ("likely_positive", "hard_negative", "random_negative")


@dataclass(frozen=True, slots=True)
class CitationRule:
    """Who counts as what.

    Args:
        answers_per_query: M; of a query with more, the first M by answer id count.
        cited_in: N, in 1..M.
        random_negatives: documents drawn for each query from all that it was never shown.
        seed: of that draw; each query draws by itself, so that other queries in the file change nothing.
    """

    answers_per_query: int = 5
    cited_in: int = 2
    random_negatives: int = 0
    seed: int = 7

    def __post_init__(self) -> None:
        if not 1 <= self.cited_in <= self.answers_per_query:
            raise UsageError(
                f"--cited-in {self.cited_in} of --answers-per-query {self.answers_per_query}: want 1 to all of the "
                "answers."
            )


def cited_pairs(answers_path: str, docs_path: str, rule: CitationRule, storage: Storage) -> tuple[Any, dict[str, int]]:
    """The pairs, as a lazy frame: `query_id, query, doc_id`, the document's columns, `kind`, `cited_in`; and what
    came of it: queries, pairs by kind, and what was left out.

    Rows are ordered by query id, kind and document id, whatever the order of the inputs. Ids and citation lists are
    held in memory, of the documents those that a pair needs, while the rows stream.

    Args:
        answers_path: rows of `query_id, query, answer_id, cited, candidates`, the last two lists of document ids.
        docs_path: the corpus: `doc_id` and the document.
    Raises:
        InputError: a file or column is off, an answer or document occurs twice, a query has two texts, or no pair comes
            out.
    """
    polars = load_polars()
    col = polars.col
    answers = load_answers(answers_path, storage)
    docs, text_columns = scan(
        docs_path,
        {"doc_id": "id"},
        storage,
        has_text=True,
        role="--docs",
    )
    refuse_null(docs, "doc_id", path=docs_path)
    docs = docs.select(col("doc_id").cast(polars.String), *text_columns)
    text = document_of(text_columns)
    with translate_polars_errors(docs_path):  # each document's id, a key that equal texts share, whether it is blank
        known = (
            docs.select("doc_id", text_key=text.hash(), is_blank=text.str.strip_chars() == "")
            .collect(engine="streaming")
            .unique()
        )
    refuse_two_texts(known["doc_id"], path=docs_path, what="document")
    sizes = answers.group_by("query_id").len()
    full = answers.filter(polars.len().over("query_id") >= rule.answers_per_query)
    is_among_first = polars.int_range(polars.len()).over("query_id") < rule.answers_per_query
    used = full.sort("query_id", "answer_id").filter(is_among_first)
    counts = {
        "queries_left_out": sizes.filter(col("len") < rule.answers_per_query).height,
        "answers_unused": full.height - used.height,
        "queries": used["query_id"].n_unique(),
    }
    if not counts["queries"]:
        raise InputError(
            f"{answers_path}: no query has {rule.answers_per_query} answers (the most is {sizes['len'].max() or 0}). "
            "Lower --answers-per-query, or generate more."
        )
    pairs = _judged_by_citations(used, known, rule, counts)
    counts["random_lacking"] = 0
    if rule.random_negatives:
        # what any answer of the query saw is no random document for it, an answer beyond the first M included
        seen = polars.concat([id_texts(full, "candidates"), id_texts(full, "cited")]).unique()
        shown = seen.join(known, on="doc_id")
        query_ids = used["query_id"].unique().sort().to_list()
        drawn, counts["random_lacking"] = _draw(shown, known, query_ids, rule)
        pairs = polars.concat([pairs, drawn])
    pairs = pairs.sort("query_id", "kind", "doc_id")
    for number, kind in enumerate(KINDS):
        counts[kind] = int((pairs["kind"] == number).sum())
    if not pairs.height:
        raise InputError(f"{answers_path}: no candidate of any query is in {docs_path}. Do the document ids agree?")

    paired_ids = pairs.lazy().select("doc_id").unique()
    needed = docs.join(paired_ids, on="doc_id", how="semi").unique("doc_id", keep="first")
    queries = used.lazy().select("query_id", "query").unique("query_id", keep="first")
    frame = (
        pairs.lazy()
        .with_columns(kind=col("kind").replace_strict(dict(enumerate(KINDS)), return_dtype=polars.String))
        .join(queries, on="query_id", how="left", maintain_order="left")
        .join(needed, on="doc_id", how="left", maintain_order="left")
        .select(
            "query_id",
            "query",
            "doc_id",
            *text_columns,
            "kind",
            "cited_in",
        )
    )
    return frame, counts


def _judged_by_citations(used: Any, known: Any, rule: CitationRule, counts: dict[str, int]) -> Any:
    """Likely positives and hard negatives: what the answers were shown, by how many of them cited it."""
    polars = load_polars()
    kind = polars.col("kind")
    pair = ["query_id", "doc_id"]
    shown = id_texts(used, "candidates").unique()
    cited_once = used.with_columns(polars.col("cited").list.unique())
    cited = id_texts(cited_once, "cited").group_by(pair).len("cited_in")
    counts["citations_ignored"] = int(cited.join(shown, on=pair, how="anti")["cited_in"].sum())
    cited_in = polars.col("cited_in")
    shown = shown.join(cited, on=pair, how="left").with_columns(cited_in.fill_null(0).cast(polars.Int32))
    counts["documents_missing"] = shown.join(known, on="doc_id", how="anti").height
    judged = shown.join(known, on="doc_id").with_columns(
        kind=polars.when(cited_in >= rule.cited_in).then(0).otherwise(1)
    )
    positives = judged.filter(kind == 0)
    negatives = judged.filter(kind == 1)
    positive_texts = positives.select("query_id", "text_key").unique()
    apart = negatives.join(positive_texts, on=["query_id", "text_key"], how="anti")
    counts["same_text_left_out"] = negatives.height - apart.height
    return polars.concat([positives, apart]).select(*pair, "kind", "cited_in")


def _draw(seen_pairs: Any, known: Any, queries: Sequence[str], rule: CitationRule) -> tuple[Any, int]:
    """Random negatives: no document that the query was shown, none with the text of one, no text twice, none that is
    blank.

    Returns:
        The pairs, and how many are lacking because the corpus is too small.
    """
    polars = load_polars()
    # one document for each text, in the order of ids, so that the draw depends on the corpus and not on how it is
    # written
    with_text = known.filter(~polars.col("is_blank")).sort("doc_id")
    deck = with_text.unique("text_key", keep="first", maintain_order=True)
    ids = deck["doc_id"].to_list()
    keys = deck["text_key"].to_list()
    seen = defaultdict[str, set[int]](set)
    seen_keys = seen_pairs.select("query_id", "text_key").unique().join(deck, on="text_key", how="semi")
    for query, key in seen_keys.iter_rows():
        seen[query].add(key)
    rows: list[tuple[str, str]] = []
    for query in queries:
        # so many that enough are left without those that it was shown
        wanted = min(len(ids), rule.random_negatives + len(seen[query]))
        drawn_places = random.Random(f"{rule.seed}|{query}").sample(range(len(ids)), wanted)
        unseen = [ids[place] for place in drawn_places if keys[place] not in seen[query]]
        rows += [(query, doc_id) for doc_id in unseen[: rule.random_negatives]]
    lacking = rule.random_negatives * len(queries) - len(rows)
    drawn = polars.DataFrame(rows, schema={"query_id": polars.String, "doc_id": polars.String}, orient="row")
    drawn = drawn.with_columns(kind=polars.lit(2, polars.Int32), cited_in=polars.lit(0, polars.Int32))
    return drawn, lacking


def load_answers(path: str, storage: Storage) -> Any:
    """The answers, ids as text; checked."""
    polars = load_polars()
    col = polars.col
    frame, _ = scan(
        path,
        {"query_id": "id", "query": "string", "answer_id": "id", "cited": "list<id>", "candidates": "list<id>"},
        storage,
        role="ANSWERS",
    )
    for name in ("query_id", "query", "answer_id"):
        refuse_null(frame, name, path=path)
    with translate_polars_errors(path):
        answers = frame.select(
            col("query_id").cast(polars.String),
            "query",
            col("answer_id").cast(polars.String),
            col("cited", "candidates").cast(polars.List(polars.String)),
        ).collect(engine="streaming")
    sizes = answers.group_by("query_id", "answer_id").len()
    repeated = sizes.filter(col("len") > 1).sort("query_id", "answer_id")
    if repeated.height:
        query, answer, count = repeated.row(0)
        raise InputError(
            f"{path}: answer `{answer}` of query `{query}` occurs {count} times. Give each answer one row."
        )
    queries = answers.select("query_id", "query").unique()
    refuse_two_texts(queries["query_id"], path=path, what="query")
    return answers


def id_texts(frame: Any, column: str) -> Any:
    """One row for each id in a list column."""
    return frame.select("query_id", doc_id=load_polars().col(column)).explode("doc_id").drop_nulls()
