"""Teachers on the page: facts and curves; and the chain from what a teacher starts from to a student, proved by the
digests of files.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.distill.students.spec import LearnedGold, LearnedLabels, SplitSide
from relabel.distill.teachers.spec import (
    ROLLOUTS_NAME,
    TEACHER_MANIFEST_VERSION,
    TeacherData,
    TeacherManifest,
)
from relabel.distill.training.output import CURVE_SCHEMA, BaseModelUsed, TrainingFacts
from relabel.jobs.report.artifacts import TeacherArtifact, open_artifacts
from relabel.jobs.report.build import build_report
from relabel.jobs.report.lineage import changes, trace
from relabel.manifests.files import Storage
from relabel.manifests.records import plain, sha256_file
from tests.report.conftest import Judgment, forge_run, plain_pairs, plots_of, write_table

WEIGHTS = "model.safetensors"


def forge_teacher(
    folder: Path,
    *,
    name: str = "tuned",
    model_digest: str = "e" * 64,
    runs: Iterable[LearnedLabels] = (),
    note: str = "a note",
) -> Path:
    """A teacher's folder as far as a report reads it: weights, manifest, curves."""
    folder.mkdir()
    (folder / WEIGHTS).write_bytes(b"weights")
    points = [(step, "train", name, step / 10) for step in (1, 2, 3) for name in ("loss", "reward", "format_rate")]
    points += [(step, "dev", "reward", step / 10) for step in (1, 3)]
    columns = [pa.array([point[place] for point in points], field.type) for place, field in enumerate(CURVE_SCHEMA)]
    pq.write_table(pa.Table.from_arrays(columns, schema=CURVE_SCHEMA), folder / "curves.parquet")
    (folder / ROLLOUTS_NAME).write_bytes(b"rollouts")
    manifest = TeacherManifest(
        version=TEACHER_MANIFEST_VERSION,
        kind="teacher",
        relabel="0.1.0",
        name=name,
        method="graph-grpo",
        fingerprint="f" * 64,
        model=BaseModelUsed("hf:org/base", model_digest, "qwen2"),
        labeler={"name": "graph-grpo", "grades": 3},
        templates={},
        data=TeacherData(
            runs=list(runs),
            gold=LearnedGold(path="gold.parquet", grade="grade"),
            rows=32,
            dropped={"too long": 2},
            examples=32,
            tokens=900,
            answer_tokens=90,
            held_out=SplitSide(8, 2),
        ),
        training=TrainingFacts(
            steps=3,
            epochs=1.0,
            best_step=2,
            stopped_by="early_stopping",
            device="cpu",
            rows_per_s=1.5,
            batch_size=8,
            accumulation=1,
            was_batch_halved=False,
        ),
        notes=[note],
        versions={},
        spec={"name": name},
        files={WEIGHTS: sha256_file(folder / WEIGHTS)},
    )
    (folder / "manifest.json").write_text(json.dumps(plain(manifest)))
    return folder


@pytest.fixture
def teacher(folder: Path) -> Path:
    return forge_teacher(folder / "teacher")


def edges(*paths: Path) -> set[tuple[str, str, bool | None]]:
    return {(a.kind, b.kind, known) for a, b, known in trace(open_artifacts([str(path) for path in paths], Storage()))}


def digest_of(path: Path) -> str:
    (found,) = open_artifacts([str(path)], Storage())
    assert isinstance(found, TeacherArtifact)
    return found.digest


def asked(folder: Path, teacher: Path, *, digest: str | None = None) -> Path:
    """A run that asked a teacher."""
    pairs = write_table(folder / "pairs.parquet", plain_pairs(4, 4))
    return forge_run(
        folder / "run",
        pairs,
        lambda pair: Judgment(pair.row_id % 3),
        name="labels",
        model=str(teacher),
        model_digest=digest or digest_of(teacher),
    )


def test_teacher_is_shown_with_its_facts_curves_and_notes(teacher: Path) -> None:
    built = build_report([str(teacher)], Storage())
    assert built.sections == ["ran", "lineage", "training"]
    for said in (
        "graph-grpo: GRPO with credit by node",
        "hf:org/base",
        "2 too long",
        "by which step 2 was kept",
        "a note",
    ):
        assert said in built.html
    plots = plots_of(built.html)
    assert plots["Training loss, tuned"] == "loss: 1 0.1000, 2 0.2000, 3 0.3000"
    assert plots["Training, reward, tuned"] == "reward: 1 0.1000, 2 0.2000, 3 0.3000"
    assert plots["On dev, tuned"] == "reward: 1 0.1000, 3 0.3000"


def test_run_is_joined_to_its_teacher_by_the_digest_of_all_files(folder: Path, teacher: Path) -> None:
    """Whatever either is called, and wherever the teacher lies now."""
    run = asked(folder, teacher)
    moved = teacher.rename(folder / "elsewhere")
    assert ("teacher", "label run", True) in edges(moved, run)
    assert edges(moved, run) >= {("base model", "teacher", None), ("trusted grades", "teacher", None)}


def test_teacher_whose_files_changed_since_the_run_is_pointed_at(folder: Path, teacher: Path) -> None:
    run = asked(folder, teacher)
    (teacher / WEIGHTS).write_bytes(b"other")
    assert ("teacher", "label run", False) in edges(teacher, run)
    found = open_artifacts([str(teacher), str(run)], Storage())
    expected = "teacher tuned is not what label run labels was made of: its files have changed since."
    assert changes(trace(found), found) == [expected]


def test_teacher_is_joined_to_the_teacher_and_the_runs_that_it_was_made_of(folder: Path, teacher: Path) -> None:
    run = asked(folder, teacher)
    plan = json.loads((run / "plan.json").read_text())
    learned = LearnedLabels(
        path="gone",
        kind="run",
        name="labels",
        labeler="r3a",
        fingerprint=plan["fingerprint"],
        manifest_sha256=sha256_file(run / "manifest.json"),
        weight=1.0,
        labels=16,
    )
    second = forge_teacher(folder / "second", name="second", model_digest=digest_of(teacher), runs=[learned])
    found = edges(teacher, run, second)
    assert found >= {("teacher", "teacher", True), ("label run", "teacher", True), ("teacher", "label run", True)}
    assert "the same, by digest" in build_report([str(teacher), str(run), str(second)], Storage()).html


def test_how_a_training_went_is_in_words(teacher: Path) -> None:
    html = build_report([str(teacher)], Storage()).html
    card = html[html.index("Training of ") :].partition("</dl>")[0]
    said = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", card))
    assert said == {
        "length": "3 steps, once over the data",
        "ended": "early: dev became no better",
        "kept": "step 2, the best on dev",
        "device": "cpu",
        "speed": "1.5 rows a second",
        "batch": "8 rows",
    }
    manifest = json.loads((teacher / "manifest.json").read_text())
    manifest["training"] |= {"epochs": 2.5, "stopped_by": None, "accumulation": 2, "was_batch_halved": True}
    (teacher / "manifest.json").write_text(json.dumps(manifest))
    html = build_report([str(teacher)], Storage()).html
    assert "3 steps, 2.5 times over the data" in html
    assert "8 rows, 2 batches a step; it was halved, since memory ran out" in html
