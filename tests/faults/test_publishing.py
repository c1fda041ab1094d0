"""Publish, pull and rollback, killed, raced and failed anywhere: each channel points to whole versions, the active
version is whole, no move is lost or doubled, and the same commands end the work.

Each command is a fork of a warm parent (`forks.py`) over a store of its own, on a local disk and on S3.
"""

import itertools
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from relabel.export.bundles import open_bundle
from relabel.export.publishing import Channel, Version, check_whole, object_name
from relabel.manifests.errors import RelabelError
from relabel.manifests.failpoints import PUBLISH_FAILPOINTS, PULL_FAILPOINTS
from relabel.manifests.files import Storage
from relabel.manifests.store import Held, Store, open_bundle_store
from tests import seaweed
from tests.faults import forks
from tests.faults.conftest import IS_FULL, Sweep, count, instants, some
from tests.publish.conftest import served_text, write_bundle

TEXTS = ("one", "two", "three", "four")
SIZE = 3 << 20
WRITE_FAILPOINTS = ("before_temp_sync", "before_temp_rename")
CALLS_TO_FINISH = 10


@dataclass(frozen=True)
class Shelf:
    """A store with bundles to publish, and a folder to pull to.

    Args:
        root: local; holds DEST, and the store where it is local.
        url: of the store.
    """

    root: Path
    url: str
    bundles: Mapping[str, Path]
    variables: Mapping[str, str]

    @property
    def dest(self) -> Path:
        return self.root / "dest"

    def words(self, line: str) -> list[str]:
        """`publish two`, `pull`, `rollback`, `restore` (roll back in DEST) as the command's words."""
        verb, _, text = line.partition(" ")
        return {
            "publish": lambda: ["publish", str(self.bundles[text]), self.url, "--channel", "stable"],
            "pull": lambda: ["pull", f"{self.url}/ecom@stable", str(self.dest)],
            "rollback": lambda: ["rollback", f"{self.url}/ecom", "stable"],
            "restore": lambda: ["pull", "--rollback", str(self.dest)],
        }[verb]()

    def start(
        self, *lines: str, setup: forks.Setup | None = None, variables: Mapping[str, str] | None = None
    ) -> forks.Child:
        return forks.start(*map(self.words, lines), variables={**self.variables, **(variables or {})}, setup=setup)

    def call(
        self, *lines: str, setup: forks.Setup | None = None, variables: Mapping[str, str] | None = None
    ) -> forks.Ended:
        return self.start(*lines, setup=setup, variables=variables).wait()

    def served(self) -> str | None:
        """The active version; every digest of it is checked."""
        return served_text(self.dest) if (self.dest / "current").exists() else None

    def fault(self) -> str | None:
        """What is not as it must be, whatever happened so far."""
        bundle_store = open_bundle_store(self.url, Storage())
        try:
            self.served()
            channel = Channel.find(bundle_store, "ecom", "stable")
            return fault_of(bundle_store, channel) if channel else None
        except RelabelError as exc:
            return str(exc)

    def finish(self, text: str, moves: int | None = None) -> str | None:
        """Publish and pull again to the end; what is wrong with the outcome, or None."""
        for _ in range(CALLS_TO_FINISH):  # a store may have been left without an answer; as cron does, we call again
            ended = self.call(f"publish {text}", "pull")
            if 20 not in ended.codes:
                break
        if len(ended.codes) != 2 or not set(ended.codes) <= {0, 10}:
            return f"the second time did not end well: {ended}"
        channel = Channel.find(open_bundle_store(self.url, Storage()), "ecom", "stable")
        if channel.head["version"] != open_bundle(self.bundles[text]).version or self.served() != text:
            return f"the channel points to {channel.head['version']}, {self.served()} serves, and it should be {text}"
        if left := {path.name for path in self.dest.iterdir()} - {"current", ".versions", ".locks", ".pull.json"}:
            return f"killed pulls left {left}"
        if moves is not None and channel.head["sequence"] != moves:
            return f"{channel.head['sequence']} moves, and there were {moves}"
        return self.fault()


