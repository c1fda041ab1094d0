"""gc never takes what a channel or its late history points to, nor what somebody may be about to rely on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.export.publishing import (
    TAKE_OVER_S,
    Claim,
    Collected,
    GcMarks,
    change_gc_marks,
    collect,
    load_gc_marks,
    roll_back,
    set_channel,
)
from relabel.export.store import check_whole, find_version, load_channel, load_version, object_name, version_name
from relabel.manifests.errors import GateError, InputError, LockHeldError, ManifestError
from relabel.manifests.files import Storage
from relabel.manifests.store import LocalStore, Store, open_bundle_store
from tests import seaweed
from tests.faults.conftest import count
from tests.publish.conftest import publish_to

DAY_S = 86400.0
GRACE_S = 7 * DAY_S


class Clock:
    """The depot's clock, which a test turns forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        now = LocalStore.now_s
        monkeypatch.setattr(LocalStore, "now_s", lambda bundle_store: now(bundle_store) + self.ahead_s)

    def forward(self, days: float) -> None:
        self.ahead_s += days * DAY_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def gc(bundle_store: Store, *, keep: int = 10, grace_s: float = GRACE_S, deletes: bool = True) -> Collected:
    return collect(bundle_store, keep=keep, grace_s=grace_s, deletes=deletes, on_progress=lambda _: None)


def versions_of(bundle_store: Store) -> set[str]:
    return {entry.name for entry in bundle_store.entries("ecom/versions")}


def test_a_version_that_no_channel_points_to_goes_in_two_steps_and_its_own_objects_with_it(
    local_bundle_store: Store, bundle: Callable[..., Path], clock: Clock
) -> None:
    kept = publish_to(local_bundle_store, bundle("one")).version
    gone = publish_to(local_bundle_store, bundle("two"), None).version
    clock.forward(8)
    first = gc(local_bundle_store)
    own = {object_name(file.sha256) for file in gone.files} - {object_name(file.sha256) for file in kept.files}
    assert set(first.marked) == {version_name("ecom", gone.version), *own}
    assert first.deleted == []
    clock.forward(0.5)
    assert gc(local_bundle_store).deleted == []
    clock.forward(0.6)
    second = gc(local_bundle_store)
    assert set(second.deleted) == {version_name("ecom", gone.version), *own}
    assert second.deleted[0] == version_name("ecom", gone.version)
    assert find_version(local_bundle_store, "ecom", gone.version) is None
    check_whole(local_bundle_store, kept)
    assert load_gc_marks(local_bundle_store)[0] == GcMarks()
    assert gc(local_bundle_store).garbage.names == []


def test_a_dry_run_touches_nothing_and_says_what_would_be_done(
    local_bundle_store: Store, bundle: Callable[..., Path], clock: Clock
) -> None:
    publish_to(local_bundle_store, bundle("one"))
    publish_to(local_bundle_store, bundle("two"), None)
    clock.forward(8)
    before = {entry.name for entry in local_bundle_store.entries("")}
    dry = gc(local_bundle_store, deletes=False)
    assert {entry.name for entry in local_bundle_store.entries("")} == before
    assert dry.marked == gc(local_bundle_store).marked


