"""Optional packages: imported where they are needed, with a sentence that says how to get them when they are not there;
and which are.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterable
from types import ModuleType

from relabel.manifests.errors import MissingExtraError


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import `module`, or say which extra brings it.

    Args:
        module: dotted name to import.
        extra: the extra of this distribution that installs it.
        purpose: who needs it, as the subject of the sentence (`The transformers engine`).
    Raises:
        MissingExtraError: the package is not installed.
        ModuleNotFoundError: the package is installed but one of its own imports is missing; that is its fault to show,
            not ours to hide.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingExtraError(
            f"{purpose} needs the package {module}: run `pip install 'relabel-ir[{extra}]'`."
        ) from exc


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Version by distribution, of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
