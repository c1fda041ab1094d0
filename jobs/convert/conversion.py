"""Converts a source to TREC, JSON lines or Parquet: reads its pairs, settles duplicates, writes the target."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relabel.jobs.convert.formats import TREC, Format, source_format, target_format
from relabel.jobs.convert.sources import Options, Source, open_source, read_pairs
from relabel.jobs.files import check_free, scratch_folder, written
from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.files import Storage
from relabel.manifests.gold import FIRST_RANK, UNWRITABLE
from relabel.manifests.input_files import reading
from relabel.manifests.process import require

Rule = Literal["error", "first", "mean", "keep"]
TAG = "relabel"
"""The tag of a run file whose source has none."""
SHOWN = 5
BATCH_ROWS, BATCH_BYTES = 1 << 16, 16 << 20
"""Rows of a table that are written at a time, and of about how many bytes where rows are long."""
_TREC_TYPES = {"grade": pa.int32(), "rank": pa.int64(), "score": pa.float64()}
"""What the fields of TREC files are in a table; all others are text."""


@dataclass(frozen=True)
class Conversion:
    """What was converted.

    Args:
        rows: of the source; `written` of them plus `nulls` plus `duplicates` are all.
        nulls: rows without a grade or score, left out.
        quarantined: rows of a run that have no label, and so are no rows of it.
        duplicates: rows beyond the first of their pair, left out; `conflicts` pairs had several values.
        value: the column of grades or scores.
        tag: of a run file; None: that of each row.
    """

    source: str
    source_format: str
    target: str
    target_format: str
    rows: int
    written: int
    nulls: int
    quarantined: int
    duplicates: int
    conflicts: int
    value: str
    tag: str | None
    notes: list[str]


def convert(
    source: str,
    target: str,
    storage: Storage,
    *,
    from_format: str | None = None,
    to_format: str | None = None,
    options: Options,
    duplicates: Rule = "error",
    tag: str | None = None,
    force: bool = False,
) -> Conversion:
    """Convert one file or run into one file, which is there whole or not at all.

    In memory are the ids and values of all rows, and of TREC text and JSON lines the whole source; other columns are
    read and written some rows at a time.

    Raises:
        UsageError: a form is unclear, the target is there already, or options that do not go together.
        InputError: see `open_source` and `read_pairs`, or pairs have several values and `duplicates` is `error`.
        ManifestError: a run is unfinished, over its limit or damaged.
        DiskFullError, StoreError: the target or scratch files can't be written; what was there before stays.
        MissingExtraError: polars is absent.
    """
    form, to = source_format(source, from_format, storage), target_format(target, to_format)
    _check_options(source, form, to, options, duplicates, tag)
    check_free(target, (source,), storage, force=force)
    polars = require("polars", extra="eval", purpose="relabel convert")
    with scratch_folder("relabel-convert-") as folder:
        opened = open_source(source, form, to, options, folder, storage)
        pairs = read_pairs(polars, opened, to)
        valued = pairs.filter(polars.col("value").is_not_null())
        kept, conflicts = _settled(polars, opened, valued, duplicates)
        tag = _tag(opened, tag, has_own="tag" in pairs.columns) if to == "run" else None
        with written(target, storage) as file:
            if to == "qrels":
                iteration = polars.lit("0").alias("iteration")
                _write_lines(kept.select("query_id", iteration, "doc_id", "value"), file)
            elif to == "run":
                _write_lines(_ranked(polars, kept, tag), file)
            else:
                _write_table(polars, opened, kept, to, file, has_means=duplicates == "mean" and conflicts > 0)
    return Conversion(
        source=source,
        source_format=form,
        target=target,
        target_format=to,
        rows=pairs.height,
        written=kept.height,
        nulls=pairs.height - valued.height,
        quarantined=opened.num_quarantined,
        duplicates=valued.height - kept.height,
        conflicts=conflicts,
        value=opened.value,
        tag=tag,
        notes=opened.notes,
    )


def _check_options(source: str, form: Format, to: Format, options: Options, duplicates: Rule, tag: str | None) -> None:
    if options.texts and (form != "labels" or to in TREC):
        raise UsageError(
            f"--texts: {source} is {form}, the target {to}. Texts are joined from a run's output folder (labels), "
            "which knows its input, into a table, .parquet or .jsonl."
        )
    if duplicates == "keep" and to in TREC:
        raise UsageError(f"--duplicates keep: a pair occurs once in a TREC file ({to}). Choose first or mean.")
    if tag is not None and to != "run":
        raise UsageError("--tag: only run files have one.")
    if to == "qrels" and options.score is not None:
        raise UsageError("--score: qrels hold grades. Name their column with --grade, or write a run file.")
    if to == "run" and options.grade is not None:
        raise UsageError(
            "--grade: a run file holds scores. Name their column with --score, which may be one of grades."
        )
    if options.grade is not None and options.score is not None:
        raise UsageError("--grade and --score: rows are kept by one column. Name the one that must not be null.")


def _tag(source: Source, tag: str | None, *, has_own: bool) -> str | None:
    """The tag of all lines; None where rows have their own.

    Raises:
        UsageError: it holds white space.
    """
    if tag is None and has_own:
        return None
    tag = tag or source.run_name or TAG
    if re.search(UNWRITABLE, tag):
        raise UsageError(f"--tag {tag!r}: a field of a run file can't be empty or hold white space.")
    return tag


def _settled(polars: Any, source: Source, rows: Any, rule: Rule) -> tuple[Any, int]:
    """One row a pair, the first, with its value or the mean of the pair's; and how many pairs have several values.

    Raises:
        InputError: pairs have several values and nobody said which counts.
    """
    pair, value = ["query_id", "doc_id"], polars.col("value")
    num_pairs = rows.select(polars.struct(pair).hash().n_unique()).item()  # or more, where hashes collide
    if rule == "keep" or num_pairs == rows.height:
        return rows, 0
    kept = rows.unique(pair, keep="first", maintain_order=True)
    repeated = rows.filter(polars.struct(pair).is_duplicated())
    groups = repeated.group_by(pair, maintain_order=True).agg("value").filter(value.list.n_unique() > 1)
    if groups.height and rule == "error":
        examples = [
            f"query {query}, document {doc}: {', '.join(f'{one:g}' for one in values)}"
            for query, doc, values in groups.head(SHOWN).iter_rows()
        ]
        more = "; …" if groups.height > SHOWN else ""
        raise InputError(
            f"{source.path}: {groups.height:,} pairs have several {source.kind}s that differ ({'; '.join(examples)}"
            f"{more}). Fix the source, or choose: --duplicates first or --duplicates mean; .jsonl and .parquet take "
            "--duplicates keep."
        )
    if groups.height and rule == "mean":
        total, count = value.list.sum(), value.list.len().cast(polars.Int64)
        mean = (2 * total + count) // (2 * count) if source.kind == "grade" else value.list.mean()
        kept = kept.join(groups.select(*pair, mean=mean), on=pair, how="left", maintain_order="left")
        kept = kept.with_columns(value=polars.coalesce("mean", "value")).drop("mean")
    return kept, groups.height


def _ranked(polars: Any, rows: Any, tag: str | None) -> Any:
    """The lines of a run file: queries in the order in which they first come, documents by score. Equal scores are
    ordered by document id, descending by its bytes, which is how trec_eval breaks ties whatever the ranks say.

    Args:
        tag: of every line; None: the rows' own.
    """
    first = polars.col("row").min().over("query_id")
    ranked = rows.sort(first, "value", "doc_id", descending=[False, True, True])
    return ranked.select(
        "query_id",
        polars.lit("Q0").alias("q0"),
        "doc_id",
        polars.int_range(FIRST_RANK, polars.len() + FIRST_RANK).over("query_id").alias("rank"),
        polars.col("value").cast(polars.String),
        polars.col("tag") if tag is None else polars.lit(tag).alias("tag"),
    )


def _write_lines(frame: Any, file: Path) -> None:
    frame.write_csv(file, include_header=False, separator=" ", quote_style="never")


def _write_table(polars: Any, source: Source, kept: Any, target: Format, file: Path, *, has_means: bool) -> None:
    """All columns of the kept rows, in the order of the source."""
    batches = _batches(source, kept, has_means=has_means)
    if target == "jsonl":
        with file.open("wb") as out:
            for batch in batches:
                polars.from_arrow(batch).with_columns(polars.selectors.binary().bin.encode("hex")).write_ndjson(out)
        return
    first = next(batches)
    with pq.ParquetWriter(file, first.schema, compression="zstd") as writer:
        for batch in batches:
            if batch.num_rows:  # readers fail at a row group without rows (datasets 5.2)
                writer.write_table(batch)


def _batches(source: Source, kept: Any, *, has_means: bool) -> Iterator[pa.Table]:
    """The kept rows in tables of one schema, an empty one first."""
    rows, values = kept["row"].to_numpy(), kept["value"].to_arrow()
    with pq.ParquetFile(source.files[0]) as parquet:
        held = parquet.schema_arrow
    schema = pa.schema([held.field(name) for name in source.names], metadata=held.metadata)
    typed, is_read = schema, has_means or source.form in TREC
    if source.form in TREC:
        typed = pa.schema([(name, _TREC_TYPES.get(name, pa.string())) for name in source.names])
    if has_means and source.kind == "score":
        typed = typed.set(typed.get_field_index(source.value), pa.field(source.value, pa.float64()))
    yield typed.empty_table()
    place = 0
    for path in source.files:
        with reading(path), pq.ParquetFile(path, page_checksum_verification=True) as parquet:
            for batch in parquet.iter_batches(batch_size=_batch_rows(parquet.metadata), columns=source.names):
                begin, end = np.searchsorted(rows, [place, place + batch.num_rows])
                table = pa.Table.from_batches([batch]).select(source.names).cast(schema)
                table = table.take(pa.array(rows[begin:end] - place))
                place += batch.num_rows
                if is_read:
                    at = table.column_names.index(source.value)
                    table = table.set_column(
                        at, source.value, values.slice(begin, end - begin).cast(typed.field(at).type)
                    )
                yield table.cast(typed)


def _batch_rows(metadata: pq.FileMetaData) -> int:
    groups = [group for group in map(metadata.row_group, range(metadata.num_row_groups)) if group.num_rows]
    longest = max((group.total_byte_size / group.num_rows for group in groups), default=1.0)
    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(longest, 1))))
