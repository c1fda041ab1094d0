"""`relabel train`: the folder that it leaves is a model that labels at once."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from relabel.distill.teachers.spec import TeacherManifest, read_teacher_spec
from relabel.distill.teachers.teaching import train_teacher
from relabel.manifests.files import Storage
from relabel.manifests.records import plain, readable_json
from tests.killing import killed_at
from tests.teachers.conftest import NUM_PAIRS, relabel

pytest.importorskip("trl")

from relabel.distill.teachers.rollout_log import RolloutLog
from relabel.distill.teachers.spec import PARTS
from relabel.distill.teachers.teaching import estimate_teacher
from relabel.distill.training import checkpoints
from relabel.distill.training.output import list_checkpoints
from relabel.manifests.errors import ConfigError, ManifestError, ModelError
from tests.teachers.grpo_setup import GOLD_ROWS, arguments, make_trainer
from tests.teachers.grpo_setup import train as run_training

TEACHERS = Path(__file__).parent.parent.parent / "docs" / "teachers"
SUPERVISED = [file.stem for file in sorted(TEACHERS.glob("*.yaml")) if "method: sft" in file.read_text()]
RUNS = {"router-sft": "route", "r3a-cold-start": "r3a", "graph-grpo-2-masked-cot": "graph-grpo"}


@pytest.fixture
def direct(
    values: Callable[..., dict[str, Any]], pairs_path: Path, short_templates: str
) -> Callable[..., dict[str, Any]]:
    """`direct` on gold grades alone."""
    labeler = {"name": "direct", "grades": 3, "templates": short_templates}
    data = {"gold": {"path": str(pairs_path)}}
    return lambda **changes: values(**{"labeler": labeler, "data": data, **changes})


def test_a_teacher_of_gold_grades_labels_and_is_judged_at_once(
    direct: Callable[..., dict[str, Any]],
    base_dir: Path,
    pairs_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RELABEL_CACHE", str(tmp_path / "cache"))
    teacher, job = tmp_path / "teacher.yaml", tmp_path / "job.yaml"
    teacher.write_text(yaml.safe_dump(direct()))
    assert relabel("train", str(teacher), "--output", "json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["data"]["rows"], said["data"]["answer_tokens"]) == (NUM_PAIRS, NUM_PAIRS)  # a grade is one token
    out = tmp_path / "out"
    assert not list(out.glob("*.bin"))
    assert not (out / "checkpoints").exists()
    was, is_now = (json.loads((folder / "config.json").read_text()) for folder in (base_dir, out))
    assert is_now == was  # a Trainer turns the cache of keys and values off while it trains
    data = (out / "manifest.json").read_bytes()
    assert readable_json(plain(TeacherManifest.read(data, "here"))) == data
    first = json.loads(data)
    del first["training"]["best_step"], first["training"]["stopped_by"]  # as the first teachers' manifests are
    assert TeacherManifest.read(json.dumps(first).encode(), "here").training.stopped_by is None
    assert relabel("train", str(teacher)) == 10
    values = {
        "name": "job",
        "input": {"path": str(pairs_path)},
        "labeler": direct()["labeler"],
        "engine": {"name": "transformers", "model": str(out)},
        "output": str(tmp_path / "labels"),
    }
    job.write_text(yaml.safe_dump(values))
    assert relabel("run", str(job)) == 0
    capsys.readouterr()
    assert relabel("evaluate", str(tmp_path / "labels"), "--qrels", str(pairs_path), "--output", "json") == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", SUPERVISED)
def test_every_supervised_spec_of_the_docs_trains(
    name: str,
    base_dir: Path,
    pairs_path: Path,
    questions_path: Path,
    run_of: Callable[..., Path],
    treed_run: Path,
    check_schema: Callable[..., None],
    tmp_path: Path,
) -> None:
    """With a tiny model, made-up answers and one small step; all other keys as they are, and as the schema has them."""
    held = yaml.safe_load((TEACHERS / f"{name}.yaml").read_text())
    check_schema(held)
    held |= {"init": str(base_dir), "output": str(tmp_path / "out")}
    held["train"] |= {"max_steps": 1, "max_tokens": 8000, "batch_size": 2, "accumulation": 1}
    if "runs" in held["data"]:
        held["data"]["runs"] = [str(treed_run if RUNS[name] == "route" else run_of(RUNS[name]))]
    if "gold" in held["data"]:
        held["data"]["gold"]["path"] = str(questions_path if "sets" in held["data"]["gold"] else pairs_path)
    report = train_teacher(read_teacher_spec(held, where=name), Storage())
    assert report.manifest.training.steps == 1
    assert report.manifest.data.rows > 0


def _put(name: str, data: bytes) -> Callable[[Path], Any]:
    def go(out: Path) -> None:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(data)

    return go


IN_THE_WAY: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a student": (_put("manifest.json", b'{"kind": "student", "fingerprint": "f"}'), "is not a teacher's manifest"),
    "a folder of its own": (_put("notes.txt", b"mine"), "holds notes.txt, which no teacher of ours left there"),
    "the checkpoints of a student": (_put("checkpoints/distill.lock", b""), "`relabel distill` trains or"),
    "another teacher": (lambda _: {"learning_rate": 2e-3}, "(train.learning_rate: was 0.002, is 0.001)"),
    "another teacher's checkpoints": (lambda _: {"learning_rate": 2e-3, "save_every": 1}, "of another spec, model or"),
    "this teacher's checkpoints": (lambda _: {"save_every": 1}, "Continue with --resume, or start over"),
}


@pytest.mark.parametrize("there", IN_THE_WAY)
def test_a_dry_run_refuses_the_output_that_the_training_refuses_before_the_weights_are_loaded(
    there: str,
    direct: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = tmp_path / "teacher.yaml"
    put, words = IN_THE_WAY[there]
    earlier = put(tmp_path / "out")
    if earlier is not None:
        spec.write_text(yaml.safe_dump(direct(train=earlier)))
        with killed_at("after_training_step", 3) if "save_every" in earlier else nullcontext():
            assert relabel("train", str(spec)) == 0
    spec.write_text(yaml.safe_dump(direct(train={"save_every": 1} if "checkpoints" in there else {})))
    monkeypatch.setattr("relabel.distill.teachers.sft.load_model", lambda *_: pytest.fail("the weights were loaded"))
    said = []
    for more in ("--dry-run",), ():
        capsys.readouterr()
        assert relabel("train", str(spec), *more) == 3
        said.append(capsys.readouterr().err.splitlines()[-1])
    assert words in said[0]
    assert said[0] == said[1]


# What lay on a disk and is not what was written, is refused by name: checkpoints, rollouts, and the model to start
# from. A folder that was moved or copied goes on as it would have where it was.


STEPS = 3
FILES = ("weights.safetensors", "optimizer.safetensors", "state.json")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a bit": flip,
    "gone": lambda path: path.unlink(),
}


@pytest.fixture(scope="module")
def train(fresh: Any, tokenizer: Any) -> Any:
    """A training by reinforcement whose first evaluation is its best."""

    def go(folder: Path) -> tuple[Any, Any]:
        trainer = make_trainer(
            copy.deepcopy(fresh),
            tokenizer,
            folder,
            rows=GOLD_ROWS[:4],
            held_out=GOLD_ROWS[4:],
            keep=1,
            log=RolloutLog(folder),
            eval_every=1,
            args=arguments(folder, updates=1),
        )
        rewards = iter((1.0, 0.5, 0.25))
        trainer.dev_figures = lambda _: {"reward": next(rewards)}  # type: ignore[method-assign]
        said: list[str] = []
        last = checkpoints.last_checkpoint(folder, said.append)
        return trainer, run_training(trainer, resume_from=last, steps=STEPS, save_every=2)[1]

    return go


@pytest.fixture(scope="module")
def trained(train: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("trained") / "checkpoints"
    trainer, outcome = train(folder)
    assert outcome.facts.best_step == 1
    return folder, copy.deepcopy(trainer.model.state_dict())


@pytest.fixture
def moved(trained: tuple[Path, Any], tmp_path: Path) -> Iterator[Path]:
    """A copy of the folder; the first one is out of reach."""
    away = trained[0].with_name("away")
    shutil.copytree(trained[0], tmp_path / "copy")
    trained[0].rename(away)
    yield tmp_path / "copy"
    away.rename(trained[0])


def test_a_copied_folder_keeps_the_best_step(train: Any, trained: tuple[Path, Any], moved: Path) -> None:
    assert [path.name for path in list_checkpoints(moved)] == ["checkpoint-000001", "checkpoint-000003"]
    trainer, outcome = train(moved)
    assert outcome.facts.best_step == 1
    assert all(torch.equal(value, trained[1][name]) for name, value in trainer.model.state_dict().items())
    shutil.rmtree(moved / "checkpoint-000001")
    with pytest.raises(ManifestError, match=r"checkpoint-000001: a damaged checkpoint .*--restart"):
        train(moved)


@pytest.mark.parametrize("damage", ["a bit", "gone"])
@pytest.mark.parametrize("name", [*FILES, checkpoints.DIGESTS])
def test_a_damaged_checkpoint_is_refused_by_name(
    trained: tuple[Path, Any], tmp_path: Path, name: str, damage: str
) -> None:
    shutil.copytree(trained[0], tmp_path / "copy")
    last = list_checkpoints(tmp_path / "copy")[-1]
    DAMAGES[damage](last / name)
    with pytest.raises(ManifestError, match=f"{last.name}: a damaged checkpoint .*Remove it to resume"):
        checkpoints.last_checkpoint(tmp_path / "copy", lambda _: None)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_rollouts_are_refused_before_a_step(
    train: Any, trained: tuple[Path, Any], tmp_path: Path, damage: str
) -> None:
    shutil.copytree(trained[0], tmp_path / "copy")
    part = min((tmp_path / "copy" / PARTS).iterdir())
    DAMAGES[damage](part)
    with pytest.raises(ManifestError, match=rf"{part.name}: rollouts that the checkpoint names .*--restart"):
        train(tmp_path / "copy")


@pytest.fixture
def direct_of(direct: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """Train on gold grades alone, by two steps with a checkpoint after each."""

    def go(start: Any = "new", **changes: Any) -> Any:
        held = direct(train={"max_steps": 2, "save_every": 1}, **changes)
        return train_teacher(read_teacher_spec(held, where="teacher.yaml"), Storage(), start=start)

    return go


def test_an_output_within_the_model_to_start_from_is_refused(
    direct_of: Callable[..., Any], base_dir: Path, tmp_path: Path
) -> None:
    """It would change that model's digest, so that a killed training could not go on."""
    base = shutil.copytree(base_dir, tmp_path / "base")
    with pytest.raises(ConfigError, match=r"`output` .*lies in `init`"):
        direct_of(init=str(base), output=str(base / "tuned"))


