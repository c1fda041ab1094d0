"""Any order of planning, leasing, claiming, committing, crashing, resuming and finishing: conservation and single
commits hold.

The code is the real one; only the workers are driven by hand. Three dialects of storage: S3 as it should be, S3 that
loses replies, and a local folder. Workers give different answers on purpose, so that a chunk that changed hands after
its commit could not look unchanged.
"""

import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from relabel.jobs.job import load_job, open_run
from relabel.jobs.output import Exit
from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.progress import Progress
from relabel.jobs.run.results import conclude
from relabel.jobs.run.session import Session
from relabel.jobs.run.stop import Stop
from relabel.manifests import failpoints
from relabel.manifests import objects as retries
from relabel.manifests.asks import EngineFacts
from relabel.manifests.files import FileLock, Storage
from relabel.manifests.labels import LABELS, QUARANTINE, LabelRow, Pair, QuarantineRow
from relabel.manifests.plan import Receipt, load_receipt, parse_receipt_name, shard_row_ids
from relabel.manifests.records import sha256_bytes
from tests.faults.conftest import IS_FULL, count
from tests.faults.places import pairs
from tests.manifests.memory_objects import MemoryObjects, once

ROWS = 14
LEASE_S = 60.0
FACTS = EngineFacts("fake", "1", "fake", "0" * 64)
COMMIT_PLACES = ("before_labels", "after_labels", "after_quarantine", "before_receipt", "after_receipt")
LOCAL_PLACES = ("before_temp_sync", "before_temp_rename")
FINISH_PLACES = ("before_manifest", "after_manifest")


WHICH = st.integers(0, 5)
MOST_WORKERS = 4
NUM_SEQUENCES = count(full=60, short=8)


class CrashError(BaseException):
    """Represents the death of a worker's process; like one, nothing catches it."""


class Worker:
    """A worker that is driven by hand.

    Args:
        number: distinguished from the others by its label rows, which carry it as their token count.
    """

    def __init__(self, number: int, session: Session) -> None:
        self.number = number
        self.session = session
        self.chunks: Iterator[ChunkWork | None] = session.chunks()
        self.held: list[ChunkWork] = []

    def fill(self, work: ChunkWork, bits: int) -> None:
        """Label some of a chunk's rows and quarantine the others."""
        for index, pair in enumerate(work.pairs):
            work.rows[index] = self._row(pair, work, index, is_ok=bool(bits >> index & 1))

    def _row(self, pair: Pair, work: ChunkWork, index: int, *, is_ok: bool) -> LabelRow | QuarantineRow:
        if not is_ok:
            return QuarantineRow(pair.row_id, pair.query_id, pair.doc_id, "format", "by the test", [], 0, self.number)
        grade, probs, own = self.number % 3, (0.2, 0.3, 0.5), self.number
        key = work.keys[index]
        return LabelRow(
            pair.row_id,
            pair.query_id,
            pair.doc_id,
            "ok",
            grade,
            probs,
            0.1,
            1.3,
            [],
            None,
            None,
            [],
            None,
            0,
            own,
            False,
            key,
            None,
        )

    def die(self) -> None:
        """As by kill -9: a kernel frees its locks, leases stay until their time is over."""
        for lock in self.session._locks.values():
            if isinstance(lock, FileLock):
                lock.release()
            else:
                lock._let_go.set()


class Seen(NamedTuple):
    """A receipt as it was when it was first seen, and the digests that its files had."""

    data: bytes
    receipt: Receipt


