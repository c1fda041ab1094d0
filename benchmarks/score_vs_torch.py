"""Pairs per second of `relabel score` against a bare PyTorch loop on length-sorted batches, both in one process and
taking turns: the parts `score-minilm`, `score-bert` and `score-host` of
`benchmarks/gpu_day.py`.

The bare loop has all texts in memory: it tokenizes them in one call, sorts them by length over the
whole set, pads each batch to its longest row, and takes softmax and argmax; nothing is read, checked or written.
`relabel score` reads Parquet, tokenizes, scores, and commits labels with receipts, from the plan to the manifest;
loading the model is outside both. The ratio is the median over rounds of (pairs/s of score) / (pairs/s of the bare loop
of that round), with the same by CPU seconds, which shows whether the machine was busy with something else; the
order within a round alternates.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoTokenizer

from relabel.distill.students.model import StudentModel, load_student, softmax, student_files, write_student
from relabel.distill.students.networks import EncoderStudent, load_backbone
from relabel.distill.students.portable import length_batches
from relabel.distill.students.spec import StudentRecord
from relabel.jobs.delivery import fetch_model
from relabel.jobs.job import open_run
from relabel.jobs.run.progress import Progress
from relabel.jobs.run.results import conclude
from relabel.jobs.run.session import Session
from relabel.jobs.run.stop import Stop
from relabel.jobs.score import ScoreOptions, score_chunks, score_job, score_rows
from relabel.manifests.files import Storage
from relabel.manifests.models import resolve_model


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


class ScoreRequest(NamedTuple):
    """A student's folder, and what it is asked for."""

    student: str
    options: ScoreOptions


def score_run(student: StudentModel, request: ScoreRequest) -> None:
    """Everything `relabel score` does but loading the student: plan, read, tokenize, score, commit, manifest."""
    opened = open_run(score_job(request.student, request.options, Storage()))
    session = Session(opened, list(range(len(opened.plan.shards))), is_retry=False, stop=Stop(), progress=Progress())
    try:
        score_chunks(student, session.chunks(), session.commit, progress=session.progress, stop=session.stop)
    finally:
        session.close()
    report = conclude(session)
    assert int(report.exit) == 0, report


def score_request(
    folder: Path, pairs_file: str, output: str, pairs: int, chunk_rows: int, batch_tokens: int, device: str, dtype: str
) -> ScoreRequest:
    """What `relabel score` is asked for."""
    options = ScoreOptions(
        input=(pairs_file,),
        to=output,
        limit=pairs,
        shards=1,
        chunk_rows=chunk_rows,
        batch_tokens=batch_tokens,
        device=device,
        dtype=dtype,
    )
    return ScoreRequest(str(folder), options)


class Round(NamedTuple):
    """Both sides of a round."""

    bare: Timed
    score: Timed


def compare(
    folder: Path, pairs_file: str, scratch: Path, *, pairs: int, rounds: int, batch_tokens: int, chunk_rows: int,
    device: str = "cpu", dtype: str = "float32", forward: bool = True,
) -> list[Round]:  # fmt: skip
    """Let both sides take turns.

    Args:
        folder: a student's.
        scratch: folder for outputs.
        forward: False leaves the forward pass out on both sides: the rate of all the rest.
    """
    student = load_student(folder, device=device, batch_tokens=batch_tokens)
    student.module.to(getattr(torch, dtype))
    if not forward:
        student.module = lambda input_ids, **_: {
            name: torch.zeros(len(input_ids), k) for name, k in student.record.heads.items()
        }

    def request(number: int) -> ScoreRequest:
        output = str(scratch / f"scores-{number}")
        return score_request(folder, pairs_file, output, pairs, chunk_rows, batch_tokens, device, dtype)

    opened = open_run(score_job(request(0).student, request(0).options, Storage()))
    session = Session(opened, [0], is_retry=False, stop=Stop(), progress=Progress())
    texts = [(pair.query, pair.document) for work in session.chunks() if work is not None for pair in work.pairs]
    session.close()
    bare_loop(student, texts[:512], batch_tokens)
    lengths = [len(row.ids) for row in student.encode(texts)]
    padded = sum(len(places) * lengths[places[0]] for places in length_batches(lengths, batch_tokens))
    print(
        f"{len(texts)} pairs, {np.mean(lengths):.1f} tokens on average, padding {1 - sum(lengths) / padded:.2%} "
        "sorted as a whole"
    )
    found = []
    for number in range(rounds):
        sides = {
            "bare": lambda: bare_loop(student, texts, batch_tokens),
            "score": lambda at=number: score_run(student, request(at + 1)),
        }
        found.append(Round(**{name: timed(sides[name]) for name in (list(sides) if number % 2 else list(sides)[::-1])}))
        bare, score = found[-1]
        print(
            f"round {number}: bare {len(texts) / bare.wall_s:7.1f} pairs/s, score "
            f"{len(texts) / score.wall_s:7.1f} pairs/s, "
            f"ratio {bare.wall_s / score.wall_s:.3f} (by CPU time {bare.cpu_s / score.cpu_s:.3f})",
            flush=True,
        )
    return found


def host_costs(student: Any, request: ScoreRequest, batch_tokens: int) -> dict[str, float]:
    """CPU seconds of the host by step of one run without a forward pass, each step alone in one thread.

    In a run a thread reads and tokenizes, the main thread makes batches and rows, others write. All is Python, on one
    lock, but what tokenizers, NumPy and Arrow do inside.
    """
    found = dict.fromkeys(("plan", "read", "tokenize", "batches", "rows", "write", "manifest"), 0.0)

    def timed(step: str, call: Callable[[], Any]) -> Any:
        clock = time.thread_time()
        try:
            return call()
        finally:
            found[step] += time.thread_time() - clock

    opened = timed("plan", lambda: open_run(score_job(request.student, request.options, Storage())))
    session = Session(opened, [0], is_retry=False, stop=Stop(), progress=Progress())
    heads = student.record.heads
    chunks = session.chunks()
    with suppress(StopIteration):
        while True:
            work = timed("read", lambda: next(chunks))
            if work is None:
                continue
            tokens = timed("tokenize", lambda w=work: student.texts.encode([(p.query, p.document) for p in w.pairs]))

            def collate(rows: Any = tokens) -> None:
                for places in length_batches([len(row.ids) for row in rows], batch_tokens):
                    student.texts.collate([rows[place] for place in places])

            timed("batches", collate)
            probs = {name: softmax(torch.zeros(len(tokens), grades).numpy()) for name, grades in heads.items()}
            work.rows = timed(
                "rows", lambda w=work, t=tokens, p=probs: list(score_rows(w.pairs, w.keys, p, t, student.record.phi))
            )
            work.left = 0
            timed("write", lambda w=work: session.commit(w))
    session.close()
    timed("manifest", lambda: conclude(session))
    return found
