"""Requests per second of `RunLoop` over the vLLM engine against vLLM's raw step loop, both in one process, taking turns
on one vLLM.

    python benchmarks/vllm_vs_raw.py MODEL_DIR
        [--pairs 96] [--rounds 5] [--labeler r3a] [--max-num-seqs 32] [--arg key=value …]

A first pass through the run loop records every request that reaches vLLM: token ids and sampling parameters. The raw
side feeds vLLM the same requests in the same order and does nothing else: no prompts to make, grammars compiled
beforehand, no answers read. It comes in two kinds: `raw` gives each request as soon as there is room, though in truth a
second stage has to wait for the first and a decision for its answer; `paced` gives each one only when as many were done
as were in the recording. `raw` is the strict yardstick; `paced`, and the share of time that ours spends outside vLLM's
calls, say how much of the difference is our own work. The sides take turns, the prefix cache emptied before each.
Engine start, making pairs and commits to disk are outside the measure. Each round gives one ratio of requests/s, ours
over `raw` (and `paced`), by wall clock and by CPU seconds; what counts is their median with a bootstrap interval over
rounds, to be held against 0.97. Few pairs give a low ratio to `raw`, since the run loop's first and last steps are not
full. On a machine that others use, the ratio by CPU seconds is the steadier one.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections import Counter
from typing import Any

import yaml
from paired import paired_ratio, turns

from jobs.running.chunks import ChunkWork
from jobs.running.counts import Progress
from jobs.running.loop import RunLoop
from jobs.running.stops import Stop
from labelers.engines.registry import engine_class
from labelers.registry import labeler_class
from manifests.labels import Pair
from manifests.runs.receipts import ChunkId
from manifests.specs import EngineSpec

DOCS_PER_QUERY = 8
TARGET = 0.97
"""Of the raw loop's requests/s, engine start excluded."""
WORDS = ["".join(random.Random(number).choices("aeioubcdfglmnprstv", k=3 + number % 7)) for number in range(4000)]


def made_up_pairs(num_pairs: int) -> list[Pair]:
    rng = random.Random(11)
    queries: dict[int, str] = {}
    pairs = []
    for row in range(num_pairs):
        query = row // DOCS_PER_QUERY
        queries.setdefault(query, " ".join(rng.choices(WORDS, k=4)))
        pairs.append(Pair(row, f"q{query}", queries[query], f"d{row}", " ".join(rng.choices(WORDS, k=60))))
    return pairs


class Recorder:
    """Every request that vLLM was given, and what it waited for."""

    def __init__(self, engine: Any) -> None:
        self.vllm = engine._engine
        self.requests: list[dict[str, Any]] = []
        self.is_on = False
        self._plain_add, self._plain_step, self._grammars = (
            self.vllm.add_request,
            self.vllm.step,
            engine._loop._grammars,
        )
        self._done: list[str] = []
        self._plain_leave = self._grammars.leave
        self._matchers: dict[str, Any] = {}
        self.vllm.add_request = self._add
        self.vllm.step = self._step
        self._grammars.leave = self._leave

    def stop(self) -> None:
        """Get out of the way."""
        del self.vllm.add_request, self.vllm.step, self._grammars.leave

    def _leave(self, matcher: Any) -> str:
        kept = matcher.deep_copy()
        grammar_id = self._plain_leave(matcher)
        self._matchers[grammar_id] = kept
        return grammar_id

    def _add(self, name: str, prompt: Any, params: Any, **more: Any) -> Any:
        grammar_id = params.structured_outputs.grammar if params.structured_outputs is not None else None
        waits = len(self._done)  # how many were done when this one was given
        self.requests.append(
            {
                "prompt": prompt,
                "params": params,
                "matcher": self._matchers.get(grammar_id),
                "waits": waits,
                "more": more,
            }
        )
        return self._plain_add(name, copy.copy(prompt), params.clone(), **more)

    def _step(self) -> Any:
        outputs = self._plain_step()
        self._done += [output.request_id for output in outputs if output.finished]
        return outputs


class Inside:
    """Seconds spent inside vLLM's own calls."""

    def __init__(self, vllm: Any) -> None:
        self.seconds = 0.0
        self._vllm = vllm
        for name in ("add_request", "step"):
            setattr(vllm, name, self._timed(getattr(vllm, name)))

    def _timed(self, call: Any) -> Any:
        def timed(*args: Any, **more: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **more)
            finally:
                self.seconds += time.perf_counter() - started

        return timed

    def stop(self) -> None:
        """Get out of the way."""
        del self._vllm.add_request, self._vllm.step


def run_ours(engine: Any, labeler: Any, options: Any, pairs: list[Pair]) -> int:
    progress = Progress()
    loop = RunLoop(labeler, options, engine, lambda _: True, seed=3, progress=progress, stop=Stop())
    size = 32
    loop.run(
        ChunkWork(ChunkId(0, number, 1), pairs[start : start + size])
        for number, start in enumerate(range(0, len(pairs), size))
    )
    return progress.requests


