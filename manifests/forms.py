"""The forms of tables that people bring along or take away: how each is known by its name, read and written.

A form is one entry of `FORMS`. What reads judgments (`evaluate --qrels`, `report --gold`, `combine`) and what converts
files asks there, so that a new form is a reader, a writer and an entry; forms of search tools are read and written in
`manifests/judgments.py`.

Ids stay the text that they are (`007` is not 7) and rows are split at `\n` alone, since real ids and texts hold other
line-like characters.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.judgments import (
    LABEL_STUDIO_MARKS,
    LABEL_STUDIO_MIN_MARKS,
    PEOPLE_COLUMNS,
    QUEPID_DETAILED,
    QUEPID_NAMES,
    QUEPID_UNWRITABLE,
    TEXT_COLUMNS,
    Heading,
    ReadText,
    delimiter_of,
    names_at_top,
    read_label_studio,
    read_opensearch,
    read_quepid,
    read_rank_eval,
    read_rre,
    sheet_row,
    write_opensearch,
    write_quepid,
    write_rank_eval,
    write_rre,
)
from relabel.manifests.process import require
from relabel.manifests.store import read_whole
from relabel.manifests.tables import (
    PARQUET_SUFFIXES,
    SCORES_RANK,
    Column,
    RowText,
    numbered_row,
    open_parquet,
    read_parquet,
    reading,
)

Choice = Callable[[list[str]], Sequence[str]]
"""The names that a file has to the names that are wanted of it; raises where one is missing (see `require_columns`)."""

Read = Callable[[str, Choice, Storage], dict[str, Column]]
"""Reads the chosen columns of a file, whole. Raises InputError: it can't be read, is not of this form, or lacks one."""

Write = Callable[[Path, pa.Schema, Iterable[pa.Table], Heading], None]
"""Writes tables of a schema to a local file. Where a form has columns of its own, those of judgments are `query_id`,
`query`, `doc_id` and `grade`.
"""


@dataclass(frozen=True)
class Form:
    """One form of table.

    Args:
        name: as options name it.
        suffixes: of names of such files.
        read: what reads one.
        write: what writes one; None for a form that is only read.
        columns: what each row is made of; empty for a table, which names its columns.
        example: a line, or what the file is.
        has_grades: whether it can hold judgments.
        marks: names at the top of such a file, by which it is known where its suffix says less.
        also_marks: the same of another kind of such a file.
        is_by_text: whether it knows a query by its text alone.
        wants_text: whether the query's text is written.
        unwritable: a pattern of what its texts can't hold; empty where they hold anything.
        limits: why, in words.
        needs: parts of `Heading` without which it is not written.
    """

    name: str
    suffixes: tuple[str, ...]
    read: Read
    write: Write | None = None
    columns: tuple[str, ...] = ()
    example: str = ""
    has_grades: bool = True
    marks: tuple[str, ...] = ()
    also_marks: tuple[str, ...] = ()
    is_by_text: bool = False
    wants_text: bool = False
    unwritable: str = ""
    limits: str = ""
    needs: tuple[str, ...] = ()

    def is_marked_by(self, names: set[str]) -> bool:
        """Whether a file that has these names at its top is of this form."""
        is_also = bool(self.also_marks) and set(self.also_marks) <= names
        return is_also or (bool(self.marks) and set(self.marks) <= names)


GZIP_SUFFIX = ".gz"


def name_of(path: str) -> str:
    """The file's name in small letters, without the suffix of gzip: its form shows in what is left."""
    return PurePosixPath(path).name.lower().removesuffix(GZIP_SUFFIX)


def form_by_suffix(path: str, forms: Iterable[Form]) -> Form | None:
    """The form among these that a name has by its suffix, the longest that fits."""
    name = name_of(path)
    fitting = [(len(suffix), form) for form in forms for suffix in form.suffixes if name.endswith(suffix)]
    return max(fitting, key=lambda one: one[0])[1] if fitting else None


