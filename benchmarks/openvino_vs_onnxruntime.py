"""CPU time of a bundle's fp32 file in OpenVINO against onnxruntime, and with it sentence-transformers' `CrossEncoder`
on the same weights by both: real pairs in batches of 32, one thread, processes in turns.

    python -m benchmarks.openvino_vs_onnxruntime BUNDLE PAIRS.parquet [--document title] [--pairs 5120] [--round 256]
        [--one-call] [--hf FOLDER --onnx PYTHON --openvino PYTHON]

Each side is a process of its own that has answered once before; a round is so many pairs in batches of 32 in the order
of the file, asked of one side after the other, the order turning. With --one-call a round is one call, as a program
makes it that has many pairs: both sides sort by length, a bundle in batches of its own size, `CrossEncoder` of 32.

Timed is the process's CPU time from texts to probabilities; of a bundle's sides also the model's share, after
tokenizing and padding. The figure is the median over rounds of (CPU seconds of onnxruntime fp32) / (CPU seconds of the
side). All answers are compared with those of onnxruntime fp32.

FOLDER is what `relabel export --format hf` wrote of the bundle's student (pooling cls); the interpreters are of
environments with `sentence-transformers[onnx]` and `[openvino]`, whose optimum packages bound transformers differently.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.paired import paired_ratio, turns

BATCH = 32
BASE = "onnxruntime fp32"
PEERS = {
    "CrossEncoder onnx f32": BASE,
    "CrossEncoder openvino f32": "openvino fp32",
    "CrossEncoder openvino bf16": "openvino bf16",
}
"""Whom a side of the bundle is compared with: the same runtime and precision."""
SERVE = """
import importlib.metadata, json, os, sys, time

out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no answer
clock, spent = time.process_time, [0.0]
answer, about = make(*sys.argv[1:])
names = "onnxruntime openvino optimum-onnx optimum-intel transformers sentence-transformers".split()
here = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
about = ", ".join([about, *(f"{name} {here[name]}" for name in names if name in here)])
print(json.dumps(about), file=out, flush=True)
for line in sys.stdin:
    batches, spent[0], start, found = json.loads(line), 0.0, clock(), []
    for batch in batches:
        found += answer(batch).tolist()
    print(json.dumps([clock() - start, spent[0], found]), file=out, flush=True)
"""
OURS = """
def make(folder, provider, precision, batch_tokens):
    sys.path.insert(0, folder)
    from load import Student
    student = Student(folder, provider=provider, precision=precision, threads=1)
    inner = student.session.run

    def timed(*arguments):
        start = clock()
        found = inner(*arguments)
        spent[0] += clock() - start
        return found

    student.session = type("Timed", (), {"run": staticmethod(timed)})
    about = f"{student.precision} on {student.provider}"
    return (lambda batch: student.probabilities(batch, batch_tokens=int(batch_tokens) or None)["relevance"]), about
"""
THEIRS = """
def make(folder, backend, hint):
    from sentence_transformers import CrossEncoder
    if backend == "onnx":
        import onnxruntime
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        more = {"provider": "CPUExecutionProvider", "session_options": options}
    else:
        more = {"ov_config": {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": "1", "NUM_STREAMS": "1"}}
    model = CrossEncoder(folder, backend=backend, device="cpu", model_kwargs=more)

    def answer(batch):
        pairs, how = [tuple(pair) for pair in batch], {"apply_softmax": True, "show_progress_bar": False}
        return model.predict(pairs, batch_size=32, **how)

    return answer, f"CrossEncoder {backend} {hint}"
"""


class Side:
    """A process that answers.

    Args:
        maker: its source: defines `make`, which gives the function that answers a batch.
    """

    def __init__(self, python: str, maker: str, *arguments: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        line = [python, "-c", "import sys\n" + maker + SERVE, *arguments]
        self._process = subprocess.Popen(
            line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = str(self._read())

    def ask(self, batches: Sequence[Sequence[tuple[str, str]]]) -> tuple[float, float, np.ndarray]:
        """CPU seconds, those of the model alone (0 where that is not known), probabilities [B, K]."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(batches) + "\n")
        self._process.stdin.flush()
        cpu_s, model_s, found = self._read()
        return cpu_s, model_s, np.array(found)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with {self._process.wait()}; its reason is above")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("bundle")
    parser.add_argument("pairs_file")
    parser.add_argument("--document", default="title", help="columns, joined by +")
    parser.add_argument("--pairs", type=int, default=5120)
    parser.add_argument("--round", type=int, default=256, help="pairs of a round")
    parser.add_argument("--sides", default="cpu fp32,cpu int8,openvino fp32,openvino bf16")
    parser.add_argument("--one-call", action="store_true", help="a round's pairs in one call")
    parser.add_argument("--hf")
    parser.add_argument("--onnx")
    parser.add_argument("--openvino")
    args = parser.parse_args()
    rows = pq.read_table(args.pairs_file).slice(0, args.pairs).to_pylist()
    columns = args.document.split("+")
    pairs = [(row["query"], "\n\n".join(row[column] or "" for column in columns)) for row in rows]
    batch_tokens = "0" if args.one_call else str(1 << 30)  # 0: the bundle's own
    sides = {
        name.replace("cpu", "onnxruntime"): Side(sys.executable, OURS, args.bundle, *name.split(), batch_tokens)
        for name in args.sides.split(",")
    }
    if args.hf:
        sides["CrossEncoder onnx f32"] = Side(args.onnx, THEIRS, args.hf, "onnx", "f32")
        for hint in ("f32", "bf16"):
            sides[f"CrossEncoder openvino {hint}"] = Side(args.openvino, THEIRS, args.hf, "openvino", hint)
    for name, side in sides.items():
        print(f"{name}: {side.about}", flush=True)
    size = args.round if args.one_call else BATCH
    batches = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    whole: dict[str, list[float]] = {name: [] for name in sides}
    model: dict[str, list[float]] = {name: [] for name in sides}
    answers: dict[str, list[np.ndarray]] = {name: [] for name in sides}
    for side in sides.values():
        side.ask(batches)  # every width has come by: OpenVINO makes code for each
    step = max(1, args.round // size)
    for number, start in enumerate(range(0, len(batches), step)):
        for name in turns(list(sides), number):
            cpu_s, model_s, found = sides[name].ask(batches[start : start + step])
            whole[name].append(cpu_s)
            model[name].append(model_s)
            answers[name].append(found)
    base = np.concatenate(answers[BASE])
    print(f"{len(base)} pairs, {len(whole[BASE])} rounds")
    for name, side in sides.items():
        found = np.concatenate(answers[name])
        flips = (found.argmax(1) != base.argmax(1)).sum()
        alone = f", the model alone {paired_ratio(model[BASE], model[name])}" if all(model[name]) else ""
        print(
            f"{name}: {paired_ratio(whole[BASE], whole[name])} times as fast{alone}; "
            f"{len(base) / sum(whole[name]):,.0f} pairs/CPU s; {flips} flips ({flips / len(base):.2%}), "
            f"max |dp| {np.abs(found - base).max():.2g}",
            flush=True,
        )
        side.close()
    for theirs, ours in PEERS.items() if args.hf else ():
        print(f"{ours}: {paired_ratio(whole[theirs], whole[ours])} times as fast as {theirs}")


if __name__ == "__main__":
    main()
