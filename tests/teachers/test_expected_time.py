"""The time of a training by its large sums: which there are, and how often."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distill.teachers import expected_time
from distill.teachers.trainers import TrainingEstimate
from distill.training.sections import TrainingSection
from tests.teachers.models import write_tiny_decoder

ESTIMATE = TrainingEstimate(rows=8, examples=32, steps=4, tokens=3200, answer_tokens=640, memory_bytes=1)
"""Four steps of two batches of four examples, of 100 tokens each."""


class Counted:
    """A pace of a second a batch forward, of ten an update, and of a hundredth an answer's token."""

    def __init__(self, *_: Any) -> None: ...

    def product(self, tokens: int, answer_tokens: int) -> float:
        return 0.01 if tokens == answer_tokens else {400: 0.75, 800: 1.75}[tokens]

    def attention(self, examples: int, tokens: int) -> float:
        assert (examples, tokens) in {(4, 100), (4, 200)}
        return 0.25

    def update(self) -> float:
        return 10.0


def seconds(monkeypatch: pytest.MonkeyPatch, *, weights: int | None = 1, **changes: Any) -> float | None:
    monkeypatch.setattr(expected_time, "DevicePace", Counted)
    monkeypatch.setattr(expected_time, "set_threads", lambda _: None)
    train = TrainingSection(epochs=1, batch_size=4, accumulation=2, learning_rate=1e-4, max_tokens=512)
    if changes.pop("checkpointing", False):
        train = train.model_copy(update={"gradient_checkpointing": True})
    text = SimpleNamespace(num_attention_heads=2) if changes.pop("has_attention", True) else SimpleNamespace()
    base: Any = SimpleNamespace(num_weights=weights, config=SimpleNamespace(get_text_config=lambda: text))
    spec: Any = SimpleNamespace(train=train, **{"lora": None, **changes})
    found = expected_time.expected_time(spec, base, ESTIMATE)
    return None if found is None else found.seconds


def rollouts(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"vllm": None, "at_once": None, "updates": 1, "beta": 0.0, **changes})


def test_fine_tuning_reads_each_batch_and_learns_for_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds(monkeypatch) == pytest.approx(8 * 3 + 4 * 10)
    assert seconds(monkeypatch, checkpointing=True) == pytest.approx(8 * 4 + 4 * 10)
    assert seconds(monkeypatch, lora=object()) == pytest.approx(8 * 3)


def test_rollouts_are_written_once_and_learned_at_every_update(monkeypatch: pytest.MonkeyPatch) -> None:
    wrote = 640 / 8 * 0.01
    assert seconds(monkeypatch, rollouts=rollouts()) == pytest.approx(8 * 3 + 40 + 8 + wrote)
    assert seconds(monkeypatch, rollouts=rollouts(at_once=2)) == pytest.approx(8 * 3 + 40 + 8 + 4 * wrote)
    assert seconds(monkeypatch, rollouts=rollouts(beta=0.1)) == pytest.approx(8 * 3 + 40 + 2 * 8 + wrote)
    assert seconds(monkeypatch, rollouts=rollouts(updates=2)) == pytest.approx(16 * 3 + 40 + 8 + wrote)


def test_what_can_not_be_known_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds(monkeypatch, weights=None) is None
    assert seconds(monkeypatch, has_attention=False) is None
    assert seconds(monkeypatch, rollouts=rollouts(vllm=object())) is None


def test_a_model_without_attention_keeps_no_keys_and_values() -> None:
    from transformers import MambaConfig

    from labelers.engines.checkpoints import cache_bytes

    assert cache_bytes(MambaConfig(), 4) == 0


def test_a_batch_of_any_size_is_timed_without_its_memory(tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = write_tiny_decoder(tmp_path / "model")
    base: Any = SimpleNamespace(num_weights=10_000, config=AutoConfig.from_pretrained(folder))
    train = TrainingSection(device="cpu", precision="fp32", batch_size=10**12, max_tokens=64)
    spec: Any = SimpleNamespace(train=train, lora=None)
    for examples in (3, 10**12):
        tokens = 100 * examples
        estimate = TrainingEstimate(examples, examples, 1, tokens=tokens, answer_tokens=examples, memory_bytes=1)
        assert expected_time.expected_time(spec, base, estimate)


def test_the_pace_is_of_this_device_and_of_this_model(tmp_path: Path) -> None:
    """More layers of the same width take longer; numbers themselves are the machine's."""
    from transformers import AutoConfig

    from labelers.engines.checkpoints import count_parameters

    train = TrainingSection(device="cpu", precision="fp32", epochs=1, batch_size=1, learning_rate=1e-4, max_tokens=64)

    def pace(layers: int) -> Any:
        folder = write_tiny_decoder(tmp_path / str(layers), layers=layers)
        config = AutoConfig.from_pretrained(folder)
        base: Any = SimpleNamespace(config=config, num_weights=count_parameters(folder))
        return expected_time.DevicePace(train, base)

    few, many = pace(1), pace(64)
    assert 0 < few.product(64, 8) < many.product(64, 8)
    assert 0 < few.attention(2, 64) < many.attention(2, 64)
    assert 0 < few.update() < many.update()
