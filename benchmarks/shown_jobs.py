"""What the shows have in common: pairs, a place on S3 or on disk, relabel's commands as processes, and a check that
uses none of relabel.

The shows are whole jobs with everything real but the model: `show_crashes.py`, `show_day.py`, `show_million.py`.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

COLUMNS = ("query_id", "query", "doc_id", "title", "body")


class Place(NamedTuple):
    """Where a show's files lie.

    Args:
        root: a folder, or a URL.
        variables: what a process needs to get there.
    """

    root: str
    variables: dict[str, str]

    def filesystem(self) -> tuple[Any, str]:
        """pyarrow's own filesystem for it, and the root as that one writes it."""
        from pyarrow import fs

        if not self.root.startswith("s3://"):
            return fs.LocalFileSystem(), self.root
        access, secret, endpoint = (
            self.variables[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL_S3")
        )
        found = fs.S3FileSystem(
            access_key=access,
            secret_key=secret,
            endpoint_override=endpoint.removeprefix("http://"),
            scheme="http",
            region="us-east-1",
        )
        return found, self.root.removeprefix("s3://")


@contextlib.contextmanager
def seaweed_place(folder: Path) -> Iterator[Place]:
    """A bucket of a SeaweedFS of its own, gone on leaving."""
    from tests import seaweed

    folder.mkdir(parents=True)
    with seaweed.serving(folder) as server:
        yield Place(f"s3://{seaweed.BUCKET}", server.environment)


class Ended(NamedTuple):
    """A command that has ended.

    Args:
        said: its one JSON object.
        peak_mb: peak resident memory of the process. The kernel counts from the memory of its parent, so keep
            that one small.
    """

    code: int
    said: dict[str, Any]
    seconds: float
    peak_mb: float


def relabel(*arguments: str | Path) -> list[str]:
    """The command line of a `relabel` of this environment."""
    return [sys.executable, "-P", "-m", "relabel", *map(str, arguments), "--output", "json"]


def call(*arguments: str | Path, place: Place, codes: Sequence[int] = (0,)) -> Ended:
    """Run a command to its end.

    Raises:
        RuntimeError: it ended with none of these codes.
    """
    started = time.perf_counter()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            relabel(*arguments), env={**os.environ, **place.variables}, stdout=out, stderr=errors
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - started
        said, words = read_back(out), read_back(errors)
    if code not in codes:
        raise RuntimeError(f"relabel {' '.join(map(str, arguments))} ended with {code}: {words[-3000:]}")
    return Ended(code, json.loads(said), seconds, usage.ru_maxrss / 1024)


def read_back(file: IO[bytes]) -> str:
    """All that was written to a temporary file."""
    file.seek(0)
    return file.read().decode(errors="replace")


def repeated_pairs(paths: Sequence[Path], rows: int) -> Any:
    """The rows of some Parquet files over and over, as one table: what the files hold once is there several times,
    which is legal.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for path in paths:
        table = pq.read_table(path)
        none = pa.nulls(table.num_rows, pa.string())
        columns = {name: table[name].cast(pa.string()) if name in table.column_names else none for name in COLUMNS}
        columns["query_id"] = pa.array([f"{path.parent.name}-{one}" for one in columns["query_id"].to_pylist()])
        tables.append(pa.table(columns))
    once = pa.concat_tables(tables)
    times = -(-rows // once.num_rows)
    return pa.concat_tables([once] * times).slice(0, rows)


def write_parts(table: Any, place: Place, name: str, *, parts: int) -> None:
    """Write a table as `<root>/<name>/part-00.parquet` and so on."""
    import pyarrow.parquet as pq

    filesystem, root = place.filesystem()
    filesystem.create_dir(f"{root}/{name}")
    each = -(-table.num_rows // parts)
    for number in range(parts):
        pq.write_table(
            table.slice(number * each, each), f"{root}/{name}/part-{number:02d}.parquet", filesystem=filesystem
        )


class Committed(NamedTuple):
    """A finished output as pyarrow alone reads it.

    Args:
        files: names (they hold a digest of the bytes) of label and quarantine files.
        labels, quarantine: tables, by row id.
    """

    files: list[str]
    labels: Any
    quarantine: Any


def read_committed(place: Place, output: str) -> Committed:
    """Read what the manifest lists, with nothing of relabel.

    Args:
        output: the output's name below the root.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    filesystem, root = place.filesystem()
    with filesystem.open_input_stream(f"{root}/{output}/manifest.json") as stream:
        manifest = json.loads(stream.read())
    tables, files = {}, []
    for kind in ("labels", "quarantine"):
        names = [file["path"] for file in manifest[kind]]
        files += names
        found = [pq.read_table(f"{root}/{output}/{name}", filesystem=filesystem) for name in names]
        tables[kind] = pa.concat_tables(found).sort_by("row_id") if found else None
    return Committed(sorted(files), tables["labels"], tables["quarantine"])


def is_each_row_there_once(found: Committed, rows: int) -> bool:
    """Whether the row ids of labels and quarantine together are 0 … rows - 1, each once."""
    import numpy as np

    ids = [table["row_id"].to_numpy() for table in (found.labels, found.quarantine) if table is not None]
    return bool(np.array_equal(np.sort(np.concatenate(ids)), np.arange(rows)))


def receipts(place: Place, output: str) -> list[dict[str, Any]]:
    """Every receipt of an output."""
    from pyarrow import fs

    filesystem, root = place.filesystem()
    found = filesystem.get_file_info(fs.FileSelector(f"{root}/{output}/receipts", recursive=True))
    receipts = []
    for info in found:
        if info.type == fs.FileType.File and info.base_name.startswith("chunk-"):
            with filesystem.open_input_stream(info.path) as stream:
                receipts.append(json.loads(stream.read()))
    return receipts


def label_files(place: Place, output: str) -> int:
    """How many label files lie there, committed or not."""
    from pyarrow import fs

    filesystem, root = place.filesystem()
    found = filesystem.get_file_info(fs.FileSelector(f"{root}/{output}/labels", recursive=True))
    return sum(info.type == fs.FileType.File for info in found)
