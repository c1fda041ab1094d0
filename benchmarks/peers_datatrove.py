"""datatrove's side of `peers.py`, which calls it in the peers' environment: `InferenceRunner` over `vllm serve`, as its
README has it.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
from datatrove.pipeline.writers import JsonlWriter


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    prompts = [json.loads(line) for line in Path(job["prompts"]).read_text().splitlines()]
    documents = [Document(text="", id=prompt["id"], metadata={"messages": prompt["messages"]}) for prompt in prompts]

    gate, ready_s = asyncio.Lock(), []

    async def judge(document: Document, generate: Any) -> dict[str, Any]:
        messages = document.metadata["messages"]
        async with gate:  # one token from one rollout while the others wait: from then on the server is up
            if not ready_s:
                await generate(
                    {"messages": [{"role": "user", "content": "Ready?"}], "max_tokens": 1, "temperature": 0.0}
                )
                ready_s.append(time.perf_counter())
        result = await generate(
            {
                "messages": messages,
                "max_tokens": job["max_tokens"],
                "temperature": 0.0,
                "stop": [job["stop"]],
                "include_stop_str_in_output": True,
            }
        )
        return {
            "text": result.text,
            "output_tokens": result.usage["completion_tokens"],
            "seconds": time.perf_counter() - ready_s[0],
        }

    options: dict[str, Any] = {"max-num-seqs": job["max_num_seqs"], "dtype": "bfloat16"}
    if job["device"] == "cpu":
        options |= {"enforce-eager": True, "block-size": 32}
    config = InferenceConfig(
        server_type="vllm",
        model_name_or_path=job["model"],
        model_max_context=job["max_model_len"],
        model_kwargs=options,
        max_concurrent_generations=500,  # its default
        server_ready_delay_sec=1.0,
        metric_interval=3600,
    )
    writer = JsonlWriter(f"{job['output']}/answers", output_filename="${rank}.jsonl", compression=None)
    runner = InferenceRunner(rollout_fn=judge, config=config, output_writer=writer)
    executor = LocalPipelineExecutor(pipeline=[documents, runner], logging_dir=f"{job['output']}/logs", tasks=1)
    executor.run()
    rows = [json.loads(line) for line in Path(job["output"], "answers", "00000.jsonl").read_text().splitlines()]
    answers = [row["metadata"]["rollout_results"][0] for row in rows]
    print(
        json.dumps(
            {
                "pairs": len(rows),
                "seconds": max(answer["seconds"] for answer in answers),
                "output_tokens": sum(answer["output_tokens"] for answer in answers),
                "said": f"{sum(job['stop'] in answer['text'] for answer in answers)} answers with a score",
            }
        )
    )


if __name__ == "__main__":
    main()
