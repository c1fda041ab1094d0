"""Footers that are damaged: told where Python can tell."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manifests.dataset import open_dataset
from manifests.errors import InputError
from manifests.specs import InputSpec


def test_a_row_group_with_fewer_columns_than_the_schema_is_refused_before_arrow_aborts_over_it(tmp_path: Path) -> None:
    path = tmp_path / "pairs.parquet"
    texts = [f"text {row}" for row in range(20)]
    pq.write_table(pa.table({"query_id": texts, "query": texts, "doc_id": texts, "document": texts}), path, row_group_size=10)
    whole = path.read_bytes()
    seen = 0
    for at in range(len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"), len(whole) - 8):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << bit
            if _columns_differ(bytes(damaged)):
                path.write_bytes(damaged)
                with pytest.raises(InputError):
                    open_dataset(InputSpec(path=(str(path),)), reads_context=False)
                seen += 1
    assert seen > 3


def _columns_differ(data: bytes) -> bool:
    try:
        metadata = pq.read_metadata(io.BytesIO(data))
        return any(metadata.row_group(group).num_columns < metadata.num_columns for group in range(metadata.num_row_groups))
    except (OSError, pa.ArrowException, UnicodeDecodeError):
        return False
