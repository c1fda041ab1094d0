"""The real vLLM engine on tiny random models, on its CPU build. Skipped where vLLM is not installed: `make test-vllm`
brings it.
"""

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relabel.manifests.specs import EngineSpec
from tests.engines.conftest import finished as finished
from tests.engines.conftest import make_tokenizer

HERE = Path(__file__).parent
KV_CACHE_GIB = 0.125
NEED_NO_VLLM = ("test_vllm_args.py",)
IS_HERE = importlib.util.find_spec("vllm") is not None

# Before torch is imported: on cores that others use too, two bound threads wait for each other up to twenty times as
# long.
if IS_HERE:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.vllm)
        item.add_marker(pytest.mark.filterwarnings("ignore"))  # vLLM's own, and those of what it imports
        if not IS_HERE and item.path.name not in NEED_NO_VLLM:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: `make test-vllm`"))


def save_model(folder: Path, *, merged: bool = False, width: int = 5) -> Path:
    """A random Qwen2 with heads of 32, the smallest that vLLM's CPU attention takes, with its tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer(merged=merged)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=len(tokenizer) + width,  # wider than the tokenizer, as real ones are
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        initializer_range=0.25,
        eos_token_id=None,
    )
    Qwen2ForCausalLM(config).eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[bool, Path] = {}

    def make(*, merged: bool = False) -> Path:
        if merged not in made:
            made[merged] = save_model(tmp_path_factory.mktemp(f"qwen2-{merged}"), merged=merged)
        return made[merged]

    return make


class _Running:
    """One engine at a time, kept for as long as tests ask for the same one: a start takes seconds."""

    def __init__(self) -> None:
        self.key: Any = None
        self.engine: Any = None

    def get(self, key: Any, start: Callable[[], Any]) -> Any:
        if key != self.key or self.engine is None or self.engine._loop is None:
            self.close()
            self.engine, self.key = start(), key
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine, self.key = None, None


@pytest.fixture(scope="session")
def running() -> Iterator[_Running]:
    """The engine that runs.

    vLLM collects garbage five times a start and end, most of their time with all that is imported here. So that is
    frozen once, and vLLM's own freezing, whose end would thaw it, does nothing.
    """
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_model_runner  # noqa: F401

    kept = _Running()
    with pytest.MonkeyPatch.context() as patch:
        gc.collect()
        gc.freeze()
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield kept
        kept.close()
    gc.unfreeze()


@pytest.fixture
def start(
    model_dir: Callable[..., Path], running: _Running, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    from relabel.labelers.engines.vllm import Vllm

    def make(
        *,
        merged: bool = False,
        overlong: str = "truncate",
        max_prompt_tokens: int = 2048,
        fresh: bool = False,
        chat_template: str | None = None,
        **args: Any,
    ) -> Any:
        cache = tmp_path_factory.getbasetemp() / "relabel-cache"
        given: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_space_gib": KV_CACHE_GIB}
        options = Vllm.Args(cache_dir=str(cache), **(given | args))
        spec = EngineSpec(
            name="vllm",
            model=str(model_dir(merged=merged)),
            max_prompt_tokens=max_prompt_tokens,
            args=options,
            chat_template_kwargs={} if chat_template is None else {"chat_template": chat_template},
        )
        if fresh:
            running.close()
        return running.get((overlong, spec.model_dump_json()), lambda: Vllm(spec, overlong=overlong))  # type: ignore[arg-type]

    return make