SHARED_SUFFIXES = (".json", ".csv")
"""Of names whose form shows inside."""


def refuse_job_file(path: str) -> None:
    """
    Raises:
        InputError: a path is a job file, where labels are wanted.
    """
    if PurePosixPath(name_of(path)).suffix in (".yaml", ".yml"):
        raise InputError(f"{path}: a job file, which holds no labels. Name the folder that its `output` says.")


def form_of(path: str, forms: Sequence[Form], storage: Storage) -> Form | None:
    """The form among these of a file, by its suffix; where several forms share that, by the names at its top.

    Raises:
        InputError: the file can't be read, is a job, or names nothing that a form of its suffix would.
    """
    form = form_by_suffix(path, forms)
    suffix = PurePosixPath(name_of(path)).suffix
    refuse_job_file(path)
    if suffix not in SHARED_SUFFIXES or (form is not None and form.marks):
        return form
    marked = [one for one in forms if one.marks]
    names = names_at_top(read_text(path, storage))
    shown = next((one for one in marked if one.is_marked_by(names)), form)
    if shown is None:
        known = "; ".join(f"{one.name}: {', '.join(one.marks)}" for one in marked)
        raise InputError(
            f"{path}: no form of judgments is known by what it names at its top ({', '.join(sorted(names))[:80]}). "
            f"Known are {known}."
        )
    return shown


def load_columns(path: str, choose: Choice, storage: Storage) -> dict[str, Column]:
    """Read some columns of a file of labels or judgments; its form is known by its suffix or by what it names, and TREC
    qrels text (`qid 0 docid grade`) is what has no known one.

    Args:
        path: local, or a URL.
        choose: picks columns from those that are there.
    Raises:
        InputError: the file is absent, is a ranking, is not what its suffix says, or lacks a column.
    """
    form = form_of(path, FORMS, storage) or QRELS
    if not form.has_grades:
        raise InputError(f"{path}: a TREC run is a ranking by scores, and grades are wanted. {SCORES_RANK}")
    return form.read(path, choose, storage)


def load_scores(path: str, choose: Choice, storage: Storage) -> dict[str, Column]:
    """As `load_columns`, of a file of scores: what has no known suffix is TREC run text (`qid Q0 docid rank score
    tag`).

    Raises:
        InputError: the file is absent, is not what its suffix says, or lacks a column.
    """
    form = form_of(path, FORMS, storage) or RUN
    return form.read(path, choose, storage)


def file_columns(path: str, storage: Storage, form: Form | None = None) -> list[str]:
    """The columns of a file, none where it is empty.

    Args:
        form: of a file whose form is known.
    Raises:
        InputError: it can't be read.
    """
    names: list[str] = []

    def no_column(there: list[str]) -> list[str]:
        names.extend(there)
        return []

    if form is None:
        load_columns(path, no_column, storage)
    else:
        form.read(path, no_column, storage)
    return names


NO_TEXT = {
    b"\x28\xb5\x2f\xfd": "is compressed by Zstandard, and text is wanted. Unpack it (`unzstd`).",
    b"PK\x03\x04": "is a ZIP archive (a spreadsheet is one), and text is wanted. Unpack it, or save the sheet as CSV.",
    b"PAR1": "is Parquet, and text is wanted. Give it the suffix .parquet.",
    b"\xff\xfe": "is in UTF-16. Write it again in UTF-8 (`iconv -f utf-16 -t utf-8`).",
    b"\xfe\xff": "is in UTF-16. Write it again in UTF-8 (`iconv -f utf-16 -t utf-8`).",
}
"""What a file is that begins so and is no UTF-8, and what to do."""


_GZIP_START = b"\x1f\x8b"


