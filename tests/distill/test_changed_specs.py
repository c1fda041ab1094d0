"""A refused --resume says which key changed, from what to what, and what to do; no secret and no prompt."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from relabel.distill.training.locations import CHECKPOINTS, BaseModelUsed, Product
from relabel.distill.training.output import RECORD_NAME, TrainingRecord, changes
from relabel.manifests.errors import StaleRunError
from relabel.manifests.secrets import forget_secrets, keep_secret
from tests.killing import killed_at

TRAIN = {"max_steps": 4, "save_every": 2}
PRODUCT = Product(
    "teacher", "train", "init", ("data", "labeler"), {"name": True, "train": {"device"}, "data": {"gold": {"path"}}}
)


def record(learned: str = "d", digest: str = "m", init: str = "hf:a/b", **spec: Any) -> TrainingRecord:
    return TrainingRecord(1, "teacher", "0.1.0", "f", BaseModelUsed(init, digest), learned, {"init": init, **spec})


@pytest.mark.parametrize("start", ["new", "resume"])
def test_the_key_that_changed_is_named_with_both_values(run: Callable[..., Any], start: str) -> None:
    with killed_at("after_checkpoint"):
        run(train=TRAIN)
    with pytest.raises(StaleRunError) as found:
        run(start=start, train={**TRAIN, "learning_rate": 1e-4, "device": "cpu"}, name="another")
    said = str(found.value)
    assert "checkpoint-000002 is of another spec, model or data (train.learning_rate: was 0.003, is 0.0001)" in said
    assert "Restore what changed and give --resume, name another `output`, or start over with --restart" in said


def test_so_is_it_where_a_finished_student_is_in_the_way(run: Callable[..., Any]) -> None:
    run(train=TRAIN)
    with pytest.raises(StaleRunError, match=r"\(train\.max_steps: was 4, is 3\).*--restart"):
        run(start="resume", train={**TRAIN, "max_steps": 3})


def test_labels_and_a_model_that_changed_where_they_are_are_told_from_others(
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
    with pytest.raises(StaleRunError, match=r"\(what is learned from \(`labels`\) is not what it was\)"):
        run(start="resume", **changed)
    shutil.copyfile(source["path"], labels)
    (model / "more.json").write_text("{}")
    with pytest.raises(StaleRunError, match=r"\(the files of the model that `student.model` names have changed\)"):
        run(start="resume", **changed)
    with pytest.raises(StaleRunError, match=rf"student\.model: was .*{model}.*, is .*{encoder_dir('xlm-roberta')}"):
        run(start="resume", **{**changed, "student": {"model": str(encoder_dir("xlm-roberta"))}})


def test_without_a_record_it_is_refused_all_the_same(run: Callable[..., Any], tmp_path: Path) -> None:
    with killed_at("after_checkpoint"):
        run(train=TRAIN)
    (tmp_path / "out" / CHECKPOINTS / RECORD_NAME).unlink()
    with pytest.raises(StaleRunError, match=r"is of another spec, model or data\. Restore"):
        run(start="resume", train={**TRAIN, "learning_rate": 1e-4})


def test_prompts_long_texts_and_secrets_are_not_shown() -> None:
    keep_secret("hunter2hunter2", "a variable")
    try:
        was = record(
            prompt={"system": "Be kind."}, url="http://hunter2hunter2@host", long="x" * 500, many=["y" * 99] * 9
        )
        now = record(prompt={"system": "Be harsh."}, url="http://host", long="z" * 500, many=["y"], text="a\nb")
        said = changes(was.spec, was.model, was.data, now, PRODUCT)
    finally:
        forget_secrets()
    assert said[0].startswith("long: was a text of 500 characters, is another")
    assert "prompt.system: was a text of 8 characters, is another of 9" in said
    assert not any(word in "; ".join(said) for word in ("kind", "harsh", "hunter2", "xxx"))
    assert all(len(one) < 300 for one in said)


def test_a_prompt_that_only_one_of_them_has_is_not_shown_and_keys_of_both_come_first() -> None:
    was = record(method="grpo", credit={"learn": True}, prompt={"system": "Be kind."})
    now = record(method="sft")
    assert changes(was.spec, was.model, was.data, now, PRODUCT) == [
        "method: was grpo, is sft",
        'credit: was {"learn": true}, is null',
        "prompt: differs",
    ]


def test_what_decides_nothing_is_not_named() -> None:
    was = record(name="a", train={"device": "cpu", "seed": 1}, data={"gold": {"path": "here", "grade": "g"}})
    now = record(name="b", train={"device": "auto", "seed": 2}, data={"gold": {"path": "there", "grade": "g"}})
    assert changes(was.spec, was.model, was.data, now, PRODUCT) == ["train.seed: was 1, is 2"]
    moved = record(learned="other", train={"device": "cpu", "seed": 1})
    assert changes(moved.spec, moved.model, moved.data, now, PRODUCT)[-1] == (
        'data: was null, is {"gold": {"path": "there", "grade": "g"}}'
    )


def test_many_differences_are_counted_and_none_is_said_where_none_is_known() -> None:
    was, now = record(), record(**{f"key{number:02}": number for number in range(20)})
    said = changes(was.spec, was.model, was.data, now, PRODUCT)
    assert len(said) == 11
    assert said[-1] == "and 10 more"
    assert changes(was.spec, was.model, was.data, record(), PRODUCT) == []
