"""kill -9, SIGTERM, a full disk, numbers that are not valid and too little memory amid `relabel train` by
reinforcement: `--resume` ends with the bytes of an undisturbed call, in the model, the coefficients, the optimizer's
moments, the rollouts and the edges. Three of the kills that `test_kill_commands.py` has in full.
"""

from __future__ import annotations

import functools
import json
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.command_lines import inside
from tests.faults.forks import Setup
from tests.faults.kill_bench import Bench, undisturbed_bench
from tests.faults.teaching_world import STEPS, TEACHINGS, write_teachings

pytest.importorskip("trl")
_chance = random.Random(20)
IN_SECOND_EPOCH = {name: _chance.randrange(STEPS[name] // 2 + 1, STEPS[name]) for name in TEACHINGS}

EVERY_DAY = ("graph-grpo", "grpo-with-looks")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teachings") / "world"
    write_teachings(folder)
    return folder


@pytest.fixture(scope="module")
def bench(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    """By method; what no kill disturbed is called once."""

    @functools.cache
    def made(name: str) -> Bench:
        return undisturbed_bench(name, world, tmp_path_factory.mktemp(name), times=1)

    return made


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in EVERY_DAY else pytest.mark.full) for one in TEACHINGS]
)
def test_killed_in_its_second_epoch_it_resumes_to_the_last_byte(name: str, bench: Callable[[str], Bench]) -> None:
    held = bench(name)
    assert {"model.safetensors", "rollouts.parquet", "curves.parquet"} <= held.expected.keys()
    assert ("edges.parquet" in held.expected) == (name == "graph-grpo")
    folder = held.new("killed")
    ended = held.start(folder, inside(folder, "arm", f"after_training_step:{IN_SECOND_EPOCH[name]}")).wait()
    assert ended.code == -signal.SIGKILL
    assert held.judge(folder, ended) is None


def test_sigterm_ends_it_with_a_checkpoint_after_the_last_update_on_the_same_rollouts(
    bench: Callable[[str], Bench],
) -> None:
    held = bench("graph-grpo")
    folder = held.new("drained")
    number = int(signal.SIGTERM)
    ended = held.start(folder, inside(folder, "signal_at", "after_training_step", 5, number)).wait()
    assert ended.codes == [130], ended
    assert "--resume" in ended.text
    assert ended.text.splitlines()[-1] == "Asked to stop by SIGTERM."
    left = sorted((folder / held.case.target / "checkpoints").glob("checkpoint-*"))
    assert left[-1].name == "checkpoint-000006"
    assert held.judge(folder, ended) is None


def suffering(folder: Path, fault: str, *arguments: Any) -> Setup:
    return Setup("tests.faults.teaching_children", "suffer", (str(folder), fault, *arguments))


@pytest.mark.parametrize(
    ("name", "file", "nth"),
    [
        ("grpo", "weights.", 2),
        pytest.param("graph-grpo", "optimizer.", 1, marks=pytest.mark.full),
        pytest.param("grpo", "step-", 2, marks=pytest.mark.full),
        pytest.param("graph-grpo", "rollouts.", 1, marks=pytest.mark.full),
    ],
)
def test_a_full_disk_is_said_and_costs_the_last_checkpoint_at_most(
    name: str, file: str, nth: int, bench: Callable[[str], Bench]
) -> None:
    held = bench(name)
    folder = held.new(f"full-{file}")
    ended = held.start(folder, suffering(folder, "fill_disk", file, nth)).wait()
    assert ended.codes == [20], ended
    assert "no space left" in ended.text
    assert "--resume" in ended.text
    assert held.judge(folder, ended) is None


@pytest.mark.parametrize(
    ("name", "what", "nth", "says"),
    [
        pytest.param("grpo", "loss", 6, "step 3: the loss is not finite", marks=pytest.mark.full),
        ("graph-grpo", "gradient", 7, "step 4: the gradient is not finite"),
        pytest.param(
            *("graph-grpo", "probabilities", 2, "step 3: probabilities of the next token are not finite"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_number_that_is_none_names_its_rows_and_gets_into_no_checkpoint(
    name: str, what: str, nth: int, says: str, bench: Callable[[str], Bench]
) -> None:
    held = bench(name)
    folder = held.new(f"lost-{what}")
    ended = held.start(folder, suffering(folder, "lose_number", what, nth)).wait()
    assert ended.codes == [3], ended
    assert says in ended.text
    assert re.search(r"Rows of the batch, as source:row_id: words\.parquet:\d", ended.text)
    assert "train again with --restart and a lower train.learning_rate" in ended.text
    assert held.judge(folder, ended) is None


@pytest.mark.parametrize("name", ["grpo", pytest.param("graph-grpo", marks=pytest.mark.full)])
def test_when_memory_ends_the_batch_and_what_is_written_together_are_halved_once(
    name: str, bench: Callable[[str], Bench]
) -> None:
    held = bench(name)
    folder = held.new("halved")
    ended = held.start(folder, suffering(folder, "end_memory", 2, 4)).wait()
    assert ended.codes == [0], ended
    training = json.loads((folder / held.case.target / "manifest.json").read_bytes())["training"]
    assert (training["was_batch_halved"], training["batch_size"], training["accumulation"]) == (True, 2, 4)
    folder = held.new("no-memory")
    ended = held.start(folder, suffering(folder, "end_memory", 4, 2)).wait()
    assert ended.codes == [3], ended
    assert "also with half the batch (2 rollouts)" in ended.text
    assert re.search(r"begin again with --restart: lower .*rollouts.at_once", ended.text)
    assert held.judge(folder, ended) is None


def test_what_a_checkpoint_or_a_manifest_names_is_on_the_disk_first(bench: Callable[[str], Bench]) -> None:
    held = bench("graph-grpo")
    folder = held.new("synced")
    log = folder.with_suffix(".log")
    assert held.start(folder, suffering(folder, "note_syncs", str(log))).wait().codes == [0]
    lines = log.read_text().splitlines()
    target = folder / held.case.target
    manifest = next(place for place, line in enumerate(lines) if line == f"name {target / 'manifest.json'}")
    for name in held.expected.keys() - {"manifest.json"}:
        assert f"sync {target / name}" in lines[:manifest], name
    for step in (4, 8, 12):
        final = next(place for place, line in enumerate(lines) if line.endswith(f"/checkpoint-{step:06d}"))
        assert f"sync {target / 'checkpoints' / 'rollouts' / f'step-{step:06d}.parquet'}" in lines[:final]
        for file in ("weights.safetensors", "optimizer.safetensors", "state.json"):
            assert f"sync {target / 'checkpoints' / f'.part-checkpoint-{step:06d}' / file}" in lines[:final]