def read_text(path: str, storage: Storage) -> str:
    """A file's text, unpacked where it is compressed by gzip.

    Raises:
        InputError: it can't be read, is cut off, or is not UTF-8.
    """
    with reading(path):
        stored = read_whole(path, storage)
    if stored.startswith(_GZIP_START):
        try:
            stored = gzip.decompress(stored)
        except (OSError, EOFError, zlib.error) as exc:
            raise InputError(f"{path}: is compressed by gzip and can't be unpacked ({exc}). Is it whole?") from exc
    try:
        return stored.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        for start, advice in NO_TEXT.items():
            if stored.startswith(start):
                raise InputError(f"{path}: {advice}") from exc
        line = stored.count(b"\n", 0, exc.start) + 1
        raise InputError(
            f"{path}: line {line} holds bytes that are not UTF-8 ({stored[exc.start : exc.end]!r}). Write the file "
            "again in UTF-8 (`iconv -f latin1 -t utf-8`, if that is what it is in)."
        ) from exc


# ------------------------------------------------------------------------------
# Parquet.


ROWS_PER_GROUP = 16_384
_BYTES_PER_GROUP = 64 << 20


def _read_parquet(path: str, choose: Choice, storage: Storage) -> dict[str, Column]:
    with open_parquet(path, storage) as parquet, reading(path):
        names = list(dict.fromkeys(choose(parquet.plain_schema.names)))
        return {name: read_parquet(parquet, name) for name in names}


def _write_parquet(file: Path, schema: pa.Schema, tables: Iterable[pa.Table], _heading: Heading) -> None:
    write_grouped(file, schema, tables)


