"""What the run loop tells a worker that is watched over, so that whoever outlives it knows which rows its engine was at
when it went down.

A run that nobody watches over has no watch, and pays for none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from relabel.jobs.running.chunks import ChunkWork


class Watch(Protocol):
    """Called by the loop, in its own thread; `commits` alone is called from a commit thread."""

    def begins(self, work: ChunkWork) -> None:
        """A chunk is about to be asked. May set its `apart` and `isolated_rows`."""

    def tries(self, work: ChunkWork, indexes: list[int]) -> None:
        """These rows are about to be asked apart from all others; the engine is proven to work and has nothing else in
        flight.
        """

    def asks(self, work: ChunkWork, index: int) -> None:
        """A row is open: the engine may be at it from now on."""

    def ends(self, work: ChunkWork, index: int) -> None:
        """A row has its outcome."""

    def flush(self) -> None:
        """The engine is about to work: whatever was reported before must reach its reader now."""

    def commits(self, work: ChunkWork, *, was_first: bool) -> None:
        """A chunk is durable, by this worker or by another that was first."""
