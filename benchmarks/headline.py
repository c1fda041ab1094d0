"""A teacher's labels of all pairs, the student that is trained on them, and sentence-transformers' CrossEncoder on the
same labels: judged by trusted grades on queries that nobody trained on.

    python -m benchmarks.headline train RUN PAIRS.parquet --to FOLDER [--only SIDE,…] [--more RUN …] [--threads 1]
    python -m benchmarks.headline judge RUN PAIRS.parquet --to FOLDER
    python -m benchmarks.headline speed RUN PAIRS.parquet --to EMPTY_FOLDER

RUN is a finished run of `direct` over PAIRS, whose `grade` is the trusted one on the same scale. `train` goes through
the settings of each side in `SWEEP` and keeps for each, in FOLDER, its distributions on dev and test and its figures on
dev alone; what is there already is left. A side's second and third stages start from the setting that was best on dev
in the stage before, so that no choice reads test. `judge` takes each side's best on dev and says what it does on
test, with intervals over queries. Sides with `more` in their names learn from the labels of `--more` too, say for what
`relabel pairs queries` made.

All sides start from the same weights and see the same rows: batch 32, 64 tokens, AdamW, bf16, a linear schedule and a
tenth of warm-up. `speed` trains an epoch of each, three times in turns, and says rows a second, by the clock of the
training alone. The figure is the mean over cuts j of the area under the ROC curve of P(grade ≥ j) (of the score
itself where a side has one score alone) for grades ≥ j; with it the same of the expected grade, which is what a
single score is to be compared with.
"""

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from benchmarks.train_vs_peers import MODEL, Clock
from relabel.distill.students.distillation import distill
from relabel.distill.students.examples import DEV, TEST, TRAIN, Examples, load_examples
from relabel.distill.students.model import load_student, softmax
from relabel.distill.students.spec import DistillSpec
from relabel.jobs.delivery import fetch_model
from relabel.manifests.files import Storage
from relabel.manifests.metrics.metric import rank_queries
from relabel.manifests.models import resolve_model

SPLIT = {"by": "query", "dev": 0.15, "test": 0.25, "seed": 0}
RESAMPLES = 1000
# B rows, K grades, N rows of a side of the split


@dataclass(frozen=True)
class Setting:
    """Options of one training."""

    side: str
    learning_rate: float = 2e-4
    epochs: int = 2
    temperature: float = 1.0
    gold_weight: float = 0.0
    pooling: str = "mean"
    head_learning_rate: float | None = None

    @property
    def name(self) -> str:
        """Of its files."""
        parts = [self.side, f"lr{self.learning_rate:g}", f"e{self.epochs}"]
        parts += [f"T{self.temperature:g}"] if self.temperature != 1 else []
        parts += [self.pooling] if self.pooling != "mean" else []
        parts += [f"h{self.head_learning_rate:g}"] if self.head_learning_rate else []
        return "-".join(parts + ([f"g{self.gold_weight:g}"] if self.gold_weight else []))


RATES = [{"learning_rate": rate} for rate in (1e-4, 2e-4)]
SWEEP: dict[str, list[list[dict[str, Any]]]] = {
    "relabel": [
        RATES,
        [{"epochs": 4}],
        [{"epochs": 8}],
        [{"temperature": 0.5}, {"temperature": 2.0}],
        [{"temperature": 0.25}],
    ],
    "relabel-gold": [
        [{"gold_weight": 0.5, "epochs": epochs} for epochs in (2, 4)],
        [{"gold_weight": weight} for weight in (0.25, 0.75)],
    ],
    "st-mse": [RATES, [{"epochs": 4}]],
    "st-ce": [RATES, [{"epochs": 4}], [{"temperature": 0.25}]],
    "relabel-more": [[{"epochs": 4, "temperature": temperature} for temperature in (0.25, 1.0)]],
    "relabel-more-gold": [[{"gold_weight": 0.5, "epochs": epochs} for epochs in (2, 3)]],
    "st-ce-more": [[{"epochs": 4}]],
}
"""By side, stages of changes; each stage changes the best setting so far."""
BASES = {
    "relabel-gold": "relabel",
    "relabel-more": "relabel",
    "relabel-more-gold": "relabel-gold",
    "st-ce-more": "st-ce",
}
"""Sides whose first stage changes the best setting of another."""


