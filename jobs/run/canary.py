"""The canary: labelled rows asked again and compared before new labels are added to an output."""

import itertools
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np

from relabel.jobs.run.loop import ask_unwritten
from relabel.jobs.run.progress import Progress
from relabel.jobs.run.session import Session
from relabel.jobs.run.stop import DRAIN_S, Stop
from relabel.manifests.asks import Engine, EngineFacts
from relabel.manifests.canaries import CANARY_FOLDER, CanaryResult, load_results
from relabel.manifests.errors import GateError, LockHeldError
from relabel.manifests.labels import LabelRow, Pair, QuarantineRow, label_rows
from relabel.manifests.plan import FileRef, Receipt
from relabel.manifests.records import digest_of, sealed_json
from relabel.manifests.reuse import RowPlace
from relabel.manifests.run_labels import read_labels
from relabel.manifests.run_manifest import engine_identity
from relabel.manifests.store import Lock, Store

logger = logging.getLogger(__name__)

LOCK_RETRY_S = 0.5
"""Pause between two tries to take a lock that is waited for, seconds."""
_FLOOR = 1e-6
"""Least probability in a KL divergence: distributions are kept as float32, and an engine may round a small one to 0."""


def has_passed(store: Store, engine: dict[str, Any] | None, size: int, max_flip_rate: float) -> bool:
    """Whether an engine (any at all, for None) passed in this output by today's bound, and as many rows were wanted
    then as are now.
    """
    identity = None if engine is None else engine_identity(engine)
    return any(
        result.flip_rate <= max_flip_rate and result.wanted >= size and identity in (None, result.engine)
        for result in load_results(store)
    )


class Drawn(NamedTuple):
    """A row to ask again: its pair now, and the label it has."""

    pair: Pair
    label: LabelRow
    is_own: bool


class CanarySample(NamedTuple):
    """The rows drawn, in reading order, and the number of rows that the session would ask."""

    rows: list[Drawn]
    num_to_ask: int


# ------------------------------------------------------------------------------
# Asking.


def pass_canary(
    engine: Engine,
    session: Session,
    sample: CanarySample | None,
    facts: EngineFacts,
    on_progress: Callable[[], None],
) -> CanaryResult | None:
    """Ask the canary's rows, if this engine has not passed here yet, and keep the result next to the labels, in place
    of an earlier one of the same engine.

    Args:
        sample: None where its rows are still to be drawn.
    Returns:
        None where nothing was asked, or a stop came in between.
    Raises:
        GateError: too many grades flipped.
    """
    store = session.opened.store
    spec = session.opened.job.spec
    lock = store.lock("canary", "the canary")
    if not _acquire(lock, session.stop):
        return None
    try:
        if has_passed(store, asdict(facts), spec.canary, spec.max_flip_rate):
            return None
        result = _ask_again(engine, session, sample, facts, on_progress)
        if result is None:
            return None
        store.put(f"{CANARY_FOLDER}/{digest_of(result.engine)[:16]}.json", sealed_json(asdict(result)))
    finally:
        lock.release()
    if result.flip_rate > result.max_flip_rate:
        raise GateError(
            f"{spec.output}: the canary says no: {result.text}. Old and new labels would be two teachers under one "
            "name, so nothing was committed. Find out what changed in the engine, drop `reuse`, or raise "
            "`max_flip_rate`."
        )
    return result


def _acquire(lock: Lock, stop: Stop) -> bool:
    """Wait for the canary's lock: of workers that start together one asks, for minutes, and the others use its result.
    False if a stop came first.
    """
    while True:
        try:
            lock.acquire()
        except LockHeldError:
            stop.mind(DRAIN_S)
            if stop.reason is not None:
                return False
            time.sleep(LOCK_RETRY_S)
        else:
            return True


def _ask_again(
    engine: Engine,
    session: Session,
    sample: CanarySample | None,
    facts: EngineFacts,
    on_progress: Callable[[], None],
) -> CanaryResult | None:
    """Ask the rows of a sample and compare; None if there are none, or a stop came."""
    spec = session.opened.job.spec
    if sample is None:
        sample = draw_canary(session)
    if sample is None or not sample.rows:
        return None
    # without a progress display of its own: no row is shown as in flight
    asked = ask_unwritten(
        session.opened.job,
        engine,
        [drawn.pair for drawn in sample.rows],
        Progress(),
        stop=session.stop,
        on_progress=on_progress,
        allowance=session.allowance,
    )
    if asked.left:
        if session.allowance is not None and session.allowance.is_spent:
            logger.warning("the budget has no room for the canary, which asks %s labelled rows again", len(sample.rows))
        return None
    result = compare(
        sample.rows,
        asked.rows,
        asdict(facts),
        spec.max_flip_rate,
        wanted=spec.canary,
    )
    stages = asked.stages.values()
    return replace(
        result,
        prompt_tokens=sum(stage.prompt_tokens for stage in stages),
        output_tokens=sum(stage.output_tokens for stage in stages),
    )


def compare(
    drawn: list[Drawn],
    now: list[LabelRow | QuarantineRow | None],
    engine: dict[str, Any],
    max_flip_rate: float,
    *,
    wanted: int = 0,
) -> CanaryResult:
    """Hold new rows against the labels that they had; in the same order, at least one."""
    unreadable = flips = 0
    divergences = list[float]()
    for (_, label, _), row in zip(drawn, now, strict=True):
        if not isinstance(row, LabelRow):
            unreadable += 1
            flips += 1
            continue
        flips += row.grade != label.grade
        if label.probs is not None and row.probs is not None:
            divergences.append(_divergence(label.probs, row.probs))
    flip_rate = flips / len(drawn)
    from relabel.manifests.metrics.metric import wilson  # most runs have no canary

    low, high = (float(wilson(np.array(flip_rate), np.array(len(drawn)), side)) for side in (-1, 1))
    return CanaryResult(
        engine_identity(engine),
        rows=len(drawn),
        own=sum(row.is_own for row in drawn),
        flips=flips,
        unreadable=unreadable,
        flip_rate=round(flip_rate, 6),
        low=round(low, 6),
        high=round(high, 6),
        mean_kl=round(math.fsum(divergences) / len(divergences), 6) if divergences else None,
        max_flip_rate=max_flip_rate,
        wanted=wanted,
    )


