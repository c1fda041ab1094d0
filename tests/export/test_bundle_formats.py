"""A form of a model that somebody registers: checked before anything is made, written for each precision it knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from relabel.export import exporters
from relabel.export.bundles import Bundle, open_bundle
from relabel.export.exporting import export_bundle
from relabel.export.parity import PairsFile
from relabel.export.specs import ExportSpec
from relabel.manifests.errors import MissingExtraError
from relabel.manifests.files import Storage
from tests.jobs.conftest import Outcome


class Recorded:
    """Remembers what it was asked for."""

    precisions = ("fp32", "bf16")

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.is_missing = False

    def check(self) -> None:
        if self.is_missing:
            raise MissingExtraError("no recorder here")

    def add(self, bundle: Path, precision: str) -> Bundle:
        found = open_bundle(bundle)
        self.asked.append((precision, (bundle / "manifest.json").is_file()))
        return found


RECORDED = Recorded()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made = Recorded()
    monkeypatch.setitem(exporters.FORMATS, "recorded", f"{__name__}:RECORDED")
    monkeypatch.setattr(f"{__name__}.RECORDED", made)
    return made


def test_a_registered_form_is_asked_for_each_precision_that_it_knows(
    student: Path, graded_file: Path, tmp_path: Path, recorded: Recorded
) -> None:
    spec = ExportSpec(formats=("onnx", "recorded"), precisions=("fp32", "int8", "bf16"))
    export_bundle(student, tmp_path / "b", spec, Storage(), pairs=PairsFile(str(graded_file), "grade"), provider="cpu")
    assert recorded.asked == [("fp32", True), ("bf16", True)]


def test_one_that_cannot_be_made_here_ends_the_export_before_anything_is_written(
    student: Path, tmp_path: Path, recorded: Recorded
) -> None:
    recorded.is_missing = True
    with pytest.raises(MissingExtraError, match="no recorder here"):
        export_bundle(student, tmp_path / "b", ExportSpec(formats=("recorded",)), Storage(), provider="cpu")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_form_is_refused(student: Path, tmp_path: Path, relabel: Callable[..., Outcome]) -> None:
    line = ("export", str(student), "--to", str(tmp_path / "b"))
    relabel(*line, "--formats", "onnx,tensort").refused(3, 'No format "tensort"', "Did you mean tensorrt?")
