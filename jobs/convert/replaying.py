"""A run's labels beside the pairs that they are of, walked through the labeler that made them once more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from relabel.jobs.fetching.templates import local_templates
from relabel.labelers.registry import Labeler, declared_columns, declared_reads, labeler_class, options_of_run
from relabel.labelers.replays import Exchange, Recalls, replay
from relabel.manifests.errors import InputError, VerdictError
from relabel.manifests.judging.run_labels import RunLabels
from relabel.manifests.labels import Pair
from relabel.manifests.runs.label_keys import stage_digests
from relabel.manifests.runs.plans import chunk_row_ids, shard_row_ids
from relabel.manifests.runs.rows import read_chunks
from relabel.manifests.runs.run_inputs import open_run_input
from relabel.manifests.runs.run_manifest import load_manifest
from relabel.manifests.storage.context import Storage


def open_labeler(run: RunLabels, storage: Storage) -> Labeler:
    """The labeler of a run, with its options, asking what it asked then.

    Raises:
        ConfigError: there is no such labeler here, or its options are none.
        InputError: its labels don't tell what was answered, or it asks otherwise now: templates were edited, moved
            away, or are those of another version of relabel; or the run is a merge of runs that asked differently.
    """
    parts, name = run.plan.parts, run.plan.facts.labeler.name
    if run.plan.facts.kind == "student" or not issubclass(kind := labeler_class(name), Recalls):
        raise InputError(
            f"{run.root}: labels of `{name}` don't hold all that was answered, so there are no trajectories in it. "
            "Those of `route` do."
        )
    if "merged_recipes" in parts:
        raise InputError(f"{run.root}: merged of runs that asked in different ways. Convert each of them.")
    manifest = load_manifest(run.folder.store)
    options = options_of_run(parts, manifest.spec if manifest is not None else {}, where=run.root)
    with local_templates(options, storage) as held:
        labeler = kind(held)
    now, was = labeler.template_digests, parts.get("templates") or {}
    if now != was or stage_digests(labeler.probe()) != parts.get("stages"):
        changed = sorted(file for file in {*now, *was} if now.get(file) != was.get(file))
        what = f"the templates {', '.join(changed)} are not" if changed else "this version of relabel asks not"
        raise InputError(
            f"{run.root}: its prompts can't be made again: {what} what was asked then. Restore them, use the relabel "
            "that labelled it, or label again."
        )
    return labeler


class Replays:
    """Exchanges of a run's labels, in the order of its rows, with memory for the labels alone.

    Args:
        labels: by row id, the ones that are wanted: their columns.

    Attributes:
        num_failed: labels that did not lead back to themselves.
    """

    def __init__(self, run: RunLabels, labeler: Labeler, labels: Mapping[int, Mapping[str, Any]], storage: Storage):
        self._run, self._labeler, self._labels = run, labeler, labels
        self._storage = storage
        self._names = ["grade", *(column.name for column in declared_columns(labeler, name=""))]
        self.num_failed = 0

    def __iter__(self) -> Iterator[tuple[Pair, list[Exchange]]]:
        """
        Raises:
            InputError, ManifestError: the input is gone, or is not what was labelled.
        """
        for pair in self._pairs():
            label = self._labels[pair.row_id]
            try:
                yield pair, replay(self._labeler, pair, {name: label[name] for name in self._names})
            except VerdictError:
                self.num_failed += 1

    def _pairs(self) -> Iterator[Pair]:
        run, store = self._run, self._run.folder.store
        reads = declared_reads(self._labeler, name=run.plan.facts.labeler.name)
        dataset, readings = open_run_input(run.root, store, run.plan, self._storage, reads=reads)
        wanted = np.fromiter(self._labels, dtype=np.int64)
        for shard in run.plan.shards:
            rows = [np.intersect1d(chunk, wanted).tolist() for chunk in chunk_row_ids(store, shard)]
            pending = [number for number, found in enumerate(rows) if found]
            row_ids = shard_row_ids(store, shard) if shard.row_ids is not None else None
            only = {number: set(rows[number]) for number in pending}
            for chunk in read_chunks(dataset, shard, row_ids, pending, readings=readings, wanted=only):
                yield from chunk.pairs
