"""A refused --resume says which key changed, from what to what, and what to do; no secret and no prompt."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from relabel.distill.training.output import BaseModelUsed, Product, TrainingRecord, changes
from relabel.manifests.errors import StaleRunError
from tests.killing import killed_at

TRAIN = {"max_steps": 4, "save_every": 2}
PRODUCT = Product(
    "teacher", "train", "init", ("data", "labeler"), frozenset({"init", "name", "train.device", "data.gold.path"})
)


def record(learned: str = "d", digest: str = "m", init: str = "hf:a/b", **spec: Any) -> TrainingRecord:
    return TrainingRecord(
        version=1,
        kind="teacher",
        relabel="0.1.0",
        fingerprint="f",
        model=BaseModelUsed(init, digest),
        data=learned,
        spec={"init": init, **spec},
    )


def test_the_key_that_changed_is_named_with_both_values(run: Callable[..., Any]) -> None:
    with killed_at("after_checkpoint"):
        run(train=TRAIN)
    with pytest.raises(StaleRunError) as found:
        run(start="resume", train={**TRAIN, "learning_rate": 1e-4, "device": "cpu"}, name="another")
    said = str(found.value)
    assert "checkpoint-000002 is of another spec, model or data (train.learning_rate: was 0.003, is 0.0001)" in said
    assert "Restore what changed and give --resume, name another `output`, or start over with --restart" in said
    assert run(start="restart", train={**TRAIN, "learning_rate": 1e-4}).manifest.training.steps == 4


def test_labels_and_a_model_that_changed_where_they_are_are_named(
    run: Callable[..., Any], spec: Callable[..., dict[str, Any]], tmp_path: Path, encoder_dir: Callable[..., Path]
) -> None:
    model = shutil.copytree(encoder_dir(), tmp_path / "model")
    labels = tmp_path / "labels.parquet"
    source = spec()["labels"][0]
    shutil.copyfile(source["path"], labels)
    changed = {"labels": [{**source, "path": str(labels)}], "student": {"model": str(model)}, "train": TRAIN}
    with killed_at("after_checkpoint"):
        run(**changed)
    table = pq.read_table(labels)
    pq.write_table(table.slice(0, table.num_rows - 30), labels)
    with pytest.raises(StaleRunError, match=r"\(the data \(`labels`\)\)"):
        run(start="resume", **changed)
    shutil.copyfile(source["path"], labels)
    (model / "more.json").write_text("{}")
    with pytest.raises(StaleRunError, match=r"\(the model that `student.model` names\)"):
        run(start="resume", **changed)


def differences(was: TrainingRecord, now: TrainingRecord) -> list[str]:
    return changes(PRODUCT, now, spec=was.spec, model=was.model.digest, data=was.data)


def test_texts_are_not_shown_and_numbers_are() -> None:
    """A text may be a secret, or a prompt."""
    was = record(prompt={"system": "Be kind."}, url="http://hunter2@host", r=8, method="grpo", credit={"learn": True})
    now = record(prompt={"system": "Be harsh."}, url="http://host", r=16, method="sft")
    assert differences(was, now) == ["credit", "method", "prompt.system", "r: was 8, is 16", "url"]
