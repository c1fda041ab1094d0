"""`relabel train`: the folder that it leaves is a model that labels at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from relabel.distill.teachers.manifest import read_teacher_manifest
from relabel.distill.teachers.spec import read_teacher_spec, teacher_schema
from relabel.distill.teachers.teaching import train_teacher
from relabel.manifests.errors import StaleRunError
from relabel.manifests.files import Storage
from relabel.manifests.records import plain, readable_json
from tests.killing import killed_at
from tests.teachers.conftest import NUM_PAIRS, relabel

TEACHERS = Path(__file__).parent.parent.parent / "docs" / "teachers"
SUPERVISED = [file.stem for file in sorted(TEACHERS.glob("*.yaml")) if "method: sft" in file.read_text()]
RUNS = {"router-sft": "route", "r3a-cold-start": "r3a", "graph-grpo-2-masked-cot": "graph-grpo"}


@pytest.fixture
def direct(values: Callable[..., dict[str, Any]], pairs_path: Path) -> Callable[..., dict[str, Any]]:
    """`direct` on gold grades alone."""
    data = {"gold": {"path": str(pairs_path)}}
    return lambda **changes: values(**{"labeler": {"name": "direct", "grades": 3}, "data": data, **changes})


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
    teacher.write_text(yaml.safe_dump(direct(train={"epochs": 30})))
    assert relabel("train", str(teacher), "--output", "json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["data"]["rows"], said["data"]["answer_tokens"]) == (NUM_PAIRS, NUM_PAIRS)  # a grade is one token
    out = tmp_path / "out"
    assert not list(out.glob("*.bin"))
    assert not (out / "checkpoints").exists()
    was, is_now = (json.loads((folder / "config.json").read_text()) for folder in (base_dir, out))
    assert is_now == was  # a Trainer turns the cache of keys and values off while it trains
    data = (out / "manifest.json").read_bytes()
    assert readable_json(plain(read_teacher_manifest(data, "here"))) == data
    first = json.loads(data)
    del first["training"]["best_step"], first["training"]["stopped_by"]  # as the first teachers' manifests are
    assert read_teacher_manifest(json.dumps(first).encode(), "here").training.stopped_by is None
    assert relabel("train", str(teacher)) == 10
    values = {
        "name": "job",
        "input": {"path": str(pairs_path)},
        "labeler": {"name": "direct", "grades": 3},
        "engine": {"name": "transformers", "model": str(out)},
        "output": str(tmp_path / "labels"),
    }
    job.write_text(yaml.safe_dump(values))
    assert relabel("run", str(job)) == 0
    capsys.readouterr()
    assert relabel("evaluate", str(tmp_path / "labels"), "--qrels", str(pairs_path), "--output", "json") == 0
    assert json.loads(capsys.readouterr().out)


def test_a_folder_that_holds_another_teacher_is_left_alone(
    teach: Callable[..., Any], direct: Callable[..., dict[str, Any]]
) -> None:
    changes = {key: value for key, value in direct().items() if key in ("labeler", "data")}
    first = teach(**changes)
    assert not first.was_done
    assert teach(**changes).was_done
    with pytest.raises(StaleRunError, match="holds a teacher of another spec"):
        teach(**changes, train={"learning_rate": 2e-3})
    again = teach(start="restart", **changes, train={"learning_rate": 2e-3})
    assert again.manifest.fingerprint != first.manifest.fingerprint


@pytest.mark.parametrize("name", SUPERVISED)
def test_every_supervised_spec_of_the_docs_trains(
    name: str,
    base_dir: Path,
    pairs_path: Path,
    questions_path: Path,
    run_of: Callable[..., Path],
    treed_run: Path,
    tmp_path: Path,
) -> None:
    """With a tiny model, made-up answers and one step; all other keys as they are, and as the schema has them."""
    held = yaml.safe_load((TEACHERS / f"{name}.yaml").read_text())
    jsonschema.Draft202012Validator(teacher_schema()).validate(held)
    held |= {"init": str(base_dir), "output": str(tmp_path / "out")}
    held["train"] |= {"max_steps": 1, "max_tokens": 8000}
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
