"""`doctor`: what this machine has, and whether a job could start on it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import click

from jobs.commands.options import output_option
from jobs.exits import Exit
from jobs.output import emit, table
from jobs.planning.job_files import Job, load_job
from manifests.errors import RelabelError, StoreError
from manifests.records import LEFT_OUT, plain
from manifests.storage.filesystems import is_url
from manifests.storage.run_stores import open_run_store

EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cpu": ("the transformers engine", ("torch", "transformers", "llguidance", "safetensors", "gguf")),
    "vllm": ("the vLLM engine", ("vllm",)),
    "openai": ("the openai engine", ("httpx",)),
    "eval": ("relabel evaluate, convert, compare", ("scikit-learn", "scipy", "polars")),
    "pairs": ("relabel pairs", ("polars", "bm25s")),
    "iceberg": ("Iceberg tables", ("pyiceberg",)),
    "ray": ("the Ray backend", ("ray",)),
    "s3": ("object storage", ("s3fs",)),
}
"""Extra → what it is for, and the distributions that it needs."""


class ExtraHere(NamedTuple):
    """An extra on this machine: versions by distribution, and the distributions that are not here."""

    installed: dict[str, str]
    missing: list[str]


class FreeDisk(NamedTuple):
    """GiB that are free in this folder, and where temporary files go."""

    here: float
    temporary: float


@dataclass(frozen=True)
class MachineFacts:
    """What a machine has.

    Args:
        relabel, python: versions.
        machine: system, cores and memory, in words.
        job: each check of a job and its outcome; None where none was given.
    """

    relabel: str
    python: str
    machine: str
    devices: list[str]
    extras: dict[str, ExtraHere]
    free_disk_gib: FreeDisk
    job: dict[str, str] | None = field(default=None, metadata=LEFT_OUT)


@click.command(epilog="Example: relabel doctor job.yaml")
@click.argument("job_file", metavar="[JOB.YAML]", required=False)
@output_option
def doctor(job_file: str | None, output: str) -> int:
    """Show what this machine has; with a job file, whether that job could start here.

    Exits 4 if the job needs something that is absent, 3 if its spec or input is off.
    """
    facts, code = _machine_facts(), Exit.DONE
    if job_file is not None:
        checks, code = _job(job_file)
        facts = replace(facts, job=checks)
    emit(plain(facts), _doctor_text(facts), output)
    return code


def _machine_facts() -> MachineFacts:
    return MachineFacts(
        relabel=version("relabel"),
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB",
        devices=_devices(),
        extras={name: _extra(distributions) for name, (_, distributions) in EXTRAS.items()},
        free_disk_gib=FreeDisk(_free_gib("."), _free_gib(os.environ.get("TMPDIR", "/tmp"))),
    )


def _doctor_text(facts: MachineFacts) -> str:
    disk = facts.free_disk_gib
    rows = [
        ("relabel", f"{facts.relabel} on Python {facts.python}"),
        ("machine", facts.machine),
        ("devices", ", ".join(facts.devices)),
        ("free disk", f"here {disk.here:.0f} GiB, temporary {disk.temporary:.0f} GiB"),
    ]
    for name, extra in facts.extras.items():
        have = ", ".join(f"{package} {held}" for package, held in extra.installed.items())
        absent = f"{EXTRAS[name][0]}: absent ({', '.join(extra.missing)}); pip install 'relabel[{name}]'"
        rows.append((f"extra {name}", absent if extra.missing else have))
    rows += [(f"job: {check}", outcome) for check, outcome in (facts.job or {}).items()]
    return "relabel doctor\n" + table(rows)


def _job(job_file: str) -> tuple[dict[str, str], Exit]:
    """Each check of a job and its outcome; stops at the first that fails."""
    from jobs.exits import exit_for

    found: dict[str, str] = {}
    step = "spec"
    try:
        job = load_job(job_file)
        found[step] = "fine"
        step = "input"
        found[step] = _input(job)
        step = "model"
        found[step] = f"{job.spec.engine.model or job.spec.engine.name}, digest {job.model_digest()[:12]}"
        step = "engine"
        job.engine_class.check(job.spec.engine)
        found[step] = f"{job.spec.engine.name} can start"
        step = "output"
        found[step] = _writable_url(job) if is_url(job.spec.output) else _writable(Path(job.spec.output))
    except RelabelError as exc:
        found[step] = str(exc)
        return found, exit_for(exc)
    return found, Exit.DONE


def _input(job: Job) -> str:
    if job.spec.rounds is not None:
        return "questions for `relabel rounds`, which reads them; not looked at here"
    dataset = job.open_dataset()
    columns = ", ".join(dataset.columns.document)
    return f"{dataset.rows:,} rows in {len(dataset.files)} file(s), document from {columns}"


def _writable_url(job: Job) -> str:
    """Whether commits will be single there; writes the probe that a run would write."""
    spec = job.spec
    open_run_store(spec.output, job.storage, single_writer=spec.run.single_writer).check_conditional_writes()
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


def _extra(distributions: tuple[str, ...]) -> ExtraHere:
    installed, missing = {}, []
    for name in distributions:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            missing.append(name)
    return ExtraHere(installed, missing)


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
