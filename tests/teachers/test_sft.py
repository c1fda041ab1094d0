"""Supervised fine-tuning: the loss is cross-entropy over what no mask leaves out, a stopped training goes on to the
last bit, and what can't be trained is refused.
"""

import json
import os
import signal
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.numpy import load_file

from relabel.distill.teachers.sft import IGNORED, Example, MaskedCollator, answer_loss
from relabel.distill.teachers.spec import read_teacher_spec
from relabel.distill.teachers.teaching import estimate_teacher, train_teacher
from relabel.distill.training.output import list_checkpoints, step_of
from relabel.manifests.errors import ConfigError, DiskFullError, LockHeldError, StaleRunError, TrainingError
from relabel.manifests.failpoints import TRAINING_FAILPOINTS
from relabel.manifests.files import FileLock, Storage
from relabel.manifests.process import on_signal
from tests.killing import killed_at
from tests.teachers.conftest import plain_values, relabel

TRAIN = {"epochs": 2, "batch_size": 4, "save_every": 2}
"""Twelve rows: three steps an epoch, and checkpoints after the second, fourth and sixth."""


@pytest.fixture(scope="session")
def model(base_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)


def example(ids: list[int], is_reasoning: list[bool], row: int = 0) -> Example:
    return Example(array("i", ids), bytes(is_reasoning), row)


@pytest.fixture
def examples() -> list[Example]:
    chance = np.random.default_rng(3)
    sizes = [(9, 5), (30, 14), (17, 1), (4, 20)]
    return [
        example(chance.integers(0, 260, prompt + answer).tolist(), [place % 3 > 0 for place in range(answer)], row)
        for row, (prompt, answer) in enumerate(sizes)
    ]


@pytest.fixture(scope="session")
def labeler(short_templates: str) -> dict[str, Any]:
    return {"name": "umbrela", "templates": short_templates}


@pytest.fixture(scope="session")
def answers(run_of: Callable[..., Path], labeler: dict[str, Any]) -> str:
    """A run of it."""
    return str(run_of("umbrela", templates=labeler["templates"]))


@pytest.fixture
def umbrela(teach: Callable[..., Any], answers: str, labeler: dict[str, Any]) -> Callable[..., Any]:
    """A training on these answers."""
    held = {"data": {"runs": answers}, "labeler": labeler}
    return lambda start="new", **changes: teach(start, **{**held, **changes})


def weights(output: str | Path) -> dict[str, np.ndarray]:
    return load_file(Path(output) / "model.safetensors")


def same_weights(one: str | Path, other: str | Path) -> bool:
    return all(np.array_equal(value, weights(other)[name]) for name, value in weights(one).items())


def curve(output: str | Path) -> list[dict[str, Any]]:
    return pq.read_table(Path(output) / "curves.parquet").to_pylist()


@pytest.mark.parametrize("mask", [0.0, 1.0])
def test_the_loss_is_torchs_cross_entropy_of_each_row_alone_and_a_full_mask_leaves_out_the_reasoning(
    model: Any, examples: list[Example], mask: float
) -> None:
    batch = MaskedCollator(examples, mask=mask, seed=1, pad_id=0)(range(4))
    expected, wanted = 0.0, 0
    for example in examples:
        ids = torch.tensor([list(example.ids)])
        logits = model(input_ids=ids).logits[0, -example.num_answer - 1 : -1]
        losses = torch.nn.functional.cross_entropy(logits, ids[0, -example.num_answer :], reduction="none")
        is_learned = torch.tensor([not (mask and one) for one in example.is_reasoning])
        expected += losses[is_learned].sum().item()
        wanted += int(is_learned.sum())
    learned = int((batch["labels"] != IGNORED).sum())
    assert learned == wanted
    assert answer_loss(model, batch).item() / learned == pytest.approx(expected / learned, abs=1e-6)


def test_the_share_of_the_reasoning_that_is_learned_is_one_less_the_mask() -> None:
    mask = 0.3
    long = example([1] * 5000, [True] * 4990 + [False] * 10)
    collator = MaskedCollator([long] * 4, mask=mask, seed=5, pad_id=0)
    learned = np.stack([collator.learned(number) for number in range(4)])
    share = learned[:, :4990].mean()
    assert abs(share - (1 - mask)) < 3 * np.sqrt(mask * (1 - mask) / learned[:, :4990].size)
    assert learned[:, 4990:].all()


