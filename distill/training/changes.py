"""What changed between a training that was begun and one that is to go on in its place, in a phrase each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from relabel.distill.training.model_manifests import BaseModelUsed, Product
from relabel.distill.training.unfinished import TrainingRecord
from relabel.manifests.records import checked
from relabel.manifests.runs.fingerprints import differing
from relabel.manifests.secrets.redaction import shortened

MOST = 10
"""Changes that are told; of more, their number."""
SHOWN_CHARS = 100
PROMPT = "prompt"


@dataclass(frozen=True)
class _Finished:
    model: BaseModelUsed
    spec: dict[str, Any]


def changes(
    spec: Mapping[str, Any], model: BaseModelUsed, data: str | None, now: TrainingRecord, product: Product
) -> list[str]:
    """What the other training differs in from `now`, secrets, prompts and long texts left out; nothing where that can't
    be told.

    Args:
        spec, model, data: of the other one; the digest of its data is None where it is not known.
    """
    both = differing(_deciding(spec, product.undecided), _deciding(now.spec, product.undecided))
    # keys that only one of them has last: another method brings many
    found = [_phrase(*one) for one in sorted(both, key=lambda one: None in one)]
    if model.digest != now.model.digest:
        found.append(
            f"{product.model_key}: was {_text(model.reference)}, is {_text(now.model.reference)}"
            if model.reference != now.model.reference
            else f"the files of the model that `{product.model_key}` names have changed"
        )
    if data != now.data and (data is not None or not found):
        keys = product.data_keys
        was_named, named = ({key: one.get(key) for key in keys} for one in (spec, now.spec))
        told = [one for one in (_phrase(*one) for one in differing(was_named, named)) if one not in found]
        listed = ", ".join(f"`{key}`" for key in keys if named[key] is not None)
        found += told or [f"what is learned from ({listed}) is not what it was"]
    return found if len(found) <= MOST else [*found[:MOST], f"and {len(found) - MOST} more"]


def manifest_changes(manifest: bytes, now: TrainingRecord, product: Product) -> list[str]:
    """`changes` against a finished model's manifest, which may be of another version."""
    try:
        held = checked(_Finished, json.loads(manifest))
    except ValueError:
        return []
    return changes(held.spec, held.model, None, now, product)


def _deciding(spec: Mapping[str, Any], undecided: Mapping[str, Any]) -> dict[str, Any]:
    """A spec without the keys on which no fingerprint hangs, as pydantic's `exclude` leaves them out."""
    return dict(_kept(spec, undecided))


def _kept(spec: Mapping[str, Any], undecided: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in spec.items():
        left_out = undecided.get(key)
        if left_out is True:
            continue
        inner = left_out if isinstance(left_out, Mapping) else dict.fromkeys(left_out or (), True)
        yield key, _deciding(value, inner) if isinstance(value, dict) else value


def _phrase(path: str, was: Any, now: Any) -> str:
    is_text = isinstance(was, str) and isinstance(now, str)
    if is_text and (PROMPT in path.split(".") or max(len(was), len(now)) > SHOWN_CHARS or "\n" in was + now):
        return f"{path}: was a text of {len(was):,} characters, is another of {len(now):,}"
    if PROMPT in path.split("."):
        return f"{path}: differs"
    return f"{path}: was {_text(was)}, is {_text(now)}"


def _text(value: Any) -> str:
    return shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), SHOWN_CHARS)
