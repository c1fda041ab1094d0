"""`relabel train`: the folder that it leaves is a model that labels at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow.parquet as pq
import pytest
import yaml

from distill.teachers.spec_files import read_teacher_spec, teacher_schema
from distill.teachers.teacher_manifest import read_teacher_manifest
from distill.teachers.teaching import train_teacher
from manifests.digests import readable_json
from manifests.errors import StaleRunError
from manifests.records import plain
from manifests.storage.context import Storage
from tests.distill.test_reporting import events_of
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
    """With a tiny model, made-up answers and one step; all other keys as they stand, and as the schema has them."""
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


def test_a_teacher_that_was_killed_goes_on_in_the_same_run_of_its_service(
    teach: Callable[..., Any],
    direct: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tensorboard")
    changes = {key: value for key, value in direct().items() if key in ("labeler", "data")}
    train = {"report_to": ["tensorboard"], "epochs": 2, "save_every": 2}
    with killed_at("after_training_step", 4):
        teach(**changes, train=train)
    teach(start="resume", **changes, train=train)
    points = pq.read_table(tmp_path / "out" / "curves.parquet").to_pylist()
    assert events_of(tmp_path / "out") == pytest.approx({
        (f"{row['split']}/{row['name']}", row["step"]): row["value"] for row in points
    })  # fmt: skip
    assert max(row["step"] for row in points) == 6
