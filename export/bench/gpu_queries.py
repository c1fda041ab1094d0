"""What nvidia-smi tells of the GPU that this process uses first."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping

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
