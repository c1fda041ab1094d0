"""An output that was opened for a job."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.planning.job_files import Job
from manifests.dataset import Dataset
from manifests.plans import Plan
from manifests.readings import Readings
from manifests.runs import RunFolder
from manifests.store import Store


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A job's output with a plan that fits the job."""

    job: Job
    dataset: Dataset
    store: Store
    plan: Plan
    folder: RunFolder
    readings: Readings
    was_planned_now: bool
