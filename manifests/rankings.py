"""Rankings of search systems, in the forms that they come in: TREC run files, answers of OpenSearch and Elasticsearch,
tables of (query, document, score or rank), and outputs of `relabel score`.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.forms import (
    FORMS,
    QRELS_COLUMNS,
    RUN,
    RUN_COLUMNS,
    form_by_suffix,
    name_of,
    read_text,
    row_text_of,
)
from relabel.manifests.label_sets import is_run
from relabel.manifests.labels import codes_of, pair_codes, texts_of
from relabel.manifests.metrics.judged import RANK, SCORE
from relabel.manifests.run_labels import file_schema, open_run_labels
from relabel.manifests.tables import Column, NeededColumn, RowText, as_ids, id_column, numbered_row, require_columns

JSON_SUFFIX = ".json"
TABLES = tuple(form for form in FORMS if not form.columns)
"""Forms that name their columns."""


@dataclass(frozen=True)
class RankingColumns:
    """Columns of a table that holds a ranking; `score` is None where the user named none."""

    query: str = "query_id"
    doc: str = "doc_id"
    score: str | None = None


@dataclass(frozen=True)
class Ranking:
    """What a system returns: documents of queries, row by row.

    Rows are in the order of the queries' ids, and of a query in trec_eval's order: by score, highest first, and equal
    scores by document id, last first.

    Args:
        path: where it comes from.
        form: in words.
        query_ids, doc_ids: of each row, N.
        scores: float64, N; of a ranking that has ranks alone, the rank times -1.
        ranked_by: the column of a table that the scores are of.
    """

    path: str
    form: str
    query_ids: pa.LargeBinaryArray
    doc_ids: pa.LargeBinaryArray
    scores: np.ndarray
    ranked_by: str | None = None

    @property
    def queries(self) -> pa.LargeBinaryArray:
        """The different queries, in the order of their ids."""
        return codes_of(self.query_ids)[1]

    def scores_of(self, query_ids: pa.LargeBinaryArray, doc_ids: pa.LargeBinaryArray) -> np.ndarray:
        """The score of each (query, document): float64, -inf for one that is not ranked."""
        num_rows = len(self.query_ids)
        key_N = pair_codes(
            pa.concat_arrays([self.query_ids, query_ids]),
            pa.concat_arrays([self.doc_ids, doc_ids]),
        )
        own_N = key_N[:num_rows]
        order = np.argsort(own_N)
        place_M = np.searchsorted(own_N[order], key_N[num_rows:]).clip(max=max(num_rows - 1, 0))
        row_M = order[place_M]
        return np.where(own_N[row_M] == key_N[num_rows:], self.scores[row_M], -np.inf)


def load_ranking(
    path: str, storage: Storage, columns: RankingColumns | None = None, *, allow_partial: bool = False
) -> Ranking:
    """Read a system's ranking; its form is known by its name, and a TREC run file is what has no known suffix.

    Args:
        path: local, or a URL.
        columns: of a table.
        allow_partial: take an unfinished output of `relabel score`.
    Raises:
        InputError: it can't be read, is not such a form, holds no row, has a document twice in one query, or a score
            that is no number.
        ManifestError: an output of `relabel score` is unfinished or damaged.
    """
    columns = columns or RankingColumns()
    if is_run(path, storage):
        return _of_scored(path, storage, allow_partial=allow_partial)
    if name_of(path).endswith(JSON_SUFFIX):
        return _of_hits(path, _json_answers(path, storage))
    form = form_by_suffix(path, TABLES)
    if form is None:
        return _of_run_file(path, storage)
    if form.name == "jsonl" and _holds_hits(path, storage):
        return _of_hits(path, _line_answers(path, storage))
    return _of_table(path, columns, storage)


def load_rankings(
    paths: Mapping[str, str], storage: Storage, columns: RankingColumns, *, allow_partial: bool = False
) -> dict[str, Ranking]:
    """Rankings by name: see `load_ranking`. A table may lack the columns that were named for another one.

    Raises:
        InputError: also where no table has the column of scores that was named.
    """
    found = {name: load_ranking(path, storage, columns, allow_partial=allow_partial) for name, path in paths.items()}
    tables = [ranking for ranking in found.values() if ranking.ranked_by is not None]
    if columns.score is not None and tables and all(table.ranked_by != columns.score for table in tables):
        raise InputError(f"--score {columns.score}: no such column in {', '.join(table.path for table in tables)}.")
    return found


def refuse_run_file(path: str, storage: Storage, *, option: str) -> None:
    """Refuse a run file where judgments are wanted.

    Args:
        option: that was given the file.
    Raises:
        InputError: it has no suffix of a table, and the first line has the fields of a TREC run file.
    """
    if is_run(path, storage) or form_by_suffix(path, TABLES) is not None:
        return
    if len(_first_fields(path, storage)) == len(RUN_COLUMNS):
        raise InputError(
            f"{option} {path}: its lines have six fields, as TREC run files have (qid Q0 docid rank score tag): a "
            "system's ranking, whose scores are no grades. Name it as a system, and give judgments here: a run's "
            "output, a table, or qrels (qid 0 docid grade)."
        )


def _of_run_file(path: str, storage: Storage) -> Ranking:
    try:
        fields = RUN.read(path, lambda _: ("query_id", "doc_id", "score"), storage)
    except InputError as exc:
        if len(_first_fields(path, storage)) != len(QRELS_COLUMNS):
            raise
        raise InputError(
            f"{path}: its lines have four fields, as TREC qrels have (qid 0 docid grade): judgments, not a system's "
            "ranking. Give it with --labels or --gold; a run file has six (qid Q0 docid rank score tag)."
        ) from exc
    return _ranking(path, "TREC run", fields["query_id"], fields["doc_id"], _numbers(fields["score"], path))


def _first_fields(path: str, storage: Storage) -> list[str]:
    """The fields of the first line that is not blank; none where there is no such line."""
    lines = read_text(path, storage).split("\n", 20)
    return next((line.split() for line in lines if line.strip()), [])


# ------------------------------------------------------------------------------
# Tables, and outputs of `relabel score`.


def _of_table(path: str, columns: RankingColumns, storage: Storage) -> Ranking:
    chosen: list[str] = []

    def choose(names: list[str]) -> list[str]:
        # several tables share the options, so that each may have the columns that are named or the usual ones
        query = id_column(columns.query, "query_id", names)
        doc = id_column(columns.doc, "doc_id", names)
        ids = NeededColumn(query, "the query id", "--by"), NeededColumn(doc, "the document id", "--doc")
        require_columns(ids, names, path=path)
        chosen.extend([query, doc, _ranked_by(path, names, columns)])
        return chosen

    form = form_by_suffix(path, TABLES)
    assert form is not None
    table = form.read(path, choose, storage)
    query, doc, ranked_by = chosen
    value_N = _numbers(table[ranked_by], path, row_text_of(form))
    if ranked_by == RANK:
        value_N = -value_N
    ranking = _ranking(path, f"{form.name}, by `{ranked_by}`", table[query], table[doc], value_N)
    return replace(ranking, ranked_by=ranked_by)


def _ranked_by(path: str, names: list[str], columns: RankingColumns) -> str:
    """The column that ranks: the one that was named, or `score` in a table without that; else `score`, `rank` or
    `cosine`.
    """
    if columns.score is not None:
        named = id_column(columns.score, "score", names)
        require_columns([NeededColumn(named, "the score", "--score")], names, path=path)
        return named
    for name in ("score", RANK, "cosine"):
        if name in names:
            return name
    raise InputError(
        f"{path}: has no column `score`, `rank` or `cosine`, so nothing says in which order the system returned the "
        f"documents; it has {', '.join(names) or 'none'}. Call the column of scores `score` (`relabel "
        "systems --score` names another). Judgments are no ranking."
    )


def _of_scored(path: str, storage: Storage, *, allow_partial: bool) -> Ranking:
    """An output of `relabel score`, or of a run: ranked by its expected grades, or by a reranker's scores."""
    run = open_run_labels(path, storage, allow_partial=allow_partial)
    schema = file_schema(run.plan.parts)
    has_scores = run.plan.facts.labeler.grades == 0 and SCORE in schema.names
    ranked_by = SCORE if has_scores else "expected_grade"
    names = ["query_id", "doc_id", ranked_by]
    tables = [run.folder.table(file, schema, names) for file in run.found.labels]
    rows = pa.concat_tables(tables) if tables else schema.empty_table().select(names)
    rows = rows.filter(rows[ranked_by].is_valid())
    query_ids, doc_ids = (rows[name].cast(pa.large_string()) for name in ("query_id", "doc_id"))
    scores = rows[ranked_by].to_numpy()
    return _ranking(path, f"output of relabel, by `{ranked_by}`", query_ids, doc_ids, scores)


