"""Estimates of a run's asks, time and cost as ranges, with probes of the engine and the text of a plan."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, NamedTuple

from relabel.jobs.job import Job, OpenRun, open_run
from relabel.jobs.output import table
from relabel.jobs.run.counts import Progress
from relabel.jobs.run.execution import ask_unwritten, start_engine
from relabel.jobs.run.rates import Rates, keep_rates, load_rates, rates_of, seconds_of, with_options_begun_with
from relabel.jobs.run.results import engine_text
from relabel.jobs.run.reuse import earlier_outputs
from relabel.jobs.run.token_counts import (
    SAMPLE_TEXT,
    History,
    count_exactly,
    count_reused,
    estimated_stages,
    history_of,
    sampled_stages,
)
from relabel.manifests.costs import BudgetState, Estimate, EstimateBasis, Range, StageEstimate
from relabel.manifests.errors import UsageError
from relabel.manifests.input_files import left_out_text
from relabel.manifests.labels import Pair
from relabel.manifests.manifest import ESTIMATE_NAME, ESTIMATE_VERSION
from relabel.manifests.models import day_of
from relabel.manifests.plan import Plan, chunk_row_ids, stages_changed
from relabel.manifests.receipts import Receipt
from relabel.manifests.records import sealed_json
from relabel.manifests.reuse import EarlierOutput, why_nothing
from relabel.manifests.rows import pairs_by_number
from relabel.manifests.run import RunFolder
from relabel.manifests.secrets import counted
from relabel.manifests.specs import JobSpec, gpus_of, is_batched, price_of
from relabel.manifests.table_snapshots import TableSnapshot

# ------------------------------------------------------------------------------
# What a run would ask, take and cost: gathers the counts and ratios that `manifests/costs.py` turns into
# ranges.
#
# Counts come from footers and plans, or under `--exact` from the text, streamed once: keys are looked up, every labeler
# is walked with made-up answers, prompts are counted by the engine's own tokenizer. Ratios come from the receipts of
# this output, else of the first reused output that the same labeler, engine and model made; else `plan` counts the
# prompts of a sample of the rows, and how long answers are and how fast they come is known from this model's last run
# on this device or from a probe. What none of these tells is a stated default, and seconds are not known.


@dataclass(frozen=True, slots=True)
class Planned:
    """An estimate, and what is said of each reused output: rows that it can give, or why it gives none."""

    estimate: Estimate
    remarks: list[str]


CHEAP_BYTES = 256 << 20
"""Up to so much text, what is reused is counted by the keys of the rows and not guessed: a second or two of hashing."""


def estimate_run(
    opened: OpenRun, *, is_exact: bool, is_sampled: bool = False, probe: Callable[[], Rates | None] | None = None
) -> Planned:
    """Estimate what the open chunks of a run will ask.

    Args:
        is_exact: stream the text once and count.
        is_sampled: where no receipts tell, count the tokens of a few hundred rows, and cheap keys of reused ones. The
            start of a run leaves this out: it makes the keys anyway.
        probe: measures the engine's rates, where no receipts tell.
    """
    outputs = earlier_outputs(opened.job)
    done = opened.folder.attempts_of_all()
    pending = {
        number: [chunk for chunk in range(len(shard.chunks)) if chunk not in done.get(number, {})]
        for number, shard in enumerate(opened.plan.shards)
    }
    rows = sum(opened.plan.shards[number].chunks[chunk] for number, chunks in pending.items() for chunk in chunks)
    num_chunks = sum(map(len, pending.values()))
    history = history_of(opened, outputs)
    kept = _kept_stages(opened, outputs)
    rates, known_from = load_rates(opened) if history is None else (None, history.basis)
    if probe is not None and rows and history is None and (rates := probe()) is not None:
        known_from = rates.basis
    counts = count_exactly(opened, outputs, pending, history) if is_exact else None
    sampled = sampled_stages(opened, rates) if is_sampled and rows and not is_exact and history is None else {}
    reused, basis = (Range.exact(counts.reused), "counted") if counts else _reused_by_footers(opened, outputs, rows)
    text_bytes = sum(size for file in opened.dataset.group_bytes for _, size in file)
    if is_sampled and reused.low < reused.high and text_bytes <= CHEAP_BYTES:
        reused, basis = Range.exact(count_reused(opened, outputs, pending)), "counted"
    asked = Range(max(0.0, rows - reused.high), max(0.0, rows - reused.value), max(0.0, rows - reused.low))
    stages = estimated_stages(opened, asked, history, kept, counts, num_chunks, sampled, rates)
    seconds = _seconds(stages, asked, history, num_chunks, rates)
    spec = opened.job.spec
    found = Estimate(
        rows=rows,
        rows_reused=reused.rounded(),
        rows_asked=asked.rounded(),
        stages=stages,
        seconds=None if seconds is None else seconds.rounded(3),
        cost=_cost(spec, seconds, stages),
        is_exact=is_exact,
        basis=EstimateBasis(
            rows_reused=basis,
            tokens="counted, without repeated attempts"
            if counts
            else history.basis
            if history
            else f"counted in {SAMPLE_TEXT}"
            if sampled
            else "defaults",
            output_tokens=known_from if history or rates else "defaults: 2 to 100 % of each stage's cap",
            prefix_hit="prompts that neighbours share"
            if counts
            else known_from
            if history or rates
            else f"prompts that neighbours share in {SAMPLE_TEXT}"
            if sampled
            else "the templates' share of a prompt",
            seconds=known_from,
        ),
    )
    remarks = [_remark(opened, earlier) for earlier in outputs]
    if spec.canary and asked.high and (outputs or done):
        remarks.append(f"canary: up to {spec.canary:,} rows are asked again on top, once an engine")
    if probe is not None and history is not None:
        remarks.append("probe: nothing was asked, since receipts tell more")
    return Planned(found, remarks)


def _cost(spec: JobSpec, seconds: Range | None, stages: Mapping[str, StageEstimate]) -> Range | None:
    """Of GPUs by the hour and tokens by the million, as far as there are prices; None where there is none, or where the
    hours are not known.
    """
    args, parts = spec.engine.args, list[Range]()
    if spec.cost_per_gpu_hour is not None:
        if seconds is None:
            return None
        parts.append(seconds * (gpus_of(args) * spec.cost_per_gpu_hour / 3600))
    million = price_of(args, 1_000_000, 0), price_of(args, 0, 1_000_000)
    for stage in stages.values():
        for price, tokens in zip(million, (stage.prompt_tokens, stage.output_tokens), strict=True):
            if price is not None:
                parts.append(tokens * (price / 1e6))
    return functools.reduce(Range.plus, parts).rounded(6) if parts else None


def open_estimated(job: Job, *, may_plan: bool = True, may_write: bool = True) -> OpenRun:
    """Open the output of a job as `open_run` does; a plan that is made now gets its estimate beside it."""
    opened = open_run(job, may_plan=may_plan, may_write=may_write)
    if opened.was_planned_now:
        keep_estimate(opened, estimate_run(opened, is_exact=False).estimate)
    return opened


def keep_estimate(opened: OpenRun, estimate: Estimate) -> None:
    """Write an estimate beside the plan, to be held against what comes; in place of an earlier one, as long as nothing
    is committed.
    """
    if not opened.folder.attempts_of_all():
        opened.store.put(ESTIMATE_NAME, sealed_json({"version": ESTIMATE_VERSION, **asdict(estimate)}))


def _shared_stages(opened: OpenRun) -> set[str]:
    return {ask.stage for ask in opened.job.labeler.probe() if ask.shared_by is not None}


def _kept_stages(opened: OpenRun, outputs: list[EarlierOutput]) -> set[str]:
    """Shared stages whose answers some reused output holds."""
    kept: set[str] = set()
    for earlier in outputs:
        if earlier.is_readable and earlier.found.answers:
            kept |= _shared_stages(opened) - set(stages_changed(earlier.plan.parts, opened.plan.parts))
    return kept


def _remark(opened: OpenRun, earlier: EarlierOutput) -> str:
    """What a reused output can give, in a sentence."""
    differences = why_nothing(earlier, opened.plan.parts)
    if not differences:
        tally = earlier.found.tally
        return f"{earlier.path}: {tally.labelled + tally.reused:,} labels made in the same way"
    what = "; ".join(
        f"{part} ({', '.join(names)})"
        for part, names in differences.items()
        if part != "stages" or len(differences) == 1
    )
    text = f"{earlier.path}: 0 rows reused, another {what}"
    if "schema" not in differences:
        changed = stages_changed(earlier.plan.parts, opened.plan.parts)
        kept = sorted(_shared_stages(opened) - set(changed)) if earlier.found.answers else []
        asked = [stage for stage in opened.plan.parts["stages"] if stage not in kept]
        text += f"; asked again: {', '.join(asked)}" + (f"; kept: {', '.join(kept)}" if kept else "")
    return text


def _reused_by_footers(opened: OpenRun, outputs: list[EarlierOutput], rows: int) -> tuple[Range, str]:
    """Rows that would be reused, by files alone: those of files that an earlier output read too, and some of the
    others.
    """
    useful = [earlier for earlier in outputs if not why_nothing(earlier, opened.plan.parts)]
    if not useful:
        return Range.exact(0.0), "nothing to reuse" if not outputs else "no reused output was made in this way"
    known, same = 0.0, 0.0
    share = 0.5  # of a changed file's rows, where no earlier run has said
    for earlier in useful:
        tally = earlier.found.tally
        labelled = (tally.labelled + tally.reused) / max(1, earlier.plan.rows)
        known += tally.labelled + tally.reused
        if earlier.plan.facts.columns == opened.plan.facts.columns:
            identities = {file.identity for file in earlier.plan.files}
            same = max(same, labelled * sum(file.rows for file in opened.plan.files if file.identity in identities))
        if tally.reused:
            share = tally.reused / max(1, tally.rows)
    same = min(same, opened.plan.rows)
    high = min(opened.plan.rows, max(same, known))
    found = Range(same, same + (high - same) * share, high) * (rows / max(1, opened.plan.rows))
    return found, "files that are the same by their footers; of the others, the share of last time"


def _seconds(
    stages: dict[str, StageEstimate], asked: Range, history: History | None, num_chunks: int, rates: Rates | None
) -> Range | None:
    """As chunks took, else as tokens take at known rates; None where nobody measured any, unless nothing is asked."""
    each = history.seconds_a_row(num_chunks) if history is not None else None
    if each is not None or not asked.high:
        return asked * (each or 0.0)
    return None if rates is None else seconds_of(stages.values(), rates)


# ------------------------------------------------------------------------------
# An estimate as people and programs read it.


def estimate_json(planned: Planned) -> dict[str, Any]:
    """The whole estimate as plain values; a range is [low, value, high]."""
    found = planned.estimate
    return {
        "rows": found.rows,
        "rows_reused": list(found.rows_reused),
        "rows_asked": list(found.rows_asked),
        "stages": {
            name: {key: list(getattr(stage, key)) for key in stage.__slots__} for name, stage in found.stages.items()
        },
        "prompt_tokens": list(found.prompt_tokens),
        "output_tokens": list(found.output_tokens),
        "prefix_hit": list(found.prefix_hit.rounded(4)),
        "seconds": None if found.seconds is None else list(found.seconds),
        "cost": None if found.cost is None else list(found.cost),
        "is_exact": found.is_exact,
        "basis": asdict(found.basis),
        "reuse": planned.remarks,
    }


def estimate_text(planned: Planned) -> str:
    """What the open rows will come to, a line for each figure, with 95 % intervals."""
    found = planned.estimate
    basis = found.basis
    rows = [
        ("reused", f"{_shown(found.rows_reused)} of {found.rows:,} open rows ({basis.rows_reused})"),
        ("asked", f"{_shown(found.rows_asked)} rows"),
    ]
    rows += [
        (
            f"  {name}",
            f"{_shown(stage.asks)} asks, {_shown(stage.prompt_tokens)} tokens in, {_shown(stage.output_tokens)} out, "
            f"prefix hit {_share(stage.prefix_hit)}",
        )
        for name, stage in found.stages.items()
    ]
    rows.append(("  tokens by", f"{basis.tokens}; output by {basis.output_tokens}; prefix hit by {basis.prefix_hit}"))
    seconds = "not known" if found.seconds is None else f"{_shown(found.seconds, 1)} of one worker"
    rows.append(("seconds", f"{seconds} ({basis.seconds})"))
    if found.cost is not None:
        rows.append(("cost", f"{_shown(found.cost, 2)} at the price given"))
    rows += [("reuse", remark) for remark in planned.remarks]
    return table(rows)


def _shown(found: Range, digits: int = 0) -> str:
    value = f"{found.value:,.{digits}f}"
    return value if found.low == found.high else f"{value} ({found.low:,.{digits}f} to {found.high:,.{digits}f})"


def _share(found: Range) -> str:
    return (
        f"{found.value:.0%}" if found.low == found.high else f"{found.value:.0%} ({found.low:.0%} to {found.high:.0%})"
    )


# ------------------------------------------------------------------------------
# `plan --probe`: a few rows put to the engine, so that its rates and the length of its answers are known.


PLACES, ROWS = 2, 8
"""Neighbours, as a run asks, and how many at each place: they fill a batch on a CPU, and cost it minutes at most."""


def probe_rates(opened: OpenRun, *, say: Callable[[str], None]) -> Rates | None:
    """Ask rows that the plan's fingerprint draws, keep what that told in the cache, and write nothing else.

    Raises:
        UsageError: the engine hands asks over as batches.
        InputError, ModelError, MissingExtraError, EngineCrashError: as a run does.
    """
    if is_batched(opened.job.spec.engine.args):
        raise UsageError("--probe: batches (engine.args.batch) are answered hours later. Leave one of the two out.")
    pairs = _probe_pairs(opened)
    job = with_options_begun_with(opened.job, opened.store)
    engine, remarks = start_engine(job)
    try:
        facts = engine.facts()
        for line in (*remarks, f"probe: {len(pairs):,} rows; {engine_text(job.spec.labeler.name, facts)}"):
            say(line)
        progress = Progress()  # its clock begins when the engine is there
        ask_unwritten(job, engine, pairs, progress)
        rates = rates_of(opened, facts, progress, source="probe")
    finally:
        engine.close()
    keep_rates(opened, rates)
    return rates


def _probe_pairs(opened: OpenRun) -> list[Pair]:
    """Neighbouring rows at a few places; whole queries of a few chunks where the labeler sees whole queries."""
    rng, plan = random.Random(opened.plan.fingerprint), opened.plan
    if not opened.dataset.reads.whole_query:
        each = min(ROWS, plan.rows)
        firsts = sorted(rng.sample(range(plan.rows // each), min(PLACES, plan.rows // each)))
        rows = [row for first in firsts for row in range(first * each, (first + 1) * each)]
        return list(pairs_by_number(opened.dataset, rows))
    chunks = [(shard, number) for shard in plan.shards for number in range(len(shard.chunks))]
    found = list[Pair]()
    for shard, number in rng.sample(chunks, min(PLACES * ROWS, len(chunks))):
        for pair in pairs_by_number(opened.dataset, chunk_row_ids(opened.store, shard)[number].tolist()):
            if len(found) >= PLACES * ROWS and pair.query_id != found[-1].query_id:
                return found
            found.append(pair)
    return found


# ------------------------------------------------------------------------------
# How long an engine works on one chunk: what a killed worker loses at most, beside what was in flight.
#
# Known from the receipts of earlier work, this output's or those it reuses; a plan made before any run has none.


MAX_CHUNK_S = 30.0
"""Engine time that a kill may cost a worker."""
RECEIPTS_READ = 500
"""Enough for a rate, few enough that looking stays cheap on a run of a million chunks."""


class ChunkTime(NamedTuple):
    """Engine time of a chunk.

    Args:
        pairs_per_s: what one worker has done so far.
        seconds: for a full chunk at that rate.
        fitting_rows: `run.chunk_rows` that keeps a chunk within `MAX_CHUNK_S`, if this one does not.
    """

    pairs_per_s: float
    seconds: float
    fitting_rows: int | None

    @property
    def warning(self) -> str | None:
        """What to say of chunks that are too large."""
        if self.fitting_rows is None:
            return None
        return (
            f"a chunk takes about {self.seconds:,.0f} s of engine time ({self.pairs_per_s:,.3g} pairs/s a worker so "
            f"far), and that is what a kill costs; run.chunk_rows: {self.fitting_rows} would keep it under "
            f"{MAX_CHUNK_S:.0f} s. Chunks are cut once: plan into another output"
        )


def chunk_time(folders: Iterable[RunFolder], chunk_rows: int) -> ChunkTime | None:
    """Engine time of a chunk by the first of some outputs that tells a rate; None if none does."""
    for folder in folders:
        receipts = itertools.chain.from_iterable(folder.receipts_by_shard())
        rate = pairs_per_s(itertools.islice(receipts, RECEIPTS_READ))
        if rate is not None:
            seconds = chunk_rows / rate
            return ChunkTime(rate, seconds, max(1, int(MAX_CHUNK_S * rate)) if seconds > MAX_CHUNK_S else None)
    return None


def pairs_per_s(receipts: Iterable[Receipt]) -> float | None:
    """Pairs asked a second by a worker, over the time from its first row to its last commit; chunks of a worker
    overlap.
    """
    spans: dict[str, tuple[float, float, int]] = {}
    for receipt in receipts:
        asked = receipt.rows - receipt.rows_reused
        if asked:
            started, committed = (
                datetime.fromisoformat(text).timestamp() for text in (receipt.started, receipt.committed)
            )
            first, last, rows = spans.get(receipt.worker, (started, committed, 0))
            spans[receipt.worker] = min(first, started), max(last, committed), rows + asked
    seconds = sum(last - first for first, last, _ in spans.values())
    return sum(rows for _, _, rows in spans.values()) / seconds if seconds > 0 else None


# ------------------------------------------------------------------------------
# A plan in a table.


def plan_text(opened: OpenRun, chunks_open: int, budget: BudgetState | None) -> str:
    """A plan as `plan` shows it: rows, queries, shards, chunks, and what of the budget is gone."""
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
