"""Storage in memory with S3's conditions, a clock of its own, and replies that get lost where a test says so."""

import hashlib
import threading
from collections.abc import Callable

from relabel.manifests.objects import ConditionFailedError, Entry, Found, TryAgainError


class MemoryObjects:
    """Args: faults: called before and after each call with its verb, its key and `before` or `after`; may raise."""

    def __init__(self, faults: Callable[[str, str, str], None] = lambda verb, key, when: None) -> None:
        self.has_atomic_conditions = True
        self.heeds_conditions = True
        self.now_s = 0.0
        self.faults = faults
        self.held: dict[str, tuple[bytes, float, int]] = {}
        self.calls: list[tuple[str, str]] = []
        self._guard = threading.Lock()

    def get(self, key: str, *, start: int | None = None, end: int | None = None, tag: str | None = None) -> Found:
        self._enter("get", key)
        data, _, version = self._find(key)
        if tag is not None and tag != _tag(data, version):
            raise ConditionFailedError(key)
        self.faults("get", key, "after")
        return Found(data[start:end], _tag(data, version), len(data))

    def age_s(self, key: str) -> float:
        self._enter("age_s", key)
        return self.now_s - self._find(key)[1]

    def put(self, key: str, data: bytes, *, is_new: bool = False, tag: str | None = None) -> str:
        self._enter("put", key)
        with self._guard:
            held = self.held.get(key)
            if self.heeds_conditions and is_new and held is not None:
                raise ConditionFailedError(key)
            if self.heeds_conditions and tag is not None:
                if held is None:
                    raise FileNotFoundError(key)
                if _tag(held[0], held[2]) != tag:
                    raise ConditionFailedError(key)
            version = held[2] + 1 if held else 0
            self.held[key] = data, self.now_s, version
        self.faults("put", key, "after")
        return _tag(data, version)

    def page(self, key: str, *, after: str | None) -> tuple[list[Entry], str | None]:
        self._enter("page", key)
        prefix = f"{key}/"
        found = [
            Entry(name, len(data), written_s, _tag(data, version))
            for name, (data, written_s, version) in sorted(self.held.items())
            if name.startswith(prefix) and name > (after or "")
        ]
        return found[:10], found[9].name if len(found) > 10 else None

    def delete(self, key: str) -> None:
        self._enter("delete", key)
        self.held.pop(key, None)

    def request(self, *_: object) -> dict[str, object]:
        raise NotImplementedError("not S3")

    def _enter(self, verb: str, key: str) -> None:
        self.calls.append((verb, key))
        self.faults(verb, key, "before")

    def _find(self, key: str) -> tuple[bytes, float, int]:
        if key not in self.held:
            raise FileNotFoundError(key)
        return self.held[key]


def once(verb: str, when: str, *, key: str = "") -> Callable[[str, str, str], None]:
    """A fault at the first call of that verb on a key that ends so: no answer, `before` it acted or `after`."""
    left = [1]

    def fault(called: str, on: str, at: str) -> None:
        if called == verb and at == when and on.endswith(key) and left[0]:
            left[0] -= 1
            raise TryAgainError("lost")

    return fault


def _tag(data: bytes, version: int) -> str:
    return hashlib.sha256(data + str(version).encode()).hexdigest()
