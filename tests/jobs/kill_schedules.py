"""A run over one shard as its crash journal sees it, with a clock of its own: processes start, ask, and are killed.

What is decided is `Isolation`'s, the product's own; what is played here is the time that asks take, and the run loop's
order: ordinary chunks in batches, then those with suspects, group by group, after asks about a made-up pair.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from relabel.jobs.run.crashes import Isolation
from relabel.jobs.run.loop import MADE_UP, MADE_UP_S


@dataclass(frozen=True)
class Machine:
    """How fast all goes, in seconds.

    Args:
        start_s: until a process has an engine.
        answer_s: from an ask to its answer, however many are asked at a time.
        write_s: of the crash journal.
        capacity: asks at a time.
    """

    start_s: float
    answer_s: float
    write_s: float
    capacity: int


FAST = Machine(start_s=0.85, answer_s=0.004, write_s=0.001, capacity=16)
ON_S3 = Machine(start_s=1.5, answer_s=0.05, write_s=0.05, capacity=64)
STEADY = Machine(start_s=2.0, answer_s=1.0, write_s=0.001, capacity=16)
SLOW = Machine(start_s=20.0, answer_s=8.0, write_s=0.001, capacity=64)


class KilledError(Exception):
    """The process was killed, or went down over a row."""


@dataclass
class World:
    """A shard's chunks, and what is known of them.

    Args:
        poison: rows that end the process each time they are asked.
        random: of the jitter in how long a start takes.
    """

    machine: Machine
    chunks: dict[str, list[int]]
    poison: set[int]
    random: random.Random
    isolation: Isolation = field(default_factory=Isolation)
    committed: set[str] = field(default_factory=set)
    quarantine: dict[int, str] = field(default_factory=dict)
    now_s: float = 0.0
    calls: int = 0
    _kill_s: float = 0.0
    _began_s: float = 0.0
    _lived_s: float = 0.0
    _record: tuple[dict[str, list[int]], bool] | None = None

    def call(self, kill_after_s: float) -> bool:
        """One process, killed after so many seconds if it has not ended by then; whether it finished the run."""
        self.calls += 1
        self._began_s = self.now_s
        self._kill_s = self.now_s + kill_after_s
        try:
            self._wait(self.machine.start_s * self.random.uniform(0.95, 1.05))
            self._open()
            self._work()
        except KilledError:
            return False
        return True

    def _wait(self, seconds: float) -> None:
        if self.now_s + seconds > self._kill_s:
            self.now_s = self._kill_s
            raise KilledError
        self.now_s += seconds

    def _write(self, rows: dict[str, list[int]] | None, *, is_apart: bool = False) -> None:
        """What is concluded after this is durable with it: a process killed before knows nothing of it."""
        self._wait(self.machine.write_s)
        self.isolation.lived_s = self._lived_s + self.now_s - self._began_s
        self._record = None if rows is None else (rows, is_apart)

    def _open(self) -> None:
        record = self._record
        self._lived_s = self.isolation.lived_s
        self._write(None)
        if record is not None:
            rows, is_apart = record
            left = {chunk: ids for chunk, ids in rows.items() if chunk not in self.committed}
            if left or is_apart:
                self.isolation.died(left, is_apart=is_apart, reason=None)

    def _work(self) -> None:
        left = [chunk for chunk in self.chunks if chunk not in self.committed]
        turns = {chunk: self.isolation.turn(chunk) for chunk in left}
        self._ordinary([(chunk, row) for chunk in left if turns[chunk] == 0 for row in self.chunks[chunk]])
        for chunk in sorted((chunk for chunk in left if turns[chunk] > 0), key=turns.__getitem__):
            groups = self.isolation.groups(chunk)
            for group in groups:
                self._made_up()
                began_s = self.now_s
                self._write({chunk: group}, is_apart=True)
                for start in range(0, len(group), self.machine.capacity):
                    self._ask(group[start : start + self.machine.capacity])
                self._write({}, is_apart=True)
                self.isolation.passed(chunk, group)
                self.isolation.took(self.now_s - began_s)
            done = set(itertools.chain.from_iterable(groups))
            self._ordinary([(chunk, row) for row in self.chunks[chunk] if row not in done])
            self._commit(chunk)

    def _ordinary(self, rows: list[tuple[str, int]]) -> None:
        chunks = dict.fromkeys(chunk for chunk, _ in rows)
        isolated = {row for reasons in self.isolation.isolated.values() for row in reasons}
        rows = [(chunk, row) for chunk, row in rows if row not in isolated]
        for start in range(0, len(rows), self.machine.capacity):
            batch = rows[start : start + self.machine.capacity]
            under_way = dict.fromkeys(chunk for chunk, _ in batch)
            self._write({chunk: self.chunks[chunk] for chunk in under_way})
            self._ask([row for _, row in batch])
            for chunk in under_way:
                if all(later != chunk for later, _ in rows[start + self.machine.capacity :]):
                    self._commit(chunk)
        for chunk in chunks:
            self._commit(chunk)

    def _made_up(self) -> None:
        began_s = self.now_s
        self._write({}, is_apart=True)
        for number in range(1, MADE_UP + 1):
            self._wait(self.machine.answer_s)
            if number == 1:
                self.isolation.took(self.now_s - began_s)
            if self.now_s > began_s + MADE_UP_S and number >= self.isolation.num_made_up:
                return

    def _ask(self, rows: list[int]) -> None:
        if self.poison & set(rows):
            self._wait(self.random.uniform(0.0, self.machine.answer_s))
            raise KilledError
        self._wait(self.machine.answer_s)

    def _commit(self, chunk: str) -> None:
        if chunk not in self.committed:
            self.quarantine |= self.isolation.isolated.get(chunk, {})
            self.committed.add(chunk)
            self.isolation.committed(chunk)


def world(machine: Machine, rng: random.Random, *, rows: int = 200, each: int = 12, poison: int = 0) -> World:
    """A shard of so many rows in chunks, some of them poison."""
    chunks = {f"{start // each}.1": list(range(start, min(start + each, rows))) for start in range(0, rows, each)}
    return World(machine, chunks, set(rng.sample(range(rows), poison)), rng)


Schedule = Callable[[random.Random, Machine], Iterator[float]]
"""Seconds from each start of a process to the kill that ends it."""


def at_random(every_s: float) -> Schedule:
    """Kills at any time, on average so often."""

    def schedule(rng: random.Random, _: Machine) -> Iterator[float]:
        while True:
            yield rng.expovariate(1 / every_s)

    return schedule


def every(every_s: float) -> Schedule:
    """Kills at fixed times: what starts right after one lives the whole time."""

    def schedule(_: random.Random, __: Machine) -> Iterator[float]:
        while True:
            yield every_s

    return schedule


def after_the_start(spread: float) -> Schedule:
    """Each process is killed when it has just begun to ask: a timeout, or what its start sets off elsewhere. The time
    since the start spreads as much as that of some asks.
    """

    def schedule(rng: random.Random, machine: Machine) -> Iterator[float]:
        asks_s = spread * (machine.answer_s + machine.write_s)
        while True:
            yield machine.start_s + rng.uniform(0.0, 0.05 * machine.start_s + asks_s)

    return schedule


def run(world: World, schedule: Schedule, *, kills: int) -> World:
    """Processes that are killed so often, then as many as it takes."""
    for kill_after_s in itertools.islice(schedule(world.random, world.machine), kills):
        if world.call(kill_after_s):
            return world
    for _ in range(40):
        if world.call(float("inf")):
            return world
    raise AssertionError(f"not finished: {world.isolation}")
