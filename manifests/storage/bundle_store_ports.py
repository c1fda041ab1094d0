"""What a bundle store is: objects by name, records that change by compare and swap."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from relabel.manifests.errors import InputError, StoreError

BLOCK_BYTES = 1 << 22


LOCKS = ".locks"


MAX_RECORD_BYTES = 64 << 20
"""No record is bigger; a bigger one is not read into memory."""


OnProgress = Callable[[int], None]
"""Receives the number of bytes that have gone through, as they go; may raise to stop the transfer."""


class Tagged(NamedTuple):
    """A record as it was read, with the tag that `replace` holds it to."""

    data: bytes
    tag: str


class Entry(NamedTuple):
    """A file in a listing: when it was written is by the bundle store's own clock."""

    name: str
    size_bytes: int
    written_s: float


class Held(NamedTuple):
    """What a bundle store holds under a name."""

    size_bytes: int
    sha256: str


class BundleStore(Protocol):
    """The verbs of a place to publish to. Reads raise FileNotFoundError where there is nothing of that name.

    Attributes:
        url: what to call the place in a message.
    """

    @property
    def url(self) -> str: ...

    def read(self, name: str) -> Tagged:
        """A record, which fits into memory.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it can't be read, or is too big to be a record.
        """

    def create(self, name: str, data: bytes) -> bool:
        """Write a record if there is none of that name; False if there is one (it is left as it
        is), whoever wrote it.
        """

    def replace(self, name: str, data: bytes, tag: str) -> bool:
        """Write a record if what has that name is still what was read; False if not. After a lost reply, False may be
        our own doing.
        """

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens if there is none."""

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if there is none."""

    def sizes(self, names: Sequence[str]) -> dict[str, int | None]:
        """`size` of each name, asked at once where asking takes a journey."""

    def upload(self, name: str, source: Path, held: Held, on_progress: OnProgress) -> None:
        """Copy a local file in, in blocks; the name comes to exist whole or not at all, and what had it is replaced.

        Args:
            held: the size and digest that the file is known to have.
        Raises:
            InputError: it has another by now; the name is left as it was.
        """

    def digest(self, name: str, on_progress: OnProgress) -> Held:
        """Size and sha256 of what is held now: by the store's own checksum of the whole file, else
        by reading it back.
        """

    def blocks(self, name: str, start: int) -> Iterator[bytes]:
        """A file's bytes from an offset on."""

    def entries(self, folder: str) -> Iterator[Entry]:
        """All files below a folder, in no order (`""`: all there are)."""

    def folders(self) -> list[str]:
        """Names of the folders right inside the root, sorted."""

    def now_s(self) -> float:
        """The bundle store's own clock, seconds since the epoch."""

    def sweep(self, older_s: float) -> int:
        """Remove what killed uploads left and that is older than so many seconds; returns how many."""


def digest_of_blocks(blocks: Iterator[bytes], on_progress: OnProgress) -> Held:
    """Size and sha256 of what comes in blocks."""
    found, size = hashlib.sha256(), 0
    for block in blocks:
        found.update(block)
        size += len(block)
        on_progress(len(block))
    return Held(size, found.hexdigest())


def changed(source: Path) -> InputError:
    """What to say of a local file that is no longer what it was when its digest was taken."""
    return InputError(f"{source}: changed while it was uploaded. Export or seal the bundle again.")


def check_record_size(where: str, size: int) -> None:
    """Refuse to read into memory what can't be a record.

    Raises:
        StoreError: it is bigger than any record.
    """
    if size > MAX_RECORD_BYTES:
        raise StoreError(
            f"{where}: holds {size:,} bytes; a record has at most {MAX_RECORD_BYTES:,}. Something else was put there."
        )
