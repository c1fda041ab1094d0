"""How fast is `relabel train` by GRPO, and TRL's own GRPOTrainer? The same prompts, model and arguments, in turns,
a fresh process each.

    .venv/bin/python benchmarks/grpo_speed.py [--model FOLDER] [--steps 20] [--rounds 5] [--threads 1]

Without a model, a tiny one that knows the answers' format. The learning rate is 1e-12, so that both sides sample from
the same distribution to the last step; they draw in different ways, so times are compared by answer token. A step is
counted from the end of one to the end of the next, the first two left out. CPU seconds are printed with those of the
clock: on a machine that others use they are the ones to compare.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent.parent))
ROOT = Path(__file__).parent.parent
WARM_UP = 2
SIDES = ("relabel", "trl")
TEXTS = ("red running shoes, light, for women", "a blue desk lamp with a heavy foot", "garden hose, twenty metres")


class Stamps:
    """The clock and the CPU's seconds at the end of each optimizer step."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []
        self.made_s = time.perf_counter()

    def note(self, *_: Any, **__: Any) -> None:
        self.found.append((time.perf_counter(), time.process_time()))

    def callback(self) -> Any:
        from transformers import TrainerCallback

        class OnStepEnd(TrainerCallback):  # type: ignore[misc]
            on_step_end = staticmethod(self.note)

        return OnStepEnd()

    def per_step(self) -> dict[str, float]:
        (began, cpu_began), (ended, cpu_ended) = self.found[WARM_UP - 1], self.found[-1]
        steps = len(self.found) - WARM_UP
        return {
            "seconds": (ended - began) / steps,
            "cpu_seconds": (cpu_ended - cpu_began) / steps,
            "cold_s": began - self.made_s,
        }


