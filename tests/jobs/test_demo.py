"""The demo goes the whole way: its last step, a pulled bundle asked through its own loader, says what its first ones
made.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from relabel.jobs.commands.demo import (
    DEMO_MODEL,
    CpuTimes,
    StepProgress,
    Way,
    call,
    last_words,
    load_lessons,
    load_searches,
    seen_text,
    steps_of,
    texts_of,
)
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
    lessons = load_lessons()[:160]  # all of them take minutes, and teach so small a model no more
    monkeypatch.setattr("relabel.jobs.commands.demo.load_lessons", lambda: lessons)
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
    judged = column_of(root / "held_out.parquet", "query_id")
    assert len(json.loads((root / "answers.json").read_bytes())) == len(judged)
    served = json.loads((root / "served/current/manifest.json").read_bytes())
    assert served["lineage"]["student"]["name"] == "demo"
    assert len(list((root / "measurements/bundle").glob("*.json"))) == 1
    learned, held_out = (set(column_of(root / name, "query_id")) for name in ("learn.parquet", "held_out.parquet"))
    assert not learned & set(column_of(root / "pairs.parquet", "query_id"))
    trained = json.loads((root / "teacher/manifest.json").read_bytes())
    assert trained["data"]["rows"] == len(lessons)
    assert found["labels"] == 1280
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
    plain_words, taught_words = ([line.split()[:2] for _, line in steps] for steps in (plain, taught))
    assert [words[1] for words in plain_words[:2]] == ["run", "distill"]
    assert plain_words == taught_words[2:-1]


def test_the_adapter_that_ships_was_made_of_the_lessons_and_the_prompts_that_ship() -> None:
    demo = resources.files("relabel.jobs").joinpath("demo")
    manifest = json.loads(demo.joinpath("adapter/manifest.json").read_bytes())
    assert manifest["data"]["sha256"] == hashlib.sha256(demo.joinpath("teach.jsonl").read_bytes()).hexdigest()
    for name, digest in manifest["templates"].items():
        assert hashlib.sha256(demo.joinpath(f"templates/{name}").read_bytes()).hexdigest() == digest
    assert len(demo.joinpath("adapter/adapter_model.safetensors").read_bytes()) < 6_000_000
    assert "Apache-2.0" in demo.joinpath("adapter/README.md").read_text()


def test_the_job_lays_the_adapter_that_ships_over_the_default_teacher_alone(
    relabel: Callable[..., Any], folder: Path
) -> None:
    with_adapter = texts_of(Way(teacher=DEMO_MODEL, student="s", has_adapter=True))["job.yaml"]
    assert "args: {lora: adapter}" in with_adapter
    relabel("demo", "--engine", "fake", "--labels-only")
    assert "lora" not in (folder / "out/demo/job.yaml").read_text()
    assert not (folder / "out/demo/adapter").exists()


def test_the_student_learns_from_the_teachers_labels_alone() -> None:
    student = yaml.safe_load(texts_of(Way(teacher=DEMO_MODEL, student="s"))["student.yaml"])
    assert student["labels"] == ["run"]
    assert "gold" not in student


def test_the_demo_stops_at_a_step_that_fails_and_says_which(relabel: Callable[..., Any], folder: Path) -> None:
    done = relabel("demo", "--engine", "fake", "--student", "absent")
    assert done.code == 4
    assert "2/11 A small student learns" in done.out
    assert "absent" in done.out, "the end of the log says why"
    assert "Stopped: `relabel distill out/demo/student.yaml --resume` ended with exit code 4" in done.out
    assert '"exit_code"' not in done.out, "for people"


def test_the_demo_can_stop_when_the_labels_are_there(relabel: Callable[..., Any], folder: Path) -> None:
    done = relabel("demo", "--engine", "fake", "--labels-only")
    assert done.code == 0
    assert "$ relabel run out/demo/job.yaml" in done.out
    assert "1280 labels, for instance:" in done.out
    assert "makes its answers up" in done.out
    assert "The teacher" not in done.out.split("for instance:")[1], "such labels get no remark"
    assert (folder / "out/demo/logs/01-run.log").exists()
    assert len(done.out.splitlines()) + len(done.err.splitlines()) <= 30
    assert not (folder / "out/demo/student").exists()


def test_a_step_that_stops_with_two_objects_of_json_shows_people_none(folder: Path) -> None:
    script = folder / "step.py"
    script.write_text(
        'print("words")\nprint(\'{"labelled": 3}\')\nprint(\'{"error": "Stopped"}\')\nraise SystemExit(130)\n'
    )
    done = call(f"python {script}", folder / "log")
    assert (done["exit_code"], done["result"]) == (130, {"error": "Stopped"})
    assert last_words(folder / "log") == ["words"]


def test_a_slow_step_shows_how_far_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("relabel.jobs.commands.demo.FIRST_LINE_S", 0)
    script = folder / "step.py"
    script.write_text(
        "import sys, time\nprint('16 of 800 pairs', file=sys.stderr, flush=True)\ntime.sleep(3)\nprint('{}')\n"
    )
    call(f"python {script}", folder / "log")
    assert capsys.readouterr().err.splitlines() == ["  16 of 800 pairs"]


def test_a_step_that_counts_shows_how_long_it_will_take(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter((0.0, 10.0, 70.0, 130.0, 190.0))
    monkeypatch.setattr("relabel.jobs.commands.demo.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    log = folder / "log"
    progress = StepProgress()
    for line in ("step 10 of 130", "step 40 of 130", "step 70 of 130", "80 of 800 pairs · 2 pairs/s · ETA 0:06:00"):
        log.write_text(f"{'.' * 9000}\n{line}\n")
        progress.show(log)
    assert capsys.readouterr().err.splitlines() == [
        "  step 10 of 130",
        "  step 40 of 130 · about 3 min left",
        "  step 70 of 130 · about 2 min left",
        "  80 of 800 pairs · 2 pairs/s · ETA 0:06:00",
    ]


def test_ctrl_c_is_reported_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("relabel.jobs.commands.demo.FIRST_LINE_S", 0)
    log = folder / "log"
    log.write_text("No checkpoint was written yet.\n\nStopped by hand.\n")
    StepProgress().show(log)
    assert capsys.readouterr().err == ""
    assert last_words(log) == ["No checkpoint was written yet.", "Stopped by hand."]


def test_lines_of_progress_are_not_repeated_when_a_step_is_stopped(folder: Path) -> None:
    log = folder / "log"
    counted = "".join(f"{pairs} of 1,280 pairs · 0.2 pairs/s · ETA 1:20:02\n" for pairs in range(16, 96, 16))
    log.write_text(f"{counted}step 3 of 145, loss 0.2\nopen chunks have 20 s to commit.\n{counted}Stopped by hand.\n")
    assert last_words(log) == ["open chunks have 20 s to commit.", "Stopped by hand."]


def test_a_demo_that_is_stopped_says_how_many_pairs_are_labelled_and_continues_from_them(
    relabel: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(command: str, log: Path) -> dict[str, Any]:
        """A run that has done one shard when it ends."""
        return {**call(f"{command} --shard 1/12", log), "exit_code": Exit.PARTIAL}

    with monkeypatch.context() as patch:
        patch.setattr("relabel.jobs.commands.demo.call", stopped)
        begun = relabel("demo", "--engine", "fake", "--labels-only")
    assert begun.code == Exit.PARTIAL
    said = re.search(r"ended with exit code 20\. (\d+) of 1,280 pairs are committed; what else was", begun.out)
    assert said is not None
    kept = int(said[1])
    assert 0 < kept < 1280
    again = ("demo", "--engine", "fake", "--labels-only")
    assert f"1280 labels, {kept} of them from before, for instance:" in relabel(*again).out
    done = relabel(*again, "--output", "json")
    assert (done.json["labels"], done.json["steps"][0]["result"]["this_run"]["pairs"]) == (1280, 0)


def test_a_script_of_the_demo_that_is_stopped_shows_no_traceback(
    relabel: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = folder / "step.py"
    script.write_text("raise KeyboardInterrupt\n")
    monkeypatch.setattr("relabel.jobs.commands.demo.steps_of", lambda *_, **__: [("It answers", f"python {script}")])
    done = relabel("demo", "--engine", "fake")
    assert done.code == Exit.STOPPED
    assert "Stopped by hand." in done.out
    assert "Traceback" not in done.out + done.err


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


def test_what_ships_is_what_the_checked_in_script_composes_and_no_kind_of_product_is_in_both_files() -> None:
    from benchmarks import make_demo_pairs as script

    lessons = script.composed("teach", script.TEACH_KINDS, script.TEACH_QUERIES, script.TEACH_SEED)
    searches = script.composed("shop", script.SHOP_KINDS, script.SHOP_QUERIES, script.SHOP_SEED)
    assert (lessons, searches) == (load_lessons(), load_searches())
    taught, shown = (
        {name for kind in kinds for name in (*kind.names, *kind.near)}
        for kinds in (script.TEACH_KINDS, script.SHOP_KINDS)
    )
    assert not taught & shown
    for attribute in (*script.COLOURS.values(), *script.MATERIALS.values(), *script.PEOPLE.values()):
        assert not set(attribute.teach) & set(attribute.shop)


def test_published_pages_find_the_searches_that_they_are_about() -> None:
    from benchmarks.claims.small_models import searches

    rows = "".join(json.dumps(row) + "\n" for row in searches().to_dicts())
    digest = "cb5fdff969b309895fd031c0ae9fc3020ac68b462e129254b9646734d393cb73"
    assert hashlib.sha256(rows.encode()).hexdigest() == digest


def auc_without_queries(learned: list[dict[str, Any]], judged: list[dict[str, Any]]) -> float:
    """Of grades above 0, by a model that sees the words of documents alone."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    texts, others = ([f"{pair['title']} {pair['body']}" for pair in pairs] for pairs in (learned, judged))
    words = CountVectorizer(ngram_range=(1, 2), min_df=2, token_pattern=r"[\w&]+|[^\w\s]").fit(texts)
    model = LogisticRegression(C=0.1, max_iter=500)
    model.fit(words.transform(texts), [pair["grade"] > 0 for pair in learned])
    chances = model.predict_proba(words.transform(others))[:, 1]
    return float(roc_auc_score([pair["grade"] > 0 for pair in judged], chances))


