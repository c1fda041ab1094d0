"""Output tokens per second of the transformers engine against a bare `model.generate` loop, both in one run and taking
turns: the part `transformers` of `benchmarks/gpu_day.py`.

Both sides get the same prompts, batch size, greedy decoding and limit of new tokens, and stop at the end-of-text token.
`generate` gets them in batches sorted by length, left-padded. Tokens are counted up to the end-of-text token, prefill
time is in the time. The ratio is of sums over all rounds; CPU seconds with wall seconds show whether the machine was
busy with something else meanwhile.
"""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.paired import turns
from relabel.labelers.engines.transformers import Transformers
from relabel.manifests.asks import Ask, Message, Request
from relabel.manifests.specs import EngineSpec

INSTRUCTIONS = (
    "You judge how well a document answers a query, as a careful librarian would. Grade 2 is for a document that "
    "answers it, grade 1 for one that is on its topic and no more, grade 0 for all others. Say first what somebody "
    "who types this query wants to have. Then name the sentence of the document that decides, word for word. Then "
    "give the grade, and nothing after it."
)


def ask_of(query: str, document: str, max_new: int) -> Ask:
    """A free answer about a pair."""
    system = Message("system", (INSTRUCTIONS,))
    user = Message("user", ("Query: ", query, "\nDocument: ", document, "\n"), ("query", "document"))
    return Ask("bench", (system, user), None, max_new)


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
            out = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=max_new,
                do_sample=False,
                pad_token_id=eos,
            )
        for row in out[:, width:].tolist():
            tokens += row.index(eos) + 1 if eos in row else len(row)
    return tokens


def compare(
    folder: Path | str, asks: list[Ask], *, rounds: int, batch_size: int, max_new: int, device: str, dtype: str
) -> dict[str, list[float]]:
    """Tokens, wall and CPU seconds by side, the sides in turns."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def start(*, prefix_cache: bool) -> Any:
        options = Transformers.Args(device=device, dtype=dtype, batch_size=batch_size, prefix_cache=prefix_cache)
        return Transformers(EngineSpec(name="transformers", model=str(folder), args=options))

    sides = {
        "generate": lambda part: run_generate(model, tokenizer, part, batch_size, max_new),
        "engine, prefixes off": (lambda engine: lambda part: run_engine(engine, part))(start(prefix_cache=False)),
        "engine, prefixes on": (lambda engine: lambda part: run_engine(engine, part))(start(prefix_cache=True)),
    }
    for run in sides.values():
        run(asks[:2])  # warm-up
    sums = {name: [0, 0.0, 0.0] for name in sides}
    size = -(-len(asks) // rounds)
    for number, first in enumerate(range(0, len(asks), size)):
        for name in turns(list(sides), number):
            wall, cpu = time.perf_counter(), time.process_time()
            sums[name][0] += sides[name](asks[first : first + size])
            sums[name][1] += time.perf_counter() - wall
            sums[name][2] += time.process_time() - cpu
    return sums
