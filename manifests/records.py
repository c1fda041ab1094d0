"""Digests, and records as JSON: every value's type is checked when a file is read."""

import functools
import hashlib
import importlib
import itertools
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from relabel.manifests.errors import ManifestError


def sha256_bytes(data: bytes) -> str:
    """sha256 of bytes, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """sha256 of a local file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_stamp(stat: os.stat_result) -> str:
    """The stamp of a local file. With the time of change, which no program sets: a replacement of equal size and date
    differs in it; and with its device: another disk that is mounted in the same place may give the same numbers.
    """
    return f"{stat.st_dev}-{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}"


def first_changed(folder: Path, digests: Mapping[str, str | None]) -> str | None:
    """Name of the first file that is missing or has not its sha256; one whose digest is None need only be there.

    Raises:
        OSError: one can't be read.
    """
    wanted = ((name, folder / name, digest) for name, digest in digests.items())
    return next(
        (name for name, path, sha in wanted if not path.is_file() or (sha is not None and sha256_file(path) != sha)),
        None,
    )


def difference_text(path: str, before: Any, after: Any) -> str:
    """`engine.seed: was 7, is 8`."""
    return f"{path}: was {json.dumps(before)}, is {json.dumps(after)}"


def differences(was: Any, now: Any) -> Iterator[str]:
    """What differs between two plain values, a phrase each, by the path of keys to it."""
    return itertools.starmap(difference_text, differing(was, now))


