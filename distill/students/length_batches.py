"""Batches of rows of like length, and how many tokens one holds.

Needs the standard library alone and nothing of this package, since every bundle's `load.py` holds this text
(`export/exporters.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

CPU_BATCH_TOKENS = 1024
"""A CPU's caches hold what a model makes of no more: with 8,192 MiniLM takes 1.3 to 1.6 times the CPU time
(benchmarks/batch_tokens_cpu_2026-11-24.md).
"""
GPU_BATCH_TOKENS = 8192


def batch_tokens_on(device: str) -> int:
    """Tokens of a batch, padding included, that keep a device busy.

    Args:
        device: what torch calls it, or a bundle's provider.
    """
    return CPU_BATCH_TOKENS if device.partition(":")[0] in ("cpu", "openvino") else GPU_BATCH_TOKENS


def length_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Places of rows, longest first, in batches of at most `batch_tokens` tokens with padding (a longer row is
    alone).
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    start = 0
    while start < len(order):
        size = max(1, batch_tokens // max(1, lengths[order[start]]))
        yield order[start : start + size]
        start += size
