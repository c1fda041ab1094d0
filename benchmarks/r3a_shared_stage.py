"""What sharing r3a's first stage is worth, and what its distributions cost: one vLLM engine, one model, the same pairs,
three ways in turn.

    python benchmarks/r3a_shared_stage.py MODEL_DIR
        [--queries 6] [--docs 20] [--rounds 5] [--think 24] [--arg key=value ...]

`shared` is the run loop as it is: the first stage once a query, distributions by a second request. `each` takes the
sharing away, so that every pair asks its own first stage, as a loop over pairs does. `plain` shares and asks for no
distributions. All three make the same verdict prompts. The sides take turns, the prefix cache is emptied before each,
engine start and commits are outside the measure; each round gives one ratio, of which the median with a bootstrap
interval over rounds is printed. The first stage of `shared` is asserted to be asked exactly once a query, and that of
`each` once a pair.

Prefix hits are printed three times: what vLLM counted; what the prompts' token ids allow, computed apart (in the order
in which vLLM got them, whole blocks that an earlier prompt begins with, a cache without limit; what answers add, where
a second turn goes on from one, comes on top, and what another request is only just computing goes off); and what
`relabel plan --exact` computes from the texts, by its own function.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import yaml
from paired import paired_ratio, turns

from jobs.running.chunks import ChunkWork
from jobs.running.counts import Progress
from jobs.running.loop import RunLoop
from jobs.running.stops import Stop
from labelers.engines.registry import engine_class
from labelers.registry import labeler_class
from manifests.asks import Answer, Ask
from manifests.errors import VerdictError
from manifests.labels import Label, Pair
from manifests.runs.estimates import PrefixHit
from manifests.runs.receipts import ChunkId
from manifests.specs import EngineSpec

WORDS = ["".join(random.Random(number).choices("aeioubcdfglmnprstv", k=3 + number % 7)) for number in range(4000)]
CHUNK_ROWS = 40
SIDES = ("shared", "each", "plain")


class Changed:
    """A labeler whose asks are changed on their way."""

    def __init__(self, labeler: Any, **changes: Any) -> None:
        self._labeler = labeler
        self._changes = changes
        self.uses_context = labeler.uses_context
        self.template_digests = labeler.template_digests

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        inner = self._labeler.label(pair)
        ask = next(inner)
        while True:
            answer = yield dataclasses.replace(ask, **self._changes)
            try:
                ask = inner.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def probe(self) -> list[Ask]:
        return [dataclasses.replace(ask, **self._changes) for ask in self._labeler.probe()]


def made_up_pairs(num_queries: int, docs_per_query: int) -> list[Pair]:
    """Queries with four context documents each, and documents of about 60 words; words are made up."""
    rng = random.Random(11)
    pairs = []
    for query in range(num_queries):
        text = " ".join(rng.choices(WORDS, k=4))
        context = tuple(" ".join(rng.choices(WORDS, k=30)) for _ in range(4))
        for number in range(docs_per_query):
            document = " ".join(rng.choices(WORDS, k=60))
            pairs.append(Pair(len(pairs), f"q{query}", text, f"d{query}-{number}", document, context))
    return pairs


class Run(NamedTuple):
    """One pass: wall and CPU seconds, asks by stage, the answer to each ask, and the loop's own counts."""

    wall_s: float
    cpu_s: float
    asked: dict[str, int]
    answers: dict[tuple[str, str], Answer]
    progress: Progress


def text_of(ask: Ask) -> str:
    return "\x1e".join(message.text for message in ask.messages)


def label_all(engine: Any, labeler: Any, options: Any, pairs: Sequence[Pair]) -> Run:
    asked: Counter[str] = Counter()
    open_asks: dict[int, tuple[str, str]] = {}
    answers: dict[tuple[str, str], Answer] = {}
    plain_submit, plain_poll = engine.submit, engine.poll

    def submit(request: Any) -> None:
        asked[request.ask.stage] += 1
        open_asks[request.id] = (request.ask.stage, text_of(request.ask))
        plain_submit(request)

    def poll() -> list[Answer]:
        found: list[Answer] = plain_poll()
        answers.update((open_asks.pop(answer.request_id), answer) for answer in found)
        return found

    progress = Progress()
    loop = RunLoop(labeler, options, engine, lambda _: True, seed=3, progress=progress, stop=Stop())
    chunks = (
        ChunkWork(ChunkId(0, number, 1), list(pairs[start : start + CHUNK_ROWS]))
        for number, start in enumerate(range(0, len(pairs), CHUNK_ROWS))
    )
    engine.submit, engine.poll = submit, poll
    wall, cpu = time.perf_counter(), time.process_time()
    loop.run(chunks)
    took = time.perf_counter() - wall, time.process_time() - cpu
    del engine.submit, engine.poll
    return Run(*took, dict(asked), answers, progress)


