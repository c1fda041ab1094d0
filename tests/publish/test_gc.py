"""gc never takes what a channel or its late history points to, nor what somebody may be about to rely on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from export.channels import load_channel
from export.gc import TAKE_OVER_S, Collected, collect
from export.gc_marks import Claim, Condemned, change_condemned, load_condemned
from export.publishing import roll_back, set_channel
from export.versions import check_whole, find_version, load_version, object_name, version_name
from manifests.errors import GateError, InputError, LockHeldError, ManifestError
from manifests.storage.depot_ports import Depot
from manifests.storage.depots import open_depot
from manifests.storage.local_depot import LocalDepot
from tests.publish.conftest import lead_to, publish_to, pull_from, served_text

DAY_S = 86400.0
GRACE_S = 7 * DAY_S


class Clock:
    """The depot's clock, which a test turns forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        now = LocalDepot.now_s
        monkeypatch.setattr(LocalDepot, "now_s", lambda depot: now(depot) + self.ahead_s)

    def forward(self, days: float) -> None:
        self.ahead_s += days * DAY_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def gc(depot: Depot, *, keep: int = 10, grace_s: float = GRACE_S, deletes: bool = True) -> Collected:
    return collect(depot, keep=keep, grace_s=grace_s, deletes=deletes, tick=lambda _: None)


def versions_of(depot: Depot) -> set[str]:
    return {entry.name for entry in depot.entries("ecom/versions")}


def test_nothing_young_is_garbage_whatever_points_to_it(local_depot: Depot, bundle: Callable[..., Path]) -> None:
    publish_to(local_depot, bundle("one"), None)
    found = gc(local_depot)
    assert (found.garbage.names, found.condemned, found.deleted) == ([], [], [])


def test_a_version_that_no_channel_points_to_goes_in_two_steps_and_its_own_objects_with_it(
    local_depot: Depot, bundle: Callable[..., Path], clock: Clock
) -> None:
    kept = publish_to(local_depot, bundle("one")).version
    gone = publish_to(local_depot, bundle("two"), None).version
    clock.forward(8)
    first = gc(local_depot)
    own = {object_name(file.sha256) for file in gone.files} - {object_name(file.sha256) for file in kept.files}
    assert set(first.condemned) == {version_name("ecom", gone.version), *own}
    assert first.deleted == []
    clock.forward(0.5)
    assert gc(local_depot).deleted == []
    clock.forward(0.6)
    second = gc(local_depot)
    assert set(second.deleted) == {version_name("ecom", gone.version), *own}
    assert second.deleted[0] == version_name("ecom", gone.version)
    assert find_version(local_depot, "ecom", gone.version) is None
    check_whole(local_depot, kept)
    assert load_condemned(local_depot)[0] == Condemned()
    assert gc(local_depot).garbage.names == []


def test_a_dry_run_touches_nothing_and_says_what_would_be_done(local_depot: Depot, bundle: Callable[..., Path], clock: Clock) -> None:
    publish_to(local_depot, bundle("one"))
    publish_to(local_depot, bundle("two"), None)
    clock.forward(8)
    before = {entry.name for entry in local_depot.entries("")}
    dry = gc(local_depot, deletes=False)
    assert {entry.name for entry in local_depot.entries("")} == before
    assert dry.condemned == gc(local_depot).condemned
    clock.forward(2)
    before = {entry.name for entry in local_depot.entries("")}
    dry = gc(local_depot, deletes=False)
    assert {entry.name for entry in local_depot.entries("")} == before
    assert dry.deleted == gc(local_depot).deleted


def test_what_the_last_moves_of_a_channel_point_to_stays_and_can_be_rolled_back_to(
    local_depot: Depot, bundle: Callable[..., Path], clock: Clock
) -> None:
    published = [publish_to(local_depot, bundle(text)).version for text in ("one", "two", "three", "four")]
    clock.forward(30)
    gc(local_depot, keep=2)
    clock.forward(30)
    gc(local_depot, keep=2)
    assert versions_of(local_depot) == {version_name("ecom", version.version) for version in published[-2:]}
    roll_back(local_depot, "ecom", "stable", None)
    check_whole(local_depot, published[2])
    with pytest.raises(InputError, match="no version"):
        roll_back(local_depot, "ecom", "stable", None)
    assert load_channel(local_depot, "ecom", "stable").head.version == published[2].version


