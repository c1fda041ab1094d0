"""What is published is whole, is there once, and never changes; a channel moves only from where it was seen."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.export.bundles import open_bundle, seal_bundle
from relabel.export.publishing import (
    TAKE_OVER_S,
    Channel,
    Claim,
    GcMarks,
    SigningKey,
    Version,
    change_gc_marks,
    check_whole,
    collect,
    load_gc_marks,
    object_name,
    parse_address,
    roll_back,
    set_channel,
)
from relabel.manifests.errors import (
    ChannelMovedError,
    GateError,
    InputError,
    LockHeldError,
    ManifestError,
    UsageError,
)
from relabel.manifests.files import Storage
from relabel.manifests.records import sha256_file
from relabel.manifests.store import LocalStore, Store, open_bundle_store
from tests import seaweed
from tests.faults.conftest import count
from tests.publish.conftest import change_json, publish_to


def test_what_is_there_is_not_uploaded_again_and_moves_nothing(
    bundle_store: Store, bundle: Callable[..., Path]
) -> None:
    publish_to(bundle_store, bundle("one"))
    before = {entry.name: (entry.size_bytes, entry.written_s) for entry in bundle_store.entries("")}
    again = publish_to(bundle_store, bundle("one"))
    assert (again.uploaded, again.has_changed) == ([], False)
    assert {entry.name: (entry.size_bytes, entry.written_s) for entry in bundle_store.entries("")} == before
    assert len(publish_to(bundle_store, bundle("two")).uploaded) == 2  # tokenizer and card are there
    assert len(publish_to(bundle_store, bundle("one"), name="other").uploaded) == 0


def test_an_object_that_went_missing_or_was_cut_off_is_mended_by_the_same_command(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    done = publish_to(local_bundle_store, bundle("one"))
    missing, cut = (object_name(file.sha256) for file in done.version.files[:2])
    local_bundle_store.remove(missing)
    Path(local_bundle_store.url, cut).write_bytes(b"x")
    with pytest.raises(ManifestError, match="is not whole"):
        set_channel(local_bundle_store, "ecom", "candidate", done.version.at, None)
    assert Channel.find(local_bundle_store, "ecom", "candidate") is None
    assert len(publish_to(local_bundle_store, bundle("one")).uploaded) == 2
    check_whole(local_bundle_store, done.version)


def test_an_object_of_the_right_size_and_wrong_bytes_that_no_version_vouches_for_is_replaced(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    """What a publisher on a broken machine left, killed before it looked."""
    file = open_bundle(bundle("one")).all_files[1]
    path = Path(local_bundle_store.url, object_name(file.sha256))
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * file.size_bytes)
    assert len(publish_to(local_bundle_store, bundle("one")).uploaded) == 4
    assert sha256_file(path) == file.sha256


def test_a_version_never_gets_other_contents(bundle_store: Store, bundle: Callable[..., Path]) -> None:
    publish_to(bundle_store, bundle("one"), version="1.0")
    before = bundle_store.read_tagged(Version.path_of("ecom", "1.0"))
    with pytest.raises(ManifestError, match=r"version 1\.0 is there with other contents"):
        publish_to(bundle_store, bundle("two"), version="1.0")
    assert bundle_store.read_tagged(Version.path_of("ecom", "1.0")) == before
    assert Channel.load(bundle_store, "ecom", "stable").head["sequence"] == 1


def test_a_bundle_damaged_since_it_was_sealed_is_not_published(
    local_bundle_store: Store, bundle: Callable[..., Path]
) -> None:
    folder = bundle("one")
    (folder / "model.onnx").write_bytes(b"z" * 40)
    with pytest.raises(ManifestError, match="its manifest says"):
        publish_to(local_bundle_store, folder)
    assert list(local_bundle_store.entries("")) == []


@pytest.mark.parametrize("name", ["objects", "../up", "a/b", "", ".hidden", "a b", "ä", "x" * 101, "a\n"])
def test_names_that_could_leave_their_place_are_refused(
    local_bundle_store: Store, bundle: Callable[..., Path], name: str
) -> None:
    for options in ({"name": name}, {"version": name}, {"channel": name}):
        if name or "channel" in options:
            with pytest.raises(UsageError, match="can't be a"):
                publish_to(local_bundle_store, bundle("one"), **options)
    assert list(local_bundle_store.entries("")) == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("s3://b/models/ecom@stable", ("s3://b/models", "ecom", "stable")),
        ("s3://b/ecom", ("s3://b", "ecom", None)),
        ("/srv/models/ecom@1.0", ("/srv/models", "ecom", "1.0")),
        ("store/ecom/", ("store", "ecom", None)),
        ("ecom@x", (".", "ecom", "x")),
    ],
)
def test_an_address_is_read(text: str, parts: tuple[str, str, str | None]) -> None:
    assert tuple(parse_address(text)) == parts


@pytest.mark.parametrize("text", ["", "s3://ecom", "a/@stable", "a/b@", "a/b@c@d", "a/..", "/"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_address(text)


def test_a_sequence_rises_with_every_move_a_rollback_too_and_history_is_kept(
    local_bundle_store: Store, bundle: Callable[..., Path]
) -> None:
    one, two, three = (publish_to(local_bundle_store, bundle(text)).version.at for text in ("one", "two", "three"))
    assert roll_back(local_bundle_store, "ecom", "stable", None).channel.head["version"] == two
    # further back, not forth to three
    assert roll_back(local_bundle_store, "ecom", "stable", None).channel.head["version"] == one
    with pytest.raises(GateError, match="nothing earlier"):
        roll_back(local_bundle_store, "ecom", "stable", None)
    assert set_channel(local_bundle_store, "ecom", "stable", three, None).has_moved
    assert not set_channel(local_bundle_store, "ecom", "stable", three, None).has_moved
    moves = Channel.load(local_bundle_store, "ecom", "stable").moves
    assert [move["sequence"] for move in moves] == [1, 2, 3, 4, 5, 6]
    assert [move["version"] for move in moves] == [one, two, three, two, one, three]
    assert [move["restores"] for move in moves] == [None, None, None, 2, 1, None]
    assert roll_back(local_bundle_store, "ecom", "stable", None).channel.head["version"] == one


def test_a_channel_moved_during_a_long_upload_is_not_overruled(
    local_bundle_store: Store, bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = publish_to(local_bundle_store, bundle("one")).version
    publish_to(local_bundle_store, bundle("two"))
    real = type(local_bundle_store).put_file

    def slow(self: Store, *arguments: Any) -> None:
        monkeypatch.setattr(type(local_bundle_store), "put_file", real)
        set_channel(local_bundle_store, "ecom", "stable", one.at, None)
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(local_bundle_store), "put_file", slow)
    with pytest.raises(ChannelMovedError):
        publish_to(local_bundle_store, bundle("three"))
    assert Channel.load(local_bundle_store, "ecom", "stable").head["version"] == one.at
    assert publish_to(local_bundle_store, bundle("three")).channel.head["sequence"] == 4  # type: ignore[union-attr]


def test_a_name_is_a_channel_or_a_version_and_never_both(
    local_bundle_store: Store, bundle: Callable[..., Path]
) -> None:
    done = publish_to(local_bundle_store, bundle("one"))
    with pytest.raises(InputError, match="stable is a channel there"):
        publish_to(local_bundle_store, bundle("two"), None, version="stable")
    with pytest.raises(InputError, match="is a version there"):
        set_channel(local_bundle_store, "ecom", done.version.at, done.version.at, None)
    with pytest.raises(InputError, match="is a version there"):
        publish_to(local_bundle_store, bundle("two"), done.version.at)


def test_a_signature_can_be_added_later_without_a_new_version(
    local_bundle_store: Store, bundle: Callable[..., Path], keys: dict[str, Path]
) -> None:
    first = publish_to(local_bundle_store, bundle("one"))
    for signer in ("ours", "theirs"):
        signed = publish_to(local_bundle_store, bundle("one"), key=SigningKey(str(keys[signer])))
        assert (signed.uploaded, signed.has_changed) == ([], True)
    assert not publish_to(local_bundle_store, bundle("one"), key=SigningKey(str(keys["theirs"]))).has_changed
    held = Version.load(local_bundle_store, "ecom", first.version.at)
    assert held.sha256 == first.version.sha256
    assert len(held.signatures) == 2


def test_a_signed_channel_is_not_moved_without_a_key(
    local_bundle_store: Store, bundle: Callable[..., Path], keys: dict[str, Path]
) -> None:
    ours, theirs = (SigningKey(str(keys[name])) for name in ("ours", "theirs"))
    publish_to(local_bundle_store, bundle("one"), key=ours)
    publish_to(local_bundle_store, bundle("two"), key=ours)
    for call in (
        lambda: roll_back(local_bundle_store, "ecom", "stable", None),
        lambda: publish_to(local_bundle_store, bundle("three")),
    ):
        with pytest.raises(UsageError, match="this channel is signed"):
            call()
    with pytest.raises(GateError, match="not signed by the key given"):
        roll_back(local_bundle_store, "ecom", "stable", theirs)
    assert roll_back(local_bundle_store, "ecom", "stable", ours).channel.head["sequence"] == 3


def test_a_rollback_does_not_follow_a_history_that_somebody_changed(
    local_bundle_store: Store, bundle: Callable[..., Path], keys: dict[str, Path]
) -> None:
    ours = SigningKey(str(keys["ours"]))
    for text in ("one", "two", "three"):
        publish_to(local_bundle_store, bundle(text), key=ours)
    held = Channel.load(local_bundle_store, "ecom", "stable")
    first, _, last = held.body["moves"]
    body = {**held.body, "moves": [first, {**first, "sequence": 2}, last]}
    for signatures in (held.signatures, ()):
        forged = Channel(body, signatures)
        tag = local_bundle_store.read_tagged("ecom/channels/stable.json").tag
        assert local_bundle_store.replace("ecom/channels/stable.json", forged.record(), tag)
        with pytest.raises(GateError, match="it may be forged"):
            roll_back(local_bundle_store, "ecom", "stable", ours)


# gc never takes what a channel or its late history points to, nor what somebody may be about to rely on.


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


def gc(bundle_store: Store, *, keep: int = 10, grace_s: float = GRACE_S, deletes: bool = True) -> dict[str, Any]:
    return collect(bundle_store, keep=keep, grace_s=grace_s, deletes=deletes)


def test_a_version_that_no_channel_points_to_goes_in_two_steps_and_its_own_objects_with_it(
    local_bundle_store: Store, bundle: Callable[..., Path], clock: Clock
) -> None:
    kept = publish_to(local_bundle_store, bundle("one")).version
    gone = publish_to(local_bundle_store, bundle("two"), None).version
    clock.forward(8)
    first = gc(local_bundle_store)
    own = {object_name(file.sha256) for file in gone.files} - {object_name(file.sha256) for file in kept.files}
    assert set(first["marked"]) == {Version.path_of("ecom", gone.at), *own}
    assert first["deleted"] == []
    clock.forward(0.5)
    assert gc(local_bundle_store)["deleted"] == []
    clock.forward(0.6)
    second = gc(local_bundle_store)
    assert set(second["deleted"]) == {Version.path_of("ecom", gone.at), *own}
    assert second["deleted"][0] == Version.path_of("ecom", gone.at)
    assert Version.find(local_bundle_store, "ecom", gone.at) is None
    check_whole(local_bundle_store, kept)
    assert load_gc_marks(local_bundle_store)[0] == GcMarks()
    assert gc(local_bundle_store)["marked"] == []


def test_a_dry_run_touches_nothing_and_says_what_would_be_done(
    local_bundle_store: Store, bundle: Callable[..., Path], clock: Clock
) -> None:
    publish_to(local_bundle_store, bundle("one"))
    publish_to(local_bundle_store, bundle("two"), None)
    clock.forward(8)
    before = {entry.name for entry in local_bundle_store.entries("")}
    dry = gc(local_bundle_store, deletes=False)
    assert {entry.name for entry in local_bundle_store.entries("")} == before
    assert dry["marked"] == gc(local_bundle_store)["marked"]


def test_a_publisher_that_finds_marked_objects_spares_them_even_if_it_sleeps(
    local_bundle_store: Store, bundle: Callable[..., Path], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked, found everything there, and gc runs before it has written its version."""
    publish_to(local_bundle_store, bundle("one"))
    gone = publish_to(local_bundle_store, bundle("two"), None).version
    clock.forward(8)
    gc(local_bundle_store)
    clock.forward(2)
    local_bundle_store.remove(Version.path_of("ecom", gone.at))
    real = type(local_bundle_store).create

    def late(self: Store, name: str, data: bytes) -> bool:
        if name.startswith("ecom/versions/"):
            assert gc(local_bundle_store)["deleted"] == []
        return real(self, name, data)  # type: ignore[arg-type]

    monkeypatch.setattr(type(local_bundle_store), "create", late)
    publish_to(local_bundle_store, bundle("two"))
    check_whole(local_bundle_store, Version.load(local_bundle_store, "ecom", gone.at))


