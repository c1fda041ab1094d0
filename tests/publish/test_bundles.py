"""A folder is a bundle only if every name, size and digest is what its manifest says, and no name can do harm."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relabel.export.bundles import open_bundle, read_manifest, seal_bundle
from relabel.manifests.errors import ManifestError
from tests.publish.conftest import change_json, write_bundle

FACTS: dict[str, Any] = {"name": "ecom", "lineage": {}}


def check_names(names: list[str], where: str) -> None:
    """A manifest that lists files of these names is read, or refused."""
    files = [{"path": name, "size_bytes": 1, "sha256": "0" * 64} for name in names]
    read_manifest(json.dumps({"kind": "bundle", "format": 1, **FACTS, "files": files}).encode(), where)


def test_the_same_files_and_facts_are_the_same_version_wherever_and_whenever_they_are_sealed(tmp_path: Path) -> None:
    folders = [write_bundle(tmp_path / name) for name in ("a", "b")]
    assert len({seal_bundle(folder, FACTS).version for folder in (*folders, *folders)}) == 1


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: (folder / "model.onnx").write_bytes(b"x" * 40), "model.onnx: is not what its manifest says"),
        (lambda folder: (folder / "model.onnx").write_bytes(b"x" * 39), "model.onnx: is not what its manifest says"),
        (lambda folder: (folder / "model.onnx").unlink(), "model.onnx: is missing"),
        (lambda folder: (folder / "extra.py").write_text("import os"), "extra.py: is not in the manifest"),
        (lambda folder: (folder / "link").symlink_to("/etc/passwd"), "link: is not in the manifest"),
        (
            lambda folder: ((folder / "model.onnx").unlink(), (folder / "model.onnx").symlink_to("README.md")),
            "model.onnx: is not what its manifest says",
        ),
        (lambda folder: os.mkfifo(folder / "pipe"), "pipe: is not in the manifest"),
        (lambda folder: (folder / "empty").mkdir(), "empty: is not in the manifest"),
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "not readable as JSON"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "not a JSON object"),
        (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "not readable as JSON"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe{}"), "not readable as JSON"),
    ],
)
def test_a_folder_that_is_not_its_manifest_is_refused(
    bundle: Callable[..., Path], harm: Callable[[Path], Any], said: str
) -> None:
    folder = bundle("one")
    harm(folder)
    with pytest.raises(ManifestError, match=said):
        open_bundle(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "run"}, "no bundle's manifest"),
        ({"format": 2}, "no bundle's manifest of format 1"),
        ({"name": ""}, "no bundle's manifest"),
        ({"lineage": None}, "no bundle's manifest"),
        ({"files": None}, "no bundle's manifest"),
        ({"files": [{"path": "a", "size_bytes": 1}]}, "`files` is no list of files"),
        ({"files": [{"path": "a", "size_bytes": True, "sha256": "0" * 64}]}, "`files` is no list of files"),
        ({"files": [{"path": "a", "size_bytes": -1, "sha256": "0" * 64}]}, "`files` is no list of files"),
        ({"files": [{"path": "a", "size_bytes": 2**80, "sha256": "0" * 64}]}, "`files` is no list of files"),
        ({"files": [{"path": "a", "size_bytes": 1, "sha256": "A" * 64}]}, "`files` is no list of files"),
        ({"files": [{"path": "a", "size_bytes": 1, "sha256": "../" + "0" * 61}]}, "`files` is no list of files"),
        ({"files": [{"path": "manifest.json", "size_bytes": 1, "sha256": "0" * 64}]}, "refuses the file name"),
        ({"files": [{"path": "../a", "size_bytes": 1, "sha256": "0" * 64}]}, "refuses the file name"),
        ({"note": "\ud800"}, "not readable as JSON"),
    ],
)
def test_a_hostile_manifest_is_refused(bundle: Callable[..., Path], change: dict[str, Any], said: str) -> None:
    folder = bundle("one")
    change_json(folder / "manifest.json", lambda held: {**held, **change})
    with pytest.raises(ManifestError, match=said):
        open_bundle(folder)


HOSTILE = [
    "",
    "/etc/passwd",
    "../up",
    "a/../../up",
    "a/..",
    ".",
    "./a",
    "a//b",
    "a/",
    "a/./b",
    "C:/windows",
    "c:evil",
    "a\\b",
    "..\\up",
    "\\\\host\\share",
    "a\0b",
    "a\nb",
    "a\x1b[2Jb",
    "a\u202eb",
    "a\u200bb",
    "a\ufeff",
    "file:stream",
    "con",
    "aux.txt",
    "a/NUL",
    "com1.onnx",
    "lpt9",
    "a.",
    "a ",
    " a",
    "a/b./c",
    "a" * 201,
    "/".join("a" * 17),
    "é" * 300,
    "e\u0301",
    "\ud800",
    "a*",
    "a?",
    'a"b',
    "<a>",
    "a|b",
    "\u2028",
]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name)[:40])
def test_a_name_that_could_do_harm_is_refused(name: str) -> None:
    with pytest.raises(ManifestError, match=r"refuses the file name|not readable as JSON"):
        check_names([name], "here")


@pytest.mark.parametrize(
    "names",
    [
        ["a", "a"],
        ["Model.onnx", "model.onnx"],
        ["straße", "STRASSE"],
        ["ﬁle", "file"],
        ["a", "a/b"],
        ["A/x", "a/y"],
        ["dir/Ä", "DIR/ä"],
        ["K", "\u212a"],
    ],
)
def test_names_that_fall_together_on_some_disk_are_refused(names: list[str]) -> None:
    with pytest.raises(ManifestError, match="refuses the file name"):
        check_names(names, "here")
    with pytest.raises(ManifestError, match="refuses the file name"):
        check_names(names[::-1], "here")


def test_ordinary_names_are_taken() -> None:
    check_names(
        [
            "model.onnx",
            "model.onnx.data",
            "a/b/c.json",
            ".gitattributes",
            "1/config.pbtxt",
            "a b.txt",
            "console",
        ],
        "here",
    )


@given(st.lists(st.text(max_size=12) | st.text("ab/.", max_size=5), max_size=6))
def test_names_that_are_taken_stay_inside_and_apart(names: list[str]) -> None:
    try:
        check_names(names, "here")
    except ManifestError:
        return
    root = Path("/root-of-all")
    places = {os.path.normpath(root / name).casefold() for name in names}
    assert len(places) == len(names)
    assert all(place.startswith("/root-of-all/") for place in places)
