"""CPU time of scoring by the number of tokens in a batch: a student in torch, its bundle in onnxruntime and OpenVINO.

    python -m benchmarks.batch_tokens STUDENT BUNDLE PAIRS.parquet [--document title] [--pairs 2048] [--rounds 5]
        [--threads 1] [--sides "torch,cpu fp32,cpu int8,openvino bf16"]

All sizes answer the same pairs in one process, in turns; the figure is the median over rounds of (CPU seconds in
batches of 8,192 tokens) / (CPU seconds in batches of the size), with more than one thread of seconds by the clock.
Rows are sorted by length first, so that padding is a small part of it: its share is printed too.
"""

import argparse
import time
from collections.abc import Callable

import pyarrow.parquet as pq

from benchmarks.paired import paired_ratio, turns
from relabel.distill.students.model import load_student
from relabel.distill.students.portable import GPU_BATCH_TOKENS, length_batches
from relabel.export.loader import Student

SIZES = (256, 512, 1024, 2048, 4096, GPU_BATCH_TOKENS)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("student")
    parser.add_argument("bundle")
    parser.add_argument("pairs_file")
    parser.add_argument("--document", default="title")
    parser.add_argument("--pairs", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sides", default="torch,cpu fp32,cpu int8,openvino fp32,openvino bf16")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = pq.read_table(args.pairs_file).slice(0, args.pairs).to_pylist()
    pairs = [(row["query"], row[args.document] or "") for row in rows]
    clock = time.process_time if args.threads == 1 else time.perf_counter
    student = load_student(args.student)
    lengths = [len(row.ids) for row in student.texts.encode(pairs)]
    for size in SIZES:
        padded = sum(len(places) * lengths[places[0]] for places in length_batches(lengths, size))
        print(f"{size} tokens: {1 - sum(lengths) / padded:.1%} of them padding")
    for side in args.sides.split(","):
        answers: Callable[..., object] = student.probabilities
        if side != "torch":
            provider, precision = side.split()
            answers = Student(args.bundle, provider=provider, precision=precision, threads=args.threads).probabilities
        spent: dict[int, list[float]] = {size: [] for size in SIZES}
        for size in SIZES:
            answers(pairs, batch_tokens=size)  # OpenVINO makes code for each shape
        for number in range(args.rounds):
            for size in turns(SIZES, number):
                start = clock()
                answers(pairs, batch_tokens=size)
                spent[size].append(clock() - start)
        for size in SIZES:
            ratio = paired_ratio(spent[GPU_BATCH_TOKENS], spent[size])
            print(f"{side}, {size}: {ratio} times as fast, {len(pairs) / min(spent[size]):,.0f} pairs/s", flush=True)


if __name__ == "__main__":
    main()
