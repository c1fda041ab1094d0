"""An output that was opened for a job."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.planning.jobs import Job
from manifests.inputs.dataset import Dataset
from manifests.runs.plans import Plan
from manifests.runs.readings import Readings
from manifests.runs.run_folder import RunFolder
from manifests.storage.run_store_ports import RunStore


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A job's output with a plan that fits the job."""

    job: Job
    dataset: Dataset
    store: RunStore
    plan: Plan
    folder: RunFolder
    readings: Readings
    was_planned_now: bool
