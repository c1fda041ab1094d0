"""Text files in blocks of whole lines, and blocks as frames, so that memory does not grow with the file.

Lines end at `\\n` alone, since ids and texts hold other line-like characters; a `\\r` before it is white space. Numbers
in messages count from 1, as editors do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from relabel.manifests.errors import InputError
from relabel.manifests.inputs.input_faults import reading
from relabel.manifests.judging.trec import EXAMPLES, FIELD
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import is_url
from relabel.manifests.storage.url_files import UrlFile

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
