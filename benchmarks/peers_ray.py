"""Ray Data's side of `peers.py`, which calls it in the peers' environment: `vLLMEngineProcessorConfig` and
`build_processor`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    prompts = [json.loads(line) for line in Path(job["prompts"]).read_text().splitlines()]
    is_cpu = job["device"] == "cpu"
    # its stages are actors; on two cores they would wait for slots
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    options: dict[str, Any] = {
        "max_model_len": job["max_model_len"],
        "max_num_seqs": job["max_num_seqs"],
        "dtype": "bfloat16",
    }
    placement: dict[str, Any] = {}
    if is_cpu:
        options |= {"enforce_eager": True, "block_size": 32, "distributed_executor_backend": "mp"}
        placement = {"placement_group_config": {"bundles": [{"CPU": 1}]}}
    config = vLLMEngineProcessorConfig(
        model_source=job["model"], concurrency=1, batch_size=32, engine_kwargs=options, **placement
    )
    sampling = {
        "max_tokens": job["max_tokens"],
        "temperature": 0.0,
        "stop": [job["stop"]],
        "include_stop_str_in_output": True,
    }
    processor = build_processor(
        config,
        preprocess=lambda row: {"messages": row["messages"], "sampling_params": sampling},
        postprocess=lambda row: {
            "id": row["id"],
            "text": row["generated_text"],
            "output_tokens": row["num_generated_tokens"],
            "queued_s": row["metrics"]["queued_ts"],
            "done_s": row["metrics"]["last_token_ts"],
        },
    )
    answers = processor(ray.data.from_items(prompts)).take_all()
    Path(job["output"]).mkdir(parents=True, exist_ok=True)
    Path(job["output"], "answers.jsonl").write_text(
        "".join(json.dumps(answer, default=str) + "\n" for answer in answers)
    )
    print(
        json.dumps(
            {
                "pairs": len({answer["id"] for answer in answers}),
                "seconds": max(answer["done_s"] for answer in answers) - min(answer["queued_s"] for answer in answers),
                "output_tokens": sum(int(answer["output_tokens"]) for answer in answers),
                "said": f"{sum(job['stop'] in answer['text'] for answer in answers)} answers with a score",
            }
        )
    )
    ray.shutdown()


if __name__ == "__main__":
    main()
