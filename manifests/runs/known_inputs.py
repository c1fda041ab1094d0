"""What the planning's look at the input found, kept beside the plan: while a listing shows every file as it was, no
footer is read again.

A shortcut and nothing more. It is no part of a file's identity nor of the plan, and where anything about it does not
fit (another listing, a data set that moved, columns that are asked for differently, a damaged file, a plan that was
written without one) the footers are read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relabel.manifests.digests import canonical_json, digest_of
from relabel.manifests.errors import StoreError
from relabel.manifests.inputs.dataset import Dataset
from relabel.manifests.inputs.input_files import ListedFile
from relabel.manifests.labels import Reads
from relabel.manifests.records import checked
from relabel.manifests.runs.plans import Plan
from relabel.manifests.specs import Columns, InputSpec
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import absolute_path
from relabel.manifests.storage.run_store_ports import RunStore

KNOWN_NAME = "plan/inputs.json"
KNOWN_VERSION = 1


@dataclass(frozen=True, slots=True)
class KnownInputs:
    """What was found, and of what.

    Args:
        inputs: digest of the files' identities, as the plan's parts have it.
        asked: what columns were asked for.
        columns: what they were resolved to.
        stamps: of each file, as a listing showed it.
        group_bytes: see `Dataset`.
        more: those of the labeler's input columns that the files have.
    """

    inputs: str
    asked: dict[str, Any]
    columns: Columns
    stamps: tuple[str, ...]
    group_bytes: tuple[tuple[tuple[int, int], ...], ...]
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Sealed:
    """The file: `sha256` is the digest of what is known."""

    version: int
    sha256: str
    known: dict[str, Any]


def known_file(dataset: Dataset, plan: Plan, spec: InputSpec, reads: Reads) -> dict[str, bytes]:
    """The file that must lie beside a plan (name → bytes); none where some file has no stamp."""
    if not dataset.stamps:
        return {}
    known = {
        "inputs": plan.parts["inputs"],
        "asked": _asked(spec, reads),
        "columns": dataset.columns.model_dump(mode="json"),
        **({"more": [one.name for one in dataset.reads.columns]} if reads.columns else {}),
        "stamps": dataset.stamps,
        "group_bytes": dataset.group_bytes,
    }
    return {KNOWN_NAME: canonical_json({"version": KNOWN_VERSION, "sha256": digest_of(known), "known": known}) + b"\n"}


def load_known(store: RunStore, plan: Plan) -> KnownInputs | None:
    """What is known of a plan's inputs; None if nothing is, or nothing that can be relied on.

    Raises:
        StoreUnreachableError: the store gives no good answer.
    """
    try:
        held = checked(_Sealed, json.loads(store.read(KNOWN_NAME)))
        found = held.known
        if held.version != KNOWN_VERSION or held.sha256 != digest_of(found):
            return None
        if "marks" in found:  # what stamps were called until 2026-11-22
            found["stamps"] = found.pop("marks")
        known = checked(KnownInputs, found)
    except (FileNotFoundError, StoreError, ValueError):
        return None
    return known if _is_of_plan(known, plan) else None


def _is_of_plan(known: KnownInputs, plan: Plan) -> bool:
    """Whether both speak of the same files. A plan's list of files is under no digest of its own, so each thing said
    there is held against what is: with another number of rows, say, labels would go to other rows than those they are
    of.
    """
    identities = digest_of([list(file.identity) for file in plan.files])
    if not known.inputs == plan.parts.get("inputs") == identities or not len(known.stamps) == len(
        known.group_bytes
    ) == len(plan.files):
        return False
    return all(
        sum(rows for rows, _ in groups) == file.rows for file, groups in zip(plan.files, known.group_bytes, strict=True)
    )


def known_dataset(
    known: KnownInputs,
    plan: Plan,
    spec: InputSpec,
    listed: Sequence[ListedFile],
    storage: Storage,
    reads: Reads,
) -> Dataset | None:
    """The dataset as it was planned, if a listing shows that every file is as it was; else None."""
    if known.asked != _asked(spec, reads):
        return None
    stamps = [(absolute_path(file.path), stamp) for file, stamp in zip(plan.files, known.stamps, strict=True)]
    if stamps != [(absolute_path(path), stamp) for path, stamp in listed]:
        return None
    rows = sum(file.rows for file in plan.files)
    found = reads._replace(columns=tuple(one for one in reads.columns if one.name in known.more))
    rows_in_use = min(rows, spec.limit or rows)
    return Dataset(tuple(plan.files), known.columns, rows_in_use, known.group_bytes, storage, known.stamps, reads=found)


def files_written_since(known: KnownInputs, plan: Plan, dataset: Dataset) -> list[int]:
    """Numbers of the files that lie where they were planned and were written since, by their stamps."""
    # no stamps where some file has none
    found = zip(plan.files, known.stamps, dataset.files, dataset.stamps, strict=False)
    return [
        number
        for number, (then, stamp, now, stamp_now) in enumerate(found)
        if stamp != stamp_now and absolute_path(then.path) == absolute_path(now.path)
    ]


def _asked(spec: InputSpec, reads: Reads) -> dict[str, Any]:
    more = {"more": [list(one[:2]) for one in reads.columns]} if reads.columns else {}
    return {"columns": spec.columns.model_dump(mode="json"), "reads_context": reads.context, **more}
