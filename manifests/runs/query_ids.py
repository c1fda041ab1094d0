"""An input's query ids, as its files hold them: a batch at a time, with the estimated tokens a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.manifests.errors import InputError
from relabel.manifests.inputs.dataset import Dataset, open_parquet
from relabel.manifests.inputs.input_faults import reading

BATCH_ROWS = 1 << 17
BYTES_PER_TOKEN = 4.0
"""UTF-8 bytes of text per token: English web text measures 4.1 to 4.5 on Qwen2.5's and SmolLM2's tokenizers."""
TOKENS_PER_PROMPT = 250.0
"""Tokens of instructions around a pair, counted on the built-in templates; used only to balance
shards and to estimate.
"""


def coded_batches(dataset: Dataset) -> Iterator[tuple[list[Any], np.ndarray, float]]:
    """For each run of rows within a row group: its distinct ids by first appearance, the place of each row's among
    them, and the estimated tokens a row.
    """
    for column, weight, path in id_batches(dataset):
        with reading(path):
            encoded = column.dictionary_encode()
            values = encoded.dictionary.to_pylist()
        yield values, encoded.indices.to_numpy(), weight


def id_batches(dataset: Dataset) -> Iterator[tuple[pa.Array, float, str]]:
    """For each run of rows within a row group: their query ids, the estimated tokens a row, and the file.

    What looks into an id does so under `reading`, since Parquet holds bytes that are no text as text. A footer knows a
    row group's bytes and no row's, so the estimate is flat within a row group.

    Raises:
        InputError: a null query id, or a file that can't be read.
    """
    name = dataset.columns.query_id
    done = 0
    for file, groups in zip(dataset.files, dataset.group_bytes, strict=True):
        if done >= dataset.rows:
            return
        before = done
        with open_parquet(file.path, dataset.storage) as parquet, reading(file.path):
            for number, (rows, size) in enumerate(groups):
                weight = TOKENS_PER_PROMPT + size / max(rows, 1) / BYTES_PER_TOKEN
                for batch in parquet.plain_batches([name], ids=[name], batch_rows=BATCH_ROWS, row_groups=[number]):
                    column = batch.column(name).slice(0, dataset.rows - done)
                    if not len(column):
                        return
                    if column.null_count:
                        row = int(np.flatnonzero(pc.is_null(column).to_numpy(zero_copy_only=False))[0]) + done - before
                        raise InputError(
                            f"{file.path}: `{name}` is null in row {row} of the file. Every row needs a query id; "
                            "fix it."
                        )
                    yield column, weight, file.path
                    done += len(column)


def hashes_of(values: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Two hashes of each id, int64. Python's own, of texts: with 128 bits of a keyed hash, a billion ids are mistaken
    for each other once in 10^20 plans.
    """
    texts = values if isinstance(values[0], str) else list(map(str, values))
    again = (text + "\0" for text in texts)
    count = len(texts)
    return np.fromiter(map(hash, texts), np.int64, count), np.fromiter(map(hash, again), np.int64, count)