def _numbers(column: Column, path: str, row_text: RowText = numbered_row) -> np.ndarray:
    """A column of scores or ranks, float64 [N].

    Raises:
        InputError: a row has none, or something else.
    """
    values = column.to_pylist() if isinstance(column, pa.ChunkedArray) else column
    try:
        number_N = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        number_N = np.array([_number(value) for value in values])
    wrong = np.flatnonzero(~np.isfinite(number_N))
    if len(wrong):
        raise InputError(
            f"{path}: {row_text(int(wrong[0]))} has the score {str(values[wrong[0]])[:60]!r}, which is no "
            "number. Give every row a score, or leave the column out and name ranks `rank`."
        )
    return number_N


def _number(value: Any) -> float:
    """NaN for what is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _ranking(path: str, form: str, queries: Column, docs: Column, score_N: np.ndarray) -> Ranking:
    """Rows in order.

    Raises:
        InputError: there is no row, or a query has a document twice.
    """
    query_ids = as_ids(queries, path=path, name="query_id")
    doc_ids = as_ids(docs, path=path, name="doc_id")
    if not len(query_ids):
        raise InputError(f"{path}: holds no document of any query. Is it the right file?")
    query_N, _ = codes_of(query_ids)
    doc_N, _ = codes_of(doc_ids)
    order = np.lexsort((-doc_N, -score_N, query_N))
    _refuse_twice(path, query_ids, doc_ids, query_N * np.int64(len(doc_N) + 1) + doc_N)
    rows = pa.array(order)
    return Ranking(path, form, query_ids.take(rows), doc_ids.take(rows), score_N[order])


def _refuse_twice(path: str, query_ids: pa.LargeBinaryArray, doc_ids: pa.LargeBinaryArray, pair_N: np.ndarray) -> None:
    _, first_N, count_N = np.unique(pair_N, return_index=True, return_counts=True)
    twice = np.sort(first_N[count_N > 1])
    if len(twice):
        row = slice(int(twice[0]), int(twice[0]) + 1)
        raise InputError(
            f"{path}: {len(twice):,} documents come more than once in their query, the first is document "
            f"{texts_of(doc_ids[row])[0]} of query {texts_of(query_ids[row])[0]}. A system returns a document once: "
            "leave the repeated rows out, or give each passage an id of its own."
        )


# ------------------------------------------------------------------------------
# Answers of OpenSearch and Elasticsearch as JSON: which query each answers has to be in the file.

HITS_ADVICE = (
    'An answer of `_search` does not name its query: write {"QUERY_ID": ANSWER, …}, or one line '
    '{"query_id": QUERY_ID, "hits": …} for each query.'
)


def _json_answers(path: str, storage: Storage) -> Iterator[tuple[str, Any]]:
    """Query id and answer, of one JSON value."""
    try:
        value = json.loads(read_text(path, storage))
    except ValueError as exc:
        raise InputError(f"{path}: is not JSON ({exc}). Lines of JSON want the suffix .jsonl.") from exc
    if isinstance(value, list):
        yield from (_named_answer(path, answer, f"item {number}") for number, answer in enumerate(value))
        return
    if not isinstance(value, dict) or "responses" in value or "hits" in value:
        raise InputError(f"{path}: no query is named. {HITS_ADVICE}")
    if "error" in value and "status" in value:
        raise InputError(f"{path}: is an error of the search engine, and no answer: {str(value['error'])[:200]}")
    if isinstance(value.get("details"), dict):  # of `_rank_eval`
        for query, detail in value["details"].items():
            yield query, {"hits": {"hits": [one.get("hit") for one in detail.get("hits", [])]}}
        return
    yield from value.items()


def _holds_hits(path: str, storage: Storage) -> bool:
    """Whether lines of JSON hold answers, and not rows of a table."""
    first = next((line for line in read_text(path, storage).split("\n") if line.strip()), "")
    try:
        value = json.loads(first)
    except ValueError:
        return False
    if not isinstance(value, dict):
        return False
    return "hits" in value or "response" in value or _is_by_query(value)


def _is_by_query(value: dict[str, Any]) -> bool:
    """Whether an object is `{"QUERY_ID": ANSWER, …}`."""
    if not value or "hits" in value:
        return False
    return all(isinstance(answer, dict) and "hits" in answer for answer in value.values())


def _line_answers(path: str, storage: Storage) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(read_text(path, storage).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as exc:
            raise InputError(f"{path}: line {number} is not JSON ({exc}). One answer a line is wanted.") from exc
        if isinstance(value, dict) and _is_by_query(value):
            yield from value.items()
        else:
            yield _named_answer(path, value, f"line {number}")


def _named_answer(path: str, value: Any, where: str) -> tuple[str, Any]:
    query = value.get("query_id") if isinstance(value, dict) else None
    if query is None:
        raise InputError(f"{path}: {where} names no `query_id`. {HITS_ADVICE}")
    return str(query), value.get("response", value)


def _of_hits(path: str, answers: Iterator[tuple[str, Any]]) -> Ranking:
    """Hits in the order in which they were returned, whatever their scores: a search may be sorted by something else.

    Raises:
        InputError: a query comes twice, or its answer holds no list of hits.
    """
    queries: list[str] = []
    docs: list[str] = []
    rank_N: list[int] = []
    seen = set[str]()
    for query, answer in answers:
        if query in seen:
            raise InputError(f"{path}: query {query} comes twice. Give one answer for each query.")
        seen.add(query)
        for rank, hit in enumerate(_hits_of(path, query, answer)):
            queries.append(query)
            docs.append(str(hit["_id"]))
            rank_N.append(rank)
    return _ranking(path, "hits", queries, docs, -np.array(rank_N, dtype=np.float64))


def _hits_of(path: str, query: str, answer: Any) -> list[dict[str, Any]]:
    if isinstance(answer, dict) and answer.get("timed_out") is True:
        raise InputError(
            f"{path}: the answer to query {query} timed out (`timed_out`), so that its hits are not all. Ask again, or "
            "leave the query out."
        )
    shards = answer.get("_shards") if isinstance(answer, dict) else None
    if isinstance(shards, dict) and shards.get("failed"):
        raise InputError(
            f"{path}: of the answer to query {query}, {shards['failed']} of {shards.get('total', 'all')} shards failed "
            "(`_shards.failed`), so that its hits are not all. Ask again, or leave the query out."
        )
    hits = answer.get("hits") if isinstance(answer, dict) else None
    if isinstance(hits, dict):
        hits = hits.get("hits")
    if not isinstance(hits, list):
        error = f" It holds an error: {str(answer['error'])[:200]}." if _holds_error(answer) else ""
        raise InputError(f"{path}: the answer to query {query} has no list of hits (`hits.hits`).{error}")
    for hit in hits:
        if not isinstance(hit, dict) or hit.get("_id") is None:
            raise InputError(f"{path}: a hit of query {query} has no `_id`. Ask for hits with their ids.")
    return hits


def _holds_error(answer: Any) -> bool:
    return isinstance(answer, dict) and "error" in answer
