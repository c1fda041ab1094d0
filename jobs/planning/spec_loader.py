"""YAML's loader for specs: the core schema of YAML 1.2, with a bound on aliases; why, `spec_yaml.py` says."""

from __future__ import annotations

import re
from typing import Any

import yaml

from relabel.manifests.specs import DisputedText

MAX_ALIASED = 10_000
"""Values that a text's aliases may stand for in all: a few lines of aliases of aliases stand for billions."""
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
        """Compose a value, counting what aliases stand for before anything is built of it."""
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
