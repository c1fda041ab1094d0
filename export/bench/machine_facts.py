"""What a figure was measured on: processor, GPU, clocks, power, load, versions. Nothing that names the machine or its
owner.

Clocks and load are read before and after, since a processor that throttles or a neighbour that works makes another
machine of it.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

from relabel.export.bench.gpu_queries import query_gpu
from relabel.export.bench.measured_machine import GpuState, MeasuredGpu, MeasuredMachine
from relabel.export.loader import AMX, cpu_flags, cpu_quota, usable_cores
from relabel.manifests.extras import installed_versions

LIBRARIES = ("relabel-ir", "onnxruntime", "onnxruntime-gpu", "openvino", "numpy", "tokenizers", "torch", "transformers")
GPU_FIELDS = {
    "name": "name",
    "driver": "driver_version",
    "memory_mib": "memory.total",
    "power_limit_w": "power.limit",
    "max_sm_mhz": "clocks.max.sm",
}
GPU_STATE = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}
"""Fact → what nvidia-smi calls it."""
RAPL = Path("/sys/class/powercap/intel-rapl:0/energy_uj")
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
BUSY_LOAD = 0.5
"""Other work, in cores, from which on a machine counts as busy."""


class _State(NamedTuple):
    """What changes while it is measured."""

    mhz: float | None
    load: float | None
    gpu: GpuState | None


class MachineWatch:
    """The machine before and after.

    Args:
        threads: of the CPU that the models use.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._before = _state()
        self._energy_uj, self._start = _energy_uj(), time.perf_counter()

    def facts(self) -> MeasuredMachine:
        """What it was from then until now."""
        after, energy = _state(), _energy_uj()
        watts = None
        if energy is not None and self._energy_uj is not None and energy > self._energy_uj:
            # the counter starts over now and then
            watts = (energy - self._energy_uj) / 1e6 / (time.perf_counter() - self._start)
        return MeasuredMachine(
            cpu=_cpu_name(),
            cores=os.cpu_count(),
            usable_cores=usable_cores(),
            cpu_quota=cpu_quota(),
            threads=self._threads,
            mhz_before=self._before.mhz,
            mhz_after=after.mhz,
            governor=_text(GOVERNOR),
            power_w=watts,
            load_before=self._before.load,
            load_after=after.load,
            memory_bytes=_memory_bytes(),
            has_amx=AMX in cpu_flags(),
            gpu=measured_gpu(self._before.gpu, after.gpu),
            system=f"{platform.system()} {platform.machine()}",
            python=platform.python_version(),
            versions=installed_versions(LIBRARIES),
        )


def _state() -> _State:
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return _State(_mhz(), load, gpu_state())


def _cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _mhz() -> float | None:
    found = _cpuinfo("cpu MHz")
    return float(found) if found else None


def _cpuinfo(key: str) -> str | None:
    text = _text(Path("/proc/cpuinfo")) or ""
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(key)), None)


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _energy_uj() -> int | None:
    found = _text(RAPL)
    return int(found) if found and found.isdigit() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def gpu_state() -> GpuState | None:
    """The first visible GPU now; None without one."""
    answers = query_gpu(GPU_STATE)
    return None if answers is None else GpuState(**{name: _number(value) for name, value in answers.items()})


def measured_gpu(before: GpuState | None, after: GpuState | None) -> MeasuredGpu | None:
    """The first visible GPU with its state before and after; None without one."""
    answers = query_gpu(GPU_FIELDS)
    if answers is None:
        return None
    known: dict[str, Any] = {
        name: value if name in ("name", "driver") else _number(value) for name, value in answers.items()
    }
    return MeasuredGpu(**known, before=before, after=after)


def _number(text: str) -> float | None:
    """A number, None where nvidia-smi says `[N/A]` or the like."""
    try:
        return float(text)
    except ValueError:
        return None
