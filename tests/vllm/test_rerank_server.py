"""A student exported with one logit, served by vLLM: the student's expected grade comes out."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np

from relabel.distill.students.manifest import STUDENT_VERSION, StudentRecord
from relabel.distill.students.model import load_student, write_student
from relabel.distill.students.networks import EncoderStudent
from relabel.export.huggingface import write_model
from relabel.manifests.labels import DEFAULT_PHI
from tests.distill.conftest import tiny_encoder, word_tokenizer

DOCUMENTS = ["a red shoe", "blue trousers of wool", "red", "a red shoe of the size 9 " * 20, "🙂 <s> [SEP]"]
START_S = 240.0


def test_vllm_serves_the_expected_grade(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(has_types=True)
    backbone = tiny_encoder("bert", len(tokenizer), 384)
    for weight in backbone.parameters():
        if weight.dim() > 1:
            weight.data.mul_(10)
    module = EncoderStudent(backbone, {"relevance": 3}, pooling="cls").eval()
    module.heads["relevance"].weight.data.mul_(3)
    record = StudentRecord(
        version=STUDENT_VERSION, kind="encoder", name="tiny", heads={"relevance": 3}, max_tokens=64, columns={},
        temperature={"relevance": 1.3}, phi=DEFAULT_PHI, packs=False, pooling="cls",
    )  # fmt: skip
    write_student(tmp_path / "student", record, module, tokenizer)
    student, served = load_student(tmp_path / "student"), tmp_path / "rerank"
    served.mkdir()
    assert write_model(student, "rerank", served, print) == "transformers"
    want = student.probabilities([("red shoe", text) for text in DOCUMENTS])["relevance"] @ [0, 0.5, 1]
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
