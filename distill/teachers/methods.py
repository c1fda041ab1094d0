"""Which ways of training a teacher there are. Adding one is one file with a `TeacherTrainer`, one with its spec, and
one entry here.
"""

from __future__ import annotations

from dataclasses import dataclass

from manifests.errors import ConfigError
from manifests.spec_faults import unknown_name


@dataclass(frozen=True)
class TeacherMethod:
    """A way of training a teacher.

    Args:
        title: what its card calls it.
        spec: import path of its spec, a `TeacherSpec`.
        trainer: import path of its `TeacherTrainer` (`trainers.py`).
    """

    title: str
    spec: str
    trainer: str


METHODS = {
    "sft": TeacherMethod(
        "supervised fine-tuning on answers", "distill.teachers.sft_spec:SftSpec", "distill.teachers.sft:SftTrainer"
    ),
    "grpo": TeacherMethod(
        "GRPO on trusted grades", "distill.teachers.grpo_spec:GrpoSpec", "distill.teachers.grpo:GrpoTeacher"
    ),
    "graph-grpo": TeacherMethod(
        "GRPO with credit by node",
        "distill.teachers.graph_grpo_spec:GraphGrpoSpec",
        "distill.teachers.grpo:GrpoTeacher",
    ),
    "res-rag": TeacherMethod(
        "GRPO on a frozen generator's answers (RES-RAG)",
        "distill.teachers.res_rag_spec:ResRagSpec",
        "distill.teachers.res_rag:ResRagTeacher",
    ),
}


def method_of(name: object) -> TeacherMethod:
    """The method behind a spec's `method`.

    Raises:
        ConfigError: there is none of that name; names those there are, and the nearest.
    """
    if not isinstance(name, str):
        raise ConfigError(f"`method` = {name!r}: want one of {', '.join(METHODS)}")
    if name not in METHODS:
        raise ConfigError(unknown_name("method", name, list(METHODS)))
    return METHODS[name]
