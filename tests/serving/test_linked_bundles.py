"""A bundle may be read through links that leave its folder, as those of a hub's cache: its bytes are what counts. Paths
in a manifest may not leave it, and where a pull serves a link is damage.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relabel.export.bundles import open_bundle
from relabel.export.conform import RerankServer, conform
from relabel.export.loader import BundleError, Encoder, Student, check_answers, read_manifest
from relabel.manifests.errors import ManifestError

PAIRS = [("red shoe", "a red shoe of the size"), ("lamp", "the small tent")]


def as_hub_cache(bundle: Path, place: Path) -> Path:
    """`snapshots/REVISION/file`, each a relative link to `blobs/SHA256`, and the hub's own note."""
    files = open_bundle(bundle).all_files
    (place / "blobs").mkdir(parents=True)
    for file in files:
        target = place / "snapshots" / "0123abc" / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        blob = place / "blobs" / file.sha256
        shutil.copy(bundle / file.path, blob)
        target.symlink_to(os.path.relpath(blob, target.parent))
    (place / "snapshots/0123abc/.gitattributes").write_text("*.onnx filter=lfs\n")
    return place / "snapshots" / "0123abc"


def as_absolute_links(bundle: Path, place: Path) -> Path:
    """A folder of links, as `cp -rs` makes it."""
    shutil.copytree(bundle, place, copy_function=lambda source, target: Path(target).symlink_to(source))
    return place


def as_links_to_folders(bundle: Path, place: Path) -> Path:
    """`ln -s BUNDLE/* .`: folders are links, too."""
    place.mkdir()
    for path in bundle.iterdir():
        (place / path.name).symlink_to(path)
    return place


def as_chain(bundle: Path, place: Path) -> Path:
    """Links to links, and the folder is one itself."""
    first = as_absolute_links(bundle, place.with_name("first"))
    as_absolute_links(first, place.with_name("second"))
    place.symlink_to("second")
    return place


LAYOUTS = {
    "a hub's cache": as_hub_cache,
    "absolute links": as_absolute_links,
    "links to folders": as_links_to_folders,
    "links to links": as_chain,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bundle_of_links_is_the_bundle(
    layout: str, bundle: Path, graded_file: Path, tmp_path: Path, serve: Callable[[Any], str], relabel: Any
) -> None:
    linked = LAYOUTS[layout](bundle, tmp_path / "linked")
    assert open_bundle(linked).version == open_bundle(bundle).version
    student = Student(linked, provider="cpu")
    wanted = Student(bundle, provider="cpu").expected_grades(PAIRS)
    np.testing.assert_array_equal(student.expected_grades(PAIRS), wanted)
    assert check_answers(student).has_passed
    encoder = Encoder(linked, read_manifest(linked)["inputs"])
    assert conform(linked, RerankServer(serve(student), "cohere", "", None, encoder)).verdict == "equal"
    done = relabel("score", str(linked), "--input", str(graded_file), "--to", str(tmp_path / "scores"))
    assert done.code == 0, done.err


def test_what_is_published_of_links_are_the_bytes(bundle: Path, tmp_path: Path, relabel: Any) -> None:
    linked = as_hub_cache(bundle, tmp_path / "linked")
    store, dest = str(tmp_path / "store"), tmp_path / "dest"
    assert relabel("publish", str(linked), store, "--channel", "stable", "--anyway").code == 0
    shutil.rmtree(tmp_path / "linked")
    assert relabel("pull", f"{store}/tiny", str(dest)).code == 0
    files = [path for path in (dest / "current").resolve().rglob("*") if not path.is_dir()]
    assert not [path for path in files if path.is_symlink()]
    assert open_bundle((dest / "current").resolve()).version == open_bundle(bundle).version


def other_bytes(linked: Path) -> None:
    (linked / "model.onnx").resolve().write_bytes(b"other")


def nothing_there(linked: Path) -> None:
    (linked / "model.onnx").resolve().unlink()


def a_folder(linked: Path) -> None:
    (linked / "model.onnx").unlink()
    (linked / "model.onnx").symlink_to("/tmp")


def a_circle(linked: Path) -> None:
    (linked / "model.onnx").unlink()
    (linked / "model.onnx").symlink_to("model.onnx")


def a_stranger(linked: Path) -> None:
    (linked / "extra").symlink_to("/etc/hostname")


def a_link_up(linked: Path) -> None:
    (linked / "up").symlink_to(linked.parent)


HARMS: dict[str, tuple[Callable[[Path], None], str]] = {
    "other bytes": (other_bytes, "model.onnx"),
    "nothing there": (nothing_there, "model.onnx.* is a link to .*, where nothing is"),
    "a folder": (a_folder, "model.onnx"),
    "a circle": (a_circle, "model.onnx.* is a link to model.onnx, where nothing is"),
    "a stranger": (a_stranger, "extra: is not in the manifest"),
    "a link up": (a_link_up, "is not in the manifest"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_links_to_what_the_manifest_does_not_name_are_refused(harm: str, bundle: Path, tmp_path: Path) -> None:
    linked = as_hub_cache(bundle, tmp_path / "linked")
    do, reason = HARMS[harm]
    do(linked)
    with pytest.raises(ManifestError, match=reason):
        open_bundle(linked)
    with pytest.raises(BundleError, match=reason):
        Student(linked, provider="cpu")


@pytest.mark.parametrize("path", ["../model.onnx", "/etc/hostname", "triton/../../model.onnx", ".."])
def test_a_path_in_a_manifest_never_leaves_the_folder(path: str, bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundles/copy"))
    shutil.copy(bundle / "model.onnx", tmp_path / "bundles/model.onnx")
    held = json.loads((copy / "manifest.json").read_text())
    for place in (("models", 0, "path"), ("inputs", "tokenizer"), ("files", 0, "path")):
        changed = json.loads(json.dumps(held))
        *above, last = place
        inner = changed
        for key in above:
            inner = inner[key]
        inner[last] = path
        (copy / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(BundleError, match="leaves the bundle's folder"):
            Student(copy, provider="cpu", check_digests=place[0] == "files")


def test_a_link_where_a_pull_serves_is_damage(bundle: Path, tmp_path: Path, relabel: Any) -> None:
    assert relabel("publish", str(bundle), str(tmp_path / "store"), "--channel", "stable", "--anyway").code == 0
    assert relabel("pull", f"{tmp_path}/store/tiny", str(tmp_path / "dest")).code == 0
    model = (tmp_path / "dest/current").resolve() / "model.onnx"
    model.rename(tmp_path / "elsewhere")
    model.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match=r"model\.onnx: is a link, and not what a pull wrote"):
        Student(tmp_path / "dest/current", provider="cpu")
    relabel("verify", str(tmp_path / "dest")).refused(3, "model.onnx: is a link, and not what a pull wrote")
