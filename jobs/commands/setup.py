"""The commands `init`, `schema`, `templates` and `doctor`: files to start from, and what a machine lacks for a job."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from importlib import resources
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import click

from relabel.jobs.commands.options import FORCE_HELP, local_folder, output_option
from relabel.jobs.exits import Exit, exit_for
from relabel.jobs.job import Job, load_job
from relabel.jobs.output import emit, grid, value_text
from relabel.jobs.tables import check_free, written
from relabel.manifests.errors import RelabelError, StoreError, UsageError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.gold import load_gold_by_row
from relabel.manifests.process import installed_versions
from relabel.manifests.secrets import counted
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

    found, version = (
        (schemas.LABELS, schemas.SCHEMA_VERSION) if what == "labels" else (schemas.QUARANTINE, schemas.ROWS_VERSION)
    )
    columns = [{"name": column.name, "type": str(column.type)} for column in found]
    if labeler is not None:
        from relabel.labelers.registry import labeler_class

        own = labeler_class(labeler).columns
        columns += [
            {"name": column.name, "type": str(schemas.KINDS[column.kind]), "about": column.about} for column in own
        ]
    lines = grid([(column["name"], f"{column['type']}  {column.get('about', '')}".rstrip()) for column in columns])
    return emit({"schema": what, "version": version, "columns": columns}, f"{what}, version {version}\n{lines}", output)


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
    facts: dict[str, Any] = {
        "relabel": version("relabel-ir"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB",
        "devices": _devices(),
        "free_disk_gib": {"here": _free_gib("."), "temporary": _free_gib(os.environ.get("TMPDIR", "/tmp"))},
        "free_memory_gib": _free_memory_gib(),
        "onnxruntime": _onnxruntime(),
    }
    extras = {name: _extra(name) for name in EXTRAS}
    rows = [(name.replace("_", " "), value_text(value)) for name, value in facts.items() if value is not None]
    for name, found in extras.items():
        absent = f"{EXTRAS[name]}: absent ({', '.join(found['missing'])}); pip install 'relabel-ir[{name}]'"
        rows.append((f"extra {name}", absent if found["missing"] else value_text(found["installed"])))
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


def _extra(extra: str) -> dict[str, Any]:
    """Versions by distribution of an extra, and its distributions that are not here."""
    names = distributions_of(extra)
    installed = installed_versions(names)
    return {"installed": installed, "missing": [name for name in names if name not in installed]}


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
    """What programs could take without swapping, by Linux' own estimate."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return round(int(found[1]) / 2**20, 1) if found else None


def _memory_gib() -> float:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError):
        return 0.0


def _free_gib(path: str) -> float:
    try:
        return round(shutil.disk_usage(path).free / 2**30, 1)
    except OSError:
        return 0.0


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
    yield "fine"
    yield _input(job)
    yield f"{job.spec.engine.model or job.spec.engine.name}, digest {job.model_digest()[:12]}"
    job.engine_class.check(job.spec.engine)
    yield f"{job.spec.engine.name} can start"
    engine = job.engine_class
    asks = job.labeler.probe()
    yield engine.try_server(job.spec.engine, asks, job.secrets)
    yield _output(job.spec.output, job.storage, single_writer=job.spec.run.single_writer)


def _input(job: Job) -> str:
    if job.spec.rounds is not None:
        return "questions for `relabel rounds`, which reads them; not checked here"
    dataset = job.open_dataset()
    if dataset.columns.gold is not None:
        for file in dataset.files:
            grades = read_grades(load_gold_by_row([file.path], dataset.columns.gold, job.storage))
            grades.readable(file.path, dataset.columns.gold)
    columns = ", ".join(dataset.columns.document)
    return f"{counted(dataset.rows, 'row')} in {counted(len(dataset.files), 'file')}, document from {columns}"


def _output(place: str, storage: Storage, *, single_writer: bool = False) -> str:
    """Whether the output can be written; of storage, whether commits will be single there, by the probe that a run
    writes.
    """
    if is_url(place):
        open_run_store(place, storage, single_writer=single_writer).check_conditional_writes()
        if single_writer:
            return f"{place}: not checked for conditional writes (run.single_writer)"
        return f"{place} can be written, and heeds conditions"
    there = Path(place)
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise StoreError(f"{there}: a file, where the output wants a folder. Name another.")
    if not os.access(there, os.W_OK):
        raise StoreError(f"{there}: no permission to write there.")
    return f"{place} can be written"