def differing(was: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """What differs between two plain values: the path of keys to it, and both."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}):
            yield from differing(was.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif was != now:
        yield path, was, now


def canonical_json(value: Any) -> bytes:
    """One byte string per value: keys sorted, no white space, UTF-8. Raises TypeError for what JSON can't hold,
    ValueError for NaN.
    """
    return json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    ).encode()


def readable_json(value: Any) -> bytes:
    """JSON for files that people open: keys in the order given, indented, a newline at the end; dataclasses within
    become objects.
    """
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False, default=asdict) + "\n").encode()


def digest_of(value: Any) -> str:
    """sha256 of a plain value's canonical JSON."""
    return sha256_bytes(canonical_json(value))


_SEAL = b',\n "sha256": "'
RecordT = TypeVar("RecordT")


LEFT_OUT = {"is_left_out": True}
"""Metadata of a dataclass's field that JSON does without where it is None: `field(default=None, metadata=LEFT_OUT)`."""


_building = threading.RLock()
_read_in_threads: list[Any] = []


def _adapter(kind: Any) -> TypeAdapter[Any]:
    """The check of a kind, built by one thread at a time: pydantic has Python's `ast` read signatures for it, and in
    CPython 3.11 two threads that do so at a time end in a SystemError, "AST constructor recursion depth mismatch"
    (python/cpython#106905).
    """
    with _building:
        return _built_adapter(kind)


@functools.cache
def _built_adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read_in_threads(kind: type[RecordT]) -> type[RecordT]:
    """Class decorator for a record that threads read, see `build_checks`."""
    _read_in_threads.append(kind)
    return kind


def build_checks() -> None:
    """Build the checks of all records that threads read: before threads are started that do so while this one goes on,
    and may itself call `ast`.
    """
    importlib.import_module("numpy.ma")  # pyarrow does at its first array of numpy's, and that calls `ast`, too
    for kind in _read_in_threads:
        _adapter(kind)


def checked(kind: type[RecordT], values: Any) -> RecordT:
    """Build a dataclass, named tuple or typed dict from plain JSON values.

    Raises:
        ValueError: a field is missing, or holds a value of another type (pydantic's ValidationError).
    """
    adapter: TypeAdapter[RecordT] = _adapter(cast("Any", kind))
    return adapter.validate_python(values)


def sealed_json(values: dict[str, Any]) -> bytes:
    """A record's plain values as readable JSON whose last key, `sha256`, is the digest of all bytes before it."""
    body = readable_json(values).removesuffix(b"\n}\n")
    return body + _SEAL + sha256_bytes(body).encode() + b'"\n}\n'


def unsealed(data: bytes) -> Any:
    """The plain JSON values of a record, without its digest; an earlier relabel wrote none.

    Raises:
        ValueError: the bytes are no JSON, or not those that were written.
    """
    held = json.loads(data)
    last = list(held.items())[-1:] if isinstance(held, dict) else []
    if any(key == "sha256" or re.fullmatch("[0-9a-f]{64}", str(value)) for key, value in last):
        body, _, seal = data.rpartition(_SEAL)
        if seal != sha256_bytes(body).encode() + b'"\n}\n':
            raise ValueError("it changed since it was written: its bytes have another sha256 than it states")
        del held["sha256"]
    return held


def read_record(
    kind: type[RecordT],
    held: Any,
    where: str,
    what: str,
    advice: str,
    *,
    version: int | None = None,
    check: Callable[[RecordT], None] | None = None,
) -> RecordT:
    """`checked`, with a message that reports what is wrong and what to do.

    Args:
        held: plain JSON values, or a file's bytes.
        where: the file.
        what: it then is: `not a plan`.
        version: that the record must state; None for one that states none.
        check: raises ValueError for values that do not go together.
    Raises:
        ManifestError: the bytes are no JSON, or the values no such record.
    """
    try:
        values = unsealed(held) if isinstance(held, bytes) else held
        if version is not None and version_of(values) != version:
            raise ValueError(f"written as version {version_of(values)}; this relabel reads {version}")
        record = checked(kind, values)
        if check is not None:
            check(record)
    except ValueError as exc:
        raise ManifestError(f"{where}: {what} ({fault_of(exc)}). {advice}") from exc
    return record


def version_of(values: Any) -> int:
    """The `version` that plain JSON values state, whatever else they hold.

    Raises:
        ValueError: they state none.
    """
    version = values.get("version") if isinstance(values, dict) else None
    if type(version) is not int:
        raise ValueError("`version` is missing")
    return version


def plain(record: Any) -> Any:
    """A record as JSON holds it, the inverse of `checked`: dataclasses and named tuples become objects, at any depth,
    fields in order. A name that Python keeps for itself has an underscore after it here (`from_`), and none in JSON;
    one that is no name in Python has an alias (`Annotated[…, Field(alias="ndcg@10")]`).
    """
    if is_dataclass(record):
        aliases = _aliases(cast("type", type(record)))
        values = {}
        for field in fields(record):
            value = getattr(record, field.name)
            if value is None and field.metadata.get("is_left_out"):
                continue
            key = aliases.get(field.name, field.name.removesuffix("_"))
            values[key] = plain(value)
        return values
    if isinstance(record, dict):
        return {key: plain(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        items = [plain(item) for item in record]
        names = getattr(record, "_fields", None)
        return items if names is None else dict(zip(names, items, strict=True))
    return record


def fields_of(record: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, as they are. `asdict` copies all that is in them, which was a seventh of a
    chunk's commit.
    """
    return {field.name: getattr(record, field.name) for field in fields(record)}


def as_object(record: Any) -> dict[str, Any]:
    """`plain` of a dataclass: a JSON object."""
    values: dict[str, Any] = plain(record)
    return values


@functools.cache
def _aliases(kind: Any) -> dict[str, str]:
    """Keys in JSON of those fields that have an alias."""
    if not any("alias=" in str(field.type) for field in fields(kind)):
        return {}  # types that are known to the type checker alone can't be resolved, and need not be
    hints = get_type_hints(kind, include_extras=True)
    aliases = {}
    for name, hint in hints.items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, FieldInfo) and note.alias:
                aliases[name] = note.alias
    return aliases


def fault_of(error: Exception) -> str:
    """What is wrong with a record, in a few words."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"`{'.'.join(map(str, first['loc']))}`: {first['msg']}"
    return str(error)


@read_in_threads
@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch, written before it is handed over, and once more with the provider's name for it.

    Args:
        name: drawn for it; the provider keeps it in the batch's metadata.
        asks: what names each of its asks, from what is asked and its seed alone.
        batch: the provider's own name; empty until it was handed over.
        created: when, in seconds since 1970; of two that hold an ask the later one is read first.
        file: the provider's name for the file of its requests; empty until that was uploaded.
        reply: the beginning of what the provider answered, of a batch that it took and did not name.
        unread: what names those of its requests, whatever their seed, of which an earlier batch gave nothing that could
            be read, though it did of others.
        is_read: what came of it was read once, for those that ask what the provider still has.
    """

    name: str
    asks: list[str]
    created: float
    batch: str = ""
    file: str = ""
    reply: str = ""
    unread: list[str] = field(default_factory=list)
    is_read: bool = False
    version: int = field(default=1)

    @property
    def is_out(self) -> bool:
        """Whether it may have been handed over, and nothing of it was read."""
        return bool(self.file or self.batch) and not self.is_read


class BatchRecords(Protocol):
    """Where records are kept."""

    def load(self) -> list[BatchRecord]:
        """All that are there, those of other workers too."""

    def keep(self, record: BatchRecord) -> None:
        """Make one durable, in place of an earlier one of its name."""
