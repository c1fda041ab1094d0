"""Whether the time that `relabel train --dry-run` names holds: beside what `--probe` measures, for methods, models and
sizes.

    python benchmarks/training_time_holds.py MODEL_DIR … [--rows 64] [--words 20 200] [--only 0 3 5]

Rows are made up, of a few words to a few hundred; nothing is learned from them. Printed is for each training the
interval, the seconds that the probe says, and where in the interval these lie, 0 to 1 by their logarithms.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from distill.teachers.spec_files import read_teacher_spec
from distill.teachers.teaching import estimate_teacher
from distill.teachers.trainers import TrainingTime
from manifests.storage.context import Storage

TRAININGS: tuple[dict[str, Any], ...] = (
    {"method": "sft", "labeler": {"name": "direct", "grades": 4}, "train": {"batch_size": 4}},
    {"method": "sft", "labeler": {"name": "direct", "grades": 4}, "train": {"batch_size": 1, "accumulation": 2}},
    {"method": "sft", "labeler": {"name": "direct", "grades": 4}, "train": {"batch_size": 4}, "lora": {"r": 8}},
    {"method": "sft", "labeler": {"name": "direct", "grades": 4}, "train": {"batch_size": 4, "precision": "bf16"}},
    {"method": "sft", "labeler": {"name": "direct", "grades": 4},
     "train": {"batch_size": 4, "gradient_checkpointing": True}},
    {"method": "grpo", "labeler": {"name": "r1", "grades": 4, "max_think_tokens": 48}, "rollouts": {"group": 4},
     "train": {"batch_size": 4, "accumulation": 1, "max_tokens": 1024}},
    {"method": "grpo", "labeler": {"name": "umbrela", "max_think_tokens": 16}, "rollouts": {"group": 4, "beta": 0.04},
     "train": {"batch_size": 4, "accumulation": 1, "max_tokens": 1024}},
    {"method": "grpo", "labeler": {"name": "r1", "grades": 4, "max_think_tokens": 32},
     "rollouts": {"group": 4, "updates": 2}, "train": {"batch_size": 4, "accumulation": 1, "max_tokens": 1024}},
)  # fmt: skip


def made_up(path: Path, rows: int, words: int) -> None:
    draw = random.Random(0)
    vocabulary = ["red", "blue", "shirt", "lamp", "steel", "kettle", "garden", "chair", "wireless", "phone"]
    held = [
        {
            "query_id": f"q{row // 4}",
            "doc_id": f"d{row}",
            "query": " ".join(draw.choices(vocabulary, k=3)),
            "document": " ".join(draw.choices(vocabulary, k=draw.randint(words // 2, words))),
            "grade": row % 4,
        }
        for row in range(rows)
    ]
    pq.write_table(pa.Table.from_pylist(held), path)


def expected_and_probed(values: dict[str, Any]) -> tuple[TrainingTime, TrainingTime]:
    spec = read_teacher_spec(values, where="here")
    expected, probed = (estimate_teacher(spec, Storage(), is_timed=is_timed).time for is_timed in (False, True))
    assert expected is not None
    assert probed is not None
    return expected, probed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--words", type=int, nargs="+", default=[20, 200], help="of the longest document")
    parser.add_argument("--only", type=int, nargs="+", default=range(len(TRAININGS)), help="of the trainings below")
    options = parser.parse_args()
    inside = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, (model, words, training) in enumerate(
            itertools.product(options.models, options.words, [TRAININGS[number] for number in options.only])
        ):
            pairs = Path(scratch) / f"{words}.parquet"
            made_up(pairs, options.rows, words)
            gold = {"path": str(pairs), "grade": "grade"}
            about = {"name": "t", "init": model, "output": f"{scratch}/{number}", "data": {"gold": gold}}
            expected, probed = expected_and_probed({**about, **training})
            place = math.log(probed.seconds / expected.least) / math.log(expected.most / expected.least)
            inside.append(0 <= place <= 1)
            shown = {"least": expected.least, "most": expected.most, "probed": probed.seconds, "place": place}
            print(json.dumps({"model": Path(model).name, "words": words, **training,
                              **{key: round(value, 2) for key, value in shown.items()}}), flush=True)  # fmt: skip
    print(json.dumps({"trainings": len(inside), "inside": sum(inside)}))


if __name__ == "__main__":
    main()
