"""A student exported with one logit, served by vLLM: the student's expected grade comes out."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from relabel.distill.students.model import grade_token_ids, load_student, render_prompt, write_student
from relabel.distill.students.networks import DecoderStudent, EncoderStudent
from relabel.distill.students.spec import STUDENT_VERSION, StudentRecord
from relabel.export.huggingface import write_model
from relabel.manifests.phi import DEFAULT_PHI
from tests.distill.conftest import tiny_encoder, word_tokenizer
from tests.engines.conftest import CHATML, make_tokenizer

DOCUMENTS = ["a red shoe", "blue trousers of wool", "red", "a red shoe of the size 9 " * 20, "🙂 <s> [SEP]"]
START_S = 240.0
RECORD = StudentRecord(
    version=STUDENT_VERSION, kind="encoder", name="tiny", heads={"relevance": 3}, max_tokens=64, columns={},
    temperature={"relevance": 1.3}, phi=DEFAULT_PHI, packs=False,
)  # fmt: skip


def encoder() -> tuple[StudentRecord, Any, Any]:
    """Its table of positions is longer than what it reads."""
    tokenizer = word_tokenizer(has_types=True)
    module = EncoderStudent(tiny_encoder("bert", len(tokenizer), 384), {"relevance": 3}, pooling="cls").eval()
    for weight in module.backbone.parameters():
        if weight.dim() > 1:
            weight.data.mul_(10)
    module.heads["relevance"].weight.data.mul_(3)
    return replace(RECORD, pooling="cls", max_tokens=40), module, tokenizer


def decoder() -> tuple[StudentRecord, Any, Any]:
    tokenizer = make_tokenizer(template=CHATML)
    user = "Query: {query}\nDocument: {document}\nGrade:"
    prompt = render_prompt(tokenizer, style="chat", system="", user=user, ending="")
    ids = grade_token_ids(tokenizer, 2, after=prompt[2])
    record = replace(
        RECORD, kind="decoder", heads={"relevance": 2}, max_tokens=180, prompt=prompt, grade_ids=ids, packs=True
    )
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    return record, DecoderStudent(Qwen2ForCausalLM(config).eval(), ids), tokenizer


@pytest.mark.parametrize("make", [encoder, decoder])
def test_vllm_serves_the_expected_grade(tmp_path: Path, make: Callable[[], tuple[StudentRecord, Any, Any]]) -> None:
    record, module, tokenizer = make()
    write_student(tmp_path / "student", record, module, tokenizer)
    student, served = load_student(tmp_path / "student"), tmp_path / "rerank"
    served.mkdir()
    assert write_model(student, "rerank", served, print) == "transformers"
    probs = student.probabilities([("red shoe", text) for text in DOCUMENTS])["relevance"]
    want = probs @ np.linspace(0, 1, record.grades)
    assert want.std() > 0.01
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(served), "--runner", "pooling"]
    line += ["--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1", "--port", address.rpartition(":")[2]]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    log = (tmp_path / "log").open("wb")
    server = subprocess.Popen(line, env={**os.environ, **settings, "HF_HUB_OFFLINE": "1"}, stdout=log, stderr=log)
    try:
        found = None
        until = time.monotonic() + START_S
        while found is None:
            is_over = server.poll() is not None or time.monotonic() > until
            assert not is_over, (tmp_path / "log").read_text()[-2000:]
            try:
                found = asked(address, served)
            except OSError:
                time.sleep(1)
    finally:
        server.terminate()
        server.wait(60)
        log.close()
    assert np.allclose(found, want, atol=1e-4), (found, want.tolist())


def asked(address: str, model: Path) -> list[float]:
    body = {"model": str(model), "text_1": "red shoe", "text_2": DOCUMENTS, "truncate_prompt_tokens": -1}
    request = urllib.request.Request(
        f"http://{address}/score", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return [one["score"] for one in json.load(reply)["data"]]
