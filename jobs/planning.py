"""What `relabel plan` shows: how a job's input is cut, and what its run will take."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from relabel.jobs import logs
from relabel.jobs.job import Job, OpenRun, open_planned, open_run
from relabel.jobs.output import grid
from relabel.jobs.run.allowance import budget_so_far
from relabel.jobs.run.estimate import Estimate
from relabel.jobs.run.report import limited
from relabel.manifests.budgets import BudgetState
from relabel.manifests.chat_templates import day_of
from relabel.manifests.errors import StaleRunError
from relabel.manifests.inputs import left_out_text
from relabel.manifests.records import plain
from relabel.manifests.secrets import counted
from relabel.manifests.store import LocalStore
from relabel.manifests.table_snapshots import TableSnapshot

LITTLE_BYTES = 64 << 20
"""Up to so much that shards read again, nothing is reported."""
DIFFERENCES_SHOWN = 4
"""From a job that an output belongs to."""


@contextmanager
def trial_of(job: Job) -> Iterator[OpenRun]:
    """The job opened as its output was planned for it; else planned in a folder that goes away, so that a trial claims
    no output.

    Raises:
        ConfigError, InputError, ModelError: as `open_run`.
    """
    try:
        planned = open_planned(job)
    except StaleRunError as exc:
        for line in refusal_lines(str(exc)):
            logs.write(line, event="remark")
        planned = None
    if planned is not None:
        yield planned
        return
    with tempfile.TemporaryDirectory(prefix="relabel-plan-") as folder:
        opened = open_run(job, scratch=LocalStore(folder))
        yield replace(opened, was_planned_now=False, is_trial=True)


def refusal_lines(refusal: str) -> list[str]:
    """Why a run would be refused, with the first of the differences that are listed."""
    head, *lines = refusal.splitlines()
    shown = lines[:DIFFERENCES_SHOWN]
    if len(lines) > len(shown):
        shown.append(f"  … and {len(lines) - len(shown):,} lines more; `relabel run` gives them all")
    return [f"note: `run` would refuse: {head}", *shown]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """A job's plan and what is done of it.

    Args:
        is_trial: of settings that were tried; nothing was written.
        input_rows: with those beyond `input.limit`.
        table: the snapshot that it is of, where the input is a table.
        left_out: rows of the input that are not labelled, by reason.
        read_ratio: data that all shards together read, over the data that is there.
        template_day: the day that prompts say by their chat template, if it says one.
        shard_rows: rows of each shard.
    """

    name: str
    output: str
    was_planned_now: bool
    is_trial: bool
    fingerprint: str
    rows: int
    input_rows: int
    queries: int
    files: int
    table: TableSnapshot | None
    left_out: Sequence[tuple[str, int]]
    chunks: int
    chunks_open: int
    is_scattered: bool
    read_ratio: float
    text_bytes: int
    estimate: Estimate
    estimated_prompt_tokens: int
    variables: Mapping[str, str]
    template_day: str | None
    budget: BudgetState | None
    canary: int
    shard_rows: list[int]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        return {
            "output": self.output,
            "was_planned_now": self.was_planned_now,
            "is_trial": self.is_trial,
            "fingerprint": self.fingerprint,
            "rows": self.rows,
            "input_rows": self.input_rows,
            "queries": self.queries,
            "files": self.files,
            "table": _table_json(self.table),
            "left_out": dict(self.left_out),
            "shards": len(self.shard_rows),
            "chunks": self.chunks,
            "chunks_open": self.chunks_open,
            "is_scattered": self.is_scattered,
            "read_ratio": round(self.read_ratio, 3),
            "text_bytes": self.text_bytes,
            "estimate": self.estimate.as_json(),
            "estimated_prompt_tokens": self.estimated_prompt_tokens,
            "variables": dict(self.variables),
            "template_day": self.template_day,
            "budget": plain(self.budget),
            "canary": self.canary,
            "shard_rows": self.shard_rows,
            "seconds": round(self.seconds, 3),
        }

    def lines(self) -> list[str]:
        """Rows, queries, shards, chunks, what of the budget is gone, and the estimate."""
        rows = [("rows", f"{limited(self.rows, self.input_rows)} in {counted(self.files, 'file')}")]
        if self.table:
            rows.append(("table", _table_text(self.table)))
        if self.left_out:
            rows.append(("left out", left_out_text(self.left_out)))
        if self.template_day is not None:
            rows.append(("prompts say", f"{self.template_day}, the day of the plan"))
        rows.append(("queries", f"{self.queries:,}, {self._layout()}"))
        if (self.read_ratio - 1) * self.text_bytes > LITTLE_BYTES:
            rows.append(("reads", f"{self.read_ratio:.1f} times the data: {self._why_more()}"))
        rows += [
            ("shards", self._shards()),
            ("chunks", f"{self.chunks:,}, {self.chunks_open:,} open"),
        ]
        if self.budget is not None:
            rows.append(("budget", self.budget.text))
        if self.canary:
            rows.append(("canary", f"up to {self.canary:,} labelled rows are asked again first, beyond this estimate"))
        rows.append(("fingerprint", self.fingerprint[:16]))
        when = "planned" if self.was_planned_now else "planned earlier"
        head = f"{self.name}: {when}, {self.output}/plan.json"
        if self.is_trial:
            head = f"{self.name}: tried with --set, nothing is written"
        return [head, *grid(rows).split("\n"), *self.estimate.lines()]

    def _layout(self) -> str:
        """How the rows of a query lie."""
        return "their rows scattered over the input" if self.is_scattered else "the rows of each next to each other"

    def _why_more(self) -> str:
        """Why shards together read more than the data, and what to do."""
        if self.is_scattered:
            return "each shard looks for its rows everywhere. Sort the input by query to read it once"
        return "shards share row groups of the files. Fewer shards, or files of smaller row groups, read less"

    def _shards(self) -> str:
        least = min(self.shard_rows)
        most = max(self.shard_rows)
        sizes = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        workers = counted(len(self.shard_rows), "worker")
        return f"{len(self.shard_rows):,} of {sizes} rows, for up to {workers}"


def plan_result(opened: OpenRun, estimate: Estimate, *, seconds: float) -> PlanResult:
    """The plan of an output that was opened."""
    plan = opened.plan
    spec = opened.job.spec
    num_done = sum(map(len, opened.folder.attempts_of_all().values()))
    return PlanResult(
        name=plan.name,
        output=spec.output,
        was_planned_now=opened.was_planned_now,
        is_trial=opened.is_trial,
        fingerprint=plan.fingerprint,
        rows=plan.rows,
        input_rows=plan.input_rows,
        queries=plan.queries,
        files=len(plan.files),
        table=opened.dataset.table,
        left_out=opened.dataset.left_out,
        chunks=plan.num_chunks,
        chunks_open=plan.num_chunks - num_done,
        is_scattered=plan.is_scattered,
        read_ratio=plan.read_ratio,
        text_bytes=plan.text_bytes,
        estimate=estimate,
        estimated_prompt_tokens=sum(shard.estimated_tokens for shard in plan.shards),
        variables=opened.job.variables,
        template_day=next(iter(day_of(spec.engine.chat_template_kwargs).values()), None),
        budget=budget_so_far(opened),
        canary=opened.job.spec.canary,
        shard_rows=[shard.rows for shard in plan.shards],
        seconds=seconds,
    )


def _table_text(table: TableSnapshot) -> str:
    since = "" if table.since is None else f", rows added since {table.since}"
    when = "" if table.committed is None else f" of {table.committed:%Y-%m-%dT%H:%M:%SZ}"
    moved = "" if table.snapshot == table.latest else f" (the table is at {table.latest} now)"
    return f"{table.format}, {table.folder}, snapshot {table.snapshot}{when}{since}{moved}"


def _table_json(table: TableSnapshot | None) -> dict[str, str | None] | None:
    if table is None:
        return None
    when = None if table.committed is None else table.committed.isoformat()
    return {**table.identity, "path": table.folder, "committed": when, "latest": str(table.latest)}
