"""Forms of a model that a bundle may hold beside its ONNX files, by name. One line each; third parties use the entry
point group.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from relabel.export.bundles import Bundle
from relabel.manifests.registered import Registry

FORMATS = {"tensorrt": "relabel.export.tensorrt_engines:ENGINES"}
ONNX = "onnx"
"""What every bundle holds: other forms are made of it, and the loader falls back to it."""
_REGISTRY = Registry("format", "relabel.bundle_formats", FORMATS, built_in=(ONNX,))


class BundleFormat(Protocol):
    """A form, made of the fp32 ONNX model of a sealed bundle."""

    precisions: tuple[str, ...]
    """Those that it knows; an export writes each of them that it is asked for."""

    def check(self) -> None:
        """Look whether it can be made here, before anything else is.

        Raises:
            MissingExtraError: a package or a device is absent.
        """
        ...

    def add(self, bundle: Path, precision: str) -> Bundle:
        """Put its files into a bundle, which is sealed anew in one step."""
        ...


def load_format(name: str) -> BundleFormat:
    """The form of a name.

    Raises:
        ConfigError: no such form; names the nearest.
    """
    found: BundleFormat = _REGISTRY.load(name)
    return found
