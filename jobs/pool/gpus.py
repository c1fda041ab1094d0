"""Which GPUs this process may use, found without torch, and how they are given out to workers."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from relabel.manifests.errors import MissingExtraError, UsageError
from relabel.manifests.plurals import counted

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
SMI_TIMEOUT_S = 30.0


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names for `CUDA_VISIBLE_DEVICES`, in order: what that variable says already, else one number for each GPU of the
    machine.
    """
    if VISIBLE in environment:
        names: list[str] = []
        for name in environment[VISIBLE].split(","):
            if not name.strip() or name.strip() == "-1":  # CUDA takes what comes before the first that is none
                break
            names.append(name.strip())
        return names
    return [str(number) for number in range(_count())]


def choose_gpus(text: str, visible: Sequence[str]) -> list[str]:
    """What `--gpus all` or `--gpus 0,1` names. Numbers count within the visible ones, as CUDA itself does.

    Raises:
        UsageError: not of that form, or a GPU twice.
        MissingExtraError: there is no such GPU here.
    """
    numbers = _numbers(text)
    if not visible:
        raise MissingExtraError(
            f"--gpus {text}: no NVIDIA GPU is visible here (asked the driver, nvidia-smi and {DRIVER_FOLDER}; "
            f"{VISIBLE} counts where it is "
            "set). On a machine without one use --workers N, or leave both away."
        )
    if numbers is None:
        return list(visible)
    for number in numbers:
        if not 0 <= number < len(visible):
            raise MissingExtraError(
                f"--gpus {text}: there is no GPU {number}; visible here are 0 to {len(visible) - 1}."
            )
    return [visible[number] for number in numbers]


def _numbers(text: str) -> list[int] | None:
    """The numbers of `0,1`; None for `all`. Read before anything is looked for: a slip is one wherever it is made."""
    if text.strip() == "all":
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as exc:
        raise UsageError(f"--gpus {text}: want all, or numbers such as 0,1.") from exc
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"--gpus {text}: names a GPU twice; each gets one engine.")
    return numbers


def gpu_groups(names: Sequence[str], map_concurrent: int) -> list[list[str]]:
    """The GPUs of each worker, as many a worker as its engine spreads over; those left over belong to none.

    Raises:
        MissingExtraError: there are not enough for one.
    """
    if len(names) < map_concurrent:
        raise MissingExtraError(
            f"engine.args.tensor_parallel_size is {map_concurrent}, and {counted(len(names), 'GPU')} given; give more, "
            "or lower it."
        )
    return [
        list(names[start : start + map_concurrent])
        for start in range(0, len(names) - map_concurrent + 1, map_concurrent)
    ]


def _count() -> int:
    for count in (_by_driver, _by_smi, _by_folder):
        if found := count():
            return found
    return 0


def _by_driver() -> int:
    """NVML, the library that comes with the driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            return 0
    except (OSError, AttributeError):
        return 0
    number = ctypes.c_uint(0)
    try:
        return number.value if library.nvmlDeviceGetCount_v2(ctypes.byref(number)) == 0 else 0
    finally:
        library.nvmlShutdown()


def _by_smi() -> int:
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    try:
        done = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0


def _by_folder() -> int:
    return len(list(DRIVER_FOLDER.iterdir())) if DRIVER_FOLDER.is_dir() else 0
