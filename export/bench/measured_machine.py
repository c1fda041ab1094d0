"""The machine that figures were measured on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuState:
    """A GPU at one moment; None where the driver does not tell."""

    sm_mhz: float | None
    memory_mhz: float | None
    power_w: float | None
    temperature_c: float | None


@dataclass(frozen=True)
class MeasuredGpu:
    """The GPU of a bench, and its state before and after."""

    name: str
    driver: str
    memory_mib: float | None
    power_limit_w: float | None
    max_sm_mhz: float | None
    before: GpuState | None
    after: GpuState | None


@dataclass(frozen=True, kw_only=True)
class MeasuredMachine:
    """What a bench ran on; None where the system does not tell.

    Args:
        cpu_quota: cores' worth of time that a container may take.
        threads: of the CPU that the models used.
        has_amx: whether the CPU computes bf16 in AMX; None in figures of earlier days.
        gpu: None without one.
        versions: of the libraries that are installed.
    """

    cpu: str
    cores: int | None
    usable_cores: int
    cpu_quota: float | None = None
    threads: int
    mhz_before: float | None
    mhz_after: float | None
    governor: str | None
    power_w: float | None
    load_before: float | None
    load_after: float | None
    memory_bytes: int | None
    has_amx: bool | None = None
    gpu: MeasuredGpu | None
    system: str
    python: str
    versions: dict[str, str]

    @property
    def onnxruntime(self) -> str | None:
        """Its version, of whichever package it was installed by."""
        return self.versions.get("onnxruntime") or self.versions.get("onnxruntime-gpu")
