"""What a run would ask, take and cost: gathers the counts and ratios that `manifests/runs/estimates.py` turns into
ranges.

Counts come from footers and plans, or under `--exact` from the text, streamed once: keys are looked up, every labeler
is walked with made-up answers, prompts are counted by the engine's own tokenizer. Ratios come from the receipts of this
output, else of the first reused output that the same labeler, engine and model made, else they are the stated defaults.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from jobs.planning.job_files import Job
from jobs.planning.open_runs import OpenRun
from jobs.planning.opening import open_run
from jobs.running.reusing import Reuse, earlier_outputs, label_keys
from labelers.engines.registry import CountsTokens
from labelers.registry import AsksOften, MostAsks
from manifests.asks import DOCUMENT_FIELD, Answer, Ask, Distribution
from manifests.digests import readable_json
from manifests.engine_options import gpus_of
from manifests.errors import VerdictError
from manifests.formats import Choice, Indices, JsonIndices, Lines, OptionLines, Text, closing_of, opening_of
from manifests.labels import Pair
from manifests.runs.estimates import (
    DEFAULT_CHARS,
    DEFAULT_OUTPUT_SHARE,
    DEFAULT_REPEATS,
    DEFAULT_TOKENS_PER_S,
    Estimate,
    EstimateBasis,
    PrefixHit,
    Range,
    StageEstimate,
    ratio_range,
)
from manifests.runs.kept_estimates import ESTIMATE_NAME, ESTIMATE_VERSION
from manifests.runs.label_keys import stages_changed
from manifests.runs.plans import shard_row_ids
from manifests.runs.receipts import Receipt
from manifests.runs.reuse import EarlierOutput, why_nothing
from manifests.runs.rows import read_chunks
from manifests.runs.run_folder import RunFolder

RECEIPTS_LOOKED_AT = 512
"""Chunks that ratios are taken from: more would narrow an interval that other things make wide."""


@dataclass(slots=True)
class _Counts:
    """Exact counts over the open rows: those that are reused, and per stage asks and prompt tokens."""

    reused: int = 0
    asked: int = 0
    asks: dict[str, int] = field(default_factory=dict)
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    prefix: PrefixHit = field(default_factory=PrefixHit)


@dataclass(frozen=True, slots=True)
class _History:
    """Receipts to learn from, and where they lie."""

    basis: str
    receipts: list[Receipt]

    def ratio(
        self, size: Callable[[Receipt], float], amount: Callable[[Receipt], float], num_to_come: int
    ) -> Range | None:
        asked = [receipt for receipt in self.receipts if _asked(receipt)]
        return ratio_range([size(one) for one in asked], [amount(one) for one in asked], num_to_come=num_to_come)

    def seconds_a_row(self, num_to_come: int) -> Range | None:
        """Seconds of a worker for each row asked: from commit to commit, since chunks overlap."""
        sizes, seconds = [], []
        by_worker: dict[str, list[Receipt]] = {}
        for receipt in self.receipts:
            by_worker.setdefault(receipt.worker, []).append(receipt)
        for receipts in by_worker.values():
            receipts.sort(key=lambda receipt: receipt.committed)
            before = min(receipt.started for receipt in receipts)
            for receipt in receipts:
                sizes.append(float(_asked(receipt)))
                seconds.append(
                    (datetime.fromisoformat(receipt.committed) - datetime.fromisoformat(before)).total_seconds()
                )
                before = receipt.committed
        return ratio_range(sizes, seconds, num_to_come=num_to_come)


@dataclass(frozen=True, slots=True)
class Planned:
    """An estimate, and what is said of each reused output: rows that it can give, or why it gives none."""

    estimate: Estimate
    remarks: list[str]


def estimate_run(opened: OpenRun, *, is_exact: bool) -> Planned:
    """Estimate what the open chunks of a run will ask.

    Args:
        is_exact: stream the text once and count.
    """
    outputs = earlier_outputs(opened.job)
    done = opened.folder.attempts_of_all()
    pending = {
        number: [chunk for chunk in range(len(shard.chunks)) if chunk not in done.get(number, {})]
        for number, shard in enumerate(opened.plan.shards)
    }
    rows = sum(opened.plan.shards[number].chunks[chunk] for number, chunks in pending.items() for chunk in chunks)
    num_chunks = sum(map(len, pending.values()))
    history = _history(opened, outputs)
    kept = _kept_stages(opened, outputs)
    counts = _count(opened, outputs, pending, history) if is_exact else None
    reused, basis = (Range.exact(counts.reused), "counted") if counts else _reused_by_footers(opened, outputs, rows)
    asked = Range(max(0.0, rows - reused.high), max(0.0, rows - reused.value), max(0.0, rows - reused.low))
    stages = _stages(opened, asked, history, kept, counts, num_chunks)
    seconds, seconds_basis = _seconds(stages, asked, history, num_chunks)
    spec = opened.job.spec
    gpus = gpus_of(spec.engine.args)
    found = Estimate(
        rows=rows,
        rows_reused=reused.rounded(),
        rows_asked=asked.rounded(),
        stages=stages,
        seconds=seconds.rounded(3),
        cost=None if spec.cost_per_gpu_hour is None else (seconds * (gpus * spec.cost_per_gpu_hour / 3600)).rounded(6),
        is_exact=is_exact,
        basis=EstimateBasis(
            rows_reused=basis,
            tokens="counted, without repeated attempts" if counts else history.basis if history else "defaults",
            output_tokens=history.basis if history else "defaults: 2 to 100 % of each stage's cap",
            prefix_hit="prompts that neighbours share"
            if counts
            else history.basis
            if history
            else "the templates' share of a prompt",
            seconds=seconds_basis,
        ),
    )
    remarks = [_remark(opened, earlier) for earlier in outputs]
    if spec.canary and asked.high and (outputs or done):
        remarks.append(f"canary: up to {spec.canary:,} rows are asked again on top, once an engine")
    return Planned(found, remarks)


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
        opened.store.put(ESTIMATE_NAME, readable_json({"version": ESTIMATE_VERSION, **asdict(estimate)}))


def _history(opened: OpenRun, outputs: list[EarlierOutput]) -> _History | None:
    """Receipts of the first output whose tokens and times say something of this job's."""
    for basis, folder in [
        ("this output's receipts", opened.folder),
        *((f"receipts of {one.path}", one.folder) for one in outputs),
    ]:
        if _is_alike(folder.plan.parts, opened.plan.parts):
            found = list(
                itertools.islice((receipt for receipt in _receipts(folder) if receipt.stages), RECEIPTS_LOOKED_AT)
            )
            if found:
                return _History(f"{basis} ({len(found):,} chunks)", found)
    return None


