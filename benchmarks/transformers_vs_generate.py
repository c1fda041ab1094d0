"""Output tokens per second of the transformers engine against a bare `model.generate` loop, both in one run and taking
turns.

    python benchmarks/transformers_vs_generate.py MODEL_DIR PAIRS.parquet
        [--pairs 64] [--batch 8] [--new 64] [--threads 1]

Both sides get the same prompts, batch size, greedy decoding and limit of new tokens, and stop at the end-of-text token.
`generate` gets them in batches sorted by length, left-padded. Tokens are counted up to the end-of-text token, prefill
time is in the time. The ratio is of sums over all rounds; CPU seconds beside wall seconds show whether the machine was
busy with something else meanwhile.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from labelers.engines.transformers import Transformers
from manifests.asks import Ask, Message, Request
from manifests.specs import EngineSpec

INSTRUCTIONS = (
    "You judge how well a document answers a query, as a careful librarian would. Grade 2 is for a document that "
    "answers it, grade 1 for one that is on its topic and no more, grade 0 for all others. Say first what somebody "
    "who types this query wants to have. Then name the sentence of the document that decides, word for word. Then "
    "give the grade, and nothing after it."
)


def load_asks(path: str, num_pairs: int, max_new: int) -> list[Ask]:
    columns = pq.read_schema(path).names
    document = next(name for name in ("document", "body", "passage", "text", "title") if name in columns)
    rows = pq.read_table(path, columns=["query", document]).slice(0, num_pairs).to_pylist()
    system = Message("system", (INSTRUCTIONS,))
    return [
        Ask(
            "bench",
            (
                system,
                Message(
                    "user", ("Query: ", row["query"], "\nDocument: ", row[document] or "", "\n"), ("query", "document")
                ),
            ),
            None,
            max_new,
        )
        for row in rows
    ]


def run_engine(engine: Any, asks: list[Ask]) -> int:
    todo = [Request(number, ask, 0) for number, ask in enumerate(asks)]
    done = tokens = 0
    while done < len(asks):
        while todo and engine.capacity:
            engine.submit(todo.pop(0))
        for answer in engine.poll():
            done += 1
            tokens += answer.output_tokens
    return tokens


def run_generate(model: Any, tokenizer: Any, asks: list[Ask], batch_size: int, max_new: int) -> int:
    texts = [
        tokenizer.apply_chat_template(
            [{"role": m.role, "content": m.text} for m in ask.messages], tokenize=False, add_generation_prompt=True
        )
        for ask in asks
    ]
    prompts = sorted((tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts), key=len)
    eos = tokenizer.eos_token_id
    tokens = 0
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        width = max(map(len, batch))
        ids = torch.tensor([[eos] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new, do_sample=False, pad_token_id=eos)
        for row in out[:, width:].tolist():
            tokens += row.index(eos) + 1 if eos in row else len(row)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("pairs_file")
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    asks = load_asks(args.pairs_file, args.pairs, args.new)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def start(*, prefix_cache: bool) -> Any:
        options = Transformers.Args(device="cpu", batch_size=args.batch, prefix_cache=prefix_cache)
        return Transformers(EngineSpec(name="transformers", model=args.model, args=options))

    sides = {
        "generate": lambda part: run_generate(model, tokenizer, part, args.batch, args.new),
        "engine, prefixes off": (lambda engine: lambda part: run_engine(engine, part))(start(prefix_cache=False)),
        "engine, prefixes on": (lambda engine: lambda part: run_engine(engine, part))(start(prefix_cache=True)),
    }
    for run in sides.values():
        run(asks[:2])  # warm-up
    sums = {name: [0, 0.0, 0.0] for name in sides}
    size = -(-len(asks) // args.rounds)
    for first in range(0, len(asks), size):
        for name, run in sides.items():
            wall, cpu = time.perf_counter(), time.process_time()
            sums[name][0] += run(asks[first : first + size])
            sums[name][1] += time.perf_counter() - wall
            sums[name][2] += time.process_time() - cpu
    tokens, wall, cpu = sums["generate"]
    for name, (own_tokens, own_wall, own_cpu) in sums.items():
        print(
            f"{name:22} {own_tokens:6} tokens  {own_tokens / own_wall:7.1f} tok/s  ratio "
            f"{own_tokens / own_wall / (tokens / wall):.3f} "
            f"(by CPU time {own_tokens / own_cpu / (tokens / cpu):.3f})"
        )


if __name__ == "__main__":
    main()
