"""What a training's rollouts leave on the disk."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from relabel.distill.teachers.rewards import ROLLOUTS_NAME, RolloutLog, Score
from relabel.distill.teachers.rollouts import Rollout, WrittenTurn
from relabel.manifests.asks import Ask
from relabel.manifests.labels import Pair

STEPS, ROWS = 8, 500
"""Some megabytes of answers: Parquet's pages restart after one."""


def write_log(folder: Path, *, stops: tuple[int, ...]) -> bytes:
    """A log that was flushed after some of them."""
    chance = random.Random(5)
    folder.mkdir()
    log = RolloutLog(folder)
    for step in range(1, STEPS + 1):
        rollouts = [_rollout(row, chance.randbytes(500).hex()) for row in range(ROWS)]
        rewards = [chance.random() for _ in rollouts]
        scores = [Score(reward) for reward in rewards]
        log.add(step, rollouts, scores, advantages=rewards, node_advantages=None, group=4)
        if step in stops:
            log.flush(step)
    log.write(folder, step=STEPS)
    return (folder / ROLLOUTS_NAME).read_bytes()


def _rollout(row: int, text: str) -> Rollout:
    ask = Ask("score", (), None, 8)
    return Rollout(Pair(row, "", "", "", ""), [1], [2], [True], [WrittenTurn(ask, 0, [2], text)])


@pytest.mark.parametrize("stops", [(3,), (2, 5, 6)])
def test_a_log_is_the_same_bytes_however_often_its_training_was_stopped(tmp_path: Path, stops: tuple[int, ...]) -> None:
    assert write_log(tmp_path / "stopped", stops=stops) == write_log(tmp_path / "whole", stops=())
