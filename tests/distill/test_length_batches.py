"""Rows of like length share a batch, and how large one is follows from where it is computed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.distill.students.length_batches import CPU_BATCH_TOKENS, GPU_BATCH_TOKENS, batch_tokens_on, length_batches


@given(st.lists(st.integers(0, 300)), st.integers(1, 2000))
def test_every_row_is_in_one_batch_that_holds_no_more_than_it_may(lengths: list[int], batch_tokens: int) -> None:
    batches = list(length_batches(lengths, batch_tokens))
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    widths = [max(lengths[place] for place in batch) for batch in batches]
    assert widths == sorted(widths, reverse=True)
    assert all(len(batch) == 1 or len(batch) * width <= batch_tokens
               for batch, width in zip(batches, widths, strict=True))  # fmt: skip


@pytest.mark.parametrize(
    ("device", "tokens"),
    [("cpu", CPU_BATCH_TOKENS), ("cpu:0", CPU_BATCH_TOKENS), ("openvino", CPU_BATCH_TOKENS), ("cuda", GPU_BATCH_TOKENS),
     ("cuda:1", GPU_BATCH_TOKENS), ("tensorrt", GPU_BATCH_TOKENS), ("mps", GPU_BATCH_TOKENS)],
)  # fmt: skip
def test_a_device_has_its_size(device: str, tokens: int) -> None:
    assert batch_tokens_on(device) == tokens