class Clock:
    """In place of the module `time`: each check is a tenth of a second later, so that what is drawn next depends on no
    machine's pace.
    """

    def __init__(self) -> None:
        self._looks = itertools.count()

    def monotonic(self) -> float:
        return next(self._looks) / 10

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class Runs(RuleBasedStateMachine):
    """Args: dialect: `strict`, `lossy` or `local`."""

    dialect = ""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(
            tempfile.mkdtemp(prefix="relabel-states-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        )
        self.objects = MemoryObjects()
        self.clock = Clock()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(retries, "FIRST_PAUSE_S", 0.0)
        self.patch.setattr("relabel.jobs.run.session.time", self.clock)
        self.patch.setattr(failpoints, "hit", self._hit)
        self.patch.setattr(
            "relabel.manifests.store.objects_of",
            lambda url, storage: (self.objects, url.partition("://")[2]),
        )
        pq.write_table(pairs(ROWS), self.folder / "pairs.parquet", row_group_size=10)
        spec = {
            "name": "states",
            "input": {"path": str(self.folder / "pairs.parquet")},
            "labeler": {"name": "direct", "grades": 3},
            "engine": {"name": "fake"},
            "output": str(self.folder / "out") if self.dialect == "local" else "mem://bucket/out",
            "shards": 2,
            "run": {"chunk_rows": 4, "max_failed_fraction": 1.0, "lease_s": LEASE_S},
        }
        (self.folder / "job.yaml").write_text(yaml.safe_dump(spec))
        self.job = load_job(str(self.folder / "job.yaml"), environment={})
        self.numbers = itertools.count(1)
        self.alive: list[Worker] = []
        self.armed = ""
        self.winners: dict[tuple[int, int, int], int] = {}
        self.seen: dict[str, Seen] = {}

    # What may happen

    @initialize(place=st.sampled_from(("", "before_plan_rows", "before_plan", "after_plan")))
    def crash_while_planning(self, place: str) -> None:
        """The first worker dies while it plans, or does not."""
        self.armed = place
        try:
            open_run(self.job)
        except CrashError:
            pass
        finally:
            self.armed = ""

    @precondition(lambda self: len(self.alive) < MOST_WORKERS)
    @rule(count=st.integers(0, 8), sleeps=st.booleans())
    def begin(self, count: int, sleeps: bool) -> None:
        """A worker starts: the run is planned if nobody has. Perhaps all who were there before are asleep by then."""
        if sleeps:
            self.locks_are_lost()
        self._claim(self._begin(), count)

    @precondition(
        lambda self: len(self.alive) < MOST_WORKERS and any(held.receipt.quarantine for held in self.seen.values())
    )
    @rule()
    def begin_retry(self) -> None:
        """A worker starts to ask quarantined rows again."""
        self._claim(self._begin(is_retry=True), 8)

    def _begin(self, **options: Any) -> Worker:
        opened = open_run(self.job)
        shards = list(range(len(opened.plan.shards)))
        session = Session(opened, shards, stop=Stop(), progress=Progress(), **{"is_retry": False, **options})
        worker = Worker(next(self.numbers), session)
        session.worker, session.facts = f"w{worker.number}", FACTS
        self.alive.append(worker)
        return worker

    @precondition(lambda self: self.alive)
    @rule(one=WHICH, count=st.integers(1, 4))
    def claim(self, one: int, count: int) -> None:
        """A worker takes locks and reads the rows of its next chunks."""
        self._claim(self._pick(one), count)

    def _claim(self, worker: Worker, count: int) -> None:
        worker.held.extend(work for work in itertools.islice(worker.chunks, count) if work is not None)

    @precondition(lambda self: self._busy())
    @rule(one=WHICH, bits=st.integers(0, 31), count=st.integers(1, 4), is_last=st.booleans())
    def commit(self, one: int, bits: int, count: int, is_last: bool) -> None:
        """A worker commits some of the chunks that it has read, anyone who holds their shards by now."""
        self._commit(self._pick(one, among=self._busy()), count, bits, is_last=is_last)

    def _commit(self, worker: Worker, count: int, bits: int, *, is_last: bool = False) -> None:
        for _ in range(min(count, len(worker.held))):
            work = worker.held.pop(-1 if is_last else 0)
            worker.fill(work, bits)
            if worker.session.commit(work):
                assert work.id not in self.winners, f"{work.id} was committed twice"
                self.winners[work.id] = worker.number
            else:
                held = self._receipts().get(work.id.receipt_name)
                assert held is not None, f"{work.id} was refused, and nobody has committed it"
                assert json.loads(held)["worker"] != f"w{worker.number}", (
                    f"{work.id} was refused to the worker whose receipt is"
                )

    @precondition(lambda self: self._busy())
    @rule(one=WHICH, bits=st.integers(0, 31), where=st.sampled_from((*COMMIT_PLACES, *LOCAL_PLACES)))
    def crash_while_committing(self, one: int, bits: int, where: str) -> None:
        """A worker dies on the way."""
        worker = self._pick(one, among=self._busy())
        work = worker.held.pop()
        worker.fill(work, bits)
        self.armed = where
        try:
            worker.session.commit(work)
        except CrashError:
            self._dies(worker)
        finally:
            self.armed = ""

    @precondition(lambda self: self.alive)
    @rule(one=WHICH)
    def crash(self, one: int) -> None:
        """A worker dies."""
        self._dies(self._pick(one))

    @precondition(lambda self: self.alive)
    @rule(one=WHICH)
    def leave(self, one: int) -> None:
        """A worker ends in good order, with chunks undone perhaps."""
        worker = self._pick(one)
        worker.session.close()
        self.alive.remove(worker)

    @rule()
    def locks_are_lost(self) -> None:
        """All who hold leases fall asleep until these are dead, and may wake; a local file system forgets its locks, as
        some do.
        """
        self.objects.now_s += LEASE_S + 1.0
        for worker in self.alive:
            for lock in worker.session._locks.values():
                if isinstance(lock, FileLock):
                    lock.release()

    @precondition(lambda self: self._busy())
    @rule(one=WHICH, bits=st.integers(0, 31), other_bits=st.integers(0, 31))
    def two_commit_one_chunk(self, one: int, bits: int, other_bits: int) -> None:
        """A worker loses its locks, a second one takes over what is open, and both commit it."""
        first = self._pick(one, among=self._busy())
        self.locks_are_lost()
        second = self._begin(is_retry=first.session.is_retry)
        self._claim(second, 8)
        for worker, chosen in (
            ((second, bits), (first, other_bits)) if bits % 2 else ((first, bits), (second, other_bits))
        ):
            self._commit(worker, 4, chosen)

    @precondition(lambda self: self.dialect != "local" and self.alive)
    @rule(one=WHICH)
    def renew(self, one: int) -> None:
        """A sleeper wakes and renews what it held, or learns that it is gone."""
        for lock in list(self._pick(one).session._locks.values()):
            lock.renew()

    @precondition(lambda self: self.dialect == "lossy")
    @rule(
        after_calls=st.integers(0, 6),
        verb=st.sampled_from(("put", "get", "age_s", "page")),
        when=st.sampled_from(("before", "after")),
    )
    def lose_a_reply(self, after_calls: int, verb: str, when: str) -> None:
        """One of the next replies is lost: the call did not act, or it did."""
        left = [after_calls]

        def fault(called: str, key: str, at: str) -> None:
            if called == verb and at == when:
                left[0] -= 1
                if left[0] == -1:
                    raise retries.TryAgainError("lost, by the test")

        self.objects.faults = fault

    @precondition(lambda self: self.dialect == "lossy" and self._busy())
    @rule(one=WHICH, bits=st.integers(0, 31), when=st.sampled_from(("before", "after")))
    def commit_whose_reply_is_lost(self, one: int, bits: int, when: str) -> None:
        """The receipt was written or was not; the worker that asked does not learn which."""
        self.objects.faults = once("put", when, key=self._pick(one, among=self._busy()).held[0].id.receipt_name)
        self._commit(self._pick(one, among=self._busy()), 1, bits)

    @precondition(lambda self: self.alive)
    @rule(one=WHICH)
    def finish(self, one: int) -> None:
        """A worker concludes: the manifest is written if every chunk is in."""
        self._conclude(self._pick(one).session)

    @precondition(lambda self: self.alive)
    @rule(one=WHICH, where=st.sampled_from(FINISH_PLACES))
    def crash_while_finishing(self, one: int, where: str) -> None:
        """A worker dies over the manifest, or would if it had one to write."""
        worker = self._pick(one)
        self.armed = where
        try:
            self._conclude(worker.session)
        except CrashError:
            self._dies(worker)
        finally:
            self.armed = ""

    def _pick(self, one: int, among: list[Worker] | None = None) -> Worker:
        workers = self.alive if among is None else among
        return workers[one % len(workers)]

    def _busy(self) -> list[Worker]:
        return [worker for worker in self.alive if worker.held]

    def _dies(self, worker: Worker) -> None:
        worker.die()
        self.alive.remove(worker)

    def _conclude(self, session: Session) -> Exit:
        # the lock of anyone who died over the manifest is dead
        self.objects.now_s += 1000.0 if self.dialect != "local" else 0.0
        return conclude(session).exit

    # What always holds

    @invariant()
    def a_receipt_never_changes_and_its_files_hold_its_chunk_once(self) -> None:
        for name, data in self._receipts().items():
            if name in self.seen:
                assert self.seen[name].data == data, f"{name} changed"
                continue
            receipt = self._check(name)
            self.seen[name] = Seen(data, receipt)
        assert not self.seen.keys() - self._receipts().keys(), "a receipt vanished"

    @invariant()
    def no_label_row_of_a_committed_chunk_changes(self) -> None:
        store = self._store()
        for held in self.seen.values():
            for file in (held.receipt.labels, held.receipt.quarantine):
                if file is not None:
                    assert sha256_bytes(store.read(file.path)) == file.sha256

    def _check(self, name: str) -> Receipt:
        opened = self._look()
        receipt, chunk = load_receipt(opened.store, name), parse_receipt_name(name)
        ids = [
            row_id
            for file, schema in ((receipt.labels, LABELS), (receipt.quarantine, QUARANTINE))
            if file is not None
            for row_id in opened.folder.table(file, schema).column("row_id").to_pylist()
        ]
        planned = opened.plan.shards[chunk.shard]
        first = sum(planned.chunks[: chunk.chunk])
        wanted = shard_row_ids(opened.store, planned)[first : first + planned.chunks[chunk.chunk]].tolist()
        if chunk.attempt > 1:
            before = self.seen[chunk._replace(attempt=chunk.attempt - 1).receipt_name].receipt
            wanted = [row["row_id"] for row in opened.folder.quarantined_rows(before)]
        assert sorted(ids) == sorted(wanted), f"{name}: rows lost or doubled"
        if chunk in self.winners:
            assert receipt.worker == f"w{self.winners[chunk]}", (
                f"{name}: written by another than the one that got this answer"
            )
        own = int(receipt.worker[1:])
        for file, schema in ((receipt.labels, LABELS), (receipt.quarantine, QUARANTINE)):
            if file is not None:
                assert set(opened.folder.table(file, schema).column("output_tokens").to_pylist()) == {own}, (
                    f"{name}: another worker's rows"
                )
        return receipt

    # Looking

    def _hit(self, name: str) -> None:
        if name == self.armed:
            self.armed = ""
            raise CrashError(name)

    def _store(self) -> Any:
        from relabel.manifests.store import open_run_store

        faults, self.objects.faults = self.objects.faults, lambda verb, key, when: None
        try:
            return _Quiet(open_run_store(self.job.spec.output, Storage(lease_s=LEASE_S)), self, faults)
        finally:
            self.objects.faults = faults

    def _receipts(self) -> dict[str, bytes]:
        store = self._store()
        return {name: store.read(name) for name in store.etags("receipts")}

    def _look(self) -> Any:
        """The run as it is; looking loses no reply and makes no plan."""
        faults, self.objects.faults = self.objects.faults, lambda verb, key, when: None
        try:
            return open_run(self.job, may_write=False)
        finally:
            self.objects.faults = faults

    def teardown(self) -> None:
        """However it is: everybody is gone, and one more run ends it whole."""
        try:
            self.objects.faults = lambda verb, key, when: None
            for worker in list(self.alive):
                self._dies(worker)
            self.objects.now_s += 10_000.0
            last = self._begin()
            while (work := next(last.chunks, None)) is not None:
                last.fill(work, 31)
                assert last.session.commit(work), "nobody else is there"
                self.winners[work.id] = last.number
            last.session.close()
            assert self._conclude(last.session) in (Exit.DONE, Exit.NOTHING_TO_DO)
            self.a_receipt_never_changes_and_its_files_hold_its_chunk_once()
            self.no_label_row_of_a_committed_chunk_changes()
            folder = last.session.opened.folder
            assert folder.prove(folder.snapshot(), check_bytes=True).rows == ROWS
        finally:
            self.patch.undo()
            shutil.rmtree(self.folder)


class _Quiet:
    """A store for looking: no fault hits its calls."""

    def __init__(self, store: Any, machine: Runs, faults: Any) -> None:
        self._store, self._machine = store, machine

    def __getattr__(self, verb: str) -> Any:
        real = getattr(self._store, verb)

        def called(*arguments: Any) -> Any:
            objects = self._machine.objects
            faults, objects.faults = objects.faults, lambda verb, key, when: None
            try:
                return real(*arguments)
            finally:
                objects.faults = faults

        return called


def machine(dialect: str) -> Any:
    """The test case of one dialect."""
    kind = type(f"Runs{dialect.title()}", (Runs,), {"dialect": dialect})
    case = kind.TestCase
    case.settings = settings(
        max_examples=NUM_SEQUENCES,
        stateful_step_count=50 if IS_FULL else 30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    return case


TestStrictS3 = machine("strict")
TestS3ThatLosesReplies = machine("lossy")
TestLocal = machine("local")
