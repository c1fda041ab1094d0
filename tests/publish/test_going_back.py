"""`pull --rollback` never goes to a version that a channel left by a rollback, whatever went before, unless it is
named.

A state machine publishes, moves channels, pulls and rolls back; a model in memory says which versions are bad, what is
kept, the active version.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from relabel.export import store
from relabel.export.publishing import roll_back, set_channel
from relabel.export.puller import ServingFolder
from relabel.manifests.errors import GateError, InputError, ManifestError
from relabel.manifests.files import Storage
from relabel.manifests.store import open_bundle_store
from tests.faults.conftest import count
from tests.publish.conftest import publish_to, pull_from, roll_back_in, served_text, write_bundle

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
            text: publish_to(self.bundle_store, folder, None).version.version for text, folder in self.folders.items()
        }
        # of the store: where each channel points, its moves counted, and what it left by a rollback
        self.head: dict[str, str] = {}
        self.moves: dict[str, int] = dict.fromkeys(CHANNELS, 0)
        self.bad: dict[str, set[str]] = {name: set() for name in CHANNELS}
        # of the destination: what it saw of that, what it keeps (the first serves), and up to which move it is held
        self.seen_bad: dict[str, set[str]] = {}
        self.seen_moves: dict[str, int] = {}
        self.kept: list[str] = []
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
        if set_channel(self.bundle_store, "ecom", name, self.versions[text], None)[1]:
            self.arrived(name, text)

    @rule(name=names)
    def roll_channel_back(self, name: str) -> None:
        try:
            moved = roll_back(self.bundle_store, "ecom", name, None)
        except (GateError, InputError):
            return
        left = self.head[name]
        self.arrived(name, next(text for text, version in self.versions.items() if version == moved.head.version))
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
        assert {path.name for path in (self.dest / ".versions").iterdir()} == {self.versions[one] for one in self.kept}

    def went_back(self, place: int) -> None:
        self.kept = self.kept[place:]
        self.held |= self.seen_moves

    @precondition(lambda self: self.kept)
    @rule()
    def go_back(self) -> None:
        seen_bad = set().union(*self.seen_bad.values())
        place = next((place for place, text in enumerate(self.kept) if place and text not in seen_bad), None)
        if place is None:
            with pytest.raises(ManifestError, match="keeps no version to go back to") as refused:
                roll_back_in(self.dest)
            assert all(self.versions[text] in str(refused.value) for text in self.kept)
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
            assert all(self.versions[one] in str(refused.value) for one in self.kept)
            return
        roll_back_in(self.dest, self.versions[text])
        self.went_back(self.kept.index(text))

    @invariant()
    def what_serves_is_what_the_model_says(self) -> None:
        if self.kept:
            assert served_text(self.dest) == self.kept[0]
            state = ServingFolder(self.dest).state()
            assert state is not None
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


def test_what_a_pointer_forgot_the_destination_remembers(
    bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "HISTORY_KEPT", 2)
    bundle_store, dest = open_bundle_store(str(tmp_path / "store"), Storage()), tmp_path / "dest"
    bad = ""
    for step in ("one", "two", "back", "three", "four"):
        if step == "back":
            bad = store.load_channel(bundle_store, "ecom", "stable").head.version
            roll_back(bundle_store, "ecom", "stable", None)
        else:
            publish_to(bundle_store, bundles[step])
        pull_from(bundle_store, dest, keep=9)
    assert len(store.load_channel(bundle_store, "ecom", "stable").moves) == 2
    for text in ("three", "one"):
        roll_back_in(dest)
        assert served_text(dest) == text
    with pytest.raises(ManifestError, match=rf"{bad} \(stable left it by a rollback\)"):
        roll_back_in(dest)
