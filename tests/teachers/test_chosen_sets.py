"""Sets of chunks to learn: whole questions under the labeler's own prompt, from a column or from a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from relabel.distill.teachers.sft import SftTrainer
from relabel.distill.teachers.spec import read_teacher_spec
from relabel.distill.teachers.trainer import check_teacher_base
from relabel.manifests.errors import ConfigError, InputError
from relabel.manifests.files import Storage
from relabel.manifests.models import resolve_model
from tests.teachers.chunked import NUM_QUERIES, question_rows
from tests.teachers.conftest import relabel

CHOOSER = {"name": "evidence-set"}


def trainer_of(values: dict[str, Any]) -> Any:
    spec = read_teacher_spec(values, where="teacher.yaml")
    return SftTrainer(spec, check_teacher_base(spec, resolve_model(spec.init)), Storage())


def answers_of(trainer: Any) -> list[str]:
    tokenizer = trainer._base.tokenizer
    return [tokenizer.decode(list(one.ids)[-one.num_answer :]) for one in trainer._examples.examples]


@pytest.fixture
def learned(values: Callable[..., dict[str, Any]], questions_path: Path) -> Callable[..., Any]:
    def make(gold: dict[str, Any], **changes: Any) -> Any:
        gold = {"path": str(questions_path), **gold}
        return trainer_of(
            values(**{"labeler": CHOOSER, "data": {"gold": gold}, "train": {"max_tokens": 4000}, **changes})
        )

    return make


def test_a_question_is_one_example_with_the_wanted_sets(learned: Callable[..., Any], questions_path: Path) -> None:
    trainer = learned({"sets": "similar"})
    assert answers_of(trainer) == ['{"Document_1": [2, 1], "Document_2": []}<|im_end|>'] * NUM_QUERIES
    assert (trainer.data.rows, trainer.data.examples) == (NUM_QUERIES, NUM_QUERIES)
    assert (trainer.data.gold.sets, trainer.data.gold.grade) == ("similar", None)
    assert trainer._examples.examples[0].is_reasoning.count(1) == 0  # no mask leaves anything out
    ids = list(trainer._examples.examples[0].ids)
    assert trainer._base.tokenizer.decode(ids).count("fact 1.2") == 1


def test_a_set_is_learned_as_far_as_its_chunks_are_shown(learned: Callable[..., Any], tmp_path: Path) -> None:
    """By the labeler's window, and by what an example has room for: fewer chunks are shown, as in a run."""
    rows = question_rows(0, [40, 3], [[39, 2, 2], [3]], ["yes"])
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "long.parquet")
    path = {"path": str(tmp_path / "long.parquet"), "sets": "similar"}
    assert json.loads(answers_of(learned(path))[0].removesuffix("<|im_end|>")) == {
        "Document_1": [39, 2],
        "Document_2": [3],
    }
    few = learned(path, labeler={**CHOOSER, "window_tokens": 300})
    assert json.loads(answers_of(few)[0].removesuffix("<|im_end|>"))["Document_1"] == [2]
    whole = len(learned(path)._examples.examples[0].ids)
    tight = learned(path, train={"max_tokens": whole - 100})
    assert json.loads(answers_of(tight)[0].removesuffix("<|im_end|>"))["Document_1"] == [2]
    assert len(tight._examples.examples[0].ids) <= whole - 100


def label_questions(pairs: Path, output: Path, **limits: Any) -> Path:
    """A finished run of the fake engine."""
    job = {
        "name": "run",
        "input": {"path": str(pairs), **limits},
        "labeler": CHOOSER,
        "engine": {"name": "fake"},
        "output": str(output),
    }
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(job))
    assert relabel("run", str(file)) == 0
    return output


def test_a_merge_is_learned_with_the_documents_that_each_of_its_runs_showed(
    values: Callable[..., dict[str, Any]], questions_path: Path, tmp_path: Path
) -> None:
    """Both runs know a query by the same id, and the first one's limit cuts its second query."""
    other = [row | {"query": f"other {row['query']}"} for row in pq.read_table(questions_path).to_pylist()]
    pq.write_table(pa.Table.from_pylist(other), tmp_path / "other.parquet")
    label_questions(questions_path, tmp_path / "one", limit=3)
    label_questions(tmp_path / "other.parquet", tmp_path / "two")
    merged = str(tmp_path / "merged")
    assert relabel("merge", str(tmp_path / "one"), str(tmp_path / "two"), "--to", merged) == 0
    answers = answers_of(trainer_of(values(data={"runs": [merged]}, train={"max_tokens": 4000})))
    documents = [len(json.loads(one.removesuffix("<|im_end|>"))) for one in answers]
    assert documents == [2, 1] + [2] * NUM_QUERIES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labeler": {"name": "direct"}}, "chooses no chunks; want evidence-set"),
        ({"data": {"gold": {}}}, "Name the column that does, as data.gold.sets"),
        ({"data": {"gold": {"sets": "wanted"}}}, "no column `wanted` with the chunks that are wanted"),
    ],
)
def test_what_can_not_be_learned_is_refused(
    changes: dict[str, Any], message: str, values: Callable[..., dict[str, Any]], questions_path: Path, tmp_path: Path
) -> None:
    held = values(**{"labeler": CHOOSER, "data": {"gold": {"sets": "similar"}}, **changes})
    grades = [1] * pq.read_metadata(questions_path).num_rows
    table = pq.read_table(questions_path).append_column("grade", pa.array(grades))
    pq.write_table(table, tmp_path / "graded.parquet")
    held["data"]["gold"]["path"] = str(tmp_path / "graded.parquet")
    with pytest.raises((ConfigError, InputError), match=message):
        trainer_of(held)


def test_a_set_that_names_a_chunk_that_there_is_not_is_refused(learned: Callable[..., Any], tmp_path: Path) -> None:
    rows = question_rows(0, [2, 3], [[3], []], ["yes"])
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "off.parquet")
    with pytest.raises(
        InputError, match=r"row 0: column `similar` names chunk 3 of document d0\.1, which has 2 chunks"
    ):
        learned({"path": str(tmp_path / "off.parquet"), "sets": "similar"})


def test_rows_of_a_query_are_one_question_wherever_they_lie(learned: Callable[..., Any], tmp_path: Path) -> None:
    first, second = (question_rows(number, [2, 3], [[1], None], ["yes"]) for number in (0, 1))
    pq.write_table(pa.Table.from_pylist([first[0], second[0], first[1], second[1]]), tmp_path / "mixed.parquet")
    trainer = learned({"path": str(tmp_path / "mixed.parquet"), "sets": "similar"})
    assert answers_of(trainer) == ['{"Document_1": [1], "Document_2": []}<|im_end|>'] * 2
