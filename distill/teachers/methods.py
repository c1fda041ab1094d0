"""Which ways of training a teacher there are. Adding one is one file with a `TeacherTrainer`, one with its spec, and
one entry here.
"""

from __future__ import annotations

from dataclasses import dataclass

from relabel.manifests.errors import ConfigError
from relabel.manifests.spec_faults import unknown_name


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
        "supervised fine-tuning on answers",
        "relabel.distill.teachers.sft_spec:SftSpec",
        "relabel.distill.teachers.sft:SftTrainer",
    ),
    "grpo": TeacherMethod(
        "GRPO on trusted grades",
        "relabel.distill.teachers.grpo_spec:GrpoSpec",
        "relabel.distill.teachers.grpo:GrpoTeacher",
    ),
    "graph-grpo": TeacherMethod(
        "GRPO with credit by node",
        "relabel.distill.teachers.graph_grpo_spec:GraphGrpoSpec",
        "relabel.distill.teachers.grpo:GrpoTeacher",
    ),
    "res-rag": TeacherMethod(
        "GRPO on a frozen generator's answers (RES-RAG)",
        "relabel.distill.teachers.res_rag_spec:ResRagSpec",
        "relabel.distill.teachers.res_rag:ResRagTeacher",
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
