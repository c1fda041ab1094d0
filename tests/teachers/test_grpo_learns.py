"""GRPO learns: a tiny model that knows the format alone finds out which word of a document means which grade.
`benchmarks/grpo_learns.py` shows the whole curve.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.full
def test_the_mean_reward_doubles_with_half_of_the_rollouts(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from benchmarks.grpo_learns import make_setting, show_format, train

    setting = make_setting("r1", tmp_path)
    show_format(setting, "r1", steps=100, batch=16)
    trainer = train(setting, "r1", tmp_path, steps=60, group=8, rate=2e-3)
    rewards = [value for _, value in trainer.curve.series("train", "reward")]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-5:]) / 5
    assert first < 0.45
    assert last > 0.65, rewards
