"""What the host does for a request over vLLM: the engine against vLLM's raw step loop, on a device of known speed.

    python -m benchmarks.vllm_host TOKENIZER [--labelers direct,r3a] [--pairs 512] [--words 350] [--rounds 3]
        [--tokens-per-s 240000] [--launch-ms 1.5] [--decode-ms 10] [--one-step-at-a-time]

vLLM is the real one (its CPU build, in this process), and only its model is replaced: a step of the stand-in takes as
long as the tokens that it is given, at `--tokens-per-s` (a step that prefills nothing takes `--decode-ms`). To hand it
a step takes `--launch-ms`, in which Python's lock is held in 40 pieces, as a GPU's model runner does that launches
kernels. As on a GPU, vLLM schedules a step while the device is at the one before (async scheduling, which the CPU build
switches off), and waits without Python's lock; with `--one-step-at-a-time` the device waits for the host in between.
The sides take turns as in `vllm_vs_raw.py`. Printed for each side: requests/s, the CPU time of a request on the main
thread, on the threads that encode, and in all others (the tokenizer's own), the number of steps, and the share of the
time in which the device worked. CPU time is what to look at on a machine that others use too.

`TOKENIZER` is a folder with a tokenizer and a chat template; the model is a random one of two layers.
"""

import argparse
import functools
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_models import made_up_pairs
from benchmarks.paired import paired_ratio, turns
from benchmarks.vllm_vs_raw import SIDES, Recorder, run_ours, run_raw
from relabel.manifests.process import seldom_collected

LAUNCHES = 40
"""Pieces of a step in which Python's lock is held, and let go of in between."""
DOCS_PER_QUERY = 20


class Output(Future[Any]):
    """What a step gives, once the device has done it: the caller waits, as it does for the copy from a GPU."""

    def __init__(self, ready_s: float, make: Callable[[], Any]) -> None:
        super().__init__()
        self._ready_s = ready_s
        self._make = make

    def result(self, timeout: float | None = None) -> Any:
        time.sleep(max(self._ready_s - time.perf_counter(), 0))
        return self._make()


class Device:
    """In place of vLLM's executor: takes its time, a step after the other, and makes up tokens that the grammar allows.

    Args:
        scheduler: vLLM's, which knows how far a prompt is.
        tokens_per_s: how fast prompts are read.
        launch_s: how long a step's launches hold Python's lock in all.
        decode_s: the least time of a step.
    """

    def __init__(self, scheduler: Any, *, tokens_per_s: float, launch_s: float, decode_s: float) -> None:
        self.scheduler = scheduler
        self.tokens_per_s = tokens_per_s
        self.launch_s = launch_s
        self.decode_s = decode_s
        self.is_instant = False
        self.steps = 0
        self.busy_s = 0.0
        self._ready_s = 0.0
        self._rng = np.random.default_rng(3)

    def execute_model(self, scheduled: Any, non_block: bool = False) -> Any:
        """Begin a step as soon as the one before is done."""
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        self._scheduled = scheduled
        num_tokens = scheduled.total_num_scheduled_tokens
        if num_tokens and not self.is_instant:
            takes_s = max(num_tokens / self.tokens_per_s, self.decode_s)
            self._ready_s = max(self._ready_s, time.perf_counter()) + takes_s
            self.steps += 1
            self.busy_s += takes_s
            for _ in range(LAUNCHES):
                until = time.thread_time() + self.launch_s / LAUNCHES
                while time.thread_time() < until:
                    pass
                time.sleep(0)
        outcome = None if num_tokens else EMPTY_MODEL_RUNNER_OUTPUT
        future: Future[Any] = Future()
        future.set_result(outcome)
        return future if non_block else outcome

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """The step's outcome, to be waited for."""
        bound: dict[str, Any] = {}
        if grammar_output is not None:
            bound = dict(zip(grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask, strict=True))
        names = list(self._scheduled.num_scheduled_tokens)
        requests = [self.scheduler.requests.get(name) for name in names]
        sampled = [self._token(request, bound.get(name)) for name, request in zip(names, requests, strict=True)]
        output = Output(self._ready_s, functools.partial(self._output, names, requests, sampled))
        return output if non_block else output.result()

    def _output(self, names: list[str], requests: list[Any], sampled: list[list[int]]) -> Any:
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        wanted = [_wanted_logprobs(request) for request in requests]
        width = max(map(len, wanted), default=0)
        ids = np.zeros((len(names), width + 1), dtype=np.int64)
        for row, labels in enumerate(wanted):
            ids[row, 1 : len(labels) + 1] = labels
        logprobs = LogprobsLists(ids, np.full(ids.shape, -2.0, dtype=np.float32), np.ones(len(names), dtype=np.int64))
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=logprobs if width else None,
        )

    def _token(self, request: Any, bitmask: Any) -> list[int]:
        """One token, or none where the prompt is not read to its end yet, or the request ended a step ago."""
        if request is None or request.num_computed_tokens < request.num_tokens:
            return []
        if bitmask is None:
            return [17]
        allowed = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little"))
        return [int(self._rng.choice(allowed))]


