"""The places of a worker pool's workers: which GPUs each has, and what became of it."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from relabel.jobs.pool.done import Done
from relabel.jobs.pool.gpus import VISIBLE
from relabel.jobs.pool.worker_processes import WorkerProcess
from relabel.manifests.errors import RelabelError


@dataclass(slots=True)
class Slot:
    """A worker's place: the GPUs it gets, and what became of it so far.

    Args:
        variables: what its environment has beside the supervisor's own.
        starts_s: when its next life begins, on `time.perf_counter`; None if none is due.
        error: why it was given up.
        past: what the lives before did.
    """

    name: str
    variables: dict[str, str]
    starts_s: float | None = 0.0
    process: WorkerProcess | None = None
    num_processes: int = 0
    crashes: int = 0
    error: RelabelError | RuntimeError | None = None
    past: Done = field(default_factory=Done)


def cpu_slots(count: int) -> list[Slot]:
    """Workers that get no GPU of their own."""
    return [Slot(f"w{number}", {}) for number in range(count)]


def gpu_slots(groups: list[list[str]]) -> list[Slot]:
    """A worker for each group of GPUs."""
    return [Slot(f"gpu{'+'.join(group)}", {VISIBLE: ",".join(group)}) for group in groups]


def log_name(slot: Slot) -> str:
    """Where a worker's own lines are kept, below the output."""
    return f"logs/worker-{socket.gethostname()}-{slot.name}.log"
