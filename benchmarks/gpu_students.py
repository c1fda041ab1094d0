"""Parts of the GPU day about students: distilling, exporting, benching and scoring, against bare loops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import score_vs_torch, train_vs_peers
from benchmarks.gpu_models import ROOT, made_up_pairs, write_pairs
from benchmarks.gpu_teachers import wait_until
from benchmarks.paired import paired_ratio
from relabel.distill.students.model import load_student
from relabel.distill.students.spec import DistillSpec

if TYPE_CHECKING:
    from benchmarks.gpu_day import Day

TABLE3_S = {1: 0.140, 10: 0.172, 100: 0.333, 1000: 2.37, 10_000: 10.9}
"""Seconds by documents in R3A's Table 3, on 8 A100."""


def spec_values(day: Day, kind: str, shape: str, rows: int, **train: Any) -> dict[str, Any]:
    """A distillation on trusted grades alone."""
    pairs = write_pairs(day.folder / f"gold-{rows}.parquet", made_up_pairs(rows // 8, 8, doc_words=day.pick(260, 20)))
    return {
        "name": "day", "labels": [], "gold": {"path": str(pairs), "grade": "grade"}, "loss": {"gold_weight": 1.0},
        "student": {"kind": kind, "model": str(day.model(shape))},
        "train": {"device": day.pick("auto", "cpu"), "precision": day.pick("bf16", "fp32"), "epochs": 1, **train},
        "split": {"dev": 0.05, "test": 0.05},
        "output": str(day.folder / f"student-{kind}-{os.getpid()}"),
    }  # fmt: skip


def relabel(*line: str) -> dict[str, Any]:
    """A command to its end, and its JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "relabel", *line, "--output", "json"], cwd=ROOT, stdout=subprocess.PIPE, check=False
    )
    assert done.returncode in (0, 5), f"relabel {line[0]} ended with {done.returncode}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _trained(day: Day, values: dict[str, Any], what: str, *, least: float | None) -> None:
    from relabel.distill.students.examples import load_examples
    from relabel.manifests.files import Storage

    spec = DistillSpec(**values)
    examples = load_examples(spec, Storage())
    found: dict[str, list[float]] = {"loop": [], "bare": []}
    for number in range(day.pick(2, 1)):
        for side in ("loop", "bare") if number % 2 else ("bare", "loop"):
            call = {"loop": train_vs_peers.by_relabels_loop, "bare": train_vs_peers.by_bare_loop}[side]
            found[side].append(call(spec, examples)["steady_rows_per_s"])
    ours, bare = (median(found[side]) for side in ("loop", "bare"))
    day.emit(f"distill, {what}", ours, "rows/s", baseline=bare, least=least, least_ratio=0.98, rounds=found)


def distill(day: Day) -> None:
    """An encoder: relabel's trainer against a bare loop over the same batches, layers compiled in both."""
    rows = day.pick(24_576, 128)
    sizes = {"batch_size": day.pick(256, 16), "max_tokens": day.pick(256, 32), "compile": day.pick("auto", "off")}
    values = spec_values(day, "encoder", "bert-base", rows, **sizes)
    _trained(day, values, "BERT-base, 256 tokens", least=2500)


def distill_decoder(day: Day) -> None:
    """A decoder: rows/s, and a training that is killed and resumed."""
    rows = day.pick(1024, 96)
    sizes = {
        "batch_size": day.pick(16, 8),
        "save_every": day.pick(30, 3),
        "keep_checkpoints": 1,
        "max_tokens": 512,
        "learning_rate": 1e-5,
    }
    values = spec_values(day, "decoder", "qwen-1.5b", rows, **sizes)
    values["student"]["batching"] = "packed"
    output = Path(values["output"])
    file = day.folder / "student.json"
    file.write_text(json.dumps(values))
    first = subprocess.Popen([sys.executable, "-m", "relabel", "distill", str(file)], cwd=ROOT)
    wait_until(lambda: any((output / "checkpoints").glob("checkpoint-*")), first)
    first.send_signal(signal.SIGKILL)
    first.wait()
    started = time.perf_counter()
    relabel("distill", str(file), "--resume")
    training = json.loads((output / "manifest.json").read_text())["training"]
    day.emit(
        "distill, decoder 1.5B, after kill -9", training["rows_per_s"], "rows/s", steps=training["steps"],
        resumed_in_s=round(time.perf_counter() - started, 1),
    )  # fmt: skip


def bench(day: Day) -> None:
    """Export and Table 3, and the same batches by onnxruntime alone."""
    student = score_vs_torch.make_student(
        str(day.model("bert-base")), day.folder / f"to-export-{os.getpid()}", day.pick(256, 32)
    )
    pairs = write_pairs(day.folder / "bench.parquet", made_up_pairs(32, 8, doc_words=day.pick(200, 20)))
    bundle, provider = day.folder / f"bundle-{os.getpid()}", day.pick("cuda", "cpu")
    precision = day.pick("fp16", "fp32")
    started = time.perf_counter()
    relabel(
        "export", str(student), "--to", str(bundle), "--precisions", precision, "--provider", provider, "--pairs",
        str(pairs), "--set", "parity.min_pairs=256", "--set", "parity.batch_sizes=[1,32]",
    )  # fmt: skip
    day.emit(f"export of BERT-base, {precision} on {provider}", time.perf_counter() - started, "s")
    found = relabel(
        "bench", str(bundle), "--providers", provider, "--precisions", precision, "--shapes",
        ",".join(f"{count}xreplay" for count in TABLE3_S), "--pairs", str(pairs), "--seconds", day.pick("40", "10"),
    )  # fmt: skip
    rows = [row for model in found["models"] for row in model["closed"]]
    seconds = {row["rows"]: row["seconds"] / row["samples"] for row in rows}
    raw = raw_seconds(bundle, provider, precision, pairs, [size for size in seconds if size <= day.pick(10_000, 100)])
    for count, took in seconds.items():
        day.emit(
            f"{count} documents, BERT-base {precision}, from texts; baseline: onnxruntime, from tokens", took,
            "s", baseline=raw.get(count), most=TABLE3_S[count],
        )  # fmt: skip


def raw_seconds(bundle: Path, provider: str, precision: str, pairs: Path, counts: list[int]) -> dict[int, float]:
    """onnxruntime's own call over rows that are tokens already, in batches of 32 sorted by length; median of three."""
    import pyarrow.parquet as pq

    sys.path.insert(0, str(bundle))
    from load import Student

    student = Student(bundle, provider=provider, precision=precision)
    assert provider == "cpu" or "CUDAExecutionProvider" in student.session.get_providers()
    texts = [(row["query"], row["document"]) for row in pq.read_table(pairs).to_pylist()]
    rows = sorted(student.encoder.encode(texts), key=lambda row: len(row[0]))
    found = {}
    for count in counts:
        chosen = [rows[number * len(rows) // count % len(rows)] for number in range(count)]
        batches = [student.encoder.collate(chosen[start : start + 32]) for start in range(0, count, 32)]
        times = []
        for _ in range(4):
            started = time.perf_counter()
            for batch in batches:
                student.session.run(None, batch)
            times.append(time.perf_counter() - started)
        found[count] = median(times[1:])
    return found


def score_minilm(day: Day) -> None:
    """MiniLM-L6."""
    _score(day, "minilm-l6", 40_000)


def score_bert(day: Day) -> None:
    """BERT-base."""
    _score(day, "bert-base", 15_000)


def _score(day: Day, shape: str, least: float) -> None:
    count = day.pick(131_072, 512)
    pairs = write_pairs(
        day.folder / f"score-{count}.parquet", made_up_pairs(count // 64, 64, doc_words=day.pick(60, 20))
    )
    with tempfile.TemporaryDirectory(dir=day.folder) as made:
        student = score_vs_torch.make_student(str(day.model(shape)), Path(made, "student"), 128)
        for forward in (True, False):
            rounds = score_vs_torch.compare(
                student, str(pairs), Path(made, f"forward-{forward}"), pairs=count, rounds=day.pick(3, 1),
                device=day.device, dtype=day.pick("bfloat16", "float32"), batch_tokens=day.pick(65_536, 1024),
                chunk_rows=day.pick(8192, 256), forward=forward,
            )  # fmt: skip
            ours, bare = ([count / getattr(one, side).wall_s for one in rounds] for side in ("score", "bare"))
            what = f"score Parquet to Parquet, {shape}" + ("" if forward else ", no forward pass")
            ratio = paired_ratio(ours, bare).median
            day.emit(what, median(ours), "pairs/s", baseline=median(bare), ratio=ratio, least=least)


def score_host(day: Day) -> None:
    """What the host does for a pair, step by step."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # before the first text: one thread's clock shall see all
    count = day.pick(32_768, 512)
    pairs = write_pairs(day.folder / f"host-{count}.parquet", made_up_pairs(count // 64, 64, doc_words=60))
    with tempfile.TemporaryDirectory(dir=day.folder) as made:
        folder = score_vs_torch.make_student(str(day.model("minilm-l6")), Path(made, "student"), 128)
        student = load_student(folder, device="cpu")
        output = str(Path(made, "scores"))
        request = score_vs_torch.score_request(folder, str(pairs), output, count, 8192, 65_536, "cpu", "float32")
        seconds = score_vs_torch.host_costs(student, request, 65_536)
    micros = {step: round(took / count * 1e6, 1) for step, took in seconds.items()}
    day.emit("score without a model, on one core", count / sum(seconds.values()), "pairs/s", micros_a_pair=micros)
