"""Opening an output for a job: its plan, made if nobody has, checked against the job, and the input that it was made
for.
"""

from __future__ import annotations

import shlex
from dataclasses import replace

from relabel.jobs.planning.jobs import Job
from relabel.jobs.planning.open_runs import OpenRun
from relabel.labelers.prompts import TEMPLATES_READ
from relabel.manifests.errors import ConfigError, ManifestError, StaleRunError
from relabel.manifests.inputs.dataset import Dataset
from relabel.manifests.runs.fingerprints import check_plan, template_name
from relabel.manifests.runs.known_inputs import KnownInputs, files_written_since, known_dataset, known_file, load_known
from relabel.manifests.runs.plan_making import make_plan
from relabel.manifests.runs.plans import PLAN_NAME, Plan, load_plan, write_plan
from relabel.manifests.runs.readings import Readings
from relabel.manifests.runs.run_folder import RunFolder
from relabel.manifests.runs.run_manifest import MANIFEST_NAME
from relabel.manifests.storage.run_store_ports import RunStore, read_if_there
from relabel.manifests.storage.run_stores import open_run_store


def open_run(job: Job, *, may_plan: bool = True, may_write: bool = True) -> OpenRun:
    """Open the output of a job, planning it if nobody has.

    Args:
        may_plan: make a plan where there is none.
        may_write: write that plan down; off for a look at what would be done.
    Raises:
        ConfigError: the job is a search in several rounds, each of which is a run of its own.
        StaleRunError: the output has a plan for another job or other inputs, or belongs to something that is not a run.
        ManifestError: there is no plan and `may_plan` is off.
    """
    if job.spec.rounds is not None:
        raise ConfigError(
            f"{job.where}: has `rounds`, so that it is no single run. Give it to `relabel rounds`; each of its rounds "
            f"is a run: {job.spec.output}/round-1 and so on."
        )
    run, job_as_given = job.spec.run, job
    store = open_run_store(job.spec.output, job.storage, single_writer=run.single_writer)
    plan = load_plan(store)
    known = None if plan is None else load_known(store, plan)
    if plan is not None:
        job = _at_planned_snapshot(job, plan)
    else:
        job.model_digest()  # which fetches the model
    job = job.at_day_of(plan)
    dataset = _open_dataset(job, plan, known)
    if dataset.table is not None:
        job = _at_snapshot(job, dataset.table.snapshot)
    parts = job.parts(dataset)
    was_planned_now = False
    if plan is None:
        if not may_plan:
            raise ManifestError(
                f"{job.spec.output}: no plan there yet. Run the job first, with the --set and --date that this command "
                f"had, if any: relabel run {shlex.quote(job.where)}"
            )
        if _holds_manifest(store) and load_plan(store) is None:  # again: another worker may have come between
            raise StaleRunError(
                f"{job.spec.output}: holds a {MANIFEST_NAME} without a {PLAN_NAME}, so it belongs to something else, "
                "say to a student. Name another `output`."
            )
        if may_write:
            # a store that can't keep commits single is refused before anything is read or written
            store.check_conditional_writes()
        plan, beside = make_plan(
            dataset, parts, name=job.spec.name, shards=job.spec.shards, chunk_rows=job.spec.run.chunk_rows
        )
        beside.add(known_file(dataset, plan, job.spec.input, job.reads))
        templates = {*job.labeler.template_digests.values()} & TEMPLATES_READ.keys()
        beside.add({template_name(digest): TEMPLATES_READ[digest] for digest in sorted(templates)})
        if may_write:
            for folder in ("", "plan"):
                store.sweep(folder)
            was_planned_now = write_plan(store, plan, beside)
            plan = load_plan(store) or plan
            if not was_planned_now and plan.parts != parts:
                # the table or the day moved on between this worker's look and that of the one who planned
                return open_run(job_as_given, may_plan=may_plan, may_write=may_write)
    check_plan(
        plan,
        dataset,
        parts,
        output=job.spec.output,
        template=lambda digest: TEMPLATES_READ.get(digest) or read_if_there(store, template_name(digest)),
    )
    readings = Readings(
        store,
        where=job.spec.output,
        block_rows=plan.chunk_rows,
        keeps=may_write,
        changed=() if known is None else files_written_since(known, plan, dataset),
    )
    return OpenRun(job, dataset, store, plan, RunFolder(store, plan), readings, was_planned_now)


def _at_planned_snapshot(job: Job, plan: Plan) -> Job:
    """A job over the snapshot that its output was planned for, wherever the table is by now.

    Raises:
        StaleRunError: the job names another one.
    """
    asked = job.spec.input
    planned = None if asked.table is None else plan.facts.table
    if planned is None or asked.table != planned.format:
        return job  # `check_plan` says what differs
    snapshot = planned.snapshot if asked.snapshot is None else str(asked.snapshot)
    named = replace(planned, snapshot=snapshot, since=None if asked.since is None else str(asked.since))
    if named != planned:
        raise StaleRunError(
            f"{job.spec.output}: was planned for {planned} of the table, and the job names {named}. An output keeps "
            f"its snapshot. To go on, name {planned} (or no input.snapshot); to label the other, name another `output`."
        )
    return _at_snapshot(job, int(planned.snapshot))


def _at_snapshot(job: Job, snapshot: int) -> Job:
    read = job.spec.input.model_copy(update={"snapshot": snapshot})
    return replace(job, spec=job.spec.model_copy(update={"input": read}))


def _holds_manifest(store: RunStore) -> bool:
    return read_if_there(store, MANIFEST_NAME) is not None


def _open_dataset(job: Job, plan: Plan | None, known: KnownInputs | None) -> Dataset:
    """Find the input; where a listing shows it as it was planned, its footers need no further look."""
    if plan is None or known is None:
        return job.open_dataset()
    return job.open_dataset(lambda listed: known_dataset(known, plan, job.spec.input, listed, job.storage, job.reads))
