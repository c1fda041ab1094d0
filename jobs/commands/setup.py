"""`init`, `schema` and `doctor`: what one needs before a first run."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from jobs.commands.options import output_option
from jobs.exits import Exit
from jobs.output import emit, table
from jobs.planning.job_files import Job, load_job
from manifests.errors import RelabelError, StoreError, UsageError
from manifests.storage.filesystems import is_url
from manifests.storage.run_stores import open_run_store

EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cpu": ("the transformers engine", ("torch", "transformers", "llguidance", "safetensors", "gguf")),
    "vllm": ("the vLLM engine", ("vllm",)),
    "openai": ("the openai engine", ("httpx",)),
    "eval": ("relabel evaluate, convert, compare", ("scikit-learn", "scipy", "polars")),
    "pairs": ("relabel pairs", ("polars", "bm25s")),
    "ray": ("the Ray backend", ("ray",)),
    "s3": ("object storage", ("s3fs",)),
}
"""Extra → what it is for, and the distributions that it needs."""


@click.command(epilog="Example: relabel init job.yaml")
@click.argument("path", default="job.yaml")
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
@output_option
def init(path: str, force: bool, output: str) -> int:
    """Write a job file to start from, with a comment for each key."""
    target = Path(path)
    if target.exists() and not force:
        raise UsageError(f"{path}: is there already. Give another name, or --force to replace it.")
    text = resources.files("jobs").joinpath("templates/job.yaml").read_text(encoding="utf-8")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise StoreError(f"{path}: can't write it ({exc.strerror}).") from exc
    emit({"path": path}, f"Wrote {path}. Set input.path in it, then: relabel plan {path}", output)
    return Exit.DONE


@click.command(epilog="Example: relabel schema job > job.schema.json")
@click.argument("what", type=click.Choice(["job", "student", "labels", "quarantine"]))
@click.option(
    "--labeler",
    metavar="NAME",
    help="With `labels`: also the columns that this labeler's label files have of their own.",
)
@output_option
def schema(what: str, labeler: str | None, output: str) -> int:
    """Print the JSON Schema of a job or student file, or the columns of label and quarantine files."""
    if labeler is not None and what != "labels":
        raise UsageError(
            f"--labeler {labeler}: {what} files have no columns of a labeler's. Use it with `relabel schema labels`."
        )
    if what in ("job", "student"):
        from distill.students.specs import student_schema
        from jobs.planning.job_schema import job_schema

        found_schema = job_schema() if what == "job" else student_schema()
        click.echo(json.dumps(found_schema, indent=None if output == "json" else 2, ensure_ascii=False))
        return Exit.DONE
    from manifests import schemas

    found, version = (
        (schemas.LABELS, schemas.SCHEMA_VERSION) if what == "labels" else (schemas.QUARANTINE, schemas.ROWS_VERSION)
    )
    columns = [{"name": field.name, "type": str(field.type)} for field in found]
    if labeler is not None:
        from labelers.registry import declared_columns, labeler_class

        own = declared_columns(labeler_class(labeler), name=labeler)
        columns += [
            {"name": column.name, "type": str(schemas.KINDS[column.kind]), "about": column.about} for column in own
        ]
    lines = table([(column["name"], f"{column['type']}  {column.get('about', '')}".rstrip()) for column in columns])
    emit({"schema": what, "version": version, "columns": columns}, f"{what}, version {version}\n{lines}", output)
    return Exit.DONE


@click.command(epilog="Example: relabel doctor job.yaml")
@click.argument("job_file", metavar="[JOB.YAML]", required=False)
@output_option
def doctor(job_file: str | None, output: str) -> int:
    """Show what this machine has; with a job file, whether that job could start here.

    Exits 4 if the job needs something that is absent, 3 if its spec or input is off.
    """
    extras = {name: _extra(distributions) for name, (_, distributions) in EXTRAS.items()}
    result: dict[str, Any] = {
        "relabel": version("relabel"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB",
        "devices": _devices(),
        "extras": extras,
        "free_disk_gib": {"here": _free_gib("."), "temporary": _free_gib(os.environ.get("TMPDIR", "/tmp"))},
    }
    rows = [
        ("relabel", f"{result['relabel']} on Python {result['python']}"),
        ("machine", result["machine"]),
        ("devices", ", ".join(result["devices"])),
        ("free disk", ", ".join(f"{place} {gib:.0f} GiB" for place, gib in result["free_disk_gib"].items())),
    ]
    for name, (purpose, _) in EXTRAS.items():
        missing = extras[name]["missing"]
        have = ", ".join(f"{package} {held}" for package, held in extras[name]["installed"].items())
        rows.append(
            (
                f"extra {name}",
                have if not missing else f"{purpose}: absent ({', '.join(missing)}); pip install 'relabel[{name}]'",
            )
        )
    code = Exit.DONE
    if job_file is not None:
        result["job"], code = _job(job_file)
        rows += [(f"job: {check}", outcome) for check, outcome in result["job"].items()]
    emit(result, "relabel doctor\n" + table(rows), output)
    return code


def _job(job_file: str) -> tuple[dict[str, str], Exit]:
    """Each check of a job and its outcome; stops at the first that fails."""
    from jobs.exits import exit_for

    found: dict[str, str] = {}
    step = "spec"
    try:
        job = load_job(job_file)
        found["spec"] = "fine"
        step = "input"
        dataset = job.open_dataset()
        found["input"] = (
            f"{dataset.rows:,} rows in {len(dataset.files)} file(s), document from "
            f"{', '.join(dataset.columns.document)}"
        )
        step = "model"
        found["model"] = f"{job.spec.engine.model or job.spec.engine.name}, digest {job.model_digest()[:12]}"
        step = "engine"
        job.engine_class.check(job.spec.engine)
        found["engine"] = f"{job.spec.engine.name} can start"
        step = "output"
        found["output"] = _writable_url(job) if is_url(job.spec.output) else _writable(Path(job.spec.output))
    except RelabelError as exc:
        found[step] = str(exc)
        return found, exit_for(exc)
    return found, Exit.DONE


def _writable_url(job: Job) -> str:
    """Whether commits will be single there; writes the probe that a run would write."""
    spec = job.spec
    open_run_store(spec.output, job.storage, single_writer=spec.run.single_writer).prove()
    if spec.run.single_writer:
        return f"{spec.output}: not checked for conditional writes (run.single_writer)"
    return f"{spec.output} can be written, and heeds conditions"


def _writable(folder: Path) -> str:
    """Whether the nearest folder that exists may be written."""
    there = folder
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK):
        raise StoreError(f"{there}: no permission to write there.")
    return f"{folder} can be written"


def _extra(distributions: tuple[str, ...]) -> dict[str, Any]:
    installed, missing = {}, []
    for name in distributions:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            missing.append(name)
    return {"installed": installed, "missing": missing}


def _devices() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return ["cpu (torch is not installed, so no GPU was looked for)"]
    import torch

    if not torch.cuda.is_available():
        return ["cpu"]
    return [f"cuda:{number} {torch.cuda.get_device_name(number)}" for number in range(torch.cuda.device_count())]


def _memory_gib() -> float:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError):
        return 0.0


def _free_gib(path: str) -> float:
    try:
        return round(shutil.disk_usage(path).free / 2**30, 1)
    except OSError as exc:
        print(f"{path}: {exc}", file=sys.stderr)  # noqa: T201
        return 0.0
