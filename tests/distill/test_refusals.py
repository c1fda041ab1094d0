"""Slips of a tired hand: each is refused before it costs training time or somebody's files, and the message says what
to do.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from relabel.distill.students import distillation
from relabel.distill.students.spec import StudentSection, rerank_notes
from relabel.distill.training.loop import Training
from relabel.distill.training.output import BaseModelUsed, Product, TrainingRecord, changes
from relabel.manifests.errors import ConfigError, DiskFullError, InputError, StaleRunError
from relabel.manifests.records import plain, readable_json
from tests.distill.conftest import label_rows, make_pairs, write_labels
from tests.killing import Killed, killed_at

SHORT = {"max_steps": 1}


def labels(path: Path, pairs: Path, **changes: Any) -> list[dict[str, Any]]:
    return [
        {
            "path": str(write_labels(path / "labels.parquet", label_rows(make_pairs(), **changes))),
            "pairs": {"path": str(pairs)},
        }
    ]


def gold_file(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    kept = [{name: row[name] for name in ("query_id", "query", "doc_id", "document", "grade")} for row in rows]
    pq.write_table(pa.Table.from_pylist(kept), path / "gold.parquet")
    return {"path": str(path / "gold.parquet")}


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("start", ["new", "restart"])
def test_a_folder_with_files_of_somebody_else_is_left_as_it_is(
    run: Callable[..., Any], tmp_path: Path, start: str
) -> None:
    folder = tmp_path / "project"
    (folder / "checkpoints" / "other").mkdir(parents=True)
    (folder / "README.md").write_text("mine")
    (folder / "checkpoints" / "other" / "weights").write_text("mine too")
    before = bytes_of(folder)
    with pytest.raises(StaleRunError, match=r"README\.md.*no student.*[Nn]ame another"):
        run(output=str(folder), start=start, train=SHORT)
    assert bytes_of(folder) == before


def test_what_killed_calls_leave_is_not_somebody_elses(
    run: Callable[..., Any], spec: Callable[..., dict[str, Any]]
) -> None:
    """One killed before it claimed the folder, and a --restart killed while it removed checkpoints next to a
    half-written student.
    """
    checkpoints = Path(spec()["output"]) / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "distill.lock").touch()
    assert run(train=SHORT).has_passed
    (checkpoints / "checkpoint-000001").mkdir(parents=True)
    (checkpoints / "training.json").write_text("{}")
    (checkpoints.parent / "manifest.json").unlink()
    with pytest.raises(StaleRunError, match="--restart"):
        run(start="resume", train=SHORT)
    assert not run(start="restart", train=SHORT).was_done


def test_a_student_is_not_restarted_from_itself(run: Callable[..., Any], tmp_path: Path) -> None:
    folder = run(train=SHORT).output
    before = bytes_of(folder)
    with pytest.raises(ConfigError, match=r"`output` .*lies in `student\.model`.*the same folder"):
        run(start="restart", student={"model": str(folder)}, train={"max_steps": 2})
    assert bytes_of(folder) == before


def test_a_gate_that_changed_since_the_training_is_judged_again(run: Callable[..., Any]) -> None:
    assert run(require={"accuracy": ">=0.0"}, train=SHORT).has_passed
    again = run(require={"accuracy": ">=0.0", "f1_macro": ">1"}, train=SHORT)
    assert again.was_done
    assert not again.has_passed
    assert [check.has_passed for check in again.gate.checks] == [True, False]
    assert run(train=SHORT).has_passed


PAIRS = make_pairs()
UNKNOWN = [{**pair, "query_id": f"x{pair['query_id']}"} for pair in PAIRS]
TRAINED_ALONE = [pair for pair in PAIRS if pair["query_id"] == "q00"]
HARSH = [{**PAIRS[0], "grade": 3}]
TWICE = [*PAIRS, {**PAIRS[0], "grade": (PAIRS[0]["grade"] + 1) % 3}]


@pytest.mark.parametrize(
    ("gold", "changes", "says"),
    [
        pytest.param(
            UNKNOWN,
            {},
            r"gold\.parquet: none of its grades belongs to a labelled pair.*query_id and doc_id",
            id="it meets no label, and labels do not replace it",
        ),
        pytest.param(PAIRS, {"gold": {"grade": "grades"}}, r"no column `grades`.*`gold\.grade`", id="another column"),
        pytest.param(
            HARSH,
            {},
            r"grade 3 is off the scale 0 to 2.*by `gold\.map`, .*`gold: \{…, map: \{0: 0, 1: 1, 2: 2, 3: 2\}\}`",
            id="another scale, with what a spec says of it",
        ),
        pytest.param(TWICE, {}, r"several grades.*`gold\.duplicates: mean`", id="two grades of a pair"),
        pytest.param(
            UNKNOWN,
            {"loss": {"gold_weight": 0.5}, "require": {"macro_f1": ">=0.5*teacher"}},
            r"teacher.*test split.*both",
            id="a gate against a teacher that it never meets on test",
        ),
        pytest.param(
            TRAINED_ALONE,
            {"train": {"early_stopping": {"metric": "auc"}}},
            r"early_stopping.*auc.*dev",
            id="early stopping by a figure that dev can't have",
        ),
    ],
)
def test_gold_that_can_not_do_what_is_asked_is_refused_before_training(
    run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gold: list[dict[str, Any]],
    changes: dict[str, Any],
    says: str,
) -> None:
    monkeypatch.setattr(Training, "run", lambda *_args, **_kwargs: pytest.fail("trained"))
    with pytest.raises(InputError, match=says):
        run(**{"train": SHORT, **changes, "gold": {**gold_file(tmp_path, gold), **changes.get("gold", {})}})


def test_a_loss_that_no_label_of_these_trains_is_refused(
    run: Callable[..., Any], tmp_path: Path, pairs_file: Path
) -> None:
    with pytest.raises(InputError, match=r"nothing trains the relevance head.*loss\.relevance"):
        run(labels=labels(tmp_path, pairs_file, has_nodes=False), loss={"relevance": 0.0, "consistency": 1.0})


def test_a_plain_gate_is_judged_on_all_rows_with_one_against_the_teacher(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    known = [pair for pair in make_pairs() if pair["doc_id"] != "d5"]
    new = [{**pair, "doc_id": f"n{pair['doc_id']}"} for pair in make_pairs()]
    gates = {"accuracy": ">=0", "macro_f1": ">=0*teacher"}
    report = run(gold=gold_file(tmp_path, [*known, *new]), loss={"gold_weight": 0.5}, require=gates, train=SHORT)
    test = report.manifest.metrics.test
    plain, of_teacher = report.gate.checks
    assert test.student["rows"] > test.student_where_teacher["rows"]
    assert plain.value == test.student["accuracy"]
    assert of_teacher.value == test.student_where_teacher["f1_macro"]


def test_a_dev_split_without_a_trusted_grade_is_reported(run: Callable[..., Any], tmp_path: Path) -> None:
    report = run(gold=gold_file(tmp_path, TRAINED_ALONE), train=SHORT)
    assert report.manifest.temperature["relevance"] == 1.0
    assert any("relevance" in note and "not calibrated" in note for note in report.manifest.notes)


def test_a_query_that_is_on_two_sides_under_other_ids_is_reported(run: Callable[..., Any], tmp_path: Path) -> None:
    pairs = [{**pair, "query": f"  Red  lamp {int(pair['query_id'][1:]) % 8}"} for pair in make_pairs()]
    pq.write_table(pa.Table.from_pylist(pairs), tmp_path / "pairs.parquet")
    sources = labels(tmp_path, tmp_path / "pairs.parquet")
    report = run(labels=sources, train=SHORT, split={"dev": 0.2, "test": 0.3})
    assert any("under another id" in note and "by: query" in note for note in report.manifest.notes)
    assert report.manifest.split.test.texts_seen_in_train > 0
    split = {"dev": 0.2, "test": 0.3, "by": "query"}
    kept = run(labels=sources, train=SHORT, split=split, output=str(tmp_path / "by-text"))
    assert kept.manifest.split.test.texts_seen_in_train == 0
    assert not any("under another id" in note for note in kept.manifest.notes)


def test_a_checkpoint_that_the_disk_refuses_is_no_fault_of_ours(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: refused (os error 28)")

    monkeypatch.setattr("relabel.distill.training.checkpoints.save_file", refuse)
    with pytest.raises(DiskFullError, match=r"No checkpoint was written yet, and nothing is lost .*: --resume"):
        run(train=SHORT)


def test_the_same_labels_twice_are_refused(run: Callable[..., Any], tmp_path: Path, pairs_file: Path) -> None:
    (one,) = labels(tmp_path, pairs_file)
    copied = tmp_path / "copy.parquet"
    copied.write_bytes((tmp_path / "labels.parquet").read_bytes())
    with pytest.raises(InputError, match=r"are the same labels"):
        run(labels=[one, {**one, "path": str(copied), "weight": 0.5}], train=SHORT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can do it")
def test_half_precision_without_a_gpu_is_refused_and_not_silently_single(run: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"fp16 is for GPUs.*bf16"):
        run(train={**SHORT, "precision": "fp16"})


def test_adapters_of_layers_that_a_decoder_does_not_have_are_refused_before_anything_is_encoded(
    run: Callable[..., Any], decoder_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    monkeypatch.setattr(
        "relabel.distill.students.distillation.make_texts", lambda *_: pytest.fail("texts were encoded")
    )
    student = {"kind": "decoder", "model": str(decoder_dir()), "lora": {"targets": ["q_proj", "v_porj"]}}
    with pytest.raises(ConfigError, match=r"student\.lora\.targets: .*called v_porj; there are down_proj, .*v_proj"):
        run(student=student, train=SHORT)


def test_a_folder_where_a_teacher_is_trained_is_no_students(
    run: Callable[..., Any], spec: Callable[..., dict[str, Any]]
) -> None:
    """The two commands hold locks of their own, so that neither sees the other."""
    checkpoints = Path(spec()["output"]) / "checkpoints"
    (checkpoints / "checkpoint-000001").mkdir(parents=True)
    (checkpoints / "training.json").write_text("f" * 64)
    (checkpoints / "train.lock").touch()
    before = sorted(checkpoints.rglob("*"))
    with pytest.raises(StaleRunError, match=r"out: `relabel train` trains or trained there.*Name another `output`"):
        run(start="restart", train=SHORT)
    assert sorted(checkpoints.rglob("*")) == before


# A refused --resume says which key changed, from what to what, and what to do; no secret and no prompt.


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
        spec={"init": init, "train": {"accumulation": 1}, **spec},
    )


def test_the_key_that_changed_is_named_with_both_values(run: Callable[..., Any]) -> None:
    with killed_at("after_checkpoint"):
        run(train=TRAIN)
    with pytest.raises(StaleRunError) as found:
        run(start="resume", train={**TRAIN, "learning_rate": 1e-4, "device": "cpu"}, name="another")
    said = str(found.value)
    assert "checkpoint-000002 is of another spec, model or data (train.learning_rate: was 0.003, is 0.0001)" in said
    assert "Restore what changed and give --resume, name another `output`, or start over with --restart" in said


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
    return changes(PRODUCT, was, now)


def test_texts_are_not_shown_and_numbers_are() -> None:
    """A text may be a secret, or a prompt."""
    was = record(prompt={"system": "Be kind."}, url="http://hunter2@host", r=8, method="grpo", credit={"learn": True})
    now = record(prompt={"system": "Be harsh."}, url="http://host", r=16, method="sft")
    assert differences(was, now) == ["credit", "method", "prompt.system", "r: was 8, is 16", "url"]


# A student replaces another only when asked to, is never mixed with it, and a replacement that was killed goes on.


OLD = {"max_steps": 2}
NEW = {"max_steps": 4, "save_every": 2, "learning_rate": 1e-4}


@pytest.mark.parametrize("train", [NEW, OLD | {"save_every": 1}], ids=["another spec", "the same spec"])
@pytest.mark.parametrize(
    "place",
    [
        "after_training_step",
        *(pytest.param(one, marks=pytest.mark.full) for one in ("after_checkpoint", "before_model")),
    ],
)
def test_a_restart_that_was_killed_goes_on(
    run: Callable[..., Any], tmp_path: Path, place: str, train: dict[str, Any]
) -> None:
    run(train=OLD if train == NEW else train)
    manifest = tmp_path / "out/manifest.json"
    with killed_at(place):
        run(start="restart", train=train)
    assert not manifest.exists(), "--restart deletes the student"
    said: list[str] = []
    report = run(start="resume", say=said.append, train=train)
    assert not report.was_done
    assert report.manifest.training.steps == train["max_steps"]
    assert any("resuming from" in line for line in said) == (place != "after_training_step")
    assert manifest.read_bytes() == readable_json(plain(report.manifest))
    assert not (tmp_path / "out/checkpoints").exists()
    assert run(start="resume", train=train).was_done


def test_a_restart_that_was_killed_while_it_deleted_checkpoints_resumes_from_none_of_them(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_at("before_model"):
        run(train=OLD | {"save_every": 1})

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", die)
        with pytest.raises(Killed):
            run(start="restart", train=NEW)
    with pytest.raises(StaleRunError, match="of another spec, model or data"):
        run(start="resume", train=NEW)
    assert run(start="restart", train=NEW).manifest.training.steps == 4


def test_a_resumed_training_that_no_restart_began_replaces_no_student(run: Callable[..., Any], tmp_path: Path) -> None:
    with killed_at("before_model"):
        run(train=NEW)
    other = tmp_path / "out/manifest.json"
    other.write_text('{"kind": "student", "fingerprint": "other"}')
    with pytest.raises(StaleRunError, match="another spec, model or data"):
        run(start="resume", train=NEW)
    assert "other" in other.read_text()


@pytest.mark.parametrize(
    ("meanwhile", "message"), [(NEW, "finished this student meanwhile"), (OLD, "another spec, model or data")]
)
def test_a_student_finished_while_another_call_read_its_texts_stays_as_it_is(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: dict[str, Any], message: str
) -> None:
    make_texts = distillation.make_texts

    def read_slowly(*arguments: Any) -> Any:
        monkeypatch.setattr(distillation, "make_texts", make_texts)
        run(train=meanwhile)
        return make_texts(*arguments)

    monkeypatch.setattr(distillation, "make_texts", read_slowly)
    with pytest.raises(StaleRunError, match=message):
        run(train=NEW)
    assert json.loads((tmp_path / "out/manifest.json").read_text())["training"]["steps"] == meanwhile["max_steps"]


@pytest.mark.parametrize(
    ("student", "grades", "words"),
    [
        ({"kind": "encoder", "pooling": "mean"}, 3, "student.pooling is mean"),
        ({"kind": "encoder", "pooling": "cls"}, 3, None),
        ({"kind": "encoder", "pooling": "cls"}, 4, "will refuse this student: it has 4 grades"),
        ({"kind": "decoder"}, 3, "a decoder of 3 grades"),
        ({"kind": "decoder"}, 2, None),
        ({"kind": "logistic"}, 4, None),
    ],
)
def test_what_rerank_endpoints_will_not_serve_is_known_before_training(
    student: dict[str, Any], grades: int, words: str | None
) -> None:
    notes = rerank_notes(StudentSection(model="hf:a/b", **student), grades)
    assert len(notes) == (words is not None)
    assert not words or words in notes[0]
