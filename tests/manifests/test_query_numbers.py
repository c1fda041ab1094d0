"""Queries are numbered and rows sorted as an algorithm in three lines does it, however many there are of them."""

import errno
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.manifests import query_numbers
from relabel.manifests.errors import DiskFullError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import open_dataset
from relabel.manifests.plan import RowIdFile, row_group_sizes
from relabel.manifests.query_numbers import Joined, QueryNumbers, hashes_of
from relabel.manifests.rows import make_plan
from relabel.manifests.specs import InputSpec

IDS = st.sampled_from(["", "a", "b", "é", "12345678", "123456789", "x" * 40, "x" * 41, "\0", "\0\0"]) | st.text(
    max_size=3
)
BATCHES = st.lists(st.lists(IDS, min_size=1, max_size=20), min_size=1, max_size=6)


@pytest.fixture
def small() -> Iterator[None]:
    """A few rows are many."""
    with (
        mock.patch.object(query_numbers, "NUMBERED_TEXTS", 7),
        mock.patch.object(query_numbers, "SORTED_ROWS", 5),
        mock.patch.object(query_numbers, "HELD_BYTES", 16),
        mock.patch.object(query_numbers, "COMPARED_TEXTS", 3),
    ):
        yield


@settings(deadline=None, max_examples=200)
@given(batches=BATCHES, seed=st.integers(0, 3))
@pytest.mark.usefixtures("small")
def test_numbers_and_order_are_those_of_a_dictionary(batches: list[list[str]], seed: int) -> None:
    ids = [one for batch in batches for one in batch]
    numbers = {one: number for number, one in enumerate(dict.fromkeys(ids))}
    number_R = np.array([numbers[one] for one in ids])
    with QueryNumbers(seed) as found:
        for weight, batch in enumerate(batches):
            found.add(pa.array(["cut off", *batch], pa.large_string()).slice(1), 0.1 + weight)
        found.finish()
        assert found.rows == len(ids)
        assert found.sizes_Q.tolist() == np.bincount(number_R).tolist()
        weights = np.zeros(len(numbers))
        for weight, batch in enumerate(batches):
            weights += np.bincount([numbers[one] for one in batch], minlength=len(numbers)) * (0.1 + weight)
        assert found.weights_Q.tolist() == weights.tolist()
        assert found.is_scattered == (np.count_nonzero(np.diff(number_R)) + 1 != len(numbers))
        assert np.concatenate(list(found.rows_by_query())).tolist() == np.argsort(number_R, kind="stable").tolist()


def test_ids_of_one_hash_are_kept_apart_by_another_seed(tmp_path: Path) -> None:
    ids = ["a", "b", "a", "c", "b"] * 9
    table = {"query_id": ids, "query": ids, "doc_id": [str(row) for row in range(45)], "document": ids}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    dataset = open_dataset(InputSpec(path=(str(tmp_path),)), Storage())
    wanted = make_plan(dataset, {}, name="job", shards=2, chunk_rows=4)
    seeds = []

    def weak(texts: pa.Array, seed: int) -> np.ndarray:
        seeds.append(seed)
        return hashes_of(texts, seed) & np.uint64(0 if seed < 2 else 2**64 - 1)

    with mock.patch.object(query_numbers, "hashes_of", weak):
        assert make_plan(dataset, {}, name="job", shards=2, chunk_rows=4) == wanted
    assert seeds == [0, 1, 2]


def test_rows_that_do_not_fit_on_the_disk_are_an_error_that_says_so() -> None:
    full = mock.patch.object(tempfile.SpooledTemporaryFile, "write", side_effect=OSError(errno.ENOSPC, "no space"))
    with QueryNumbers() as numbers:
        numbers.add(pa.array(["a", "b"] * 4, pa.large_string()), 1.0)
        with full, pytest.raises(DiskFullError, match="no space left to spill rows"):
            numbers.finish()


def test_row_ids_are_written_as_one_table_would_be() -> None:
    """Whatever wrote them, the same rows are the same file."""
    rows = np.random.default_rng(1).permutation((2 << 20) + 12345)
    sink = io.BytesIO()
    pq.write_table(
        pa.table({"row_id": rows}),
        sink,
        compression="zstd",
        use_dictionary=False,
        column_encoding="DELTA_BINARY_PACKED",
        write_statistics=False,
    )
    file = RowIdFile()
    joined = Joined(iter(np.array_split(rows, 7)))
    for count in row_group_sizes(len(rows)):
        file.add(joined.take(count))
    reference, data = file.finish(3)
    assert data == {reference.path: sink.getvalue()}
    assert reference.rows == len(rows)
