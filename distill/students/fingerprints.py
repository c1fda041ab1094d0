"""What a distillation is known by: the digest of all that its student follows from."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from relabel.distill.students.examples import Examples
from relabel.distill.students.specs import DistillSpec
from relabel.distill.students.student_manifest import STUDENT_MANIFEST_VERSION
from relabel.distill.training.unfinished import TrainingRecord, training_record
from relabel.manifests.digests import canonical_json, digest_of
from relabel.manifests.models.references import ResolvedModel

SPEED_ONLY = ("device", "compile", "keep_checkpoints", "gradient_checkpointing", "strategy", "report_to")
NOT_IN_FINGERPRINT: dict[str, Any] = {
    **dict.fromkeys(("name", "output", "labels", "gold", "require"), True),
    "student": {"model"},
    "train": set(SPEED_ONLY),
}


def record_of(spec: DistillSpec, examples: Examples, model: ResolvedModel) -> TrainingRecord:
    """All that the student follows from: the spec's choices, the data itself, the model; and the digest of that."""
    plain = spec.model_dump(mode="json", exclude=NOT_IN_FINGERPRINT)
    if spec.train.head_learning_rate is None:  # students of versions without the key are this spec's, too
        del plain["train"]["head_learning_rate"]
    data = _data_digest(examples)
    fingerprint = digest_of({"spec": plain, "data": data, "model": model.digest, "version": STUDENT_MANIFEST_VERSION})
    return training_record("student", spec, fingerprint, model, data)


def _data_digest(examples: Examples) -> str:
    total = hashlib.sha256()
    for query, document in examples.texts:
        for text in (query, document):
            data = text.encode("utf-8", "surrogatepass")
            total.update(len(data).to_bytes(8, "big") + data)
    arrays = [
        *examples.targets.values(),
        *examples.weights.values(),
        examples.row_weight,
        examples.gold,
        examples.teacher,
        examples.side,
    ]
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    total.update(canonical_json({"heads": examples.heads, "phi": examples.phi}))
    return total.hexdigest()
