"""`plan --probe`: a few rows put to the engine, so that its rates and the length of its answers are known."""

from __future__ import annotations

import random
from collections.abc import Callable

from relabel.jobs.planning.open_runs import OpenRun
from relabel.jobs.running.auto_options import with_options_begun_with
from relabel.jobs.running.counts import Progress
from relabel.jobs.running.labeling import ask_unwritten, start_engine
from relabel.jobs.running.rates import Rates, keep_rates, rates_of
from relabel.jobs.running.run_text import engine_text
from relabel.manifests.engine_options import is_batched
from relabel.manifests.errors import UsageError
from relabel.manifests.labels import Pair
from relabel.manifests.runs.picked_rows import pairs_by_number
from relabel.manifests.runs.plans import chunk_row_ids

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
