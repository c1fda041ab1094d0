"""The commands `init`, `schema`, `templates` and `doctor`: files to start from, and what a machine lacks for a job."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import resources
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import click

from relabel.jobs.commands.options import FORCE_HELP, date_option, local_folder, output_option, set_option
from relabel.jobs.job import load_job, open_planned
from relabel.jobs.output import Exit, TextResult, emit, exit_for, grid, value_text
from relabel.jobs.settings import schemas
from relabel.jobs.tables import check_free, written
from relabel.labelers.registry import engine_class
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
    text = f"Wrote {path}, and {schema_file}, by which editors explain its keys. {NEXT[kind]} {shlex.quote(path)}"
    message = TextResult(text, {"path": path, "schema": str(schema_file)})
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
@set_option
@date_option
@output_option
def doctor(job_file: str | None, overrides: tuple[str, ...], day: str | None, output: str) -> int:
    """Show what this machine has; with a job file, whether that could start here.

    Exits 4 if it needs something that is absent, 3 if its spec or input is off. For trainings: relabel train --dry-run.
    """
    if job_file is None and (overrides or day is not None):
        raise UsageError("--set, --date: they change a job file, and none is named. Give one: relabel doctor JOB.YAML")
    result = _machine_facts()
    rows = [("", "")] if job_file is not None else []
    rows += [(name.replace("_", " "), value_text(value)) for name, value in result.items() if value is not None]
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
    head = "relabel doctor"
    if job_file is not None:
        head = f"{job_file}: can start here"
        outcomes: dict[str, str] = {}
        try:
            outcomes.update(zip(STEPS, job_checks(job_file, overrides, day), strict=True))
        except RelabelError as exc:
            failed = STEPS[len(outcomes)]
            outcomes[failed] = str(exc)
            code = exit_for(exc)
            head = f"{job_file}: can't start here, see {failed}"
        result["job"] = {step: outcome for step, outcome in outcomes.items() if outcome}
        rows = [*((f"job: {step}", outcome) for step, outcome in result["job"].items()), *rows]
    return emit(TextResult(f"{head}\n{grid(rows)}", result), output, code)


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


def job_checks(job_file: str, overrides: Sequence[str] = (), day: str | None = None) -> Iterator[str]:
    """The outcomes of `STEPS`, up to the first that fails, which raises."""
    job = load_job(job_file, overrides=overrides, day=day)
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
    outcome = _output_check(spec.output, job.storage, is_single=spec.run.single_writer)
    if spec.rounds is None:  # else each round has an output of its own
        open_planned(job)
    yield outcome


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
    if not there.is_dir():
        raise StoreError(f"{there}: not a folder that can be written to. Name another `output`.")
    try:
        with tempfile.TemporaryFile(dir=there):  # permissions alone don't say so: /proc grants root all of them
            pass
    except OSError as exc:
        raise StoreError(
            f"{there}: not a folder that can be written to ({exc.strerror}). Name another `output`."
        ) from exc
    return f"{output} can be written"
