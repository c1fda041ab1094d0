"""File formats of `relabel convert`: which one a source or target has, and TREC text and JSON lines as frames."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast, get_args

from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.gold import EXAMPLES, FIELD
from relabel.manifests.input_files import PARQUET_SUFFIXES
from relabel.manifests.label_sets import is_run
from relabel.manifests.plan import PLAN_NAME, ROUNDS_NAME
from relabel.manifests.secrets import shortened
from relabel.manifests.tables import JSON_SUFFIXES

Format = Literal["labels", "qrels", "run", "jsonl", "parquet"]
SOURCES: tuple[str, ...] = get_args(Format)
TARGETS: tuple[str, ...] = SOURCES[1:]
TREC: tuple[Format, ...] = ("qrels", "run")
"""Text forms, in which a pair occurs once."""
SUFFIXES: dict[str, Format] = {
    **dict.fromkeys(PARQUET_SUFFIXES, "parquet"),
    **dict.fromkeys(JSON_SUFFIXES, "jsonl"),
    ".qrels": "qrels",
    ".qrel": "qrels",
    ".run": "run",
}
SHOWN_CHARACTERS = 80
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*(?:\\u[dD][89abAB]\w\w(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]\w\w)\\u[dD][c-fC-F]\w\w)"
)


def source_format(path: str, named: str | None, storage: Storage) -> Format:
    """The form of a source: as named, else by its suffix; a folder with a plan is a run's labels.

    Raises:
        UsageError: the form is unclear.
    """
    if named is not None:
        return cast("Format", named)
    found = SUFFIXES.get(PurePosixPath(path).suffix.lower())
    if not is_url(path) and Path(path).is_dir():  # Spark writes folders named like files
        is_labels = any(Path(path, name).exists() for name in (PLAN_NAME, ROUNDS_NAME))  # who reads it refuses rounds
        return "labels" if found is None or is_labels else found
    if found is None and is_run(path, storage):
        return "labels"
    return found or _unclear(path, "--from", SOURCES)


def target_format(path: str, named: str | None) -> Format:
    """The form of a target: as named, else by its suffix.

    Raises:
        UsageError: the form is unclear.
    """
    if named is not None:
        return cast("Format", named)
    return SUFFIXES.get(PurePosixPath(path).suffix.lower()) or _unclear(path, "--to", TARGETS)


def _unclear(path: str, option: str, known: tuple[str, ...]) -> Format:
    suffixes = ", ".join(f"{suffix} ({form})" for suffix, form in SUFFIXES.items())
    raise UsageError(
        f"{path}: its form is not clear from its name. Name it with {option} {'|'.join(known)}; known suffixes are "
        f"{suffixes}."
    )


def trec_frame(polars: Any, data: bytes, columns: tuple[str, ...], *, path: str) -> Any:
    """TREC text as a frame of texts, with the line of each row in `line`; blank lines are passed over.

    Lines end at `\\n` alone, since ids hold other line-like characters; a `\\r` before it is white space.

    Raises:
        InputError: a line has another number of fields, or is no UTF-8.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data[: exc.start].count(b"\n") + 1
        raise InputError(f"{path}: line {line} is not UTF-8 ({exc.reason}). Save the file as UTF-8.") from exc
    lines = polars.DataFrame({"text": text.split("\n")}).with_row_index("line", 1)
    rows = lines.select(polars.col("line").cast(polars.Int64), "text", fields=polars.col("text").str.extract_all(FIELD))
    rows = rows.filter(polars.col("fields").list.len() > 0)
    odd = rows.filter(polars.col("fields").list.len() != len(columns)).head(1)
    if odd.height:
        line, content, fields = odd.select("line", "text", "fields").row(0)
        raise InputError(
            f"{path}: line {line} has {len(fields)} fields, {EXAMPLES[columns]} has {len(columns)}: "
            f"{content.strip()[:SHOWN_CHARACTERS]!r}. Fix the line, or say with --from what the file is."
        )
    return rows.select(
        "line", *(polars.col("fields").list.get(place).alias(name) for place, name in enumerate(columns))
    )


def json_frame(polars: Any, data: bytes, texts: Mapping[str, Any], *, path: str, others: bool) -> Any:
    """JSON lines as a frame.

    Args:
        texts: columns that are read as text whatever they hold; null where a line lacks them.
        others: whether all other columns are read too.
    Raises:
        InputError: a line is not a JSON object, its text can't be held as UTF-8, or values of a column differ in kind.
    """
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        return polars.DataFrame(schema=dict(texts))
    if lone := _LONE_SURROGATE.search(data):  # polars reads it as NUL, so that two different ids could become one
        line = data[: lone.start()].count(b"\n") + 1
        raise InputError(f"{path}: line {line} holds half of a surrogate pair, which is not a character. Fix its text.")
    try:
        schema = dict(texts)
        if others:
            found = polars.read_ndjson(data, infer_schema_length=None).schema
            schema = {**found, **{name: kind for name, kind in texts.items() if name in found}}
        frame = polars.read_ndjson(data, schema=schema)
    except polars.exceptions.PolarsError as exc:
        for number, text in enumerate(data.split(b"\n"), start=1):
            try:
                is_object = not text.strip() or isinstance(json.loads(text), dict)
            except ValueError as fault:
                raise InputError(f"{path}: line {number} is not JSON ({fault}). Write one object a line.") from exc
            if not is_object:
                raise InputError(f"{path}: line {number} holds no object. Write one object a line.") from exc
        raise InputError(f"{path}: can't be read as one table: {shortened(str(exc).splitlines()[0], 200)}.") from exc
    for name, kind in frame.schema.items():
        if "Int128" in str(kind):  # also of an item or a field
            raise InputError(f"{path}: column `{name}` holds whole numbers beyond 64 bits. Write them as text.")
    return frame
