"""The data behind a figure or table, as a CSV file that lies inside the page: a `data:` link, so that it works without
a network.
"""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from relabel.manifests.secrets.redaction import redacted

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True)
class Download:
    """A file to save.

    Args:
        name: what it will be called.
        href: a `data:` URI.
        rows: of data, the head not counted.
    """

    name: str
    href: str
    rows: int


def csv_download(stem: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Download:
    """Rows as CSV, UTF-8.

    Text that a spreadsheet would take for a formula gets an apostrophe before it: a document's text must not run
    anywhere.

    Args:
        stem: the file's name without `.csv`; what no file name should hold becomes a hyphen.
    """
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(head)
    count = 0
    for row in rows:
        writer.writerow([_plain(redacted(value) if isinstance(value, str) else value) for value in row])
        count += 1
    data = base64.b64encode(sink.getvalue().encode("utf-8", "replace")).decode()
    # markup: base64 of what was redacted above, which must reach the page as it is
    return Download(f"{file_stem(stem)}.csv", Markup(f"data:text/csv;charset=utf-8;base64,{data}"), count)


def file_stem(text: str) -> str:
    """A part of a file name that any system takes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:80] or "data"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return "" if value is None else value