def test_what_a_gc_has_claimed_can_not_be_relied_on(
    local_bundle_store: Store, bundle: Callable[..., Path], clock: Clock
) -> None:
    publish_to(local_bundle_store, bundle("one"))
    old = publish_to(local_bundle_store, bundle("two"), None).version
    names = (Version.path_of("ecom", old.at),)
    change_gc_marks(local_bundle_store, lambda held: GcMarks({}, Claim("a gc", local_bundle_store.now_s(), names)))
    with pytest.raises(LockHeldError, match="gc is removing"):
        set_channel(local_bundle_store, "ecom", "candidate", old.at, None)
    with pytest.raises(LockHeldError, match="gc is removing"):
        publish_to(local_bundle_store, bundle("two"))
    with pytest.raises(LockHeldError, match="another gc is running"):
        gc(local_bundle_store)
    clock.forward(TAKE_OVER_S / DAY_S + 0.001)
    assert gc(local_bundle_store)["deleted"] == list(names)
    publish_to(local_bundle_store, bundle("two"))
    check_whole(local_bundle_store, old)


def test_a_gc_killed_half_way_is_ended_by_the_next(
    local_bundle_store: Store, bundle: Callable[..., Path], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = publish_to(local_bundle_store, bundle("one")).version
    publish_to(local_bundle_store, bundle("two"), None)
    clock.forward(8)
    marked = gc(local_bundle_store)["marked"]
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
    assert set(gc(local_bundle_store)["deleted"]) == set(marked)
    assert {entry.name for entry in local_bundle_store.entries("objects")} == {
        object_name(file.sha256) for file in kept.files
    }


def test_a_gc_that_another_took_over_from_once_it_had_deleted_everything_ends_well(
    local_bundle_store: Store, bundle: Callable[..., Path], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_to(local_bundle_store, bundle("one"))
    publish_to(local_bundle_store, bundle("two"), None)
    clock.forward(8)
    marked = gc(local_bundle_store)["marked"]
    clock.forward(2)
    real, removed, others = type(local_bundle_store).remove, list[str](), list[dict[str, Any]]()

    def sleeps(self: Store, name: str) -> None:
        real(self, name)  # type: ignore[arg-type]
        removed.append(name)
        if len(removed) == len(marked):
            clock.forward(TAKE_OVER_S / DAY_S + 0.001)
            others.append(gc(local_bundle_store))

    monkeypatch.setattr(type(local_bundle_store), "remove", sleeps)
    assert set(gc(local_bundle_store)["deleted"]) == set(others[0]["deleted"]) == set(marked)
    assert load_gc_marks(local_bundle_store)[0] == GcMarks()


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
    local_bundle_store.remove(Version.path_of("ecom", done.version.at))
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
    kept = publish_to(bundle_store, bundle("one")).version
    gone = publish_to(bundle_store, bundle("two"), None).version
    monkeypatch.setattr("time.time", lambda: 0.0)  # this machine's clock is decades off
    assert gc(bundle_store)["marked"] == []
    now = ObjectStore.now_s
    for days in (8, 10):
        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, "now_s", lambda self, days=days: now(self) + days * DAY_S)
            gc(bundle_store)
    assert Version.find(bundle_store, "ecom", gone.at) is None
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
                    check_whole(bundle_store, Version.load(bundle_store, "ecom", move["version"]))


def moves_of(bundle_store: Store, channel: str) -> tuple[Any, ...]:
    try:
        return Channel.load(bundle_store, "ecom", channel).moves
    except InputError:
        return ()


# A channel is not pointed at a student that reads no better than a constant grade or BM25, unless asked to.


BOUNDS = {"grade": 1, "constant": {"accuracy": 0.5, "kappa": 0.0}, "random": {}, "lexical": {"ndcg@10": 0.8}}


@pytest.mark.parametrize(
    ("student", "named"),
    [
        ({"rows": 9, "accuracy": 0.4, "kappa": 0.1, "ndcg@10": 0.9}, "accuracy 0.4000, the constant baseline 0.5000"),
        ({"rows": 9, "accuracy": 0.6, "kappa": 0.1, "ndcg@10": 0.7}, "ndcg@10 0.7000, the BM25 baseline 0.8000"),
    ],
)
def test_a_channel_takes_a_student_below_a_baseline_with_anyway_alone(
    relabel: Callable[..., Any], tmp_path: Path, bundle: Callable[..., Path], student: dict[str, Any], named: str
) -> None:
    folder, store = bundle(), str(tmp_path / "store")
    lineage = {"student": {"metrics": {"test": {"rows": 9, "student": student, "baselines": BOUNDS}}}}
    seal_bundle(folder, {"name": "ecom", "lineage": lineage, "grades": 3})
    done = relabel("publish", str(folder), store, "--channel", "stable")
    assert done.code == 5
    assert named in done.err
    assert not (tmp_path / "store" / "ecom").exists()
    assert relabel("publish", str(folder), store).code == 0
    moves = ("channel", "set", f"{store}/ecom", "stable", open_bundle(folder).version)
    done = relabel(*moves)
    assert done.code == 5
    assert named in done.err
    assert "uploaded" not in done.err, "a move uploads nothing anyway"
    assert not (tmp_path / "store" / "ecom" / "channels").exists()
    assert relabel(*moves, "--anyway").code == 0
    assert relabel("publish", str(folder), store, "--channel", "candidate", "--anyway").code == 0
    said = f"was published although this refuses it: {named}"
    for command in (moves, ("show", f"{store}/ecom@stable"), ("show", f"{store}/ecom")):
        done = relabel(*command, *(["--anyway"] if command is moves else []))
        assert said in done.out + done.err, command
    assert said in relabel("pull", f"{store}/ecom", str(tmp_path / "served")).out
    assert said in relabel("pull", f"{store}/ecom", str(tmp_path / "served")).out, "where it serves already, too"
    shown = ("show", str(tmp_path / "served"))
    assert f"version {open_bundle(folder).version} {said}" in relabel(*shown).out.splitlines()[-1]
    assert relabel(*shown, "--output", "json").json["kept"][0]["refused_by"] == [named]


@pytest.mark.parametrize(("low", "warns"), [(0.45, True), (0.55, False)])
def test_a_student_that_is_above_a_baseline_by_chance_alone_is_warned_of(
    relabel: Callable[..., Any], tmp_path: Path, bundle: Callable[..., Path], low: float, warns: bool
) -> None:
    folder = bundle()
    student = {"rows": 9, "accuracy": 0.6, "kappa": 0.1, "ndcg@10": 0.9}
    test = {"rows": 9, "student": student, "baselines": BOUNDS, "intervals": {"accuracy": [low, 0.8]}}
    seal_bundle(folder, {"name": "ecom", "lineage": {"student": {"metrics": {"test": test}}}, "grades": 3})
    done = relabel("publish", str(folder), str(tmp_path / "store"), "--channel", "stable")
    assert done.code == 0
    said = "not shown to be better than a baseline: accuracy 0.4500 to 0.8000 holds the constant baseline 0.5000."
    assert (said in done.err) == warns


def test_all_that_refuses_a_student_is_named_at_once(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    folder = bundle()
    student = {"rows": 9, "accuracy": 0.4, "kappa": 0.1, "ndcg@10": 0.7}
    lineage = {"student": {"metrics": {"test": {"rows": 9, "student": student, "baselines": BOUNDS}}}}
    seal_bundle(folder, {"name": "ecom", "lineage": lineage, "grades": 3})
    failed = {tmp_path / "one.json": ["stuffing is 0.8"], tmp_path / "two.json": ["again is 0.3"]}
    with pytest.raises(GateError) as refused:
        publish_to(local_bundle_store, folder, channel="stable", failed_audits=failed)
    message = str(refused.value)
    baselines = "accuracy 0.4000, the constant baseline 0.5000; ndcg@10 0.7000, the BM25 baseline 0.8000"
    assert baselines in message
    assert f"{tmp_path / 'one.json'} failed: stuffing is 0.8. {tmp_path / 'two.json'} failed: again is 0.3" in message
    version = publish_to(local_bundle_store, folder, channel=None, failed_audits=failed).version.at
    with pytest.raises(GateError) as refused:
        set_channel(local_bundle_store, "ecom", "stable", version, None)
    assert baselines in str(refused.value)
    assert "this refused it, too: stuffing is 0.8; again is 0.3" in str(refused.value)


def test_what_refused_a_version_stays_with_it_and_makes_it_no_other(
    local_bundle_store: Store, bundle: Callable[..., Path]
) -> None:
    """Nor does it break a signature, or go where a machine without the audit publishes again."""
    failed = {Path("audit.json"): ["stuffing is 0.8", "ß" * 200]}
    plain_one = publish_to(local_bundle_store, bundle("one"), channel="stable")
    refused = publish_to(local_bundle_store, bundle("one"), channel="stable", failed_audits=failed, is_anyway=True)
    assert refused.version.sha256 == plain_one.version.sha256
    assert refused.has_changed
    again = publish_to(local_bundle_store, bundle("one"), channel="stable")
    assert not again.has_changed
    version = Version.load(local_bundle_store, "ecom", plain_one.version.at)
    assert version.refused_by == ("stuffing is 0.8", "?" * 100)
    for hostile in (["\x1b[2J"], ["x" * 101], "text", [1], None):
        change_json(Path(local_bundle_store.url, version.path), lambda held, it=hostile: {**held, "refused_by": it})
        with pytest.raises(ManifestError, match="no version of format 1"):
            Version.find(local_bundle_store, "ecom", version.at)
