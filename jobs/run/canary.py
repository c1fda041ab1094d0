"""The canary: labelled rows asked again and compared before new labels are added to an output."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from relabel.jobs.run.loop import ask_unwritten
from relabel.jobs.run.progress import Progress
from relabel.jobs.run.session import Session
from relabel.jobs.run.stop import DRAIN_S
from relabel.manifests.asks import Engine
from relabel.manifests.errors import GateError
from relabel.manifests.labels import Pair
from relabel.manifests.metrics.metric import wilson
from relabel.manifests.receipts import Receipt
from relabel.manifests.records import digest_of, read_record, sealed_json
from relabel.manifests.reuse import RowPlace
from relabel.manifests.run import engine_identity, read_labels
from relabel.manifests.schemas import LabelRow, QuarantineRow, label_rows
from relabel.manifests.store import RunStore

FOLDER = "canary"
_FLOOR = 1e-6
"""Least probability in a KL divergence: distributions are kept as float32, and an engine may round a small one to 0."""


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """The result of asking labelled rows again.

    Args:
        engine: identity of the engine that was asked now.
        rows: rows asked again, of which `own` were labelled in this output and the others in reused ones.
        flips: rows whose grade changed, or for which there is no label now (`unreadable` of them).
        flip_rate, low, high: share of flips, and its 95 % interval (Wilson).
        mean_kl: mean of KL(old ‖ new) over rows with both distributions, nats; None where no row has both.
        wanted: rows that the spec asked for; fewer were known if `rows` is below it.
    """

    engine: dict[str, str]
    rows: int
    own: int
    flips: int
    unreadable: int
    flip_rate: float
    low: float
    high: float
    mean_kl: float | None
    max_flip_rate: float
    wanted: int = 0

    @property
    def has_passed(self) -> bool:
        """Whether no more grades flipped than may."""
        return self.flip_rate <= self.max_flip_rate


class Drawn(NamedTuple):
    """A row to ask again: its pair now, and the label it has."""

    pair: Pair
    label: LabelRow
    is_own: bool


class CanarySample(NamedTuple):
    """What a pass over a session's rows found.

    Args:
        rows: drawn, in reading order.
        num_to_ask: rows that the session would ask.
    """

    rows: list[Drawn]
    num_to_ask: int


class _StoppedError(Exception):
    """A stop was asked for, or a deadline leaves no time for what would come next: asking, or commits alone."""


def draw_canary(session: Session) -> CanarySample | None:
    """Draw rows to ask again: labels that came from elsewhere first, and this output's own only where those are too
    few.

    From elsewhere are the rows that this session would reuse (its open chunks' texts are read once), those of other
    shards where these are fewer than wanted (read until there are enough), and the rows that this output has reused
    already. Own labels fill what is left: most were made by the very engine that is asked, and would show a change as
    smaller than it is. None if a stop came.
    """
    opened, size = session.opened, session.opened.job.spec.canary
    rng = random.Random(f"{opened.plan.fingerprint} {opened.job.spec.engine.seed}")
    try:
        kept, num_to_ask = _known_rows(session, rng, size)
        labels = session.reuse.labels.take([place for _, place in kept])
        rows = [Drawn(pair, label, False) for (pair, _), label in zip(kept, labels, strict=True)]
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
    kept: list[tuple[Pair, RowPlace]] = []
    num_known = num_to_ask = 0
    mine = set(session.shards)
    others = [shard for shard in range(len(session.opened.plan.shards)) if shard not in mine]
    rng.shuffle(others)
    for shard in [*session.shards, *others]:
        if shard not in mine and num_known >= size:
            break
        for _, pairs in session.opened.read(shard, session.opened.folder.pending(shard)):
            if shard not in mine and num_known >= size:
                return kept, num_to_ask
            _mind_stop(session, num_to_ask)
            for pair, place in zip(pairs, session.reuse.find(pairs, session.keys.keys(pairs)), strict=True):
                if place is None:
                    num_to_ask += shard in mine
                    continue
                num_known += 1
                if len(kept) < size:
                    kept.append((pair, place))
                elif (at := rng.randrange(num_known)) < size:
                    kept[at] = pair, place
    return kept, num_to_ask


def ask_canary(
    session: Session, engine: Engine, sample: CanarySample, on_progress: Callable[[], None]
) -> CanaryResult | None:
    """Ask the drawn rows again; None if a stop came in between. Nothing is committed."""
    job = session.opened.job
    # without a progress display of its own: no row is shown as in flight
    asked = ask_unwritten(
        job,
        engine,
        [drawn.pair for drawn in sample.rows],
        Progress(),
        stop=session.stop,
        on_progress=on_progress,
        allowance=session.allowance,
    )
    if asked.left:
        return None
    assert session.facts is not None
    result = compare(sample.rows, asked.rows, asdict(session.facts), job.spec.max_flip_rate)
    return replace(result, wanted=job.spec.canary)


def compare(
    drawn: list[Drawn], now: list[LabelRow | QuarantineRow | None], engine: dict[str, Any], max_flip_rate: float
) -> CanaryResult:
    """Hold new rows against the labels that they had; in the same order, at least one."""
    flips = unreadable = 0
    divergences = []
    for one, row in zip(drawn, now, strict=True):
        if not isinstance(row, LabelRow):
            unreadable += 1
            flips += 1
            continue
        flips += row.grade != one.label.grade
        if row.probs is not None and one.label.probs is not None:
            divergences.append(_kl(one.label.probs, row.probs))
    rate = flips / len(drawn)
    share, size = np.array(rate), np.array(len(drawn))
    low, high = (round(float(wilson(share, size, side)), 6) for side in (-1, 1))
    mean_kl = round(math.fsum(divergences) / len(divergences), 6) if divergences else None
    num_own = sum(one.is_own for one in drawn)
    return CanaryResult(
        engine_identity(engine),
        len(drawn),
        num_own,
        flips,
        unreadable,
        round(rate, 6),
        low,
        high,
        mean_kl,
        max_flip_rate,
    )


def keep_result(store: RunStore, result: CanaryResult) -> None:
    """Write a canary's result next to the labels; it replaces an earlier one of the same engine."""
    store.put(f"{FOLDER}/{digest_of(result.engine)[:16]}.json", sealed_json(asdict(result)))


def load_results(store: RunStore) -> list[CanaryResult]:
    """The canaries of an output, in name order.

    Raises:
        ManifestError: a result is damaged.
    """
    what, advice = "not a canary's result", "Restore it from a copy, or move it away to have it asked again."
    return [
        read_record(CanaryResult, store.read(name), f"{store.root}/{name}", what, advice)
        for name in store.names(FOLDER)
    ]


def has_passed(store: RunStore, engine: dict[str, Any] | None, size: int, max_flip_rate: float) -> bool:
    """Whether an engine (any at all, for None) passed in this output by today's bound, and as many rows were wanted
    then as are now.
    """
    identity = None if engine is None else engine_identity(engine)
    return any(
        result.flip_rate <= max_flip_rate and result.wanted >= size and identity in (None, result.engine)
        for result in load_results(store)
    )


def canary_text(result: CanaryResult) -> str:
    """A result in a line."""
    kl = "" if result.mean_kl is None else f", mean KL {result.mean_kl:.4f} nats"
    return (
        f"{result.flips:,} of {result.rows:,} grades flipped: {result.flip_rate:.1%} "
        f"(95 % interval {result.low:.1%} to {result.high:.1%}){kl}; limit {result.max_flip_rate:.1%}"
    )


def refuse(result: CanaryResult, *, output: str) -> GateError:
    """What a run says that will not mix."""
    return GateError(
        f"{output}: the canary says no: {canary_text(result)}. Old and new labels would be two teachers under one "
        "name, so nothing was committed. Find out what changed in the engine, drop `reuse`, or raise `max_flip_rate`."
    )


def _own_rows(session: Session, rng: random.Random, most: int, num_to_ask: int, *, reused: bool) -> list[Drawn]:
    """Rows of this output that were reused, or that were not, with their pairs: `most` of them, drawn evenly."""
    folder, receipts = session.opened.folder, list[Receipt]()
    for shard in range(len(session.opened.plan.shards)):
        _mind_stop(session, num_to_ask)
        receipts += [one for attempts in folder.chunk_receipts(shard) for one in attempts if one.labels is not None]
    counts = [_num_rows(one, reused=reused) for one in receipts]
    ends = np.cumsum([0, *counts])
    wanted = np.array(sorted(rng.sample(range(ends[-1]), min(most, int(ends[-1])))))
    labels: dict[int, LabelRow] = {}
    ids: dict[int, dict[int, set[int]]] = {}
    places = np.searchsorted(ends, wanted, side="right") - 1
    for place in np.unique(places).tolist():
        _mind_stop(session, num_to_ask)
        receipt = receipts[place]
        assert receipt.labels is not None
        table = read_labels(folder, receipt.labels)
        of_kind = np.flatnonzero(table["reused"].to_numpy() == reused)
        found = {row.row_id: row for row in label_rows(table.take(of_kind[wanted[places == place] - ends[place]]))}
        labels |= found
        ids.setdefault(receipt.shard, {}).setdefault(receipt.chunk, set()).update(found)
    rows: list[Drawn] = []
    for shard, chunks in ids.items():
        for _, pairs in session.opened.read(shard, sorted(chunks), wanted=chunks):
            _mind_stop(session, num_to_ask)
            rows += [Drawn(pair, labels[pair.row_id], not reused) for pair in pairs]
    return rows


def _num_rows(receipt: Receipt, *, reused: bool) -> int:
    """How many of its labels were reused, or were not."""
    assert receipt.labels is not None
    return receipt.rows_reused if reused else receipt.labels.rows - receipt.rows_reused


def _kl(old: Any, new: Any) -> float:
    return math.fsum(p * math.log(max(p, _FLOOR) / max(q, _FLOOR)) for p, q in zip(old, new, strict=True) if p > 0)
