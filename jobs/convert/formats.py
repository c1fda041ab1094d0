"""File formats of `relabel convert`, and parsers that read TREC and JSON lines in blocks of bounded size."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, NamedTuple, cast, get_args

from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.gold import EXAMPLES, FIELD
from relabel.manifests.input_files import PARQUET_SUFFIXES, reading
from relabel.manifests.label_sets import is_run
from relabel.manifests.plan import PLAN_NAME, ROUNDS_NAME
from relabel.manifests.secrets import shortened
from relabel.manifests.store import UrlFile
from relabel.manifests.tables import JSON_SUFFIXES

# ------------------------------------------------------------------------------
# Which form a source has and a target gets: by its suffix where that is clear, else as named.


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


def source_format(path: str, named: str | None, storage: Storage) -> Format:
    """The form of a source.

    Raises:
        UsageError: nothing tells, or a folder holds tables where its name says that it is a run's output.
    """
    found = SUFFIXES.get(PurePosixPath(path).suffix.lower())
    if named is not None:
        return _format_of(named)
    if not is_url(path) and Path(path).is_dir():  # Spark writes folders named like files
        is_labels = any(Path(path, name).exists() for name in (PLAN_NAME, ROUNDS_NAME))  # who reads it refuses rounds
        if found is None and not is_labels and _holds_parquet(Path(path)):
            raise UsageError(
                f"{path}: a folder of Parquet files without {PLAN_NAME}, so no run's output. Say what it is: --from "
                "parquet."
            )
        return "labels" if found is None or is_labels else found
    if found is None and is_run(path, storage):
        return "labels"
    return found or _unclear(path, "--from", SOURCES)


def _holds_parquet(folder: Path) -> bool:
    return any(file.suffix.lower() in PARQUET_SUFFIXES for file in folder.rglob("*"))


def target_format(path: str, named: str | None) -> Format:
    """The form of a target.

    Raises:
        UsageError: nothing tells.
    """
    if named is not None:
        return _format_of(named)
    return SUFFIXES.get(PurePosixPath(path).suffix.lower()) or _unclear(path, "--to", TARGETS)


def _format_of(named: str) -> Format:
    return next(name for name in get_args(Format) if name == named)


def _unclear(path: str, option: str, known: tuple[str, ...]) -> Format:
    suffixes = ", ".join(f"{suffix} ({form})" for suffix, form in SUFFIXES.items())
    raise UsageError(
        f"{path}: its name does not tell its form. Say so with {option} {'|'.join(known)}; known suffixes are "
        f"{suffixes}."
    )


# ------------------------------------------------------------------------------
# Text files in blocks of whole lines, and blocks as frames, so that memory does not grow with the file.
#
# Lines end at `\n` alone, since ids and texts hold other line-like characters; a `\r` before it is white space. Numbers
# in messages count from 1, as editors do.


BLOCK_BYTES = 4 << 20
_MARK = b"\xef\xbb\xbf"
SHOWN_CHARACTERS = 80


class Block(NamedTuple):
    """Some whole lines, and the number of the first."""

    first: int
    data: bytes


def blocks(path: str, storage: Storage) -> Iterator[Block]:
    """The file, local or by URL, in blocks; a mark of byte order at its beginning is passed over.

    Raises:
        InputError: it can't be read.
    """
    with reading(path):
        if not is_url(path) and Path(path).is_dir():
            raise InputError(f"{path}: a folder; one file is wanted.")
        opened = cast("BinaryIO", UrlFile(path, storage)) if is_url(path) else Path(path).open("rb")  # noqa: SIM115 (closed below)
        with opened as file:
            first, rest = 1, b""
            is_begun = False
            while data := file.read(BLOCK_BYTES):
                data = data if is_begun else data.removeprefix(_MARK)
                is_begun = True
                whole, newline, after = data.rpartition(b"\n")
                if not newline:
                    rest += after
                    continue
                yield Block(first, rest + whole + newline)
                first += whole.count(b"\n") + 1
                rest = after
            if rest:
                yield Block(first, rest)


def trec_frame(polars: Any, block: Block, columns: tuple[str, ...], *, path: str) -> Any:
    """A block of TREC text as a frame of texts, with the line of each row in `line`; blank lines are passed over.

    Raises:
        InputError: a line has another number of fields, or is no UTF-8.
    """
    try:
        text = block.data.decode()
    except UnicodeDecodeError as exc:
        line = block.first + block.data[: exc.start].count(b"\n")
        raise InputError(f"{path}: line {line} is not UTF-8 ({exc.reason}). Save the file as UTF-8.") from exc
    lines = polars.DataFrame({"text": text.split("\n")}).with_row_index("line", block.first)
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


# ------------------------------------------------------------------------------
# Blocks of JSON lines as frames.


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
EXACT = 2**53
"""Up to this size a float holds every integer (IEEE 754, binary64)."""


def json_frame(polars: Any, block: Block, schema: Mapping[str, Any] | None, *, path: str) -> Any:
    """A block of JSONL as a frame.

    Args:
        schema: columns to read, and as what; all, as they come, if None.
    Raises:
        InputError: a line is not a JSON object, or its text can't be held as UTF-8.
    """
    if _SURROGATE.search(block.data):  # polars reads half of a pair as NUL, so that two different ids could become one
        for _ in _objects(block, path):
            pass
    if not block.data.strip():
        return polars.DataFrame(schema=dict(schema or {}))
    try:
        if schema is None:
            return polars.read_ndjson(io.BytesIO(block.data), infer_schema_length=None)
        return polars.read_ndjson(io.BytesIO(block.data), schema=dict(schema))
    except polars.exceptions.PolarsError as exc:
        _check_kinds(block, path)
        last = block.first + block.data.rstrip().count(b"\n")
        raise InputError(
            f"{path}: lines {block.first} to {last} can't be read: {shortened(str(exc).splitlines()[0], 200)}."
        ) from exc


def json_names(polars: Any, block: Block, *, path: str) -> list[str]:
    """The keys of a block of JSONL, whatever its values are.

    Raises:
        InputError: a line is not a JSON object.
    """
    if not block.data.strip():
        return []
    try:
        return list(polars.read_ndjson(io.BytesIO(block.data), infer_schema_length=None).columns)
    except polars.exceptions.PolarsError:  # also for kinds of values that can't be in one column
        return list(dict.fromkeys(name for _, row in _objects(block, path) for name in row))


def _objects(block: Block, path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a block with their lines; raises for the first line that is none."""
    for number, line in enumerate(block.data.split(b"\n"), start=block.first):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=_refuse)
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as exc:
            raise InputError(
                f"{path}: line {number} holds half of a surrogate pair, which is not a character. Fix its text."
            ) from exc
        except ValueError as exc:
            raise InputError(f"{path}: line {number} is not JSON ({exc}). One object a line is wanted.") from exc
        if not isinstance(row, dict):
            raise InputError(f"{path}: line {number} holds no object. One object a line is wanted.")
        yield number, row


