"""Builds pairs: context documents by BM25, pairs from the citations of generated answers, and pairs of queries that
nobody searched for."""

import hashlib
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relabel.jobs.score import StudentRunner, score_job
from relabel.jobs.tables import (
    document_of,
    load_polars,
    refuse_null,
    refuse_two_texts,
    scan,
    translate_polars_errors,
    written,
)
from relabel.labelers.query import MADE_QUERY
from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.files import Storage
from relabel.manifests.label_sets import join_texts
from relabel.manifests.process import require
from relabel.manifests.run_labels import RunLabels, open_run_labels
from relabel.manifests.secrets import redacted_values

# ------------------------------------------------------------------------------
# Adds context documents to each query: its best documents by BM25.


# Context documents for `r3a`: each query's best documents by BM25, where there are no clicks.
#
# One list a query, the same for all its rows, so that the first stage is still asked once a query. Grades are never
# read: a context picked by grade would give the teacher the answer.
#
# BM25 as Lucene has it (k1 = 1.5, b = 0.75), over lower-cased runs of word characters, every word counting: for
# languages that put no spaces between words it finds little.

MOST_CONTEXT = 4
"""Documents that a job reads from the context column at most."""
COLUMN = "context"
_WORD = r"(?u)\w+"
_KEY = "query id as text"


class Bm25Index:
    """Documents by their words.

    Args:
        texts: no two equal; ties in a ranking go by the text, so that their order does not matter.
    """

    def __init__(self, texts: list[str]) -> None:
        bm25s = require("bm25s", extra="pairs", purpose="relabel pairs context")
        self._texts = texts
        tokens = bm25s.tokenize(
            texts,
            lower=True,
            token_pattern=_WORD,
            stopwords=None,
            show_progress=False,
        )
        self._has_words = any(len(one) for one in tokens.ids)
        self._index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        if self._has_words:
            self._index.index(tokens, show_progress=False)

    def best(self, query: str, k: int) -> list[str]:
        """The k texts with the highest score, best first; fewer where fewer share a word with the query."""
        return self.ranked(self.scores(query), k)

    def scores(self, query: str) -> Any:
        """Of every text, as float64 [texts]; zeros where no word of the query is known."""
        known = self._index.vocab_dict if self._has_words else {}
        words = [word for word in re.findall(_WORD, query.lower()) if word in known]
        return np.asarray(self._index.get_scores(words) if words else np.zeros(len(self._texts)), dtype=np.float64)

    def ranked(self, scores: Any, k: int) -> list[str]:
        """The k texts with the highest of these scores above 0, best first."""
        hits = np.flatnonzero(scores > 0)
        if len(hits) > k:
            least = np.partition(scores[hits], len(hits) - k)[len(hits) - k]
            hits = hits[scores[hits] >= least]  # ties at the edge stay in until the text decides
        return [text for _, text in sorted((-float(scores[i]), self._texts[i]) for i in hits)[:k]]


def with_context(
    pairs_path: str, storage: Storage, *, k: int = MOST_CONTEXT, max_chars: int = 2000, corpus_path: str | None
) -> tuple[Any, dict[str, int]]:
    """The pairs with a column `context`, as a lazy frame in the order of the input; and what came of it, by name.

    Holds the distinct documents and one context a query in memory (up to k x max_chars characters each); rows stream.

    Args:
        k: documents a query.
        max_chars: each is cut to this many characters; `r3a` cuts to `max_context_chars` in any case.
        corpus_path: where documents are taken from; None for the documents of the pairs themselves.
    Raises:
        InputError: a file or column is off, the pairs have a context already, or a query has two texts.
    """
    polars = load_polars()
    pairs, text_columns = scan(
        pairs_path,
        {"query_id": "id", "query": "string"},
        storage,
        has_text=True,
        role="PAIRS",
    )
    if COLUMN in (names := pairs.collect_schema().names()):
        raise InputError(f"{pairs_path}: has a column `{COLUMN}` already. Drop or rename it first.")
    for name in ("query_id", "query"):
        refuse_null(pairs, name, path=pairs_path)
    source = pairs
    source_path = pairs_path
    if corpus_path is not None:
        source_path = corpus_path
        source, text_columns = scan(
            corpus_path,
            {},
            storage,
            has_text=True,
            role="--corpus",
        )
    with translate_polars_errors(source_path):
        texts = source.select(text=document_of(text_columns)).filter(polars.col("text").str.strip_chars() != "")
        documents = texts.unique().collect(engine="streaming")["text"]
    queries = queries_of(pairs, pairs_path)
    index = Bm25Index(documents.to_list())
    best = {text: index.best(text, k) for text in queries["query"].unique().to_list()}
    contexts = [best[text] for text in queries["query"]]
    column = polars.DataFrame(
        {_KEY: queries[_KEY], COLUMN: [[text[:max_chars] for text in context] for context in contexts]},
        schema={_KEY: polars.String, COLUMN: polars.List(polars.String)},
    )
    frame = (
        pairs.with_columns(polars.col("query_id").cast(polars.String).alias(_KEY))
        .join(column.lazy(), on=_KEY, how="left", maintain_order="left")
        .select([*names, COLUMN])
    )
    sizes = [len(context) for context in contexts]
    counts = {
        "queries": queries.height,
        "queries_without_context": sizes.count(0),
        "documents": len(documents),
        "context_documents": sum(sizes),
    }
    return frame, counts