def run_raw(engine: Any, requests: list[dict[str, Any]], slots: int, *, is_paced: bool) -> tuple[float, float]:
    """Wall and CPU seconds of vLLM's own loop over what was recorded."""
    from vllm.sampling_params import StructuredOutputsParams

    vllm, grammars = engine._engine, engine._loop._grammars
    ready = []
    for request in requests:  # before the clock would be fairer still to vLLM, but a matcher serves once
        params = request["params"].clone()
        if request["matcher"] is not None:
            params.structured_outputs = StructuredOutputsParams(grammar=grammars.leave(request["matcher"].deep_copy()))
        ready.append((copy.copy(request["prompt"]), params, request["waits"], request["more"]))
    clock = time.perf_counter(), time.process_time()
    given = done = 0
    while done < len(ready):
        while given < len(ready) and given - done < slots and (not is_paced or ready[given][2] <= done):
            prompt, params, _, more = ready[given]
            vllm.add_request(f"raw-{id(ready)}-{given}", prompt, params, **more)
            given += 1
        done += sum(output.finished for output in vllm.step())
    return time.perf_counter() - clock[0], time.process_time() - clock[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--labeler", default="r3a")
    parser.add_argument("--think", type=int, default=48)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument(
        "--arg", action="append", default=[], metavar="KEY=VALUE", help="an option of engine.args, its value in YAML"
    )
    args = parser.parse_args()
    kind = engine_class("vllm")
    given = {name: yaml.safe_load(value) for name, _, value in (pair.partition("=") for pair in args.arg)}
    options = kind.Args(max_num_seqs=args.max_num_seqs, **given)
    started = time.perf_counter()
    engine: Any = kind(
        EngineSpec(name="vllm", model=args.model, args=options, max_prompt_tokens=3000), overlong="truncate"
    )
    print(
        f"engine start {time.perf_counter() - started:.1f} s; {engine.facts().version} on {engine.facts().device}, "
        f"{engine.facts().dtype}"
    )
    labeler_kind = labeler_class(args.labeler)
    label_options = labeler_kind.Options(name=args.labeler, max_think_tokens=args.think, max_text_tokens=24, attempts=1)
    labeler = labeler_kind(label_options)
    engine.prepare(labeler.probe())
    pairs = made_up_pairs(args.pairs)
    run_ours(engine, labeler, label_options, pairs[:DOCS_PER_QUERY])  # warm-up
    engine._engine.reset_prefix_cache()
    recorder = Recorder(engine)
    run_ours(engine, labeler, label_options, pairs)
    recorder.stop()
    kinds = Counter("decision" if r["params"].max_tokens == 1 else "answer" for r in recorder.requests)
    tokens = sum(len(r["prompt"]["prompt_token_ids"]) for r in recorder.requests) / len(recorder.requests)
    print(f"{len(recorder.requests)} requests a pass ({dict(kinds)}), {tokens:.0f} prompt tokens each on average")
    wall_s: dict[str, list[float]] = {"ours": [], "raw": [], "paced": []}
    cpu_s: dict[str, list[float]] = {side: [] for side in wall_s}
    inside_s = 0.0
    for number in range(args.rounds):
        for side in turns(list(wall_s), number):
            engine._engine.reset_prefix_cache()
            if side == "ours":
                inside = Inside(engine._engine)
                wall, cpu = time.perf_counter(), time.process_time()
                run_ours(engine, labeler, label_options, pairs)
                took = time.perf_counter() - wall, time.process_time() - cpu
                inside.stop()
                inside_s += inside.seconds
            else:
                took = run_raw(engine, recorder.requests, engine._loop._slots, is_paced=side == "paced")
            wall_s[side].append(took[0])
            cpu_s[side].append(took[1])
            print(f"  round {number} {side:5} {took[0]:6.2f} s wall {took[1]:6.2f} s CPU", flush=True)
    for side in wall_s:
        print(f"{side:5} {len(recorder.requests) * args.rounds / sum(wall_s[side]):7.2f} requests/s over all rounds")
    for side in ("raw", "paced"):
        wall_ratio, cpu_ratio = paired_ratio(wall_s[side], wall_s["ours"]), paired_ratio(cpu_s[side], cpu_s["ours"])
        print(
            f"ours / {side:5} by wall clock {wall_ratio}; by CPU seconds {cpu_ratio}; {args.rounds} rounds, median "
            "[95 % interval]"
        )
    verdict = "reached" if paired_ratio(wall_s["raw"], wall_s["ours"]).median >= TARGET else "not reached"
    print(f"target {TARGET} of raw: {verdict}")
    print(f"outside vLLM's own calls, ours spent {1 - inside_s / sum(wall_s['ours']):.2%} of its time")
    engine.close()


if __name__ == "__main__":
    main()
