"""A run's budget: what all workers have committed, and what this one has in flight, against the limits of the job."""

import functools
import time
from collections.abc import Iterable, Sequence

from relabel.jobs.job import OpenRun, other_rounds
from relabel.jobs.run.progress import asked_for
from relabel.jobs.run.stop import Stop
from relabel.manifests.asks import (
    Answer,
    Ask,
    Charge,
    Engine,
    Request,
    most_output_tokens,
    most_prompt_tokens,
)
from relabel.manifests.budgets import BudgetState, Limits
from relabel.manifests.canaries import load_results
from relabel.manifests.plan import Receipt
from relabel.manifests.run_folder import Tally
from relabel.manifests.specs import EngineArgs, EngineSpec, PaidByToken, price_of

AT_BUDGET = "the budget is used up"
"""Why a run is drained."""
TRIALS = 2
"""Times a labeler's made-up asks are paid for at most when an engine starts that tries them at its server; the second
is for what else it finds out there.
"""
READ_EVERY_S = 10.0
"""Seconds between two listings of what other workers have committed; 20 times as long as a listing takes, if longer."""


class Allowance:
    """What one worker may still ask: the limits, less what was committed, what this worker was charged, and the most
    that its asks in flight may be charged. What others have in flight is not known here: docs/jobs.md says how far that
    may overshoot.

    Args:
        worker: its name in receipts.
        stop: drained once the budget is spent.
    """

    def __init__(self, opened: OpenRun, limits: Limits, worker: str, stop: Stop) -> None:
        self._opened = opened
        self._limits = limits
        self._worker = worker
        self._stop = stop
        self._engine: Engine | None = None
        self._spec = opened.job.spec.engine
        self._probe = opened.job.labeler.probe()
        self._seen = opened.folder.attempts_of_all()
        tallies = _tallies(opened)
        self._rows_asked = sum(tally.rows - tally.reused for tally in tallies)
        self._others = spent_so_far(opened, tallies)
        """By all receipts but this worker's own."""
        self._next_read_s = time.perf_counter() + READ_EVERY_S
        self._answered = Charge()
        self._trials = Charge()
        self._kept = Charge()
        """Of answers that an earlier execution paid for, which no receipt holds yet."""
        self._gone = Charge()
        """Of asks in flight in a loop that has ended: their answers will not come."""
        self._held = Charge()
        """The most that asks in flight may be charged."""
        self._largest = Charge()
        self._flying: dict[int, Charge] = {}
        self.is_spent = False
        """Whether it ended for want of more."""

    def begin(self) -> bool:
        """Whether there is room to start an engine and to ask what is typical of an open chunk."""
        bounds = [most_charge(self._spec, ask) for ask in self._probe]
        sizes = list[int]()
        for shard, planned in enumerate(self._opened.plan.shards):
            done = self._seen.get(shard, {})
            sizes += [rows for chunk, rows in enumerate(planned.chunks) if chunk not in done]
        if sizes:
            need = max(bounds)
            smallest = min(sizes)
        else:  # a retry, which may ask a single row
            need = min(bounds)
            smallest = 1
        typical = self._others.times(smallest / self._rows_asked) if self._rows_asked else Charge()
        if isinstance(self._spec.args, PaidByToken):
            self._trials = _sum(bounds).times(TRIALS)  # until the engine is there and counts them
        if not self._has_room(typical.plus(need)):
            self._end()
        return not self.is_spent

    def uses(self, engine: Engine) -> None:
        """The engine that is asked, from its start on."""
        self._trials = Charge()
        self._engine = engine

    def takes(self, request: Request, *, is_idle: bool) -> bool:
        """Hold the most that a request may be charged, if there is room for it.

        Args:
            is_idle: nothing is in flight, so that no answer can make room: False then means that the budget is spent.
        """
        if time.perf_counter() >= self._next_read_s:
            self._read_others()
        most = self._most(request.ask)
        if not self._has_room(self._held.plus(most)):
            if is_idle:
                self._end()
            return False
        if request.id in self._flying:  # of a loop before this one, that was ended
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
                charge = charge_of(self._spec.args, answer.prompt_tokens, answer.output_tokens)
                self._answered = self._answered.plus(charge)

    def kept(self, answer: Answer) -> None:
        """Count an answer that an earlier execution paid for, and that is committed now."""
        charge = charge_of(self._spec.args, answer.prompt_tokens, answer.output_tokens)
        self._kept = self._kept.plus(charge)

    def may_begin(self, rows: int, rows_begun: int, rows_done: int) -> bool:
        """Whether what is left is likely to finish a chunk, by what the rows before it took.

        Args:
            rows: of it that have to be asked; rows_begun: likewise of chunks under way; rows_done: by this worker.
        """
        if not rows_begun and not rows_done:
            return True
        if rows_done:
            # the last of them is asked by what it may be charged at most
            need = self._charged().times((rows + rows_begun) / rows_done).plus(self._largest)
        else:
            samples = self._opened.job.spec.labeler.samples
            need = _sum(self._most(ask) for ask in self._probe).times(samples * (rows + rows_begun))
        has_room = self._has_room(need)
        if not has_room and not rows_begun:
            self._end()
        return has_room

    def _end(self) -> None:
        self.is_spent = True
        self._stop.drain(AT_BUDGET)

    def _read_others(self) -> None:
        """Add what other workers have committed since."""
        folder = self._opened.folder
        started_s = time.perf_counter()
        etags = folder.listing()
        now = folder.attempts_of_all(etags)
        receipts = folder.new_receipts(self._seen, now, etags)
        theirs = (receipt for receipt in receipts if receipt.worker != self._worker)
        self._others = self._others.plus(charge_of_receipts(self._spec.args, theirs))
        self._seen = now
        took_s = time.perf_counter() - started_s
        self._next_read_s = started_s + took_s + max(READ_EVERY_S, 20 * took_s)

    def _has_room(self, need: Charge) -> bool:
        return self._limits.hold(self._others.plus(self._charged()).plus(need))

    def _charged(self) -> Charge:
        by_engine = None if self._engine is None else self._engine.charged()
        return (by_engine or self._answered.plus(self._trials)).plus(self._kept)

    def _most(self, ask: Ask) -> Charge:
        by_engine = None if self._engine is None else self._engine.most(ask)
        return by_engine or most_charge(self._spec, ask)