def make_spec(options: argparse.Namespace, setting: Setting) -> DistillSpec:
    values: dict[str, Any] = {
        "name": setting.name,
        "labels": [options.run, *(options.more if "more" in setting.side else [])],
        "gold": {"path": options.pairs, "grade": "grade"},
        "student": {"kind": "encoder", "model": MODEL, "pooling": setting.pooling},
        "loss": {"temperature": setting.temperature, "gold_weight": setting.gold_weight},
        "train": {
            "epochs": setting.epochs,
            "batch_size": 32,
            "learning_rate": setting.learning_rate,
            "head_learning_rate": setting.head_learning_rate,
            "max_tokens": 64,
            "precision": "bf16",
            "device": "cpu",
        },
        "split": SPLIT,
        "output": str(Path(options.to) / setting.name),
    }
    return DistillSpec(**values)


def by_relabel(spec: DistillSpec, _: Setting, examples: Examples) -> tuple[Callable[[int], np.ndarray], float]:
    training = distill(spec, Storage()).manifest.training
    student = load_student(spec.output)

    def answers(side: int) -> np.ndarray:
        return student.probabilities([examples.texts[row] for row in examples.rows_of(side)])["relevance"]

    return answers, training.rows_per_s


def by_sentence_transformers(
    spec: DistillSpec, setting: Setting, examples: Examples
) -> tuple[Callable[[int], np.ndarray], float]:
    from datasets import Dataset
    from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import CrossEntropyLoss, MSELoss

    class SoftCrossEntropyLoss(CrossEntropyLoss):
        """Over distributions, which its collator hands on one by one."""

        def forward(self, inputs: Any, labels: Any, **others: Any) -> Any:
            return super().forward(inputs, torch.stack(labels), **others)

    is_scored = setting.side == "st-mse"
    train = spec.train
    model = CrossEncoder(
        str(resolve_model(spec.student.model).path),
        num_labels=1 if is_scored else examples.grades,
        max_length=train.max_tokens,
        device="cpu",
    )
    learned = load_examples(spec, Storage())  # with the further labels, where the side has them
    rows = [row for row in learned.rows_of(TRAIN) if not np.isnan(learned.teacher_probs[row]).any()]
    probs_BK = learned.teacher_probs[rows] ** (1 / setting.temperature)  # it has no temperature: its targets have
    probs_BK /= probs_BK.sum(1, keepdims=True)
    score_B = probs_BK @ np.arange(learned.grades) / (learned.grades - 1)
    data = Dataset.from_dict(
        {
            "query": [learned.texts[row][0] for row in rows],
            "document": [learned.texts[row][1] for row in rows],
            "label": score_B.tolist() if is_scored else probs_BK.tolist(),
        }
    )
    with tempfile.TemporaryDirectory() as scratch:
        arguments = CrossEncoderTrainingArguments(
            output_dir=scratch,
            num_train_epochs=train.epochs,
            per_device_train_batch_size=train.batch_size,
            learning_rate=train.learning_rate,
            warmup_steps=train.warmup,
            weight_decay=train.weight_decay,
            seed=train.seed,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            bf16=True,
            use_cpu=True,
            disable_tqdm=True,
        )
        loss = MSELoss(model, activation_fn=torch.nn.Sigmoid()) if is_scored else SoftCrossEntropyLoss(model)
        trainer = CrossEncoderTrainer(model=model, args=arguments, train_dataset=data, loss=loss)
        with Clock() as clock:
            trainer.train()

    def answers(side: int) -> np.ndarray:
        found = model.predict(
            [examples.texts[row] for row in examples.rows_of(side)],
            batch_size=32,
            show_progress_bar=False,
            activation_fn=torch.nn.Identity(),
        )
        found = np.asarray(found, dtype=np.float32)
        return found.reshape(-1, 1) if is_scored else softmax(found)

    return answers, len(rows) * train.epochs / clock.wall


