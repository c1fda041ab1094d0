"""What makes a teacher's training this one and no other."""

from __future__ import annotations

from typing import Any

from relabel.distill.teachers.specs import TeacherSpec
from relabel.distill.teachers.teacher_manifest import (
    TEACHER_MANIFEST_VERSION,
)
from relabel.distill.teachers.trainers import TeacherTrainer
from relabel.distill.training.unfinished import TrainingRecord, training_record
from relabel.manifests.digests import digest_of
from relabel.manifests.models.references import ResolvedModel

SPEED_ONLY = ("device", "keep_checkpoints", "gradient_checkpointing", "report_to")
NOT_IN_FINGERPRINT: dict[str, Any] = {
    **dict.fromkeys(("name", "output", "init", "labeler", "generator"), True),
    "data": {"runs": True, "gold": {"path"}},
    "train": set(SPEED_ONLY),
}
"""What data, labeler and generator are, the digest of the data says; the model, its own digest."""


def record_of(spec: TeacherSpec, trainer: TeacherTrainer, model: ResolvedModel) -> TrainingRecord:
    """All that the teacher follows from: the spec's choices, the data itself, the model; and the digest of that."""
    fingerprint = digest_of(
        {
            "spec": spec.model_dump(mode="json", exclude=NOT_IN_FINGERPRINT),
            "data": trainer.digest,
            "model": model.digest,
            "version": TEACHER_MANIFEST_VERSION,
        }
    )
    return training_record("teacher", spec, fingerprint, model, trainer.digest)
