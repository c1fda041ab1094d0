"""Footers that are damaged: reported where Python can see it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import open_dataset
from relabel.manifests.specs import InputSpec


@pytest.mark.parametrize("name", ["query_id", "document"])
def test_a_column_name_that_is_no_text_any_more_is_reported(tmp_path: Path, name: str) -> None:
    path = tmp_path / "pairs.parquet"
    pq.write_table(
        pa.table({key: ["text"] for key in ("query_id", "query", "doc_id", "document")}), path, store_schema=False
    )
    whole = path.read_bytes()
    assert name.encode() in whole
    path.write_bytes(whole.replace(name.encode(), b"\xf1" + name.encode()[1:]))
    with pytest.raises(InputError, match="can't be read"):
        open_dataset(InputSpec(path=(str(path),)), Storage())