def _divergence(old: Sequence[float], new: Sequence[float]) -> float:
    """KL(old ‖ new), nats."""
    terms = (p * math.log(max(p, _FLOOR) / max(q, _FLOOR)) for p, q in zip(old, new, strict=True) if p > 0)
    return math.fsum(terms)


# ------------------------------------------------------------------------------
# Drawing.


class _StoppedError(Exception):
    """A stop was asked for, or a deadline leaves no time for what would come next: asking, or commits alone."""


def draw_canary(session: Session) -> CanarySample | None:
    """Draw rows to ask again: labels that came from elsewhere first, and this output's own only where those are too
    few. None if a stop came.

    From elsewhere are the rows that this session would reuse (its open chunks' texts are read once), those of other
    shards where these are fewer than wanted (read until there are enough), and the rows that this output has reused
    already. Own labels fill what is left: most were made by the very engine that is asked, and would show a change as
    smaller than it is.
    """
    opened = session.opened
    size = opened.job.spec.canary
    rng = random.Random(f"{opened.plan.fingerprint} {opened.job.spec.engine.seed}")
    try:
        known, num_to_ask = _known_rows(session, rng, size)
        labels = session.reuse.labels.take([place for _, place in known])
        rows = [Drawn(pair, label, is_own=False) for (pair, _), label in zip(known, labels, strict=True)]
        for reused in (True, False):
            if len(rows) < size:
                rows += _own_rows(session, rng, size - len(rows), num_to_ask, reused=reused)
        _mind_stop(session, num_to_ask)
    except _StoppedError:
        return None
    return CanarySample(sorted(rows, key=lambda drawn: drawn.pair.row_id), num_to_ask)


def _mind_stop(session: Session, num_to_ask: int) -> None:
    session.stop.mind(DRAIN_S if num_to_ask else 0.0)
    if session.stop.reason is not None:
        raise _StoppedError


def _known_rows(session: Session, rng: random.Random, size: int) -> tuple[list[tuple[Pair, RowPlace]], int]:
    """Rows of open chunks that earlier outputs know: up to `size` of them, drawn evenly; and how many rows of the
    session's own chunks they do not know, which it would ask.
    """
    if not session.reuse.outputs:
        return [], session.left.rows_to_ask()
    opened = session.opened
    own_shards = set(session.shards)
    others = [shard for shard in range(len(opened.plan.shards)) if shard not in own_shards]
    rng.shuffle(others)
    reservoir = list[tuple[Pair, RowPlace]]()
    num_known = 0
    num_to_ask = 0
    for shard in [*session.shards, *others]:
        is_own = shard in own_shards
        if not is_own and num_known >= size:
            break
        for _, pairs in opened.read(shard, opened.folder.pending(shard)):
            if not is_own and num_known >= size:
                break
            _mind_stop(session, num_to_ask)
            places = session.reuse.find(pairs, session.keys.keys(pairs))
            for pair, place in zip(pairs, places, strict=True):
                if place is None:
                    num_to_ask += is_own
                    continue
                num_known += 1
                if len(reservoir) < size:
                    reservoir.append((pair, place))
                    continue
                slot = rng.randrange(num_known)
                if slot < size:
                    reservoir[slot] = pair, place
    return reservoir, num_to_ask


def _own_rows(session: Session, rng: random.Random, most: int, num_to_ask: int, *, reused: bool) -> list[Drawn]:
    """Rows of this output that were reused, or that were not, with their pairs: `most` of them, drawn evenly."""
    folder = session.opened.folder
    files = list[tuple[Receipt, FileRef]]()
    for shard in range(len(session.opened.plan.shards)):
        _mind_stop(session, num_to_ask)
        for receipt in itertools.chain.from_iterable(folder.chunk_receipts(shard)):
            if receipt.labels is not None:
                files.append((receipt, receipt.labels))
    counts = [receipt.rows_reused if reused else file.rows - receipt.rows_reused for receipt, file in files]
    first_row = np.cumsum([0, *counts])
    num_rows = int(first_row[-1])
    drawn = np.array(sorted(rng.sample(range(num_rows), min(most, num_rows))), dtype=np.int64)
    file_of_row = np.searchsorted(first_row, drawn, side="right") - 1
    labels = dict[int, LabelRow]()
    ids_by_shard = dict[int, dict[int, set[int]]]()
    for number in np.unique(file_of_row).tolist():
        _mind_stop(session, num_to_ask)
        receipt, file = files[number]
        table = read_labels(folder, file)
        of_kind = np.flatnonzero(table["reused"].to_numpy() == reused)
        in_file = of_kind[drawn[file_of_row == number] - first_row[number]]
        of_file = {row.row_id: row for row in label_rows(table.take(in_file))}
        labels |= of_file
        ids_by_shard.setdefault(receipt.shard, {}).setdefault(receipt.chunk, set()).update(of_file)
    rows = list[Drawn]()
    for shard, wanted in ids_by_shard.items():
        for _, pairs in session.opened.read(shard, sorted(wanted), wanted=wanted):
            _mind_stop(session, num_to_ask)
            rows += [Drawn(pair, labels[pair.row_id], is_own=not reused) for pair in pairs]
    return rows
