"""Graph-GRPO's chain with a small model, measured on queries that it never saw: is an answer readable without a grammar
after supervised fine-tuning on rule-made traces, with no mask against half of the reasoning masked, and does GRPO on
top of that grade better?

    python benchmarks/graph_grpo_chain.py PAIRS.parquet MODEL_DIR --to OUT [--traces 400] [--test 100]
        [--learning-rate 3e-4] [--precision auto] [--masks 0 0.5] [--grpo-steps 0] [--grpo-minutes 60]
        [--grpo-rate 1e-5] [--skip-untrained] [--epochs 2] [--on-traces]

PAIRS has the columns query_id, query, doc_id, title and grade (0 to 3), taken to three grades: 0; 1 and 2; 3. Queries
are split by a seed. A rule writes the traces: query and title are taken apart by their words, scores follow from the
words they share, the grade from the scores (φ). They come through `relabel run` from a local server that answers by
that rule, so what is learned is a proven run's, as it would be from a large teacher. Prompts are short ones of this
file (`labeler.templates`): the built-in ones take three times as long on a CPU.

With `--on-traces` the answers are to the traces' own rows: whether so few can be learned by heart.

Answers on the test rows are greedy, from token ids, read by the labeler's own reader. Bounds: 95 %, bootstrap over
queries; differences are paired by row. What n can show at a power of 0.8 is 2.8 standard errors of the difference:
with n = 100 and answers that differ on 0.2 to 0.4 of the rows, 0.13 to 0.18.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from real_runs import RESAMPLES, relabel

from relabel.manifests.phi import DEFAULT_PHI

COARSE = (0, 1, 1, 2)
"""Three grades of four."""
SYSTEM = """You judge how well a product meets a shopper's query. Answer in these tags, in this order:
<preliminary>0, 1 or 2</preliminary>
<query_subject>the thing asked for</query_subject>
<query_attribute>what is asked of it, or none</query_attribute>
<product_subject>the thing it is</product_subject>
<product_attribute>what it has of that, or none</product_attribute>
<subject_score>0 to 4</subject_score>
<attribute_score>0 to 4</attribute_score>
<score>0, 1 or 2</score>"""
USER = "Query: {{ query }}\nProduct: {{ document }}"
SHOWN = re.compile(r"Query: (?P<query>.*?)\nProduct: (?P<title>.*)", re.DOTALL)
MAX_TEXT_TOKENS = 24
BATCH = 16


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--traces", type=int, default=400)
    parser.add_argument("--test", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--masks", type=float, nargs="+", default=[0.0, 0.5], help="GRPO goes on from the last one's")
    parser.add_argument("--grpo-steps", type=int, default=0)
    parser.add_argument("--grpo-minutes", type=float, default=60.0, help="then it is stopped, and judged as it is")
    parser.add_argument("--grpo-rate", type=float, default=1e-5)
    parser.add_argument("--skip-untrained", action="store_true", help="it writes up to the limit: minutes")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--on-traces", action="store_true")
    asked = parser.parse_args()
    asked.to.mkdir(parents=True, exist_ok=True)
    test = prepare(asked)
    run = traces_run(asked)
    models = {} if asked.skip_untrained else {"untrained": asked.model}
    for mask in asked.masks:
        models[f"ρ {mask:g}"] = taught(asked, run, mask)
    if asked.grpo_steps:
        last = f"ρ {asked.masks[-1]:g}"
        models[f"{last}, then GRPO"] = rewarded(asked, models[last])
    report(test, {name: answers(asked, model, test) for name, model in models.items()})


def prepare(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Writes templates and pairs: for traces, for rewards, and for the test; returns the rows that are answered."""
    templates = asked.to / "templates"
    templates.mkdir(exist_ok=True)
    (templates / "system.j2").write_text(SYSTEM)
    (templates / "user.j2").write_text(USER)
    rng = np.random.default_rng(15)
    rows = [row for row in pq.read_table(asked.pairs).to_pylist() if row["title"] and row["grade"] is not None]
    for row in rows:
        row["document"], row["grade"] = row.pop("title"), COARSE[row["grade"]]
        row["doc_id"] = f"{row['query_id']}/{row['doc_id']}"
    queries = rng.permutation(sorted({row["query_id"] for row in rows}))
    third = len(queries) // 3
    parts = {"test": queries[:third], "traces": queries[third : 2 * third], "rewards": queries[2 * third :]}
    wanted = {"test": asked.test, "traces": asked.traces, "rewards": 600}
    drawn = {}
    for name, chosen in parts.items():
        held = set(chosen)
        drawn[name] = evenly([row for row in rows if row["query_id"] in held], wanted[name], rng)
        columns = ("query_id", "query", "doc_id", "document", "grade")
        table = pa.Table.from_pylist([{column: row[column] for column in columns} for row in drawn[name]])
        pq.write_table(table, asked.to / f"{name}.parquet")
    return drawn["traces" if asked.on_traces else "test"]


