"""A recipe: what a run settles once about how its labels are made (labeler, templates, model, sampling, engine), as the
`parts` of its plan say it; and how two of them differ.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from relabel.manifests.digests import canonical_json

PERSON_LABEL = b"relabel label 1"
SETTLED = ("model", "engine", "overlong")
"""Parts of a plan that every answer depends on."""
_NOT_IN_A_LABEL = frozenset({"attempts"})
"""Options that decide how often an unreadable answer is asked again, and never what a readable one says."""
BY_CONTENT = "by its files"
"""Stands for a path among an engine's options: what lies there is part of the model's digest, and where it lies is no
part of a label.
"""


def parts_as_of(parts: dict[str, Any], was: dict[str, Any]) -> dict[str, Any]:
    """A job's parts as a plan's: where the job names no chunk size, that of the plan holds."""
    held = was.get("cut")
    return {**parts, "cut": held} if held and parts.get("cut") == {**held, "chunk_rows": None} else parts


def recipe_parts(parts: dict[str, Any]) -> dict[str, Any]:
    """What a plan's `parts` say about how a label is made: everything but the input and how the work is cut.

    The prompt's limit stays in (`engine.max_prompt_tokens`, `overlong`): which documents it would cut is known only
    once they are encoded.
    """
    labeler = {key: value for key, value in parts["labeler"].items() if key not in _NOT_IN_A_LABEL}
    return {
        "labeler": labeler,
        "templates": parts["templates"],
        "stages": parts.get("stages"),
        "model": parts["model"],
        "engine": parts["engine"],
        "overlong": parts["overlong"],
    }


def recipe_digest(parts: dict[str, Any]) -> bytes:
    """32 bytes that stand for `recipe_parts`."""
    return blake2b(canonical_json(recipe_parts(parts)), digest_size=32, person=PERSON_LABEL).digest()


def recipe_differences(was: dict[str, Any], now: dict[str, Any]) -> dict[str, list[str]]:
    """What differs between two plans' recipes, by part (`labeler`, `templates`, …): the names of the settings that
    changed.
    """
    before, after = recipe_parts(was), recipe_parts(now)
    found: dict[str, list[str]] = {}
    for part, value in after.items():
        held = before[part]
        if value == held:
            continue
        is_pair_of_maps = isinstance(value, dict) and isinstance(held, dict)
        found[part] = (
            sorted(key for key in {*value, *held} if value.get(key) != held.get(key)) if is_pair_of_maps else [part]
        )
    return found


def stages_changed(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Stages of a plan's parts whose answers to the same texts may differ from another plan's, in order.

    A stage goes on from the answers before it, which its own ask shows, so a changed first stage changes those after
    it.
    """
    stages: dict[str, str] = now["stages"]
    if any(was[part] != now[part] for part in SETTLED):
        return list(stages)
    held = was.get("stages") or {}
    return [stage for stage, digest in stages.items() if held.get(stage) != digest]
