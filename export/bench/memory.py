"""Memory that a measurement takes: the process's own at its peak, and the GPU's."""

from __future__ import annotations

from pathlib import Path

from relabel.export.bench.gpu_queries import query_gpu

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