def evenly(rows: list[dict[str, Any]], count: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """So many rows, evenly over the grades as far as there are so many."""
    found = []
    for grade in range(3):
        some = [row for row in rows if row["grade"] == grade]
        found += [some[place] for place in rng.permutation(len(some))[: (count + grade) // 3]]
    return sorted(found, key=lambda row: row["query_id"])


# traces by rule


def trace(query: str, title: str) -> str:
    """A readable answer: its scores follow from the words that query and title share, its grade from φ."""
    asked, held = words(query), words(title)
    subject, attributes = asked[-1], asked[:-1]
    shared = [word for word in attributes if word in held]
    is_there = subject in held
    s = 4 if is_there else 2 if shared else 1
    a = 0 if not attributes else 1 + round(3 * len(shared) / len(attributes))
    grade = DEFAULT_PHI[s][a]
    first = 2 if is_there else 0
    thing = subject if is_there else (held[-1] if held else "none")
    texts = (subject, " ".join(attributes) or "none", thing, " ".join(shared) or "none")
    tags = ("query_subject", "query_attribute", "product_subject", "product_attribute")
    parts = [("preliminary", first), *zip(tags, texts, strict=True)]
    parts += [("subject_score", s), ("attribute_score", a), ("score", grade)]
    return "\n".join(f"<{tag}>{value}</{tag}>" for tag, value in parts)


def words(text: str) -> list[str]:
    """Its words in lower case, a plural's s left out."""
    return [word.removesuffix("s") for word in re.findall(r"[a-z0-9]+", text.lower())] or ["none"]


class Rule(BaseHTTPRequestHandler):
    """A server of the OpenAI API whose model is the rule."""

    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": "rule", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        shown = SHOWN.search(body["messages"][-1]["content"])
        assert shown is not None
        text = trace(shown["query"], shown["title"])
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        self._send({"id": "1", "object": "chat.completion", "model": "rule", "choices": [choice], "usage": usage})

    def _send(self, payload: dict[str, Any]) -> None:
        data = json.dumps(payload).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Silent."""


@contextmanager
def served() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Rule)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()


def labeler(asked: argparse.Namespace) -> dict[str, Any]:
    templates = str(asked.to.absolute() / "templates")
    return {"name": "graph-grpo", "grades": 3, "templates": templates, "max_text_tokens": MAX_TEXT_TOKENS}


def traces_run(asked: argparse.Namespace) -> Path:
    """A finished run of the rule."""
    with served() as url:
        spec = {
            "name": "traces",
            "input": {"path": str(asked.to / "traces.parquet")},
            "labeler": labeler(asked),
            "engine": {"name": "openai", "args": {"base_url": url, "served_model": "rule", "mode": "chat"}},
            "output": str(asked.to / "traces"),
        }
        relabel("run", written(asked.to / "traces.yaml", spec), "--done-ok")
    return asked.to / "traces"


def written(file: Path, spec: dict[str, Any]) -> Path:
    file.write_text(json.dumps(spec))
    return file


# training


def taught(asked: argparse.Namespace, run: Path, mask: float) -> Path:
    """A teacher of the traces."""
    output = asked.to / f"sft-{mask:g}"
    spec = {
        "name": output.name,
        "method": "sft",
        "init": str(asked.model),
        "data": {"runs": [str(run)]},
        "train": {
            "epochs": asked.epochs,
            "batch_size": 8,
            "learning_rate": asked.learning_rate,
            "precision": asked.precision,
            "max_tokens": 512,
            "mask": mask,
        },
        "output": str(output),
    }
    return trained(asked.to / f"{output.name}.yaml", spec)


def rewarded(asked: argparse.Namespace, init: Path) -> Path:
    """A teacher that went on by Graph-GRPO; scores are nobody's, so it is rewarded by the trusted grade alone."""
    spec = {
        "name": "grpo",
        "method": "graph-grpo",
        "init": str(init),
        "labeler": labeler(asked),
        "data": {"gold": {"path": str(asked.to / "rewards.parquet"), "grade": "grade"}},
        "rollouts": {"group": 8, "updates": 2, "beta": 0.01},
        "credit": {"learn": True, "tags": "grade"},
        "train": {
            "max_steps": asked.grpo_steps,
            "batch_size": 8,
            "accumulation": 2,
            "learning_rate": asked.grpo_rate,
            "precision": asked.precision,
            "max_tokens": 512,
            "save_every": 10,
        },
        "output": str(asked.to / "grpo"),
    }
    folder, file = Path(str(spec["output"])), written(asked.to / "grpo.yaml", spec)
    stopped = asked.to / "grpo-stopped"
    if (folder / "manifest.json").exists() or stopped.exists():
        return stopped if stopped.exists() else folder
    command = [sys.executable, "-P", "-m", "relabel", "train", str(file), "--resume"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as training:
        try:
            training.wait(60 * asked.grpo_minutes)
        except subprocess.TimeoutExpired:
            training.terminate()
    return folder if training.returncode == 0 else from_checkpoint(init, folder / "checkpoints", stopped)


def from_checkpoint(init: Path, checkpoints: Path, to: Path) -> Path:
    """The model of the last checkpoint."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    last = max(checkpoints.glob("checkpoint-*"))
    print(f"GRPO was stopped: {last.name}", file=sys.stderr)
    model = AutoModelForCausalLM.from_pretrained(init)
    missing, unknown = model.load_state_dict(load_file(last / "weights.safetensors"), strict=False)
    assert not unknown
    assert set(missing) <= {"lm_head.weight"}  # tied to the embeddings
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(init).save_pretrained(to)
    return to


def trained(file: Path, spec: dict[str, Any]) -> Path:
    started = time.perf_counter()
    relabel("train", written(file, spec), "--resume", "--done-ok")
    print(f"{file.stem}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return Path(str(spec["output"]))


# the test


def answers(asked: argparse.Namespace, folder: Path, test: Sequence[dict[str, Any]]) -> list[int | None]:
    """The grade of each row's greedy answer; None where it can't be read. Kept next to the model's folder."""
    kept = asked.to / f"answers-{folder.name}.json"
    if kept.exists():
        return list(json.loads(kept.read_text()))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from relabel.distill.teachers.rollouts import AnswerTokens, Dialogues, longest_answer
    from relabel.labelers.engines.tokens import PromptEncoder
    from relabel.labelers.engines.transformers import end_ids
    from relabel.labelers.registry import labeler_class
    from relabel.manifests.labels import Pair
    from relabel.manifests.specs import validate_spec

    torch.manual_seed(7)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    kind = labeler_class("graph-grpo")
    asker = kind(validate_spec(kind.Options, labeler(asked), where="benchmark"))
    ends = end_ids(model.config.eos_token_id, tokenizer)
    tokens = AnswerTokens(tokenizer, end_ids=ends)
    talks = Dialogues(asker, PromptEncoder(tokenizer), tokens, max_prompt_tokens=512)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]

    def write(contexts: Sequence[list[int]]) -> list[list[int]]:
        width = max(map(len, contexts))
        ids = torch.tensor([[pad] * (width - len(one)) + one for one in contexts])
        attention = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in contexts])
        with torch.inference_mode():
            made = model.generate(
                input_ids=ids, attention_mask=attention, do_sample=False, eos_token_id=ends, pad_token_id=pad,
                max_new_tokens=longest_answer(talks.labeler), temperature=None, top_p=None, top_k=None,
            )  # fmt: skip
        return [upto(one, ends) for one in made[:, width:].tolist()]

    pairs = [
        Pair(number, row["query_id"], row["query"], row["doc_id"], row["document"]) for number, row in enumerate(test)
    ]
    order = sorted(pairs, key=lambda pair: len(pair.document))
    grades: dict[int, int | None] = {}
    started = time.perf_counter()
    for start in range(0, len(order), BATCH):
        for rollout in talks.roll(order[start : start + BATCH], write):
            grades[rollout.pair.row_id] = None if rollout.label is None else rollout.label.grade
    print(f"answers of {folder.name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    found = [grades[pair.row_id] for pair in pairs]
    kept.write_text(json.dumps(found))
    return found


def upto(ids: list[int], ends: Sequence[int]) -> list[int]:
    """The answer up to its end token."""
    place = next((place for place, one in enumerate(ids) if one in ends), None)
    return ids if place is None else ids[: place + 1]


def report(test: Sequence[dict[str, Any]], found: dict[str, list[int | None]]) -> None:
    gold = np.array([row["grade"] for row in test])
    rule = np.array([int(trace(row["query"], row["document"])[-9]) for row in test])
    readable = {name: np.array([one is not None for one in grades]) for name, grades in found.items()}
    right = {name: np.array([one == g for one, g in zip(grades, gold, strict=True)]) for name, grades in found.items()}
    by_rule = {
        name: np.array([one == g for one, g in zip(grades, rule, strict=True)]) for name, grades in found.items()
    }
    _, query_N = np.unique([row["query_id"] for row in test], return_inverse=True)
    members = [np.flatnonzero(query_N == query) for query in range(query_N.max() + 1)]
    rng = np.random.default_rng(7)
    draws = [
        np.concatenate([members[q] for q in rng.integers(len(members), size=len(members))]) for _ in range(RESAMPLES)
    ]

    def shown(values: np.ndarray) -> str:
        low, high = np.percentile([values[at].mean() for at in draws], [2.5, 97.5])
        return f"{values.mean():.3f} [{low:.3f}, {high:.3f}]"

    print(f"n = {len(test)} rows of {len(members)} queries; the rule itself has {np.mean(rule == gold):.3f} of gold\n")
    print("| model | readable | the trusted grade | the rule's grade |\n|---|---|---|---|")
    for name in found:
        print(f"| {name} | {shown(readable[name])} | {shown(right[name])} | {shown(by_rule[name])} |")
    names = list(found)
    for before, after in itertools.pairwise(names):
        difference = right[after].astype(float) - right[before].astype(float)
        smallest = 2.8 * difference.std() / np.sqrt(len(test))
        print(
            f"| {after} less {before} | {shown(readable[after].astype(float) - readable[before])} | "
            f"{shown(difference)}; n can show {smallest:.3f} | |"
        )


if __name__ == "__main__":
    main()
