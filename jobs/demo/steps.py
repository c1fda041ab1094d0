"""Steps of the demo, each a `relabel` command in a process of its own, and the quality of each model at the end."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from relabel.jobs.evaluate.judging import judged_labels
from relabel.jobs.evaluate.sides import JudgingOptions
from relabel.jobs.exits import Exit
from relabel.manifests.files import Storage
from relabel.manifests.metrics.metric import MetricValue

JUDGED = {"run": "trained teacher", "untrained": "model as it was", "scores": "student"}
"""Folders of labels of a demo that trains its teacher, and whose labels they are."""
FIGURES = ("accuracy", "auc_0/12", "kappa_quadratic")


class Step(NamedTuple):
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


@dataclass(frozen=True)
class StepResult:
    """A step that ended.

    Args:
        result: what the command prints with `--output json`; None where that is not JSON.
    """

    command: str
    exit_code: int
    seconds: float
    result: Any

    @property
    def is_well(self) -> bool:
        """Whether the next step can begin: 10 says that an earlier demo did this one."""
        return self.exit_code in (Exit.DONE, Exit.NOTHING_TO_DO)


class Quality(NamedTuple):
    """Figures of one set of labels, with 95 % intervals over queries."""

    labels: str
    pairs: int
    queries: int
    figures: dict[str, MetricValue]


def steps_of(folder: str, *, seconds: float, has_training: bool = False) -> list[Step]:
    """All of them, from pairs to a bundle that answers.

    Args:
        folder: where everything goes.
        seconds: for measuring latency.
        has_training: the teacher is trained first, and all three models are judged at the end.
    """
    models = ("--precisions", "fp32,int8", "--provider", "cpu", "--replace")
    scored = ("--input", f"{folder}/pairs.parquet", "--to", f"{folder}/scores")
    ready = [
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
        _relabel(
            "The untrained model and the student are compared with the teacher", "evaluate", *judged, "--qrels", gold
        ),
        _relabel("All of it on one page", "report", *shown, "--gold", gold, "--to", f"{folder}/report.html"),
    ]


def _relabel(title: str, *words: str) -> Step:
    return Step(title, ("relabel", *words))


def call(step: Step, log: Path) -> StepResult:
    """Do a step; all that it prints goes to the log file."""
    program, *words = step.words
    options = ["--output", "json"] if program == "relabel" else []
    command = [sys.executable, "-P", *(["-m", "relabel"] if program == "relabel" else []), *words, *options]
    started = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, encoding="utf-8") as process:
            out = _output_of(process)
        try:
            result = json.loads(out)
            file.write(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        except ValueError:
            result = None
            file.write(out)
    code = Exit.STOPPED if process.returncode < 0 else process.returncode
    return StepResult(step.line, code, round(time.monotonic() - started, 1), result)


def _output_of(process: subprocess.Popen[str]) -> str:
    while True:
        try:
            return process.communicate()[0]
        except KeyboardInterrupt:  # the child got it too, and knows what it has to bring to an end
            continue


def qualities(root: Path) -> list[Quality]:
    """Figures of the untrained model, the teacher and the student over the same pairs, by the author's grades.

    Args:
        root: the demo's folder, its steps done.
    """
    found = []
    for name in sorted(JUDGED, key=lambda name: name != "untrained"):
        options = JudgingOptions(qrels=str(root / "held_out.parquet"))
        result = judged_labels((str(root / name),), options, [], Storage(), resamples=1000, seed=7)
        figures = {figure: result.figures[figure] for figure in FIGURES if figure in result.figures}
        found.append(Quality(JUDGED[name], next(iter(figures.values())).over, result.num_groups, figures))
    return found