def write_grouped(file: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Write tables to a Parquet file, gathered to row groups of so many rows or bytes."""
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        held: list[pa.Table] = []
        for table in tables:
            held.append(table)
            if sum(map(len, held)) >= ROWS_PER_GROUP or sum(one.nbytes for one in held) >= _BYTES_PER_GROUP:
                writer.write_table(pa.concat_tables(held))
                held = []
        if held:
            writer.write_table(pa.concat_tables(held))


# ------------------------------------------------------------------------------
# JSON lines.


def _read_jsonl(path: str, choose: Choice, storage: Storage) -> dict[str, Column]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(read_text(path, storage).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as exc:
            raise InputError(f"{path}: line {number} is not JSON ({exc}). One object a line is wanted.") from exc
        if not isinstance(row, dict):
            raise InputError(f"{path}: line {number} holds no object. One object a line is wanted.")
        rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in choose(names)}


def _write_jsonl(file: Path, _schema: pa.Schema, tables: Iterable[pa.Table], _heading: Heading) -> None:
    polars = require("polars", extra="eval", purpose="relabel convert")
    with file.open("wb") as out:
        for table in tables:
            frame = polars.from_arrow(table)
            frame.with_columns(polars.selectors.binary().bin.encode("hex")).write_ndjson(out)


# ------------------------------------------------------------------------------
# CSV and TSV, with a line of names.


def _read_delimited(path: str, choose: Choice, storage: Storage) -> dict[str, Column]:
    text = read_text(path, storage)
    delimiter = "\t" if name_of(path).endswith(TSV.suffixes) else delimiter_of(text)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        rows = [row for row in reader if row]
    except csv.Error as exc:
        raise InputError(f"{path}: line {reader.line_num} can't be read ({exc}).") from exc
    for number, row in enumerate(rows):
        if len(row) != len(names):
            raise InputError(
                f"{path}: {sheet_row(number)} has {len(row)} fields, its first line names {len(names)} (columns are "
                f"divided by {delimiter!r})."
            )
    index_of = {name: number for number, name in enumerate(names)}
    return {name: [row[index_of[name]] for row in rows] for name in choose(names)}


def _write_delimited(
    file: Path, schema: pa.Schema, tables: Iterable[pa.Table], _heading: Heading, *, delimiter: str
) -> None:
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, delimiter=delimiter)
        writer.writerow(schema.names)
        for table in tables:
            writer.writerows(zip(*map(_cells, table.columns), strict=True))


def _cells(column: pa.ChunkedArray) -> list[Any]:
    """Lists, records and truths as JSON has them, bytes in hex; null is empty."""
    values: list[Any] = column.to_pylist()
    kind = column.type
    if pa.types.is_nested(kind) or pa.types.is_boolean(kind):
        return [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    if isinstance(next((value for value in values if value is not None), None), bytes):
        return [None if value is None else value.hex() for value in values]
    return values


# ------------------------------------------------------------------------------
# TREC's two text forms, qrels and run files: one row a line, fields by white space.
#
# White space is what Python's `str.split` takes for it, since that is what the readers of such files do (ir_measures
# among them): an id with any of it inside would fall apart, so it can't be written.


LINE = "line"
"""The further column of what is read of such text: the number of each row's line."""
SHOWN_CHARS = 80
"""Of a line that can't be read."""


TREC_UNWRITABLE = "[\\s\\x1c-\\x1f\ufeff]|^$"
"""What an id can't hold: white space (Python counts four separators of ASCII too), and the mark of byte order, which
readers drop at a file's beginning. Nor may it be empty.
"""
QRELS_COLUMNS = ("query_id", "iteration", "doc_id", "grade")
RUN_COLUMNS = ("query_id", "q0", "doc_id", "rank", "score", "tag")


def _read_trec(path: str, choose: Choice, storage: Storage, *, columns: tuple[str, ...]) -> dict[str, Column]:
    """Columns by their names, and `LINE` where it is chosen; blank lines are passed over."""
    values: dict[str, list[Any]] = {name: [] for name in (LINE, *columns)}
    for number, line in enumerate(read_text(path, storage).split("\n"), start=1):
        fields = line.split()
        if not fields:
            continue
        if columns == QRELS_COLUMNS and is_run_line(fields):
            raise InputError(
                f"{path}: line {number} is one of a TREC run (query Q0 document rank score tag), which is a ranking by "
                f"scores, and grades are wanted. {SCORES_RANK}"
            )
        if len(fields) != len(columns):
            raise InputError(
                f"{path}: line {number} has {len(fields)} fields, and {len(columns)} are wanted "
                f"({' '.join(columns)}): {line.strip()[:SHOWN_CHARS]!r}. A table wants the suffix .parquet, .csv, "
                ".tsv or .jsonl."
            )
        values[LINE].append(number)
        for name, value in zip(columns, fields, strict=True):
            values[name].append(value)
    return {name: values[name] for name in choose(list(columns))}


def is_run_line(fields: Sequence[str]) -> bool:
    """Whether the fields of a line are those of a TREC run."""
    return len(fields) == len(RUN_COLUMNS) and fields[RUN_COLUMNS.index("q0")].upper() == "Q0"


def _write_trec(file: Path, _schema: pa.Schema, tables: Iterable[pa.Table], _heading: Heading) -> None:
    polars = require("polars", extra="eval", purpose="relabel convert")
    with file.open("wb") as out:
        for table in tables:
            polars.from_arrow(table).write_csv(out, include_header=False, separator=" ", quote_style="never")


def _write_qrels(file: Path, schema: pa.Schema, tables: Iterable[pa.Table], heading: Heading) -> None:
    with_iteration = (table.append_column("iteration", pa.repeat("0", len(table))) for table in tables)
    lines = (table.select(["query_id", "iteration", "doc_id", "grade"]) for table in with_iteration)
    _write_trec(file, schema, lines, heading)


# ------------------------------------------------------------------------------
# Judgments of search tools.


def _read_judgments(path: str, choose: Choice, storage: Storage, *, read: ReadText) -> dict[str, Column]:
    columns = read(path, read_text(path, storage))
    if all(text is None for text in columns["query"]):
        del columns["query"]
    return {name: columns[name] for name in choose(list(columns))}


# ------------------------------------------------------------------------------
# The registry.


PARQUET = Form("parquet", PARQUET_SUFFIXES, _read_parquet, _write_parquet)
JSONL = Form("jsonl", (".jsonl", ".ndjson"), _read_jsonl, _write_jsonl)
CSV = Form("csv", (".csv",), _read_delimited, partial(_write_delimited, delimiter=","))
TSV = Form("tsv", (".tsv",), _read_delimited, partial(_write_delimited, delimiter="\t"))
QRELS = Form(
    "qrels",
    (".qrels", ".qrel"),
    partial(_read_trec, columns=QRELS_COLUMNS),
    _write_qrels,
    columns=QRELS_COLUMNS,
    example="`qid 0 docid grade`",
    unwritable=TREC_UNWRITABLE,
    limits="fields end at white space",
)
RUN = Form(
    "run",
    (".run",),
    partial(_read_trec, columns=RUN_COLUMNS),
    _write_trec,
    columns=RUN_COLUMNS,
    example="`qid Q0 docid rank score tag`",
    has_grades=False,
    unwritable=TREC_UNWRITABLE,
    limits="fields end at white space",
)
OPENSEARCH = Form(
    "opensearch",
    (".opensearch.json",),
    partial(_read_judgments, read=read_opensearch),
    write_opensearch,
    columns=TEXT_COLUMNS,
    example="OpenSearch's import of judgments",
    marks=("judgmentRatings",),
    is_by_text=True,
    wants_text=True,
    unwritable="^$",
    limits="texts and ids are not empty",
)
RANK_EVAL = Form(
    "rank_eval",
    (".rank_eval.json",),
    partial(_read_judgments, read=read_rank_eval),
    write_rank_eval,
    columns=("query_id", "doc_id", "grade"),
    example="the body of `_rank_eval`",
    marks=("requests",),
    unwritable="^$",
    wants_text=True,
    limits="ids are not empty",
    needs=("index", "request"),
)
QUEPID = Form(
    "quepid",
    (".quepid.csv",),
    partial(_read_judgments, read=read_quepid),
    write_quepid,
    columns=TEXT_COLUMNS,
    example="Quepid's CSV",
    marks=QUEPID_NAMES,
    also_marks=QUEPID_DETAILED,
    is_by_text=True,
    wants_text=True,
    unwritable=QUEPID_UNWRITABLE,
    limits="it drops white space at both ends",
)
RRE = Form(
    "rre",
    (".rre.json",),
    partial(_read_judgments, read=read_rre),
    write_rre,
    columns=TEXT_COLUMNS,
    example="RRE's ratings",
    marks=("id_field", "index"),
    is_by_text=True,
    wants_text=True,
    unwritable="^$",
    limits="texts and ids are not empty",
    needs=("index", "template"),
)
LABEL_STUDIO = Form(
    "label_studio",
    (".labelstudio.json",),
    partial(_read_judgments, read=read_label_studio),
    columns=PEOPLE_COLUMNS,
    example="an export of Label Studio",
    marks=LABEL_STUDIO_MARKS,
    also_marks=LABEL_STUDIO_MIN_MARKS,
)

FORMS = (QRELS, RUN, JSONL, PARQUET, CSV, TSV, OPENSEARCH, RANK_EVAL, QUEPID, RRE, LABEL_STUDIO)
GRADED = tuple(form for form in FORMS if form.has_grades)
"""Those that judgments and labels come in."""
TREC = (QRELS, RUN)
"""Text without names, in which a pair occurs once."""
SHEETS = (CSV, TSV, QUEPID)
"""What a spreadsheet opens."""
TABLE_SUFFIXES = tuple(suffix for form in FORMS if not form.columns for suffix in form.suffixes)
"""Names that end so are tables, whatever lies there."""


def row_text_of(form: Form | None) -> RowText:
    """How messages name a row of such a file: in a sheet as it is shown there, else by its number from 0."""
    return sheet_row if form in SHEETS else numbered_row
