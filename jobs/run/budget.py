"""A worker's share of a run's budget, reserved before asks are submitted."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence

from relabel.jobs.job import OpenRun, other_rounds
from relabel.manifests.asks import (
    Answer,
    Ask,
    Charge,
    Engine,
    Request,
    most_output_tokens,
    most_prompt_tokens,
)
from relabel.manifests.costs import BudgetState, ByReceipts, Ledger, Limits, budget_of
from relabel.manifests.errors import RelabelError
from relabel.manifests.manifest import Tally
from relabel.manifests.specs import EngineSpec, PaidByToken, RunSpec, price_of
from relabel.manifests.store import RunStore, open_run_store

logger = logging.getLogger(__name__)

AT_BUDGET = "the budget is used up"
"""Why a run is drained."""
TRIALS = 2
"""Times a labeler's made-up asks are paid for at most when an engine starts that tries them at its server; the second
is for what else it finds out there.
"""


class Allowance:
    """What one worker may still ask.

    Args:
        worker: its name in the ledger.
    """

    def __init__(self, opened: OpenRun, limits: Limits, worker: str) -> None:
        self._engine: Engine | None = None
        self._spec = opened.job.spec.engine
        self._probe = opened.job.labeler.probe()
        self._samples = opened.job.spec.labeler.samples
        self._output = opened.job.spec.output
        store = ledger_store(opened)
        store.sweep("budget")
        self._ledger = Ledger(store, limits, worker, _told_by_receipts(opened))
        self._taken = Charge()
        self._told = Charge()
        self._answered = Charge()
        self._trials = Charge()
        self._gone = Charge()
        self._flying: dict[int, Charge] = {}
        self._held = Charge()
        self._largest = Charge()
        self._has_taken = False
        self._is_refused = False
        self._wanted: Charge | None = None

    @property
    def is_spent(self) -> bool:
        """Whether it ended for want of more."""
        return self._wanted is not None

    def begin(self) -> bool:
        """Take the first share, before an engine is started; False if there is not enough to ask anything."""
        bounds = [most_charge(self._spec, ask) for ask in self._probe]
        trials = _sum(bounds).times(TRIALS) if isinstance(self._spec.args, PaidByToken) else Charge()
        has_share = self._take(max(trials, min(bounds, default=trials)), _sum(bounds), begins=True)
        self._trials = trials  # until the engine is there to tell
        return has_share

    def uses(self, engine: Engine) -> None:
        """The engine that is asked, from its start on."""
        self._trials = Charge()
        self._engine = engine

    def takes(self, request: Request, ready: Iterable[Request], *, is_idle: bool) -> bool:
        """Hold the most that a request may be charged, if there is room for it.

        Args:
            ready: requests that may come with it, itself the first.
            is_idle: nothing is in flight, so that no answer can make room: False then means that the budget is spent.
        """
        most = self._most(request.ask)
        needed = self._spent().plus(most)
        if not self._ledger.limits.are_met(needed, self._taken):
            if self._is_refused and not is_idle:
                return False
            missing = needed.minus(self._taken)
            self._is_refused = not self._take(missing, _sum(self._most(one.ask) for one in ready))
            if self._is_refused:
                self._wanted = most if is_idle else None
                return False
        if request.id in self._flying:  # of a loop before this one, that was ended; its answer will not come
            self._gone = self._gone.plus(self._flying[request.id])
        self._flying[request.id] = most
        self._largest = max(self._largest, most)
        self._held = self._held.plus(most)
        return True

    def answered(self, answers: Sequence[Answer]) -> None:
        """Count what answers were charged, instead of the most that they might have been."""
        for answer in answers:
            most = self._flying.pop(answer.request_id, None)
            if most is not None:
                self._held = self._held.minus(most) if self._flying else self._gone
                charge = _charge_of(self._spec, answer.prompt_tokens, answer.output_tokens)
                self._answered = self._answered.plus(charge)

    def may_begin(self, rows: int, rows_begun: int, rows_done: int) -> bool:
        """Whether what is left is likely to finish a chunk, by what the rows before it took.

        Args:
            rows: of it that have to be asked; rows_begun: likewise of chunks under way; rows_done: by this worker.
        """
        if rows_done:
            # the last of them is asked by what it may be charged at most
            need = self._charged().times((rows + rows_begun) / rows_done).plus(self._largest)
        else:
            need = _sum(self._most(ask) for ask in self._probe).times(self._samples * (rows + rows_begun))
        if self._has_room(need) or (not rows_begun and not rows_done):
            return True
        if not rows_begun:
            self._ledger.look()
            if self._has_room(need):
                return True
            self._wanted = need
        return False

    def close(self) -> None:
        """Give back what was not spent; what is in flight counts as charged in full. A store that fails keeps it all:
        then more counts as spent than was.
        """
        if not self._has_taken:
            return
        self._has_taken = False
        spent = self._spent()
        try:
            self._ledger.settle(self._taken.minus(spent), spent.minus(self._told), self._wanted)
        except (RelabelError, OSError) as exc:
            logger.warning("%s/budget: what was not spent can't be given back (%s)", self._output, exc)

    def _take(self, least: Charge, wanted: Charge, *, begins: bool = False) -> bool:
        known = self._charged()
        share = self._ledger.take(least, wanted, told=known.minus(self._told), begins=begins)
        if share is None:
            return False
        self._taken, self._told, self._has_taken = self._taken.plus(share), known, True
        return True

    def _has_room(self, need: Charge) -> bool:
        """Whether that much is in hand or in the ledger as it was seen last, apart from what is in flight."""
        return self._ledger.limits.hold(self._ledger.taken.minus(self._taken).plus(self._charged()).plus(need))

    def _charged(self) -> Charge:
        charged = None if self._engine is None else self._engine.charged()
        return self._answered.plus(self._trials) if charged is None else charged

    def _spent(self) -> Charge:
        return self._charged().plus(self._held)

    def _most(self, ask: Ask) -> Charge:
        return (self._engine and self._engine.most(ask)) or most_charge(self._spec, ask)


def open_allowance(opened: OpenRun, worker: str) -> Allowance | None:
    """A worker's part of the job's budget; None where it has none."""
    limits = limits_of(opened.job.spec.run)
    return Allowance(opened, limits, worker) if limits.is_set else None


def ledger_store(opened: OpenRun) -> RunStore:
    """Where the budget of a run is counted."""
    job = opened.job
    if job.ledger is None:
        return opened.store
    return open_run_store(job.ledger, job.storage, single_writer=job.spec.run.single_writer)


def limits_of(run: RunSpec) -> Limits:
    """What a job file limits."""
    return Limits(run.max_tokens, run.max_cost)


def budget_so_far(opened: OpenRun, tally: Tally | None = None) -> BudgetState | None:
    """How much of the job's budget is gone; None where it has none.

    Args:
        tally: of the receipts, where they were read a moment ago.
    """
    limits = limits_of(opened.job.spec.run)
    return budget_of(ledger_store(opened), _told_by_receipts(opened, tally), limits) if limits.is_set else None


def _told_by_receipts(opened: OpenRun, tally: Tally | None = None) -> ByReceipts:
    tallies = [tally or opened.folder.snapshot().tally]
    tallies += [folder.snapshot().tally for folder in other_rounds(opened.job)]
    spec = opened.job.spec.engine
    return ByReceipts(
        _sum(_charge_of(spec, *one.tokens) for one in tallies),
        _sum(_charge_of(spec, *one.tokens_beyond_budget) for one in tallies),
    )


def most_charge(spec: EngineSpec, ask: Ask) -> Charge:
    """What an ask takes at most, of an engine that does not know better: one that cuts a prompt by its own tokens."""
    prompt, output = min(most_prompt_tokens(ask), spec.max_prompt_tokens), most_output_tokens(ask)
    return _charge_of(spec, prompt, output)


def _charge_of(spec: EngineSpec, prompt_tokens: int, output_tokens: int) -> Charge:
    return Charge(prompt_tokens + output_tokens, price_of(spec.args, prompt_tokens, output_tokens) or 0.0)


def _sum(charges: Iterable[Charge]) -> Charge:
    return functools.reduce(Charge.plus, charges, Charge())
