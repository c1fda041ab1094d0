"""YAML as specs and `--set` values are written in: the core schema of YAML 1.2, within bounds, and nothing that could
surprise.

PyYAML reads YAML 1.1, in which `no` is false, `010` is 8 and `1:30` is 90. Here a plain word is true, false, null, a
number or a text, as YAML 1.2 has it. A word on which the two versions differ is kept as a `DisputedText`: the type of
the key that it is given to decides (`columns: {query: no}` is a text, `calibrate: no` is false, `shards: 010` is ten),
and a key that takes anything refuses it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from relabel.jobs.planning.spec_loader import SpecLoader
from relabel.manifests.errors import ConfigError, RelabelError
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import is_url
from relabel.manifests.storage.url_files import read_url

MAX_BYTES = 1 << 20
"""Of a spec file; a larger one is some other file, given by mistake."""


def read_spec_file(path: str, *, beginning: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """The mapping in a spec file.

    Args:
        path: local or a URL.
        beginning: where to get one to start from, for errors.
        keys: that belong there, for errors.
    Raises:
        ConfigError: there is none, it is too large, no UTF-8, no YAML or no mapping; says where, and what belongs
            there.
    """
    try:
        data = read_url(path, Storage()) if is_url(path) else _read_file(path)
        text = data.decode()
    except FileNotFoundError as exc:
        raise ConfigError(f"{path}: no such file. {beginning}.") from exc
    except IsADirectoryError as exc:
        raise ConfigError(
            f"{path}: can't be read: a folder, and a file is wanted. For an output, give its job file."
        ) from exc
    except RelabelError:
        raise
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: can't be read: byte {exc.start} is not UTF-8. Save the file as UTF-8.") from exc
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: can't be read ({exc}).") from exc
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_BYTES >> 20} MiB, so it is not a spec. {beginning}.")
    try:
        values = parse_yaml(text)
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}{_place(exc, text)}: not YAML: {yaml_fault(exc)}.") from exc
    if values is None:
        raise ConfigError(f"{path}: is empty. {beginning}.")
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: want a mapping with the keys {', '.join(keys)}; got {type(values).__name__}.")
    return values


def parse_yaml(text: str) -> Any:
    """The one value in a text.

    Raises:
        yaml.YAMLError: it is no YAML, or one that is refused here; `yaml_fault` says what about it.
    """
    try:
        return yaml.load(text, Loader=SpecLoader)
    except RecursionError as exc:
        raise yaml.YAMLError("it is nested too deeply") from exc


def yaml_fault(error: yaml.YAMLError) -> str:
    """What is off, on one line, without the place."""
    if isinstance(error, yaml.reader.ReaderError):
        return f"the character U+{int(error.character):04X} is not one that YAML allows ({error.reason})"
    said = filter(None, (getattr(error, "context", None), getattr(error, "problem", None)))
    return (", ".join(said) or str(error)).replace("\n", " ")


def _place(error: yaml.YAMLError, text: str) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        return f", line {before.count(chr(10)) + 1}, column {error.position - before.rfind(chr(10))}"
    mark = getattr(error, "problem_mark", None)
    return f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _read_file(path: str) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(MAX_BYTES + 1)
