"""What the seconds of a step are said to be spent on."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from relabel.distill.training.curves import SECONDS_NAME, StepClock


class Hands:
    """A clock that is moved by hand."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    found = Hands()
    monkeypatch.setattr("relabel.distill.training.curves.time", found)
    return found


def test_each_second_is_one_parts_and_those_between_steps_are_nobodys(hands: Hands, tmp_path: Path) -> None:
    clock = StepClock(("write", "learn"), rest="update")
    assert clock.mean() == {}
    for step, seconds in ((1, 4.0), (2, 8.0)):
        clock.begin_step()
        with clock.part("learn"):
            hands.now += 1
            with clock.part("write"):
                hands.now += seconds
            hands.now += 1
        hands.now += 3
        clock.end_step(step)
        clock.end_step(step)  # at an epoch's end nothing was begun
        with clock.part("write"):  # a look at held-out rows
            hands.now += 50
    assert clock.steps == [
        (1, {"write": 4.0, "learn": 2.0, "update": 3.0}),
        (2, {"write": 8.0, "learn": 2.0, "update": 3.0}),
    ]
    assert clock.mean() == {"write": 6.0, "learn": 2.0, "update": 3.0}
    clock.write(tmp_path)
    rows = pq.read_table(tmp_path / SECONDS_NAME).to_pylist()
    assert rows[0] == {"step": 1, "part": "write", "seconds": 4.0}
    assert len(rows) == 6
