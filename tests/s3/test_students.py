"""Labels, texts and grades by URL train a student; a student by URL scores."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from relabel.manifests.files import Storage
from relabel.manifests.store import open_run_store
from tests.distill.conftest import encoder_dir, labels_file, pairs_file  # noqa: F401
from tests.s3.conftest import Outcome, put_parquet
from tests.score.conftest import write_tiny_student

PIECE = ("query_id", "query", "doc_id", "document")


@pytest.fixture
def student_yaml(
    s3: str,
    tmp_path: Path,
    encoder_dir: Callable[..., Path],  # noqa: F811
    labels_file: Path,  # noqa: F811
    pairs_file: Path,  # noqa: F811
) -> Callable[..., Path]:
    """A student on labels, texts and grades that lie at URLs."""
    put_parquet(f"{s3}/pairs.parquet", pq.read_table(pairs_file))
    open_run_store(s3, Storage(), single_writer=True).put("labels.parquet", labels_file.read_bytes())

    def write(**changes: Any) -> Path:
        values = {
            "name": "tiny",
            "labels": [{"path": f"{s3}/labels.parquet", "pairs": {"path": f"{s3}/pairs.parquet"}}],
            "gold": {"path": f"{s3}/pairs.parquet"},
            "student": {"kind": "encoder", "model": str(encoder_dir())},
            "train": {"max_steps": 2, "batch_size": 16, "max_tokens": 32},
            "split": {"dev": 0.2, "test": 0.2},
            "output": str(tmp_path / "student"),
        }
        path = tmp_path / "student.yaml"
        path.write_text(yaml.safe_dump(values | changes))
        return path

    return write


def test_labels_texts_and_grades_at_urls_train_a_student(
    student_yaml: Callable[..., Path], relabel: Callable[..., Outcome], tmp_path: Path
) -> None:
    done = relabel("distill", student_yaml())
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "student/manifest.json").read_text())
    assert manifest["labels"][0]["kind"] == "file"
    assert manifest["gold"]["graded_rows"] == manifest["rows"]["labelled"] == 144


def test_labels_that_are_not_there_and_a_url_as_output_are_refused(
    student_yaml: Callable[..., Path], relabel: Callable[..., Outcome], s3: str
) -> None:
    absent = {"path": f"{s3}/absent.parquet", "pairs": {"path": f"{s3}/pairs.parquet"}}
    refused = relabel("distill", student_yaml(labels=[absent]))
    assert refused.returncode == 3
    assert "absent.parquet: no such file" in refused.stderr
    refused = relabel("distill", student_yaml(output=f"{s3}/student"))
    assert (refused.returncode, "aws s3 sync" in refused.stderr) == (3, True)


def test_a_student_at_a_url_scores_and_one_that_was_trained_again_is_another(
    write_job: Callable[..., Path], relabel: Callable[..., Outcome], s3: str, tmp_path: Path
) -> None:
    write_job()
    store = open_run_store(f"{s3}/student", Storage(), single_writer=True)

    def put(seed: int) -> None:
        folder = write_tiny_student(tmp_path / f"tiny-{seed}", seed=seed, columns=dict(zip(PIECE, PIECE, strict=True)))
        for file in folder.iterdir():
            store.put(file.name, file.read_bytes())

    def score(to: str) -> Outcome:
        words = ("score", f"{s3}/student", "--input", f"{s3}/pairs.parquet", "--to", f"{s3}/{to}")
        return relabel(*words, RELABEL_CACHE=str(tmp_path / "cache"))

    refused = score("scores")
    assert refused.returncode == 3
    assert "holds no manifest.json" in refused.stderr
    put(0)
    for code in (0, 10):
        done = score("scores")
        assert done.returncode == code, done.stderr
    put(1)
    refused = score("scores")
    assert refused.returncode == 3, refused.stderr
    assert score("others").returncode == 0
    assert len(list((tmp_path / "cache/students").iterdir())) == 2
    local = relabel("score", tmp_path / "tiny-1", "--input", f"{s3}/pairs.parquet", "--to", f"{s3}/others")
    assert local.returncode == 10, local.stderr
