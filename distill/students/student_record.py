"""What a student's folder says of the student beside its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from relabel.distill.students.student_section import KindName
from relabel.manifests.errors import ManifestError
from relabel.manifests.phi import DEFAULT_PHI, PhiTable
from relabel.manifests.records import checked, fault_of

STUDENT_NAME = "student.json"
STUDENT_VERSION = 1


@dataclass(frozen=True)
class StudentRecord:
    """What a student is, as `student.json` says it.

    Args:
        heads: number of grades by head; `relevance` is always there.
        max_tokens: longest row in tokens; longer pairs are cut.
        columns: the input's columns that it was trained on, as `manifests.specs.Columns` takes them.
        temperature: by head, above 0; logits are divided by it.
        phi: the rule map of a student with subject and attribute heads.
        pooling: of an encoder.
        prompt: of a decoder, the text before the query, between query and document, and after the document; of a
            logistic student the first alone.
        grade_ids: of a decoder, the tokens of grades 0..K-1.
        packs: whether a decoder's batches are packed instead of padded.
    """

    version: int
    kind: KindName
    name: str
    heads: dict[str, int]
    max_tokens: int
    columns: dict[str, Any]
    temperature: dict[str, float]
    phi: PhiTable = DEFAULT_PHI
    pooling: Literal["mean", "cls"] = "mean"
    prompt: tuple[str, str, str] = ("", "", "")
    grade_ids: list[int] = field(default_factory=list)
    packs: bool = False

    @property
    def grades(self) -> int:
        """K of the relevance head."""
        return self.heads["relevance"]


def read_student(path: str | Path) -> StudentRecord:
    """What the student in a folder is, without loading it.

    Raises:
        ManifestError: the folder holds no student, or one that this version can't read.
    """
    file = Path(path) / STUDENT_NAME
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        version = held.get("version")
        if version == STUDENT_VERSION:
            return checked(StudentRecord, held)
    except FileNotFoundError as exc:
        raise ManifestError(
            f"{path}: holds no {STUDENT_NAME}, so no student. Give the output of `relabel distill`."
        ) from exc
    except (OSError, ValueError, AttributeError) as exc:
        raise ManifestError(f"{file}: not a student's record ({fault_of(exc)}). Restore it, or train again.") from exc
    raise ManifestError(f"{file}: written as version {version}; this relabel reads {STUDENT_VERSION}.")
