"""Where `relabel report` writes: never over what somebody needs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.report.conftest import Judgment, forge_run, plain_pairs, write_table


@pytest.fixture
def run(folder: Path) -> Path:
    """A run in `out`, its pairs in pairs.parquet."""
    return forge_run(
        folder / "out", write_table(folder / "pairs.parquet", plain_pairs(4, 3)), lambda pair: Judgment(pair.row_id % 3)
    )


@pytest.mark.parametrize("to", ["out/new.html", "./out/../out/plan.json", "pairs.parquet"])
def test_what_is_reported_on_is_never_written_to(run: Path, relabel: Callable[..., Any], folder: Path, to: str) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    relabel("report", "out", "--gold", "pairs.parquet", "--to", to, "--force").refused(2, "is in the input")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_grades_after_a_pattern_are_not_written_over(run: Path, relabel: Callable[..., Any], folder: Path) -> None:
    before = (folder / "pairs.parquet").read_bytes()
    relabel("report", "out", "--gold", "pair*.parquet", "--to", "pairs.parquet", "--force").refused(
        2, "is in the input"
    )
    assert (folder / "pairs.parquet").read_bytes() == before


def test_a_file_of_somebody_else_is_replaced_only_with_force(
    run: Path, relabel: Callable[..., Any], folder: Path
) -> None:
    (folder / "notes.html").write_text("<!DOCTYPE html>\n<title>notes</title>")
    relabel("report", "out", "--to", "notes.html").refused(2, "notes.html: is there already", "--force")
    assert "notes" in (folder / "notes.html").read_text()
    assert relabel("report", "out", "--to", "notes.html", "--force").code == 0
    assert "finished, every row accounted for" in (folder / "notes.html").read_text()


def test_an_earlier_report_is_replaced_whole(run: Path, relabel: Callable[..., Any], folder: Path) -> None:
    assert relabel("report", "out", "--max-rows", "0").code == 0
    first = (folder / "report.html").read_bytes()
    assert relabel("report", "out", "--force").code == 0
    assert (folder / "report.html").read_bytes() != first
    assert [path.name for path in folder.glob(".*")] == []
