"""The machine that a bench runs on: processor, GPU, clocks, power and memory, and how many nodes of a graph fall back
to the CPU."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relabel.export.bench.records import GpuState, MeasuredGpu, MeasuredMachine
from relabel.export.loader import AMX, OPENVINO, PROVIDERS, cpu_flags, cpu_quota, usable_cores
from relabel.manifests.process import installed_versions

# ------------------------------------------------------------------------------
# What nvidia-smi tells of the GPU that this process uses first.


TIMEOUT_S = 30.0
BUS_ID_BYTES = 32


def query_gpu(fields: Mapping[str, str]) -> dict[str, str] | None:
    """Ask of the first GPU that is visible here; None without one.

    Args:
        fields: our name → nvidia-smi's.
    Returns:
        Its words by our names, without units; `[N/A]` and the like where it does not tell.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    which = ["-i", bus_id] if (bus_id := _bus_id()) is not None else []
    line = [tool, *which, f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    values = [value.strip() for value in done.stdout.partition("\n")[0].split(",")]
    return dict(zip(fields, values, strict=True)) if done.returncode == 0 and len(values) == len(fields) else None


def _bus_id() -> str | None:
    """PCI address of the driver's first device; nvidia-smi numbers GPUs without regard to which are visible to this
    process.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, found = ctypes.c_int(), ctypes.create_string_buffer(BUS_ID_BYTES)
    if (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetPCIBusId(found, BUS_ID_BYTES, device)
    ):
        return None
    return found.value.decode("ascii")


# ------------------------------------------------------------------------------
# What a figure was measured on: processor, GPU, clocks, power, load, versions. Nothing that names the machine or its
# owner.
#
# Clocks and load are read before and after, since a processor that throttles or a neighbour that works makes another
# machine of it.


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


# ------------------------------------------------------------------------------
# Memory that a measurement takes: the process's own at its peak, and the GPU's.


STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
KIB, MIB = 1 << 10, 1 << 20


def reset_peak() -> bool:
    """Let the peak start anew at what is held now; False where this system can't."""
    try:
        CLEAR.write_text("5")  # Linux: proc(5), "reset the peak resident set size"
    except OSError:
        return False
    return True


def rss_bytes() -> int | None:
    """Resident memory of this process; None where this system does not tell."""
    return _status("VmRSS")


def peak_rss_bytes() -> int | None:
    """The most of it since `reset_peak`, or since the process began."""
    return _status("VmHWM")


def device_bytes() -> int | None:
    """Memory in use on the first visible GPU, of whoever uses it; None without one. onnxruntime keeps what it took, so
    this is its peak.
    """
    used = (query_gpu({"used": "memory.used"}) or {}).get("used", "")
    return int(used) * MIB if used.isdigit() else None


def _status(key: str) -> int | None:
    try:
        lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith(f"{key}:")), None)


# ------------------------------------------------------------------------------
# Which heavy nodes of a graph run on the CPU though a GPU was asked for.
#
# A session may be on the GPU as a whole and yet send its quantized products to the CPU and back, which can cost several
# times what fp32 takes. Only onnxruntime's own profile tells where each node ran.


HEAVY = {
    "MatMul",
    "Gemm",
    "FusedMatMul",
    "FusedGemm",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "QLinearMatMul",
    "MatMulNBits",
    "Attention",
    "QAttention",
    "MultiHeadAttention",
    "GroupQueryAttention",
    "EmbedLayerNormalization",
    "LayerNormalization",
    "SkipLayerNormalization",
    "SimplifiedLayerNormalization",
    "SkipSimplifiedLayerNormalization",
    "Softmax",
    "Gelu",
    "BiasGelu",
    "FastGelu",
    "DynamicQuantizeLinear",
    "QuantizeLinear",
    "DequantizeLinear",
}
"""Operators over whole rows. Shapes are counted on the CPU also where all is well."""


def cpu_nodes(path: Path, provider: str, batch: dict[str, np.ndarray], *, threads: int) -> dict[str, int]:
    """Heavy nodes that a session on a GPU runs on the CPU: how many, by operator. Empty on the CPU itself."""
    if provider in ("cpu", OPENVINO):
        return {}
    import onnxruntime

    with tempfile.TemporaryDirectory() as work:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(work, "profile"))
        session = onnxruntime.InferenceSession(str(path), options, providers=[PROVIDERS[provider], PROVIDERS["cpu"]])
        session.run(None, batch)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return count_cpu_nodes(events)


def count_cpu_nodes(events: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Heavy nodes on the CPU by operator, from the events of onnxruntime's profile."""
    nodes = {}
    for event in events:
        match event:
            case {"cat": "Node", "name": name, "args": {"provider": provider, "op_name": operator, **more}}:
                if provider == PROVIDERS["cpu"]:
                    nodes[more.get("node_index"), name] = operator
    return dict(sorted(Counter(operator for operator in nodes.values() if operator in HEAVY).items()))