def _check_kinds(block: Block, path: str) -> None:
    """Raise for the first line that is not a JSON object, or else holds another kind of value than a line before it. A
    column that holds text may hold any kind.
    """
    seen: dict[str, tuple[int, str]] = {}
    odd: dict[str, str] = {}
    with_text = set()
    for number, row in _objects(block, path):
        for name, value in row.items():
            if isinstance(value, str):
                with_text.add(name)
            elif value is not None and name not in odd:
                line, before = seen.setdefault(name, (number, _kind(value)))
                if _kind(value) != before:
                    shown = json.dumps(value, ensure_ascii=False)[:SHOWN_CHARACTERS]
                    odd[name] = f"line {number}: `{name}` is {shown}, {_kind(value)}, and {before} before (line {line})"
    for name, problem in odd.items():
        if name not in with_text:
            raise InputError(f"{path}: {problem}. Give a column values of one kind, or write them as text.")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    return "a number" if isinstance(value, int | float) else "a list" if isinstance(value, list) else "an object"


def refuse_rounded(polars: Any, frame: Any, block: Block, *, path: str) -> None:
    """Raise where an integer was read as another one, since its column also holds fractions.

    Args:
        frame: of the block.
    Raises:
        InputError: names the first.
    """
    names = [name for name, kind in frame.schema.items() if kind == polars.Float64]
    if not names or not frame.select(polars.any_horizontal((polars.col(names).abs() >= EXACT).any())).item():
        return
    for number, row in _objects(block, path):
        for name in names:
            value = row.get(name)
            if type(value) is int and int(float(value)) != value:
                raise InputError(
                    f"{path}: line {number}: `{name}` is {value}, in a column that also holds fractions, where it "
                    f"would become {int(float(value))}. Write the column's values as text, or fractions in a column "
                    "of their own."
                )


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value; a missing number is null")


def merged_schema(polars: Any, first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of both, each of a type that holds what either holds; text where nothing else does."""
    found = dict(first)
    for name, kind in second.items():
        found[name] = merged_type(polars, found[name], kind) if name in found else kind
    return found


def merged_type(polars: Any, first: Any, second: Any) -> Any:
    """The type that holds what either holds."""
    if first == second or second == polars.Null:
        return first
    if first == polars.Null:
        return second
    if isinstance(first, polars.List) and isinstance(second, polars.List):
        return polars.List(merged_type(polars, first.inner, second.inner))
    if isinstance(first, polars.Struct) and isinstance(second, polars.Struct):
        fields = merged_schema(polars, dict(first), dict(second))
        return polars.Struct(fields)
    if first.is_numeric() and second.is_numeric():
        return polars.Float64
    return polars.String
