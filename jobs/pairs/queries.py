"""Makes queries that nobody searched for, each with candidate documents, for a teacher to label.

A student that saw a hundred queries has learned how the teacher grades those; labels cost no trusted grade, so more
queries are a matter of time alone (docs/pairs.md).
"""

import hashlib
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relabel.jobs.pairs.context import Bm25Index
from relabel.jobs.score import ScoreOptions, StudentRunner, score_job
from relabel.jobs.tables import document_of, scan, translate_polars_errors, written
from relabel.labelers.query import MADE_QUERY
from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.label_sets import join_texts
from relabel.manifests.process import require
from relabel.manifests.run_labels import RunLabels, open_run_labels
from relabel.manifests.secrets import counted, redacted_values

TITLE = "title"
_MOST_SHARE = 0.1
"""A word of more documents than this share of them, and of more than a few, says nothing about one."""
_FEW = 50
_MARKS = re.compile(r"[\n!?;:,()\[\]{}/|\"“”„«»]|\.\s|\s[-–—]\s")
"""No phrase goes across one."""
_RUNS_A_DRAW = 10
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
    min_words: int = 2
    max_words: int = 3
    """Of a query that is cut. A single word, as `pack` or `gray`, rarely says what is looked for."""
    min_documents: int = 3
    """Each word of a query that is cut is in so many documents, so that there is something to rank."""
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
) -> dict[str, Any]:
    """Write pairs of made queries: each with its own document and with those at the rule's places of a ranking.

    Holds the distinct documents in memory. Of documents with one text the first counts.

    Args:
        unlike: files of queries that are held out: no query resembles one of theirs, and no document of theirs is read.
        allow_partial: take a run (`rule.by`) that is not finished, or over its quarantine limit.
    Returns:
        Number of documents, queries and pairs; of a run, its rows without a query, and its queries about other
        documents, too; of queries that were cut, the column that they were cut out of (`cut_from`).
    Raises:
        InputError: a file or column is off, or no query can be made.
        ManifestError: `rule.by` is no finished run over the input that it was planned for, or `rule.candidates` no
            student.
        DiskFullError, StoreError: it can't be written; what was at `to` before stays.
    """
    held_out = _HeldOut(unlike, storage)
    documents, text_columns, source = _documents(docs_path, rule, held_out, storage)
    number_of = {document["text"]: number for number, document in enumerate(documents)}
    run = open_run_labels(rule.by, storage, allow_partial=allow_partial) if rule.by else None
    is_cut = run is None and not rule.queries_in
    queries: Iterator[tuple[str, int | None]]
    if run is not None:
        queries = _asked(run, number_of, storage)
    elif is_cut:
        queries = _cut(documents, rule, is_prose=rule.column is None and source != TITLE)
    else:
        queries = _written(documents)
    made, num_elsewhere = _kept(queries, held_out, most=rule.queries if is_cut else None)
    if not made and run:
        raise InputError(
            f"{docs_path} (DOCS): has none of its documents with a query in {rule.by}. Give the documents that the run "
            "read, in the same columns."
        )
    if not made:
        raise InputError(f"{docs_path} (DOCS): column `{source}` {_nothing_cut(rule, len(documents))}")
    index = Bm25Index(list(number_of))
    student = None
    if rule.candidates:
        job = score_job(rule.candidates, ScoreOptions(input=[docs_path], to=to), storage)
        student = StudentRunner(job.spec.engine, overlong=job.spec.input.overlong)
    rows: list[dict[str, Any]] = []
    for query, own in made.items():
        chosen = _candidates(
            query=query,
            own_text=documents[own]["text"],
            number_of=number_of,
            index=index,
            student=student,
            rule=rule,
        )
        rows += _rows_of(query, chosen, documents, text_columns)
    facts = asdict(rule) | {"documents": len(documents), "unlike": list(unlike)}
    counts: dict[str, Any] = {"documents": len(documents), "queries": len(made), "pairs": len(rows)}
    if is_cut:
        counts["cut_from"] = source
    if run is not None:
        facts["run"] = run.plan.fingerprint
        counts["without_query"] = run.found.tally.num_quarantined
        counts["of_other_documents"] = num_elsewhere
    if student is not None:
        facts["student"] = student.facts().model_digest
    table = pa.Table.from_pylist(rows)
    table = table.replace_schema_metadata({"relabel.queries": json.dumps(redacted_values(facts))})
    with written(to, storage) as file:
        pq.write_table(table, file, compression="zstd")
    return counts


