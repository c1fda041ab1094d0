"""What the seconds of a training's steps were spent on. No two trainings have the same, so they stay out of checkpoints
and of the curve: a training that was resumed tells of its last call's steps alone.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SECONDS_NAME = "seconds.parquet"
SECONDS_SCHEMA = pa.schema([("step", pa.int64()), ("part", pa.string()), ("seconds", pa.float64())])


class StepClock:
    """Seconds by part; of parts within parts, the inner one's count.

    Args:
        parts: names, in their order.
        rest: the part that takes what no other has.
    """

    def __init__(self, parts: tuple[str, ...], *, rest: str) -> None:
        self._names, self._rest = (*parts, rest), rest
        self._inside: list[str] = []
        self._since = self._began = 0.0
        self._held: dict[str, float] = {}
        self._is_open = False
        self.steps: list[tuple[int, dict[str, float]]] = []

    def begin_step(self) -> None:
        """Forget what was done between two steps."""
        self._began, self._is_open = time.perf_counter(), True
        self._held = dict.fromkeys(self._names, 0.0)

    def end_step(self, step: int) -> None:
        """Keep a step that was begun; else nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self._held[self._rest] += time.perf_counter() - self._began - sum(self._held.values())
        self.steps.append((step, self._held))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What the block takes is that part's."""
        self._charge()
        self._inside.append(name)
        try:
            yield
        finally:
            self._charge()
            self._inside.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._inside and self._is_open:
            self._held[self._inside[-1]] += now - self._since
        self._since = now

    def mean(self) -> dict[str, float]:
        """Seconds of a step by part; nothing where there was no step."""
        return {
            name: round(sum(held[name] for _, held in self.steps) / len(self.steps), 6)
            for name in self._names
            if self.steps
        }

    def write(self, folder: Path) -> None:
        """Write `SECONDS_NAME`, a row a step and part."""
        rows = [(step, name, value) for step, held in self.steps for name, value in held.items()]
        arrays = [pa.array([row[place] for row in rows], kind.type) for place, kind in enumerate(SECONDS_SCHEMA)]
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_arrays(arrays, schema=SECONDS_SCHEMA), sink, compression="zstd")
        (folder / SECONDS_NAME).write_bytes(sink.getvalue())
