"""What a training takes is what the page's arithmetic says."""

import ctypes
import gc
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

from relabel.distill.teachers import teaching
from relabel.distill.teachers.spec import read_teacher_spec
from relabel.manifests.files import Storage
from tests.engines.conftest import make_tokenizer
from tests.teachers.conftest import plain_values

ROOT = Path(__file__).parents[2]
LAYERS, WIDTH = 6, 768
MARGIN_MB = 80
"""For a layer's activations, and what libraries load when they are first used."""


def write_decoder(folder: Path) -> int:
    """A causal language model of some ten million parameters; how many."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=len(tokenizer) + 5,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def resident_mb(what: str) -> float:
    """`RssAnon` is what this process takes now, `VmHWM` the most it took, of which `RssFile` are files in memory."""
    return int(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1e3  # type: ignore[index]


def mapped_mb(folder: Path) -> float:
    """What is in memory of a folder's mapped files, as they are on the disk: weights that nobody wrote to."""
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    own = [one for one in maps if str(folder) in one.partition("\n")[0]]
    sizes = [{name: int(kb) for name, kb in re.findall(r"^(Rss|Anonymous):\s+(\d+)", one, re.MULTILINE)} for one in own]
    return sum(size["Rss"] - size["Anonymous"] for size in sizes) / 1e3


def forget_peak() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


@pytest.fixture
def freed_is_given_back() -> None:
    """What is freed goes back to the system at once: holes that malloc keeps are none of a training's memory."""
    mmap_threshold = -3  # M_MMAP_THRESHOLD in malloc.h
    ctypes.CDLL("libc.so.6").mallopt(mmap_threshold, 1 << 16)


def stated(trained: int, frozen: int, *, has_reference: bool) -> float:
    """MB, by the formula of docs/train.md."""
    return (4 * (trained + frozen) * (2 if has_reference else 1) + 12 * trained) / 1e6


@pytest.mark.full
@pytest.mark.usefixtures("freed_is_given_back")
@pytest.mark.parametrize(("lora", "beta"), [(None, 0.0), (None, 0.05), ({"r": 8}, 0.05)])
def test_the_peak_of_a_training_is_that_of_the_pages_formula(
    lora: dict[str, Any] | None,
    beta: float,
    pairs_path: Path,
    short_templates: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU, with answers so short that weights, gradients and moments are nearly all of it."""
    count = write_decoder(tmp_path / "base")
    counts: list[int] = []
    load = teaching.load_model

    def counting(*given: Any) -> Any:
        forget_peak()
        counts.append(round(resident_mb("RssAnon")))
        model = load(*given)
        counts.append(sum(one.numel() for one in model.parameters() if one.requires_grad))
        return model

    monkeypatch.setattr("relabel.distill.teachers.grpo.load_model", counting)
    peaks: list[float] = []

    def say(line: str) -> None:
        if re.match(r"step [2-9]", line):
            peaks.append(resident_mb("VmHWM") - resident_mb("RssFile") + mapped_mb(tmp_path / "base"))
        forget_peak()  # of what was loaded

    values = plain_values(tmp_path / "base", tmp_path) | {
        "method": "grpo",
        "labeler": {"name": "r1", "grades": 3, "max_think_tokens": 1, "templates": short_templates},
        "data": {"gold": {"path": str(pairs_path)}},
        "rollouts": {"group": 2, "beta": beta},
        "lora": lora,
        "train": {
            "max_steps": 3,
            "batch_size": 2,
            "accumulation": 1,
            "max_tokens": 4000,
            "device": "cpu",
            "gradient_checkpointing": True,  # else activations are as much as the weights of an adapter's model
        },
    }
    teaching.train_teacher(read_teacher_spec(values, where="here"), Storage(), report=say)
    before, trained = counts
    wanted = stated(trained, 0 if lora is None else count, has_reference=beta > 0 and lora is None)
    assert peaks[0] - before == pytest.approx(wanted, rel=0.1, abs=MARGIN_MB), (peaks, before, trained, count)