def queries_of(pairs: Any, path: str) -> Any:
    """Ids (as text) and texts of the queries: one row a query, by id.

    Raises:
        InputError: a query has two texts.
    """
    polars = load_polars()
    with translate_polars_errors(path):
        found = (
            pairs.select(polars.col("query_id").cast(polars.String).alias(_KEY), "query")
            .unique()
            .sort(_KEY, "query")
            .collect(engine="streaming")
        )
    refuse_two_texts(found[_KEY], path=path, what="query")
    return found


# ------------------------------------------------------------------------------
# Pairs from the citations of generated answers: cited documents count as likely relevant.


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
    twice = answers.group_by("query_id", "answer_id").len().filter(col("len") > 1).sort("query_id", "answer_id").head(1)
    if twice.height:
        query, answer, count = twice.row(0)
        raise InputError(
            f"{path}: answer `{answer}` of query `{query}` occurs {count} times. Give each answer one row."
        )
    refuse_two_texts(answers.select("query_id", "query").unique()["query_id"], path=path, what="query")
    return answers


def id_texts(frame: Any, column: str) -> Any:
    """One row for each id in a list column."""
    return frame.select("query_id", doc_id=load_polars().col(column)).explode("doc_id").drop_nulls()


# Pairs from citations: what several generated answers to a query cite is likely relevant; what they were shown and
# left out, likely not.
#
# Source: R3A's data strategy (methods, section 1): M answers a query; a document cited in at least N of them is a
# likely positive, else a hard negative; plus random negatives (M = 5, N = 2). These are guesses to balance a set with,
# no grades: the teacher grades the pairs.

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
    kept = _judged_by_citations(used, known, rule, counts)
    counts["random_lacking"] = 0
    if rule.random_negatives:
        # what any answer of the query saw is no random document for it, an answer beyond the first M included
        shown = polars.concat([id_texts(full, "candidates"), id_texts(full, "cited")]).unique().join(known, on="doc_id")
        drawn, counts["random_lacking"] = _draw(shown, known, used["query_id"].unique().sort().to_list(), rule)
        kept = polars.concat([kept, drawn])
    kept = kept.sort("query_id", "kind", "doc_id")
    counts |= {kind: int((kept["kind"] == number).sum()) for number, kind in enumerate(KINDS)}
    if not kept.height:
        raise InputError(f"{answers_path}: no candidate of any query is in {docs_path}. Do the document ids agree?")

    needed = docs.join(kept.lazy().select("doc_id").unique(), on="doc_id", how="semi").unique("doc_id", keep="first")
    queries = used.lazy().select("query_id", "query").unique("query_id", keep="first")
    frame = (
        kept.lazy()
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
    cited = id_texts(used.with_columns(polars.col("cited").list.unique()), "cited").group_by(pair).len("cited_in")
    counts["citations_ignored"] = int(cited.join(shown, on=pair, how="anti")["cited_in"].sum())
    shown = shown.join(cited, on=pair, how="left").with_columns(polars.col("cited_in").fill_null(0).cast(polars.Int32))
    counts["documents_missing"] = shown.join(known, on="doc_id", how="anti").height
    found = shown.join(known, on="doc_id").with_columns(
        kind=polars.when(polars.col("cited_in") >= rule.cited_in).then(0).otherwise(1)
    )
    positives = found.filter(kind == 0)
    negatives = found.filter(kind == 1)
    apart = negatives.join(positives.select("query_id", "text_key").unique(), on=["query_id", "text_key"], how="anti")
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
    deck = known.filter(~polars.col("is_blank")).sort("doc_id").unique("text_key", keep="first", maintain_order=True)
    ids = deck["doc_id"].to_list()
    keys = deck["text_key"].to_list()
    seen = defaultdict[str, set[int]](set)
    for query, key in (
        seen_pairs.select("query_id", "text_key").unique().join(deck, on="text_key", how="semi").iter_rows()
    ):
        seen[query].add(key)
    rows: list[tuple[str, str]] = []
    for query in queries:
        # so many that enough are left without those that it was shown
        wanted = min(len(ids), rule.random_negatives + len(seen[query]))
        thrown = random.Random(f"{rule.seed}|{query}").sample(range(len(ids)), wanted)
        rows += [(query, ids[i]) for i in [i for i in thrown if keys[i] not in seen[query]][: rule.random_negatives]]
    lacking = rule.random_negatives * len(queries) - len(rows)
    drawn = polars.DataFrame(rows, schema={"query_id": polars.String, "doc_id": polars.String}, orient="row")
    return drawn.with_columns(kind=polars.lit(2, polars.Int32), cited_in=polars.lit(0, polars.Int32)), lacking


# ------------------------------------------------------------------------------
# Makes queries that nobody searched for, each with candidate documents, for a teacher to label. A student that saw a
# hundred queries has learned how the teacher grades those; labels cost no trusted grade, so more queries are a
# matter of time alone (docs/pairs.md).


_LEAST_DOCUMENTS = 3
"""A word of a query is in so many documents, so that there is something to rank."""
_MOST_SHARE = 0.1
"""A word of more documents than this share of them, and of more than a few, says nothing about one."""
_FEW = 50
_LIKE = 0.5
"""Queries are alike from this share of words in common (Jaccard)."""


@dataclass(frozen=True, slots=True)
class QueryRule:
    """What queries are made, and with which documents."""

    queries: int = 1200
    column: str | None = None
    """They are cut out of this column, text or a list of texts; None: out of the title, or else the document."""
    queries_in: str | None = None
    """A column that holds queries, text or a list of texts: nothing is cut."""
    by: str | None = None
    """A run of the labeler `query` over documents, whose queries are taken: nothing is cut."""
    language: str = "english"
    """Its stop words are in no query that is cut: bm25s has a list of them."""
    max_words: int = 3
    """Of a query that is cut; one word, two, ... are as frequent."""
    ranks: Sequence[int] = (1, 4, 14, 49)
    """Places of candidates in the query's ranking, from 0."""
    candidates: str | None = None
    """The student, or bundle, that ranks by its expected grade; None: BM25 ranks."""
    depth: int = 200
    """So many documents, the first by BM25, a student ranks."""
    margin: float | None = None
    """Documents above this share of the score of the query's own are left out: they may be relevant (false negatives).
    """
    seed: int = 0


def made_pairs(
    docs_path: str,
    to: str,
    rule: QueryRule,
    storage: Storage,
    *,
    unlike: Sequence[str] = (),
    allow_partial: bool = False,
) -> dict[str, int]:
    """Write pairs of made queries: each with its own document and with those at the rule's places of a ranking.

    Holds the distinct documents in memory. Of documents with one text the first counts.

    Args:
        unlike: files of queries that are held out: no query resembles one of theirs, and no document of theirs is read.
        allow_partial: take a run (`rule.by`) that is not finished, or over its quarantine limit.
    Returns:
        Number of documents, queries and pairs; of a run, its rows without a query, and its queries about other
        documents, too.
    Raises:
        InputError: a file or column is off, or no query can be made.
        ManifestError: `rule.by` is no finished run over the input that it was planned for, or `rule.candidates` no
            student.
        DiskFullError, StoreError: it can't be written; what was at `to` before stays.
    """
    held = _Held(unlike, storage)
    documents, text_columns, source = _documents(docs_path, rule, held, storage)
    place_of = {one["text"]: number for number, one in enumerate(documents)}
    run = open_run_labels(rule.by, storage, allow_partial=allow_partial) if rule.by else None
    source_texts = ((text, number) for number, one in enumerate(documents) for text in _texts(one["source"]))
    written_queries = ((" ".join(text.split()), number) for text, number in source_texts if text.split())
    given = _asked(run, place_of, storage) if run else written_queries if rule.queries_in else None
    made: dict[str, int] = {}
    num_elsewhere = 0
    for query, number in given or _cut(documents, rule):
        if number is None:
            num_elsewhere += 1
        elif query not in made and not held.resembles(query):
            made[query] = number
            if len(made) == rule.queries and given is None:
                break
    if not made and run:
        raise InputError(
            f"{docs_path} (DOCS): has none of its documents with a query in {rule.by}. Give the documents that the run "
            "read, in the same columns."
        )
    if not made:
        raise InputError(
            f"{docs_path} (DOCS): column `{source}` of {len(documents):,} documents gives no query. Words "
            f"have to be in {_LEAST_DOCUMENTS} documents or more, and no stop words; --column names another column."
        )
    index = Bm25Index(list(place_of))
    student = None
    if rule.candidates:
        job = score_job(rule.candidates, [docs_path], to, storage)
        student = StudentRunner(job.spec.engine, overlong=job.spec.input.overlong)
    rows = []
    for query, own in made.items():
        chosen = _candidates(
            query=query,
            own_text=documents[own]["text"],
            place_of=place_of,
            index=index,
            student=student,
            rule=rule,
        )
        query_id = f"made-{hashlib.sha256(query.encode()).hexdigest()[:16]}"
        rows += [{"query_id": query_id, "query": query, "doc_id": documents[one]["doc_id"],
                  **{name: documents[one][name] for name in text_columns}, "origin": origin, "share": share}
                 for one, (origin, share) in chosen.items()]  # fmt: skip
    table = pa.Table.from_pylist(rows)
    facts = {
        "documents": len(documents),
        "unlike": list(unlike),
        **({"run": run.plan.fingerprint} if run else {}),
        **({"student": student.facts().model_digest} if student else {}),
    }
    kept = json.dumps(redacted_values(asdict(rule) | facts))
    with written(to, storage) as file:
        pq.write_table(table.replace_schema_metadata({"relabel.queries": kept}), file, compression="zstd")
    lacking = {"without_query": run.found.tally.num_quarantined, "of_other_documents": num_elsewhere} if run else {}
    return {"documents": len(documents), "queries": len(made), "pairs": len(rows), **lacking}


class _Held:
    """Queries of files of held-out pairs, which no other may resemble, and their documents, which are not read: by
    text, and by id where they have one.
    """

    def __init__(self, paths: Sequence[str], storage: Storage) -> None:
        self.texts = set[str]()
        self.ids = set[str]()
        self._with_word = defaultdict[str, list[frozenset[str]]](list)
        for path in paths:
            frame, _ = scan(path, {"query": "string"}, storage, role="--unlike")
            names = frame.collect_schema()
            columns = ("document",) if "document" in names else tuple(one for one in ("title", "body") if one in names)
            with translate_polars_errors(path):
                rows = frame.select(text=document_of(columns) if columns else None, query="query").collect()
                if "doc_id" in names:
                    self.ids.update(map(str, frame.select("doc_id").collect()["doc_id"]))
            self.texts.update(filter(None, rows["text"]))
            for words in {frozenset(_words(query)) for query in rows["query"] if query}:
                for word in words:
                    self._with_word[word].append(words)

    def resembles(self, query: str) -> bool:
        words = set(_words(query))
        return any(
            len(words & other) >= _LIKE * len(words | other)
            for word in words
            for other in self._with_word.get(word, ())
        )


def _documents(
    path: str, rule: QueryRule, held: _Held, storage: Storage
) -> tuple[list[dict[str, Any]], Sequence[str], str]:
    """The distinct documents that are not held out, the columns that make up their text, and the one that queries are
    cut out of, or taken from. Of a document: `doc_id`, these columns, `text` and `source`.
    """
    frame, text_columns = scan(
        path,
        {"doc_id": "id"},
        storage,
        has_text=True,
        role="DOCS",
    )
    source = rule.queries_in or rule.column or text_columns[0]
    if source not in frame.collect_schema():
        raise InputError(f"{path} (DOCS): no column `{source}`. It has {', '.join(frame.collect_schema())}.")
    kind = str(frame.collect_schema()[source])
    if kind not in ("String", "List(String)"):
        raise InputError(f"{path} (DOCS): column `{source}` holds {kind}; want text, or a list of texts.")
    with translate_polars_errors(path):
        found = (
            frame.select("doc_id", *text_columns, text=document_of(text_columns), source=source)
            .unique("text", keep="first", maintain_order=True)
            .collect()
            .to_dicts()
        )
    documents = [
        one for one in found
        if one["text"].strip() and one["text"] not in held.texts and str(one["doc_id"]) not in held.ids
    ]  # fmt: skip
    return documents, text_columns, source


def _candidates(
    query: str,
    own_text: str,
    place_of: Mapping[str, int],
    index: Bm25Index,
    student: StudentRunner | None,
    rule: QueryRule,
) -> dict[int, tuple[str, float | None]]:
    """A query's own document, and those at the rule's places of its ranking: by number their origin, and their score
    over that of the query's own.
    """
    own = place_of[own_text]
    kind = "bm25"
    scores = index.scores(query)
    if student:
        ranked = index.ranked(scores, rule.depth)
        kind = "student"
        seen = [own_text, *(text for text in ranked if text != own_text)]
        encoded = student.model.encode([(query, text) for text in seen])
        probs_BK = (student.model.score(encoded) or {})["relevance"].astype(np.float64)
        scores = np.zeros_like(scores)  # 0, which is no candidate's, where probabilities are NaN
        scores[[place_of[text] for text in seen]] = np.nan_to_num(probs_BK @ np.arange(probs_BK.shape[1]))
    of_own = float(scores[own])
    if rule.margin is not None:
        scores[scores > rule.margin * of_own] = 0.0
    ranked = index.ranked(scores, max(rule.ranks, default=0) + 1)
    chosen: dict[int, tuple[str, float | None]] = {own: ("own", 1.0)}
    for other in (place_of[ranked[place]] for place in rule.ranks if place < len(ranked)):
        chosen.setdefault(other, (kind, float(scores[other]) / of_own if of_own else None))
    return chosen


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _texts(source: Any) -> list[str]:
    return [source] if isinstance(source, str) else [one for one in source or () if one]


def _asked(run: RunLabels, place_of: Mapping[str, int], storage: Storage) -> Iterator[tuple[str, int | None]]:
    """Queries of a run, each with the number of the document that it was asked about; None for another document."""
    schema, tables = join_texts(run, storage)
    if MADE_QUERY not in schema.names:
        raise InputError(f"{run.root}: a run of the labeler {run.plan.parts['labeler']['name']}; --by wants `query`.")
    for table in tables:
        for query, text in zip(table[MADE_QUERY].to_pylist(), table["document"].to_pylist(), strict=True):
            yield query, place_of.get(text)


def _cut(documents: Sequence[dict[str, Any]], rule: QueryRule) -> Iterator[tuple[str, int]]:
    """Runs of words of one sentence or line, each with the number of its document."""
    seen = Counter(word for one in documents for text in _texts(one["source"]) for word in set(_words(text)))
    stop_words = require("bm25s.stopwords", extra="pairs", purpose="relabel pairs queries")
    name = "EN" if rule.language == "english" else rule.language.upper()
    for word in getattr(stop_words, f"STOPWORDS_{name}"):
        seen.pop(word, None)
    most = max(_FEW, _MOST_SHARE * len(documents))
    rng = random.Random(rule.seed)
    for number in rng.choices(range(len(documents)), k=rule.queries * 20) if documents else ():
        sentences = [one for text in _texts(documents[number]["source"]) for one in re.split(r"[\n!?;]|\.\s", text)]
        words = _words(rng.choice(sentences)) if sentences else []
        length = rng.randint(1, rule.max_words)
        start = rng.randrange(max(1, len(words) - length + 1))
        cut = words[start : start + length]
        says = any(word.isalpha() and (len(word) > 2 or not word.isascii()) for word in cut)
        if len(cut) == length and says and all(_LEAST_DOCUMENTS <= seen[word] <= most for word in cut):
            yield " ".join(cut), number