def test_a_channel_set_to_a_condemned_version_spares_it(
    local_depot: Depot, bundle: Callable[..., Path], clock: Clock, tmp_path: Path
) -> None:
    publish_to(local_depot, bundle("one"))
    old = publish_to(local_depot, bundle("two"), None).version
    clock.forward(8)
    assert gc(local_depot).condemned
    clock.forward(2)
    set_channel(local_depot, "ecom", "stable", old.version, None)
    assert gc(local_depot).deleted == []
    pull_from(local_depot, tmp_path / "dest")
    assert served_text(tmp_path / "dest") == "two"


def test_a_publisher_that_finds_condemned_objects_spares_them_even_if_it_sleeps(
    local_depot: Depot, bundle: Callable[..., Path], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked, found everything there, and gc runs before it has written its version."""
    publish_to(local_depot, bundle("one"))
    gone = publish_to(local_depot, bundle("two"), None).version
    clock.forward(8)
    gc(local_depot)
    clock.forward(2)
    local_depot.delete(version_name("ecom", gone.version))
    real = type(local_depot).create

    def late(self: Depot, name: str, data: bytes) -> bool:
        if name.startswith("ecom/versions/"):
            assert gc(local_depot).deleted == []
        return real(self, name, data)  # type: ignore[arg-type]

    monkeypatch.setattr(type(local_depot), "create", late)
    publish_to(local_depot, bundle("two"))
    check_whole(local_depot, load_version(local_depot, "ecom", gone.version))


def test_what_a_gc_has_claimed_can_not_be_relied_on(local_depot: Depot, bundle: Callable[..., Path], clock: Clock) -> None:
    publish_to(local_depot, bundle("one"))
    old = publish_to(local_depot, bundle("two"), None).version
    names = (version_name("ecom", old.version),)
    change_condemned(local_depot, lambda held: Condemned({}, Claim("a gc", local_depot.now_s(), names)))
    with pytest.raises(LockHeldError, match="gc is removing"):
        set_channel(local_depot, "ecom", "candidate", old.version, None)
    with pytest.raises(LockHeldError, match="gc is removing"):
        publish_to(local_depot, bundle("two"))
    with pytest.raises(LockHeldError, match="another gc is at work"):
        gc(local_depot)
    clock.forward(TAKE_OVER_S / DAY_S + 0.001)
    assert gc(local_depot).deleted == list(names)
    publish_to(local_depot, bundle("two"))
    check_whole(local_depot, old)


def test_a_gc_killed_half_way_is_ended_by_the_next(
    local_depot: Depot, bundle: Callable[..., Path], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = publish_to(local_depot, bundle("one")).version
    publish_to(local_depot, bundle("two"), None)
    clock.forward(8)
    condemned = gc(local_depot).condemned
    clock.forward(2)
    with monkeypatch.context() as patched:
        real, left = type(local_depot).delete, [2]

        def dies(self: Depot, name: str) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            real(self, name)  # type: ignore[arg-type]

        patched.setattr(type(local_depot), "delete", dies)
        with pytest.raises(KeyboardInterrupt):
            gc(local_depot)
    clock.forward(1)
    assert set(gc(local_depot).deleted) == set(condemned)
    assert {entry.name for entry in local_depot.entries("objects")} == {object_name(file.sha256) for file in kept.files}


def test_an_unreadable_record_stops_gc_before_it_condemns_anything(local_depot: Depot, bundle: Callable[..., Path], clock: Clock) -> None:
    publish_to(local_depot, bundle("one"))
    publish_to(local_depot, bundle("two"), None)
    local_depot.create("other/versions/x.json", b"{")
    clock.forward(30)
    with pytest.raises(ManifestError, match=r"other/versions/x\.json"):
        gc(local_depot)
    assert load_condemned(local_depot)[0] == Condemned()


def test_objects_that_only_a_killed_publisher_left_go_after_the_grace_time(
    local_depot: Depot, bundle: Callable[..., Path], clock: Clock, tmp_path: Path
) -> None:
    done = publish_to(local_depot, bundle("one"), None)
    local_depot.delete(version_name("ecom", done.version.version))
    for days, left in ((6.5, 4), (1, 4), (1.5, 0)):
        clock.forward(days)
        gc(local_depot)
        assert len(list(local_depot.entries("objects"))) == left


def test_leavings_of_killed_uploads_are_swept(local_depot: Depot, bundle: Callable[..., Path]) -> None:
    import os

    publish_to(local_depot, bundle("one"))
    for name, age_s in ((".tmp-upload-1-old", 40 * DAY_S), (".tmp-upload-1-new", 0)):
        path = Path(local_depot.url) / "objects" / name
        path.write_text("half")
        os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    assert gc(local_depot).swept == 1
    assert (Path(local_depot.url) / "objects" / ".tmp-upload-1-new").exists()


@pytest.mark.s3
def test_gc_on_s3_goes_by_the_stores_clock_and_ends_abandoned_uploads(
    s3_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bundle: Callable[..., Path]
) -> None:
    from manifests.storage.s3_depots import S3Depot

    lead_to(s3_server.environment, monkeypatch)
    depot = open_depot(f"s3://labels/{tmp_path.name}")
    assert isinstance(depot, S3Depot)
    kept = publish_to(depot, bundle("one")).version
    gone = publish_to(depot, bundle("two"), None).version
    depot._ask("create_multipart_upload", "objects/half", "beginning")
    monkeypatch.setattr("time.time", lambda: 0.0)  # this machine's clock is decades off
    assert gc(depot).garbage.names == []
    now = S3Depot.now_s
    for days in (8, 10):
        with monkeypatch.context() as patched:
            patched.setattr(S3Depot, "now_s", lambda self, days=days: now(self) + days * DAY_S)
            gc(depot)
    assert find_version(depot, "ecom", gone.version) is None
    assert depot._ask_bucket("list_multipart_uploads", Prefix=depot._inner("")).get("Uploads", []) == []
    check_whole(depot, kept)


def test_random_days_of_publishing_moving_and_collecting_never_break_a_channel(
    tmp_path: Path, clock: Clock, bundle: Callable[..., Path]
) -> None:
    """After every step each channel points to a whole version, and so do its moves within the window."""
    import random

    for seed in range(4):
        turn = random.Random(seed)
        depot = open_depot(str(tmp_path / f"store-{seed}"))
        texts = [f"text-{number}" for number in range(5)]
        for _ in range(60):
            step = turn.choice(["publish", "publish", "set", "rollback", "gc", "wait"])
            channel = turn.choice(["stable", "candidate"])
            held = [entry.name.split("/")[-1].removesuffix(".json") for entry in depot.entries("ecom/versions")]
            if step == "publish":
                publish_to(depot, bundle(turn.choice(texts)), turn.choice([None, channel]))
            elif step == "set" and held:
                set_channel(depot, "ecom", channel, turn.choice(held), None)
            elif step == "rollback":
                with contextlib.suppress(GateError, InputError):  # no channel yet, or nothing before
                    roll_back(depot, "ecom", channel, None)
            elif step == "gc":
                gc(depot, keep=2, grace_s=turn.choice([0.0, 1.0, 3.0]) * DAY_S)
            else:
                clock.forward(turn.uniform(0, 3))
            for name in ("stable", "candidate"):
                for move in moves_of(depot, name)[-2:]:
                    check_whole(depot, load_version(depot, "ecom", move.version))


def moves_of(depot: Depot, channel: str) -> tuple[Any, ...]:
    try:
        return load_channel(depot, "ecom", channel).moves
    except InputError:
        return ()
