"""Replies that are nearly right: a good one in which each value in turn is of a wrong kind, is absent, or is there
twice.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

PLACEHOLDER = "\ue000here\ue000"
KINDS = {
    "null": "null",
    "true": "true",
    "7": "7",
    "-3": "-3",
    "0.5": "0.5",
    "1e300": "1e300",
    "-1e300": "-1e300",
    "1e999": "1e999",
    "20 digits": "9" * 20,
    "400 digits": "9" * 400,
    "5,000 digits": "9" * 5000,
    "NaN": "NaN",
    "Infinity": "Infinity",
    "-Infinity": "-Infinity",
    "text": '"other"',
    "empty text": '""',
    "digits": '"' + "9" * 5000 + '"',
    "half a character": '"\\ud800"',
    "NUL": '"\\u0000"',
    "empty list": "[]",
    "list": "[null]",
    "list of numbers": f"[{'9' * 30}, -1, true, 0.5]",
    "empty object": "{}",
    "object": '{"other": {"token_id:1": 1}}',
    "token of 5,000 digits": '{"token_id:' + "9" * 5000 + '": -1}',
    "400 deep": "[" * 400 + "]" * 400,
    "900 deep": '{"message":' * 900 + "1" + "}" * 900,
    "100,000 deep": "[" * 100_000 + "]" * 100_000,
}
"""JSON text (or nearly) that may be where another value belongs."""


class Mutation(NamedTuple):
    """A reply that differs from the good one in one place.

    Args:
        path: keys and indices that lead there.
        kind: of `KINDS`, or `absent`.
    """

    path: tuple[str | int, ...]
    kind: str
    raw: bytes

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path)) or 'all of it'}: {self.kind}"


def mutations(payload: Any) -> Iterator[Mutation]:
    """Every way in which this reply may be wrong in one place."""
    for path in list(_paths(payload)):
        for kind, text in KINDS.items():
            raw = json.dumps(_changed(payload, path, PLACEHOLDER)).replace(json.dumps(PLACEHOLDER), text)
            yield Mutation(path, kind, raw.encode())
        if path:
            changed = copy.deepcopy(payload)
            del _at(changed, path[:-1])[path[-1]]
            yield Mutation(path, "absent", json.dumps(changed).encode())


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    inside: Any = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, held in inside:
        yield from _paths(held, (*path, key))


def _at(payload: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        payload = payload[key]
    return payload


def _changed(payload: Any, path: tuple[str | int, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(payload)
    _at(changed, path[:-1])[path[-1]] = value
    return changed
