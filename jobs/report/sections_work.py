"""Sections about the work: rows a second and restarts, plan against actual, tokens and cost."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import numpy as np

from relabel.jobs.report.blocks import Badge, Block, Cell, Drawing, Fold, Paragraph, Section, Side, Table
from relabel.jobs.report.downloads import csv_download
from relabel.jobs.report.plots import draw_lines
from relabel.jobs.report.plotted import Line
from relabel.jobs.report.run_artifact import Commit, RunArtifact
from relabel.jobs.report.sections_runs import TalliedRun
from relabel.manifests.runs.kept_estimates import plan_against_actual

TIME_BINS = 48
TOTALS = (
    "Work in all; a row that is retried is asked twice. In vain: chunks that another worker had committed first, "
    "counted nowhere else"
)
SHORTEST_S = 1e-3
"""Receipts tell times to the millisecond."""


def throughput_section(runs: Sequence[TalliedRun]) -> Section:
    """Rows a second from commit to commit, with the moments at which a worker's process (and so an engine) began."""
    blocks: list[Block] = []
    figures: list[Block] = []
    starts: list[list[Cell]] = []
    for run, _, _ in runs:
        commits = [commit for commit in run.commits if commit.asked]
        if not commits:
            continue
        begun = min(commits, key=lambda commit: commit.started).started
        workers = _workers(commits)
        series = _rates(commits, begun)
        marks = [_since(begun, first) for first, _, _, how in workers if how == "after another had ended"]
        rows = list(zip(series.places, series.values, strict=True))
        total = sum(commit.asked for commit in commits)
        seconds = max(SHORTEST_S, _since(begun, max(commit.committed for commit in commits)))
        again = sum(how == "after another had ended" for *_, how in workers)
        retried = sum(commit.asked for commit in commits if commit.attempt > 1)
        asked = f"{total:,} rows asked, {retried:,} of these again by a retry," if retried else f"{total:,} rows asked"
        note = (
            f"{asked} in {_seconds_text(seconds)} from the first start to the last commit: "
            f"{_rate_text(total / seconds)} rows/s. "
        )
        note += f"Worker processes: {len(workers):,}, of which {again:,} began after another had ended (dotted lines)."
        svg = draw_lines([series], label="seconds since the start", value="rows/s", marks=marks, starts_at_0=True)
        figures.append(
            Drawing(
                f"Rows a second, {run.name}",
                svg,
                note,
                csv_download(f"throughput-{run.name}", ("seconds", "rows_per_s"), rows),
                note,
            )
        )
        starts += [[run.name, worker, first, last, how] for first, last, worker, how in workers]
    if figures:
        head = ("run", "worker", "first start", "last commit", "began")
        table = Table(
            head,
            starts[:200],
            "Worker processes; each starts an engine of its own",
            csv_download("workers", head, starts),
        )
        text = "By the times in receipts. A chunk counts at its commit, so that a run of few chunks shows steps."
        blocks = [Paragraph(text), Side(figures), Fold(f"Worker processes: {len(starts):,}", [table])]
    return Section("throughput", "Throughput", blocks)


def _workers(commits: Sequence[Commit]) -> list[tuple[str, str, str, str]]:
    """First start, last commit, name, and how it began, of every worker process, in the order of their starts."""
    spans: dict[str, tuple[str, str]] = {}
    for commit in commits:
        first, last = spans.get(commit.worker, (commit.started, commit.committed))
        spans[commit.worker] = min(first, commit.started), max(last, commit.committed)
    found = []
    for worker, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        before = [other for other in spans.values() if other[0] < first]
        how = (
            "first"
            if not before
            else "after another had ended"
            if any(other[1] <= first for other in before)
            else "beside others"
        )
        found.append((first, last, worker, how))
    return found


def _rates(commits: Sequence[Commit], begun: str) -> Line:
    """Rows a second in equal steps of time."""
    end_s = max(SHORTEST_S, *(_since(begun, commit.committed) for commit in commits))
    count = min(TIME_BINS, max(1, len(commits)))
    width = end_s / count
    rows_T = np.zeros(count)
    for commit in commits:
        rows_T[min(count - 1, int(_since(begun, commit.committed) / width))] += commit.asked
    values = (rows_T / width).tolist()
    return Line(
        "rows/s", [round(number * width, 6) for number in range(count + 1)], [*values, values[-1]], is_stepped=True
    )


