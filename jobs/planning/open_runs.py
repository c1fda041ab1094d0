"""An output that was opened for a job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import PurePosixPath

from relabel.jobs.planning.jobs import Job
from relabel.manifests.inputs.dataset import Dataset
from relabel.manifests.runs.plans import Plan, load_plan
from relabel.manifests.runs.readings import Readings
from relabel.manifests.runs.run_folder import RunFolder
from relabel.manifests.storage.run_store_ports import RunStore
from relabel.manifests.storage.run_stores import open_run_store


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


def other_rounds(job: Job) -> Iterator[RunFolder]:
    """The rounds of a search beside the one whose job this is, as far as they were planned; none for other jobs."""
    if job.ledger is None:
        return
    for name in map("round-{}".format, count(1)):
        store = open_run_store(f"{job.ledger}/{name}", job.storage, single_writer=job.spec.run.single_writer)
        if (plan := load_plan(store)) is None:
            return
        if PurePosixPath(job.spec.output).name != name:  # the folder before it may be written in two ways
            yield RunFolder(store, plan)
