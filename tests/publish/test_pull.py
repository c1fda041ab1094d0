"""The active version is whole and proven, whatever comes from the store; a refusal leaves it as it was."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relabel.export.publishing import roll_back, set_channel
from relabel.export.signatures import SigningKey, trusted_keys
from relabel.export.store import channel_name, load_channel, object_name, version_name
from relabel.manifests.errors import (
    GateError,
    LockHeldError,
    ManifestError,
    StoreUnreachableError,
)
from relabel.manifests.records import sha256_bytes
from relabel.manifests.store import Store
from tests.publish.conftest import publish_to, pull_from, roll_back_in, served_text, write_bundle

MIB = 1 << 20


def put(bundle_store: Store, name: str, data: bytes) -> None:
    """What somebody with access to the store can do: put other bytes under a name."""
    try:
        tag = bundle_store.read_tagged(name).tag
    except FileNotFoundError:
        assert bundle_store.create(name, data)
    else:
        assert bundle_store.replace(name, data, tag)


def change(bundle_store: Store, name: str, how: Callable[[Any], Any]) -> None:
    put(bundle_store, name, json.dumps(how(json.loads(bundle_store.read_tagged(name).data))).encode())


def test_a_pulled_bundle_serves_and_equals_the_one_published(
    bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    publish_to(bundle_store, bundle("one"))
    done = pull_from(bundle_store, tmp_path / "dest")
    assert (done.has_switched, served_text(tmp_path / "dest")) == (True, "one")
    for path in bundle("one").rglob("*"):
        if path.is_file():
            assert (tmp_path / "dest" / "current" / path.relative_to(bundle("one"))).read_bytes() == path.read_bytes()


def test_only_what_is_not_here_is_fetched(bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path) -> None:
    publish_to(bundle_store, bundle("one", size=3 * MIB))
    pull_from(bundle_store, tmp_path / "dest")
    folder = bundle("one")
    (folder / "README.md").write_text("# Another card\n")
    from relabel.export.bundles import seal_bundle

    seal_bundle(folder, {"name": "ecom", "lineage": {"student": "one, corrected"}})
    publish_to(bundle_store, folder)
    assert pull_from(bundle_store, tmp_path / "dest").fetched_bytes < 2000
    assert served_text(tmp_path / "dest") == "one, corrected"


def test_a_file_of_a_kept_version_that_was_damaged_is_not_taken_over(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    publish_to(local_bundle_store, bundle("one"))
    pull_from(local_bundle_store, tmp_path / "dest")
    (tmp_path / "dest" / "current" / "README.md").write_text("# A MODEL CARD\n")
    publish_to(local_bundle_store, bundle("two"))
    pull_from(local_bundle_store, tmp_path / "dest")
    assert served_text(tmp_path / "dest") == "two"


def cut_after(bundle_store: Store, monkeypatch: pytest.MonkeyPatch, size: int) -> list[tuple[str, int]]:
    """From here on reads of objects break after `size` bytes in all; what was asked for is in the list."""
    asked: list[tuple[str, int]] = []
    real = type(bundle_store).blocks
    left = [size]

    def blocks(self: Store, name: str, start: int) -> Iterator[bytes]:
        if not name.startswith("objects/"):
            yield from real(self, name, start)
            return
        asked.append((name, start))
        for block in real(self, name, start):
            if left[0] <= 0:
                raise StoreUnreachableError("the network went away")
            part = block[: left[0]]
            left[0] -= len(part)
            yield part
            if len(part) < len(block):
                raise StoreUnreachableError("the network went away")

    monkeypatch.setattr(type(bundle_store), "blocks", blocks)
    return asked


def test_a_broken_download_is_resumed_where_it_stopped(
    bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 20 * MIB
    version = publish_to(bundle_store, bundle("one", size=size)).version
    with monkeypatch.context() as patched:
        cut_after(bundle_store, patched, 7 * MIB)
        with pytest.raises(StoreUnreachableError):
            pull_from(bundle_store, tmp_path / "dest")
    assert not (tmp_path / "dest" / "current").exists()
    with monkeypatch.context() as patched:
        asked = cut_after(bundle_store, patched, 1 << 40)
        done = pull_from(bundle_store, tmp_path / "dest")
    weights = next(file for file in version.files if file.path == "model.onnx")
    start = dict(asked)[object_name(weights.sha256)]
    assert 6 * MIB < start <= 7 * MIB
    assert done.fetched_bytes < size - 6 * MIB
    assert served_text(tmp_path / "dest") == "one"
    assert not (tmp_path / "dest" / ".partial").exists()


def test_an_old_pointer_put_back_is_a_downgrade_and_a_rollback_is_none(
    bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    publish_to(bundle_store, bundle("one"))
    old = bundle_store.read_tagged(channel_name("ecom", "stable")).data
    publish_to(bundle_store, bundle("two"))
    pull_from(bundle_store, tmp_path / "dest")
    put(bundle_store, channel_name("ecom", "stable"), old)
    with pytest.raises(GateError, match="downgraded: a newer sequence than 1"):
        pull_from(bundle_store, tmp_path / "dest")
    assert served_text(tmp_path / "dest") == "two"
    # no move: it is there
    set_channel(bundle_store, "ecom", "stable", load_channel(bundle_store, "ecom", "stable").head.version, None)
    with pytest.raises(GateError, match="downgraded"):
        pull_from(bundle_store, tmp_path / "dest")
    publish_to(bundle_store, bundle("two"))
    roll_back(bundle_store, "ecom", "stable", None)
    pull_from(bundle_store, tmp_path / "dest")
    assert served_text(tmp_path / "dest") == "one"


def test_a_newer_sequence_is_remembered_even_where_its_version_was_refused(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    publish_to(local_bundle_store, bundle("one"))
    old = local_bundle_store.read_tagged(channel_name("ecom", "stable")).data
    version = publish_to(local_bundle_store, bundle("two")).version
    local_bundle_store.remove(object_name(version.files[0].sha256))
    with pytest.raises(ManifestError):
        pull_from(local_bundle_store, tmp_path / "dest")
    put(local_bundle_store, channel_name("ecom", "stable"), old)
    with pytest.raises(GateError, match="downgraded"):
        pull_from(local_bundle_store, tmp_path / "dest")


@pytest.fixture
def signed(local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path, keys: dict[str, Path]) -> SigningKey:
    """Our key: `dest` serves one, signed by it. Others can write to the store, and do not have the key."""
    key = SigningKey(str(keys["ours"]))
    publish_to(local_bundle_store, bundle("one"), key=key)
    pull_from(local_bundle_store, tmp_path / "dest", trust=trusted_keys([str(keys["ours.pub"])]))
    return key


def test_a_signature_of_one_record_is_not_one_of_another(
    local_bundle_store: Store, signed: SigningKey, bundle: Callable[..., Path], tmp_path: Path, keys: dict[str, Path]
) -> None:
    held = load_channel(local_bundle_store, "ecom", "stable")
    two = publish_to(local_bundle_store, bundle("two"), None).version
    move = replace(held.head, sequence=2, version=two.version, version_sha256=two.sha256)
    put(local_bundle_store, channel_name("ecom", "stable"), replace(held, moves=(*held.moves, move)).record())
    with pytest.raises(GateError, match="no valid signature"):
        pull_from(local_bundle_store, tmp_path / "dest", trust=trusted_keys([str(keys["ours.pub"])]))
    assert served_text(tmp_path / "dest") == "one"


@pytest.mark.parametrize("path", ["model.onnx", "README.md"])
def test_not_one_byte_of_a_signed_bundle_can_be_changed(
    local_bundle_store: Store,
    signed: SigningKey,
    bundle: Callable[..., Path],
    tmp_path: Path,
    keys: dict[str, Path],
    path: str,
) -> None:
    version = publish_to(local_bundle_store, bundle("two"), key=signed).version
    evil = {"path": path, "size_bytes": 4, "sha256": sha256_bytes(b"evil")}
    put(local_bundle_store, object_name(sha256_bytes(b"evil")), b"evil")

    def swapped(held: Any) -> Any:
        files = [evil if file["path"] == path else file for file in held["body"]["files"]]
        return {**held, "body": {**held["body"], "files": files}}

    change(local_bundle_store, version_name("ecom", version.version), swapped)
    trust = trusted_keys([str(keys["ours.pub"])])
    for at, error, said in (
        ("stable", ManifestError, "is not the record that was named"),
        (version.version, GateError, "no valid signature"),
    ):
        with pytest.raises(error, match=said):
            pull_from(local_bundle_store, tmp_path / "dest", at, trust=trust)
    assert served_text(tmp_path / "dest") == "one"


def test_the_last_n_versions_are_kept_and_no_more(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    names = []
    for text in ("one", "two", "three", "four"):
        names.append(publish_to(local_bundle_store, bundle(text)).version.version)
        pull_from(local_bundle_store, tmp_path / "dest", keep=2)
    assert sorted(path.name for path in (tmp_path / "dest" / ".versions").iterdir()) == sorted(names[-2:])


def test_a_rollback_serves_the_version_before_and_then_the_one_before_that(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    for text in ("one", "two", "three"):
        publish_to(local_bundle_store, bundle(text))
        pull_from(local_bundle_store, tmp_path / "dest")
    shutil.rmtree(local_bundle_store.url)  # no store, no network
    for text in ("two", "one"):
        roll_back_in(tmp_path / "dest")
        assert served_text(tmp_path / "dest") == text
    with pytest.raises(ManifestError, match="keeps no version to go back to"):
        roll_back_in(tmp_path / "dest")
    assert served_text(tmp_path / "dest") == "one"


def test_a_rollback_is_left_alone_until_the_channel_moves_on(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    for text in ("one", "two"):
        publish_to(local_bundle_store, bundle(text))
        pull_from(local_bundle_store, tmp_path / "dest")
    roll_back_in(tmp_path / "dest")
    held = pull_from(local_bundle_store, tmp_path / "dest")
    assert (held.is_held, held.has_switched, served_text(tmp_path / "dest")) == (True, False, "one")
    assert pull_from(local_bundle_store, tmp_path / "dest", lifts_hold=True).has_switched
    assert served_text(tmp_path / "dest") == "two"
    roll_back_in(tmp_path / "dest")
    publish_to(local_bundle_store, bundle("three"))
    pull_from(local_bundle_store, tmp_path / "dest")
    assert served_text(tmp_path / "dest") == "three"


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