def nan_weight(folder: Path) -> None:
    file = folder / "model.safetensors"
    held = load_file(file)
    held["model.norm.weight"][0] = float("nan")
    save_file(held, file, metadata={"format": "pt"})


def set_config(key: str, value: Any) -> Callable[[Path], Any]:
    def go(folder: Path) -> None:
        held = json.loads((folder / "config.json").read_text())
        held[key] = value
        if key == "num_hidden_layers":
            held["layer_types"] = ["full_attention"] * value
        (folder / "config.json").write_text(json.dumps(held))

    return go


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (nan_weight, "tensor model.norm.weight contains NaN or Inf"),
        (set_config("num_hidden_layers", 1), r"tensors of layers in its weights .*model\.layers\.1\."),
        (set_config("num_hidden_layers", 3), "tensors are not in its weights"),
        (set_config("hidden_size", "x"), "its config.json can't be loaded"),
        (lambda folder: (folder / "generation_config.json").write_text("{"), "generation_config.json can't be read"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "a.safetensors"), "no file named model.safeten"),
        (set_config("intermediate_size", 64), r"6 tensors .* another shape .*down_proj\.weight has \(32, 48\), not"),
        (set_config("attn_implementation", "flash_attention_2"), "its weights can't be loaded .*FlashAttention2"),
        (set_config("quantization_config", {"quant_method": "fp8"}), "its weights are quantized"),
    ],
)
def test_a_damaged_model_to_start_from_is_named(
    damage: Callable[[Path], Any],
    words: str,
    values: Callable[..., dict[str, Any]],
    base_dir: Path,
    pairs_path: Path,
    tmp_path: Path,
) -> None:
    shutil.copytree(base_dir, tmp_path / "base")
    damage(tmp_path / "base")
    held = values(
        init=str(tmp_path / "base"),
        method="grpo",
        labeler={"name": "r1", "grades": 3, "max_think_tokens": 4},
        data={"gold": {"path": str(pairs_path)}},
        rollouts={"group": 4},
        train={"batch_size": 4, "accumulation": 1, "max_tokens": 4000, "max_steps": 1},
    )
    with pytest.raises(ModelError, match=words) as found:
        train_teacher(read_teacher_spec(held, where="teacher.yaml"), Storage())
    assert "`init`" in str(found.value)
    if damage is not nan_weight:  # no tensor is read to find the others
        with pytest.raises(ModelError) as dry:
            estimate_teacher(read_teacher_spec(held, where="teacher.yaml"), Storage())
        assert str(dry.value) == str(found.value)


def test_shards_that_accelerates_config_asks_for_are_refused_with_the_key_that_does_it(
    direct_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match=r"pickle\. .*`train\.strategy: fsdp`"):
        direct_of()
