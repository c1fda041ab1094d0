"""The page of what is stable says the versions that are written, and a release has one version and one section of the
CHANGELOG.
"""

import ast
import inspect
import json
import re
import tomllib
from pathlib import Path

import huggingface_hub

import relabel
from relabel.distill.students.spec import STUDENT_MANIFEST_VERSION
from relabel.distill.teachers.spec import TEACHER_MANIFEST_VERSION
from relabel.export.bundles import MANIFEST_NAME, seal_bundle
from relabel.manifests.labels import ROWS_VERSION, SCHEMA_VERSION
from relabel.manifests.plan import PLAN_VERSION, RECEIPT_VERSION
from relabel.manifests.run_manifest import MANIFEST_VERSION
from tests.docs.pages import DOCS, ROOT, blocks

PAGE = (DOCS / "stable.md").read_text(encoding="utf-8")


def version_of_a_bundle(folder: Path) -> int:
    (folder / "model.onnx").write_bytes(b"graph")
    seal_bundle(folder, {"name": "one", "lineage": {}})
    return int(json.loads((folder / MANIFEST_NAME).read_bytes())["format"])


def test_the_versions_of_files_are_those_that_are_written(tmp_path: Path) -> None:
    rows = re.findall(r"^\| (.+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert [int(number) for _, number in rows] == [
        PLAN_VERSION,
        RECEIPT_VERSION,
        MANIFEST_VERSION,
        SCHEMA_VERSION,
        ROWS_VERSION,
        STUDENT_MANIFEST_VERSION,
        TEACHER_MANIFEST_VERSION,
        version_of_a_bundle(tmp_path),
    ]


def test_the_python_names_are_those_of_the_package() -> None:
    (row,) = re.findall(r"^\| \[Python\].*$", PAGE, re.MULTILINE)
    before = row.partition("; for [labelers]")[0]
    assert {name.removeprefix("relabel.") for name in re.findall(r"`([\w.]+)`", before)} == set(relabel.__all__)


def test_the_version_is_written_once() -> None:
    """In pyproject.toml; the package asks what was installed."""
    number = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    folders = ("manifests", "labelers", "distill", "export", "jobs")
    files = [ROOT / "relabel" / "__init__.py", *(path for name in folders for path in (ROOT / name).rglob("*.py"))]
    assert [path.name for path in files if f'"{number}"' in path.read_text(encoding="utf-8")] == []
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == number


def test_the_calls_of_the_hub_are_those_of_its_library() -> None:
    calls = []
    for block in blocks(DOCS / "hub.md"):
        if block.language == "python" and "HfApi" in block.text:
            calls += [node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Call)]
    methods = [call for call in calls if isinstance(call.func, ast.Attribute)]
    assert len(methods) == 4
    for call in methods:
        assert isinstance(call.func, ast.Attribute)
        method = getattr(huggingface_hub.HfApi(), call.func.attr)
        values = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
        inspect.signature(method).bind(*map(ast.literal_eval, call.args), **values)
