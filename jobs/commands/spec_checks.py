"""Whether a job could start here: its checks in order, up to the first that fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from relabel.jobs.exits import Exit, exit_for
from relabel.jobs.job import Job, load_job
from relabel.manifests.errors import RelabelError, StoreError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.gold import load_gold_by_row
from relabel.manifests.secrets import counted
from relabel.manifests.store import has_links, open_run_store
from relabel.manifests.tables import read_grades

STEPS = ("spec", "input", "model", "engine", "server", "output")
"""Of a job; one with nothing to check is not shown."""


def checked(job_file: str) -> tuple[dict[str, str], Exit]:
    """Each check with its outcome, and the exit code of the one that failed."""
    found, outcomes = dict[str, str](), _outcomes(job_file)
    try:
        for step in STEPS:
            found[step] = next(outcomes)
    except RelabelError as exc:
        found[STEPS[len(found)]] = str(exc)
        return found, exit_for(exc)
    return {step: outcome for step, outcome in found.items() if outcome}, Exit.DONE


def _outcomes(job_file: str) -> Iterator[str]:
    job = load_job(job_file)
    yield "fine"
    yield _input(job)
    yield f"{job.spec.engine.model or job.spec.engine.name}, digest {job.model_digest()[:12]}"
    job.engine_class.check(job.spec.engine)
    yield f"{job.spec.engine.name} can start"
    engine = job.engine_class
    asks = job.labeler.probe()
    yield engine.try_server(job.spec.engine, asks, job.secrets)
    yield _output(job.spec.output, job.storage, single_writer=job.spec.run.single_writer)


def _input(job: Job) -> str:
    if job.spec.rounds is not None:
        return "questions for `relabel rounds`, which reads them; not checked here"
    dataset = job.open_dataset()
    if dataset.columns.gold is not None:
        for file in dataset.files:
            grades = read_grades(load_gold_by_row([file.path], dataset.columns.gold, job.storage))
            grades.readable(file.path, dataset.columns.gold)
    columns = ", ".join(dataset.columns.document)
    return f"{counted(dataset.rows, 'row')} in {counted(len(dataset.files), 'file')}, document from {columns}"


def _output(place: str, storage: Storage, *, single_writer: bool = False) -> str:
    """Whether the output can be written; of storage, whether commits will be single there, by the probe that a run
    writes.
    """
    if is_url(place):
        open_run_store(place, storage, single_writer=single_writer).check_conditional_writes()
        if single_writer:
            return f"{place}: not checked for conditional writes (run.single_writer)"
        return f"{place} can be written, and heeds conditions"
    there = Path(place)
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise StoreError(f"{there}: a file, where the output wants a folder. Name another.")
    if not os.access(there, os.W_OK):
        raise StoreError(f"{there}: no permission to write there.")
    if not has_links(there):
        return (
            f"{place} can be written, but its file system has no hard links: a worker that is killed, or loses its "
            "power, in the middle of a commit leaves half a receipt, which is named then and has to be moved away"
        )
    return f"{place} can be written"
