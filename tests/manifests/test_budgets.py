"""The ledger of a budget: whoever takes, settles or is killed, no more is given out than there is, and what counts as
spent is never less than what was.
"""

from __future__ import annotations

import itertools
import math
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.manifests.asks import Charge
from relabel.manifests.costs import (
    LARGEST_SHARE,
    SMALLEST_SHARE,
    BudgetEntry,
    ByReceipts,
    Ledger,
    Limits,
    budget_of,
    last_entry,
)
from relabel.manifests.errors import ManifestError
from relabel.manifests.files import Storage
from relabel.manifests.store import LocalRunStore, ObjectRunStore
from tests.manifests.memory_objects import MemoryObjects

LIMITS = Limits(10_000, 1.0)
_folders = itertools.count()


def charge(tokens: int) -> Charge:
    return Charge(tokens, tokens / 10_000)


STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["take", "spend", "settle", "kill", "raise"]),
        st.integers(1, 3000),
        st.integers(1, 5000),
    ),
    max_size=60,
)


class Worker:
    """What a worker has in hand, by its own count."""

    def __init__(self, store: LocalRunStore, limits: Limits) -> None:
        self.ledger = Ledger(store, limits, "w")
        self.taken = self.spent = self.told = Charge()
        self.has_begun = False


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_no_order_of_takes_ends_and_kills_gives_out_more_than_there_is(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, str, int, int]]
) -> None:
    store = LocalRunStore(tmp_path_factory.mktemp("budget") / str(next(_folders)))
    limits, spent_by_all = LIMITS, Charge()
    workers = [Worker(store, limits) for _ in range(4)]
    for number, what, least, wanted in steps:
        worker = workers[number]
        if what == "take":
            share = worker.ledger.take(
                charge(least),
                charge(wanted),
                told=worker.spent.minus(worker.told),
                begins=not worker.has_begun,
            )
            if share is not None:
                assert share.tokens >= least
                worker.taken, worker.told = worker.taken.plus(share), worker.spent
                worker.has_begun = True
        elif what == "spend":
            some = charge(min(least, worker.taken.tokens - worker.spent.tokens))
            worker.spent, spent_by_all = worker.spent.plus(some), spent_by_all.plus(some)
        elif what == "settle" and worker.has_begun:
            worker.ledger.settle(worker.taken.minus(worker.spent), worker.spent.minus(worker.told), None)
            workers[number] = Worker(store, limits)
        elif what == "kill":
            workers[number] = Worker(store, limits)
        elif what == "raise":
            limits = Limits(limits.max_tokens + least, limits.max_cost + least / 10_000)  # type: ignore[operator]
            workers[number] = Worker(store, limits)
        entry = last_entry(store)[1]
        assert spent_by_all.tokens <= entry.taken.tokens <= limits.max_tokens  # type: ignore[operator]
        assert spent_by_all.cost <= entry.taken.cost + 1e-9
        assert entry.taken.cost <= limits.max_cost + 1e-9  # type: ignore[operator]
        assert entry.spent.tokens <= spent_by_all.tokens


@pytest.mark.parametrize("kind", ["files", "objects"])
def test_workers_that_race_for_the_last_of_it_get_all_of_it_and_no_more(kind: str, tmp_path: Path) -> None:
    limits, got = Limits(5_000), list[Charge]()
    objects = MemoryObjects()

    def store() -> LocalRunStore | ObjectRunStore:
        if kind == "files":
            return LocalRunStore(tmp_path)
        return ObjectRunStore(objects, "run", Storage(), root="s3://b/run")

    def work() -> None:
        ledger = Ledger(store(), limits, "w")
        while (share := ledger.take(Charge(100), Charge(100))) is not None:
            got.append(share)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(share.tokens for share in got) == 5_000
    number, entry = last_entry(store())
    assert (number, entry.taken) == (50, Charge(5_000, 0.0))


def test_entries_grow_with_the_logarithm_of_the_budget(tmp_path: Path) -> None:
    """A worker of 64 asks in flight that spends all that it takes."""
    limits, least, wanted = Limits(10**10), Charge(3_000), Charge(64 * 3_000)
    ledger = Ledger(LocalRunStore(tmp_path), limits, "w")
    count = 0
    while ledger.take(least, wanted) is not None:
        count += 1
    # a 256th of what is left each time, then all that is in flight at once, then 16ths, then single asks
    assert count < (
        SMALLEST_SHARE * math.log(10**10 / (SMALLEST_SHARE * wanted.tokens))
        + SMALLEST_SHARE
        + LARGEST_SHARE * math.log(wanted.tokens * LARGEST_SHARE / least.tokens)
        + LARGEST_SHARE
    )
    assert 10**10 - ledger.taken.tokens < least.tokens