def write_setting(folder: Path, chosen: argparse.Namespace, *, num_rows: int | None = None) -> None:
    """A spec, its pairs, and the tiny model where none was named.

    Args:
        num_rows: pairs; those of an epoch by one process by default.
    """
    labeler: dict[str, Any] = {"name": "r1", "grades": 3, "max_think_tokens": chosen.think}
    model = chosen.model
    # one epoch: each side draws the order of a second one in its own way
    num_rows = num_rows or chosen.steps * chosen.batch * chosen.accumulation // chosen.group
    if model is None:
        from benchmarks.grpo_learns import make_setting, show_format

        setting = make_setting("r1", folder, num_rows=num_rows)
        show_format(setting, "r1")
        model = folder / "model"
        setting.tokenizer.save_pretrained(model)
        setting.model.save_pretrained(model)
        labeler |= {"max_think_tokens": 4, "templates": str(folder / "templates-r1")}
        rows = [
            {name: getattr(row.pair, name) for name in ("query_id", "query", "doc_id", "document")} | row.gold
            for row in setting.rows
        ]
    else:
        rows = [
            {"query_id": f"q{n}", "query": "red shoes", "doc_id": f"d{n}", "document": TEXTS[n % 3], "grade": n % 3}
            for n in range(num_rows)
        ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")
    spec = {
        "name": "speed",
        "method": "grpo",
        "init": str(model),
        "labeler": labeler,
        "data": {"gold": {"path": str(folder / "pairs.parquet"), "grade": "grade"}},
        "rollouts": {"group": chosen.group, "vllm": chosen.vllm},
        "train": {
            "max_steps": chosen.steps, "batch_size": chosen.batch, "accumulation": chosen.accumulation,
            "learning_rate": 1e-12, "warmup": 0, "max_tokens": chosen.max_tokens, "save_every": 10**6, "seed": 3,
            "device": chosen.device, "precision": chosen.precision,
        },
        "output": str(folder / "out"),
    }  # fmt: skip
    (folder / "spec.json").write_text(json.dumps(spec))


def relabel_side(folder: Path) -> dict[str, Any]:
    """`relabel train`, as its command calls it."""
    from relabel.distill.teachers.spec import read_teacher_spec
    from relabel.distill.teachers.teaching import train_teacher
    from relabel.manifests.files import Storage

    stamps = Stamps()

    def say(line: str) -> None:
        if line.startswith("step ") and ", dev" not in line:
            stamps.note()

    spec = read_teacher_spec(json.loads((folder / "spec.json").read_text()), where="benchmark")
    report = train_teacher(spec, Storage(), start="restart", report=say)
    return {**stamps.per_step(), "tokens": report.manifest.data.answer_tokens}


def trl_side(folder: Path) -> dict[str, Any]:
    """TRL's trainer and no more: its own normaliser, and a reward that a regular expression reads off the text."""
    import re

    from datasets import Dataset
    from trl import GRPOTrainer

    from relabel.distill.teachers.grpo import GrpoTeacher
    from relabel.distill.teachers.grpo_trainer import grpo_arguments
    from relabel.distill.teachers.spec import read_teacher_spec
    from relabel.distill.teachers.teaching import check_teacher_base, load_model
    from relabel.manifests.files import Storage
    from relabel.manifests.models import resolve_model

    spec: Any = read_teacher_spec(json.loads((folder / "spec.json").read_text()), where="benchmark")
    base = check_teacher_base(spec, resolve_model(spec.init))
    teacher = GrpoTeacher(spec, base, Storage())
    prompts, tokens = teacher._gold.prompts, 0
    grades = [row.gold["grade"] for row in teacher._gold.rows]

    class Bare(GRPOTrainer):  # type: ignore[misc]
        def _tokenize_prompts(self, places: list[int]) -> tuple[list[list[int]], None, dict[str, Any]]:
            return [prompts[place] for place in places], None, {}

    def reward(prompts: list[int], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        nonlocal tokens
        tokens += sum(map(len, completion_ids))
        said = [re.fullmatch(r"\s*<think>.*</think>\s*<score>(\d)</score>\s*", text, re.S) for text in completions]
        return [float(one is not None and int(one[1]) == grades[p]) for one, p in zip(said, prompts, strict=True)]

    stamps = Stamps()
    args = grpo_arguments(
        spec.train, spec.rollouts, folder / "trl", max_answer_tokens=teacher._max_answer, save_strategy="no",
        max_steps=spec.train.max_steps, lr_scheduler_type="linear",
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": list(range(len(prompts)))})
    trainer = Bare(
        model=load_model(spec, base), reward_funcs=[reward], args=args, train_dataset=rows,
        processing_class=base.tokenizer, callbacks=[stamps.callback()],
    )  # fmt: skip
    trainer.train()
    return {**stamps.per_step(), "tokens": tokens}


def call(side: str, folder: Path, threads: int | None) -> dict[str, Any]:
    """One side in a process of its own."""
    limits = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    environment = {**os.environ, **limits, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    line = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a causal language model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5, help="turns of both sides")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU; 0 leaves the choice to torch")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.set_defaults(think=32, device="cpu", precision="fp32", vllm=None)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.side:
        print(json.dumps({"relabel": relabel_side, "trl": trl_side}[chosen.side](chosen.folder)))
        return
    ratios: dict[str, list[float]] = {"seconds": [], "cpu_seconds": []}
    with tempfile.TemporaryDirectory() as name:
        write_setting(Path(name), chosen)
        for turn in range(chosen.rounds):
            order = SIDES if turn % 2 == 0 else SIDES[::-1]
            found = {side: call(side, Path(name), chosen.threads or None) for side in order}
            more = found["relabel"]["tokens"] / found["trl"]["tokens"]
            for unit, held in ratios.items():
                held.append(more * found["trl"][unit] / found["relabel"][unit])
            print(
                f"turn {turn + 1}: relabel {found['relabel']['seconds']:.3f} s a step (CPU "
                f"{found['relabel']['cpu_seconds']:.3f}), trl {found['trl']['seconds']:.3f} s (CPU "
                f"{found['trl']['cpu_seconds']:.3f}), {found['relabel']['tokens']:,} and {found['trl']['tokens']:,} "
                "tokens",
                flush=True,
            )
    for unit, held in ratios.items():
        found_over_turns = f"median {median(held):.3f}, {min(held):.3f} to {max(held):.3f}"
        print(f"relabel's answer tokens per {unit} over trl's: {found_over_turns}")


if __name__ == "__main__":
    main()
