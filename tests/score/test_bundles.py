"""`relabel score BUNDLE`: the student's labels within parity, in the bundle's default precision or one that is named
and passed its gate, and none from a bundle that is not what its manifest says.
"""

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import relabel.jobs.score as students
from relabel.distill.students.model import student_digest
from relabel.export.bundle_facts import choose_precision, read_parity
from relabel.export.bundles import open_bundle, seal_bundle
from relabel.export.exporting import export_bundle
from relabel.export.loader import AVX512, Checked, Student
from relabel.export.parity import PairsFile
from relabel.export.specs import ExportSpec
from relabel.jobs.report.artifacts import open_artifacts
from relabel.jobs.report.lineage import trace
from relabel.manifests.errors import UsageError
from relabel.manifests.files import Storage
from tests.score.test_score import command, run, write_scattered_pairs
from tests.score.test_score import committed as files_of

Rows = list[dict[str, Any]]
Score = Callable[..., Any]


@pytest.fixture(scope="module")
def bundle(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny student in fp32 and int8; its int8 passes whatever it loses, which is more on a CPU without VNNI."""
    folder = tmp_path_factory.mktemp("exported")
    bounds = {"int8_max_f1_loss": 100, "int8_min_tau": -1.0, "min_pairs": 40}
    spec = ExportSpec(precisions="fp32,int8", parity=bounds)  # type: ignore[arg-type]
    source = PairsFile(str(write_scattered_pairs(folder)))
    export_bundle(tiny, folder / "tiny", spec, Storage(), pairs=source, provider="cpu")
    return folder / "tiny"


def texts_of(pairs: Rows) -> list[tuple[str, str]]:
    return [(row["query"], f"{row['title']}\n\n{row['body']}") for row in pairs]


def test_labels_are_the_students_within_parity(
    score: Score, write_pairs: Callable[..., Path], committed: Callable[..., Any], pairs: Rows, tiny: Path, bundle: Path
) -> None:
    """With flags of pairs that were cut, and all columns of heads other than relevance."""
    for row in pairs[::3]:
        row["body"] = "running " * 40
    write_pairs()
    assert score().code == 0
    assert score("--precision", "fp32", student=bundle, to="out/exported").code == 0
    ours, theirs = committed("labels", "out/exported"), committed("labels", "out/scores")
    assert list(ours) == list(theirs) == list(range(24))
    bound = ExportSpec().parity.fp32_max_abs
    for row, label in ours.items():
        other = theirs[row]
        for name in ("probs", "subject_probs", "attribute_probs"):
            assert label.pop(name) == pytest.approx(other.pop(name), abs=bound)
        assert label.pop("expected_grade") == pytest.approx(other.pop("expected_grade"), abs=3 * bound)
        assert label.pop("key") != other.pop("key")  # nobody takes the one for the other's answer
        assert label == other
    assert {tuple(label["flags"]) for label in ours.values()} == {(), ("document_truncated",)}


def test_a_precision_that_is_named_labels_in_batches_that_follow_from_the_chunk_and_the_manifest_names_it(
    score: Score,
    write_pairs: Callable[..., Path],
    committed: Callable[..., Any],
    pairs: Rows,
    folder: Path,
    tiny: Path,
    bundle: Path,
) -> None:
    write_pairs()
    assert score("--precision", "int8", student=bundle).code == 0
    labels = committed("labels", "out/scores")
    student = Student(bundle, provider="cpu", precision="int8")
    plan = json.loads((folder / "out/scores/manifest.json").read_bytes())
    chunks = [sorted(rows) for rows in _chunks(folder / "out/scores", plan)]
    assert sum(map(len, chunks)) == 24
    for rows in chunks:
        found = student.probabilities(texts_of([pairs[row] for row in rows]))["relevance"]
        for row, probs in zip(rows, found, strict=True):
            assert labels[row]["probs"] == probs.tolist()
    (engine,) = plan["engines"]
    assert (engine["family"], engine["dtype"], engine["device"]) == ("student", "int8", "cpu")
    named = engine["details"]["student"], engine["details"]["bundle"]
    assert named == (student_digest(tiny), open_bundle(bundle).version)


def _chunks(output: Path, manifest: dict[str, Any]) -> list[list[int]]:
    return [pq.read_table(output / file["path"])["row_id"].to_pylist() for file in manifest["labels"]]


def test_only_precisions_that_passed_can_be_chosen(bundle: Path) -> None:
    parity = read_parity(open_bundle(bundle).facts["parity"], "tiny")
    refused = replace(parity, models=[replace(one, has_passed=one.precision == "fp32") for one in parity.models])
    assert choose_precision(refused, "cpu", "fp32").precision == "fp32"
    with pytest.raises(UsageError, match="--precision int8: those of this bundle that passed their gate are fp32"):
        choose_precision(refused, "cpu", "int8")
    with pytest.raises(UsageError, match="--precision int8-static"):
        choose_precision(parity, "openvino", "int8-static")
    assert choose_precision(parity, "cpu", "fp32").reason == "named"
    doubtful = replace(parity, models=[replace(one, doubts=["it could lose 3.2 points"]) for one in parity.models])
    assert "its gate is undecided: it could lose 3.2 points" in choose_precision(doubtful, "cpu", "int8").reason


def test_options_of_the_other_kind_are_refused(score: Score, write_pairs: Callable[..., Path], bundle: Path) -> None:
    write_pairs()
    score("--precision", "fp16", student=bundle).refused(2, "--precision fp16", "fp32, int8")
    score("--dtype", "float32", student=bundle).refused(2, "--dtype float32", "is a bundle", "--precision")
    score("--precision", "int8").refused(2, "--precision int8", "is a student", "Export it")
    score("--device", "cuda:1", student=bundle).refused(2, "--device cuda:1", "auto, cpu, cuda or openvino")


def test_another_precision_or_size_of_batches_is_another_job(
    score: Score, write_pairs: Callable[..., Path], bundle: Path
) -> None:
    """An int8 answer depends on its batch; a student's on nothing but the pair."""
    write_pairs()
    assert score("--shard", "0/2", student=bundle).code == 0
    score("--precision", "int8", student=bundle).refused(3, "belongs to another job", "engine.args.precision")
    score("--batch-tokens", "64", student=bundle).refused(3, "belongs to another job", "engine.args.batch_tokens")


@pytest.mark.parametrize("name", ["model.int8.onnx", "tokenizer.json"])
def test_a_bundle_whose_bytes_are_not_the_sealed_ones_labels_nothing(
    score: Score, write_pairs: Callable[..., Path], tmp_path: Path, folder: Path, bundle: Path, name: str
) -> None:
    shutil.copytree(bundle, tmp_path / "bent")
    data = bytearray((tmp_path / "bent" / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "bent" / name).write_bytes(bytes(data))
    write_pairs()
    score(student="bent").refused(3, f"bent/{name}: is not what its manifest says", "pull the bundle again")
    assert not list((folder / "out/scores").glob("labels/**/*.parquet"))


def test_a_killed_run_of_a_bundle_ends_with_the_bytes_of_one_left_alone(bundle: Path, tmp_path: Path) -> None:
    pairs = write_scattered_pairs(tmp_path)
    assert run(command(bundle, pairs, tmp_path / "whole")).returncode == 0
    line = command(bundle, pairs, tmp_path / "out")
    killed = run(line, "after_receipt:5")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert run(line).returncode == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert run(line).returncode == 10


def test_a_reports_lineage_leads_from_labels_to_the_bundle_that_labelled_and_to_its_student(
    score: Score, write_pairs: Callable[..., Path], tmp_path: Path, bundle: Path
) -> None:
    """By the digest of its manifest: a bundle that was sealed again is another one."""
    write_pairs()
    assert score(student=bundle).code == 0

    def links(*places: Path | str) -> set[tuple[str, str, bool | None]]:
        found = trace(open_artifacts([str(place) for place in places], Storage()))
        assert len({thing for source, target, _ in found for thing in (source, target) if thing.kind == "student"}) == 1
        return {(one.source.kind, one.target.kind, one.is_same) for one in found}

    alone = {("data", "scores", None), ("student", "bundle", None), ("bundle", "scores", None)}
    assert links("out/scores") == alone
    given = links("out/scores", bundle)
    assert {("student", "bundle", None), ("bundle", "scores", True)} <= given
    assert not any(source == "student" and target == "scores" for source, target, _ in given)
    shutil.copytree(bundle, tmp_path / "sealed")
    seal_bundle(tmp_path / "sealed", {**open_bundle(bundle).own_facts, "latency": {}})
    assert ("bundle", "scores", None) in links("out/scores", tmp_path / "sealed")


# `relabel score BUNDLE --device openvino`: only where it is asked for, in one precision a run, after this machine
# has answered the reference pairs, and its labels say so.


Flags = Callable[..., None]


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> Flags:
    """`flags("amx_bf16")`: of the CPU, as the choice sees them."""
    return lambda *names: monkeypatch.setattr(students, "cpu_flags", lambda: frozenset(names))


def test_labels_are_those_of_fp32_and_name_runtime_version_and_hint(
    score: Score,
    write_pairs: Callable[..., Path],
    committed: Callable[..., Any],
    folder: Path,
    bundle: Path,
) -> None:
    openvino = pytest.importorskip("openvino")
    write_pairs()
    done = score("--device", "openvino", "--precision", "fp32", student=bundle)
    assert (done.code, "tiny on openvino 2" in done.err) == (0, True), done.err
    assert score("--device", "cpu", "--precision", "fp32", student=bundle, to="out/other").code == 0
    ours, theirs = committed("labels", "out/scores"), committed("labels", "out/other")
    for row, label in theirs.items():
        assert ours[row]["probs"] == pytest.approx(label["probs"], abs=1e-5)
        assert ours[row]["key"] != label["key"], "nobody takes the one for the other's answer"
    manifest = json.loads((folder / "out/scores/manifest.json").read_bytes())
    (engine,) = manifest["engines"]
    assert (engine["device"], engine["dtype"]) == ("openvino", "fp32")
    assert openvino.__version__.startswith(engine["version"])
    assert (engine["details"]["runtime"], engine["details"]["precision_hint"]) == ("openvino", "f32")
    assert isinstance(engine["details"]["has_amx"], bool)


def test_a_run_has_one_runtime(score: Score, write_pairs: Callable[..., Path], bundle: Path) -> None:
    pytest.importorskip("openvino")
    write_pairs()
    assert score("--shard", "0/2", "--precision", "fp32", student=bundle).code == 0
    other = score("--device", "openvino", "--precision", "fp32", student=bundle)
    other.refused(3, "belongs to another job", "engine.args.runtime")


def test_without_amx_it_stays_with_onnxruntime_and_says_so(
    score: Score,
    write_pairs: Callable[..., Path],
    bundle: Path,
    flags: Flags,
) -> None:
    flags(AVX512)
    write_pairs()
    done = score("--device", "openvino", "--dry-run", student=bundle)
    assert done.code == 0
    assert "precision fp32 on cpu: the bundle's default" in done.err
    assert "openvino: no amx_bf16 here (this CPU has avx512_bf16 alone), so onnxruntime answers." in done.err


def test_a_machine_that_answers_otherwise_labels_nothing(
    score: Score,
    write_pairs: Callable[..., Path],
    folder: Path,
    bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("openvino")
    monkeypatch.setattr(students, "check_answers", lambda _: Checked("tiny, fp32 on openvino", 1e-4, [0.0, 0.5]))
    write_pairs()
    line = ("--device", "openvino", "--precision", "fp32")
    score(*line, student=bundle).refused(5, "tiny, fp32 on openvino: 1 of 2 reference pairs", "pair 1 by 0.5")
    assert not list((folder / "out/scores").glob("labels/**/*.parquet"))
