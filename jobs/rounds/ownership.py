"""Which search an output belongs to: what it was begun with, written down once and held against what it is given."""

from __future__ import annotations

import json
from typing import Any

from relabel.jobs.rounds.retrieval import Corpus, digest_of_rows
from relabel.manifests.digests import readable_json
from relabel.manifests.errors import ManifestError, StaleRunError
from relabel.manifests.records import checked
from relabel.manifests.runs.fingerprints import differences
from relabel.manifests.runs.plans import PLAN_NAME, ROUNDS_NAME
from relabel.manifests.runs.run_manifest import MANIFEST_NAME
from relabel.manifests.specs import RoundsSpec
from relabel.manifests.storage.run_store_ports import RunStore, read_if_there

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
    held = read_if_there(store, ROUNDS_NAME)
    if held is None:
        for name in (PLAN_NAME, MANIFEST_NAME):
            if read_if_there(store, name) is not None:
                raise StaleRunError(
                    f"{store.root}: holds a {name}, so it belongs to something else, say to a run. Name another "
                    "`output`."
                )
        store.check_conditional_writes()
        store.sweep("")
        store.create(ROUNDS_NAME, readable_json(parts))
        held = store.read(ROUNDS_NAME)
    where = f"{store.root}/{ROUNDS_NAME}"
    try:
        was = checked(dict[str, Any], json.loads(held))
    except ValueError as exc:
        raise ManifestError(f"{where}: can't be read. Restore it from a copy, or name another `output`.") from exc
    if changed := list(differences(was, parts)):
        listed = "\n  ".join(changed)
        raise StaleRunError(
            f"{store.root}: belongs to another search. Different:\n  {listed}\n  Use another `output`, or restore what "
            "changed."
        )
