"""YAML spec files: a safe YAML 1.2 loader with limits, reading with line numbers in errors, and edits that keep
comments."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from relabel.manifests.errors import ConfigError, RelabelError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.specs import DisputedText
from relabel.manifests.store import read_url

# ------------------------------------------------------------------------------
# YAML's loader for specs: the core schema of YAML 1.2, with a bound on aliases; why, `spec_yaml.py` says.


MAX_ALIASED = 10_000
"""Values that a text's aliases may represent in all: a few lines of aliases of aliases represent billions."""
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
_DISPUTED = re.compile(
    r"(?i:yes|no|on|off)"  # truth in YAML 1.1
    r"|[-+]?0[0-9][0-9_.]*(?:[eE][-+]?[0-9]+)?|[-+]?0b[01_]+"  # octal and binary
    r"|[-+]?[0-9][0-9.]*_[0-9_.]*(?:[eE][-+]?[0-9]+)?|[-+]?0x[0-9a-fA-F_]+"  # thousands set off
    r"|[-+]?[0-9][0-9_]*(?::[0-9]{1,2})+(?:\.[0-9_]*)?"  # base 60
)


class SpecLoader(yaml.SafeLoader):
    """Takes the kinds of values that JSON has, and refuses tags of others."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._num_values = 0
        self._num_aliased = 0
        self._sizes: dict[yaml.Node, int] = {}  # of what has an anchor
        self._open_anchors: set[str] = set()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
        """Compose a value, counting what aliases represent before anything is built of it."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            mark: Any = event.start_mark
            if event.anchor in self._open_anchors:
                problem = f"the alias *{event.anchor} is used inside its own value"
                raise yaml.composer.ComposerError(None, None, problem, mark)
            node: Any = super().compose_node(parent, index)
            self._num_aliased += self._sizes[node]
            self._num_values += self._sizes[node]
            if self._num_aliased > MAX_ALIASED:
                problem = f"the aliases up to *{event.anchor} expand to more than {MAX_ALIASED:,} values"
                raise yaml.composer.ComposerError(None, None, problem, mark)
            return node
        before, anchor = self._num_values, event.anchor
        self._num_values += 1
        if anchor is None:
            return super().compose_node(parent, index)
        self._open_anchors.add(anchor)
        node = super().compose_node(parent, index)
        self._open_anchors.discard(anchor)
        self._sizes[node] = self._num_values - before
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """Compose a word, noting whether it is plain and untagged, and yet might be read in two ways."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        node = super().compose_scalar_node(anchor)
        if event.implicit[0] and node.tag == f"{_TAG}str" and _DISPUTED.fullmatch(node.value):
            node.tag = _DISPUTED_TAG
        return node

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

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put in the place of `<<` the keys that it brings: a mapping's own win over them, an earlier source's over a
        later one's. PyYAML 6.0.4's takes the first of two equal keys, so that a source brings what it has overridden.
        """
        brought: dict[Any, tuple[Any, Any]] = {}
        own: dict[Any, tuple[Any, Any]] = {}
        for key_node, value_node in node.value:
            if key_node.tag != f"{_TAG}merge":
                own[self.construct_object(key_node)] = key_node, value_node
                continue
            for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                if not isinstance(source, yaml.MappingNode):
                    problem = "`<<` takes a mapping or a list of mappings"
                    raise yaml.constructor.ConstructorError(None, None, problem, source.start_mark)
                self.flatten_mapping(source)
                for pair in source.value:
                    brought.setdefault(self.construct_object(pair[0]), pair)
        node.value = [*{**brought, **own}.values()]

    def plain_value(self, node: yaml.ScalarNode) -> Any:
        """A null, truth or number of the core schema, by its tag."""
        text = self.construct_scalar(node)
        kind = node.tag.removeprefix(_TAG)
        if not re.fullmatch(next(form for name, _, form in _PLAIN if name == kind), text):
            raise yaml.constructor.ConstructorError(None, None, f"{text!r} is not of type {kind}", node.start_mark)
        try:
            if kind == "int":
                return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        except ValueError as exc:  # thousands of digits
            raise yaml.constructor.ConstructorError(
                None, None, f"an integer of {len(text)} digits", node.start_mark
            ) from exc
        if kind == "float":
            return float(re.sub(r"\.(?=[iInN])", "", text))
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


# ------------------------------------------------------------------------------
# A key put into the text of a spec file, with every comment and line break around it as they were.


_SPEC_EDITS_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*")
"""What every YAML reads as a text without quotes, but for words such as `no`."""


def with_key(text: str, section: str, key: str, value: str) -> str | None:
    """The text of a spec in which `section.key` is `value`; None where it only a person can put it in.

    Args:
        section: a mapping at the top of the spec.
    """
    node = _value_of(yaml.compose(text, Loader=yaml.SafeLoader), section)
    if not isinstance(node, yaml.MappingNode) or not node.value:
        return None
    held = _value_of(node, key)
    if held is not None:
        edited = text[: held.start_mark.index] + _word(value, is_quoted=False) + text[held.end_mark.index :]
    elif node.flow_style:
        name, last = node.value[-1]
        is_json = name.style == '"'
        end = last.end_mark.index
        edited = f"{text[:end]}, {_word(key, is_quoted=is_json)}: {_word(value, is_quoted=is_json)}{text[end:]}"
    else:
        name, last = node.value[0]
        line = text.find("\n", last.end_mark.index if isinstance(last, yaml.ScalarNode) else name.start_mark.index)
        end, indent = line if line >= 0 else len(text), " " * name.start_mark.column
        edited = f"{text[:end]}\n{indent}{key}: {_word(value, is_quoted=False)}{text[end:]}"
    return edited if _is_that_alone(text, edited, section, key, value) else None


def _value_of(node: Any, key: str) -> Any:
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next((value for name, value in pairs if name.value == key), None)


def _word(text: str, *, is_quoted: bool) -> str:
    is_plain = (
        not is_quoted
        and _SPEC_EDITS_PLAIN.fullmatch(text)
        and parse_yaml(text) == text
        and type(parse_yaml(text)) is str
    )
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def _is_that_alone(text: str, edited: str, section: str, key: str, value: str) -> bool:
    """Whether nothing but the key is another one: the marks of a parser are not to be trusted with a user's file."""
    try:
        before, after = parse_yaml(text), parse_yaml(edited)
    except yaml.YAMLError:
        return False
    wanted = {**before, section: {**before[section], key: value}}
    return bool(after == wanted)