def _nothing_cut(rule: QueryRule, num_documents: int) -> str:
    """Why a column gives no query, and what else there is to do."""
    return (
        f"of {num_documents:,} different documents gives no query: no phrase of {rule.min_words} to {rule.max_words} "
        f"words without stop words, each of which is in {counted(rule.min_documents, 'document')} or more, that is no "
        f"piece of a longer phrase. {ways_to_more(rule)}."
    )


def ways_to_more(rule: QueryRule) -> str:
    """The options by which the same documents give more queries."""
    ways = []
    if rule.min_documents > 1:
        ways.append("--min-documents 1 takes words of a single document")
    if rule.min_words > 1:
        ways.append("--min-words 1 takes single words")
    if rule.column is None:
        ways.append("--column names another column")
    ways.append(f"--max-words {rule.max_words + 1} takes longer phrases")
    ways.append("--queries-in takes a column of queries")
    ways.append("--by takes what a model wrote, however few documents there are (docs/pairs.md)")
    return "; ".join(ways)


class _HeldOut:
    """Queries of files of held-out pairs, which no other may resemble, and their documents, which are not read: by
    text, and by id where they have one.
    """

    def __init__(self, paths: Sequence[str], storage: Storage) -> None:
        self.paths = paths
        self.texts = set[str]()
        self.ids = set[str]()
        self._with_word = defaultdict[str, list[frozenset[str]]](list)
        for path in paths:
            frame, _ = scan(path, {"query": "string"}, storage, role="--unlike")
            names = frame.collect_schema()
            columns = tuple(name for name in ("title", "body") if name in names)
            if "document" in names:
                columns = ("document",)
            with translate_polars_errors(path):
                rows = frame.select(text=document_of(columns) if columns else None, query="query").collect()
                if "doc_id" in names:
                    self.ids.update(map(str, frame.select("doc_id").collect()["doc_id"]))
            self.texts.update(text for text in rows["text"] if text)
            queries = {frozenset(_parts(query)) for query in rows["query"] if query}
            for words in queries:
                for word in words:
                    self._with_word[word].append(words)

    def resembles(self, query: str) -> bool:
        words = _parts(query)
        for word in words:
            for other in self._with_word.get(word, ()):
                if len(words & other) >= _LIKE * len(words | other):
                    return True
        return False


