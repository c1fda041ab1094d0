"""Memory of this process."""

from __future__ import annotations

import pyarrow as pa


def release_unused() -> None:
    """Give freed memory back to the system. malloc keeps it otherwise, and the stages of a command add up."""
    pa.default_memory_pool().release_unused()
