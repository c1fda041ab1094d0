"""What a spec's relative paths count from: in the file, the folder of the file; beside it (`--set`, `RELABEL_*`), the
working directory.

Which keys are paths, the models say themselves (`PathText`, `PatternText`, `ModelText` in `manifests/specs.py`). What
is written down of a spec holds absolute paths, so that it means the same elsewhere.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

from pydantic.fields import FieldInfo

from relabel.manifests.errors import ConfigError
from relabel.manifests.specs import PathMark, Spec
from relabel.manifests.storage.filesystems import is_url

AnySpec = TypeVar("AnySpec", bound=Spec)

Change = Callable[[str, PathMark, tuple[str, ...]], str]
_SCHEME = re.compile(r"[a-z][a-z0-9+]+:")
_DEVICES = ("/dev/fd/", "/dev/std", "/proc/")
"""Where a shell finds `/dev/stdin` and `<(…)`: such a spec has no folder of its own."""


class Places(NamedTuple):
    """What relative paths of a spec count from.

    Args:
        where: the spec file, for errors.
        folder: what those in the file count from, absolute; None where the file lies at a URL.
        here: what those from outside the file count from, absolute.
        outside: keys that a variable or flag has set.
    """

    where: str
    folder: str | None
    here: str
    outside: frozenset[tuple[str, ...]] = frozenset()

    def base_of(self, key: tuple[str, ...]) -> str | None:
        """The folder that a key's path counts from."""
        is_from_outside = any(key[: len(one)] == one for one in self.outside)
        return self.here if is_from_outside else self.folder


def places_of(
    spec_file: str, *, environment: Mapping[str, str], outside: frozenset[tuple[str, ...]] = frozenset()
) -> Places:
    """What the paths in a spec file count from: its folder as the call names it, whatever links lie there."""
    here = working_directory(environment)
    if is_url(spec_file):
        return Places(spec_file, None, here, outside)
    is_device = spec_file.startswith(_DEVICES)
    return Places(spec_file, here if is_device else str(Path(placed(spec_file, here)).parent), here, outside)


def working_directory(environment: Mapping[str, str]) -> str:
    """The working directory by the name under which the shell went there, which a deployment's `current` keeps from day
    to day.

    Raises:
        ConfigError: there is none any more.
    """
    try:
        physical, named = Path.cwd(), Path(environment.get("PWD", ""))
    except FileNotFoundError as exc:
        raise ConfigError("the working directory is gone (removed, or remounted). Change to one that exists.") from exc
    with contextlib.suppress(OSError):
        if named.is_absolute() and named.samefile(physical):
            return os.path.normpath(named)
    return str(physical)


def resolved(spec: AnySpec, places: Places) -> AnySpec:
    """A spec whose paths all lead where they should from the working directory: relative below it, absolute elsewhere.

    Raises:
        ConfigError: a relative path in a file at a URL, or the home of a user that there is not.
    """
    return _mapped(spec, lambda text, mark, key: path_of(text, mark, places, key), ())


def absolute(spec: AnySpec) -> AnySpec:
    """A resolved spec whose paths are all absolute: for what is written down, or read by a process with another working
    directory.
    """
    here = str(Path.cwd())
    return _mapped(spec, lambda text, mark, _: placed(text, here, mark), ())


def _mapped(spec: AnySpec, change: Change, at: tuple[str, ...]) -> AnySpec:
    def mapped(value: Any, mark: PathMark | None, key: tuple[str, ...]) -> Any:
        if isinstance(value, Spec):
            return _mapped(value, change, key)
        if isinstance(value, tuple):
            return tuple(mapped(one, mark, key) for one in value)
        return change(value, mark, key) if mark is not None and isinstance(value, str) else value

    changes = {}
    for name, info in type(spec).model_fields.items():
        value = getattr(spec, name)
        found = mapped(value, mark_of(info), (*at, name))
        if found != value:
            changes[name] = found
    return spec.model_copy(update=changes) if changes else spec


def path_of(text: str, mark: PathMark, places: Places, key: tuple[str, ...]) -> str:
    """One path of a spec; see `resolved`."""
    try:
        path = placed(text, places.base_of(key), mark)
    except ValueError as exc:
        raise ConfigError(f"{places.where}: `{'.'.join(key)}` = {text}: {exc}") from exc
    if path == text or text.startswith("~"):
        return path
    here = glob.escape(places.here) if mark is PathMark.PATTERN and glob.has_magic(text) else places.here
    below = path.removeprefix(f"{here}/")
    # what would be read as a home or a scheme stays as it is
    return path if not below or below.startswith(("/", "~")) or ":" in below else below


def placed(text: str, folder: str | None, mark: PathMark = PathMark.PATH) -> str:
    """The absolute path, URL or model reference that a text means.

    `..` takes away a step as it is written, as `cd` and `make` have it; a folder's name is never a pattern.

    Args:
        folder: what a relative path counts from, absolute; None if it counts from nowhere.
    Raises:
        ValueError: a relative path that counts from nowhere, or the home of a user that there is not.
    """
    if not text or is_url(text) or (mark is PathMark.MODEL and _SCHEME.match(text)):
        return text
    if text.startswith("~"):
        try:
            return str(Path(text).expanduser())
        except RuntimeError as exc:
            raise ValueError(
                f"there is no home folder of {text.partition('/')[0]}; write ./{text} if the name begins with `~`"
            ) from exc
    if Path(text).is_absolute():
        return text
    if folder is None:
        raise ValueError(
            "a relative path in a spec that is read from a URL counts from nowhere; write a whole path or URL"
        )
    is_pattern = mark is PathMark.PATTERN and glob.has_magic(text)
    return os.path.normpath(Path(glob.escape(folder) if is_pattern else folder, text))


def mark_of(info: FieldInfo) -> PathMark | None:
    """What kind of path a field holds, alone or in a list; None if none."""

    def found(part: Any) -> PathMark | None:
        marks = [one for one in getattr(part, "__metadata__", ()) if isinstance(one, PathMark)]
        return next(iter(marks), None) or next(filter(None, map(found, get_args(part))), None)

    return next((one for one in info.metadata if isinstance(one, PathMark)), None) or found(info.annotation)
