"""YAML spec files: a safe YAML 1.2 loader, and reading with line numbers in errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from relabel.manifests.errors import ConfigError, RelabelError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.specs import DisputedText
from relabel.manifests.store import read_url

# ------------------------------------------------------------------------------
# YAML's loader for specs: the core schema of YAML 1.2.


_TAG = "tag:yaml.org,2002:"
_DISPUTED_TAG = "!disputed"
_PLAIN: tuple[tuple[str, str, str], ...] = (  # kind, first letters, form
    ("null", "~nN", r"~|null|Null|NULL|"),
    ("bool", "tTfF", r"true|True|TRUE|false|False|FALSE"),
    ("int", "-+0123456789", r"[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+"),
    (
        "float",
        "-+.0123456789",
        r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    ),
    ("merge", "<", r"<<"),
)
_DISPUTED = (
    r"(?i:yes|no|on|off)"  # truth in YAML 1.1
    r"|[-+]?0[0-9][0-9_.]*(?:[eE][-+]?[0-9]+)?|[-+]?0b[01_]+"  # octal and binary
    r"|[-+]?[0-9][0-9.]*_[0-9_.]*(?:[eE][-+]?[0-9]+)?|[-+]?0x[0-9a-fA-F_]+"  # thousands set off
    r"|[-+]?[0-9][0-9_]*(?::[0-9]{1,2})+(?:\.[0-9_]*)?"  # base 60
)


class SpecLoader(yaml.SafeLoader):
    """Takes the kinds of values that JSON has, and refuses tags of others."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping, or refuse a key that occurs twice or can't be one; here, before `<<` brings keys that may
        be overridden.
        """
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a list or mapping can't be a key", key_node.start_mark
                )
            line = key_node.start_mark.line + 1
            key = key_node.value if key_node.tag == f"{_TAG}merge" else self.construct_object(key_node)
            if key in lines:
                problem = f"the key `{key}` is given twice, in lines {lines[key]} and {line}"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            lines[key] = line
        return node

    def plain_value(self, node: yaml.ScalarNode) -> Any:
        """A null, truth or number of the core schema, by its tag."""
        text = self.construct_scalar(node)
        kind = node.tag.removeprefix(_TAG)
        try:
            if kind == "int":
                return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
            if kind == "float":
                return float(re.sub(r"\.(?=[iInN])", "", text))
        except ValueError as exc:  # a tag on another word, or thousands of digits
            raise yaml.constructor.ConstructorError(
                None, None, f"{text[:40]!r} is not of type {kind}", node.start_mark
            ) from exc
        return None if kind == "null" else text.lower() == "true"

    def disputed(self, node: yaml.ScalarNode) -> DisputedText:
        """A text that might have been meant as something else."""
        return DisputedText(self.construct_scalar(node))


SpecLoader.yaml_implicit_resolvers = {}
SpecLoader.yaml_constructors = {
    **{tag: yaml.SafeLoader.yaml_constructors[tag] for tag in (f"{_TAG}str", f"{_TAG}seq", f"{_TAG}map", None)},
    _DISPUTED_TAG: SpecLoader.disputed,
}
for _kind, _firsts, _form in _PLAIN:
    SpecLoader.add_implicit_resolver(
        f"{_TAG}{_kind}", re.compile(rf"(?:{_form})\Z"), [*_firsts, *([""] if _kind == "null" else [])]
    )
    if _kind != "merge":
        SpecLoader.add_constructor(f"{_TAG}{_kind}", SpecLoader.plain_value)
SpecLoader.add_implicit_resolver(_DISPUTED_TAG, re.compile(rf"(?:{_DISPUTED})\Z"), "yYnNoO-+0123456789")


# ------------------------------------------------------------------------------
# YAML as specs and `--set` values are written in: the core schema of YAML 1.2, within bounds, and nothing that could
# surprise.
#
# PyYAML reads YAML 1.1, in which `no` is false, `010` is 8 and `1:30` is 90. Here a plain word is true, false, null, a
# number or a text, as YAML 1.2 has it. A word on which the two versions differ is kept as a `DisputedText`: the type of
# the key that it is given to decides (`columns: {query: no}` is a text, `calibrate: no` is false, `shards: 010` is
# ten), and a key that takes anything refuses it.


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
        raise ConfigError(f"{path}{_place(exc)}: not YAML: {yaml_fault(exc)}.") from exc
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
    return yaml.load(text, Loader=SpecLoader)


def yaml_fault(error: yaml.YAMLError) -> str:
    """What is off, on one line, without the place."""
    said = filter(None, (getattr(error, "context", None), getattr(error, "problem", None)))
    return (", ".join(said) or str(error)).replace("\n", " ")


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _read_file(path: str) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(MAX_BYTES + 1)
