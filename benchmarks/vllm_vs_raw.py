"""Requests per second of `RunLoop` over the vLLM engine against vLLM's raw step loop, both in one process, taking turns
on one vLLM: what the parts `vllm-1.5b` and `vllm-7b` of `benchmarks/gpu_day.py` ask.

A first pass through the run loop records every request that reaches vLLM: token ids and sampling parameters. The raw
side feeds vLLM the same requests in the same order as soon as there is room and does nothing else: no prompts to make,
grammars compiled beforehand, no answers read, no second stage that waits for the first. The sides take turns, the
prefix cache emptied before each. Engine start, making pairs and commits to disk are outside the measure. Each round
gives one ratio of requests/s; what counts is their median with a bootstrap interval over rounds. Few pairs give a low
ratio, since the run loop's first and last steps are not full.
"""

import copy
import time
from collections import Counter
from typing import Any, NamedTuple

from benchmarks.paired import turns
from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.loop import RunLoop
from relabel.jobs.run.progress import Progress
from relabel.jobs.run.stop import Stop
from relabel.manifests.labels import Pair
from relabel.manifests.plan import ChunkId

DOCS_PER_QUERY = 8
SIDES = ("ours", "raw")


class Recorder:
    """Every request that vLLM was given."""

    def __init__(self, engine: Any) -> None:
        self.vllm = engine._engine
        self.requests: list[dict[str, Any]] = []
        self._plain_add, self._grammars = self.vllm.add_request, engine._loop._grammars
        self._plain_leave = self._grammars.leave
        self._matchers: dict[str, Any] = {}
        self.vllm.add_request = self._add
        self._grammars.leave = self._leave

    def stop(self) -> None:
        """Get out of the way."""
        del self.vllm.add_request, self._grammars.leave

    def _leave(self, matcher: Any) -> str:
        kept = matcher.deep_copy()
        grammar_id = self._plain_leave(matcher)
        self._matchers[grammar_id] = kept
        return grammar_id

    def _add(self, name: str, prompt: Any, params: Any, **more: Any) -> Any:
        grammar_id = params.structured_outputs.json if params.structured_outputs is not None else None
        self.requests.append(
            {
                "prompt": prompt,
                "params": params,
                "matcher": self._matchers.get(grammar_id),
                "more": more,
            }
        )
        return self._plain_add(name, copy.copy(prompt), params.clone(), **more)


def run_ours(engine: Any, labeler: Any, options: Any, pairs: list[Pair]) -> int:
    progress = Progress()
    loop = RunLoop(labeler, options, engine, seed=3)
    size = 32
    chunks = (
        ChunkWork(ChunkId(0, number, 1), pairs[start : start + size])
        for number, start in enumerate(range(0, len(pairs), size))
    )
    loop.label_chunks(chunks, lambda _: True, progress=progress, stop=Stop())
    return progress.requests


def run_raw(engine: Any, requests: list[dict[str, Any]], slots: int) -> tuple[float, float]:
    """Wall and CPU seconds of vLLM's own loop over what was recorded."""
    from vllm.sampling_params import StructuredOutputsParams

    vllm, grammars = engine._engine, engine._loop._grammars
    ready = []
    for request in requests:  # before the clock would be fairer still to vLLM, but a matcher serves once
        params = request["params"].clone()
        if request["matcher"] is not None:
            params.structured_outputs = StructuredOutputsParams(json=grammars.leave(request["matcher"].deep_copy()))
        ready.append((copy.copy(request["prompt"]), params, request["more"]))
    clock = time.perf_counter(), time.process_time()
    given = done = 0
    while done < len(ready):
        while given < len(ready) and given - done < slots:
            prompt, params, more = ready[given]
            vllm.add_request(f"raw-{id(ready)}-{given}", prompt, params, **more)
            given += 1
        done += sum(output.finished for output in vllm.step())
    return time.perf_counter() - clock[0], time.process_time() - clock[1]


class Compared(NamedTuple):
    """Requests of a pass and their kinds, prompt tokens of one, and by side the seconds of each round."""

    requests: int
    kinds: dict[str, int]
    mean_prompt_tokens: float
    wall_s: dict[str, list[float]]
    cpu_s: dict[str, list[float]]


def compare(engine: Any, labeler: Any, options: Any, pairs: list[Pair], *, rounds: int) -> Compared:
    """Record what the run loop asks of vLLM, then let the sides take turns."""
    engine.prepare(labeler.probe())
    run_ours(engine, labeler, options, pairs[:DOCS_PER_QUERY])  # warm-up
    engine._engine.reset_prefix_cache()
    recorder = Recorder(engine)
    run_ours(engine, labeler, options, pairs)
    recorder.stop()
    requests = recorder.requests
    kinds = Counter("decision" if r["params"].max_tokens == 1 else "answer" for r in requests)
    tokens = sum(len(r["prompt"]["prompt_token_ids"]) for r in requests) / len(requests)
    found = Compared(len(requests), dict(kinds), tokens, {side: [] for side in SIDES}, {side: [] for side in SIDES})
    for number in range(rounds):
        for side in turns(list(SIDES), number):
            engine._engine.reset_prefix_cache()
            if side == "ours":
                wall, cpu = time.perf_counter(), time.process_time()
                run_ours(engine, labeler, options, pairs)
                took = time.perf_counter() - wall, time.process_time() - cpu
            else:
                took = run_raw(engine, requests, engine._loop._slots)
            found.wall_s[side].append(took[0])
            found.cpu_s[side].append(took[1])
            print(f"  round {number} {side:5} {took[0]:6.2f} s wall {took[1]:6.2f} s CPU", flush=True)
    return found