def test_a_publisher_that_finds_marked_objects_spares_them_even_if_it_sleeps(
    local_bundle_store: Store, bundle: Callable[..., Path], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked, found everything there, and gc runs before it has written its version."""
    publish_to(local_bundle_store, bundle("one"))
    gone = publish_to(local_bundle_store, bundle("two"), None).version
    clock.forward(8)
    gc(local_bundle_store)
    clock.forward(2)
    local_bundle_store.remove(version_name("ecom", gone.version))
    real = type(local_bundle_store).create

    def late(self: Store, name: str, data: bytes) -> bool:
        if name.startswith("ecom/versions/"):
            assert gc(local_bundle_store).deleted == []
        return real(self, name, data)  # type: ignore[arg-type]

    monkeypatch.setattr(type(local_bundle_store), "create", late)
    publish_to(local_bundle_store, bundle("two"))
    check_whole(local_bundle_store, load_version(local_bundle_store, "ecom", gone.version))


def test_what_a_gc_has_claimed_can_not_be_relied_on(
    local_bundle_store: Store, bundle: Callable[..., Path], clock: Clock
) -> None:
    publish_to(local_bundle_store, bundle("one"))
    old = publish_to(local_bundle_store, bundle("two"), None).version
    names = (version_name("ecom", old.version),)
    change_gc_marks(local_bundle_store, lambda held: GcMarks({}, Claim("a gc", local_bundle_store.now_s(), names)))
    with pytest.raises(LockHeldError, match="gc is removing"):
        set_channel(local_bundle_store, "ecom", "candidate", old.version, None)
    with pytest.raises(LockHeldError, match="gc is removing"):
        publish_to(local_bundle_store, bundle("two"))
    with pytest.raises(LockHeldError, match="another gc is running"):
        gc(local_bundle_store)
    clock.forward(TAKE_OVER_S / DAY_S + 0.001)
    assert gc(local_bundle_store).deleted == list(names)
    publish_to(local_bundle_store, bundle("two"))
    check_whole(local_bundle_store, old)


def test_a_gc_killed_half_way_is_ended_by_the_next(
    local_bundle_store: Store, bundle: Callable[..., Path], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = publish_to(local_bundle_store, bundle("one")).version
    publish_to(local_bundle_store, bundle("two"), None)
    clock.forward(8)
    marked = gc(local_bundle_store).marked
    clock.forward(2)
    with monkeypatch.context() as patched:
        real, left = type(local_bundle_store).remove, [2]

        def dies(self: Store, name: str) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            real(self, name)  # type: ignore[arg-type]

        patched.setattr(type(local_bundle_store), "remove", dies)
        with pytest.raises(KeyboardInterrupt):
            gc(local_bundle_store)
    clock.forward(1)
    assert set(gc(local_bundle_store).deleted) == set(marked)
    assert {entry.name for entry in local_bundle_store.entries("objects")} == {
        object_name(file.sha256) for file in kept.files
    }


def test_an_unreadable_record_stops_gc_before_it_marks_anything(
    local_bundle_store: Store, bundle: Callable[..., Path], clock: Clock
) -> None:
    publish_to(local_bundle_store, bundle("one"))
    publish_to(local_bundle_store, bundle("two"), None)
    local_bundle_store.create("other/versions/x.json", b"{")
    clock.forward(30)
    with pytest.raises(ManifestError, match=r"other/versions/x\.json"):
        gc(local_bundle_store)
    assert load_gc_marks(local_bundle_store)[0] == GcMarks()


def test_objects_that_only_a_killed_publisher_left_go_after_the_grace_time(
    local_bundle_store: Store, bundle: Callable[..., Path], clock: Clock, tmp_path: Path
) -> None:
    done = publish_to(local_bundle_store, bundle("one"), None)
    local_bundle_store.remove(version_name("ecom", done.version.version))
    for days, left in ((6.5, 4), (1, 4), (1.5, 0)):
        clock.forward(days)
        gc(local_bundle_store)
        assert len(list(local_bundle_store.entries("objects"))) == left


@pytest.mark.s3
def test_gc_on_s3_goes_by_the_stores_clock(
    s3_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bundle: Callable[..., Path]
) -> None:
    from relabel.manifests.store import ObjectStore

    seaweed.lead_to(s3_server.environment, monkeypatch)
    bundle_store = open_bundle_store(f"s3://labels/{tmp_path.name}", Storage())
    assert isinstance(bundle_store, ObjectStore)
    kept = publish_to(bundle_store, bundle("one")).version
    gone = publish_to(bundle_store, bundle("two"), None).version
    monkeypatch.setattr("time.time", lambda: 0.0)  # this machine's clock is decades off
    assert gc(bundle_store).garbage.names == []
    now = ObjectStore.now_s
    for days in (8, 10):
        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, "now_s", lambda self, days=days: now(self) + days * DAY_S)
            gc(bundle_store)
    assert find_version(bundle_store, "ecom", gone.version) is None
    check_whole(bundle_store, kept)


def test_random_days_of_publishing_moving_and_collecting_never_break_a_channel(
    tmp_path: Path, clock: Clock, bundle: Callable[..., Path]
) -> None:
    """After every step each channel points to a whole version, and so do its moves within the window."""
    import random

    for seed in range(count(full=4, short=1)):
        turn = random.Random(seed)
        bundle_store = open_bundle_store(str(tmp_path / f"store-{seed}"), Storage())
        texts = [f"text-{number}" for number in range(5)]
        for _ in range(60):
            step = turn.choice(["publish", "publish", "set", "rollback", "gc", "wait"])
            channel = turn.choice(["stable", "candidate"])
            held = [entry.name.split("/")[-1].removesuffix(".json") for entry in bundle_store.entries("ecom/versions")]
            if step == "publish":
                publish_to(bundle_store, bundle(turn.choice(texts)), turn.choice([None, channel]))
            elif step == "set" and held:
                set_channel(bundle_store, "ecom", channel, turn.choice(held), None)
            elif step == "rollback":
                with contextlib.suppress(GateError, InputError):  # no channel yet, or nothing before
                    roll_back(bundle_store, "ecom", channel, None)
            elif step == "gc":
                gc(bundle_store, keep=2, grace_s=turn.choice([0.0, 1.0, 3.0]) * DAY_S)
            else:
                clock.forward(turn.uniform(0, 3))
            for name in ("stable", "candidate"):
                for move in moves_of(bundle_store, name)[-2:]:
                    check_whole(bundle_store, load_version(bundle_store, "ecom", move.version))


def moves_of(bundle_store: Store, channel: str) -> tuple[Any, ...]:
    try:
        return load_channel(bundle_store, "ecom", channel).moves
    except InputError:
        return ()
