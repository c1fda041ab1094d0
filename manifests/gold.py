"""Gold grades by row and by pair: qrels, columns of the input or of a file, and maps between scales."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.forms import FORMS, form_by_suffix, load_columns, row_text_of
from relabel.manifests.inputs import changed_files, list_input, open_dataset
from relabel.manifests.labels import ids_of, texts_of
from relabel.manifests.plan import Plan
from relabel.manifests.process import WhenUsed
from relabel.manifests.secrets import shortened
from relabel.manifests.specs import Columns, InputSpec
from relabel.manifests.tables import (
    Column,
    NeededColumn,
    RowText,
    as_ids,
    id_column,
    numbered_row,
    open_parquet,
    read_grades,
    read_parquet,
    reading,
    require_columns,
)

pc = WhenUsed("pyarrow.compute")

# The columns beyond grades by which labelers that see a query's documents together are judged: those that they declare
# for their labels, and those of gold that state what is wanted.
#
# Nothing of this is read for labelers that declare none of them.

CHUNKS = "gold_chunks"
ANSWER_IDS = "gold_answer_ids"
EXPAND_IDS = "gold_expand_ids"
GRADING = (CHUNKS, ANSWER_IDS)
"""Columns of gold from which a grade follows where gold has no column of grades."""
GOLD = "gold"
"""The column of gold grades, int64, next to a set's labels and to gold's further columns."""


_KINDS: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_boolean,
    pa.types.is_integer,
    lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind),
)
"""Types that may be cast into one another: of others, a cast would take -1 for true, or a number for its text."""


class GoldColumn(NamedTuple):
    """A column of gold: how it is kept, and what a row holds in words."""

    name: str
    kind: pa.DataType
    wanted: str

    def read(self, column: Column, path: str) -> pa.Array:
        """The column of a file, null where a row has none.

        Raises:
            InputError: a row holds something else.
        """
        try:
            values = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else pa.array(column)
            is_list = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
            items = values.flatten() if is_list else values
            wanted = getattr(self.kind, "value_type", self.kind)
            is_alike = any(kind(items.type) and kind(wanted) for kind in _KINDS) or pa.types.is_null(items.type)
            if not is_alike:
                raise pa.ArrowTypeError(f"it holds {values.type}")
            if is_list and items.null_count:
                raise pa.ArrowTypeError(f"it holds {values.type}, with null items")
            return values.cast(self.kind)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError) as exc:
            raise InputError(
                f"{path}: column `{self.name}`: {self.wanted} a row is wanted, or null: {shortened(str(exc), 200)}. "
                "Parquet and JSONL can hold that; leave the column out where it is something else."
            ) from exc


_TEXTS = pa.large_list(pa.string()), "a list of strings"
_NUMBERS = pa.large_list(pa.int64()), "a list of whole numbers"
GOLD_CHUNKS = GoldColumn(CHUNKS, *_NUMBERS)

_JUDGED_BY: tuple[tuple[Mapping[str, str], tuple[GoldColumn, ...]], ...] = (
    (
        {
            "selected": "list<int16>",
            "num_chunks": "int32",
            "selected_tokens": "int32",
            "over_budget": "float32",
        },
        (GOLD_CHUNKS, GoldColumn("answers", *_TEXTS), GoldColumn("gold_answers", *_TEXTS)),
    ),
    ({"sufficient_probs": "list<float32>"}, (GoldColumn("gold_sufficient", pa.bool_(), "true or false"),)),
    (
        {"answer_ids": "list<int32>", "expand_ids": "list<int32>", "refused": "bool", "expelled": "int32"},
        (GoldColumn(ANSWER_IDS, *_NUMBERS), GoldColumn(EXPAND_IDS, *_NUMBERS)),
    ),
)
"""Columns that a labeler declares, by kind, and what gold may hold for such labels: of `evidence-set`, of `review`, of
`route`.
"""


def label_columns(own: Mapping[str, str]) -> list[str]:
    """Which of a labeler's own columns are judged.

    Args:
        own: all that it declares, name → kind.
    """
    names: list[str] = []
    for declared, _ in _JUDGED_BY:
        if declared.items() <= own.items():
            names += declared
    return names


def gold_columns(labels: Iterable[str]) -> list[GoldColumn]:
    """What gold may hold for labels with these columns."""
    names = set(labels)
    further: list[GoldColumn] = []
    for declared, columns in _JUDGED_BY:
        if declared.keys() <= names:
            further += columns
    return further


FROM_GOLD = "from_gold"
"""Column of a file of `relabel combine`: whether the pair's grade is the gold's."""
GOLD_QUERY = "gold_query"
"""Column of such labels when they are read: whether any pair of the query has its grade from gold, so that gold can't
judge the query.
"""


REVIEW_ORDER = "review_order"
"""Column of a file of `relabel review`: in which order the pair was chosen for people."""
IN_PROMPT = "in_prompt"
"""Column of such a file: whether the pair is an example in a prompt."""
SELECTION = (REVIEW_ORDER, IN_PROMPT)


class WordColumn(GoldColumn):
    """A column of gold that is read as words in small letters, whatever a spreadsheet made of it."""

    def read(self, column: Column, path: str) -> pa.Array:
        """The column of a file, null where a row has none."""
        values = column.to_pylist() if isinstance(column, pa.ChunkedArray) else column
        return pa.array([None if value is None else str(value).lower() for value in values], pa.string())


SELECTION_COLUMNS = tuple(WordColumn(name, pa.string(), "a word") for name in SELECTION)


def selection_notes(columns: Mapping[str, pa.Array]) -> list[str]:
    """What a reader should know of gold that people did not judge at random.

    Args:
        columns: of gold, a row a pair.
    """
    notes = []
    if REVIEW_ORDER in columns:
        orders = Counter(columns[REVIEW_ORDER].to_pylist())
        chosen = {order: count for order, count in orders.items() if order not in (None, "", "random")}
        if chosen:
            how = " and ".join(f"{count:,} by {order}" for order, count in chosen.items())
            notes.append(
                f"not a random sample: of {len(columns[REVIEW_ORDER]):,} gold pairs, {how} were chosen for people "
                f"(`{REVIEW_ORDER}`). Figures are of such pairs, and are biased for all others"
            )
    if IN_PROMPT in columns:
        count = columns[IN_PROMPT].to_pylist().count("true")
        if count:
            notes.append(
                f"{count:,} gold pairs are examples in a prompt (`{IN_PROMPT}`): of labels that were made with it, "
                "figures flatter"
            )
    return notes


class GoldRows(NamedTuple):
    """Gold for some rows.

    Args:
        how: they are joined with gold, in words.
        is_known: bool [N], whether gold has the row at all, with a grade or with null.
        columns: `GOLD`, null where a row has no grade, and further ones.
        num_from_gold: rows that have a grade and are not judged by it, since their labels saw gold of the query.
        pairs: int64 [N], as `PairGrades.places`; None where rows are joined otherwise.
    """

    how: str
    is_known: np.ndarray
    columns: Mapping[str, pa.Array]
    num_from_gold: int = 0
    pairs: np.ndarray | None = None

    def without_seen_queries(self, *labels: pa.RecordBatch) -> "GoldRows":
        """The same, without the grades of queries whose gold any of these sets of the rows has seen."""
        is_from_gold = pa.array(np.zeros(len(self.is_known), dtype=bool))
        for rows in labels:
            if GOLD_QUERY in rows.schema.names:
                is_from_gold = pc.or_(is_from_gold, rows[GOLD_QUERY])
        grades = pc.if_else(is_from_gold, pa.scalar(None, self.columns[GOLD].type), self.columns[GOLD])
        num_from_gold = grades.null_count - self.columns[GOLD].null_count
        return self._replace(columns={**self.columns, GOLD: grades}, num_from_gold=num_from_gold)

    @property
    def counts(self) -> dict[str, int]:
        """Rows that are `judged`, that gold does not have, and whose grade is null; `from_gold` where some are."""
        num_known = int(self.is_known.sum())
        num_judged = len(self.columns[GOLD]) - self.columns[GOLD].null_count
        counts = {
            "judged": num_judged,
            "unjudged": len(self.is_known) - num_known,
            "gold_null": num_known - num_judged - self.num_from_gold,
        }
        if self.num_from_gold:
            counts["from_gold"] = self.num_from_gold
        return counts


def implied_grades(columns: Mapping[str, pa.Array]) -> pa.Int64Array:
    """Gold grades of rows that state only what is wanted, by the first column of `GRADING` that is there.

    A document with a wanted chunk is 1, one with none 0. A row with a node that answers is 2; one with none is 1 where
    a heading is to be unfolded, 0 where none is, and null where the headings are not known. Null stays null.
    """
    if CHUNKS in columns:
        return _has_any(columns[CHUNKS]).cast(pa.int64())
    answers = columns[ANSWER_IDS]
    is_answered = _has_any(answers)
    expands = columns.get(EXPAND_IDS, pa.nulls(len(answers), answers.type))
    return pc.if_else(is_answered, 2, _has_any(expands).cast(pa.int64()))


def _has_any(lists: pa.LargeListArray) -> pa.BooleanArray:
    return pc.greater(pc.list_value_length(lists), 0)


def check_chunks(
    columns: Mapping[str, pa.Array], query_ids: pa.Array | None, doc_ids: pa.Array | None, *, where: str
) -> None:
    """Every gold chunk is one that its document has.

    Args:
        columns: of the rows; nothing to check where they lack chunks.
        query_ids, doc_ids: of the rows.
        where: gold came from.
    Raises:
        InputError: names the document, the chunk, and how many there are.
    """
    if not {CHUNKS, "num_chunks"} <= columns.keys():
        return
    number_M = pc.list_flatten(columns[CHUNKS]).to_numpy()
    row_M = pc.list_parent_indices(columns[CHUNKS]).to_numpy()
    most_M = columns["num_chunks"].fill_null(np.iinfo(np.int32).max).to_numpy()[row_M]  # null: no labeler of chunks
    wrong = np.flatnonzero((number_M < 1) | (number_M > most_M))
    if len(wrong):
        first = wrong[0]
        row = slice(int(row_M[first]), int(row_M[first]) + 1)
        query = "" if query_ids is None else texts_of(query_ids[row])[0]
        doc = "" if doc_ids is None else texts_of(doc_ids[row])[0]
        raise InputError(
            f"{where}: column `{CHUNKS}` names chunk {number_M[first]} of document {doc} of query {query}, which has "
            f"{most_M[first]} chunks, numbered from 1. Take the numbers `n` of the column `chunks` that was labelled."
        )


Duplicates = Literal["error", "mean", "first"]
GradeMap = Mapping[int, int]
SHOWN = 5
MOST_GRADE = 999
DEFAULT_GRADE = "grade"
"""The column of gold grades where the user names none."""


def load_qrels(
    path: str,
    storage: Storage,
    *,
    grade: str,
    by: str,
    doc: str,
    is_by_row: bool = False,
    may_lack: bool = False,
    grade_map: GradeMap | None = None,
    further: Sequence[GoldColumn] = (),
) -> dict[str, pa.Array]:
    """Read qrels, rows in the order of the file: `query_id` and `doc_id`, `GOLD` after `--map`, null where a row has no
    grade (such rows are left out, never read as 0), and further columns.

    Args:
        grade, by, doc: columns of grade, query and document; TREC text has `grade`, `query_id` and `doc_id`.
        may_lack: `by` and `doc` are of other files too, so that one without them is read by its usual columns.
        is_by_row: they are joined by row, so that id columns are not read.
        further: columns that are read where they are there.
    Raises:
        InputError: unreadable file, missing column, a grade that is no whole number, or one that `grade_map` does not
            map; a further column that holds something else.
    """

    def choose(names: list[str]) -> list[str]:
        nonlocal by, doc
        further_columns = [column.name for column in further if column.name in names]
        needed = []
        if not is_by_row:
            if may_lack:
                by = id_column(by, "query_id", names)
                doc = id_column(doc, "doc_id", names)
            needed += [NeededColumn(by, "the query id", "--by"), NeededColumn(doc, "the document id", "--doc")]
        if not has_implied_grades(grade, names, further_columns):
            needed.append(NeededColumn(grade, "the gold grade", "--grade"))
        require_columns(needed, names, path=path)
        return [*(column.name for column in needed), *further_columns]

    columns = load_columns(path, choose, storage)
    present = [column for column in further if column.name in columns]
    further_columns = {column.name: column.read(columns[column.name], path) for column in present}
    qrels = {}
    if not is_by_row:
        qrels["query_id"] = as_ids(columns[by], path=path, name=by)
        qrels["doc_id"] = as_ids(columns[doc], path=path, name=doc)
    qrels[GOLD] = graded(
        columns.get(grade),
        further_columns,
        grade,
        grade_map,
        path=path,
        row_text=row_text_of(form_by_suffix(path, FORMS)),
    )
    return qrels | further_columns


def has_implied_grades(grade: str, names: Collection[str], further: Collection[str]) -> bool:
    """Whether grades come from further columns: a file has one of `GRADING`, and no grade under the default name."""
    return grade == DEFAULT_GRADE and grade not in names and any(name in further for name in GRADING)


def graded(
    column: Column | None,
    further: Mapping[str, pa.Array],
    name: str,
    grade_map: GradeMap | None,
    *,
    path: str,
    row_text: RowText = numbered_row,
) -> pa.Int64Array:
    """Gold grades, after `--map`, of the column of that name; without it (`has_implied_grades`) of the others.

    Raises:
        InputError: one is no whole number, or `grade_map` does not map it.
    """
    if column is None:
        return implied_grades(further)
    advice = " Name another column with --grade, or leave those rows empty."
    grades = read_grades(column).readable(path, name, advice=advice, row_text=row_text)
    return mapped(grades, grade_map, where=f"{path}, column `{name}`", option="--map")


def parse_map(text: str | None, option: str) -> dict[int, int] | None:
    """`0=0,1=1,2=2,3=2` as a map.

    Raises:
        UsageError: it is not that.
    """
    if text is None:
        return None
    pairs = [item.partition("=")[::2] for item in text.split(",")]
    try:
        grade_map = {int(old): int(new) for old, new in pairs}
    except ValueError:
        grade_map = {}
    if len(grade_map) < len(pairs) or not all(0 <= new <= MOST_GRADE for new in grade_map.values()):
        raise UsageError(
            f"{option} {text}: want each grade once and what it becomes, 0 to {MOST_GRADE}, for instance {option} "
            "0=0,1=1,2=2,3=2"
        )
    return grade_map


def grades_seen(grades: pa.Int64Array) -> set[int]:
    """The grades that occur."""
    return set(pc.unique(grades.drop_null()).to_pylist())


def mapped(grades: pa.Int64Array, grade_map: GradeMap | None, *, where: str, option: str) -> pa.Int64Array:
    """Grades through a map; null stays null.

    Raises:
        InputError: a grade that the map does not name.
    """
    if grade_map is None:
        return grades
    seen = sorted(grades_seen(grades))
    missing = [grade for grade in seen if grade not in grade_map]
    if missing:
        raise InputError(
            f"{where}: grade {', '.join(map(str, missing[:SHOWN]))} is there and {option} does not say what it "
            "becomes. Add it."
        )
    known = pa.array(seen, pa.int64())
    return pa.array([grade_map[grade] for grade in seen], pa.int64()).take(pc.index_in(grades, value_set=known))


def check_scale(seen: Iterable[int], grades: int, *, where: str, option: str | None) -> None:
    """Every grade seen is one of 0..K-1.

    Raises:
        InputError: suggests a map, by the option that takes one; None where a command has none.
    """
    all_seen = sorted(set(seen))
    off = [grade for grade in all_seen if not 0 <= grade < grades]
    if off:
        if grades == 2:  # the upper half is 1
            new = [int(2 * grade > all_seen[-1]) for grade in all_seen]
        else:  # cut at both ends
            new = [min(max(grade, 0), grades - 1) for grade in all_seen]
        becomes = list(zip(all_seen, new, strict=True))
        typed = ",".join(f"{old}={grade}" for old, grade in becomes)
        if option is None:
            advice = f"Bring the labels to it, for instance {typed}"
        elif option.startswith("--"):
            advice = f"Say what each grade becomes, for instance {option} {typed}"
        else:  # a spec's key
            written = ", ".join(f"{old}: {grade}" for old, grade in becomes)
            section, _, key = option.rpartition(".")
            within = f"`{section}: {{…, {key}: {{{written}}}}}`"
            advice = f"Say what each grade becomes, by `{option}`, for instance {within}"
        raise InputError(
            f"{where}: grade {', '.join(map(str, off[:SHOWN]))} is off the scale 0 to {grades - 1}. {advice}"
        )


@dataclass(frozen=True)
class PairGrades:
    """One grade a pair.

    Args:
        queries, docs: the different ids; a pair is a key, its query's place times the number of documents plus its
            document's place.
        keys: int64 [P], ascending.
        columns: `GOLD` of each key, null where every grade of the pair is, and further ones, those of the pair's first
            row.
        num_conflicts: pairs with different grades, settled by `--duplicates`.
        num_repeated, num_null: rows beyond the first of their pair, and those without a grade.
        seen: the grades of all rows.
        begins: the first pairs of the file, for messages.
        notes: what a reader should know of them.
    """

    queries: pa.LargeBinaryArray
    docs: pa.LargeBinaryArray
    keys: np.ndarray
    columns: Mapping[str, pa.Array]
    num_conflicts: int
    num_repeated: int
    num_null: int
    seen: set[int]
    begins: str
    notes: Sequence[str] = ()

    def places(self, query_ids: pa.LargeBinaryArray, doc_ids: pa.LargeBinaryArray) -> np.ndarray:
        """Where in `columns` each pair is: int64 [N], -1 for one that is not there."""
        query_N = pc.index_in(query_ids, value_set=self.queries).fill_null(-1).to_numpy().astype(np.int64)
        doc_N = pc.index_in(doc_ids, value_set=self.docs).fill_null(-1).to_numpy().astype(np.int64)
        key_N = np.where((query_N < 0) | (doc_N < 0), -1, query_N * len(self.docs) + doc_N)
        place_N = np.searchsorted(self.keys, key_N)
        is_known_N = np.append(self.keys, -2)[place_N] == key_N
        return np.where(is_known_N, place_N, -1)

    def grades_of(self, pairs: Sequence[tuple[str, str]]) -> list[int | None]:
        """The grade of each (query_id, doc_id), None where there is none."""
        place_N = self.places(ids_of(query for query, _ in pairs), ids_of(doc for _, doc in pairs))
        return list(taken(self.columns[GOLD], place_N).to_pylist())


def taken(column: pa.Array, place_N: np.ndarray) -> pa.Array:
    """Values by their places; null for a negative place."""
    return column.take(pa.array(place_N, mask=place_N < 0))


def first_pairs(query_ids: pa.LargeBinaryArray, doc_ids: pa.LargeBinaryArray) -> str:
    """The first few pairs, for messages."""
    pairs = zip(texts_of(query_ids[:SHOWN]), texts_of(doc_ids[:SHOWN]), strict=True)
    return ", ".join(f"({query}, {doc})" for query, doc in pairs) or "nothing, it is empty"


def grades_by_pair(qrels: Mapping[str, pa.Array], duplicates: Duplicates, path: str) -> PairGrades:
    """One grade a pair; the same grade twice is one grade.

    Args:
        qrels: as `load_qrels` reads them.
        duplicates: `mean` takes the mean of a pair's grades, rounded to the nearest grade, halves up; `first` the first
            in the file.
        path: of the qrels, for messages.
    Raises:
        InputError: a pair has different grades, or further columns that differ, and `duplicates` is `error`.
    """
    columns = {name: column for name, column in qrels.items() if name not in ("query_id", "doc_id")}
    query = qrels["query_id"].dictionary_encode()
    doc = qrels["doc_id"].dictionary_encode()
    key_N = query.indices.to_numpy() * np.int64(len(doc.dictionary)) + doc.indices.to_numpy()
    pairs = _pairs_by_key(key_N, qrels[GOLD])
    first_P = pairs["row_min"].combine_chunks()
    in_conflict = pairs.filter(pc.less(pairs["grade_min"], pairs["grade_max"]))
    conflicts = np.sort(in_conflict["row_min"].to_numpy())
    if duplicates == "error" and len(pairs) < len(key_N):
        _check_duplicates(
            qrels,
            key_N,
            conflicts,
            first_P.take(pc.index_in(pa.array(key_N), pairs["key"])),
            path,
        )
    grades = pairs["grade_first"].combine_chunks()
    if duplicates == "mean":
        count_P = np.maximum(pairs["grade_count"].to_numpy(), 1)
        mean_P = (2 * pairs["grade_sum"].fill_null(0).to_numpy() + count_P) // (2 * count_P)
        grades = pa.array(mean_P, mask=grades.is_null().to_numpy(zero_copy_only=False))
    return PairGrades(
        queries=query.dictionary,
        docs=doc.dictionary,
        keys=pairs["key"].to_numpy(),
        columns={name: grades if name == GOLD else column.take(first_P) for name, column in columns.items()},
        num_conflicts=len(conflicts),
        num_repeated=len(key_N) - len(pairs),
        num_null=qrels[GOLD].null_count,
        seen=grades_seen(qrels[GOLD]),
        begins=first_pairs(qrels["query_id"], qrels["doc_id"]),
    )


def _pairs_by_key(key_N: np.ndarray, grades: pa.Int64Array) -> pa.Table:
    """Of each different key its first row, and of its grades the first, the least, the greatest, the sum, and how many
    are not null; by key.
    """
    order_N = np.argsort(key_N, kind="stable")
    sorted_N = key_N[order_N]
    if (sorted_N[1:] == sorted_N[:-1]).any():
        rows = pa.table({"key": key_N, "row": np.arange(len(key_N)), "grade": grades})
        wanted = [("row", "min")]
        wanted += [("grade", how) for how in ("first", "min", "max", "sum", "count")]
        return rows.group_by("key", use_threads=False).aggregate(wanted).sort_by("key")
    # no pair twice, as in nearly all qrels: grouping a million of them is a second
    single = grades.take(pa.array(order_N))
    values = {f"grade_{how}": single for how in ("first", "min", "max", "sum")}
    return pa.table({"key": sorted_N, "row_min": order_N, **values, "grade_count": single.is_valid().cast(pa.int64())})


def _check_duplicates(
    qrels: Mapping[str, pa.Array], key_N: np.ndarray, conflicts: np.ndarray, first_N: pa.Int64Array, path: str
) -> None:
    """Rows of one pair have the same grade and the same further columns.

    Args:
        conflicts: the first row of each pair whose grades differ.
        first_N: of each row the first row of its pair.
    Raises:
        InputError: two differ; names pairs.
    """

    def named(row: int) -> str:
        query = texts_of(qrels["query_id"][row : row + 1])[0]
        doc = texts_of(qrels["doc_id"][row : row + 1])[0]
        return f"query {query}, document {doc}"

    if len(conflicts):
        examples = []
        for row in conflicts[:SHOWN]:
            grades = qrels[GOLD].filter(pa.array(key_N == key_N[row])).drop_null()
            examples.append(f"{named(row)}: {', '.join(map(str, grades))}")
        raise InputError(
            f"{path}: {len(conflicts)} pairs have several grades that differ "
            f"({'; '.join(examples)}{'; …' if len(conflicts) > SHOWN else ''}). "
            "Correct the file, or choose: --duplicates mean or --duplicates first."
        )
    for name, column in qrels.items():
        if name in ("query_id", "doc_id", GOLD):
            continue
        first_values = column.take(first_N).to_pylist()
        for row, (value, first) in enumerate(zip(column.to_pylist(), first_values, strict=True)):
            if value != first:
                raise InputError(
                    f"{path}: rows of {named(row)} differ in column `{name}`. "
                    "Correct the file, or take the first with --duplicates first."
                )


def own_input(plan: Plan, path: str, grade: str | None, storage: Storage) -> tuple[list[str], str] | None:
    """The files of a run's own input in row order and the name of its gold column, if `path` is that input; None if it
    is not.

    They are the same if their sizes and footers are those that were planned.

    Raises:
        InputError: it is a folder that can't be read.
    """
    columns = plan.facts.columns
    try:
        spec = InputSpec(path=(path,), columns=columns.model_copy(update={"gold": None}))
        dataset = open_dataset(spec, storage) if list_input(path, storage).files else None
    except InputError:
        if not is_url(path) and Path(path).is_dir():
            # grades lie in files: a folder can be nothing else, so its fault is reported
            raise
        return None
    if dataset is None or changed_files(plan.files, dataset.files):
        return None
    return [file.path for file in dataset.files], grade or columns.gold or "grade"


def columns_of_owner(plans: Iterable[Plan | None], path: str, storage: Storage) -> Columns | None:
    """The columns that a job names whose own input `path` is, of several such jobs one that names its gold; None if it
    is the input of none.

    Args:
        plans: of runs, None for what is no run.
    """
    owners = [
        plan.facts.columns for plan in plans if plan is not None and own_input(plan, path, None, storage) is not None
    ]
    named = [columns for columns in owners if columns.gold is not None]
    return next(iter([*named, *owners]), None)


def load_gold_by_row(
    files: list[str], column: str, storage: Storage, *, role: str = "the gold grade", option: str = "--grade"
) -> Column:
    """A column of a run's own input, in the order of row ids.

    Args:
        role, option: what it is for and what names it, for errors.
    Raises:
        InputError: it is not there.
    """
    parts: list[pa.ChunkedArray] = []
    for path in files:
        with open_parquet(path, storage) as parquet, reading(path):
            needed = NeededColumn(column, role, option)
            require_columns([needed], parquet.plain_schema.names, path=path)
            parts.append(read_parquet(parquet, column))
    if len({part.type for part in parts}) > 1:
        values: list[Any] = []
        for part in parts:
            values += part.to_pylist()
        return values
    chunks: list[pa.Array] = []
    for part in parts:
        chunks += part.chunks
    return pa.chunked_array(chunks, parts[0].type)


def column_names(path: str, storage: Storage) -> list[str]:
    """What the columns of a Parquet file are called."""
    with open_parquet(path, storage) as parquet, reading(path):
        return list(parquet.plain_schema.names)


def further_of_input(
    files: list[str], further: Sequence[GoldColumn], storage: Storage, *, where: str
) -> dict[str, pa.Array]:
    """Further columns of a run's own input, in the order of row ids, where it has them.

    Args:
        where: what to call the input in an error about a row.
    Raises:
        InputError: some of the files have one and others not, or a row holds something else.
    """
    if not further:
        return {}
    names: set[str] = set()
    for path in files:
        names.update(column_names(path, storage))
    columns = {}
    for column in further:
        if column.name in names:
            values = load_gold_by_row(
                files,
                column.name,
                storage,
                role="of the input's other files",
                option="",
            )
            columns[column.name] = column.read(values, where)
    return columns
