"""JSON-LD of a page: each item of each script, as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from relabel.jobs.pairs.pages import fit

_TYPE = "application/ld+json"
_ASIDE = re.compile(
    r"""
    ("(?:[^"\\]|\\.)*(?:"|\Z))              # a text, which stays
    | //[^\n]* | /\*.*?(?:\*/|\Z)            # comments of JavaScript
    | <!--(?:[^{\["<]*-->)? | -->             # comments of HTML, and the marks of one around it all
    | <!\[CDATA\[ | \]\]>
    """,
    re.DOTALL | re.VERBOSE,
)
_LAST_COMMA = re.compile(r"""("(?:[^"\\]|\\.)*(?:"|\Z))|,(?=\s*[}\]])""", re.DOTALL)


def is_json_ld(tag: str, attributes: Mapping[str, str]) -> bool:
    """Whether an element is a script of JSON-LD."""
    return tag == "script" and attributes.get("type", "").partition(";")[0].strip().lower() == _TYPE


class JsonLd:
    """What scripts of JSON-LD hold: their objects, those of an array at the outside one by one, as extruct has it.

    Line ends within texts, comments, CDATA marks and commas before a closing bracket are borne with; other faults make
    a script unreadable.
    """

    def __init__(self) -> None:
        self.items: list[str] = []
        self.unreadable = 0

    def add(self, script: str) -> None:
        """Take a script's text; one without anything in it is no fault."""
        if not script.strip():
            return
        try:
            value = _read(script)
        except (ValueError, RecursionError):  # no JSON, a number of 5,000 digits, 1,000 open brackets
            self.unreadable += 1
            return
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                self.items.append(fit(json.dumps(item, ensure_ascii=False)))


def _read(script: str) -> Any:
    try:
        return json.loads(script, strict=False, parse_constant=_refuse)
    except ValueError:
        bare = _LAST_COMMA.sub(_kept, _ASIDE.sub(_kept, script))
        return json.loads(bare, strict=False, parse_constant=_refuse)


def _kept(match: re.Match[str]) -> str:
    return match[1] or ""


def _refuse(constant: str) -> NoReturn:
    """NaN and infinity are no JSON, whatever Python's reader thinks."""
    raise ValueError(constant)
