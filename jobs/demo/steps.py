"""Steps of the demo, each a `relabel` command in a process of its own, their results, and the quality of each model."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from relabel.jobs.demo.specs import DemoChoices, DemoLabel, DemoPair, agreement, most_frequent_share
from relabel.jobs.evaluate.judging import judge
from relabel.jobs.evaluate.sides import JudgingOptions
from relabel.jobs.exits import Exit
from relabel.jobs.output import table
from relabel.manifests.files import Storage
from relabel.manifests.metrics.evaluation import evaluate
from relabel.manifests.metrics.metric import MetricValue
from relabel.manifests.metrics.registry import title_of

# ------------------------------------------------------------------------------
# The steps of the demo: the commands that a person would type, one after the other, each in a process of its own, and
# how they ended.


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


# ------------------------------------------------------------------------------
# How good each model of a demo that trains is, by the author's grades of pairs that nothing was trained on.


CALLED = dict(zip(JUDGED, ("trained teacher", "model as it was", "student"), strict=True))
FIGURES = ("accuracy", "auc_0/12", "kappa_quadratic")


class Quality(NamedTuple):
    """Figures of one set of labels, with 95 % intervals over queries."""

    labels: str
    pairs: int
    queries: int
    figures: dict[str, MetricValue]


def qualities(root: Path) -> list[Quality]:
    """Of the model as it was, of the teacher and of the student, over the same pairs: what the step `evaluate` says.

    Args:
        root: the demo's folder, its steps done.
    """
    found = []
    for name in sorted(JUDGED, key=lambda name: name != "untrained"):
        options = JudgingOptions(qrels=str(root / "held_out.parquet"))
        result = evaluate(judge((str(root / name),), options, Storage()).judged, resamples=1000, seed=7)
        figures = {figure: result.figures[figure] for figure in FIGURES if figure in result.figures}
        found.append(Quality(CALLED[name], next(iter(figures.values())).over, result.num_groups, figures))
    return found


# ------------------------------------------------------------------------------
# What a demo says: some labels and how good they are, what each step took, and where to go on.


ROWS_SHOWN = 8


def labels_text(pairs: list[DemoPair], labels: dict[int, DemoLabel], engine: str) -> str:
    """Some labels, and how good they are."""
    lines = ["", f"{len(labels)} labels, for instance:"]
    every = max(1, len(pairs) // ROWS_SHOWN)
    for row_id in range(0, len(pairs), every):
        label = labels.get(row_id)
        if label is None:
            continue
        pair = pairs[row_id]
        spread = " ".join(f"{p:.2f}" for p in label.probs)
        quote = label.quotes[0] if label.quotes else "none"
        lines.append(f"  {pair.query} | {pair.title}")
        lines.append(
            f"    grade {label.grade} (author: {pair.grade})  p = [{spread}]  outside {label.outside_mass:.3f}"
        )
        lines.append(f"    evidence: {textwrap.shorten(quote, 90)}")
    judge = "A model of 135 million parameters" if engine == "transformers" else "An engine that makes its answers up"
    return "\n".join(
        [
            *lines,
            "",
            (
                f"{judge} agrees with the set's author on {agreement(pairs, labels):.0%} of the pairs; the one grade "
                "that occurs"
            ),
            (
                f"most often in the set, said of all pairs, agrees on {most_frequent_share():.0%}. It is here to "
                "show the way. A 7B teacher"
            ),
            "goes the same way, with its name as engine.model in the job file.",
        ]
    )


def times_text(done: Sequence[Ended]) -> str:
    """What each step took."""
    rows = [(PurePath(ended.step.words[1]).name, f"{ended.seconds:4.0f} s  {ended.step.title}") for ended in done]
    return f"What each step took:\n{table(rows)}"


def quality_text(found: Sequence[Quality]) -> str:
    """Figures of each model, with intervals."""
    pairs, queries = found[0].pairs, found[0].queries
    rows = []
    for one in found:
        figures = [
            f"{title_of(name)} {_number(figure.value)} [{_number(figure.low)}, {_number(figure.high)}]"
            for name, figure in one.figures.items()
        ]
        rows.append((one.labels, ", ".join(figures)))
    head = f"By the author's grades of {pairs} pairs of {queries} queries that nothing was trained on, 95 % intervals:"
    return f"{head}\n{table(rows)}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def next_text(folder: str, seconds: float, choices: DemoChoices, *, is_whole_way: bool) -> str:
    """Where the files lie, and what to do with them."""
    lies = [
        (f"{folder}/job.yaml", "the job: change it and run it again into another output"),
        (f"{folder}/run/", "the labels, one Parquet file a chunk, and manifest.json: what ran, on what"),
    ]
    then = [(f"relabel verify {folder}/run", "prove that no row was lost")]
    if is_whole_way:
        lies += [
            (f"{folder}/student/", "the student, with its model card and curves"),
            (f"{folder}/bundle/", "what serves: models, tokenizer, loader, parity"),
            (f"{folder}/measurements/", "how fast it answers on this machine"),
            (f"{folder}/models/", "where it is published; an s3:// URL goes as well"),
            (f"{folder}/served/current/", "what a server opens"),
        ]
        if choices.has_training:
            lies.insert(1, (f"{folder}/teacher/", "the teacher: a model directory that engine.model takes"))
            lies.append((f"{folder}/report.html", "all of it on one page"))
        else:
            everything = f"{folder}/run {folder}/student {folder}/bundle {folder}/scores"
            then.append((f"relabel report {everything} --gold {folder}/pairs.parquet", "all of it on one page"))
        then += [
            (f"relabel pull --rollback {folder}/served", "serve again what served before, once there are two"),
        ]
    then.append(("relabel init job.yaml", "start a job of your own"))
    after = [f"  {line}\n      {what}" for line, what in then]
    return "\n".join(["", f"Done in {seconds:.0f} s. The files:", table(lies), "Next:", *after])
