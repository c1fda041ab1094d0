"""The active version is whole and proven, whatever comes from the store; a refusal leaves it as it was."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relabel.export.publishing import roll_back, set_channel
from relabel.export.signatures import SigningKey, trusted_keys
from relabel.export.store import channel_name, load_channel, load_version, move_channel, object_name, version_name
from relabel.manifests.errors import (
    DiskFullError,
    GateError,
    LockHeldError,
    ManifestError,
    StoreUnreachableError,
)
from relabel.manifests.files import Storage
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


def test_the_same_pull_again_fetches_nothing_and_switches_nothing(
    bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    publish_to(bundle_store, bundle("one"))
    pull_from(bundle_store, tmp_path / "dest")
    inode = (tmp_path / "dest" / "current").lstat().st_ino
    again = pull_from(bundle_store, tmp_path / "dest")
    assert (again.has_switched, again.fetched_bytes) == (False, 0)
    assert (tmp_path / "dest" / "current").lstat().st_ino == inode


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


def test_a_version_that_serves_cut_off_is_mended_by_a_pull(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    publish_to(local_bundle_store, bundle("one"))
    pull_from(local_bundle_store, tmp_path / "dest")
    (tmp_path / "dest" / "current" / "model.onnx").write_bytes(b"")
    assert pull_from(local_bundle_store, tmp_path / "dest").has_switched
    assert served_text(tmp_path / "dest") == "one"
    assert len(list((tmp_path / "dest" / ".versions").iterdir())) == 1


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


def test_a_part_that_went_bad_on_disk_is_fetched_again(
    bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    version = publish_to(bundle_store, bundle("one", size=MIB)).version
    weights = next(file for file in version.files if file.path == "model.onnx")
    for number, left in enumerate((b"z" * 1000, b"z" * MIB, b"z" * (MIB + 5))):
        target = tmp_path / str(number)
        (target / ".partial").mkdir(parents=True)
        (target / ".partial" / weights.sha256).write_bytes(left)
        pull_from(bundle_store, target)
        assert served_text(target) == "one"


HARM: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "cut off": lambda data: data[:-1],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"more",
    "other": lambda data: b"import os",
}


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("path", ["model.onnx", "manifest.json"])
def test_a_damaged_object_is_refused_and_the_old_version_serves(
    bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path, harm: str, path: str
) -> None:
    publish_to(bundle_store, bundle("one"))
    pull_from(bundle_store, tmp_path / "dest")
    version = publish_to(bundle_store, bundle("two")).version
    file = next(file for file in version.files if file.path == path)
    name = object_name(file.sha256)
    put(bundle_store, name, HARM[harm](bundle_store.read_tagged(name).data))
    with pytest.raises(ManifestError, match="not those published"):
        pull_from(bundle_store, tmp_path / "dest")
    assert served_text(tmp_path / "dest") == "one"
    assert publish_to(bundle_store, bundle("two"), rereads=True).uploaded == 1
    pull_from(bundle_store, tmp_path / "dest")
    assert served_text(tmp_path / "dest") == "two"


def test_a_missing_object_is_refused_and_the_old_version_serves(
    bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    publish_to(bundle_store, bundle("one"))
    pull_from(bundle_store, tmp_path / "dest")
    version = publish_to(bundle_store, bundle("two")).version
    bundle_store.remove(object_name(next(file for file in version.files if file.path == "model.onnx").sha256))
    with pytest.raises(ManifestError, match=r"is missing\. Publish the bundle again"):
        pull_from(bundle_store, tmp_path / "dest")
    assert served_text(tmp_path / "dest") == "one"


EVIL_NAMES = [
    "../../evil",
    "/tmp/relabel-evil",
    "a/../../../evil",
    "C:/evil",
    "..\\evil",
    "evil\0",
    "MODEL.ONNX",
    "manifest.json/x",
    ".",
    "a//b",
    "nul",
]


@pytest.mark.parametrize("name", EVIL_NAMES)
def test_a_version_with_a_name_that_escapes_or_collides_is_refused_before_anything_is_made(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    """A publisher of evil intent: objects, record and pointer all agree with one another."""
    publish_to(local_bundle_store, bundle("one"))
    pull_from(local_bundle_store, tmp_path / "dest")
    version = publish_to(local_bundle_store, bundle("two")).version
    put(local_bundle_store, object_name(sha256_bytes(b"evil")), b"evil")
    evil = {"path": name, "size_bytes": 4, "sha256": sha256_bytes(b"evil")}

    def added(held: Any) -> Any:
        return {**held, "body": {**held["body"], "files": [*held["body"]["files"], evil]}}

    change(local_bundle_store, version_name("ecom", version.version), added)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    for at in ("stable", version.version):
        with pytest.raises(ManifestError, match="refuses the file name"):
            pull_from(local_bundle_store, tmp_path / "dest", at)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    assert not Path("/tmp/relabel-evil").exists()
    assert served_text(tmp_path / "dest") == "one"


def test_a_record_that_lists_other_files_than_the_bundles_own_manifest_is_refused(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    """A file slipped into a bundle: each digest is right, and the manifest does not know it."""
    publish_to(local_bundle_store, bundle("one"))
    pull_from(local_bundle_store, tmp_path / "dest")
    version = publish_to(local_bundle_store, bundle("two")).version
    put(local_bundle_store, object_name(sha256_bytes(b"evil")), b"evil")
    evil = {"path": "load.py", "size_bytes": 4, "sha256": sha256_bytes(b"evil")}
    for files in ([*version.body["files"], evil], version.body["files"][1:]):
        change(
            local_bundle_store,
            version_name("ecom", version.version),
            lambda held, files=files: {**held, "body": {**held["body"], "files": files}},
        )  # type: ignore[misc]
        with pytest.raises(ManifestError):
            pull_from(local_bundle_store, tmp_path / "dest", version.version)
    assert served_text(tmp_path / "dest") == "one"
    assert [path.name for path in (tmp_path / "dest" / ".versions").iterdir()] == [
        load_channel(local_bundle_store, "ecom", "stable").moves[0].version
    ]


def test_a_record_that_is_not_the_one_the_channel_names_is_refused(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    publish_to(local_bundle_store, bundle("one"))
    version = publish_to(local_bundle_store, bundle("two")).version
    other = load_version(
        local_bundle_store, "ecom", load_channel(local_bundle_store, "ecom", "stable").moves[0].version
    )
    files = other.body["files"]
    change(
        local_bundle_store,
        version_name("ecom", version.version),
        lambda held: {**held, "body": {**held["body"], "files": files}},
    )
    with pytest.raises(ManifestError, match="is not the record that was named"):
        pull_from(local_bundle_store, tmp_path / "dest")


def test_links_left_in_the_unpacking_folder_are_not_written_through(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    version = publish_to(local_bundle_store, bundle("one")).version
    building = tmp_path / "dest" / ".versions" / f".new-{version.sha256[:16]}"
    building.mkdir(parents=True)
    (tmp_path / "precious").write_text("mine")
    (building / "model.onnx").symlink_to(tmp_path / "precious")
    (building / "tokenizer").symlink_to(tmp_path)
    (building / "unlisted.py").write_text("import os")
    pull_from(local_bundle_store, tmp_path / "dest")
    assert served_text(tmp_path / "dest") == "one"
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "tokenizer.json").exists()


def test_a_version_can_be_pulled_by_its_name(bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path) -> None:
    first = publish_to(bundle_store, bundle("one"), version="1.0").version
    publish_to(bundle_store, bundle("two"), version="2.0")
    pull_from(bundle_store, tmp_path / "dest", first.version)
    assert served_text(tmp_path / "dest") == "one"
    with pytest.raises(ManifestError, match="neither a channel nor a version"):
        pull_from(bundle_store, tmp_path / "dest", "3.0")


def test_one_destination_holds_one_bundle(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    publish_to(local_bundle_store, bundle("one"))
    publish_to(local_bundle_store, bundle("two"), name="other")
    pull_from(local_bundle_store, tmp_path / "dest")
    with pytest.raises(ManifestError, match="holds ecom; other needs a folder of its own"):
        pull_from(local_bundle_store, tmp_path / "dest", name="other")


def test_a_folder_that_no_pull_made_is_left_alone(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    publish_to(local_bundle_store, bundle("one"))
    (tmp_path / "dest" / "current").mkdir(parents=True)
    (tmp_path / "dest" / "current" / "mine").write_text("mine")
    with pytest.raises(ManifestError, match="is not a link that a pull made"):
        pull_from(local_bundle_store, tmp_path / "dest")
    assert (tmp_path / "dest" / "current" / "mine").read_text() == "mine"


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


def test_a_pointer_of_the_same_sequence_to_another_version_is_refused(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    publish_to(local_bundle_store, bundle("one"))
    two = publish_to(local_bundle_store, bundle("two"), None).version
    old = local_bundle_store.read_tagged(channel_name("ecom", "stable")).data
    pull_from(local_bundle_store, tmp_path / "dest")
    local_bundle_store.remove(channel_name("ecom", "stable"))
    move_channel(local_bundle_store, "ecom", "stable", None, two, "set", key=None)
    with pytest.raises(GateError, match=r"downgraded: .* another version under it"):
        pull_from(local_bundle_store, tmp_path / "dest")
    put(local_bundle_store, channel_name("ecom", "stable"), old)
    assert not pull_from(local_bundle_store, tmp_path / "dest").has_switched


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


class TestWithAKey:
    """Somebody can write to the store, and does not have the key."""

    @pytest.fixture
    def served(
        self, local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path, keys: dict[str, Path]
    ) -> Path:
        publish_to(local_bundle_store, bundle("one"), key=SigningKey(str(keys["ours"])))
        self.pull(local_bundle_store, tmp_path / "dest", keys)
        return tmp_path / "dest"

    def pull(self, bundle_store: Store, target: Path, keys: dict[str, Path], *names: str, at: str = "stable") -> None:
        pull_from(bundle_store, target, at, trust=trusted_keys([str(keys[name]) for name in names or ("ours.pub",)]))

    def refused(self, bundle_store: Store, target: Path, keys: dict[str, Path], said: str) -> None:
        with pytest.raises(GateError, match=said):
            self.pull(bundle_store, target, keys)
        assert served_text(target) == "one"

    def test_a_new_version_signed_by_any_trusted_key_serves(
        self, local_bundle_store: Store, served: Path, bundle: Callable[..., Path], keys: dict[str, Path]
    ) -> None:
        publish_to(local_bundle_store, bundle("two"), key=SigningKey(str(keys["theirs"])))
        self.refused(local_bundle_store, served, keys, "trusted: ")
        self.pull(local_bundle_store, served, keys, "ours.pub", "theirs.pub")
        assert served_text(served) == "two"

    def test_an_unsigned_pointer_to_a_signed_version_is_refused(
        self, local_bundle_store: Store, served: Path, bundle: Callable[..., Path], keys: dict[str, Path]
    ) -> None:
        """Else anybody who can write could move the channel to any old version with a known hole."""
        two = publish_to(local_bundle_store, bundle("two"), None, key=SigningKey(str(keys["ours"]))).version
        put(local_bundle_store, channel_name("ecom", "stable"), self.moved(local_bundle_store, two).record())
        self.refused(local_bundle_store, served, keys, "channels/stable.json: no valid signature .*signed by nobody")

    def test_a_signed_pointer_to_an_unsigned_version_is_refused(
        self, local_bundle_store: Store, served: Path, bundle: Callable[..., Path], keys: dict[str, Path]
    ) -> None:
        done = publish_to(local_bundle_store, bundle("two"), key=SigningKey(str(keys["ours"])))
        change(local_bundle_store, version_name("ecom", done.version.version), lambda held: {**held, "signatures": []})
        self.refused(local_bundle_store, served, keys, "versions/.*: no valid signature .*signed by nobody")

    def test_a_signature_of_one_record_does_not_are_for_another(
        self, local_bundle_store: Store, served: Path, bundle: Callable[..., Path], keys: dict[str, Path]
    ) -> None:
        signed = load_channel(local_bundle_store, "ecom", "stable")
        two = publish_to(local_bundle_store, bundle("two"), None).version
        moved = self.moved(local_bundle_store, two)
        held = json.loads(moved.record())
        put(
            local_bundle_store,
            channel_name("ecom", "stable"),
            json.dumps({**held, "signatures": list(signed.signatures)}).encode(),
        )
        self.refused(local_bundle_store, served, keys, "no valid signature")

    def test_a_pointer_of_another_channel_or_bundle_does_not_serve_for_this_one(
        self, local_bundle_store: Store, served: Path, bundle: Callable[..., Path], keys: dict[str, Path]
    ) -> None:
        ours = SigningKey(str(keys["ours"]))
        publish_to(local_bundle_store, bundle("two"), "candidate", key=ours)
        publish_to(local_bundle_store, bundle("three"), key=ours, name="other")
        for source in (channel_name("ecom", "candidate"), channel_name("other", "stable")):
            put(local_bundle_store, channel_name("ecom", "stable"), local_bundle_store.read_tagged(source).data)
            with pytest.raises(ManifestError, match="is another channel's record"):
                self.pull(local_bundle_store, served, keys)
            assert served_text(served) == "one"

    def test_an_old_signed_pointer_put_back_is_a_downgrade(
        self, local_bundle_store: Store, served: Path, bundle: Callable[..., Path], keys: dict[str, Path]
    ) -> None:
        old = local_bundle_store.read_tagged(channel_name("ecom", "stable")).data
        publish_to(local_bundle_store, bundle("two"), key=SigningKey(str(keys["ours"])))
        self.pull(local_bundle_store, served, keys)
        put(local_bundle_store, channel_name("ecom", "stable"), old)
        with pytest.raises(GateError, match="downgraded"):
            self.pull(local_bundle_store, served, keys)
        assert served_text(served) == "two"

    @pytest.mark.parametrize("path", ["model.onnx", "README.md"])
    def test_not_one_byte_of_a_signed_bundle_can_be_changed(
        self,
        local_bundle_store: Store,
        served: Path,
        bundle: Callable[..., Path],
        keys: dict[str, Path],
        path: str,
    ) -> None:
        version = publish_to(local_bundle_store, bundle("two"), key=SigningKey(str(keys["ours"]))).version
        evil = {"path": path, "size_bytes": 4, "sha256": sha256_bytes(b"evil")}
        put(local_bundle_store, object_name(sha256_bytes(b"evil")), b"evil")

        def swapped(held: Any) -> Any:
            files = [evil if file["path"] == path else file for file in held["body"]["files"]]
            return {**held, "body": {**held["body"], "files": files}}

        change(local_bundle_store, version_name("ecom", version.version), swapped)
        with pytest.raises(ManifestError, match="is not the record that was named"):
            self.pull(local_bundle_store, served, keys)
        with pytest.raises(GateError, match="no valid signature"):
            self.pull(local_bundle_store, served, keys, at=version.version)
        assert served_text(served) == "one"

    def moved(self, bundle_store: Store, version: Any) -> Any:
        """The pointer that somebody without the key would write."""
        from dataclasses import replace

        held = load_channel(bundle_store, "ecom", "stable")
        move = replace(
            held.head, sequence=held.head.sequence + 1, version=version.version, version_sha256=version.sha256
        )
        return replace(held, moves=(*held.moves, move), signatures=())


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


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: (path / "model.onnx").unlink(),
        lambda path: (path / "manifest.json").write_text("{}"),
        shutil.rmtree,
    ],
)
def test_a_rollback_to_what_is_not_whole_is_refused(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path, harm: Callable[[Path], Any]
) -> None:
    first = publish_to(local_bundle_store, bundle("one")).version
    pull_from(local_bundle_store, tmp_path / "dest")
    publish_to(local_bundle_store, bundle("two"))
    pull_from(local_bundle_store, tmp_path / "dest")
    harm(tmp_path / "dest" / ".versions" / first.version)
    with pytest.raises(ManifestError, match=r"model\.onnx|manifest\.json|is missing"):
        roll_back_in(tmp_path / "dest")
    assert served_text(tmp_path / "dest") == "two"


def test_no_space_for_a_version_is_reported_before_it_is_fetched(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_to(local_bundle_store, bundle("one"))
    pull_from(local_bundle_store, tmp_path / "dest")
    publish_to(local_bundle_store, bundle("two"))
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: os.terminal_size((0, 0)) and type("Usage", (), {"free": 10})()
    )
    with pytest.raises(DiskFullError, match="10 are free"):
        pull_from(local_bundle_store, tmp_path / "dest")
    assert served_text(tmp_path / "dest") == "one"


@pytest.mark.parametrize("state", ["", "{", "[]", '{"format": 9}', '{"format": 1}', '{"format": 1, "name": 3}'])
def test_a_damaged_state_file_is_reported_and_what_serves_goes_on(
    local_bundle_store: Store, bundle: Callable[..., Path], tmp_path: Path, state: str
) -> None:
    publish_to(local_bundle_store, bundle("one"))
    pull_from(local_bundle_store, tmp_path / "dest")
    publish_to(local_bundle_store, bundle("two"))
    (tmp_path / "dest" / ".pull.json").write_text(state)
    with pytest.raises(ManifestError, match=r"\.pull\.json"):
        pull_from(local_bundle_store, tmp_path / "dest")
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


def test_concurrent_pulls_into_one_destination_end_with_one_whole_version(url: str, tmp_path: Path) -> None:
    import subprocess
    import sys

    from relabel.manifests.store import open_bundle_store

    publish_to(open_bundle_store(url, Storage()), write_bundle(tmp_path / "b", "one", size=9 * MIB))
    command = [sys.executable, "-m", "relabel", "pull", f"{url}/ecom", str(tmp_path / "dest")]
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(3)]
    ended = [(process.communicate(timeout=60)[1], process.returncode) for process in processes]
    assert {code for _, code in ended} <= {0, 10, 75}, ended
    assert [code for _, code in ended].count(0) == 1
    assert served_text(tmp_path / "dest") == "one"
