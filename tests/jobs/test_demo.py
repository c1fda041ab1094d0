"""The demo goes the whole way: its last step, a pulled bundle asked through its own loader, says what its first ones
made.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.demo.demo_steps import Step, call, steps_of


def write_tiny_model(path: Path) -> Path:
    """A random BERT of one layer that reads 160 tokens."""
    import torch
    import transformers as tf

    from tests.distill.conftest import word_tokenizer

    tokenizer = word_tokenizer(has_types=True)
    tokenizer.model_max_length = 160
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer.save_pretrained(path)
    tf.BertModel(
        tf.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=160, pad_token_id=0, **shape)
    ).save_pretrained(path)
    return path


@pytest.fixture
def tiny_model(folder: Path) -> Path:
    return write_tiny_model(folder / "tiny")


def test_the_demo_labels_trains_exports_measures_publishes_pulls_and_serves(
    relabel: Callable[..., Any], folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = relabel("demo", "--engine", "fake", "--student", str(tiny_model), "--bench-seconds", "2", "--output", "json")
    assert done.code == 0, done
    found = done.json
    assert found["labels"] == 192
    assert [step["command"].split()[:2] for step in found["steps"]] == [
        list(step.words[:2]) for step in steps_of("out/demo", seconds=2)
    ]
    assert {step["exit_code"] for step in found["steps"]} == {0}
    assert found["served_against_scored"] < 1e-4
    assert len(json.loads((folder / "out/demo/answers.json").read_bytes())) == 192
    served = json.loads((folder / "out/demo/served/current/manifest.json").read_bytes())
    assert served["lineage"]["student"]["name"] == "demo"
    assert served["latency"] is not None


def test_the_demo_stops_at_a_step_that_fails_and_says_which(relabel: Callable[..., Any], folder: Path) -> None:
    done = relabel("demo", "--engine", "fake", "--student", "absent")
    assert done.code == 4
    assert "2/8 A small student learns" in done.out
    assert "Stopped: `relabel distill out/demo/student.yaml` ended with exit code 4" in done.out


def test_the_demo_can_stop_when_the_labels_are_there(relabel: Callable[..., Any], folder: Path) -> None:
    done = relabel("demo", "--engine", "fake", "--labels-only")
    assert done.code == 0
    assert "$ relabel run out/demo/job.yaml" in done.out
    assert "192 labels, for instance:" in done.out
    assert not (folder / "out/demo/student").exists()


def test_a_step_is_shown_as_it_is_typed() -> None:
    assert Step("", ("relabel", "run", "out/here it is/job.yaml")).line == "relabel run 'out/here it is/job.yaml'"
    ended = call(Step("", ("relabel", "status", "absent")), is_for_program=True)
    assert (ended.code, ended.is_well) == (3, False)
    assert ended.result().result["exit_code"] == 3
