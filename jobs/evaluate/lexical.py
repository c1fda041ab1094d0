"""BM25 of labelled rows, whose texts are read from the input of the run that labelled them."""

from __future__ import annotations

import numpy as np

from relabel.distill.students.pair_texts import read_pairs
from relabel.manifests.errors import InputError, ManifestError
from relabel.manifests.judging.label_sets import LabelSet
from relabel.manifests.metrics.baselines import MOST_LEXICAL, bm25
from relabel.manifests.runs.run_inputs import open_run_input
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.run_stores import open_run_store


def lexical_scores(
    labels: LabelSet | None, row_ids: np.ndarray, storage: Storage, notes: list[str]
) -> np.ndarray | None:
    """BM25 of some rows of a run, float64 [N]; None where it can't be had, and why not among the notes.

    Args:
        labels: whose rows they are; None or a label file has no texts.
    """
    if labels is None or labels.plan is None:
        notes.append("no lexical baseline: the texts of these labels are not known")
        return None
    if len(row_ids) > MOST_LEXICAL:
        notes.append(f"no lexical baseline: of more than {MOST_LEXICAL:,} rows it would take long")
        return None
    try:
        dataset, readings = open_run_input(labels.where, open_run_store(labels.where, storage), labels.plan, storage)
        pairs = read_pairs(dataset, row_ids, readings=readings)
    except (InputError, ManifestError) as exc:
        notes.append(f"no lexical baseline: {exc}")
        return None
    return bm25([(pair.query, pair.document) for pair in pairs])
