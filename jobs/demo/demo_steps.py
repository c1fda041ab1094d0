"""The steps of the demo: the commands that a person would type, one after the other, each in a process of its own, and
how they ended.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from relabel.jobs.exits import Exit


@dataclass(frozen=True)
class Step:
    """One command.

    Args:
        title: what it is for.
        words: as a person types them, `relabel` or `python` first.
    """

    title: str
    words: tuple[str, ...]

    @property
    def line(self) -> str:
        """What a person types."""
        return shlex.join(self.words)


class StepResult(NamedTuple):
    """A step for a program; `result` is what the command gives with `--output json`, None where that is no JSON."""

    command: str
    exit_code: int
    seconds: float
    result: Any


@dataclass(frozen=True)
class Ended:
    """A step that ended.

    Args:
        code: its exit code.
        out: all that it said on stdout.
    """

    step: Step
    code: int
    out: str
    seconds: float

    @property
    def is_well(self) -> bool:
        """Whether the next step can begin: 10 says that an earlier demo did this one."""
        return self.code in (Exit.DONE, Exit.NOTHING_TO_DO)

    def result(self) -> StepResult:
        """The step for a program."""
        try:
            result = json.loads(self.out)
        except ValueError:
            result = None
        return StepResult(self.step.line, self.code, round(self.seconds, 1), result)


def steps_of(folder: str, *, seconds: float, has_training: bool = False) -> list[Step]:
    """All of them, from pairs to a bundle that answers.

    Args:
        folder: where everything lies.
        seconds: for measuring latency.
        has_training: the teacher is trained first, and all three models are judged at the end.
    """
    ready = _served(folder, seconds)
    if not has_training:
        return [
            _relabel("A teacher reads and grades every pair", "run", f"{folder}/job.yaml"),
            _relabel("A small student learns from its labels", "distill", f"{folder}/student.yaml"),
            *ready,
        ]
    judged = [f"{folder}/{name}" for name in JUDGED]
    shown = [f"{folder}/{name}" for name in ("teacher", "run", "student", "bundle", "scores")]
    gold = f"{folder}/held_out.parquet"
    return [
        _relabel("A model grades the held-out pairs as it is", "run", f"{folder}/untrained.yaml"),
        _relabel("It learns from trusted grades of other queries", "train", f"{folder}/teacher.yaml", "--resume"),
        _relabel("The trained teacher grades every pair", "run", f"{folder}/job.yaml"),
        _relabel("A small student learns from its labels", "distill", f"{folder}/student.yaml", "--resume"),
        *ready,
        _relabel("The model as it was and the student, beside the teacher", "evaluate", *judged, "--qrels", gold),
        _relabel("All of it on one page", "report", *shown, "--gold", gold, "--to", f"{folder}/report.html"),
    ]


JUDGED = ("run", "untrained", "scores")
"""Labels of the trained teacher, of the model that it was, and of the student: folders of a demo that trains."""


def _relabel(title: str, *words: str) -> Step:
    return Step(title, ("relabel", *words))


def _served(folder: str, seconds: float) -> list[Step]:
    """From a student to a bundle that answers."""
    models = ("--precisions", "fp32,int8", "--provider", "cpu", "--replace")
    scored = ("--input", f"{folder}/pairs.parquet", "--to", f"{folder}/scores")
    return [
        _relabel(
            "The student becomes a bundle, checked against it on real pairs",
            *("export", f"{folder}/student", "--to", f"{folder}/bundle", *models),
        ),
        _relabel("How fast is it?", "bench", f"{folder}/bundle", "--seconds", f"{seconds:g}", "--batches", "1,8"),
        # so small a student may be no better than a constant grade, which a channel refuses otherwise
        _relabel(
            "It is published, each file once, whether or not it beats a constant grade",
            *("publish", f"{folder}/bundle", f"{folder}/models", "--channel", "stable", "--anyway"),
        ),
        _relabel("A server pulls it", "pull", f"{folder}/models/demo@stable", f"{folder}/served"),
        Step("What was pulled answers by its own loader, without torch and relabel", ("python", f"{folder}/ask.py")),
        _relabel("The student itself scores the same pairs", "score", f"{folder}/student", *scored),
    ]


def call(step: Step, *, is_for_program: bool) -> Ended:
    """Do a step. What it says on stderr goes where ours goes.

    Args:
        is_for_program: ask the command for JSON.
    """
    program, *words = step.words
    command = [sys.executable, "-P", *(["-m", "relabel"] if program == "relabel" else []), *words]
    if is_for_program and program == "relabel":
        command += ["--output", "json"]
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        out = _said(process)
    return Ended(step, Exit.STOPPED if process.returncode < 0 else process.returncode, out, time.monotonic() - started)


def _said(process: subprocess.Popen[str]) -> str:
    while True:
        try:
            return process.communicate()[0]
        except KeyboardInterrupt:  # the child got it too, and knows what it has to bring to an end
            continue


def differences(served: Sequence[Sequence[float]], scored: Sequence[Sequence[float]]) -> float:
    """The largest difference of a probability."""
    return max(
        abs(one - other) for row, held in zip(served, scored, strict=True) for one, other in zip(row, held, strict=True)
    )
