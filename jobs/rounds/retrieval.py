"""What a search starts from and looks into: the questions, and the corpus by BM25."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Collection, Iterable
from typing import NamedTuple

from relabel.jobs.files.tables import document_of, load_polars, refuse_null, scan, translate_polars_errors
from relabel.jobs.pairs.contexts import Bm25Index, queries_of
from relabel.jobs.pairs.token_counts import CountTokens
from relabel.manifests.errors import InputError
from relabel.manifests.specs import InputSpec
from relabel.manifests.storage.context import Storage

CORPUS_KEY = "rounds.corpus"


class FoundDocument(NamedTuple):
    """A document of the corpus."""

    doc_id: str
    text: str
    num_tokens: int


class Corpus:
    """Documents that can be searched, by BM25 as `relabel pairs context` has it.

    Args:
        documents: id and text of each; no two texts equal and none blank.
        count: tokens of a text.
        num_left_out: documents that are blank, or have the text of another with a smaller id.
    """

    def __init__(self, documents: list[tuple[str, str]], count: CountTokens, num_left_out: int = 0) -> None:
        self.num_documents = len(documents)
        self.num_left_out = num_left_out
        self.digest = digest_of_rows(documents)
        self._ids = {text: doc_id for doc_id, text in documents}
        self._count = functools.cache(count)

    @functools.cached_property
    def _index(self) -> Bm25Index:
        return Bm25Index(list(self._ids))

    def best(self, query: str, k: int, known: Collection[str]) -> list[FoundDocument]:
        """The k best documents for a query whose ids are not among the known ones; fewer where fewer share a word with
        it.
        """
        found = ((self._ids[text], text) for text in self._index.best(query, k + len(known)))
        new = (FoundDocument(doc_id, text, self._count(text)) for doc_id, text in found if doc_id not in known)
        return list(itertools.islice(new, k))


def load_corpus(path: str, count: CountTokens, storage: Storage) -> Corpus:
    """Read the corpus; held in memory.

    Raises:
        InputError: a file or column is off, a document has no id or occurs with two texts, or none has any text.
    """
    polars = load_polars()
    col = polars.col
    docs, text_columns = scan(path, {"doc_id": "id"}, storage, has_text=True, role=CORPUS_KEY)
    refuse_null(docs, "doc_id", path=path)
    with translate_polars_errors(path):
        held = (
            docs.select(doc_id=col("doc_id").cast(polars.String), text=document_of(text_columns))
            .unique()
            .sort("doc_id", "text")
            .collect(engine="streaming")
        )
    twice = held.filter(polars.len().over("doc_id") > 1)["doc_id"]
    if twice.len():
        raise InputError(f"{path}: document `{twice[0]}` occurs with different texts. Give each text an id of its own.")
    kept = held.filter(col("text").str.strip_chars() != "").unique("text", keep="first", maintain_order=True)
    if not kept.height:
        raise InputError(f"{path} ({CORPUS_KEY}): no document there has any text. Name a corpus with documents.")
    return Corpus(list(kept.iter_rows()), count, held.height - kept.height)


def load_questions(spec: InputSpec, storage: Storage) -> list[tuple[str, str]]:
    """Id and text of each question, by id: the different queries of the input, whatever else its rows hold.

    Raises:
        InputError: a file or column is off, a row has no id or text, one id has two texts, or there is no row.
    """
    polars = load_polars()
    col, names = polars.col, spec.columns
    wanted = {"query_id": col(names.query_id).cast(polars.String), "query": col(names.query).cast(polars.String)}
    frames = []
    for path in spec.path:
        frame, _ = scan(path, {names.query_id: "id", names.query: "text"}, storage, role="input.path")
        for name in (names.query_id, names.query):
            refuse_null(frame, name, path=path)
        frames.append(frame.select(**wanted))
    rows = polars.concat(frames)
    where = ", ".join(spec.path)
    found: list[tuple[str, str]] = queries_of(rows if spec.limit is None else rows.head(spec.limit), where).rows()
    if not found:
        raise InputError(f"{where} (input.path): no rows, so no question. Give questions, a row each.")
    return found


def digest_of_rows(rows: Iterable[tuple[str, ...]]) -> str:
    """sha256 of rows of texts, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        for text in row:
            data = text.encode()
            digest.update(b"%d:" % len(data))
            digest.update(data)
    return digest.hexdigest()