def _is_alike(was: dict[str, Any], now: dict[str, Any]) -> bool:
    return all(was[part] == now[part] for part in ("model",)) and all(
        was[part]["name"] == now[part]["name"] for part in ("labeler", "engine")
    )


def _receipts(folder: RunFolder) -> Iterator[Receipt]:
    for shard in range(len(folder.plan.shards)):
        for receipts in folder.chunk_receipts(shard):
            yield receipts[0]


def _asked(receipt: Receipt) -> int:
    return receipt.rows - receipt.rows_reused


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


def _count(
    opened: OpenRun, outputs: list[EarlierOutput], pending: dict[int, list[int]], history: _History | None
) -> _Counts:
    """Stream the open chunks and count what a run would ask."""
    job, plan = opened.job, opened.plan
    counts = _Counts()
    keys = label_keys(job, plan)
    reuse = Reuse(job, plan, outputs)
    count_tokens = _token_counter(opened)
    lengths = _answer_tokens(opened, history)
    shared: set[tuple[bytes, str]] = set()
    for number, chunks in pending.items():
        planned = plan.shards[number]
        row_ids = None if planned.row_ids is None else shard_row_ids(opened.store, planned)
        for _, pairs in read_chunks(opened.dataset, planned, row_ids, chunks, readings=opened.readings):
            for pair, place in zip(pairs, reuse.find(pairs, keys.keys(pairs)), strict=True):
                if place is not None:
                    counts.reused += 1
                    continue
                counts.asked += 1
                for sample in range(job.spec.labeler.samples):
                    _walk(opened, pair, sample, reuse, shared, counts, count_tokens, lengths)
    return counts


