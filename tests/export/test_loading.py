"""A bundle is opened only as it was sealed: the loader finds whatever happened to a file, and says who and how."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relabel.export.bundles import open_bundle
from relabel.export.loader import BundleError, Student, check_files, read_manifest
from tests.export.conftest import HOSTILE
from tests.publish.test_puller import HARMS


def load(folder: Path) -> None:
    """What a server does first."""
    check_files(folder.resolve(), read_manifest(folder.resolve()))


@pytest.fixture
def dest(bundle: Path, tmp_path: Path, relabel: Callable[..., Any]) -> Path:
    """A folder that a bundle was pulled to."""
    assert relabel("publish", str(bundle), str(tmp_path / "store"), "--channel", "stable", "--anyway").code == 0
    assert relabel("pull", f"{tmp_path}/store/tiny", str(tmp_path / "dest")).code == 0
    return tmp_path / "dest"


def test_whatever_happens_to_a_file_that_serves_the_loader_names_it(dest: Path, tmp_path: Path) -> None:
    load(dest / "current")
    names = [file.path for file in open_bundle((dest / "current").resolve()).all_files]
    assert {"load.py", "manifest.json", "tokenizer.json", "model.onnx"} <= set(names)
    for number, (harm, name) in enumerate((harm, name) for harm in HARMS for name in names):
        broken = tmp_path / str(number)
        shutil.copytree(dest, broken, symlinks=True)
        HARMS[harm]((broken / "current").resolve() / name)
        with pytest.raises(BundleError) as refused:
            Student(broken / "current", provider="cpu")
        assert name in str(refused.value), (harm, name, str(refused.value))
        shutil.rmtree(broken)


DAMAGES: tuple[Any, ...] = (None, -1, [], "x")
RELIED_ON = [
    ("name",),
    *[(key,) for key in ("inputs", "heads", "models", "files")],
    *[("heads", name) for name in ("relevance", "subject")],
    *[("models", 0, key) for key in ("path", "format", "precision")],
    *[("files", 0, key) for key in ("path", "sha256")],
    *[("inputs", key) for key in ("kind", "tokenizer", "max_tokens", "names", "padding_side", "truncation_side")],
    *[("inputs", key) for key in ("pad_id", "pad_type_id")],
    ("inputs", "names", 0),
]


@pytest.mark.parametrize("keys", RELIED_ON, ids=lambda keys: ".".join(map(str, keys)))
def test_whatever_a_damaged_manifest_says_a_loader_answers_or_refuses_the_bundle(
    bundle: Path, tmp_path: Path, keys: tuple[Any, ...]
) -> None:
    """No digest proves the manifest itself where it was not pulled."""
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    refused = 0
    for damage in (*DAMAGES, "deleted"):
        held = json.loads((bundle / "manifest.json").read_text())
        *above, last = keys
        place = functools.reduce(lambda one, key: one[key], above, held)
        place[last] = damage
        if damage == "deleted":
            del place[last]
        (copy / "manifest.json").write_text(json.dumps(held))
        try:
            student = Student(copy, provider="cpu", precision="fp32")
        except BundleError:
            refused += 1
        else:
            assert len(student.probabilities(HOSTILE)["relevance"]) == len(HOSTILE), damage
    assert refused


def test_a_loaded_student_says_its_version_and_gives_numbers_to_rank_by(bundle: Path) -> None:
    student = Student(bundle, provider="cpu")
    assert student.version == open_bundle(bundle).version
    probs = student.probabilities(HOSTILE)["relevance"]
    np.testing.assert_allclose(student.expected_grades(HOSTILE), probs @ [0.0, 1.0, 2.0], atol=1e-6)
    scores = student.score(HOSTILE)
    assert all(type(score) is float and 0 <= score <= 1 for score in scores)
    np.testing.assert_allclose(scores, student.expected_grades(HOSTILE) / 2)
    assert student.score([]) == []
    assert student.expected_grades([]).shape == (0,)
