"""The rows of a source as (query, document, grade or score), checked: what can't be read or written is reported, nulls
are counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from relabel.jobs.convert.formats import TREC, Format
from relabel.jobs.convert.sources import Source
from relabel.jobs.files.scratch import spilling
from relabel.jobs.files.tables import translate_polars_errors
from relabel.manifests.errors import InputError
from relabel.manifests.judging.trec import BEYOND_GRADES, EXAMPLES, QRELS_COLUMNS, RUN_COLUMNS, UNWRITABLE, WHOLE

SHOWN_CHARACTERS = 60
ROW_GROUP_ROWS = 1 << 16
"""Of the scratch file; several are in the making at a time, and polars' own size, four times this, took 100 MB more."""


class CheckedRows(NamedTuple):
    """Checked rows.

    Args:
        file: Parquet with `row` (position in the source), `query_id` and `doc_id` (text), `value`, and `tag` where the
            source has one.
        has_tag: it has.
        total: rows of the source.
        nulls: rows without a value, left out.
    """

    file: Path
    has_tag: bool
    total: int
    nulls: int

    def kept(self, polars: Any, frame: Any) -> Any:
        """Of a frame of the file, lazy or not, the rows that have a value."""
        return frame.filter(polars.col("value").is_not_null()).drop("at", "odd")

    def scan(self, polars: Any) -> Any:
        """The rows that have a value, in order, as a lazy frame."""
        return self.kept(polars, polars.scan_parquet(self.file, glob=False))


def checked_rows(polars: Any, source: Source, target: Format, scratch: Path) -> CheckedRows:
    """Read and check the columns that a conversion turns on, once; they lie in a scratch file from then on.

    Raises:
        InputError: names the first row whose value is not a number (for qrels: no whole one), or whose id is missing or
            can't be in TREC; or a column of ids that would not be written as what they are.
    """
    file = scratch / "rows.parquet"
    frame = source.scan(polars)
    schema = frame.collect_schema()
    value, is_odd = value_of(polars, source, schema[source.value], target)
    index = _free_name(schema)
    shown = polars.col(source.value).cast(polars.String, strict=False).str.slice(0, SHOWN_CHARACTERS)
    wanted = frame.with_row_index(index).select(
        row=polars.col(index).cast(polars.Int64),
        at=polars.col(source.row_column or index).cast(polars.Int64),
        query_id=polars.col(source.by).cast(polars.String),
        doc_id=polars.col(source.doc).cast(polars.String),
        value=value,
        odd=polars.when(is_odd).then(shown) if not isinstance(is_odd, bool) else polars.lit(None, polars.String),
        **({"tag": polars.col("tag")} if target == "run" and schema.get("tag") == polars.String else {}),
    )
    with translate_polars_errors(source.path), spilling(polars):
        wanted.sink_parquet(file, row_group_size=ROW_GROUP_ROWS)
    found = polars.scan_parquet(file, glob=False)
    _check(polars, found, source, target)
    total, with_value = (
        found.select(polars.len(), polars.col("value").count().alias("kept")).collect(engine="streaming").row(0)
    )
    return CheckedRows(file, "tag" in found.collect_schema(), total, total - with_value)


def _free_name(taken: Any) -> str:
    """A name that no column has."""
    name = "__row"
    while name in taken:
        name += "_"
    return name


def _is_whole(source: Source, target: Format) -> bool:
    return target == "qrels" or (source.form == "qrels" and source.kind == "grade")