def ordered(probs_NK: np.ndarray) -> np.ndarray:
    """What orders documents: the expected grade, or the one score."""
    return probs_NK @ np.arange(probs_NK.shape[1]) if probs_NK.shape[1] > 1 else probs_NK[:, 0]


def mean_auc(probs_NK: np.ndarray, gold_N: np.ndarray, weight_N: np.ndarray | None = None) -> float:
    """Mean over the cuts of the area of P(grade ≥ cut), by scikit-learn; of the score itself where there is but one."""
    cuts = range(1, 4)
    scores = [probs_NK[:, cut:].sum(1) if probs_NK.shape[1] > 1 else probs_NK[:, 0] for cut in cuts]
    areas = [roc_auc_score(gold_N >= cut, score_N, sample_weight=weight_N)
             for cut, score_N in zip(cuts, scores, strict=True)]  # fmt: skip
    return float(np.mean(areas))


def ndcg_by_query(score_N: np.ndarray, gold_N: np.ndarray, query_N: np.ndarray) -> np.ndarray:
    """nDCG@10 of each query; NaN where none is relevant."""
    count = int(query_N.max()) + 1
    return rank_queries(query_N, np.arange(len(query_N)), score_N, gold_N, num_queries=count).ndcg


def train(options: argparse.Namespace) -> None:
    fetch_model(MODEL, Storage())
    examples = load_examples(make_spec(options, Setting("relabel")), Storage())
    dev_gold = examples.gold[examples.rows_of(DEV)]

    def tried(setting: Setting) -> float:
        """Its figure on dev; trained where that is not known."""
        held = Path(options.to) / f"{setting.name}.json"
        if not held.exists():
            side = by_relabel if setting.side.startswith("relabel") else by_sentence_transformers
            with Clock() as clock:
                answers, rows_per_s = side(make_spec(options, setting), setting, examples)
            dev, test = answers(DEV), answers(TEST)
            np.savez(held.with_suffix(".npz"), dev=dev, test=test)
            figures = {
                "dev_auc": mean_auc(dev, dev_gold),
                "dev_auc_by_grade": mean_auc(ordered(dev)[:, None], dev_gold),
                "rows_per_s": rows_per_s,
                "whole_cpu_s": clock.cpu,
            }
            held.write_text(json.dumps({**asdict(setting), **figures}))
        print(held.read_text(), flush=True)
        return float(json.loads(held.read_text())["dev_auc"])

    for name, stages in SWEEP.items():
        if options.only and name not in options.only.split(","):
            continue
        if "more" in name and not options.more:
            continue
        base = BASES.get(name)
        best = replace(best_of(options.to, base), side=name) if base else Setting(name)
        known: dict[Setting, float] = {}
        for stage in stages:
            for change in stage:
                setting = replace(best, **change)
                known[setting] = tried(setting)
            best = max(known, key=lambda one: known[one])


def speed(options: argparse.Namespace) -> None:
    fetch_model(MODEL, Storage())
    examples = load_examples(make_spec(options, Setting("relabel")), Storage())
    found: dict[str, list[float]] = {"relabel": [], "st-ce": [], "st-mse": []}
    for turn in range(3):
        for name in sorted(found, reverse=turn % 2 == 1):
            setting = Setting(name, epochs=1)
            spec = make_spec(options, setting)
            spec = spec.model_copy(update={"output": f"{spec.output}-turn-{turn}"})
            side = by_relabel if name == "relabel" else by_sentence_transformers
            found[name].append(side(spec, setting, examples)[1])
            print(json.dumps({"side": name, "rows_per_s": round(found[name][-1], 1)}), flush=True)
    for name in ("st-ce", "st-mse"):
        ratios = np.array(found["relabel"]) / np.array(found[name])
        print(
            json.dumps({"relabel over": name, "by turn": ratios.round(3).tolist(), "median": float(np.median(ratios))})
        )