def fault_of(bundle_store: Store, channel: Channel) -> str | None:
    """Every version that a channel ever pointed to is whole, byte for byte; its moves are counted without a gap
    (`Channel.find`).
    """
    if channel.moves[0]["sequence"] != 1:
        return f"its history begins with move {channel.moves[0]['sequence']}"
    for name in {move["version"] for move in channel.moves}:
        version = Version.load(bundle_store, "ecom", name)
        check_whole(bundle_store, version)
        for file in version.distinct_files:
            wanted = Held(file.size_bytes, file.sha256)
            if not bundle_store.holds(object_name(file.sha256), wanted, lambda _: None, rereads=True):
                return f"{name}: the store holds other bytes of {file.path}"
    return None


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return {text: write_bundle(folder / text, text, size=SIZE) for text in TEXTS}


NewShelf = Callable[[], Shelf]


@pytest.fixture
def new_shelf(where: str, tmp_path: Path, bundles: dict[str, Path], request: pytest.FixtureRequest) -> NewShelf:
    """`new_shelf()`: an empty one, its store of the kind that `where` says."""
    variables: Mapping[str, str] = request.getfixturevalue("s3_variables") if where == "s3" else {}
    numbers = itertools.count()

    def make() -> Shelf:
        root = tmp_path / f"shelf-{next(numbers)}"
        root.mkdir()
        url = f"s3://{seaweed.BUCKET}/{tmp_path.name}-{root.name}" if where == "s3" else str(root / "store")
        return Shelf(root, url, bundles, variables)

    return make


def armed(place: str) -> forks.Setup:
    return forks.Setup("tests.faults.children", "arm", (place,))


STEPS = {
    "publish two": (PUBLISH_FAILPOINTS, 0, ["publish one", "pull"]),
    "pull": (PULL_FAILPOINTS, 40, ["publish one", "pull", "publish two"]),
    "rollback": (("before_channel", "after_channel"), 0, ["publish one", "publish two", "pull"]),
    "restore": ((), 5, ["publish one", "pull", "publish two", "pull"]),
}
"""What is killed where (failpoints, and before how many of its changes of the disk), and what went before; publish and
pull also with nothing before.
"""


def test_killed_at_every_failpoint_channels_point_to_whole_versions_and_the_same_command_ends_the_work(
    new_shelf: NewShelf, where: str, sweep: Sweep
) -> None:
    temps = WRITE_FAILPOINTS if where == "local" else ()
    schedules = [
        (line, f"{name}:{hit}", is_first)
        for hit in ((1, 2, 3) if IS_FULL else (1,))
        for line, (names, _, _) in STEPS.items()
        for name in (*names, *(temps if line in ("publish two", "rollback") else ()))
        for is_first in ([False, True] if line == "publish two" else [False])
    ]
    schedules += [
        (line, f"change:{number}", is_first)
        for line, (_, changes, _) in STEPS.items()
        for is_first in ([False, True] if line == "pull" else [False])
        for number in range(1, changes + 1, 1 if IS_FULL else 13)
    ]

    def attempt(schedule: tuple[str, str, bool]) -> str | None:
        line, place, is_first = schedule
        shelf = new_shelf()
        before = {"publish two": [], "pull": ["publish two"]}[line] if is_first else STEPS[line][2]
        if before and set(shelf.call(*before).codes) != {0}:
            return "what went before failed"
        killed = shelf.call(line, setup=armed(place))
        must_die = place.startswith("change:") or (place.endswith(":1") and not place.startswith(WRITE_FAILPOINTS))
        if killed.code != -signal.SIGKILL and must_die:
            return f"not killed: {killed}"
        if wrong := shelf.fault():
            return wrong
        if is_first:
            return shelf.finish("two", moves=1)
        if line == "restore":  # a pull leaves a folder that was rolled back as it is
            again = shelf.call("restore").codes if shelf.served() == "two" else [0]
            return (
                shelf.fault()
                if (again, shelf.served()) == ([0], "one")
                else f"{shelf.served()} serves, restored once more: {again}"
            )
        return shelf.finish("two", moves=None if line == "rollback" else 2)

    sweep(some(schedules, short=12 if where == "local" else 2), attempt, share=0.05)


