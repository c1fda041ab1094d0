"""Parts of the GPU day about teachers: the engines through the product, against the raw engines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from benchmarks import r3a_shared_stage, transformers_vs_generate, vllm_vs_raw
from benchmarks.gpu_models import ROOT, made_up_pairs, write_pairs
from benchmarks.paired import paired_ratio
from relabel.labelers.registry import engine_class, labeler_class
from relabel.manifests.asks import Request
from relabel.manifests.specs import EngineSpec

if TYPE_CHECKING:
    from benchmarks.gpu_day import Day

LEAST_OF_RAW = 0.98
FP8_SPEED = 1.38
"""Requests/s of fp8 over bf16 that vLLM alone had on an H200, in the shape of a 7B."""


def vllm_args(day: Day, **args: Any) -> dict[str, Any]:
    """`engine.args` for this device."""
    real = {"extra": {"attention_backend": "FLASH_ATTN"}, "max_model_len": 4096}
    tiny = {"max_num_seqs": 8, "kv_cache_space_gib": 0.25, "max_model_len": 4096}
    return {"dtype": "bfloat16", **day.pick(real, tiny), **args}


@contextmanager
def engine_of(day: Day, name: str, model: Path, **args: Any) -> Iterator[Any]:
    """An engine, started and closed."""
    kind = engine_class(name)
    spec = EngineSpec(name=name, model=str(model), args=kind.Args(**args), max_prompt_tokens=3500)
    started = time.perf_counter()
    engine: Any = kind(spec, overlong="truncate")
    day.emit(f"engine start, {model.name}", time.perf_counter() - started, "s", engine=name, args=args)
    try:
        yield engine
    finally:
        engine.close()


def labeler_options(name: str, think: int) -> Any:
    more = {"evidence": "constrained"} if name == "r3a" else {}
    kind = labeler_class(name).Options
    caps = {"max_think_tokens": think, "max_text_tokens": 24}
    return kind(name=name, attempts=1, **more, **{key: caps[key] for key in caps.keys() & kind.model_fields})


def vllm_small(day: Day) -> None:
    """1.5B."""
    _against_raw(day, "qwen-1.5b", pairs=day.pick((2048, 640), (32, 16)), share=1.46, rounds=day.pick(2, 1))


def vllm_large(day: Day) -> None:
    """7B."""
    _against_raw(day, "qwen-7b", pairs=day.pick((1024, 384), (32, 16)), share=1.34, rounds=day.pick(2, 1))


def _against_raw(day: Day, shape: str, *, pairs: tuple[int, int], share: float, rounds: int) -> None:
    docs, think = day.pick(20, 4), day.pick(200, 8)
    with engine_of(day, "vllm", day.model(shape), **vllm_args(day)) as engine:
        for name, count in zip(("direct", "r3a"), pairs, strict=True):
            options = labeler_options(name, think)
            texts = made_up_pairs(-(-count // docs), docs, doc_words=day.pick(350, 30))[:count]
            found = vllm_vs_raw.compare(engine, labeler_class(name)(options), options, texts, rounds=rounds)
            ours, raw = (found.requests / median(found.wall_s[side]) for side in ("ours", "raw"))
            ratio, by_cpu = (paired_ratio(took["raw"], took["ours"]) for took in (found.wall_s, found.cpu_s))
            day.emit(
                f"{name} over vLLM, {shape}", ours, "requests/s", baseline=raw, ratio=ratio.median,
                least_ratio=LEAST_OF_RAW, interval=[ratio.low, ratio.high], ratio_by_cpu=by_cpu.median, rounds=rounds,
                prompt_tokens=round(found.mean_prompt_tokens), requests=found.kinds,
            )  # fmt: skip
        queries = -(-pairs[1] // docs)
        runs = r3a_shared_stage.compare(
            engine, labeler_options("r3a", think), queries, docs, rounds=rounds, doc_words=day.pick(350, 30)
        )
        for what, side, over, least in (
            ("stage 1 once a query against once a pair", "shared", "each", share),
            ("with distributions against without", "shared", "plain", None),
        ):
            rates = [queries * docs / median(run.wall_s for run in runs[name]) for name in (side, over)]
            ratio = r3a_shared_stage.speedup(runs, side, over)[0]
            day.emit(
                f"r3a, {what}, {shape}", rates[0], "pairs/s", baseline=rates[1], ratio=ratio.median,
                least_ratio=least, interval=[ratio.low, ratio.high],
            )  # fmt: skip


def answers(engine: Any, labeler: Any, count: int, doc_words: int) -> list[Any]:
    """An engine's answers to `direct`, by pair."""
    asks = [next(labeler.label(pair)) for pair in made_up_pairs(count // 8, 8, doc_words=doc_words)]
    engine.prepare(labeler.probe())
    todo, found = [Request(number, ask, 0) for number, ask in enumerate(asks)], {}
    while len(found) < len(asks):
        while todo and engine.capacity:
            engine.submit(todo.pop(0))
        found.update({answer.request_id: answer for answer in engine.poll()})
    return [next(iter(found[number].distributions.values())) for number in range(len(asks))]


def furthest(found: list[Any], other: list[Any]) -> float:
    """Largest |dp| of two sides."""
    return max(abs(a - b) for x, y in zip(found, other, strict=True) for a, b in zip(x.probs, y.probs, strict=True))


def probs(day: Day) -> None:
    """vLLM's distributions against those of transformers in float32, and transformers in bfloat16."""
    model, count, words = day.model("qwen-1.5b"), day.pick(256, 16), day.pick(350, 30)
    labeler = labeler_class("direct")(labeler_options("direct", 8))
    sides = {
        "float32": ("transformers", {"device": day.device, "dtype": "float32", "batch_size": 16}),
        "bfloat16": ("transformers", {"device": day.device, "dtype": "bfloat16", "batch_size": 16}),
        "vllm": ("vllm", vllm_args(day, **day.pick({"gpu_memory_utilization": 0.5}, {}))),
    }
    found = {}
    for side, (name, args) in sides.items():
        with engine_of(day, name, model, **args) as engine:
            found[side] = answers(engine, labeler, count, words)
    ours, theirs = (furthest(found[side], found["float32"]) for side in ("vllm", "bfloat16"))
    flips = sum(a.argmax != b.argmax for a, b in zip(found["vllm"], found["float32"], strict=True))
    day.emit(
        "max |dp| of vLLM in bf16, against transformers in fp32; baseline: transformers in bf16", ours, "probability",
        baseline=theirs, most=max(3e-2, 2 * theirs), flips=flips, pairs=count,
    )  # fmt: skip


def kill(day: Day) -> None:
    """A run is killed once it has committed a few chunks; two workers of less memory each finish it."""
    queries = day.pick(120, 12)
    pairs = write_pairs(day.folder / "pairs.parquet", made_up_pairs(queries, 8, doc_words=day.pick(350, 30)))
    output = day.folder / f"killed-{os.getpid()}"
    job = {
        "name": "day", "input": {"path": str(pairs)}, "output": str(output), "shards": 2,
        "labeler": labeler_options("r3a", day.pick(200, 8)).model_dump(exclude_unset=True),
        "engine": {
            "name": "vllm", "model": str(day.model("qwen-1.5b")), "max_prompt_tokens": 3500, "args": vllm_args(day),
        },
        "run": {"chunk_rows": day.pick(32, 8), "max_failed_fraction": 1.0, "stop_when_unreadable": False},
    }  # fmt: skip
    file = day.folder / "job.json"
    file.write_text(json.dumps(job))

    def start(*more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "relabel", "run", str(file), *more], cwd=ROOT)

    def committed() -> list[tuple[float, int]]:
        paths = (output / "receipts").rglob("*.json")
        return sorted((path.stat().st_mtime, int(json.loads(path.read_text())["rows"])) for path in paths)

    def rate(done: list[tuple[float, int]]) -> float:
        return sum(rows for _, rows in done[1:]) / max(done[-1][0] - done[0][0], 1e-3)

    wait_until(lambda: len(committed()) >= 3, first := start())
    first.send_signal(signal.SIGKILL)
    first.wait()
    alone = committed()
    # the cache is named, since vLLM measures what is free while the other worker takes memory
    share = day.pick({"gpu_memory_utilization": 0.42, "kv_cache_space_gib": 16.0}, {"kv_cache_space_gib": 0.125})
    workers = [start(*(f"--set=engine.args.{key}={value}" for key, value in share.items())) for _ in range(2)]
    codes = [worker.wait() for worker in workers]
    files = [path for kind in ("labels", "quarantine") for path in (output / kind).rglob("*.parquet")]
    rows = sorted(row for path in files for row in pq.read_table(path, columns=["row_id"])["row_id"].to_pylist())
    is_whole = rows == list(range(queries * 8)) and 0 in codes and (output / "manifest.json").is_file()
    day.emit(
        "rows, each once, after kill -9 and a resume by two workers", len(rows) if is_whole else 0, "rows",
        baseline=queries * 8, least_ratio=1.0, exit_codes=codes, before_the_kill=sum(rows for _, rows in alone),
    )  # fmt: skip
    day.emit("two workers on one card, against one", rate(committed()[len(alone) :]), "pairs/s", baseline=rate(alone))


def wait_until(is_reached: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Check until it is, or the process ends."""
    while process.poll() is None and not is_reached():
        time.sleep(0.02)
    assert process.poll() is None, f"ended with {process.returncode} before it could be killed"


def transformers(day: Day) -> None:
    """The transformers engine against `model.generate`."""
    max_new = day.pick(64, 8)
    pairs = made_up_pairs(day.pick(16, 2), 8, doc_words=day.pick(350, 20))
    sums = transformers_vs_generate.compare(
        day.model("qwen-1.5b"), [transformers_vs_generate.ask_of(pair.query, pair.document, max_new) for pair in pairs],
        rounds=2, batch_size=day.pick(32, 8), max_new=max_new, device=day.device, dtype=day.pick("bfloat16", "float32"),
    )  # fmt: skip
    rates = {side: tokens / wall for side, (tokens, wall, _) in sums.items()}
    for side in list(rates)[1:]:
        day.emit(f"transformers, {side}", rates[side], "tokens/s", baseline=rates["generate"], least_ratio=1.0)


def grpo(day: Day) -> None:
    """Steps of GRPO, vLLM in the training's process, against TRL's trainer with the same vLLM."""
    from benchmarks import grpo_speed

    folder = day.folder / f"grpo-{os.getpid()}"
    folder.mkdir()
    chosen = _grpo_setting(day, steps=day.pick(4, 3), accumulation=day.pick(4, 1), vllm=_colocated(day))
    grpo_speed.write_setting(folder, chosen)
    what = "a GRPO step of 1.5B, " + ("vLLM colocated" if chosen.vllm else "rollouts by transformers")
    ours = grpo_speed.call("relabel", folder, None)
    day.emit(what, ours["seconds"], "s", answer_tokens=ours["tokens"], cold_s=ours["cold_s"])
    theirs = grpo_speed.call("trl", folder, None)
    most = 1.05 * theirs["seconds"]
    day.emit(f"{what}; baseline: TRL's trainer", ours["seconds"], "s", baseline=theirs["seconds"], most=most)


def _grpo_setting(day: Day, *, steps: int, accumulation: int, vllm: dict[str, Any] | None) -> Namespace:
    """A training by GRPO, as `grpo_speed` takes it."""
    return Namespace(
        model=day.model("qwen-1.5b"), steps=steps, group=8, batch=8, accumulation=accumulation, max_tokens=1024,
        think=day.pick(128, 8), device=day.pick("auto", "cpu"), precision=day.pick("bf16", "fp32"), vllm=vllm,
    )  # fmt: skip


def _colocated(day: Day) -> dict[str, Any] | None:
    """vLLM in the training's process; in a rehearsal transformers takes its place."""
    return day.pick({"gpu_memory_utilization": 0.3}, None)


def grpo_processes(day: Day) -> None:
    """The same steps of GRPO by two processes, each with a vLLM of its own, against one; on a host with two GPUs."""
    if _has_fewer_gpus(day.pick(2, 0)):
        return
    vllm = _colocated(day)
    seconds = {processes: _step_seconds(day, processes, vllm) for processes in (1, 2)}
    day.emit(
        "a GRPO step of 1.5B by two processes; baseline: by one", seconds[2], "s", baseline=seconds[1],
        most=0.65 * seconds[1],
    )  # fmt: skip


def grpo_server(day: Day) -> None:
    """The same with one vLLM server for both processes, on a host with three GPUs. No rehearsal: TRL sends weights to a
    server over NCCL alone.
    """
    if _has_fewer_gpus(3):
        return
    with _vllm_server(day.model("qwen-1.5b"), gpu=2) as url:
        vllm = {"mode": "server", "url": url}
        seconds = {processes: _step_seconds(day, processes, vllm, gpus="0,1") for processes in (1, 2)}
    day.emit(
        "a GRPO step of 1.5B by two processes and a vLLM server; baseline: by one and the server", seconds[2], "s",
        baseline=seconds[1], most=0.8 * seconds[1],
    )  # fmt: skip


def _has_fewer_gpus(wanted: int) -> bool:
    import torch

    found = torch.cuda.device_count()
    if found < wanted:
        print(f"this host has {found} of {wanted} GPUs: nothing to do")
    return found < wanted


def _step_seconds(day: Day, processes: int, vllm: dict[str, Any] | None, gpus: str | None = None) -> float:
    """Seconds of a step of the same GRPO training by so many processes.

    Args:
        gpus: that they may use; None for all.
    """
    from benchmarks import grpo_speed

    folder = day.folder / f"grpo-{os.getpid()}-by-{processes}"
    folder.mkdir()
    accumulation = day.pick(8, 2) // processes
    chosen = _grpo_setting(day, steps=day.pick(4, 2), accumulation=accumulation, vllm=vllm)
    prompts = chosen.steps * chosen.batch * accumulation * processes // chosen.group
    grpo_speed.write_setting(folder, chosen, num_rows=prompts)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "relabel"]
    environment = os.environ if gpus is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
    subprocess.run([sys.executable, *launch, "train", str(folder / "spec.json")], cwd=ROOT, env=environment, check=True)
    facts = json.loads((folder / "out" / "manifest.json").read_text())["training"]
    return float(chosen.batch * accumulation / facts["rows_per_s"])


SERVER_PORT = 8321
SERVER_START_S = 240.0


@contextmanager
def _vllm_server(model: Path, *, gpu: int) -> Iterator[str]:
    """vLLM's server as docs/train.md starts it; its address."""
    url = f"http://127.0.0.1:{SERVER_PORT}"
    words = [
        "vllm", "serve", str(model), "--port", str(SERVER_PORT), "--weight-transfer-config", '{"backend": "nccl"}',
        "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1",
    ]  # fmt: skip
    own = {"CUDA_VISIBLE_DEVICES": str(gpu), "VLLM_SERVER_DEV_MODE": "1"}
    process = subprocess.Popen(words, env={**os.environ, **own})
    try:
        ends = time.monotonic() + SERVER_START_S
        while not _answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError("vLLM's server did not start")
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def fp8(day: Day) -> None:
    """What fp8 changes: grades and speed of `direct`. A rehearsal takes float32 in its place."""
    model, labeler = day.model("qwen-7b"), labeler_class("direct")(labeler_options("direct", 8))
    count, found, rates = day.pick(1024, 32), {}, {}
    for side, args in {"bf16": {}, "fp8": day.pick({"quantization": "fp8"}, {"dtype": "float32"})}.items():
        with engine_of(day, "vllm", model, **vllm_args(day, **args)) as engine:
            answers(engine, labeler, 32, 30)  # warm-up
            started = time.perf_counter()
            found[side] = answers(engine, labeler, count, day.pick(350, 30))
            rates[side] = count / (time.perf_counter() - started)
    flips = sum(a.argmax != b.argmax for a, b in zip(found["fp8"], found["bf16"], strict=True)) / count
    day.emit("fp8 against bf16, 7B direct", rates["fp8"], "pairs/s", baseline=rates["bf16"], least_ratio=FP8_SPEED)
    day.emit("grades that fp8 changes", flips, "share", max_dp=furthest(found["fp8"], found["bf16"]))


def gpu_tests(day: Day) -> None:
    """The tests marked `gpu`, counted."""
    line = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-v", "-p", "no:cacheprovider"]
    done = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    wanted = sum(counts.values())
    day.emit("tests marked gpu that pass", counts.get("passed", 0), "tests", baseline=wanted, least_ratio=1.0, **counts)
