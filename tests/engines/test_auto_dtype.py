"""`dtype: auto` on a CPU: which precision it selects, and that an output has one precision on whichever machines it
was made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from relabel.jobs.cli import main
from relabel.labelers.engines.checkpoints import is_kept_in_16_bits
from relabel.labelers.engines.transformers import Transformers
from relabel.manifests.asks import Decision, Request
from relabel.manifests.process import free_cores
from relabel.manifests.specs import EngineSpec
from tests.engines.conftest import ask_for, make_model, make_tokenizer, run_all, write_job

FAST, PLAIN = frozenset({"avx2", "avx512_bf16"}), frozenset({"avx2"})


@pytest.fixture(scope="module")
def half_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose checkpoint is bfloat16."""
    folder = tmp_path_factory.mktemp("half")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_model("qwen2", len(tokenizer)).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[frozenset[str]], None]:
    """This machine's CPU has those flags from now on."""
    return lambda flags: monkeypatch.setattr("relabel.labelers.engines.transformers.cpu_flags", lambda: flags)


def run(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        main(["run", *words])
    return end.value.code


def dtypes(output: Path) -> list[str]:
    receipts = sorted((output / "receipts").rglob("*.json"))
    return [json.loads(path.read_text())["engine"]["dtype"] for path in receipts]


@pytest.mark.parametrize(
    ("config", "is_half"),
    [
        ({"dtype": "bfloat16"}, True),
        ({"torch_dtype": "float16"}, True),
        ({"text_config": {"torch_dtype": "bfloat16"}}, True),
        ({"dtype": "float32"}, False),
        ({}, False),
        ([], False),
    ],
)
def test_a_checkpoint_says_in_which_numbers_it_is_kept(tmp_path: Path, config: Any, is_half: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert is_kept_in_16_bits(tmp_path) is is_half


@pytest.mark.parametrize(
    ("flags", "dtype", "found"),
    [
        (FAST, "auto", {"dtype": "bfloat16"}),
        (frozenset({"amx_bf16"}), "auto", {"dtype": "bfloat16"}),
        (PLAIN, "auto", {"dtype": "float32"}),
        (frozenset(), "auto", {"dtype": "float32"}),
        (FAST, "float32", {}),
        (PLAIN, "bfloat16", {}),
    ],
)
def test_auto_on_a_cpu(
    half_dir: Path, model_dir: Callable[..., Path], cpu: Callable[[frozenset[str]], None],
    flags: frozenset[str], dtype: Any, found: dict[str, str],
) -> None:  # fmt: skip
    cpu(flags)
    args = Transformers.Args(device="cpu", dtype=dtype)
    assert Transformers.resolve_auto(EngineSpec(name="transformers", model=str(half_dir), args=args)) == found
    if dtype == "auto":  # a checkpoint in float32 is never rounded
        whole = EngineSpec(name="transformers", model=str(model_dir()), args=args)
        assert Transformers.resolve_auto(whole) == {"dtype": "float32"}


def test_labels_in_bfloat16_are_those_of_the_weights_as_they_are(half_dir: Path) -> None:
    """Against the same weights in float32: what differs is the rounding of activations."""
    ask = ask_for(
        "red shoe",
        "A red running shoe",
        format=None,
        max_tokens=0,
        prefill="<score>",
        decisions=(Decision("score", "<score>", ("0", "1", "2")),),
    )
    found = {}
    for dtype in ("float32", "bfloat16"):
        engine = Transformers(
            EngineSpec(name="transformers", model=str(half_dir), args=Transformers.Args(device="cpu", dtype=dtype))
        )
        (answer,) = run_all(engine, [Request(0, ask, 0)])
        found[engine.facts().dtype] = answer.distributions["score"].probs
        engine.close()
    assert found["bfloat16"] != found["float32"]
    assert found["bfloat16"] == pytest.approx(found["float32"], abs=0.05)


def test_what_the_first_worker_chose_before_its_first_label_the_others_do(
    tmp_path: Path,
    half_dir: Path,
    cpu: Callable[[frozenset[str]], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of two workers that start together, neither has a receipt to look at."""
    path, output = write_job(tmp_path, half_dir), tmp_path / "out"
    cpu(FAST)
    with monkeypatch.context() as broken:
        broken.setattr(Transformers, "submit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        run(path, "--shard", "0/2")
    assert dtypes(output) == []
    cpu(PLAIN)
    capsys.readouterr()
    assert run(path, "--shard", "1/2") == 0
    assert "bfloat16 is emulated" in capsys.readouterr().err
    assert set(dtypes(output)) == {"bfloat16"}


def test_an_output_whose_record_of_it_is_gone_goes_on_as_its_receipts_say(
    tmp_path: Path, half_dir: Path, cpu: Callable[[frozenset[str]], None]
) -> None:
    """The error about a damaged record advises to move it away."""
    path, output = write_job(tmp_path, half_dir), tmp_path / "out"
    cpu(PLAIN)
    assert run(path, "--shard", "0/2") == 0
    (output / "engine.json").unlink()
    cpu(FAST)
    assert run(path, "--shard", "1/2") == 0
    assert set(dtypes(output)) == {"float32"}


@pytest.mark.parametrize("chosen", ["float32", "bfloat16"])
def test_asks_for_an_existing_output_use_its_precision(
    tmp_path: Path,
    half_dir: Path,
    cpu: Callable[[frozenset[str]], None],
    capsys: pytest.CaptureFixture[str],
    chosen: str,
) -> None:
    """`ask` takes what the output was begun with, whatever this machine would choose, and writes nothing where there is
    no output yet."""
    path, out = write_job(tmp_path, half_dir), tmp_path / "out"
    cpu(FAST if chosen == "float32" else PLAIN)
    for is_begun in (False, True):
        if is_begun:
            out.mkdir()
            (out / "engine.json").write_text(json.dumps({"version": 1, "resolved": {"dtype": chosen}}))
        with pytest.raises(SystemExit) as end:
            main(["ask", path, "--row", "0"])
        assert end.value.code == 0
        assert (f"(cpu, {chosen})" in capsys.readouterr().err) == is_begun
        assert out.exists() == is_begun


@pytest.mark.parametrize(("idle", "free"), [((0.9, 0.1, 0.9, 0.2), 2), ((0.0, 0.0, 0.0, 0.1), 1)])
def test_cores_that_others_use_are_not_free(idle: tuple[float, ...], free: int) -> None:
    looks = iter(
        [
            dict.fromkeys(range(4), (50.0, 1000.0)),
            {core: (50 + 25 * part, 1025.0) for core, part in enumerate(idle)},
        ]
    )
    assert free_cores(lambda: next(looks)) == free
