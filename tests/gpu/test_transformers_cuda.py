"""The transformers engine on a GPU: the distributions of the same tiny random model on a CPU, within what the dtype
allows.
"""

from pathlib import Path
from typing import Any

import pytest

from relabel.manifests.asks import Answer, Decision, Request
from relabel.manifests.specs import EngineSpec
from tests.engines.conftest import ask_for, make_model, make_tokenizer, run_all

pytestmark = pytest.mark.gpu(1)

SCORE = Decision("score", "<score>", ("0", "1", "2"))
DOCUMENTS = ["red shoes " * (1 + number % 9) + str(number) for number in range(64)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(made)
    make_model("qwen2", len(tokenizer) + 5).save_pretrained(made)
    return made


def answers_on(folder: Path, device: str, dtype: str, **ask: Any) -> list[Answer]:
    from relabel.labelers.engines.transformers import Transformers

    args = Transformers.Args(device=device, dtype=dtype, batch_size=16, cache_dir=str(folder.parent / "cache"))
    engine = Transformers(EngineSpec(name="transformers", model=str(folder), args=args))
    try:
        return run_all(
            engine,
            [
                Request(number, ask_for("shoes", text, decisions=(SCORE,), **ask), seed=number)
                for number, text in enumerate(DOCUMENTS)
            ],
        )
    finally:
        engine.close()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 3e-2)])
def test_distributions_on_a_gpu_are_those_of_the_cpu(folder: Path, dtype: str, tolerance: float) -> None:
    """bfloat16 keeps 8 bits of each activation: 3e-2 on a probability is what a model of two
    layers loses, not a fault.
    """
    alone = {"max_tokens": 0, "format": None, "prefill": "<score>"}
    for ours, reference in zip(
        answers_on(folder, "cuda", dtype, **alone), answers_on(folder, "cpu", "float32", **alone), strict=True
    ):
        found, wanted = ours.distributions["score"], reference.distributions["score"]
        assert found.probs == pytest.approx(wanted.probs, abs=tolerance)
        assert found.outside_mass == pytest.approx(wanted.outside_mass, abs=tolerance)


def test_constrained_answers_on_a_gpu_are_whole(folder: Path) -> None:
    for answer in answers_on(folder, "cuda", "bfloat16"):
        assert answer.finish == "stop"
        assert answer.text.endswith("</score>")
        assert "score" in answer.distributions
