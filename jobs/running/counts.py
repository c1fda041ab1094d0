"""What an execution has done so far, in numbers."""

from __future__ import annotations

import time
from collections import Counter


class Progress:
    """Counts since the start, for whoever shows them; written by the loop alone."""

    def __init__(self) -> None:
        self.pairs = 0
        self.reused = 0
        self.statuses: Counter[str] = Counter()
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.chunks_committed = 0
        self.chunks_lost = 0
        self.engine_starts = 0
        self.started_s = time.perf_counter()
