"""`vault://`: files in memory after a key, each key with its own, for who asks which storage options arrive where."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Vault(MemoryFileSystem):
    """What lies at a URL depends on the key that it is asked for with."""

    protocol = "vault"
    rooms: ClassVar[dict[str, tuple[dict[str, Any], list[str]]]] = {}

    def __init__(self, key: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.store, self.pseudo_dirs = self.rooms.setdefault(key, ({}, [""]))

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(str(path).replace("vault://", "memory://", 1))

    @classmethod
    @contextlib.contextmanager
    def installed(cls) -> Iterator[type[Vault]]:
        """Empty, and known to fsspec."""
        fsspec.register_implementation("vault", cls, clobber=True)
        try:
            yield cls
        finally:
            cls.rooms.clear()
            cls.clear_instance_cache()