def test_accumulated_batches_have_the_loss_of_one_large_batch(umbrela: Callable[..., Any], tmp_path: Path) -> None:
    """Divided by the learned tokens of the whole step: their number differs from batch to batch."""
    found = []
    for size in (12, 3):
        train = {"max_steps": 3, "batch_size": size, "accumulation": 12 // size, "group_by_length": False}
        report = umbrela(train=train, output=str(tmp_path / f"by-{size}"))
        found.append([row["value"] for row in curve(Path(report.output)) if row["name"] == "loss"])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


@pytest.fixture(scope="module")
def undisturbed(base_dir: Path, answers: str, labeler: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A teacher whose training nothing stopped."""
    spec = {**plain_values(base_dir, tmp_path_factory.mktemp("undisturbed")), "labeler": labeler}
    spec |= {"data": {"runs": answers}, "train": {**spec["train"], **TRAIN}}
    return train_teacher(read_teacher_spec(spec, where="here"), Storage()).output


@pytest.mark.parametrize("place", TRAINING_FAILPOINTS)
def test_killed_anywhere_a_training_goes_on_to_the_last_bit(
    umbrela: Callable[..., Any], undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Over the end of an epoch too: the mask and the order of the second one are not those of the first."""
    with killed_at(place, {"after_training_step": 5, "before_model": 1}.get(place, 2)):
        umbrela(train=TRAIN)
    out = tmp_path / "out"
    left = [step_of(path) for path in list_checkpoints(out / "checkpoints")]
    assert left == {"after_training_step": [2, 4], "before_checkpoint": [2], "after_checkpoint": [2, 4]}.get(
        place, [4, 6]
    )
    assert not (out / "manifest.json").exists()
    with pytest.raises(StaleRunError, match="--resume"):
        umbrela(train=TRAIN)
    resumed = umbrela("resume", train=TRAIN)
    assert same_weights(resumed.output, undisturbed)
    assert curve(resumed.output) == curve(undisturbed)
    assert not (out / "checkpoints").exists()
    assert not [path for path in out.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl")]


def test_a_signal_ends_a_training_after_its_step_with_a_checkpoint(
    umbrela: Callable[..., Any], undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []

    def ask_to_stop(name: str) -> None:
        if name == "after_training_step":
            steps.append(name)
            if len(steps) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    earlier = signal.signal(signal.SIGTERM, on_signal)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("relabel.manifests.failpoints.hit", ask_to_stop)
            with pytest.raises(KeyboardInterrupt):
                umbrela(train={"epochs": 2})
    finally:
        signal.signal(signal.SIGTERM, earlier)
    from relabel.manifests.process import forget_interruptions

    forget_interruptions()
    (left,) = list_checkpoints(tmp_path / "out" / "checkpoints")
    assert step_of(left) == 2  # an epoch's end would be at 3
    assert same_weights(umbrela("resume", train={"epochs": 2}).output, undisturbed)


def test_adapters_alone_are_trained_resumed_and_merged(
    umbrela: Callable[..., Any], base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    lora = {"r": 2, "targets": ["q_proj", "v_proj"]}
    torch.manual_seed(5)  # adapters are drawn from the spec's seed, wherever the process's own generator is
    alone = umbrela(train=TRAIN, lora=lora, output=str(tmp_path / "alone"))
    changed = {
        name for name, value in weights(alone.output).items() if not np.array_equal(value, weights(base_dir)[name])
    }
    assert changed
    assert all("q_proj.weight" in name or "v_proj.weight" in name for name in changed)
    with killed_at("after_training_step", 5):
        umbrela(train=TRAIN, lora=lora)
    torch.manual_seed(6)
    assert same_weights(umbrela("resume", train=TRAIN, lora=lora).output, alone.output)


def test_the_adapters_laid_over_their_model_are_the_teacher(
    umbrela: Callable[..., Any], base_dir: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    library = pytest.importorskip("transformers")
    teacher = umbrela(train=TRAIN, lora={"r": 2}, output=str(tmp_path / "teacher")).output
    base = library.AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(base, f"{teacher}/adapter").merge_and_unload()
    trained = library.AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    named = dict(trained.named_parameters())
    assert all(torch.equal(weight, named[name]) for name, weight in merged.named_parameters())
    config = json.loads(Path(teacher, "adapter/adapter_config.json").read_bytes())
    assert config["base_model_name_or_path"] == str(base_dir)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["no_such_layer"], r"is called no_such_layer; there are down_proj, .*v_proj"),
        (["q_proj", "proj"], r"is called proj; there are"),  # peft adapts the rest and says nothing
        (["self_attn"], r"is called self_attn; there are"),
        (["q_proj", "lm_head"], r"is called lm_head; there are"),
    ],
)
def test_adapters_of_layers_that_the_model_does_not_have_are_refused_by_a_dry_run(
    values: Callable[..., dict[str, Any]], pairs_path: Path, targets: list[str], words: str
) -> None:
    pytest.importorskip("peft")
    held = values(
        labeler={"name": "direct", "grades": 3}, data={"gold": {"path": str(pairs_path)}}, lora={"targets": targets}
    )
    spec = read_teacher_spec(held, where="teacher.yaml")
    with pytest.raises(ConfigError, match=rf"lora\.targets: .*{words}"):
        estimate_teacher(spec, Storage())


def test_a_loss_that_is_no_number_names_the_rows_and_a_full_disk_and_a_lack_of_memory_are_said(
    umbrela: Callable[..., Any], answers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = answer_loss

    def nowhere(model: Any, batch: dict[str, Any]) -> Any:
        return whole(model, batch) * (float("nan") if 7 in batch["rows"] else 1.0)

    with monkeypatch.context() as patch:
        patch.setattr("relabel.distill.teachers.sft.answer_loss", nowhere)
        with pytest.raises(TrainingError, match=rf"the loss is not finite.*{answers}:7.*No checkpoint"):
            umbrela()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("relabel.distill.training.checkpoints.save_file", full)
        with pytest.raises(DiskFullError, match="--resume"):
            umbrela(train=TRAIN)

    def large(model: Any, batch: dict[str, Any]) -> Any:
        if len(batch["rows"]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(model, batch)

    with monkeypatch.context() as patch:
        patch.setattr("relabel.distill.teachers.sft.answer_loss", large)
        limit = 1
        with pytest.raises(TrainingError, match=r"also with half the batch \(2 rows\).*train\.batch_size"):
            umbrela()
        limit = 2
        report = umbrela()
    assert report.manifest.training.was_batch_halved
    assert (report.manifest.training.batch_size, report.manifest.training.accumulation) == (2, 2)


def test_a_place_that_is_taken_is_refused(umbrela: Callable[..., Any], tmp_path: Path) -> None:
    own = umbrela(train={"max_steps": 1}, output=str(tmp_path / "own")).output
    with pytest.raises(ConfigError, match=r"`output` .*lies in `init`.*the same folder"):
        umbrela("restart", init=own, output=own)
    with pytest.raises(ConfigError, match="reads at most 8192 tokens"):
        umbrela(train={"max_tokens": 9000})
    lock = FileLock(tmp_path / "out" / "checkpoints" / "train.lock", "the teacher")
    lock.acquire()
    try:
        with pytest.raises(LockHeldError):
            umbrela()
    finally:
        lock.release()


def test_what_is_learned_from_is_looked_for_before_the_model_is_fetched(
    values: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, name in (("gold", "absent.parquet"), ("runs", "absent")):
        held = values(labeler={"name": "direct"}, data={}, init="memory://nowhere/model")
        held["data"] = {"gold": {"path": str(tmp_path / name)}} if key == "gold" else {"runs": str(tmp_path / name)}
        (tmp_path / "teacher.yaml").write_text(json.dumps(held))
        assert relabel("train", str(tmp_path / "teacher.yaml"), "--dry-run") == 3
        assert f"{tmp_path / name}: no such file or folder" in capsys.readouterr().err


def test_gold_without_a_body_says_which_columns_make_the_document(
    values: Callable[..., dict[str, Any]], pairs_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pq.read_table(pairs_path)
    table = table.rename_columns([{"document": "title"}.get(name, name) for name in table.column_names])
    pq.write_table(table.append_column("description", table["title"]), tmp_path / "gold.parquet")

    def said(columns: dict[str, Any], *flags: str) -> str:
        held = values(labeler={"name": "direct"}, train={"max_steps": 1}, data={})
        held["data"] = {"gold": {"path": str(tmp_path / "gold.parquet"), "columns": columns}}
        (tmp_path / "teacher.yaml").write_text(json.dumps(held))
        capsys.readouterr()
        assert relabel("train", str(tmp_path / "teacher.yaml"), *flags) == 0
        return capsys.readouterr().err

    remark = "document from title alone: there is no `body`. Name the columns in `columns.document`"
    assert remark in said({}, "--dry-run")
    both = said({"document": ["title", "description"]}, "--dry-run")
    assert "gold.parquet: document from title, description\n" in both
    assert "document from title\n" in said({"document": "title"}, "--dry-run")
    assert remark in said({})


def test_a_teacher_of_mapped_gold_is_reported_in_short_lines(
    values: Callable[..., dict[str, Any]], pairs_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = {"path": str(pairs_path), "map": {0: 0, 1: 1, 2: 1}}
    held = values(labeler={"name": "direct", "grades": 2}, data={"gold": gold}, train={"max_steps": 1})
    (tmp_path / "teacher.yaml").write_text(yaml.safe_dump(held))
    for head, code in (("The teacher is in", 0), ("Nothing to do: this teacher is in", 10)):
        capsys.readouterr()
        assert relabel("train", str(tmp_path / "teacher.yaml")) == code
        first, *others = capsys.readouterr().out.splitlines()
        assert first == f"{head} {tmp_path / 'out'}"
        rows = dict(line.strip().split(maxsplit=1) for line in others)
        assert rows["labeler"] == "direct, 2 grades"
        assert rows["gold"] == f"{pairs_path}, `grade` (0 as 0, 1 as 1, 2 as 1): 12 rows"
        assert rows["trained"].startswith("1 step, ")
        assert max(map(len, others)) < 200 + len(str(pairs_path))


@pytest.mark.parametrize("flags", [(), ("--dry-run",), ("--export", "chats")])
def test_gold_off_the_labelers_scale_is_refused_with_runs_too(
    flags: tuple[str, ...],
    values: Callable[..., dict[str, Any]],
    run_of: Callable[..., Path],
    pairs_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    table = pq.read_table(pairs_path)
    grades = pc.add(table["grade"], 1)
    pq.write_table(table.set_column(table.schema.get_field_index("grade"), "grade", grades), "gold.parquet")
    held = values(data={"runs": str(run_of("r3a")), "gold": {"path": "gold.parquet"}}, train={"max_steps": 1})
    Path("teacher.yaml").write_text(yaml.safe_dump(held))
    assert relabel("train", "teacher.yaml", *flags) == 3
    said = capsys.readouterr().err
    assert "grade 3 is off the scale 0 to 2. Say what each grade becomes, by `data.gold.map`" in said


def test_a_dry_run_says_what_there_is_to_do_and_writes_nothing(
    values: Callable[..., dict[str, Any]],
    run_of: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = values(data={"runs": str(run_of("r3a"))}, train={"max_tokens": 8000})
    (tmp_path / "teacher.yaml").write_text(yaml.safe_dump(spec))
    capsys.readouterr()  # what the run said, where this test is the first to need it
    assert relabel("train", str(tmp_path / "teacher.yaml"), "--dry-run", "--output", "json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["rows"], said["examples"], said["steps"]) == (12, 14, 4)
    assert said["tokens"] > said["answer_tokens"] > 0
    assert "seconds" not in said
    assert not (tmp_path / "out").exists()
    assert relabel("train", str(tmp_path / "teacher.yaml"), "--dry-run", "--probe", "--output", "json") == 0
    probed = json.loads(capsys.readouterr().out)
    assert probed["step_s"] > 0
    assert probed["seconds"] == pytest.approx(probed["step_s"] * said["steps"], abs=0.1)
    exported = relabel("train", str(tmp_path / "teacher.yaml"), "--export", str(tmp_path / "chats"))
    assert exported == 0
    chats = [json.loads(line) for line in (tmp_path / "chats/conversations.jsonl").read_text().splitlines()]
    assert len(chats) == said["examples"]
    assert {tuple(message["role"] for message in chat["completion"]) for chat in chats} == {("assistant",)}
    assert all(chat["prompt"][-1]["role"] == "user" and chat["completion"][0]["content"] for chat in chats)
    assert relabel("train", str(tmp_path / "teacher.yaml"), "--export", str(tmp_path / "chats")) == 3
    assert not (tmp_path / "out").exists()
    assert relabel("train", str(tmp_path / "teacher.yaml"), "--probe") == 2
    assert relabel("train", str(tmp_path / "teacher.yaml")) == 0
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["training"]["steps"] == said["steps"]
