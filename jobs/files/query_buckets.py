"""Rows of any number, taken some at a time, all rows of one query together: what needs a query's rows side by side
(duplicates, ranks, Kendall tau) then works in memory that does not grow with the data. What grows is one entry for each
query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

BUCKET_ROWS = 1 << 17
"""Rows held at a time, or those of the largest query."""
MOST_BUCKETS = 512
"""Files that are written side by side; beyond 67 million rows buckets get larger instead of more."""
BATCH_ROWS = 1 << 16


def query_buckets(
    polars: Any,
    files: Sequence[Path],
    prepared: Callable[[Any, int], Any],
    folder: Path,
    *,
    bucket_rows: int = BUCKET_ROWS,
) -> Iterator[Any]:
    """Cut the rows of some Parquet files into frames of whole queries, in the order in which queries first come.

    Args:
        prepared: makes of a frame of a file, lazy or not, and the file's number one with `query_id`, and `row`, by
            which rows are ordered.
        folder: a scratch folder that does not exist yet.
    Yields:
        Frames with `query` beside their columns: the number of the query, in order; sorted by (query, row). None at all
        without rows.
    """
    rows = polars.concat(
        [
            prepared(polars.scan_parquet(file, glob=False), number).select("query_id", "row")
            for number, file in enumerate(files)
        ]
    )
    queries = (
        rows.group_by("query_id")
        .agg(polars.col("row").min(), rows=polars.len())
        .collect(engine="streaming")
        .sort("row", "query_id")
    )
    if not queries.height:
        return
    wanted = max(bucket_rows, -(-int(queries["rows"].sum()) // MOST_BUCKETS))
    places = queries.select(
        "query_id",
        query=polars.int_range(polars.len(), dtype=polars.Int64),
        bucket=((polars.col("rows").cum_sum() - polars.col("rows")) // wanted).cast(polars.Int64),
    )
    _spill(polars, files, prepared, places, folder)
    for bucket in places["bucket"].unique().sort().to_list():
        file = _file(folder, bucket)
        yield polars.read_ipc(file).sort("query", "row")
        file.unlink()


def _spill(polars: Any, files: Sequence[Path], prepared: Callable[[Any, int], Any], places: Any, folder: Path) -> None:
    """Write each row into its bucket's file. polars has a sink for that, which holds most of what it writes (900 MB of
    8 million rows).
    """
    folder.mkdir()
    with ExitStack() as opened:
        writers: dict[int, Any] = {}
        for number, file in enumerate(files):
            parquet = opened.enter_context(pq.ParquetFile(file, pre_buffer=False))
            for batch in parquet.iter_batches(batch_size=BATCH_ROWS):
                placed = prepared(polars.from_arrow(batch), number).join(places, on="query_id", how="inner")
                for (bucket,), part in placed.partition_by("bucket", as_dict=True, include_key=False).items():
                    table = part.to_arrow(compat_level=polars.CompatLevel.oldest())
                    if bucket not in writers:
                        writers[bucket] = opened.enter_context(
                            pa.ipc.new_file(str(_file(folder, bucket)), table.schema)
                        )
                    writers[bucket].write_table(table)


def _file(folder: Path, bucket: int) -> Path:
    return folder / f"{bucket:05d}.arrow"
