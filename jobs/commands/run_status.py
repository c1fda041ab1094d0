"""How far a run has come: what `status` says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from relabel.jobs.output import table
from relabel.jobs.planning.job_files import priced_args
from relabel.manifests.charges import Charge
from relabel.manifests.engine_options import price_of
from relabel.manifests.runs.budgets import BudgetState, ByReceipts, budget_of
from relabel.manifests.runs.estimates import PlannedFigure
from relabel.manifests.runs.kept_estimates import plan_against_actual
from relabel.manifests.runs.run_folder import RunFolder
from relabel.manifests.runs.run_manifest import load_manifest
from relabel.manifests.specs import EngineArgs
from relabel.manifests.storage.run_stores import shard_lock_name

SHARDS_SHOWN = 20
SHOWN_OUTSIDE = 4


@dataclass(frozen=True)
class ShardStatus:
    """How far one shard has come; `running` while a worker holds it."""

    shard: int
    rows: int
    chunks: int
    chunks_done: int
    state: Literal["done", "running", "open"]


@dataclass(frozen=True)
class RunStatus:
    """How far a run has come, the fields of the JSON of `status` in their order.

    Args:
        is_finished: a manifest says what the receipts say now.
        over_limit: more rows in quarantine than the job allows; None before there is a manifest.
        stages: asks and tokens of each stage.
        plan_against_actual: None if nothing was estimated.
        budget: None where the job has none.
        cost: of the tokens of what is committed, in the currency of the prices; None unless both are known.
    """

    name: str
    output: str
    fingerprint: str
    rows: int
    rows_done: int
    labelled: int
    reused: int
    quarantined: int
    quarantined_by_status: dict[str, int]
    chunks: int
    chunks_done: int
    is_finished: bool
    over_limit: bool | None
    stages: dict[str, dict[str, int]]
    plan_against_actual: list[PlannedFigure] | None
    budget: BudgetState | None
    cost: float | None
    shards: list[ShardStatus]


def status_of(folder: RunFolder, engine: Any = None) -> RunStatus:
    """Read from receipts and locks.

    Args:
        engine: plain values of the job's engine, for its prices; without them those of the manifest count.
    Raises:
        ManifestError: one of a run's files is damaged.
    """
    plan, manifest = folder.plan, load_manifest(folder.store)
    found = folder.snapshot(manifest=manifest)
    tally = found.tally
    args = priced_args(engine or (manifest.spec.get("engine") if manifest else None))
    return RunStatus(
        name=plan.name,
        output=folder.store.root,
        fingerprint=plan.fingerprint,
        rows=plan.rows,
        rows_done=tally.rows,
        labelled=tally.labelled,
        reused=tally.reused,
        quarantined=tally.num_quarantined,
        quarantined_by_status=tally.quarantined,
        chunks=plan.num_chunks,
        chunks_done=tally.chunks_done,
        is_finished=manifest is not None and manifest.receipts_sha256 == found.digest,
        over_limit=manifest.over_limit if manifest else None,
        stages=tally.stages,
        plan_against_actual=plan_against_actual(folder.store, tally),
        budget=budget_of(
            folder.store, ByReceipts(_charge(args, tally.tokens), _charge(args, tally.tokens_beyond_budget))
        ),
        cost=None if args is None else price_of(args, *tally.tokens),
        shards=_shards(folder, folder.attempts_in(found.etags)),
    )


def _charge(args: EngineArgs | None, tokens: tuple[int, int]) -> Charge:
    return Charge(sum(tokens), 0.0 if args is None else price_of(args, *tokens) or 0.0)


def _shards(folder: RunFolder, attempts: Mapping[int, Mapping[int, list[int]]]) -> list[ShardStatus]:
    shards = []
    for number, shard in enumerate(folder.plan.shards):
        done = len(attempts.get(number, ()))
        state: Literal["done", "running", "open"] = "open"
        if done == len(shard.chunks):
            state = "done"
        elif folder.store.is_locked(shard_lock_name(number)):
            state = "running"
        shards.append(ShardStatus(number, shard.rows, len(shard.chunks), done, state))
    return shards


def status_text(run: RunStatus) -> str:
    """For people: figures of the whole run, and the shards that are open."""
    by_status = ", ".join(f"{count:,} {name}" for name, count in sorted(run.quarantined_by_status.items()))
    state = "over the quarantine limit" if run.over_limit else "finished" if run.is_finished else "not finished"
    rows = [
        ("rows", f"{run.rows_done:,} of {run.rows:,} done"),
        ("labelled", f"{run.labelled:,}"),
        ("reused", f"{run.reused:,}"),
        ("quarantined", f"{run.quarantined:,}" + (f" ({by_status})" if by_status else "")),
        ("chunks", f"{run.chunks_done:,} of {run.chunks:,}"),
    ]
    if run.plan_against_actual and run.is_finished:
        rows.append(("against plan", _against_text(run.plan_against_actual)))
    if run.budget is not None:
        rows.append(("budget", run.budget.text))
    if run.cost is not None and (run.budget is None or run.budget.max_cost is None):
        rows.append(("cost", f"{run.cost:,.4f} in money for the tokens of what is committed"))
    open_shards = [shard for shard in run.shards if shard.state != "done"]
    rows.append(("shards", f"{len(run.shards) - len(open_shards):,} of {len(run.shards):,} done"))
    rows += [
        (f"  shard {shard.shard}", f"{shard.state}, {shard.chunks_done:,} of {shard.chunks:,} chunks")
        for shard in open_shards[:SHARDS_SHOWN]
    ]
    if len(open_shards) > SHARDS_SHOWN:
        rows.append(("  …", f"{len(open_shards) - SHARDS_SHOWN:,} more open"))
    return f"{run.name}: {state}, {run.output}\n" + table(rows)


def _against_text(figures: list[PlannedFigure]) -> str:
    outside = [one for one in figures if not one.is_within]
    named = "".join(
        f"; {one.figure} {one.actual:,.6g}, planned {one.planned[1]:,.6g}" for one in outside[:SHOWN_OUTSIDE]
    )
    return f"{len(figures) - len(outside):,} of {len(figures):,} figures within their intervals{named}"