def test_publishers_that_race_for_one_channel_lose_and_double_no_move_though_some_are_killed(
    new_shelf: NewShelf, where: str, sweep: Sweep
) -> None:
    """Three publishers and two pullers at once; one publisher is killed on its way."""

    def attempt(instant: float) -> str | None:
        shelf = new_shelf()
        if shelf.call("publish one", "pull").codes != [0, 0]:
            return "what went before failed"
        racers = [shelf.start(f"publish {text}") for text in TEXTS[1:]]
        pullers = [shelf.start("pull"), shelf.start("pull")]
        time.sleep(instant * 0.5)
        racers[0].send(signal.SIGKILL)
        ends, pulls = [racer.wait() for racer in racers], [puller.wait() for puller in pullers]
        if any(end.code not in (0, 10, 20, -signal.SIGKILL) for end in ends):
            # 20: somebody else was first, and it says so
            return f"a publisher ended otherwise: {list(map(str, ends))}"
        if any(pull.code not in (0, 10, 20, 75) for pull in pulls):
            return f"a pull ended otherwise: {list(map(str, pulls))}"
        if wrong := shelf.fault():
            return wrong
        channel = Channel.find(open_bundle_store(shelf.url, Storage()), "ecom", "stable")
        won = sum(end.code == 0 for end in ends)
        lost_in_the_act = sum(end.code == -signal.SIGKILL for end in ends)
        if not 1 + won <= channel.head["sequence"] <= 1 + won + lost_in_the_act:
            return f"{channel.head['sequence']} moves, {won} publishers got the answer that they moved it"
        return shelf.finish("four")

    sweep(instants(count(full=40, short=1), seed=22), attempt, share=0.06)


HOWS = ("error before", "error after", "full before", "kill before", "kill after")


@pytest.mark.parametrize("line", ["publish two", "pull"])
def test_every_call_about_the_disk_may_fail_or_be_the_last(
    line: str, tmp_path: Path, bundles: dict[str, Path], sweep: Sweep
) -> None:
    numbers = itertools.count()

    def failing(nth: int, how: str) -> tuple[Shelf, forks.Ended, str]:
        root = tmp_path / f"disk-{next(numbers)}"
        root.mkdir()
        shelf, log = Shelf(root, str(root / "store"), bundles, {}), root.with_suffix(".log")
        before = shelf.call(*STEPS[line][2])
        assert set(before.codes) == {0}, before
        ended = shelf.call(
            line, setup=forks.Setup("tests.faults.children", "fail_file_call", (str(root), nth, how, str(log)))
        )
        return shelf, ended, log.read_text() if log.exists() else "no call"

    _, ended, said = failing(10**9, "error before")
    assert ended.codes == [0], ended
    num_calls = int(said.removeprefix("calls "))
    assert num_calls > 30

    def attempt(schedule: tuple[int, str]) -> str | None:
        shelf, ended, said = failing(*schedule)
        was_killed = schedule[1].startswith("kill") and ended.code == -signal.SIGKILL
        if not was_killed and ended.codes[:1] not in ([0], [3], [20]):
            return f"({said}) {ended}"
        wrong = shelf.fault() or shelf.finish("two", moves=2)
        return None if wrong is None else f"({said}) {wrong}"

    every = list(itertools.product(range(1, num_calls + 1), HOWS))
    sweep(random.Random(23).sample(every, min(len(every), count(full=200, short=3))), attempt, share=0.06)
