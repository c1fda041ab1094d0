"""One conversion from end to end: read the source once, check it, settle its duplicates, write the target."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relabel.jobs.convert.duplicates import Duplicates, Rule
from relabel.jobs.convert.formats import TREC, Format, source_format, target_format
from relabel.jobs.convert.rows import CheckedRows, checked_rows
from relabel.jobs.convert.sources import Options, Source, open_source
from relabel.jobs.convert.targets import write_qrels, write_run, write_table
from relabel.jobs.files.durable_files import check_free, written
from relabel.jobs.files.query_buckets import query_buckets
from relabel.jobs.files.scratch import scratch_folder
from relabel.manifests.errors import UsageError
from relabel.manifests.extras import require
from relabel.manifests.judging.trec import UNWRITABLE
from relabel.manifests.metrics.agreement import EXTRA
from relabel.manifests.storage.context import Storage

TAG = "relabel"
"""The tag of a run file whose source has none."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion came to.

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

    Raises:
        UsageError: nothing tells a form, the target is there already, or options that do not go together.
        InputError: see `open_source`, `checked_rows` and `Duplicates`.
        ManifestError: a run is unfinished, over its limit or damaged.
        DiskFullError, StoreError: the target or scratch files can't be written; what was there before stays.
        MissingExtraError: polars is absent.
    """
    form, to = source_format(source, from_format, storage), target_format(target, to_format)
    _check_options(source, form, to, options, duplicates, tag)
    check_free(target, (source,), storage, force=force)
    polars = require("polars", extra=EXTRA, purpose="relabel convert")
    with scratch_folder("relabel-convert-") as folder:
        opened = open_source(polars, source, form, to, options, folder, storage)
        rows = checked_rows(polars, opened, to, folder)
        found = Duplicates(polars, duplicates, opened.kind)
        tag = _tag(rows, opened, tag) if to == "run" else None
        ranked = _settled(polars, opened, rows, found, to, folder)
        with written(target, storage) as file:
            count = _write(polars, opened, rows, found, ranked, to, tag, file)
    return Conversion(
        source,
        form,
        target,
        to,
        rows.total,
        count,
        rows.nulls,
        opened.num_quarantined,
        found.num_dropped,
        found.num_conflicts,
        opened.value,
        tag,
        opened.notes,
    )


def _settled(
    polars: Any, source: Source, rows: CheckedRows, duplicates: Duplicates, to: Format, scratch: Path
) -> Iterator[Any]:
    """Settle duplicates: for a run file bucket by bucket as they are asked for, else all at once. All that goes to
    scratch files is there when this returns, so that a full disk is reported for the folder that it holds.
    """
    settled = map(
        duplicates.settle,
        query_buckets(polars, (rows.file,), lambda frame, _: rows.kept(polars, frame), scratch / "buckets"),
    )
    if to == "run":
        return _begun(settled)
    if duplicates.rule != "keep":
        for _ in settled:
            pass
        duplicates.refuse_conflicts(source.path)
    return iter(())


def _begun(buckets: Iterator[Any]) -> Iterator[Any]:
    """The same, with the first already asked for, before which all of them are written to their files."""
    first = next(buckets, None)
    return buckets if first is None else itertools.chain([first], buckets)


def _write(
    polars: Any,
    source: Source,
    rows: CheckedRows,
    duplicates: Duplicates,
    ranked: Iterator[Any],
    to: Format,
    tag: str | None,
    file: Path,
) -> int:
    """Write; conflicts are refused before the file gets its name."""
    if to == "run":
        count = write_run(polars, ranked, tag, file)
        duplicates.refuse_conflicts(source.path)
        return count
    if to == "qrels":
        return write_qrels(polars, rows, duplicates, file)
    return write_table(polars, source, duplicates, to, file)


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


def _tag(rows: CheckedRows, source: Source, tag: str | None) -> str | None:
    """The tag of all lines; None where rows have their own.

    Raises:
        UsageError: it would fall apart.
    """
    if tag is None and rows.has_tag:
        return None
    tag = tag or source.run_name or TAG
    if re.search(UNWRITABLE, tag):
        raise UsageError(f"--tag {tag!r}: a field of a run file can't be empty or hold white space.")
    return tag
