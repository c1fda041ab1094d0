"""Names of files in a bundle: relative, plain, and the same file on every system that may unpack them.

A manifest comes from a store that others can write to. A name that climbs out of its folder, means a device on Windows,
or falls together with another on a disk that folds case or Unicode is refused before anything is made.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from relabel.manifests.errors import ManifestError

MAX_FILES = 10_000
MAX_NAME_BYTES = 512
MAX_STEP_BYTES = 200
MAX_DEPTH = 16
_WINDOWS_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in "0123456789¹²³")}
_FORBIDDEN_CHARACTERS = set('\\:*?"<>|')
_FORBIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Control, format (which can turn a name's reading direction), surrogate, private, unassigned, line and paragraph
separators.
"""


def check_names(names: Sequence[str], where: str) -> None:
    """Refuse names that could write outside their folder, or over one another.

    Args:
        names: relative, steps parted by `/`.
        where: whose names these are, for the message.
    Raises:
        ManifestError: names the first that is off, and how.
    """
    if len(names) > MAX_FILES:
        raise ManifestError(f"{where}: lists {len(names):,} files; more than {MAX_FILES:,} are refused.")
    files: set[str] = set()
    folders: dict[str, str] = {}
    for name in names:
        if fault := _fault(name):
            raise ManifestError(f"{where}: refuses the file name {name!r}: {fault}.")
        key = _folded(name)
        if key in files:
            raise ManifestError(
                f"{where}: refuses the file name {name!r}: another file has that name, or one that differs in case "
                "alone."
            )
        files.add(key)
        steps = name.split("/")
        for depth in range(1, len(steps)):
            folder = "/".join(steps[:depth])
            if folders.setdefault(_folded(folder), folder) != folder:
                raise ManifestError(f"{where}: refuses the file name {name!r}: its folder is spelled in two ways.")
    if both := files & folders.keys():
        raise ManifestError(
            f"{where}: refuses the file name {folders[min(both)]!r}: it is a file and a folder at once."
        )


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def _fault(name: object) -> str | None:
    """What is off with one name; None if nothing is."""
    if not isinstance(name, str) or not name:
        return "it is not text"
    if any(unicodedata.category(letter) in _FORBIDDEN_CATEGORIES for letter in name):
        return "it holds a control or invisible character"
    if bad := _FORBIDDEN_CHARACTERS & set(name):
        return f"it holds {min(bad)!r}, which is a path or a drive on some systems"
    if unicodedata.normalize("NFC", name) != name:
        return "it is not in Unicode's composed form (NFC)"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"it is longer than {MAX_NAME_BYTES} bytes"
    steps = name.split("/")
    if len(steps) > MAX_DEPTH:
        return f"it is deeper than {MAX_DEPTH} folders"
    return next((fault for step in steps if (fault := _step_fault(step))), None)


def _step_fault(step: str) -> str | None:
    if step in ("", ".", ".."):
        return "it is absolute or leaves its folder"
    if step[-1] in " ." or step[0] == " ":
        return "a step of it begins or ends in a blank, or ends in a dot"
    if step.partition(".")[0].casefold() in _WINDOWS_DEVICES:
        return "a step of it is a device on some systems"
    if len(step.encode()) > MAX_STEP_BYTES:
        return f"a step of it is longer than {MAX_STEP_BYTES} bytes"
    return None