def test_a_kill_costs_a_sixteenth_of_what_was_free_at_most(tmp_path: Path) -> None:
    ledger = Ledger(LocalRunStore(tmp_path), Limits(16_000), "w")
    assert ledger.take(Charge(10), Charge(10**9)) == Charge(1_000, 0.0)


def test_what_a_worker_ended_for_want_of_keeps_the_next_from_beginning_until_there_is_more(tmp_path: Path) -> None:
    store = LocalRunStore(tmp_path)
    first = Ledger(store, Limits(1_000), "w")
    share = first.take(Charge(900), Charge(900), begins=True)
    assert share == Charge(900, 0.0)
    first.settle(Charge(50), Charge(850), Charge(400))  # spent 850, so that 150 are free
    assert Ledger(store, Limits(1_000), "w").take(Charge(1), Charge(1), begins=True) is None
    assert Ledger(store, Limits(1_250), "w").take(Charge(1), Charge(1), begins=True) is None
    assert Ledger(store, Limits(1_251), "w").take(Charge(1), Charge(1), begins=True) is not None


def test_a_listing_that_is_late_gives_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalRunStore(tmp_path)
    ledger, other = Ledger(store, Limits(300), "w"), Ledger(store, Limits(300), "o")
    assert ledger.take(Charge(100), Charge(100)) is not None
    real, lates = store.names, [store.names("budget")] * 2
    assert other.take(Charge(100), Charge(100)) is not None
    monkeypatch.setattr(store, "names", lambda folder: lates.pop() if lates else real(folder))
    assert ledger.take(Charge(100), Charge(100)) is not None
    assert ledger.take(Charge(1), Charge(1)) is None
    assert last_entry(store)[1].taken.tokens == 300


def test_a_damaged_entry_is_named_and_nothing_is_guessed(tmp_path: Path) -> None:
    store = LocalRunStore(tmp_path)
    store.put("budget/000003.json", b'{"version": 1, "taken": {"tokens": "many"}}')
    with pytest.raises(ManifestError, match=r"budget/000003\.json: not an entry of a budget"):
        budget_of(store, ByReceipts())
    store.put("budget/000004.json", b'{"version": 99}')
    with pytest.raises(ManifestError, match="version 99"):
        Ledger(store, LIMITS, "w")


def test_what_a_worker_wanted_is_forgotten_once_another_ends_with_nothing_left_to_begin(tmp_path: Path) -> None:
    limits, store = Limits(max_tokens=1_000), LocalRunStore(tmp_path)
    first, second = Ledger(store, limits, "first"), Ledger(store, limits, "second")
    assert first.take(Charge(600), Charge(600)) is not None
    assert second.take(Charge(100), Charge(100)) is not None
    second.settle(Charge(0), Charge(100), Charge(500))
    later = Ledger(store, limits, "later")
    assert later.take(Charge(10), Charge(10), begins=True) is None, "it would start an engine to end for want of 500"
    first.settle(Charge(100), Charge(500), None)
    assert Ledger(store, limits, "later").take(Charge(10), Charge(10), begins=True) is not None


def test_what_receipts_tell_is_taken_in_once_and_never_falls_below_their_sum() -> None:
    """Of calls without a budget, whole; of all calls, what later prices make of tokens that cost nothing before."""
    begun = BudgetEntry(taken=Charge(500), spent=Charge(100), counted=Charge())
    receipts = ByReceipts(Charge(300, 3.0), Charge(200, 2.0))
    known = begun.knowing(receipts)
    assert (known.taken, known.spent) == (Charge(700, 3.0), Charge(300, 3.0))
    assert known.knowing(receipts) == known
    assert known.knowing(ByReceipts(Charge(150, 1.0), Charge(50, 0.5))) == known, "of a worker that looked earlier"
    assert known.knowing(ByReceipts(Charge(340, 3.4), Charge(240, 2.4))).taken == Charge(740, 3.4)


def test_an_entry_of_an_earlier_relabel_takes_receipts_in_by_their_sum() -> None:
    """Whose receipts do not say whether they had a budget."""
    old = BudgetEntry(taken=Charge(500), spent=Charge(400))
    all_of_them = ByReceipts(Charge(520), Charge(520))
    assert old.knowing(all_of_them).taken == Charge(520)
    assert old.knowing(all_of_them).knowing(ByReceipts(Charge(600), Charge(550))).taken == Charge(600)
