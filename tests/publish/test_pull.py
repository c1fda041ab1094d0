"""The active version is whole and proven, whatever comes from the store; a refusal leaves it as it was."""

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from relabel.export import publishing
from relabel.export.bundles import open_bundle, seal_bundle
from relabel.export.publishing import Channel, object_name, roll_back, set_channel
from relabel.export.puller import ServingFolder
from relabel.manifests.errors import (
    GateError,
    InputError,
    LockHeldError,
    ManifestError,
)
from relabel.manifests.files import Storage
from relabel.manifests.store import Store, open_bundle_store
from tests.faults.conftest import count
from tests.publish.conftest import publish_to, pull_from, roll_back_in, served_text, write_bundle


def test_a_pulled_bundle_serves_and_equals_the_one_published(
    bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    publish_to(bundle_store, bundle("one"))
    done = pull_from(bundle_store, tmp_path / "dest")
    assert (done.has_switched, served_text(tmp_path / "dest")) == (True, "one")
    for path in bundle("one").rglob("*"):
        if path.is_file():
            assert (tmp_path / "dest" / "current" / path.relative_to(bundle("one"))).read_bytes() == path.read_bytes()


def test_a_file_that_a_bundle_holds_twice_takes_its_space_once(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    folder = bundle("one")
    facts = open_bundle(folder).own_facts
    shutil.copy(folder / "model.onnx", folder / "twin.onnx")
    seal_bundle(folder, facts)
    publish_to(local_bundle_store, folder)
    pull_from(local_bundle_store, tmp_path / "dest")
    assert (tmp_path / "dest/current/model.onnx").samefile(tmp_path / "dest/current/twin.onnx")


def test_a_file_of_a_kept_version_that_was_damaged_is_not_taken_over(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    publish_to(local_bundle_store, bundle("one"))
    pull_from(local_bundle_store, tmp_path / "dest")
    (tmp_path / "dest" / "current" / "README.md").write_text("# A MODEL CARD\n")
    publish_to(local_bundle_store, bundle("two"))
    pull_from(local_bundle_store, tmp_path / "dest")
    assert served_text(tmp_path / "dest") == "two"


def test_an_old_pointer_put_back_is_a_downgrade_and_a_rollback_is_none(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    publish_to(local_bundle_store, bundle("one"))
    old = local_bundle_store.read_tagged(Channel.path_of("ecom", "stable")).data
    publish_to(local_bundle_store, bundle("two"))
    pull_from(local_bundle_store, tmp_path / "dest")
    Path(local_bundle_store.url, Channel.path_of("ecom", "stable")).write_bytes(old)
    with pytest.raises(GateError, match="downgraded: a newer sequence than 1"):
        pull_from(local_bundle_store, tmp_path / "dest")
    assert served_text(tmp_path / "dest") == "two"
    publish_to(local_bundle_store, bundle("two"))
    roll_back(local_bundle_store, "ecom", "stable", None)
    pull_from(local_bundle_store, tmp_path / "dest")
    assert served_text(tmp_path / "dest") == "one"


def test_a_newer_sequence_is_remembered_even_where_its_version_was_refused(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    publish_to(local_bundle_store, bundle("one"))
    old = local_bundle_store.read_tagged(Channel.path_of("ecom", "stable")).data
    version = publish_to(local_bundle_store, bundle("two")).version
    local_bundle_store.remove(object_name(version.files[0].sha256))
    with pytest.raises(ManifestError):
        pull_from(local_bundle_store, tmp_path / "dest")
    Path(local_bundle_store.url, Channel.path_of("ecom", "stable")).write_bytes(old)
    with pytest.raises(GateError, match="downgraded"):
        pull_from(local_bundle_store, tmp_path / "dest")


def test_a_rollback_during_a_pull_neither_waits_for_it_nor_is_undone_by_it(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("one", "two"):
        publish_to(local_bundle_store, bundle(text))
        pull_from(local_bundle_store, tmp_path / "dest")
    publish_to(local_bundle_store, bundle("three"))
    real, begun, go_on = type(local_bundle_store).blocks, threading.Event(), threading.Event()

    def slow(self: Store, name: str, start: int) -> Iterator[bytes]:
        if name.startswith("objects/"):
            begun.set()
            assert go_on.wait(20)
        yield from real(self, name, start)

    monkeypatch.setattr(type(local_bundle_store), "blocks", slow)
    outcome: list[Any] = []
    puller = threading.Thread(target=lambda: outcome.append(pull_from(local_bundle_store, tmp_path / "dest")))
    puller.start()
    assert begun.wait(20)
    started = time.monotonic()
    roll_back_in(tmp_path / "dest")
    assert time.monotonic() - started < 5
    assert served_text(tmp_path / "dest") == "one"
    with pytest.raises(LockHeldError):
        pull_from(local_bundle_store, tmp_path / "dest")
    go_on.set()
    puller.join()
    assert outcome[0].is_held
    assert served_text(tmp_path / "dest") == "one"


def test_anyone_who_opens_the_link_finds_a_whole_bundle_at_every_instant(
    local_bundle_store: Store, tmp_path: Path
) -> None:
    folders = [write_bundle(tmp_path / f"b{number}", str(number)) for number in range(2)]
    publish_to(local_bundle_store, folders[0])
    pull_from(local_bundle_store, tmp_path / "dest")
    reads, stop, wrong = [0], threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            try:
                folder = os.open(tmp_path / "dest" / "current", os.O_RDONLY)
                manifest, weights = (
                    os.open(name, os.O_RDONLY, dir_fd=folder) for name in ("manifest.json", "model.onnx")
                )
                student = json.loads(os.read(manifest, 10_000))["lineage"]["student"]
                if not os.read(weights, 10).decode().startswith(student):
                    wrong.append("files of two versions")
                for descriptor in (folder, manifest, weights):
                    os.close(descriptor)
                reads[0] += 1
            except OSError as exc:
                wrong.append(repr(exc))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(20):
        publish_to(local_bundle_store, folders[(number + 1) % 2])
        pull_from(local_bundle_store, tmp_path / "dest")
    stop.set()
    reader.join()
    assert wrong == []
    assert reads[0] > 100


# `pull --rollback` never goes to a version that a channel left by a rollback, whatever went before, unless it is
# named. A state machine publishes, moves channels, pulls and rolls back; a model in memory says which versions are
# bad, what is kept, the active version.


TEXTS = ("one", "two", "three", "four", "five")
CHANNELS = ("stable", "candidate")
KEEP = 3


texts = st.sampled_from(TEXTS)
names = st.sampled_from((*CHANNELS[:1] * 3, CHANNELS[1]))


class GoingBack(RuleBasedStateMachine):
    """One store, two channels, one destination."""

    folders: dict[str, Path]

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="relabel-back-"))
        self.bundle_store = open_bundle_store(str(self.root / "store"), Storage())
        self.dest = self.root / "dest"
        self.versions = {
            text: publish_to(self.bundle_store, folder, None).version.at for text, folder in self.folders.items()
        }
        # of the store: where each channel points, its moves counted, and what it left by a rollback
        self.head: dict[str, str] = {}
        self.moves: dict[str, int] = dict.fromkeys(CHANNELS, 0)
        self.bad: dict[str, set[str]] = {name: set() for name in CHANNELS}
        # of the destination: what it saw of that, what it keeps (the first serves), and up to which move it is held
        self.seen_bad: dict[str, set[str]] = {}
        self.seen_moves: dict[str, int] = {}
        self.kept: list[str] = []
        self.left_here: set[str] = set()
        self.held: dict[str, int] = dict.fromkeys(CHANNELS, 0)

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def arrived(self, name: str, text: str) -> None:
        self.head[name] = text
        self.moves[name] += 1
        self.bad[name].discard(text)

    @rule(name=names, text=texts)
    def publish(self, name: str, text: str) -> None:
        if publish_to(self.bundle_store, self.folders[text], name).has_changed:
            self.arrived(name, text)

    @rule(name=names, text=texts)
    def move(self, name: str, text: str) -> None:
        if set_channel(self.bundle_store, "ecom", name, self.versions[text], None).has_moved:
            self.arrived(name, text)

    @rule(name=names)
    def roll_channel_back(self, name: str) -> None:
        try:
            moved = roll_back(self.bundle_store, "ecom", name, None)
        except (GateError, InputError):
            return
        left = self.head[name]
        self.arrived(
            name, next(text for text, version in self.versions.items() if version == moved.channel.head["version"])
        )
        self.bad[name].add(left)

    @rule(name=names)
    def pull(self, name: str) -> None:
        if name not in self.head:
            return
        pull_from(self.bundle_store, self.dest, name, keep=KEEP)
        self.seen_bad[name], self.seen_moves[name] = set(self.bad[name]), self.moves[name]
        if self.kept and self.moves[name] <= self.held[name]:
            return
        if not self.kept or self.kept[0] != self.head[name]:
            self.held[name] = 0
        self.kept = [self.head[name], *(text for text in self.kept if text != self.head[name])][:KEEP]
        self.left_here &= set(self.kept[1:])
        assert {path.name for path in (self.dest / ".versions").iterdir()} == {self.versions[one] for one in self.kept}

    def went_back(self, place: int) -> None:
        if self.kept[place] in self.left_here:
            self.kept.insert(0, self.kept.pop(place))
        else:
            self.left_here |= set(self.kept[:place])
            self.kept = self.kept[place:] + self.kept[:place]
        self.left_here.discard(self.kept[0])
        self.held |= self.seen_moves

    @precondition(lambda self: self.kept)
    @rule()
    def go_back(self) -> None:
        seen_bad = self.left_here.union(*self.seen_bad.values())
        place = next((place for place, text in enumerate(self.kept) if place and text not in seen_bad), None)
        if place is None:
            with pytest.raises(ManifestError, match="keeps no version to go back to") as refused:
                roll_back_in(self.dest)
            assert all(self.versions[text] in str(refused.value) for text in self.kept[1:])
            assert ("Only the active one is." in str(refused.value)) == (len(self.kept) == 1)
            return
        roll_back_in(self.dest)
        self.went_back(place)
        assert served_text(self.dest) not in seen_bad

    @precondition(lambda self: self.kept)
    @rule(text=texts)
    def go_back_to(self, text: str) -> None:
        if text not in self.kept:
            with pytest.raises(ManifestError, match="is not kept") as refused:
                roll_back_in(self.dest, self.versions[text])
            assert all(self.versions[one] in str(refused.value) for one in self.kept[1:])
            return
        roll_back_in(self.dest, self.versions[text])
        self.went_back(self.kept.index(text))

    @invariant()
    def what_serves_is_what_the_model_says(self) -> None:
        if self.kept:
            assert served_text(self.dest) == self.kept[0]
            state = ServingFolder(self.dest).state()
            assert [one.version for one in state.served] == [self.versions[text] for text in self.kept]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return {text: write_bundle(folder / text, text) for text in TEXTS}


def test_no_rollback_goes_to_what_a_channel_left_by_a_rollback(bundles: dict[str, Path]) -> None:
    machine = type("Machine", (GoingBack,), {"folders": bundles})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=count(full=100, short=6),
            stateful_step_count=count(full=40, short=25),
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def left_three(bundles: dict[str, Path], tmp_path: Path) -> tuple[Store, Path, str]:
    """A store and a destination that pulled one, two and three and was rolled back to two; and the version left."""
    bundle_store, dest = open_bundle_store(str(tmp_path / "store"), Storage()), tmp_path / "dest"
    version = ""
    for text in ("one", "two", "three"):
        version = publish_to(bundle_store, bundles[text]).version.at
        pull_from(bundle_store, dest, keep=KEEP)
    roll_back_in(dest)
    return bundle_store, dest, version


def test_what_was_left_here_stays_and_is_one_step_away_without_the_store(
    left_three: tuple[Store, Path, str], tmp_path: Path
) -> None:
    bundle_store, dest, version = left_three
    assert served_text(dest) == "two"
    held = pull_from(bundle_store, dest, keep=KEEP)
    assert (held.is_held, served_text(dest)) == (True, "two")
    assert pull_from(bundle_store, dest, keep=KEEP, lifts_hold=True).fetched_bytes == 0
    assert served_text(dest) == "three"

    roll_back_in(dest)
    shutil.rmtree(tmp_path / "store")
    roll_back_in(dest, version)
    assert served_text(dest) == "three"
    for text in ("two", "one"):
        roll_back_in(dest)
        assert served_text(dest) == text
    with pytest.raises(ManifestError, match=rf"{version} \(this machine left it by a rollback\)"):
        roll_back_in(dest)


def test_a_rollback_taken_back_and_stopped_before_it_is_noted_forgets_no_version(
    left_three: tuple[Store, Path, str],
) -> None:
    _, dest, version = left_three
    note = (dest / ".pull.json").read_bytes()
    roll_back_in(dest, version)
    (dest / ".pull.json").write_bytes(note)
    assert served_text(dest) == "three"
    for text in ("two", "one"):
        roll_back_in(dest)
        assert served_text(dest) == text


def test_what_was_left_here_gives_way_before_what_is_older(
    bundles: dict[str, Path], left_three: tuple[Store, Path, str]
) -> None:
    bundle_store, dest, _ = left_three
    publish_to(bundle_store, bundles["four"])
    pull_from(bundle_store, dest, keep=KEEP)
    for text in ("two", "one"):
        roll_back_in(dest)
        assert served_text(dest) == text


def test_what_a_pointer_forgot_the_destination_remembers(
    bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "HISTORY_KEPT", 2)
    bundle_store, dest = open_bundle_store(str(tmp_path / "store"), Storage()), tmp_path / "dest"
    bad = ""
    for step in ("one", "two", "back", "three", "four"):
        if step == "back":
            bad = Channel.load(bundle_store, "ecom", "stable").head["version"]
            roll_back(bundle_store, "ecom", "stable", None)
        else:
            publish_to(bundle_store, bundles[step])
        pull_from(bundle_store, dest, keep=9)
    assert len(Channel.load(bundle_store, "ecom", "stable").moves) == 2
    for text in ("three", "one"):
        roll_back_in(dest)
        assert served_text(dest) == text
    with pytest.raises(ManifestError, match=rf"{bad} \(stable left it by a rollback\)"):
        roll_back_in(dest)
