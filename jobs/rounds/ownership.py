"""Which search an output belongs to: what it was begun with, written down once and held against what it is given."""

from __future__ import annotations

import json
from typing import Any

from jobs.rounds.retrieval import Corpus, digest_of_rows
from manifests.digests import readable_json
from manifests.errors import ManifestError, StaleRunError
from manifests.runs.plans import PLAN_NAME
from manifests.runs.run_manifest import MANIFEST_NAME
from manifests.specs import RoundsSpec
from manifests.storage.run_store_ports import RunStore

LOOP_NAME = "rounds.json"
LOOP_VERSION = 1


def parts_of_search(
    questions: list[tuple[str, str]], corpus: Corpus, limits: RoundsSpec, tokens_by: str
) -> dict[str, Any]:
    """What ties an output to one search, beside what its rounds' plans hold; paths are no part of it."""
    return {
        "version": LOOP_VERSION,
        "questions": {"rows": len(questions), "sha256": digest_of_rows(questions)},
        "corpus": {"documents": corpus.num_documents, "sha256": corpus.digest},
        "rounds": limits.model_dump(mode="json", exclude={"corpus", "tokenizer"}) | {"tokenizer": tokens_by},
    }


def claim(store: RunStore, parts: dict[str, Any]) -> None:
    """Write down what an output is for, or see that it is for this.

    Raises:
        StaleRunError: it is for something else; names what differs.
    """
    held = read_if_there(store, LOOP_NAME)
    if held is None:
        for name in (PLAN_NAME, MANIFEST_NAME):
            if read_if_there(store, name) is not None:
                raise StaleRunError(
                    f"{store.root}: holds a {name}, so it belongs to something else, say to a run. Name another "
                    "`output`."
                )
        store.check_conditional_writes()
        store.sweep("")
        store.create(LOOP_NAME, readable_json(parts))
        held = store.read(LOOP_NAME)
    where = f"{store.root}/{LOOP_NAME}"
    try:
        was, now = _leaves(json.loads(held)), _leaves(parts)
    except (ValueError, AttributeError) as exc:
        raise ManifestError(f"{where}: can't be read. Restore it from a copy, or name another `output`.") from exc
    changed = [
        f"{key}: was {was.get(key)}, is {now.get(key)}" for key in {**was, **now} if was.get(key) != now.get(key)
    ]
    if changed:
        listed = "\n  ".join(changed)
        raise StaleRunError(
            f"{store.root}: belongs to another search. Different:\n  {listed}\nUse another `output`, or restore what "
            "changed."
        )


def _leaves(parts: dict[str, Any]) -> dict[str, Any]:
    """Values by the path of keys to them."""
    found: dict[str, Any] = {}
    for key, value in parts.items():
        found |= {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
    return found


def read_if_there(store: RunStore, name: str) -> bytes | None:
    """A file's bytes, or None if there is none."""
    try:
        return store.read(name)
    except FileNotFoundError:
        return None
