"""`doctor`: what this machine has, and whether a job could start on it."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Iterator
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import click

from relabel.jobs.commands.options import output_option
from relabel.jobs.exits import Exit, exit_for
from relabel.jobs.job import Job, load_job
from relabel.jobs.output import emit, grid, value_text
from relabel.manifests.errors import RelabelError, StoreError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.gold import load_gold_by_row
from relabel.manifests.process import installed_versions
from relabel.manifests.secrets import counted
from relabel.manifests.store import has_links, open_run_store
from relabel.manifests.tables import read_grades

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
    if not has_links(there):
        return (
            f"{place} can be written, but its file system has no hard links: a worker that is killed, or loses its "
            "power, in the middle of a commit leaves half a receipt, which is named then and has to be moved away"
        )
    return f"{place} can be written"
