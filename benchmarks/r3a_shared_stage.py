"""What sharing r3a's first stage is worth, and what its distributions cost: one vLLM engine, one model, the same pairs,
three ways in turn: what the parts `vllm-1.5b` and `vllm-7b` of `benchmarks/gpu_day.py` ask.

`shared` is the run loop as it is: the first stage once a query, distributions by a second request. `each` takes the
sharing away, so that every pair asks its own first stage, as a loop over pairs does. `plain` shares and asks for no
distributions. All three make the same verdict prompts. The sides take turns, the prefix cache is emptied before each,
engine start and commits are outside the measure; each round gives one ratio, of which the median with a bootstrap
interval over rounds is printed. The first stage of `shared` is asserted to be asked exactly once a query, and that of
`each` once a pair.

Prefix hits are printed twice: what vLLM counted, and what the prompts' token ids allow, computed apart (in the order in
which vLLM got them, whole blocks that an earlier prompt begins with, a cache without limit; what answers add, where a
second turn goes on from one, comes on top, and what another request is only just computing goes off).
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.gpu_models import made_up_pairs
from benchmarks.paired import Ratio, paired_ratio, turns
from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.loop import RunLoop
from relabel.jobs.run.progress import Progress
from relabel.jobs.run.stop import Stop
from relabel.labelers.registry import labeler_class
from relabel.manifests.asks import Answer, Ask
from relabel.manifests.labels import Label, Pair
from relabel.manifests.plan import ChunkId

CHUNK_ROWS = 40
SIDES = ("shared", "each", "plain")


class Changed:
    """A labeler whose asks are changed on their way."""

    def __init__(self, labeler: Any, **changes: Any) -> None:
        self._labeler = labeler
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._labeler, name)

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
    loop = RunLoop(labeler, options, engine, seed=3)
    chunks = (
        ChunkWork(ChunkId(0, number, 1), list(pairs[start : start + CHUNK_ROWS]))
        for number, start in enumerate(range(0, len(pairs), CHUNK_ROWS))
    )
    engine.submit, engine.poll = submit, poll
    wall, cpu = time.perf_counter(), time.process_time()
    loop.label_chunks(chunks, lambda _: True, progress=progress, stop=Stop())
    took = time.perf_counter() - wall, time.process_time() - cpu
    del engine.submit, engine.poll
    return Run(*took, dict(asked), answers, progress)


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


def compare(engine: Any, options: Any, queries: int, docs: int, *, rounds: int, **texts: int) -> dict[str, list[Run]]:
    """Runs by side, the sides in turn.

    Args:
        texts: lengths of what `made_up_pairs` makes up.
    """
    labeler: Any = labeler_class("r3a")(options)
    labelers = {"shared": labeler, "each": Changed(labeler, shared_by=None), "plain": Changed(labeler, decisions=())}
    block = int(engine._engine.vllm_config.cache_config.block_size)
    engine.prepare(labeler.probe())
    pairs = made_up_pairs(queries, docs, **texts)
    label_all(engine, labeler, options, pairs[:8])  # warm-up
    first, second = (ask.stage for ask in labeler.probe())
    wanted = {"shared": queries, "each": len(pairs), "plain": queries}
    runs: dict[str, list[Run]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in turns(list(SIDES), number):
            engine._engine.reset_prefix_cache()
            with prompts_of(engine._engine, are_answers=True) as prompts:
                run = label_all(engine, labelers[side], options, pairs)
            assert run.asked == {first: wanted[side], second: len(pairs)}, (side, run.asked)
            runs[side].append(run)
            counted = run.progress.cached_tokens / run.progress.prompt_tokens
            allowed = possible_hits(prompts, block)
            print(
                f"  round {number} {side:6} {len(pairs) / run.wall_s:6.2f} pairs/s {run.wall_s:6.2f} s wall "
                f"{run.cpu_s:6.2f} s CPU; "
                f"{first} {run.asked[first]}, {second} {run.asked[second]}; labelled {run.progress.statuses['ok']}; "
                f"prefix hits {counted:.1%}, possible {allowed:.1%}",
                flush=True,
            )
    return runs


def speedup(runs: dict[str, list[Run]], side: str, over: str) -> tuple[Ratio, Ratio]:
    """Pairs/s of a side over those of another, by wall clock and by CPU seconds."""
    wall, cpu = ([[getattr(run, unit) for run in runs[name]] for name in (over, side)] for unit in ("wall_s", "cpu_s"))
    return paired_ratio(*wall), paired_ratio(*cpu)