def _wanted_logprobs(request: Any) -> list[int]:
    """The tokens whose log probabilities a request asks for; none where it ended a step ago."""
    if request is None:
        return []
    return request.sampling_params.logprob_token_ids or []


class ThreadTimes:
    """CPU seconds by kind of thread, since it was made."""

    def __init__(self) -> None:
        self._began = self._now()
        self._all_s = time.process_time()
        self._wall_s = time.perf_counter()

    @staticmethod
    def _now() -> dict[str, float]:
        times = {"main": time.thread_time(), "encode": 0.0}
        for thread in threading.enumerate():
            if thread.name.startswith("relabel-encode") and thread.ident is not None:
                times["encode"] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        return times

    def split(self) -> dict[str, float]:
        """Seconds by `wall`, `main`, `encode` and `others`."""
        now = self._now()
        times = {name: now[name] - self._began[name] for name in now}
        times["others"] = time.process_time() - self._all_s - sum(times.values())
        times["wall"] = time.perf_counter() - self._wall_s
        return times


def write_tiny_model(folder: Path, tokenizer_folder: str) -> Path:
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def schedule_ahead() -> None:
    """Have the CPU build schedule steps as a GPU's does. It has no use for it, since its device is the host."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_set(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_and_set)


def start_engine(model: Path, args: argparse.Namespace) -> tuple[Any, Device]:
    """The engine, on the stand-in."""
    from relabel.labelers.engines.vllm import Vllm
    from relabel.manifests.specs import EngineSpec

    if not args.one_step_at_a_time:
        schedule_ahead()
    options = Vllm.Args(
        dtype="float32",
        max_num_seqs=args.seqs,
        kv_cache_space_gib=1.0,
        max_model_len=4096,
        extra={"max_num_batched_tokens": 8192},
    )
    engine = Vllm(EngineSpec(name="vllm", model=str(model), args=options, max_prompt_tokens=3500))
    core = engine._engine.engine_core.engine_core
    device = Device(
        core.scheduler,
        tokens_per_s=args.tokens_per_s,
        launch_s=args.launch_ms / 1000,
        decode_s=args.decode_ms / 1000,
    )
    core.model_executor.execute_model = device.execute_model
    core.model_executor.sample_tokens = device.sample_tokens
    return engine, device


def compare(engine: Any, device: Device, name: str, args: argparse.Namespace) -> None:
    """Print a labeler's figures."""
    from benchmarks.gpu_teachers import labeler_options
    from relabel.labelers.registry import labeler_class

    options = labeler_options(name, 8)
    labeler = labeler_class(name)(options)
    texts = made_up_pairs(-(-args.pairs // DOCS_PER_QUERY), DOCS_PER_QUERY, doc_words=args.words)[: args.pairs]
    engine.prepare(labeler.probe())
    device.is_instant = True
    recorder = Recorder(engine)
    run_ours(engine, labeler, options, texts)
    recorder.stop()
    device.is_instant = False
    requests = recorder.requests
    mean = sum(len(request["prompt"]["prompt_token_ids"]) for request in requests) / len(requests)
    print(f"{name}: {len(requests)} requests of {mean:.0f} tokens", flush=True)
    spent: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(args.rounds):
        for side in turns(SIDES, number):
            engine._engine.reset_prefix_cache()
            device.steps = 0
            device.busy_s = 0.0
            times = ThreadTimes()
            with seldom_collected():  # as a command does; for both sides
                if side == "ours":
                    run_ours(engine, labeler, options, texts)
                else:
                    run_raw(engine, requests, engine._loop._slots)
            spent[side].append(times.split())
            busy = device.busy_s / spent[side][-1]["wall"]
            line = _line(spent[side][-1], len(requests))
            print(f"  round {number} {side:5} {line}; {device.steps} steps, device busy {busy:.3f}", flush=True)
    for side in SIDES:
        least = {kind: min(times[kind] for times in spent[side]) for kind in spent[side][0]}
        print(f"{name} {side:5} {_line(least, len(requests))}")
    for kind in ("wall", "main"):
        ratio = paired_ratio([s[kind] for s in spent["raw"]], [s[kind] for s in spent["ours"]])
        print(f"{name}: raw over ours, {kind}: {ratio}", flush=True)


def _line(times: dict[str, float], count: int) -> str:
    each = ", ".join(f"{kind} {seconds / count * 1000:.3f}" for kind, seconds in times.items())
    return f"{count / times['wall']:7.1f} requests/s; ms a request: {each}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("tokenizer")
    parser.add_argument("--labelers", default="direct")
    parser.add_argument("--pairs", type=int, default=512)
    parser.add_argument("--words", type=int, default=350)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--tokens-per-s", type=float, default=240_000)
    parser.add_argument("--launch-ms", type=float, default=1.5)
    parser.add_argument("--decode-ms", type=float, default=10.0)
    parser.add_argument("--one-step-at-a-time", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine, device = start_engine(write_tiny_model(Path(folder), args.tokenizer), args)
        try:
            for name in args.labelers.split(","):
                compare(engine, device, name, args)
        finally:
            engine.close()


if __name__ == "__main__":
    sys.exit(main())