def _seconds_text(seconds: float) -> str:
    return f"{seconds:,.3f} s" if seconds < 10 else f"{seconds:,.1f} s" if seconds < 1000 else f"{seconds:,.0f} s"


def _rate_text(rate: float) -> str:
    return f"{rate:,.2f}" if rate >= 0.1 else f"{rate:.2g}"


def _since(begun: str, moment: str) -> float:
    return (datetime.fromisoformat(moment) - datetime.fromisoformat(begun)).total_seconds()


def plan_section(runs: Sequence[TalliedRun]) -> Section:
    """What was said before the first commit, beside what came."""
    rows: list[list[Cell]] = []
    for run, _, _ in runs:
        lines = plan_against_actual(run.store, run.found.tally) if run.is_finished else None
        for line in lines or ():
            verdict = Badge("within", "good") if line.is_within else Badge("outside", "warn")
            numbers = (int(one) if float(one).is_integer() else one for one in (*line.planned, line.actual))
            rows.append([run.name, line.figure, *numbers, verdict])
    head = ("run", "figure", "planned, low", "planned", "planned, high", "actual", "verdict")
    table = Table(
        head,
        rows,
        "What the plan said, with its 95 % interval, and what came",
        csv_download("plan-against-actual", head[:-1], [row[:-1] for row in rows]),
    )
    return Section("plan", "Plan against actual", [table] if rows else [])


def cost_section(runs: Sequence[TalliedRun]) -> Section:
    """Requests and tokens by stage, worker time, and what that cost where the spec names a price."""
    rows: list[list[Cell]] = []
    totals: list[list[Cell]] = []
    is_priced = False
    for run, _, _ in runs:
        tally = run.found.tally
        for stage, counts in tally.stages.items():
            prompt = counts.get("prompt_tokens", 0)
            hit = counts.get("cached_tokens", 0) / prompt if prompt else None
            rows.append([run.name, stage, counts.get("asks", 0), prompt, counts.get("output_tokens", 0), hit])
        cost = _cost(run, tally.worker_seconds)
        is_priced |= cost is not None
        tokens = sum(
            counts.get("prompt_tokens", 0) + counts.get("output_tokens", 0) for counts in tally.stages.values()
        )
        made = tally.labelled + tally.num_quarantined
        asked = sum(commit.asked for commit in run.commits)
        if made and asked:
            lost = run.in_vain
            lost_tokens = lost.prompt_tokens + lost.output_tokens
            figures = (tally.worker_seconds, tokens / made, tokens / asked)
            totals.append([run.name, made, asked, tokens, lost.pairs, lost.requests, lost_tokens, *figures, cost])
    head = ("run", "stage", "requests", "prompt tokens", "output tokens", "share of cached prompt tokens")
    blocks: list[Block] = []
    if rows:
        blocks.append(
            Table(
                head,
                rows,
                "Requests and tokens by stage; a shared answer counts once",
                csv_download("tokens", head, rows),
            )
        )
    if totals:
        total_head = [
            "run",
            "rows",
            "rows asked with retries",
            "tokens",
            "rows in vain",
            "requests in vain",
            "tokens in vain",
        ]
        total_head += ["worker seconds", "tokens a row", "tokens a row asked"]
        total_head += ["cost"] if is_priced else []
        totals = [row[: len(total_head)] for row in totals]
        blocks.append(Table(total_head, totals, TOTALS, csv_download("cost", total_head, totals)))
        if not is_priced:
            blocks.append(
                Paragraph(
                    "The specs name no price (cost_per_gpu_hour), so there is no cost in money. Worker seconds leave "
                    "out engine starts."
                )
            )
    return Section("cost", "Cost", blocks)


def _cost(run: RunArtifact, worker_seconds: float) -> float | None:
    """In the money of the spec's price; None where it names none."""
    price = run.spec.get("cost_per_gpu_hour")
    gpus = run.spec_part("engine", "args").get("tensor_parallel_size") or 1
    if not isinstance(price, int | float) or not isinstance(gpus, int):
        return None
    return worker_seconds / 3600 * price * gpus
