"""What makes a teacher's training this one and no other."""

from __future__ import annotations

from typing import Any

from distill.teachers.specs import TeacherSpec
from distill.teachers.teacher_manifest import (
    TEACHER_MANIFEST_VERSION,
)
from distill.teachers.trainers import TeacherTrainer
from manifests.digests import digest_of

SPEED_ONLY = ("device", "keep_checkpoints", "gradient_checkpointing", "report_to")
NOT_IN_FINGERPRINT: dict[str, Any] = {
    **dict.fromkeys(("name", "output", "init", "labeler", "generator"), True),
    "data": {"runs": True, "gold": {"path"}},
    "train": set(SPEED_ONLY),
}
"""What data, labeler and generator are, the digest of the data says; the model, its own digest."""


def fingerprint_of(spec: TeacherSpec, trainer: TeacherTrainer, model_digest: str) -> str:
    """Digest of all that the teacher follows from: the spec's choices, the data itself, the model."""
    return digest_of(
        {
            "spec": spec.model_dump(mode="json", exclude=NOT_IN_FINGERPRINT),
            "data": trainer.digest,
            "model": model_digest,
            "version": TEACHER_MANIFEST_VERSION,
        }
    )
