"""Labels, texts and grades by URL train a student; a student by URL scores."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from relabel.distill.students.distillation import STUDENT
from relabel.distill.training import locations as homes
from relabel.distill.training.locations import output_location_of
from relabel.manifests.errors import LockHeldError
from relabel.manifests.failpoints import DELIVERY_FAILPOINTS
from relabel.manifests.files import Storage
from relabel.manifests.leases import LeaseKeeper
from relabel.manifests.store import open_object_run_store
from tests.distill.conftest import encoder_dir, labels_file, pairs_file  # noqa: F401
from tests.s3.conftest import Outcome, forked, put_parquet
from tests.score.conftest import write_tiny_student

PIECE = ("query_id", "query", "doc_id", "document")
PLACES = ("after_training_step:2", *DELIVERY_FAILPOINTS, "before_model_upload:3")
EVERY_DAY = {"train": "after_training_step:2", "restart": "before_model_upload:3"}
"""Where a training and a restart are killed in every run of the tests; each place takes several commands."""


def places(what: str, some: tuple[str, ...]) -> list[Any]:
    return [pytest.param(place, marks=[] if place == EVERY_DAY[what] else pytest.mark.full) for place in some]


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
    open_object_run_store(s3, Storage(), single_writer=True).put("labels.parquet", labels_file.read_bytes())

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


def test_a_run_at_a_url_trains_a_student(
    student_yaml: Callable[..., Path],
    write_job: Callable[..., Path],
    relabel: Callable[..., Outcome],
    s3: str,
    tmp_path: Path,
) -> None:
    assert relabel("run", write_job({"labeler": {"name": "graph-grpo"}})).returncode == 0
    done = relabel("distill", student_yaml(labels=[f"{s3}/out"], gold=None))
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "student/manifest.json").read_text())["labels"][0]["kind"] == "run"


def test_labels_that_are_not_there_and_places_that_take_no_student_are_refused(
    student_yaml: Callable[..., Path], relabel: Callable[..., Outcome], s3: str
) -> None:
    absent = {"path": f"{s3}/absent.parquet", "pairs": {"path": f"{s3}/pairs.parquet"}}
    refused = relabel("distill", student_yaml(labels=[absent]))
    assert refused.returncode == 3
    assert "absent.parquet: no such file" in refused.stderr
    for output, why in (
        ("memory://box/student", "local folders and to s3://"),
        ("s3://labels", "names a whole bucket"),
    ):
        refused = relabel("distill", student_yaml(output=output))
        assert refused.returncode == 3
        assert why in refused.stderr


def held_at(url: str) -> dict[str, bytes]:
    store = open_object_run_store(url, Storage())
    return {name: store.read(name) for name in store.etags("")}


def test_a_student_goes_to_a_url_whole_is_known_there_and_scores_from_there(
    student_yaml: Callable[..., Path], relabel: Callable[..., Outcome], s3: str, tmp_path: Path
) -> None:
    cache = {"RELABEL_CACHE": str(tmp_path / "cache")}
    spec = student_yaml(output=f"{s3}/student/")
    done = relabel("distill", spec, **cache)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"] == f"{s3}/student/"
    there = held_at(f"{s3}/student")
    manifest = json.loads(there["manifest.json"])
    assert {name: hashlib.sha256(there[name]).hexdigest() for name in manifest["files"]} == manifest["files"]
    assert {"README.md", "curves.parquet", "student.json", "heads.safetensors"} < there.keys()
    assert not list((tmp_path / "cache/training").iterdir())
    again = relabel("distill", spec, **cache)
    assert again.returncode == 10, again.stderr
    here = relabel("distill", student_yaml(), **cache)
    assert here.returncode == 0, here.stderr
    local = {file.name: file.read_bytes() for file in (tmp_path / "student").iterdir()}
    assert {name: local[name] for name in manifest["files"]} == {name: there[name] for name in manifest["files"]}
    exported = relabel("export", f"{s3}/student", "--to", tmp_path / "bundle", "--set", "parity.min_pairs=1", **cache)
    assert exported.returncode == 0, exported.stderr
    scored = relabel("score", f"{s3}/student", "--input", f"{s3}/pairs.parquet", "--to", f"{s3}/scores", **cache)
    assert scored.returncode == 0, scored.stderr
    known = relabel("score", tmp_path / "student", "--input", f"{s3}/pairs.parquet", "--to", f"{s3}/scores", **cache)
    assert known.returncode == 10, known.stderr


def test_a_student_at_a_url_is_replaced_only_when_asked_and_then_wholly(
    student_yaml: Callable[..., Path], relabel: Callable[..., Outcome], s3: str, tmp_path: Path
) -> None:
    cache = {"RELABEL_CACHE": str(tmp_path / "cache")}
    assert relabel("distill", student_yaml(output=f"{s3}/student"), **cache).returncode == 0
    before = held_at(f"{s3}/student")
    open_object_run_store(f"{s3}/student", Storage(), single_writer=True).put("of_the_old_one.safetensors", b"w")
    other = student_yaml(output=f"{s3}/student", train={"max_steps": 3, "batch_size": 16, "max_tokens": 32})
    refused = relabel("distill", other, **cache)
    assert refused.returncode == 3
    assert "another spec, model or data" in refused.stderr
    replaced = relabel("distill", other, "--restart", **cache)
    assert replaced.returncode == 0, replaced.stderr
    after = held_at(f"{s3}/student")
    assert after.keys() == before.keys()
    assert after["heads.safetensors"] != before["heads.safetensors"]
    assert relabel("distill", other, **cache).returncode == 10


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """Files of the student that nobody killed, once it was trained."""
    return {}


@pytest.mark.full
@pytest.mark.parametrize("place", places("train", PLACES[:-1]))
def test_a_training_for_a_url_that_is_killed_goes_on_and_ends_as_an_undisturbed_one(
    student_yaml: Callable[..., Path], s3: str, tmp_path: Path, place: str, undisturbed: dict[str, Any]
) -> None:
    def distill(spec: Path, *flags: str, **environment: str) -> int:
        done = forked("distill", spec, *flags, RELABEL_CACHE=str(tmp_path / "cache"), **environment)
        assert done.returncode in (0, 10, -signal.SIGKILL), done.stderr
        return done.returncode

    spec = student_yaml(output=f"{s3}/student")
    assert distill(spec, RELABEL_FAILPOINT=place) == -signal.SIGKILL
    assert ("manifest.json" in held_at(f"{s3}/student")) == (place == "after_model_manifest")
    assert distill(spec, "--resume") == (10 if place == "after_model_manifest" else 0)
    assert not list((tmp_path / "cache/training").iterdir())
    if not undisturbed:
        assert distill(student_yaml(output=f"{s3}/undisturbed")) == 0
        undisturbed.update(json.loads(held_at(f"{s3}/undisturbed")["manifest.json"])["files"])
    assert json.loads(held_at(f"{s3}/student")["manifest.json"])["files"] == undisturbed


@pytest.mark.parametrize("place", places("restart", PLACES))
def test_a_restart_for_a_url_that_is_killed_leaves_a_whole_student_or_none_and_goes_on(
    student_yaml: Callable[..., Path], s3: str, tmp_path: Path, place: str
) -> None:
    def distill(*flags: str, **environment: str) -> int:
        done = forked("distill", spec, *flags, RELABEL_CACHE=str(tmp_path / "cache"), **environment)
        assert done.returncode in (0, 3, 10, -signal.SIGKILL), done.stderr
        return done.returncode

    def assert_whole_or_none() -> None:
        there = held_at(f"{s3}/student")
        if "manifest.json" in there:
            files = json.loads(there["manifest.json"])["files"]
            assert {name: hashlib.sha256(there[name]).hexdigest() for name in files} == files

    spec = student_yaml(output=f"{s3}/student")
    assert distill() == 0
    before = held_at(f"{s3}/student")
    open_object_run_store(f"{s3}/student", Storage(), single_writer=True).put("of_the_old_one.safetensors", b"w")
    spec = student_yaml(output=f"{s3}/student", train={"max_steps": 3, "batch_size": 16, "max_tokens": 32})
    assert distill("--restart", RELABEL_FAILPOINT=place) == -signal.SIGKILL
    assert_whole_or_none()
    in_training = place.startswith("after_training")
    if in_training:
        assert held_at(f"{s3}/student") == before | {"of_the_old_one.safetensors": b"w"}
        assert distill() == 3
    assert distill(*(["--resume"] if in_training else [])) == (10 if place == "after_model_manifest" else 0)
    after = held_at(f"{s3}/student")
    assert after.keys() == before.keys()
    assert_whole_or_none()
    assert json.loads(after["manifest.json"])["training"]["steps"] == 3
    assert not list((tmp_path / "cache/training").iterdir())
    assert distill() == 10


@pytest.mark.full
def test_a_student_that_only_waits_to_be_copied_gives_way_to_one_that_came_meanwhile(
    student_yaml: Callable[..., Path],
    relabel: Callable[..., Outcome],
    s3: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = student_yaml(output=f"{s3}/student")
    other_spec = tmp_path / "other.yaml"
    values = yaml.safe_load(spec.read_text())
    other_spec.write_text(yaml.safe_dump(values | {"train": {**values["train"], "max_steps": 1}}))
    one, other = ({"RELABEL_CACHE": str(tmp_path / name)} for name in ("one", "other"))
    killed = forked("distill", spec, **one, RELABEL_FAILPOINT="before_model_upload")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    take = homes._take

    def take_late(lease: Any) -> None:
        done = forked("distill", other_spec, **other)
        assert done.returncode == 0, done.stderr
        take(lease)

    monkeypatch.setattr(homes, "_take", take_late)
    refused = relabel("distill", spec, **one)
    assert refused.returncode == 3
    assert "another spec, model or data" in refused.stderr
    there = held_at(f"{s3}/student")
    files = json.loads(there["manifest.json"])["files"]
    assert {name: hashlib.sha256(there[name]).hexdigest() for name in files} == files
    assert json.loads(there["manifest.json"])["training"]["steps"] == 1


def test_a_student_at_a_url_scores_and_one_that_was_trained_again_is_another(
    write_job: Callable[..., Path], relabel: Callable[..., Outcome], s3: str, tmp_path: Path
) -> None:
    write_job()
    store = open_object_run_store(f"{s3}/student", Storage(), single_writer=True)

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


def test_a_training_that_lost_its_lease_delivers_only_where_nobody_else_is_at_it(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(homes, "LEASE_S", 1.0)
    take, taken = homes._take, []

    def taking(lease: Any) -> None:
        take(lease)
        taken.append(lease)

    monkeypatch.setattr(homes, "_take", taking)
    sleeper, other = (
        output_location_of(STUDENT, f"{s3}/student", Storage(), cache_dir=tmp_path / name) for name in ("one", "two")
    )
    with monkeypatch.context() as asleep:
        asleep.setattr(LeaseKeeper, "add", lambda *_: None)
        held = sleeper.locked()
        make_sure = held.__enter__()
    time.sleep(2.2)  # its time to live, and the second that the server's dates are rounded to
    with other.locked():
        taken[0].renew()
        assert taken[0].is_lost
        with pytest.raises(LockHeldError):
            make_sure()
    make_sure()
    assert not taken[-1].is_lost
    held.__exit__(None, None, None)