def test_a_documents_words_do_not_say_its_grade() -> None:
    """Else a model could learn how accessories are worded, and would look as if it read the query."""
    lessons = load_lessons()
    searches = load_searches()
    half = len(searches) // 2
    assert 0.4 < auc_without_queries(lessons, searches) < 0.6
    assert 0.4 < auc_without_queries(searches[:half], searches[half:]) < 0.6


def evaluation_with(teacher: tuple[float, float], student: tuple[float, float]) -> dict[str, Any]:
    """Of a teacher and a student, each with the low ends of its accuracy and its AUC; values lie 0.05 above."""

    def figures(lows: tuple[float, float]) -> dict[str, Any]:
        bounds = zip(("accuracy", "auc_0/12"), lows, strict=True)
        return {name: {"value": low + 0.05, "low": low, "high": low + 0.1} for name, low in bounds}

    baselines = {"constant": {"accuracy": 0.4}, "lexical": {"auc_0/12": 0.6}}
    both = {
        "teacher": {"figures": figures(teacher), "baselines": baselines},
        "student": {"figures": figures(student), "baselines": baselines},
    }
    return {"comparisons": [{"student": "student", "against_gold": both}]}


def test_the_demo_says_better_only_where_the_whole_interval_is_above_both_baselines() -> None:
    text = seen_text(evaluation_with((0.38, 0.8), (0.45, 0.7)), CpuTimes(40.0, 2.0, "int8"))
    assert "The teacher is not shown to be better than one grade for all (accuracy 0.43 against 0.40)" in text
    assert "The student is better than one grade for all (accuracy 0.50 against 0.40)" in text
    assert "bundle in int8 2.0 ms of CPU time here, and the teacher, with its start, 40: 20 times as much" in text
    silent = seen_text(evaluation_with((0.45, 0.55), (0.45, 0.55)), CpuTimes(None, 2.0))
    assert silent.count("not shown") == 2
    assert "CPU time" not in silent, "an earlier demo measured it"