def _walk(
    opened: OpenRun,
    pair: Pair,
    sample: int,
    reuse: Reuse,
    shared: set[tuple[bytes, str]],
    counts: _Counts,
    count_tokens: Callable[[Ask], int],
    lengths: dict[str, float],
) -> None:
    """Walk a labeler over one pair with made-up answers (kept ones, where they are known), counting what would be
    asked.
    """
    walk = opened.job.labeler.label(pair)
    try:
        ask = next(walk)
        while True:
            answer = None
            is_asked = True
            if ask.shared_by is not None:
                key = reuse.answer_cache.key(ask, 0, sample, 0)
                answer = reuse.answer_cache.answer(key)
                is_asked = answer is None and (key, ask.shared_by) not in shared
                shared.add((key, ask.shared_by))
            if is_asked:
                num_tokens = count_tokens(ask)
                counts.asks[ask.stage] = counts.asks.get(ask.stage, 0) + 1
                counts.prompt_tokens[ask.stage] = counts.prompt_tokens.get(ask.stage, 0) + num_tokens
                counts.prefix.add(ask.stage, "\x1e".join(message.text for message in ask.messages), num_tokens)
            ask = walk.send(answer or _made_up(ask, lengths.get(ask.stage, 1.0)))
    except (StopIteration, VerdictError):
        return


