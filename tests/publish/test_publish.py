"""What is published is whole, is there once, and never changes; a channel moves only from where it was seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relabel.export.bundles import open_bundle
from relabel.export.publishing import roll_back, set_channel
from relabel.export.signatures import SigningKey
from relabel.export.store import (
    Channel,
    check_whole,
    find_channel,
    load_channel,
    load_version,
    object_name,
    parse_address,
    version_name,
)
from relabel.manifests.errors import ChannelMovedError, GateError, InputError, ManifestError, StoreError, UsageError
from relabel.manifests.records import sha256_file
from relabel.manifests.store import Held, Store
from tests.publish.conftest import publish_to


def test_a_published_version_is_whole_and_its_channel_points_to_it(
    bundle_store: Store, bundle: Callable[..., Path]
) -> None:
    done = publish_to(bundle_store, bundle("one"))
    assert (done.uploaded, done.objects, done.has_changed) == (4, 4, True)
    version = load_version(bundle_store, "ecom", done.version.version)
    check_whole(bundle_store, version)
    for file in version.files:
        assert bundle_store.digest(object_name(file.sha256), lambda _: None) == Held(file.size_bytes, file.sha256)
    head = load_channel(bundle_store, "ecom", "stable").head
    assert (head.sequence, head.version, head.version_sha256, head.reason) == (
        1,
        version.version,
        version.sha256,
        "publish",
    )


def test_what_is_there_is_not_uploaded_again_and_moves_nothing(
    bundle_store: Store, bundle: Callable[..., Path]
) -> None:
    publish_to(bundle_store, bundle("one"))
    before = {entry.name: (entry.size_bytes, entry.written_s) for entry in bundle_store.entries("")}
    again = publish_to(bundle_store, bundle("one"))
    assert (again.uploaded, again.uploaded_bytes, again.has_changed) == (0, 0, False)
    assert {entry.name: (entry.size_bytes, entry.written_s) for entry in bundle_store.entries("")} == before
    assert publish_to(bundle_store, bundle("two")).uploaded == 2  # weights and manifest; tokenizer and card are there
    assert publish_to(bundle_store, bundle("one"), name="other").uploaded == 0


def test_an_object_that_went_missing_or_was_cut_off_is_mended_by_the_same_command(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    done = publish_to(local_bundle_store, bundle("one"))
    missing, cut = (object_name(file.sha256) for file in done.version.files[:2])
    local_bundle_store.remove(missing)
    Path(local_bundle_store.url, cut).write_bytes(b"x")
    with pytest.raises(ManifestError, match="is not whole"):
        set_channel(local_bundle_store, "ecom", "candidate", done.version.version, None)
    assert find_channel(local_bundle_store, "ecom", "candidate") is None
    assert publish_to(local_bundle_store, bundle("one")).uploaded == 2
    check_whole(local_bundle_store, done.version)


def test_an_object_of_the_right_size_and_wrong_bytes_that_no_version_vouches_for_is_replaced(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    """What a publisher on a broken machine left, killed before it looked."""
    file = open_bundle(bundle("one")).files[1]
    path = Path(local_bundle_store.url, object_name(file.sha256))
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * file.size_bytes)
    assert publish_to(local_bundle_store, bundle("one")).uploaded == 4
    assert sha256_file(path) == file.sha256


def test_a_version_never_gets_other_contents(bundle_store: Store, bundle: Callable[..., Path]) -> None:
    publish_to(bundle_store, bundle("one"), version="1.0")
    before = bundle_store.read_tagged(version_name("ecom", "1.0"))
    with pytest.raises(ManifestError, match=r"version 1\.0 is there with other contents"):
        publish_to(bundle_store, bundle("two"), version="1.0")
    assert bundle_store.read_tagged(version_name("ecom", "1.0")) == before
    assert load_channel(bundle_store, "ecom", "stable").head.sequence == 1


def test_a_bundle_damaged_since_it_was_sealed_is_not_published(
    local_bundle_store: Store, bundle: Callable[..., Path]
) -> None:
    folder = bundle("one")
    (folder / "model.onnx").write_bytes(b"z" * 40)
    with pytest.raises(ManifestError, match="its manifest says"):
        publish_to(local_bundle_store, folder)
    assert list(local_bundle_store.entries("")) == []


def test_a_depot_that_keeps_holding_other_bytes_is_given_up_without_a_version(
    local_bundle_store: Store, bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(local_bundle_store), "digest", lambda self, name, on_progress: Held(1, "0" * 64))
    with pytest.raises(StoreError, match="still holds other bytes"):
        publish_to(local_bundle_store, bundle("one"))
    assert all(entry.name.startswith("objects/") for entry in local_bundle_store.entries(""))


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
    one, two, three = (publish_to(local_bundle_store, bundle(text)).version.version for text in ("one", "two", "three"))
    assert roll_back(local_bundle_store, "ecom", "stable", None).head.version == two
    assert roll_back(local_bundle_store, "ecom", "stable", None).head.version == one  # further back, not forth to three
    with pytest.raises(GateError, match="nothing earlier"):
        roll_back(local_bundle_store, "ecom", "stable", None)
    assert set_channel(local_bundle_store, "ecom", "stable", three, None)[1]
    assert not set_channel(local_bundle_store, "ecom", "stable", three, None)[1]
    moves = load_channel(local_bundle_store, "ecom", "stable").moves
    assert [move.sequence for move in moves] == [1, 2, 3, 4, 5, 6]
    assert [move.version for move in moves] == [one, two, three, two, one, three]
    assert [move.restores for move in moves] == [None, None, None, 2, 1, None]
    assert roll_back(local_bundle_store, "ecom", "stable", None).head.version == one


def test_a_channel_moved_during_a_long_upload_is_not_overruled(
    local_bundle_store: Store, bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = publish_to(local_bundle_store, bundle("one")).version
    publish_to(local_bundle_store, bundle("two"))
    real = type(local_bundle_store).put_file

    def slow(self: Store, *arguments: Any) -> None:
        monkeypatch.setattr(type(local_bundle_store), "put_file", real)
        set_channel(local_bundle_store, "ecom", "stable", one.version, None)
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(local_bundle_store), "put_file", slow)
    with pytest.raises(ChannelMovedError):
        publish_to(local_bundle_store, bundle("three"))
    assert load_channel(local_bundle_store, "ecom", "stable").head.version == one.version
    assert publish_to(local_bundle_store, bundle("three")).channel.head.sequence == 4  # type: ignore[union-attr]


def test_a_name_is_a_channel_or_a_version_and_never_both(
    local_bundle_store: Store, bundle: Callable[..., Path]
) -> None:
    done = publish_to(local_bundle_store, bundle("one"))
    with pytest.raises(InputError, match="stable is a channel there"):
        publish_to(local_bundle_store, bundle("two"), None, version="stable")
    with pytest.raises(InputError, match="is a version there"):
        set_channel(local_bundle_store, "ecom", done.version.version, done.version.version, None)
    with pytest.raises(InputError, match="is a version there"):
        publish_to(local_bundle_store, bundle("two"), done.version.version)


def test_a_signature_can_be_added_later_without_a_new_version(
    local_bundle_store: Store, bundle: Callable[..., Path], keys: dict[str, Path]
) -> None:
    first = publish_to(local_bundle_store, bundle("one"))
    for signer in ("ours", "theirs"):
        signed = publish_to(local_bundle_store, bundle("one"), key=SigningKey(str(keys[signer])))
        assert (signed.uploaded, signed.has_changed) == (0, True)
    assert not publish_to(local_bundle_store, bundle("one"), key=SigningKey(str(keys["theirs"]))).has_changed
    held = load_version(local_bundle_store, "ecom", first.version.version)
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
    assert roll_back(local_bundle_store, "ecom", "stable", ours).head.sequence == 3


def test_a_rollback_does_not_follow_a_history_that_somebody_changed(
    local_bundle_store: Store, bundle: Callable[..., Path], keys: dict[str, Path]
) -> None:
    ours = SigningKey(str(keys["ours"]))
    for text in ("one", "two", "three"):
        publish_to(local_bundle_store, bundle(text), key=ours)
    held = load_channel(local_bundle_store, "ecom", "stable")
    moves = (held.moves[0], replace(held.moves[0], sequence=2), held.moves[2])
    for signatures in (held.signatures, ()):
        forged = Channel("ecom", "stable", moves, signatures)
        tag = local_bundle_store.read_tagged("ecom/channels/stable.json").tag
        assert local_bundle_store.replace("ecom/channels/stable.json", forged.record(), tag)
        with pytest.raises(GateError, match="it may be forged"):
            roll_back(local_bundle_store, "ecom", "stable", ours)
