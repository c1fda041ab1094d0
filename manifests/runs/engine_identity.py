"""Which engines made a set of labels, and whether they are one.

Labels of two engines, models or precisions in one set are two teachers under one name. So a run refuses to go on with
another engine than the one that began it, and outputs of different ones are not merged, unless the user says so; then
the manifest says so too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

IDENTITY = ("family", "version", "model_digest", "dtype", "device")
"""What must agree. Of the device only its kind (`cuda`, `cpu`): which of a node's GPUs answered is no difference, a CPU
is one.
"""


def engine_identity(facts: Mapping[str, Any]) -> dict[str, str]:
    """What of an engine's facts (as receipts hold them) decides whether its labels may be beside others."""
    found = {name: str(facts.get(name, "")) for name in IDENTITY}
    return found | {"device": found["device"].partition(":")[0]}


def engines_of(asked: Iterable[Mapping[str, Any]], taken: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All engines behind a set of labels: those that were asked for it, and the identities of others whose labels were
    reused.
    """
    found = [dict(facts) for facts in asked if facts]
    seen = [engine_identity(facts) for facts in found]
    for identity in map(engine_identity, taken):
        if identity not in seen:
            seen.append(identity)
            found.append(dict(identity))
    return found


def engines_differ(engines: Iterable[Mapping[str, Any]]) -> list[str]:
    """What differs between engines, a phrase each (`version: 0.26.0 and 0.32.0`); empty for one engine or none."""
    identities = [engine_identity(facts) for facts in engines if facts]
    remarks = []
    for name in IDENTITY:
        values = sorted({identity[name] for identity in identities})
        if len(values) > 1:
            remarks.append(f"{name}: {' and '.join(value or 'none' for value in values)}")
    return remarks
