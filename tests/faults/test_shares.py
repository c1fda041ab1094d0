"""What the figures say of how much was tried, and that a run without a limit of time fails where
it tried too little.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults.conftest import LEVEL, count
from tests.faults.figures import Figures


def ended(folder: Path, level: str, *tests: tuple[int, int]) -> tuple[int, dict[str, Any]]:
    """Exit status and figures of a session whose sweeps tried so many of so many."""
    figures, session = Figures(folder / "faults.json", level), SimpleNamespace(exitstatus=0)
    for number, (tried, planned) in enumerate(tests):
        report = SimpleNamespace(
            nodeid=f"tests/faults/test_it.py::test_{number}", when="call", failed=False, skipped=False, duration=1.0,
            user_properties=[("schedules", tried), ("planned", planned), ("failures", 0)],
        )  # fmt: skip
        figures.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    figures.pytest_sessionfinish(session)  # type: ignore[arg-type]
    held = json.loads((folder / "faults.json").read_text()) if (folder / "faults.json").exists() else {}
    return session.exitstatus, held


def test_the_share_that_was_tried_is_a_figure_of_every_sweep_and_of_all(tmp_path: Path) -> None:
    status, found = ended(tmp_path, "full", (10, 40), (60, 60))
    assert (status, found["level"], found["share"], found["least_share"]) == (0, "full", 0.7, 0.25)
    assert [held["share"] for held in found["tests"].values()] == [0.25, 1.0]
    assert "70 of 100 (70%; the least tried 25%)" in (tmp_path / "faults.md").read_text()


@pytest.mark.parametrize(("tried", "status"), [(80, 0), (79, 1)])
def test_without_a_limit_of_time_a_sweep_that_tried_less_than_four_fifths_fails(
    tried: int, status: int, tmp_path: Path
) -> None:
    assert ended(tmp_path, "long", (5, 5), (tried, 100))[0] == status


def test_the_short_cut_writes_no_figures(tmp_path: Path) -> None:
    assert ended(tmp_path, "short", (1, 100)) == (0, {})


def test_a_level_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count(full=7, short=3) == (3 if LEVEL == "short" else 7)
    monkeypatch.setattr("tests.faults.conftest.IS_LONG", True)
    monkeypatch.setattr("tests.faults.conftest.IS_FULL", True)
    assert (count(full=7, short=3), count(full=7, short=3, long=90)) == (7, 90)
