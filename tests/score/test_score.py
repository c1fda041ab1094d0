"""`relabel score` from end to end: what it writes, that nothing is lost, who may read it, and what it refuses."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.distill.students.model import StudentModel, load_student, student_digest
from relabel.manifests.errors import ModelError
from relabel.manifests.phi import DEFAULT_PHI
from tests.export.conftest import decoder  # noqa: F401
from tests.score.conftest import write_tiny_student

Rows = list[dict[str, Any]]
Score = Callable[..., Any]


def read(folder: Path, output: str = "out/scores") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / output / "manifest.json").read_bytes())
    return found


def test_every_row_gets_the_students_own_distributions_in_the_order_of_the_input(
    score: Score,
    write_pairs: Callable[..., Path],
    committed: Callable[..., Any],
    pairs: Rows,
    tiny: Path,
    folder: Path,
) -> None:
    """And the manifest says that a student made them, and which. A dry run writes nothing."""
    write_pairs()
    assert score("--dry-run").out == "Would score 24 of 24 rows in 2 shards of out/scores.\n"
    assert not (folder / "out").exists()
    assert score().code == 0
    manifest = read(folder)
    assert (manifest["provenance"]["kind"], manifest["provenance"]["model"]) == ("student", student_digest(tiny))
    assert manifest["engines"][0]["model_digest"] == student_digest(tiny)
    labels = committed("labels", "out/scores")
    assert list(labels) == list(range(24))
    probs = load_student(tiny).probabilities([(row["query"], f"{row['title']}\n\n{row['body']}") for row in pairs])
    for row, label in labels.items():
        assert (label["query_id"], label["doc_id"]) == (pairs[row]["query_id"], pairs[row]["doc_id"])
        assert label["probs"] == pytest.approx(probs["relevance"][row], abs=1e-5)
        assert label["grade"] == int(np.argmax(label["probs"]))
        assert label["expected_grade"] == pytest.approx(np.dot(label["probs"], [0, 1, 2]))
        assert label["subject_probs"] == pytest.approx(probs["subject"][row], abs=1e-5)
        assert label["attribute"] == int(np.argmax(label["attribute_probs"]))
        assert label["phi_grade"] == DEFAULT_PHI[label["subject"]][label["attribute"]]
        assert label["phi_agrees"] == (label["phi_grade"] == label["grade"])
        assert label["prompt_tokens"] > 0
    # a student that says one thing would hide a wrong order
    assert len({label["grade"] for label in labels.values()}) > 1


def test_a_student_without_node_heads_has_no_nodes(
    score: Score, write_pairs: Callable[..., Path], committed: Callable[..., Any], tmp_path: Path
) -> None:
    write_pairs()
    assert score(student=write_tiny_student(tmp_path / "plain", heads={"relevance": 4})).code == 0
    labels = committed("labels", "out/scores")
    assert {len(label["probs"]) for label in labels.values()} == {4}
    assert all("subject" not in label for label in labels.values())


def test_a_pair_that_is_too_long_is_cut_as_in_training_and_flagged(
    score: Score, write_pairs: Callable[..., Path], committed: Callable[..., Any], pairs: Rows, tiny: Path
) -> None:
    for row in pairs[::2]:
        row["body"] = "running " * 40
    # [CLS] q [SEP] title body [SEP] fill the 24 tokens exactly
    fits = (
        "red shoe 0",
        "shoe 0",
        " ".join(["red"] * (24 - 3 - 3 - 2)),
    )
    pairs[1] |= dict(zip(("query", "title", "body"), fits, strict=True))
    write_pairs()
    assert score().code == 0
    labels = committed("labels", "out/scores")
    assert [row for row, label in labels.items() if label["flags"] == ["document_truncated"]] == list(range(0, 24, 2))
    assert {labels[row]["prompt_tokens"] for row in (0, 1, 2)} == {24}
    student = load_student(tiny)
    cut = student.probabilities([(pairs[0]["query"], f"{pairs[0]['title']}\n\n{pairs[0]['body']}")])["relevance"][0]
    assert labels[0]["probs"] == pytest.approx(cut, abs=1e-5)


def test_done_means_done_and_starts_no_student(
    score: Score, write_pairs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pairs()
    assert score().code == 0

    def never(*_: Any) -> None:
        raise AssertionError("nothing to do, and the student was loaded")

    monkeypatch.setattr("relabel.jobs.score.start_student", never)
    again = score("--output", "json")
    assert (again.code, again.json["labelled"], again.json["this_run"]["pairs"]) == (10, 24, 0)
    assert score("--done-ok").code == 0


def test_columns_are_the_students_unless_others_are_named(
    score: Score, write_pairs: Callable[..., Path], committed: Callable[..., Any], pairs: Rows
) -> None:
    write_pairs()
    assert score().code == 0
    renamed = [
        {"qid": row["query_id"], "q": row["query"], "id": row["doc_id"], "t": row["title"], "b": row["body"]}
        for row in pairs
    ]
    write_pairs(renamed)
    score(to="out/other").refused(3, "`query_id`", "qid, q, id, t, b")
    assert score("--columns", "query_id=qid,query=q, doc_id=id,document=t+b", to="out/other").code == 0
    ours, theirs = committed("labels", "out/scores"), committed("labels", "out/other")
    assert [label["probs"] for label in ours.values()] == [label["probs"] for label in theirs.values()]


def test_batch_size_and_device_change_no_score_and_no_fingerprint(
    score: Score, write_pairs: Callable[..., Path], committed: Callable[..., Any], folder: Path
) -> None:
    write_pairs()
    assert score().code == 0
    assert score("--batch-tokens", "1", "--device", "cpu", to="out/single").code == 0
    assert read(folder)["fingerprint"] == read(folder, "out/single")["fingerprint"]
    for one, other in zip(
        committed("labels", "out/scores").values(), committed("labels", "out/single").values(), strict=True
    ):
        assert one["probs"] == pytest.approx(other["probs"], abs=1e-5)


def test_another_student_into_the_same_folder_is_refused(
    score: Score, write_pairs: Callable[..., Path], tmp_path: Path
) -> None:
    write_pairs()
    assert score().code == 0
    score(student=write_tiny_student(tmp_path / "other", seed=5)).refused(
        3,
        "out/scores: belongs to another job",
        "model",
        "Give another --to, or the options and the model as they were.",
    )
    score("--dtype", "bfloat16").refused(3, "belongs to another job", "engine.args.dtype")


def test_rows_whose_probabilities_are_nan_are_quarantined_and_never_grade_zero(
    score: Score,
    write_pairs: Callable[..., Path],
    relabel: Callable[..., Any],
    committed: Callable[..., Any],
    tmp_path: Path,
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from relabel.distill.students.model import student_files

    broken = write_tiny_student(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    word = json.loads((broken / "tokenizer.json").read_text())["model"]["vocab"]["7"]
    weights["embeddings.word_embeddings.weight"][word] = torch.nan  # "7" is in one body alone
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    (broken / "manifest.json").write_text(json.dumps({"files": student_files(broken)}))
    write_pairs()
    done = score("--output", "json", student=broken)
    assert done.code == 0
    assert done.json["this_run"]["statuses"] == {"ok": 23, "engine": 1}
    lost = committed("quarantine", "out/scores")
    assert {(row["status"], row["reason"]) for row in lost.values()} == {
        ("engine", "the student's probabilities are NaN")
    }
    assert list(lost) == [7]
    assert len(committed("labels", "out/scores")) == 23
    assert relabel("verify", "out/scores").code == 0


def test_row_whose_text_is_not_utf8_is_quarantined_alone(
    score: Score, write_pairs: Callable[..., Path], committed: Callable[..., Any], pairs: Rows
) -> None:
    table = pa.Table.from_pylist(pairs)
    raw = [row["body"].encode() for row in pairs]
    raw[7] = b"caf\xe9"
    broken = pa.array(raw, pa.binary()).view(pa.string())
    write_pairs(table.set_column(table.schema.get_field_index("body"), "body", broken))
    assert score().code == 0
    lost = committed("quarantine", "out/scores")
    assert {row: one["status"] for row, one in lost.items()} == {7: "text"}
    assert len(committed("labels", "out/scores")) == 23


def test_a_folder_that_is_not_the_whole_student_that_was_trained_is_refused(
    score: Score, write_pairs: Callable[..., Path], folder: Path, tiny: Path
) -> None:
    write_pairs()
    (folder / "empty").mkdir()
    score(student="empty").refused(3, "holds no student.json")
    score(student="absent").refused(3, "absent: no such folder.")
    (folder / "pulled/.versions").mkdir(parents=True)
    score(student="pulled").refused(3, "pulled/current")
    student = Path(shutil.copytree(tiny, folder / "copy"))
    data = bytearray((student / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (student / "model.safetensors").write_bytes(bytes(data))
    score(student="copy").refused(3, "model.safetensors changed since the student was trained")
    (student / "tokenizer_config.json").unlink()
    score(student="copy").refused(3, "tokenizer_config.json", "changed since")
    (student / "manifest.json").unlink()
    score(student="copy").refused(3, "manifest.json: is missing", "relabel distill")


def test_scores_never_go_into_a_students_folder(
    score: Score, write_pairs: Callable[..., Path], tmp_path: Path, tiny: Path
) -> None:
    """A plan and labels among its files would make it a student that nobody can use."""
    write_pairs()
    for name in ("itself", "other"):
        shutil.copytree(tiny, tmp_path / name)
    for to in ("itself", "other"):
        score(student=tmp_path / "itself", to=str(tmp_path / to)).refused(3, "manifest.json", "another `output`")
    for name in ("itself", "other"):
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == sorted(path.name for path in tiny.iterdir())


# The scorer alone: every student, any batch size, too little memory, a stop amid a block.


PAIRS = [(f"red shoe {row % 5}", " ".join(["running", "blue", str(row)] * (row % 6))) for row in range(40)]


@pytest.fixture
def student(tiny: Path) -> StudentModel:
    return load_student(tiny)


def scored(student: StudentModel, batch_tokens: int, pairs: list[tuple[str, str]] = PAIRS) -> dict[str, np.ndarray]:
    student.batch_tokens = batch_tokens
    return student.score(student.encode(pairs))


def test_a_decoder_is_scored_like_an_encoder_and_reports_cut_documents(decoder: Path) -> None:  # noqa: F811
    student = load_student(decoder, batch_tokens=400)
    pairs = [("red shoe", "a"), ("red shoe", "long " * 300), ("blue", "fits")]
    rows = student.encode(pairs)
    assert [row.is_cut for row in rows] == [False, True, False]
    found = student.score(rows)
    alone = np.concatenate([student.probabilities([pair])["relevance"] for pair in pairs])
    assert found["relevance"] == pytest.approx(alone, abs=1e-4)


class Cramped:
    """A module on a device that holds so many rows at once."""

    def __init__(self, module: Any, most: int) -> None:
        self.module, self.most, self.sizes = module, most, []

    def __call__(self, **batch: Any) -> Any:
        import torch

        rows = len(batch["input_ids"])
        if rows > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.sizes.append(rows)
        return self.module(**batch)


def test_a_batch_that_does_not_fit_is_halved_until_it_does_and_it_is_said(
    student: StudentModel, caplog: pytest.LogCaptureFixture
) -> None:
    whole = scored(student, 8192)
    student.module = Cramped(student.module, 12)
    with caplog.at_level(logging.WARNING):
        halved = scored(student, 8192)
    assert all(halved[name] == pytest.approx(whole[name], abs=1e-5) for name in whole)
    assert sum(student.module.sizes) == len(PAIRS)
    assert "a batch of 40 rows does not fit into the device's memory; batches now hold 4096 tokens" in caplog.text


def test_a_pair_that_does_not_fit_alone_is_an_error_that_says_so(student: StudentModel) -> None:
    student.module = Cramped(student.module, 0)
    with pytest.raises(ModelError, match=r"a single pair of .* tokens does not fit"):
        scored(student, 8192)


def test_a_stop_amid_a_block_gives_it_up(student: StudentModel) -> None:
    student.batch_tokens = 60
    reported: list[int] = []

    def on_progress(rows: int) -> bool:
        reported.append(rows)
        return len(reported) < 3

    assert student.score(student.encode(PAIRS), on_progress) is None
    assert len(reported) == 3


# kill -9 or SIGTERM amid a score run, then the same command again: the bytes of an undisturbed run, nothing lost,
# nothing doubled. Every killed process is a real `relabel score` in a fresh interpreter. What a kill does at each
# failpoint, tests/faults shows for the machinery that both share; here it is what is scoring's own: batches that
# follow from a chunk alone.


ROWS = 400
CHUNK = 25


def write_scattered_pairs(folder: Path) -> Path:
    """Pairs of forty queries that lie scattered, documents of very different length, so that batches mix rows."""
    rows = range(ROWS)
    table = {
        "query_id": [f"q{row % 40}" for row in rows],
        "query": [f"red shoe {row % 30}" for row in rows],
        "doc_id": [f"d{row}" for row in rows],
        "title": [f"shoe {row % 7}" for row in rows],
        "body": [" ".join(["running", "blue", "size", str(row % 30)] * (row % 4)) for row in rows],
    }
    pq.write_table(pa.table(table), folder / "pairs.parquet", row_group_size=64)
    return folder / "pairs.parquet"


def command(student: Path, pairs: Path, to: Path) -> list[str]:
    options = [
        "--shards",
        "2",
        "--chunk-rows",
        str(CHUNK),
        "--batch-tokens",
        "96",
        "--device",
        "cpu",
        "--output",
        "json",
    ]
    return [sys.executable, "-m", "relabel", "score", str(student), "--input", str(pairs), "--to", str(to), *options]


def environment(failpoint: str = "") -> dict[str, str]:
    return {**os.environ, "RELABEL_FAILPOINT": failpoint, "OMP_NUM_THREADS": "1"}


def run(line: list[str], failpoint: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, env=environment(failpoint), capture_output=True, text=True, timeout=120, check=False)


def committed(to: Path) -> dict[str, str]:
    """Every label file that the manifest names, with the digest of its bytes."""
    manifest = json.loads((to / "manifest.json").read_bytes())
    assert manifest["rows"] == {"in": ROWS, "labelled": ROWS, "reused": 0, "quarantined": 0}
    return {file["path"]: file["sha256"] for file in manifest["labels"]}