def settings_of(to: str, side: str) -> Iterator[tuple[float, Setting]]:
    for path in sorted(Path(to).glob("*.json")):
        held = json.loads(path.read_text())
        if held.get("side") == side:
            yield (
                held["dev_auc"],
                Setting(**{name: held[name] for name in Setting.__dataclass_fields__ if name in held}),
            )


def best_of(to: str, side: str) -> Setting:
    """The setting of a side that was best on dev."""
    return max(settings_of(to, side), key=lambda one: one[0])[1]


def judge(options: argparse.Namespace) -> None:
    examples = load_examples(make_spec(options, Setting("relabel")), Storage())
    rows = examples.rows_of(TEST)
    gold_N = examples.gold[rows]
    _, query_N = np.unique([examples.texts[row][0] for row in rows], return_inverse=True)
    sides = {"teacher": examples.teacher_probs[rows]}
    for name in SWEEP:
        if any(settings_of(options.to, name)):
            best = best_of(options.to, name)
            with np.load(Path(options.to) / f"{best.name}.npz") as held:
                sides[best.name] = held["test"]
    is_labelled = ~np.isnan(sides["teacher"]).any(1)
    rng = np.random.default_rng(0)
    num_queries = int(query_N.max()) + 1
    chance = np.nanmean([np.nanmean(ndcg_by_query(rng.random(len(rows)), gold_N, query_N)) for _ in range(200)])
    print(
        json.dumps(
            {
                "rows": len(rows),
                "queries": num_queries,
                "teacher_rows": int(is_labelled.sum()),
                "train_rows": len(examples.rows_of(TRAIN)),
                "random_ndcg": round(float(chance), 4),
            }
        )
    )
    drawn = [np.bincount(rng.integers(num_queries, size=num_queries), minlength=num_queries)[query_N]
             for _ in range(RESAMPLES)]  # fmt: skip
    gold, drawn = gold_N[is_labelled], [weight_N[is_labelled] for weight_N in drawn]
    by_cut = {name: probs_NK[is_labelled] for name, probs_NK in sides.items()}
    for name, probs_NK in by_cut.items():
        by_query = ndcg_by_query(ordered(probs_NK), gold, query_N[is_labelled])
        print(json.dumps({"side": name, "ndcg@10": round(float(np.nanmean(by_query)), 4)}))
    compare("P(grade >= j)", by_cut, gold, drawn)
    compare("expected grade", {name: ordered(held)[:, None] for name, held in by_cut.items()}, gold, drawn)


def compare(by: str, sides: dict[str, np.ndarray], gold_N: np.ndarray, drawn: list[np.ndarray]) -> None:
    """Areas of each side and of what it has of its teacher's, and gaps between the others, over draws of queries."""
    whole = {name: mean_auc(probs, gold_N) for name, probs in sides.items()}
    areas = {name: np.array([mean_auc(probs, gold_N, weight_N) for weight_N in drawn])
             for name, probs in sides.items()}  # fmt: skip
    for name, auc in whole.items():
        share = (areas[name] - 0.5) / (areas["teacher"] - 0.5)
        print(json.dumps({
            "by": by,
            "side": name,
            "auc": round(auc, 4),
            "auc_interval": interval(areas[name]),
            "of_teacher": round((auc - 0.5) / (whole["teacher"] - 0.5), 4),
            "of_teacher_interval": interval(share),
        }), flush=True)  # fmt: skip
    for one, other in itertools.combinations([name for name in sides if name != "teacher"], 2):
        print(json.dumps({"by": by, "side": one, "against": other, "auc_gap": round(whole[one] - whole[other], 4),
                          "interval": interval(areas[one] - areas[other])}))  # fmt: skip


def interval(values: Any) -> list[float]:
    return [round(float(value), 4) for value in np.percentile(values, [2.5, 97.5])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["train", "judge", "speed"])
    parser.add_argument("run")
    parser.add_argument("pairs")
    parser.add_argument("--to", required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--more", nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    Path(options.to).mkdir(parents=True, exist_ok=True)
    {"train": train, "judge": judge, "speed": speed}[options.command](options)


if __name__ == "__main__":
    main()