def open_allowance(opened: OpenRun, worker: str, stop: Stop) -> Allowance | None:
    """A worker's part of the job's budget; None where it has none."""
    limits = _limits(opened)
    return Allowance(opened, limits, worker, stop) if limits.is_set else None


def _limits(opened: OpenRun) -> Limits:
    run = opened.job.spec.run
    return Limits(run.max_tokens, run.max_cost)


def budget_so_far(opened: OpenRun, tally: Tally | None = None) -> BudgetState | None:
    """How much of the job's budget is gone; None where it has none.

    Args:
        tally: of the receipts, where they were read a moment ago.
    """
    limits = _limits(opened)
    if not limits.is_set:
        return None
    spent = spent_so_far(opened, _tallies(opened, tally))
    return BudgetState(
        max_tokens=limits.max_tokens,
        max_cost=limits.max_cost,
        spent_tokens=spent.tokens,
        spent_cost=spent.cost,
    )


def spent_so_far(opened: OpenRun, tallies: Sequence[Tally]) -> Charge:
    """What receipts hold, those of work that another worker committed first included, and what canaries took; of all
    rounds of a search.

    Args:
        tallies: of these rounds.
    """
    args = opened.job.spec.engine.args
    charges = [charge_of(args, *tally.tokens) for tally in tallies]
    for folder in (opened.folder, *other_rounds(opened.job)):
        charges.append(charge_of_receipts(args, folder.lost_receipts()))
        for canary in load_results(folder.store):
            charges.append(charge_of(args, canary.prompt_tokens, canary.output_tokens))
    return _sum(charges)


def _tallies(opened: OpenRun, own: Tally | None = None) -> list[Tally]:
    """Of this run, `own` where it is known, and of the other rounds of its search."""
    tallies = [own or opened.folder.snapshot().tally]
    tallies += [folder.snapshot().tally for folder in other_rounds(opened.job)]
    return tallies


def charge_of_receipts(args: EngineArgs | None, receipts: Iterable[Receipt]) -> Charge:
    """What the work of some receipts took."""
    counts = asked_for(receipts)
    return charge_of(args, counts["prompt_tokens"], counts["output_tokens"])


def most_charge(spec: EngineSpec, ask: Ask) -> Charge:
    """What an ask takes at most, of an engine that does not know better: one that cuts a prompt by its own tokens."""
    prompt = min(most_prompt_tokens(ask), spec.max_prompt_tokens)
    output = most_output_tokens(ask)
    return charge_of(spec.args, prompt, output)


def charge_of(args: EngineArgs | None, prompt_tokens: int, output_tokens: int) -> Charge:
    """Tokens as limits count them; without options that name a price they cost nothing."""
    cost = 0.0 if args is None else price_of(args, prompt_tokens, output_tokens) or 0.0
    return Charge(prompt_tokens + output_tokens, round(cost, 9))


def _sum(charges: Iterable[Charge]) -> Charge:
    return functools.reduce(Charge.plus, charges, Charge())
