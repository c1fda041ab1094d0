"""`method: res-rag` from spec to model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow.parquet as pq
import pytest
import yaml

pytest.importorskip("trl")

from relabel.distill.teachers.rewards import ROLLOUTS_NAME
from relabel.distill.teachers.spec import read_teacher_spec, teacher_schema
from relabel.distill.teachers.teaching import estimate_teacher, train_teacher
from relabel.manifests.errors import ConfigError, InputError, ModelError
from relabel.manifests.files import Storage
from tests.teachers.conftest import relabel

TEACHERS = Path(__file__).parent.parent.parent / "docs" / "teachers"


def test_the_spec_of_the_docs_trains_and_its_teacher_labels(
    base_dir: Path, questions_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tiny model, a made-up generator and two steps; other keys as they are."""
    monkeypatch.setenv("RELABEL_CACHE", str(tmp_path / "cache"))
    held = yaml.safe_load((TEACHERS / "res-rag.yaml").read_text())
    jsonschema.Draft202012Validator(teacher_schema()).validate(held)
    held |= {"init": str(base_dir), "output": str(tmp_path / "out"), "generator": {"name": "fake"}}
    held["data"]["gold"]["path"] = str(questions_path)
    held["train"] |= {"max_steps": 2, "max_tokens": 4000, "save_every": 1}
    held["split"] = {"dev": 0.3}
    jsonschema.Draft202012Validator(teacher_schema()).validate(held)
    report = train_teacher(read_teacher_spec(held, where="res-rag"), Storage())
    out = tmp_path / "out"
    rollouts = pq.read_table(out / ROLLOUTS_NAME).to_pylist()
    assert report.manifest.training.steps == 2
    assert len(rollouts) == 8
    assert report.manifest.data.held_out.queries > 0
    curve = pq.read_table(out / "curves.parquet").to_pylist()
    assert {row["name"] for row in curve if row["split"] == "dev"} >= {"reward", "f1_ret", "penalty", "usefulness"}
    assert all(row["format_ok"] for row in rollouts)
    for row in rollouts:
        assert row["reward"] == pytest.approx(row["usefulness"] + row["f1_ret"] - row["penalty"])
        assert row["usefulness"] == (2 * row["f1_ans"] if row["answers"] else -1)
    assert report.manifest.data.gold.sets == "similar"
    job = {
        "name": "job",
        "input": {"path": str(questions_path)},
        "labeler": held["labeler"],
        "engine": {"name": "transformers", "model": str(out)},
        "output": str(tmp_path / "labels"),
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert relabel("run", str(tmp_path / "job.yaml")) == 0


@pytest.fixture
def held(base_dir: Path, questions_path: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "method": "res-rag",
        "init": str(base_dir),
        "labeler": {"name": "evidence-set"},
        "data": {"gold": {"path": str(questions_path)}},
        "generator": {"name": "fake"},
        "train": {"max_tokens": 4000},
        "output": str(tmp_path / "out"),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labeler": {"name": "r1"}}, "labeler r1 chooses no chunks; want evidence-set"),
        ({"generator": {}}, "`name` is missing; there are fake, openai, transformers, vllm"),
        ({"generator": {"name": "fakes"}}, "Did you mean fake"),
        ({"generator": {"name": "transformers"}}, "needs a model: set generator.model"),
        ({"rollouts": {"max_answer_tokens": 4000}}, "no room for a prompt"),
        ({"rollouts": {"vllm": {}}}, "no answers under a grammar yet"),
        ({"data": {"gold": {"path": "{path}", "answers": "wanted"}}}, "no column `wanted`"),
        ({"train": {"max_tokens": 1100}}, "no question to learn from: 6 queries whose prompt does not fit"),
    ],
)
def test_what_is_off_is_refused_before_anything_is_loaded(
    changes: dict[str, Any], message: str, held: dict[str, Any], questions_path: Path
) -> None:
    text = json.dumps({**held, **changes}).replace("{path}", str(questions_path))
    with pytest.raises((ConfigError, InputError, ModelError), match=message):
        estimate_teacher(read_teacher_spec(json.loads(text), where="teacher.yaml"), Storage())
