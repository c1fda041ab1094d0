"""A key put into the text of a spec file, with every comment and line break around it as they were."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from relabel.jobs.planning.spec_yaml import parse_yaml

_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*")
"""What every YAML reads as a text without quotes, but for words such as `no`."""


def with_key(text: str, section: str, key: str, value: str) -> str | None:
    """The text of a spec in which `section.key` is `value`; None where it can't be put in without a look at the file.

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
    is_plain = not is_quoted and _PLAIN.fullmatch(text) and parse_yaml(text) == text and type(parse_yaml(text)) is str
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def _is_that_alone(text: str, edited: str, section: str, key: str, value: str) -> bool:
    """Whether nothing but the key is another one: the marks of a parser are not to be trusted with a user's file."""
    try:
        before, after = parse_yaml(text), parse_yaml(edited)
    except yaml.YAMLError:
        return False
    wanted = {**before, section: {**before[section], key: value}}
    return bool(after == wanted)