def value_of(polars: Any, source: Source, kind: Any, target: Format) -> tuple[Any, Any]:
    """The value as a number, null where it is null, NaN or blank; and which values are no such number.

    Raises:
        InputError: the column holds something that can't be one.
    """
    column = polars.col(source.value)
    is_whole = _is_whole(source, target)
    if kind in (polars.String, polars.Categorical) or isinstance(kind, polars.Enum):
        text = column.cast(polars.String).str.strip_chars()
        text = polars.when(text != "").then(text)
        if is_whole:
            return polars.when(text.str.contains(WHOLE)).then(text).cast(polars.Float64).cast(
                polars.Int64
            ), ~text.str.contains(WHOLE)
        number = text.cast(polars.Float64, strict=False)
        return polars.when(number.is_finite()).then(number), text.is_not_null() & ~number.is_finite().fill_null(
            value=False
        )
    if kind == polars.Null:
        return column.cast(polars.Int64 if is_whole else polars.Float64), False
    if kind.is_integer():
        if source.kind == "score":  # a mean of whole scores has a fraction
            return column.cast(polars.Float64), False
        number = column.cast(polars.Int64, strict=False)
        is_odd = number.is_null()
        if is_whole:
            is_odd |= (number >= BEYOND_GRADES) | (number <= -BEYOND_GRADES)
        return number, column.is_not_null() & is_odd
    if kind.is_float() or kind.is_decimal():
        number = column if kind in (polars.Float32, polars.Float64) else column.cast(polars.Float64)
        number = number.fill_nan(None)
        if not is_whole:
            return number, number.is_infinite()
        is_odd = number.is_infinite() | (number != number.floor()) | (number.abs() >= BEYOND_GRADES)
        return polars.when(~is_odd).then(number).cast(polars.Int64), is_odd
    raise InputError(
        f"{source.path}: column `{source.value}` holds {kind}; a number is wanted. Name another with --{source.kind}."
    )


def _check(polars: Any, found: Any, source: Source, target: Format) -> None:
    kept = polars.col("value").is_not_null()
    trec = f"{EXAMPLES[QRELS_COLUMNS if target == 'qrels' else RUN_COLUMNS]}: fields end at white space"
    is_text = target in TREC
    number = "whole number of at most 9 digits, as qrels want it" if _is_whole(source, target) else "number"
    advice = {
        "odd": f"is not a {number}. Name another column with --{source.kind}, or leave it empty",
        "query_id": "Give every row one, or leave the row out",
        "doc_id": "Give every row one, or leave the row out",
    }
    faults = {"odd": polars.col("odd").is_not_null()}
    faults |= {name: kept & polars.col(name).is_null() for name in ("query_id", "doc_id")}
    texts = ["query_id", "doc_id", *(["tag"] if "tag" in found.collect_schema() else [])] if is_text else []
    faults |= {f"{name} text": kept & polars.col(name).str.contains(UNWRITABLE) for name in texts}
    row = found.select(
        *(fault.fill_null(value=False).sum().alias(f"{name} count") for name, fault in faults.items()),
        *(polars.col("row").filter(fault.fill_null(value=False)).min().alias(name) for name, fault in faults.items()),
    )
    counted = row.collect(engine="streaming").row(0, named=True)
    fault = next((name for name in faults if counted[f"{name} count"]), None)
    if fault is None:
        return
    count = counted[f"{fault} count"]
    held = found.filter(polars.col("row") == counted[fault]).collect(engine="streaming").row(0, named=True)
    where = f"{source.path}: {source.row_column or 'row'} {held['at']}"
    others = f" ({count:,} such rows)" if count > 1 else ""
    if fault in ("query_id", "doc_id"):
        column = source.by if fault == "query_id" else source.doc
        raise InputError(f"{where} has no `{column}`{others}. {advice[fault]}.")
    if fault == "odd":
        raise InputError(f"{where}: {source.value} {held['odd']!r} {advice['odd']}{others}.")
    name = fault.split()[0]
    column = {"query_id": source.by, "doc_id": source.doc}.get(name, name)
    raise InputError(
        f"{where}: `{column}` is {held[name][:SHOWN_CHARACTERS]!r}{others}, which a TREC file can't hold ({trec}). "
        "Write it otherwise in the source, in all files that name it, or convert to .jsonl or .parquet."
    )