def planned_hits(labeler: Any, pairs: Sequence[Pair], run: Run, block: int) -> float:
    """What the plan's function says of these prompts: pair by pair, each shared ask once."""
    hit = PrefixHit(block)
    shared: set[tuple[str, str]] = set()
    for pair in pairs:
        walk = labeler.label(pair)
        try:
            ask = next(walk)
            while True:
                key = (ask.stage, text_of(ask))
                answer = run.answers[key]
                if ask.shared_by is None or key not in shared:
                    hit.add(*key, answer.prompt_tokens)
                    shared.add(key)
                ask = walk.send(answer)
        except (StopIteration, VerdictError):
            continue
    total = sum(hit.tokens.values())
    return sum(hit.hits.values()) / total if total else 0.0


@contextmanager
def prompts_of(vllm: Any, *, are_answers: bool) -> Iterator[list[list[int]]]:
    """The token ids of every prompt that vLLM is given meanwhile; of the answers alone, or of
    second requests as well.
    """
    prompts: list[list[int]] = []
    plain_add = vllm.add_request

    def add(name: str, prompt: Any, params: Any, **more: Any) -> Any:
        if params.max_tokens > 1 or not are_answers:
            prompts.append(list(prompt["prompt_token_ids"]))
        return plain_add(name, prompt, params, **more)

    vllm.add_request = add
    try:
        yield prompts
    finally:
        del vllm.add_request


def possible_hits(prompts: Sequence[Sequence[int]], block: int) -> float:
    """Share of all prompt tokens in whole blocks that an earlier prompt begins with. The last token of a prompt is
    always computed.
    """
    seen: set[tuple[int, ...]] = set()
    hits = total = 0
    for prompt in prompts:
        prefixes = [tuple(prompt[:end]) for end in range(block, len(prompt) + 1, block)]
        known = 0
        for prefix in prefixes:
            if prefix not in seen:
                break
            known = len(prefix)
        hits += min(known, (len(prompt) - 1) // block * block)
        total += len(prompt)
        seen.update(prefixes)
    return hits / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--queries", type=int, default=6)
    parser.add_argument("--docs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--think", type=int, default=24)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument(
        "--arg", action="append", default=[], metavar="KEY=VALUE", help="an option of engine.args, its value in YAML"
    )
    args = parser.parse_args()
    given = {name: yaml.safe_load(value) for name, _, value in (pair.partition("=") for pair in args.arg)}
    kind = engine_class("vllm")
    spec = EngineSpec(
        name="vllm", model=args.model, args=kind.Args(max_num_seqs=args.max_num_seqs, **given), max_prompt_tokens=3000
    )
    engine: Any = kind(spec, overlong="truncate")
    facts, block = engine.facts(), int(engine._engine.vllm_config.cache_config.block_size)
    print(f"{facts.version} on {facts.device}, {facts.dtype}, cache blocks of {block} tokens")
    r3a = labeler_class("r3a")
    options: Any = r3a.Options(
        name="r3a", max_think_tokens=args.think, max_text_tokens=24, attempts=1, evidence="constrained"
    )
    labeler = r3a(options)
    labelers = {"shared": labeler, "each": Changed(labeler, shared_by=None), "plain": Changed(labeler, decisions=())}
    engine.prepare(labeler.probe())
    pairs = made_up_pairs(args.queries, args.docs)
    label_all(engine, labeler, options, made_up_pairs(1, 8))  # warm-up
    first, second = (ask.stage for ask in labeler.probe())
    wanted = {"shared": args.queries, "each": len(pairs), "plain": args.queries}
    wall_s: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu_s: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(args.rounds):
        for side in turns(SIDES, number):
            engine._engine.reset_prefix_cache()
            with prompts_of(engine._engine, are_answers=True) as prompts:
                run = label_all(engine, labelers[side], options, pairs)
            assert run.asked == {first: wanted[side], second: len(pairs)}, (side, run.asked)
            wall_s[side].append(run.wall_s)
            cpu_s[side].append(run.cpu_s)
            counted = run.progress.cached_tokens / run.progress.prompt_tokens
            allowed, planned = possible_hits(prompts, block), planned_hits(labelers[side], pairs, run, block)
            print(
                f"  round {number} {side:6} {len(pairs) / run.wall_s:6.2f} pairs/s {run.wall_s:6.2f} s wall "
                f"{run.cpu_s:6.2f} s CPU; "
                f"{first} {run.asked[first]}, {second} {run.asked[second]}; labelled {run.progress.statuses['ok']}; "
                f"prefix hits {counted:.1%}, possible {allowed:.1%}, planned {planned:.1%}",
                flush=True,
            )
    for what, above, below in (
        ("shared / each", "each", "shared"),
        ("with / without distributions", "plain", "shared"),
    ):
        by_wall, by_cpu = paired_ratio(wall_s[above], wall_s[below]), paired_ratio(cpu_s[above], cpu_s[below])
        print(
            f"{what}: pairs/s {by_wall} by wall clock, {by_cpu} by CPU seconds; {args.rounds} rounds, median [95 % "
            "interval]"
        )
    engine.close()


if __name__ == "__main__":
    main()
