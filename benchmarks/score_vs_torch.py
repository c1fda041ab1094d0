"""Pairs per second of `relabel score` against a bare PyTorch loop on length-sorted batches, both in one process and
taking turns.

    python benchmarks/score_vs_torch.py STUDENT PAIRS.parquet
        [--pairs 4096] [--rounds 5] [--batch-tokens 8192] [--threads 2]

STUDENT is a student's folder, or a model directory or reference, of which a student with fresh heads is made in a
temporary folder. The bare loop has all texts in memory: it tokenizes them in one call, sorts them by length over the
whole set, pads each batch to its longest row, and takes softmax and argmax; nothing is read, checked or written.
`relabel score` reads Parquet, tokenizes, scores, and commits labels with receipts, from the plan to the manifest;
loading the model is outside both. The ratio is the median over rounds of (pairs/s of score) / (pairs/s of the bare loop
of that round), the same by CPU seconds beside it, which shows whether the machine was busy with something else; the
order within a round alternates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from distill.students.encoder import EncoderStudent, load_backbone
from distill.students.length_batches import length_batches
from distill.students.score import Scorer
from distill.students.student_record import StudentRecord
from distill.students.students import StudentModel, load_student, student_files, write_student
from jobs.fetching.models import fetch_model
from jobs.planning.opening import open_run
from jobs.running.conclusions import conclude
from jobs.running.counts import Progress
from jobs.running.sessions import Session
from jobs.running.stops import Stop
from jobs.score.score_loop import ScoreLoop
from jobs.score.student_jobs import ScoreRequest, score_job
from manifests.models.references import resolve_model
from manifests.storage.context import Storage


def make_student(reference: str, folder: Path, max_tokens: int) -> Path:
    """A student with fresh heads over a model's weights."""
    fetch_model(reference, Storage())
    model = resolve_model(reference).path
    heads = {"relevance": 3, "subject": 5, "attribute": 5}
    columns = {"query_id": "query_id", "query": "query", "doc_id": "doc_id"}
    record = StudentRecord(1, "encoder", "bench", heads, max_tokens, columns, dict.fromkeys(heads, 1.0))
    write_student(folder, record, EncoderStudent(load_backbone(model), heads), AutoTokenizer.from_pretrained(model))
    (folder / "manifest.json").write_text(json.dumps({"files": student_files(folder)}))
    return folder


class Timed(NamedTuple):
    """Seconds of the clock and of all threads together."""

    wall_s: float
    cpu_s: float


def timed(call: Callable[[], object]) -> Timed:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    call()
    return Timed(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def bare_loop(student: StudentModel, pairs: list[tuple[str, str]], batch_tokens: int) -> np.ndarray:
    """Tokenize, sort, pad, forward, softmax, argmax: the grades."""
    queries, documents = zip(*pairs, strict=True)
    tokenizer, most = student.tokenizer, student.record.max_tokens
    rows = tokenizer(
        list(queries), list(documents), truncation="longest_first", max_length=most, split_special_tokens=True
    )
    ids, types = rows["input_ids"], rows.get("token_type_ids")
    grades = np.empty(len(pairs), dtype=np.int64)
    with torch.inference_mode():
        for places in length_batches([len(row) for row in ids], batch_tokens):
            width = len(ids[places[0]])
            batch = {
                name: torch.zeros(len(places), width, dtype=torch.int64) for name in ("input_ids", "attention_mask")
            }
            if types is not None:
                batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
            batch["input_ids"].fill_(tokenizer.pad_token_id)
            for number, place in enumerate(places):
                size = len(ids[place])
                batch["input_ids"][number, :size] = torch.tensor(ids[place])
                batch["attention_mask"][number, :size] = 1
                if types is not None:
                    batch["token_type_ids"][number, :size] = torch.tensor(types[place])
            found = student.module(**{name: tensor.to(student.device) for name, tensor in batch.items()})
            probs = {name: values.float().softmax(1) for name, values in found.items()}
            grades[places] = probs["relevance"].argmax(1).cpu().numpy()
    return grades


def score_run(scorer: Scorer, request: ScoreRequest) -> None:
    """Everything `relabel score` does but loading the student: plan, read, tokenize, score, commit, manifest."""
    opened = open_run(score_job(request, Storage()))
    session = Session(opened, list(range(len(opened.plan.shards))), is_retry=False, stop=Stop(), progress=Progress())
    try:
        ScoreLoop(scorer, session.commit, progress=session.progress, stop=session.stop).run(session.chunks())
    finally:
        session.close()
    report = conclude(session)
    assert int(report.exit) == 0, report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("student")
    parser.add_argument("pairs_file")
    parser.add_argument("--pairs", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--chunk-rows", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int, default=96, help="of a student made of a model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--document", default="", help="columns of the document, joined by +")
    parser.add_argument(
        "--no-forward", action="store_true", help="both sides without the forward pass: the rate of all the rest"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.student)
        if not (folder / "student.json").is_file():
            folder = make_student(args.student, Path(scratch, "student"), args.max_tokens)
        student = load_student(folder, device=args.device)
        if args.no_forward:
            student.module = lambda input_ids, **_: {
                name: torch.zeros(len(input_ids), k) for name, k in student.record.heads.items()
            }
        scorer = Scorer(student, batch_tokens=args.batch_tokens)
        columns: dict[str, Any] = {"document": args.document.split("+")} if args.document else {}

        def request(number: int) -> ScoreRequest:
            return ScoreRequest(
                student=str(folder),
                input=(args.pairs_file,),
                columns=columns,
                output=str(Path(scratch, f"scores-{number}")),
                name=None,
                limit=args.pairs,
                shards=1,
                chunk_rows=args.chunk_rows,
                batch_tokens=args.batch_tokens,
                device=args.device,
                dtype="float32",
            )

        opened = open_run(score_job(request(0), Storage()))
        session = Session(opened, [0], is_retry=False, stop=Stop(), progress=Progress())
        texts = [(pair.query, pair.document) for work in session.chunks() if work is not None for pair in work.pairs]
        session.close()
        bare_loop(student, texts[:512], args.batch_tokens)
        lengths = [len(row.ids) for row in scorer.encode(texts)]
        padded = sum(len(places) * lengths[places[0]] for places in length_batches(lengths, args.batch_tokens))
        print(
            f"{len(texts)} pairs, {np.mean(lengths):.1f} tokens on average, padding {1 - sum(lengths) / padded:.2%} "
            "sorted as a whole"
        )
        rounds = []
        for number in range(args.rounds):
            sides = {
                "bare": lambda: bare_loop(student, texts, args.batch_tokens),
                "score": lambda at=number: score_run(scorer, request(at + 1)),
            }
            found = {name: timed(sides[name]) for name in (list(sides) if number % 2 else list(sides)[::-1])}
            bare, score = found["bare"], found["score"]
            rounds.append((bare.wall_s / score.wall_s, bare.cpu_s / score.cpu_s))
            print(
                f"round {number}: bare {len(texts) / bare.wall_s:7.1f} pairs/s, score "
                f"{len(texts) / score.wall_s:7.1f} pairs/s, "
                f"ratio {rounds[-1][0]:.3f} (by CPU time {rounds[-1][1]:.3f})",
                flush=True,
            )
        for name, ratios in zip(("wall", "CPU"), zip(*rounds, strict=True), strict=True):
            middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
            print(f"median of {args.rounds} paired ratios by {name} time: {middle:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
