"""A spec's gates and the rule of early stopping: whether they can be judged, before anything is trained, and how they
came out.
"""

from __future__ import annotations

import numpy as np

from relabel.distill.students.examples import NO_GRADE, Examples
from relabel.distill.students.figures import graded_figures
from relabel.distill.students.side_figures import NDCG, judge
from relabel.distill.students.specs import DistillSpec
from relabel.distill.students.splits import DEV, TEST
from relabel.distill.students.student_manifest import (
    GateCheck,
    JudgedGates,
    SideFigures,
)
from relabel.manifests.errors import InputError
from relabel.manifests.metrics.gates import judge_gate, judge_gates
from relabel.manifests.plurals import counted


def check_gates(spec: DistillSpec, examples: Examples) -> None:
    """Every gate names a figure that there is, and there will be rows to judge by.

    Raises:
        ConfigError: no such figure.
        InputError: the test split has nothing to judge by.
    """
    if not spec.gates:
        return
    grades = examples.grades
    names = graded_figures(np.eye(grades), np.arange(grades)) | {NDCG: 1.0}
    judge_gates(spec.gates, names, names)
    judge_N, by = judge(examples)
    rows = examples.rows_of(TEST)
    judged = rows[judge_N[rows] != NO_GRADE]
    if not len(judged):
        raise InputError(
            f"`require` is judged on the test split, and none of its rows has a grade ({by}). Raise split.test."
        )
    if any(gate.is_of_teacher for gate in spec.gates) and not (examples.teacher[judged] != NO_GRADE).any():
        raise InputError(
            "`require` has a gate against the teacher, and no row of the test split has both a label and a trusted "
            "grade. Raise split.test, or bring gold for labelled pairs."
        )


def check_stopping(spec: DistillSpec, examples: Examples) -> None:
    """Early stopping looks at a figure that dev will have at every look.

    Raises:
        InputError: dev has rows, and too few grades among them.
    """
    stopping = spec.train.early_stopping
    rows = examples.rows_of(DEV)
    if stopping is None or stopping.metric == "loss" or not len(rows):
        return
    judge_N, by = judge(examples)
    num_grades = len(set(judge_N[rows].tolist()) - {NO_GRADE})
    wanted = 1 if stopping.metric in ("accuracy", "macro_f1") else 2
    if num_grades < wanted:
        raise InputError(
            f"train.early_stopping looks at {stopping.metric}, which wants {counted(wanted, 'grade')} on dev; its "
            f"{len(rows)} rows have {num_grades} ({by}). Raise split.dev, bring more {by}, or choose the metric `loss`."
        )


def judged_gates(spec: DistillSpec, test: SideFigures) -> JudgedGates:
    """The spec's gates on the figures of the test split: against the teacher over the rows that both have, else over
    all.
    """
    where_teacher = test.student if test.student_where_teacher is None else test.student_where_teacher
    verdicts = [
        judge_gate(gate, where_teacher if gate.is_of_teacher else test.student, test.teacher) for gate in spec.gates
    ]
    checks = [GateCheck(**vars(verdict), text=str(verdict)) for verdict in verdicts]
    return JudgedGates(all(verdict.has_passed for verdict in verdicts), checks)
