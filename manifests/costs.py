"""What a run may spend and is expected to spend: its budget as a ledger, and estimates with 95 % intervals."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from relabel.manifests import failpoints
from relabel.manifests.asks import Charge
from relabel.manifests.errors import ManifestError
from relabel.manifests.records import checked, fault_of, plain, sealed_json, unsealed, version_of
from relabel.manifests.store import RunStore


class Range(NamedTuple):
    """A number with its 95 % interval. Exact numbers have `low == value == high`."""

    low: float
    value: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Range:
        return cls(value, value, value)

    def __mul__(self, other: object) -> Range:  # a tuple's `*` repeats it, which no range wants
        if isinstance(other, Range):
            return Range(self.low * other.low, self.value * other.value, self.high * other.high)
        assert isinstance(other, int | float)
        return Range(self.low * other, self.value * other, self.high * other)

    def plus(self, other: Range) -> Range:
        """The sum, as if both missed in the same direction: wide rather than wrong."""
        return Range(self.low + other.low, self.value + other.value, self.high + other.high)

    def rounded(self, digits: int = 0) -> Range:
        return Range(*(round(one, digits) for one in self))


# ------------------------------------------------------------------------------
# A run's budget: what all of its workers may spend together, as a ledger in the output.
#
# `budget/000042.json` is created once, if absent, and holds the totals as they stand after it, so that of workers that
# race for what is left one gets it, and the last entry says all. A worker takes a share before it asks, and gives back
# at its end what it did not spend. One that is killed gives nothing back: its share counts as spent.


FOLDER = "budget"
VERSION = 1
LARGEST_SHARE, SMALLEST_SHARE = 16, 256
"""A worker takes at most a 16th of what is free, and at least a 256th: a kill costs no more than the one, and the
number of entries grows with the logarithm of the budget because of the other.
"""
RACE_S = 0.05
"""Longest pause before a worker that lost a race for an entry tries again, for each race that it lost."""


NOTHING = Charge()


class Limits(NamedTuple):
    """`run.max_tokens` and `run.max_cost`; None is no limit."""

    max_tokens: int | None = None
    max_cost: float | None = None

    @property
    def is_set(self) -> bool:
        return self != (None, None)

    def hold(self, charge: Charge) -> bool:
        """Whether that much is within the limits."""
        return self.are_met(charge, Charge(self.max_tokens or 0, self.max_cost or 0.0))

    def are_met(self, needed: Charge, at_hand: Charge) -> bool:
        """Whether, of what is limited, no more is needed than there is."""
        return (self.max_tokens is None or needed.tokens <= at_hand.tokens) and (
            self.max_cost is None or needed.cost <= at_hand.cost
        )

    def share(self, taken: Charge, least: Charge, wanted: Charge) -> Charge:
        """What one worker may take of what is free.

        Args:
            least: is free.
        """
        share = wanted
        if self.max_tokens is not None:
            free = self.max_tokens - taken.tokens
            some = max(min(wanted.tokens, free // LARGEST_SHARE), free // SMALLEST_SHARE, least.tokens)
            share = share._replace(tokens=some)
        if self.max_cost is not None:
            left = self.max_cost - taken.cost
            share = share._replace(cost=max(min(wanted.cost, left / LARGEST_SHARE), left / SMALLEST_SHARE, least.cost))
        return share


NO_LIMITS = Limits()


class ByReceipts(NamedTuple):
    """What an output's receipts tell of.

    Args:
        total: of all calls.
        beyond: of those that had no budget, which no worker told the ledger.
    """

    total: Charge = NOTHING
    beyond: Charge = NOTHING


UNTOLD = ByReceipts()


@dataclass(frozen=True, slots=True)
class BudgetEntry:
    """The budget as it stands after one worker's change.

    Args:
        worker: who made it.
        limits: of that worker's job file.
        taken: spent, or in the hands of a worker that is at work or was killed.
        spent: what workers have told of that.
        wanted: what the last worker that ended for want of it had wanted; nothing where one has begun since.
        counted: what is in it of calls that had no budget. None in entries of an earlier relabel, whose receipts do not
            say which those are.
        write_id: drawn for this one write, so that its bytes are nobody else's.
    """

    worker: str = ""
    limits: Limits = NO_LIMITS
    taken: Charge = NOTHING
    spent: Charge = NOTHING
    wanted: Charge = NOTHING
    counted: Charge | None = None
    write_id: str = ""
    version: int = field(default=VERSION)

    def knowing(self, receipts: ByReceipts) -> BudgetEntry:
        """The same, with what receipts tell beyond it: of calls that had no budget, and what tokens cost by prices that
        were named later.
        """
        counted = receipts.beyond if self.counted is None else self.counted
        unknown = receipts.beyond.above(counted)
        more = unknown.plus(receipts.total.above(self.taken.plus(unknown)))
        return replace(self, taken=self.taken.plus(more), spent=self.spent.plus(more), counted=counted.plus(unknown))


@dataclass(frozen=True, slots=True)
class BudgetState:
    """How much of a budget is gone.

    Args:
        max_tokens, max_cost: None is no limit.
        spent_tokens, spent_cost: what workers have told of.
        held_tokens, held_cost: in the hands of workers that are at work, or lost with one that was killed.
        wanted_tokens, wanted_cost: the most that what comes next may take, where a worker ended for want of it.
    """

    max_tokens: int | None
    max_cost: float | None
    spent_tokens: int
    spent_cost: float
    held_tokens: int
    held_cost: float
    wanted_tokens: int = 0
    wanted_cost: float = 0.0

    @property
    def text(self) -> str:
        """For people, in a phrase."""
        parts = []
        if self.max_tokens is not None:
            shown = f"{self.spent_tokens:,} of {self.max_tokens:,} tokens spent"
            parts.append(shown + _beside(f"{self.held_tokens:,}", f"{self.wanted_tokens:,}"))
        if self.max_cost is not None:
            shown = f"{self.spent_cost:,.4f} of {self.max_cost:,.4f} in money spent"
            parts.append(shown + _beside(f"{self.held_cost:,.4f}", f"{self.wanted_cost:,.4f}"))
        return "; ".join(parts)


def _beside(held: str, wanted: str) -> str:
    """What there is to say of amounts that are not nothing."""
    said = f", {held} held by workers that are at work or were killed" if held.strip("0.") else ""
    return said + (f", what comes next may take up to {wanted}" if wanted.strip("0.") else "")


def budget_of(store: RunStore, receipts: ByReceipts, limits: Limits | None = None) -> BudgetState | None:
    """How much of an output's budget is gone; None where it has none.

    Args:
        limits: of the job file; without it, those of the last worker that wrote.
    Raises:
        ManifestError: the ledger is damaged.
    """
    if limits is not None and not limits.is_set:
        return None
    number, entry = last_entry(store)
    if number == 0 and limits is None:
        return None
    entry = entry.knowing(receipts)
    held = entry.taken.minus(entry.spent)
    limits = limits or entry.limits
    wanted = NOTHING if limits.hold(entry.taken.plus(entry.wanted)) else entry.wanted
    costs = [round(one.cost, 9) for one in (entry.spent, held, wanted)]
    return BudgetState(*limits, entry.spent.tokens, costs[0], held.tokens, costs[1], wanted.tokens, costs[2])


class Ledger:
    """The ledger of one output.

    Args:
        limits: of the job file.
        worker: its name in entries.
    """

    def __init__(self, store: RunStore, limits: Limits, worker: str, receipts: ByReceipts = UNTOLD) -> None:
        self.limits = limits
        self._store = store
        self._worker = worker
        self._receipts = receipts
        self._number, entry = last_entry(store)
        self.last = entry.knowing(receipts)

    @property
    def taken(self) -> Charge:
        """By all workers, as far as was seen last."""
        return self.last.taken

    def look(self) -> None:
        """See what others did since; a listing that is late changes nothing."""
        found = last_entry(self._store)
        if found[0] > self._number:
            self._number, self.last = found[0], found[1].knowing(self._receipts)

    def take(self, least: Charge, wanted: Charge, *, told: Charge = NOTHING, begins: bool = False) -> Charge | None:
        """Take a share, which counts as spent from here on.

        Args:
            least: what it must hold; wanted: what it may.
            told: what the worker has spent since it told last.
            begins: it is the worker's first, and must leave room for what an earlier one ended for want of.
        Returns:
            The share; None where less than the least is free.
        """

        def change(last: BudgetEntry) -> BudgetEntry | None:
            if not self.limits.hold(last.taken.plus(least).plus(last.wanted if begins else NOTHING)):
                return None
            share = self.limits.share(last.taken, least, wanted)
            kept = NOTHING if begins else last.wanted
            return replace(last, taken=last.taken.plus(share), spent=last.spent.plus(told), wanted=kept)

        before = self._append(change)
        return None if before is None else self.last.taken.minus(before.taken)

    def settle(self, given_back: Charge, told: Charge, wanted: Charge | None) -> None:
        """A worker's end.

        Args:
            given_back: what it took and did not spend; less than nothing where it spent more than it had taken.
            told: as of `take`.
            wanted: what it ended for want of. None where it found nothing more to begin: what another had ended for
                want of is done, or is asked for again by who needs it.
        """
        self._append(
            lambda last: replace(
                last,
                taken=last.taken.minus(given_back),
                spent=last.spent.plus(told),
                wanted=NOTHING if wanted is None else wanted,
            )
        )

    def _append(self, change: Callable[[BudgetEntry], BudgetEntry | None]) -> BudgetEntry | None:
        """Add the entry that `change` makes of the last one; returns that last one, or None if there is nothing to
        change.
        """
        is_fresh, num_lost = False, 0
        while True:
            before = self.last
            changed = change(before)
            if changed is None:
                if is_fresh:
                    return None
                self.look()
                is_fresh = True
                continue
            entry = replace(
                changed, worker=self._worker, limits=self.limits, write_id=secrets.token_hex(8), version=VERSION
            )
            failpoints.hit("before_budget")
            if self._store.create(_name(self._number + 1), sealed_json(plain(entry))):
                failpoints.hit("after_budget")
                self._number, self.last = self._number + 1, entry
                return before
            num_lost += 1
            time.sleep(random.uniform(0.0, RACE_S * num_lost))
            self.look()
            is_fresh = True


def last_entry(store: RunStore) -> tuple[int, BudgetEntry]:
    """The ledger as it stands, and the number of its last entry; 0 where there is none.

    Raises:
        ManifestError: it is damaged, or another version of relabel wrote it.
    """
    number = max(_numbers(store), default=0)
    return number, _entry(store, number) if number else BudgetEntry()


def check_entries(store: RunStore) -> None:
    """Read the whole ledger.

    Raises:
        ManifestError: as of `last_entry`, of any entry.
    """
    for number in _numbers(store):
        _entry(store, number)


def _numbers(store: RunStore) -> list[int]:
    return [int(stem) for name in store.names(FOLDER) if (stem := name[len(FOLDER) + 1 : -5]).isdecimal()]


def _entry(store: RunStore, number: int) -> BudgetEntry:
    where = f"{store.root}/{_name(number)}"
    try:
        held = unsealed(store.read(_name(number)))
        if (version := version_of(held)) != VERSION:
            raise ManifestError(f"{where}: written as version {version}; this relabel reads {VERSION}.")
        return checked(BudgetEntry, held)
    except ValueError as exc:
        raise ManifestError(
            f"{where}: not an entry of a budget ({fault_of(exc)}). Restore it from a copy: without it, what was spent "
            "is not known."
        ) from exc


def _name(number: int) -> str:
    return f"{FOLDER}/{number:06d}.json"
