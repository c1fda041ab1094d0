"""One temperature a head, so that a student's probabilities are as sure as they are right."""

from __future__ import annotations

from typing import Any

import numpy as np

from relabel.distill.students.examples import NO_GRADE
from relabel.distill.students.logits import logits_of_rows, softmax
from relabel.distill.students.splits import DEV, TRAIN
from relabel.distill.students.trainers import TrainingInputs
from relabel.manifests.metrics.calibration import fit_temperature

TEMPERATURES = (0.25, 4.0)
"""Bounds of a fitted temperature: a few dev rows that are all right would ask for one near 0, and so for certainty."""


def judged_logits(work: TrainingInputs, module: Any) -> dict[str, np.ndarray]:
    """Logits by head, float32 [N, K], of the rows that judge; rows that trained keep zeros, which nobody looks at."""
    rows = np.flatnonzero(work.examples.side != TRAIN)
    found = logits_of_rows(module, work.texts, [work.tokens[row] for row in rows], work.record.heads)
    whole = {name: np.zeros((len(work.tokens), values.shape[1]), dtype=np.float32) for name, values in found.items()}
    for name, values in found.items():
        whole[name][rows] = values
    return whole


def fitted_temperatures(work: TrainingInputs, logits: dict[str, np.ndarray], notes: list[str]) -> dict[str, float]:
    """One temperature a head, fitted on dev against gold, or where there is none, and for nodes, against what the head
    learned from: distributions where the labels have them, for the most probable grade alone would ask for certainty
    that the teacher never had. 1 where dev has neither.

    Args:
        notes: what there is to say of it is added.
    """
    found = dict.fromkeys(work.record.heads, 1.0)
    rows = work.examples.rows_of(DEV)
    if not work.spec.calibrate:
        return found
    if not len(rows):
        notes.append("no dev rows, so the student is not calibrated: its temperatures are 1")
        return found
    for name in found:
        target_NK = work.examples.targets[name]
        kept = rows[work.examples.weights[name][rows] > 0]
        if name == "relevance" and (work.examples.gold != NO_GRADE).any():
            kept = rows[work.examples.gold[rows] != NO_GRADE]
            target_NK = np.eye(target_NK.shape[1])[work.examples.gold]
        if not len(kept):
            notes.append(f"head {name} is not calibrated, its temperature is 1: no dev row has a grade to judge it by")
        else:
            wished = fit_temperature(softmax(logits[name][kept].astype(np.float64)), target_NK[kept])
            found[name] = min(max(wished, TEMPERATURES[0]), TEMPERATURES[1])
            if found[name] != wished:
                notes.append(f"head {name}: dev asks for temperature {wished:.3g}; {found[name]:g} is the limit")
    return found
