"""The active version is whole and proven, whatever comes from the store; a refusal leaves it as it was."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relabel.export.publishing import roll_back
from relabel.export.store import channel_name, object_name
from relabel.manifests.errors import (
    GateError,
    LockHeldError,
    ManifestError,
)
from relabel.manifests.store import Store
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
    old = local_bundle_store.read_tagged(channel_name("ecom", "stable")).data
    publish_to(local_bundle_store, bundle("two"))
    pull_from(local_bundle_store, tmp_path / "dest")
    Path(local_bundle_store.url, channel_name("ecom", "stable")).write_bytes(old)
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
    old = local_bundle_store.read_tagged(channel_name("ecom", "stable")).data
    version = publish_to(local_bundle_store, bundle("two")).version
    local_bundle_store.remove(object_name(version.files[0].sha256))
    with pytest.raises(ManifestError):
        pull_from(local_bundle_store, tmp_path / "dest")
    Path(local_bundle_store.url, channel_name("ecom", "stable")).write_bytes(old)
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
