"""What this machine computes with: what its CPU can do and how much of it is free, and which GPUs there are."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Set
from pathlib import Path

BFLOAT16_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})
"""Either multiplies matrices of bfloat16 faster than those of float32; without them bfloat16 is emulated."""
LOOK_S = 0.25
"""How long cores are watched, seconds."""
GPU_FOLDER = Path("/proc/driver/nvidia/gpus")


def cpu_flags() -> frozenset[str]:
    """What the kernel says of the first core: `avx2`, `amx_bf16`, ...; empty where it does not say it (not Linux, or
    not x86).
    """
    return frozenset(_said(Path("/proc/cpuinfo"), "flags").split())


def device_names(gpu_folder: Path = GPU_FOLDER) -> list[str]:
    """The CPU with the number of usable cores, and each kind of NVIDIA GPU that the driver tells of: machines of one
    kind have the same.
    """
    gpus = {_said(path, "Model") for path in gpu_folder.glob("*/information")}
    return [f"{_said(Path('/proc/cpuinfo'), 'model name')}, {usable_cores()} cores", *sorted(gpus)]


def _said(path: Path, name: str) -> str:
    """What the first line `name: …` of a file of the kernel says; empty where there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def multiplies_bfloat16(flags: Set[str]) -> bool:
    """Whether a CPU with these flags is faster in bfloat16 than in float32."""
    return not BFLOAT16_FLAGS.isdisjoint(flags)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(_own_cores()) or os.cpu_count() or 1


def free_cores(look: Callable[[], dict[int, tuple[float, float]]] | None = None) -> int:
    """Of the usable cores, those that nobody was using in the last quarter of a second, rounded; 1 at least.

    Args:
        look: ticks idle and ticks in all by core, for tests.
    """
    look = look or core_ticks
    before = look()
    time.sleep(LOOK_S)
    after = look()
    free = 0.0
    for core, (idle, ticks) in after.items():
        was_idle, were = before.get(core, (0.0, 0.0))
        free += (idle - was_idle) / max(ticks - were, 1.0)
    return max(1, round(free)) if after else usable_cores()


def core_ticks() -> dict[int, tuple[float, float]]:
    """Ticks idle and ticks in all since the machine started, by usable core; empty where there is no /proc/stat."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    own, found = _own_cores(), {}
    for line in lines:
        name, *numbers = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in own:
            ticks = [float(number) for number in numbers[:8]]  # guests' are in user's already
            found[int(name[3:])] = ticks[3] + ticks[4], sum(ticks)
    return found


def _own_cores() -> Set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
