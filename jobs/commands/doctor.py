"""`doctor`: what this machine has, and whether a job could start on it."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, NamedTuple

import click

from relabel.jobs.commands.options import output_option
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit, table
from relabel.manifests.records import plain

EXTRAS: dict[str, str] = {
    "cpu": "the transformers engine, relabel distill and export",
    "gpu": "the same on a GPU",
    "vllm": "the vLLM engine",
    "openai": "the openai engine",
    "eval": "relabel evaluate, convert, compare",
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
    "optimum": "relabel export --exporter optimum, in an environment of its own",
}
"""Extra → what it is for; what belongs to it, the installed package says."""


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
        free_memory_gib: None where the system does not say.
        onnxruntime: its version and what it runs on.
    """

    relabel: str
    python: str
    machine: str
    devices: list[str]
    extras: dict[str, ExtraHere]
    free_disk_gib: FreeDisk
    free_memory_gib: float | None
    onnxruntime: str


@click.command(epilog="Example: relabel doctor job.yaml")
@click.argument("spec_file", metavar="[JOB.YAML|STUDENT.YAML|TEACHER.YAML]", required=False)
@output_option
def doctor(spec_file: str | None, output: str) -> int:
    """Show what this machine has; with a job, student or teacher file, whether that could start here.

    Exits 4 if it needs something that is absent, 3 if its spec or input is off.
    """
    facts, code = _machine_facts(), Exit.DONE
    checks: dict[str, dict[str, str]] = {}
    if spec_file is not None:
        from relabel.jobs.commands.spec_checks import checked

        kind, found, code = checked(spec_file)
        checks[kind] = found
    return emit({**plain(facts), **checks}, _doctor_text(facts, checks), output, code)


def _machine_facts() -> MachineFacts:
    return MachineFacts(
        relabel=version("relabel-ir"),
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB",
        devices=_devices(),
        extras={name: _extra(name) for name in EXTRAS},
        free_disk_gib=FreeDisk(_free_gib("."), _free_gib(os.environ.get("TMPDIR", "/tmp"))),
        free_memory_gib=_free_memory_gib(),
        onnxruntime=_onnxruntime(),
    )


def _doctor_text(facts: MachineFacts, checks: dict[str, dict[str, str]]) -> str:
    disk = facts.free_disk_gib
    rows = [
        ("relabel", f"{facts.relabel} on Python {facts.python}"),
        ("machine", facts.machine),
        ("devices", ", ".join(facts.devices)),
        ("free disk", f"here {disk.here:.0f} GiB, temporary {disk.temporary:.0f} GiB"),
    ]
    if facts.free_memory_gib is not None:
        rows.insert(2, ("free memory", f"{facts.free_memory_gib:.1f} GiB"))
    rows.append(("onnxruntime", facts.onnxruntime))
    for name, extra in facts.extras.items():
        have = ", ".join(f"{package} {held}" for package, held in extra.installed.items())
        absent = f"{EXTRAS[name]}: absent ({', '.join(extra.missing)}); pip install 'relabel-ir[{name}]'"
        rows.append((f"extra {name}", absent if extra.missing else have))
    for kind, found in checks.items():
        rows += [(f"{kind}: {check}", outcome) for check, outcome in found.items()]
    return "relabel doctor\n" + table(rows)


def distributions_of(extra: str) -> list[str]:
    """What an extra is made of, by the package's own word; for extras within it, theirs."""
    found: list[str] = []
    for text in requires("relabel-ir") or ():
        name, _, condition = text.partition(";")
        if re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", condition):
            inner = re.match(r"relabel-ir\[([^]]+)\]", name)
            named = [one for part in inner[1].split(",") for one in distributions_of(part.strip())] if inner else []
            found += named or [re.split(r"[^\w.-]", name.strip(), maxsplit=1)[0]]
    return list(dict.fromkeys(found))


def _extra(extra: str) -> ExtraHere:
    installed, missing = {}, []
    for name in distributions_of(extra):
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
    return [_gpu_text(torch.cuda, number) for number in range(torch.cuda.device_count())]


def _gpu_text(cuda: Any, number: int) -> str:
    free, whole = (size / 2**30 for size in cuda.mem_get_info(number))
    return f"cuda:{number} {cuda.get_device_name(number)} ({free:.0f} of {whole:.0f} GiB free)"


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
    except OSError as exc:
        print(f"{path}: {exc}", file=sys.stderr)  # noqa: T201
        return 0.0
