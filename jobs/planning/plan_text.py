"""A plan in a table."""

from __future__ import annotations

from relabel.jobs.output import table
from relabel.jobs.planning.open_runs import OpenRun
from relabel.labelers.engines.decision_costs import DecisionCost
from relabel.manifests.inputs.input_files import left_out_text
from relabel.manifests.inputs.snapshots import TableSnapshot
from relabel.manifests.models.chat_templates import day_of
from relabel.manifests.plurals import counted
from relabel.manifests.runs.budgets import BudgetState
from relabel.manifests.runs.plans import Plan


def plan_text(opened: OpenRun, chunks_open: int, costs: list[DecisionCost], budget: BudgetState | None) -> str:
    """A plan as `plan` shows it: rows, queries, shards, chunks, what distributions cost, and what of the budget is
    gone.
    """
    found: Plan = opened.plan
    left_out = opened.dataset.left_out
    sizes = [shard.rows for shard in found.shards]
    interval = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
    lies = (
        f"scattered: shards carry row ids, and together read {found.read_ratio:.1f} times the data"
        if found.is_scattered
        else f"together: shards are row ranges (reads: {found.read_ratio:.2f} times the data)"
    )
    return (
        f"{found.name}: {'planned' if opened.was_planned_now else 'planned earlier'}, "
        f"{opened.job.spec.output}/plan.json\n"
    ) + table(
        [
            ("rows", f"{found.rows:,} in {counted(len(found.files), 'file')}"),
            *([("table", _table_text(opened.dataset.table))] if opened.dataset.table else []),
            *([("left out", left_out_text(left_out))] if left_out else []),
            *(("prompts say", f"{day}, the day of the plan") for day in template_days(opened)),
            ("queries", f"{found.queries:,}, {lies}"),
            ("shards", f"{len(sizes):,} of {interval} rows"),
            ("chunks", f"{found.num_chunks:,}, {chunks_open:,} open"),
            *(("distributions", _cost_text(cost)) for cost in costs),
            *([("budget", budget.text)] if budget is not None else []),
            ("fingerprint", found.fingerprint[:16]),
        ]
    )


def template_days(opened: OpenRun) -> list[str]:
    """The day that prompts say by their chat template, if it says one."""
    return list(day_of(opened.job.spec.engine.chat_template_kwargs).values())


def _table_text(table: TableSnapshot) -> str:
    since = "" if table.since is None else f", rows added since {table.since}"
    when = "" if table.committed is None else f" of {table.committed:%Y-%m-%dT%H:%M:%SZ}"
    moved = "" if table.is_latest else f" (the table is at {table.latest} now)"
    return f"{table.format}, {table.folder}, snapshot {table.snapshot}{when}{since}{moved}"


def table_json(table: TableSnapshot | None) -> dict[str, str | None] | None:
    """A snapshot as the result of `plan` has it."""
    if table is None:
        return None
    when = None if table.committed is None else table.committed.isoformat()
    return {**table.identity, "path": table.folder, "committed": when, "latest": str(table.latest)}


def _cost_text(cost: DecisionCost) -> str:
    way = cost.way.replace("_", " ")
    if cost.way == "alone":
        return f"{cost.stage}: no further cost ({cost.basis})"
    if cost.ratio is None:
        return f"{cost.stage}: {way}, cost unknown ({cost.basis})"
    low, high = cost.ratio
    ratio = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
    return f"{cost.stage}: {way}, {ratio} of the requests/s without ({cost.basis})"
