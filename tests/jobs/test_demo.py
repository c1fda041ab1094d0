"""The demo goes the whole way: its last step, a pulled bundle asked through its own loader, says what its first ones
made.
"""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from relabel.jobs.commands.setup import call, steps_of
from relabel.jobs.output import Exit
from relabel.jobs.report.artifacts import open_artifacts
from relabel.jobs.report.lineage import changes, trace
from relabel.manifests.files import Storage
from tests.teachers.models import write_tiny_decoder


def write_tiny_model(path: Path) -> Path:
    """A random BERT of one layer that reads 160 tokens."""
    import torch
    import transformers as tf

    from tests.distill.conftest import word_tokenizer

    tokenizer = word_tokenizer(has_types=True)
    tokenizer.model_max_length = 160
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer.save_pretrained(path)
    tf.BertModel(
        tf.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=160, pad_token_id=0, **shape)
    ).save_pretrained(path)
    return path


def column_of(path: Path, name: str) -> list[Any]:
    return pq.read_table(path, columns=[name])[name].to_pylist()


@pytest.fixture
def tiny_model(folder: Path) -> Path:
    return write_tiny_model(folder / "tiny")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_trains_its_teacher_labels_trains_exports_measures_publishes_pulls_serves_and_judges(
    relabel: Callable[..., Any], folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    teacher = write_tiny_decoder(folder / "tiny-teacher", layers=1, heads=1)
    models = ("--teacher", str(teacher), "--student", str(tiny_model))
    done = relabel("demo", "--teach", *models, "--bench-seconds", "1", "--output", "json")
    assert done.code == 0, done
    found = done.json
    steps = steps_of("out/demo", seconds=1, has_training=True)
    assert [step["command"] for step in found["steps"]] == [command for _, command in steps]
    assert {step["exit_code"] for step in found["steps"]} == {0}
    assert found["served_against_scored"] < 1e-4
    root = folder / "out/demo"
    assert len(json.loads((root / "answers.json").read_bytes())) == 192
    served = json.loads((root / "served/current/manifest.json").read_bytes())
    assert served["lineage"]["student"]["name"] == "demo"
    assert len(list((root / "measurements/bundle").glob("*.json"))) == 1
    learned, held_out = (set(column_of(root / name, "query_id")) for name in ("learn.parquet", "held_out.parquet"))
    assert len(learned | held_out) == 24
    assert not learned & held_out
    trained = json.loads((root / "teacher/manifest.json").read_bytes())
    assert trained["data"]["rows"] == 8 * len(learned)
    assert found["labels"] == 192
    shown = [str(root / name) for name in ("teacher", "run", "student", "bundle", "scores")]
    artifacts = open_artifacts(shown, Storage())
    links = trace(artifacts)
    proved = {(one.source.kind, one.target.kind) for one in links if one.is_same}
    assert proved == {("teacher", "label run"), ("label run", "student"), ("student", "bundle"), ("student", "scores")}
    assert changes(links, artifacts) == []
    assert b'id="lineage"' in (root / "report.html").read_bytes()
    split = json.loads((root / "student/manifest.json").read_bytes())["split"]["test"]
    assert (split["rows"], split["queries"]) == (8 * len(held_out), len(held_out))


def test_without_training_the_demo_goes_the_same_way_from_labels_on() -> None:
    """`tests/jobs/test_working_directory.py` runs all of it in `make faults`."""
    plain, taught = (steps_of("out/demo", seconds=2, has_training=taught) for taught in (False, True))
    assert (
        [line.split()[1] for _, line in plain[:2]] == [line.split()[1] for _, line in taught[2:4]] == ["run", "distill"]
    )
    assert plain[2:] == taught[4:-2]


def test_the_demo_stops_at_a_step_that_fails_and_says_which(relabel: Callable[..., Any], folder: Path) -> None:
    done = relabel("demo", "--engine", "fake", "--student", "absent")
    assert done.code == 4
    assert "2/8 A small student learns" in done.out
    assert "absent" in done.out, "the end of the log says why"
    assert "Stopped: `relabel distill out/demo/student.yaml` ended with exit code 4" in done.out


def test_the_demo_can_stop_when_the_labels_are_there(relabel: Callable[..., Any], folder: Path) -> None:
    done = relabel("demo", "--engine", "fake", "--labels-only")
    assert done.code == 0
    assert "$ relabel run out/demo/job.yaml" in done.out
    assert "192 labels, for instance:" in done.out
    assert "Agreement with the grades of the set's author:" in done.out
    assert (folder / "out/demo/logs/01-run.log").exists()
    assert len(done.out.splitlines()) + len(done.err.splitlines()) <= 30
    assert not (folder / "out/demo/student").exists()


def test_sigterm_ends_the_step_that_runs(folder: Path) -> None:
    script = folder / "step.py"
    script.write_text("import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(60)\n")

    def stop() -> None:
        while not (folder / "begun").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    done = call(f"python {script}", folder / "log")
    assert (done["exit_code"], done["seconds"] < 30) == (Exit.STOPPED, True)


def test_sigterm_that_comes_while_a_step_is_started_ends_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Popen(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    done = call("python -c 'import time; time.sleep(60)'", folder / "log")
    assert (done["exit_code"], done["seconds"] < 30) == (Exit.STOPPED, True)