def _made_up(ask: Ask, num_tokens: float) -> Answer:
    """An answer that reads, about as long as this stage's answers are."""
    pieces, said = [], dict[str, str]()
    left = int(num_tokens * 4)
    for section in ask.format.sections if ask.format is not None else ():
        if isinstance(section, Choice):
            content = section.options[0]
        elif isinstance(section, JsonIndices):
            content = json.dumps({key: [] for key in section.keys})
        elif isinstance(section, OptionLines):
            content = section.alone
        elif isinstance(section, Indices) or (
            isinstance(section, Text)
            and section.only_with is not None
            and said.get(section.only_with[0]) != (section.only_with[1] or None)
        ):
            content = ""
        elif isinstance(section, Text):
            content = "abc " * max(1, min(left // 4, section.max_tokens))
            left -= len(content)
        elif isinstance(section, Lines):
            content = "\n".join(f"{number} abc" for number in range(section.least))
        else:
            content = "none"
        said[section.tag] = content
        pieces.append(f"{opening_of(section)}{content.strip()}{closing_of(section)}")
    even = {name: Distribution(tuple(1 / len(labels) for _ in labels), 0.0) for name, _, labels in ask.decisions}
    return Answer(-1, "\n".join(pieces).removeprefix(ask.prefill), "stop", even)


def _token_counter(opened: OpenRun) -> Callable[[Ask], int]:
    """The engine's own count of a prompt's tokens, where it has one that needs no weights; else
    characters over four.
    """
    engine = opened.job.engine_class
    if isinstance(engine, CountsTokens):
        return engine.token_counter(opened.job.spec.engine, overlong=opened.job.spec.input.overlong)
    return lambda ask: int(sum(len(message.text) for message in ask.messages) / DEFAULT_CHARS.value) + 1


def _answer_tokens(opened: OpenRun, history: _History | None) -> dict[str, float]:
    """Expected length of each stage's answers, in tokens."""
    found = {}
    for ask in opened.job.labeler.probe():
        ratio = _stage_ratio(history, ask.stage, "output_tokens", "asks", 1)
        found[ask.stage] = ratio.value if ratio is not None else DEFAULT_OUTPUT_SHARE.value * ask.max_tokens
    return found


def _stage_ratio(history: _History | None, stage: str, amount: str, size: str, num_to_come: int) -> Range | None:
    if history is None:
        return None
    nothing: dict[str, int] = {}
    return history.ratio(
        lambda receipt: receipt.stages.get(stage, nothing).get(size, 0),
        lambda receipt: receipt.stages.get(stage, nothing).get(amount, 0),
        num_to_come,
    )


def _stages(
    opened: OpenRun, asked: Range, history: _History | None, kept: set[str], counts: _Counts | None, num_chunks: int
) -> dict[str, StageEstimate]:
    plan = opened.plan
    chars = plan.text_bytes / max(1, plan.rows)
    found = {}
    for ask in opened.job.labeler.probe():
        template, has_document = _shape(ask)
        output = _stage_ratio(history, ask.stage, "output_tokens", "asks", num_chunks)
        output = output or (DEFAULT_OUTPUT_SHARE * float(ask.max_tokens) if ask.max_tokens else Range(0.0, 1.0, 1.0))
        if counts is not None:
            further = _further(opened, counts, history, num_chunks)
            asks = Range.exact(counts.asks.get(ask.stage, 0)).plus(further)
            prompt = Range.exact(counts.prompt_tokens.get(ask.stage, 0))
            prompt = prompt.plus(further * (prompt.value / max(1.0, asks.low))).rounded()
            share = counts.prefix.share(ask.stage)
            hit = Range(0.0, share, min(1.0, share + 0.1))
        else:
            asks = _asks(ask, opened, asked, history, kept, num_chunks)
            data = Range.exact(chars) if has_document else Range(0.0, chars / 10, chars)
            each = _stage_ratio(history, ask.stage, "prompt_tokens", "asks", num_chunks)
            each = each or data.plus(Range.exact(template)).over(DEFAULT_CHARS).cut(
                float(opened.job.spec.engine.max_prompt_tokens)
            )
            prompt = (asks * each).rounded()
            known = _stage_ratio(history, ask.stage, "cached_tokens", "prompt_tokens", num_chunks)
            hit = known or Range(0.0, template / max(1.0, template + data.value), 1.0)
        found[ask.stage] = StageEstimate(asks.rounded(), prompt, (asks * output).rounded(), hit.rounded(4))
    return found


def _most_asks(opened: OpenRun) -> MostAsks:
    labeler, columns = opened.job.labeler, [column.name for column in opened.dataset.reads.columns]
    return labeler.most_asks(columns) if isinstance(labeler, AsksOften) else MostAsks(1, 0)


def _asks_a_row(ask: Ask, history: _History | None, num_chunks: int) -> Range | None:
    """As earlier chunks had them, repeated attempts included."""
    if history is None:
        return None
    return history.ratio(_asked, lambda receipt: receipt.stages.get(ask.stage, {}).get("asks", 0), num_chunks)


def _further(opened: OpenRun, counts: _Counts, history: _History | None, num_chunks: int) -> Range:
    """Asks beside those that were counted, which only the model's answers bring: none to all, as many as before or
    half of them.
    """
    most = float(counts.asked * opened.job.spec.labeler.samples * _most_asks(opened).further)
    if not most:
        return Range.exact(0.0)
    (ask,) = opened.job.labeler.probe()
    ratio = _asks_a_row(ask, history, num_chunks)
    likely = most / 2 if ratio is None else counts.asked * ratio.value - counts.asks.get(ask.stage, 0)
    return Range(0.0, min(max(0.0, likely), most), most)


def _asks(ask: Ask, opened: OpenRun, asked: Range, history: _History | None, kept: set[str], num_chunks: int) -> Range:
    plan, ratio = opened.plan, _asks_a_row(ask, history, num_chunks)
    samples = opened.job.spec.labeler.samples
    if ask.shared_by is None:
        most = float(sum(_most_asks(opened)))
        return asked * (ratio or DEFAULT_REPEATS * Range(1.0, (1 + most) / 2, most) * float(samples))
    each = ratio or Range.exact(samples * plan.queries / max(1, plan.rows))
    if ask.stage in kept:  # answers that are there: how many, only the text tells
        return Range(0.0, 0.0, (asked * each).high)
    queries = asked * each
    most_shared = samples * min(asked.high, plan.queries * DEFAULT_REPEATS.high)
    return Range(queries.low, queries.value, max(queries.high, most_shared))


def _shape(ask: Ask) -> tuple[float, bool]:
    """Characters of a stage's templates, and whether it shows the document."""
    template = sum(len(part) for message in ask.messages for part in message.parts[::2])
    return float(template), any(DOCUMENT_FIELD in message.fields for message in ask.messages)


def _seconds(
    stages: dict[str, StageEstimate], asked: Range, history: _History | None, num_chunks: int
) -> tuple[Range, str]:
    each = history.seconds_a_row(num_chunks) if history is not None else None
    if each is not None and history is not None:
        return asked * each, history.basis
    tokens = Range.exact(0.0)
    for stage in stages.values():
        computed = Range(
            *(prompt * (1 - hit) for prompt, hit in zip(stage.prompt_tokens, reversed(stage.prefix_hit), strict=True))
        )
        tokens = tokens.plus(computed).plus(stage.output_tokens)
    low, value, high = DEFAULT_TOKENS_PER_S
    return tokens.over(
        DEFAULT_TOKENS_PER_S
    ), f"defaults: {value:,.0f} tokens/s a worker, {low:,.0f} to {high:,.0f}; run a chunk to know"