def _documents(
    path: str, rule: QueryRule, held_out: _HeldOut, storage: Storage
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
        distinct = (
            frame.select("doc_id", *text_columns, text=document_of(text_columns), source=source)
            .unique("text", keep="first", maintain_order=True)
            .collect()
            .to_dicts()
        )
    documents = []
    for document in distinct:
        is_held_out = document["text"] in held_out.texts or str(document["doc_id"]) in held_out.ids
        if document["text"].strip() and not is_held_out:
            documents.append(document)
    if distinct and not documents and held_out.paths:
        raise InputError(
            f"{path} (DOCS): none of its {counted(len(distinct), 'document')} is left: those with a text are all "
            f"documents of --unlike {', '.join(held_out.paths)}. Give documents that are not held out."
        )
    return documents, text_columns, source


def _kept(
    queries: Iterable[tuple[str, int | None]], held_out: _HeldOut, *, most: int | None
) -> tuple[dict[str, int], int]:
    """The distinct queries that resemble none that is held out, at most so many, each with the number of its document;
    and how many were about a document that is not there.
    """
    made: dict[str, int] = {}
    num_elsewhere = 0
    for query, number in queries:
        if number is None:
            num_elsewhere += 1
        elif query not in made and not held_out.resembles(query):
            made[query] = number
            if len(made) == most:
                break
    return made, num_elsewhere


def _candidates(
    query: str,
    own_text: str,
    number_of: Mapping[str, int],
    index: Bm25Index,
    student: StudentRunner | None,
    rule: QueryRule,
) -> dict[int, tuple[str, float | None]]:
    """A query's own document, and those at the rule's places of its ranking: by number their origin, and their score
    over that of the query's own.
    """
    own = number_of[own_text]
    kind = "bm25"
    scores = index.scores(query)
    if student:
        ranked = index.ranked(scores, rule.depth)
        kind = "student"
        seen = [own_text, *(text for text in ranked if text != own_text)]
        encoded = student.model.encode([(query, text) for text in seen])
        probs_BK = (student.model.score(encoded) or {})["relevance"].astype(np.float64)
        scores = np.zeros_like(scores)  # 0, which is no candidate's, where probabilities are NaN
        scores[[number_of[text] for text in seen]] = np.nan_to_num(probs_BK @ np.arange(probs_BK.shape[1]))
    of_own = float(scores[own])
    if rule.margin is not None:
        scores[scores > rule.margin * of_own] = 0.0
    ranked = index.ranked(scores, max(rule.ranks, default=0) + 1)
    chosen: dict[int, tuple[str, float | None]] = {own: ("own", 1.0)}
    for rank in rule.ranks:
        if rank < len(ranked):
            other = number_of[ranked[rank]]
            share = float(scores[other]) / of_own if of_own else None
            chosen.setdefault(other, (kind, share))
    return chosen


def _rows_of(
    query: str,
    chosen: Mapping[int, tuple[str, float | None]],
    documents: Sequence[Mapping[str, Any]],
    text_columns: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """A query's pairs, as they are written; `chosen` as `_candidates` returns it."""
    query_id = f"made-{hashlib.sha256(query.encode()).hexdigest()[:16]}"
    for number, (origin, share) in chosen.items():
        document = documents[number]
        row = {"query_id": query_id, "query": query, "doc_id": document["doc_id"]}
        row |= {name: document[name] for name in text_columns}
        yield row | {"origin": origin, "share": share}


def _words(text: str, stop_words: Set[str]) -> Iterator[str]:
    """Words in lower case, with the apostrophes in them (`men's`), save one after a stop word (`l'eau`)."""
    for word in re.findall(r"\w+(?:'\w+)*", text.lower().replace("’", "'")):
        first, _, rest = word.partition("'")
        if rest and first in stop_words:
            yield first
            yield from _words(rest, stop_words)
        else:
            yield word


def _parts(text: str) -> set[str]:
    """Words cut at all apostrophes, so that `men's` resembles `men`."""
    return set(re.findall(r"\w+", text.lower()))


def _texts(source: Any) -> list[str]:
    """The texts of a value of a column of texts, or of lists of them."""
    if isinstance(source, str):
        return [source]
    return [text for text in source or () if text]


def _written(documents: Sequence[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    """The queries that documents come with, each with the number of its document."""
    for number, document in enumerate(documents):
        for text in _texts(document["source"]):
            query = " ".join(text.split())
            if query:
                yield query, number


def _asked(run: RunLabels, number_of: Mapping[str, int], storage: Storage) -> Iterator[tuple[str, int | None]]:
    """Queries of a run, each with the number of the document that it was asked about; None for another document."""
    schema, tables = join_texts(run, storage)
    if MADE_QUERY not in schema.names:
        raise InputError(f"{run.root}: a run of the labeler {run.plan.parts['labeler']['name']}; --by wants `query`.")
    for table in tables:
        for query, text in zip(table[MADE_QUERY].to_pylist(), table["document"].to_pylist(), strict=True):
            yield query, number_of.get(text)


def _cut(documents: Sequence[dict[str, Any]], rule: QueryRule, *, is_prose: bool) -> Iterator[tuple[str, int]]:
    """Whole phrases of one sentence or line, each with the number of its document.

    Args:
        is_prose: they are cut out of sentences, in which more words say nothing than in titles: `can`, `before`, `who`.
    """
    if not documents:
        return
    stop_words = _stop_words(rule.language, is_prose=is_prose)
    num_with_word = Counter[str]()
    for document in documents:
        for text in _texts(document["source"]):
            num_with_word.update(set(_words(text, stop_words)))
    most = max(_FEW, _MOST_SHARE * len(documents))
    frequent = {word for word, count in num_with_word.items() if count > most}
    rng = random.Random(rule.seed)
    drawn = []
    for number in rng.choices(range(len(documents)), k=rule.queries * 4):
        runs = []
        for phrase in _phrases(documents[number]["source"], stop_words, frequent):
            for run in _runs(phrase, rule):
                is_known = all(num_with_word[word] >= rule.min_documents for word in run.words)
                if is_known and _names_something(run.words):
                    runs.append(run.words)
        drawn += [(words, number) for words in rng.sample(runs, min(len(runs), _RUNS_A_DRAW))]
    rng.shuffle(drawn)
    whole = _whole_phrases({words for words, _ in drawn}, documents, stop_words, frequent, rule)
    for words, number in drawn:
        if words in whole:
            yield " ".join(words), number


class _Run(NamedTuple):
    """Words of a phrase that follow each other, and the words before and after them, None at its ends."""

    words: tuple[str, ...]
    before: str | None
    after: str | None


def _stop_words(language: str, *, is_prose: bool) -> set[str]:
    stop_words = require("bm25s.stopwords", extra="pairs", purpose="relabel pairs queries")
    names = ["EN"] if language == "english" else [language.upper()]
    if is_prose and language == "english":
        names.append("EN_PLUS")  # of English alone bm25s has a short list and a long one
    return {word for name in names for word in getattr(stop_words, f"STOPWORDS_{name}")}


def _phrases(source: Any, stop_words: Set[str], frequent: Set[str]) -> Iterator[list[str]]:
    """Words between marks, line ends and the words that say nothing."""
    for text in _texts(source):
        for part in _MARKS.split(text):
            phrase: list[str] = []
            for word in _words(part, stop_words):
                if word not in stop_words and word not in frequent:
                    phrase.append(word)
                elif phrase:
                    yield phrase
                    phrase = []
            if phrase:
                yield phrase


def _runs(phrase: Sequence[str], rule: QueryRule) -> Iterator[_Run]:
    for length in range(rule.min_words, rule.max_words + 1):
        for start in range(len(phrase) - length + 1):
            end = start + length
            before = phrase[start - 1] if start else None
            after = phrase[end] if end < len(phrase) else None
            yield _Run(tuple(phrase[start:end]), before, after)


def _names_something(words: Sequence[str]) -> bool:
    """Whether there is a word of letters, and no number comes first: that counts or measures what follows."""
    names = [word for word in words if word.replace("'", "").isalpha()]
    has_a_name = any(len(word) > 2 or not word.isascii() for word in names)
    return has_a_name and not words[0].isdigit()


def _whole_phrases(
    wanted: Set[tuple[str, ...]],
    documents: Sequence[dict[str, Any]],
    stop_words: Set[str],
    frequent: Set[str],
    rule: QueryRule,
) -> set[tuple[str, ...]]:
    """Those that are no piece of a longer phrase: in at most half of their documents does one and the same word come
    before them, and the same after them. So of `gel ice cream maker`, `gel ice` is none.
    """
    num_documents = Counter[tuple[str, ...]]()
    neighbours: dict[tuple[str, ...], Counter[tuple[str, str]]] = defaultdict(Counter)
    for document in documents:
        seen = set()
        for phrase in _phrases(document["source"], stop_words, frequent):
            for run in _runs(phrase, rule):
                if run.words not in wanted:
                    continue
                seen.add((run.words, "", ""))
                if run.before is not None:
                    seen.add((run.words, "before", _kind(run.before)))
                if run.after is not None:
                    seen.add((run.words, "after", _kind(run.after)))
        for words, side, word in seen:
            if side:
                neighbours[words][side, word] += 1
            else:
                num_documents[words] += 1
    whole = set()
    for words, count in num_documents.items():
        if max(neighbours[words].values(), default=0) <= _LIKE * count:
            whole.add(words)
    return whole


def _kind(word: str) -> str:
    """Numbers are alike: `piece cookware set` follows one, whichever."""
    return "0" if word.isdigit() else word
