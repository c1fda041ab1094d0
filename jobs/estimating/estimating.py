"""What a run would ask, take and cost: gathers the counts and ratios that `manifests/runs/estimates.py` turns into
ranges.

Counts come from footers and plans, or under `--exact` from the text, streamed once: keys are looked up, every labeler
is walked with made-up answers, prompts are counted by the engine's own tokenizer. Ratios come from the receipts of this
output, else of the first reused output that the same labeler, engine and model made; else `plan` counts the prompts of
a sample of the rows, and how long answers are and how fast they come is known from this model's last run on this device
or from a probe. What none of these tells is a stated default, and seconds are not known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from relabel.jobs.estimating.exact_counts import count_exactly, count_reused
from relabel.jobs.estimating.history import History, history_of
from relabel.jobs.estimating.rated import seconds_of
from relabel.jobs.estimating.sampled_counts import SAMPLE_TEXT, sampled_stages
from relabel.jobs.estimating.stage_estimates import estimated_stages
from relabel.jobs.planning.jobs import Job
from relabel.jobs.planning.open_runs import OpenRun
from relabel.jobs.planning.opening import open_run
from relabel.jobs.running.rates import Rates, load_rates
from relabel.jobs.running.reusing import earlier_outputs
from relabel.manifests.engine_options import gpus_of, price_of
from relabel.manifests.records import sealed_json
from relabel.manifests.runs.earlier_outputs import EarlierOutput, why_nothing
from relabel.manifests.runs.estimates import Estimate, EstimateBasis, StageEstimate
from relabel.manifests.runs.kept_estimates import ESTIMATE_NAME, ESTIMATE_VERSION
from relabel.manifests.runs.ranges import Range
from relabel.manifests.runs.recipes import stages_changed
from relabel.manifests.specs import JobSpec


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
