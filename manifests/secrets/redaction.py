"""The door that every text leaves by: what may be a secret is taken out of it.

`redacted` masks what has the form of a secret (a URL's user and query, PEM, keys, tokens), and the very values that
this process was given (`keep_secret`; a process does one job, so they are the process's own). Digests, row ids and
paths pass unharmed. What is refused rather than masked, because it would be written down, `secret_in` names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from relabel.manifests.secrets.secret_shapes import MASK, masked_shapes, shape_in
from relabel.manifests.secrets.url_secrets import MIN_CHARS, masked_urls, secret_in_url


class _Kept:
    """The values that this process was given, in every form that a text may show them in."""

    def __init__(self) -> None:
        self.forms: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None

    def add(self, value: str, what: str) -> None:
        fresh = {form: what for form in _forms(value) if len(form) >= MIN_CHARS and form not in self.forms}
        if fresh:
            self.forms.update(fresh)
            self._pattern = re.compile("|".join(map(re.escape, sorted(self.forms, key=len, reverse=True))))

    def forget(self) -> None:
        self.forms, self._pattern = {}, None

    def masked(self, text: str) -> str:
        return text if self._pattern is None else self._pattern.sub(MASK, text)

    def found(self, text: str) -> str | None:
        match = None if self._pattern is None else self._pattern.search(text)
        return None if match is None else self.forms[match[0]]


_kept = _Kept()


def keep_secret(value: str, what: str) -> None:
    """From now on this value is shown nowhere; one of less than eight characters is no secret.

    Args:
        what: where it comes from, for errors that must not show it (`the variable PGPASSWORD`).
    """
    if len(value.strip()) >= MIN_CHARS:
        _kept.add(value, what)


def forget_secrets() -> None:
    """Let go of the values: a command begins with none of an earlier one in its process."""
    _kept.forget()


def redacted(text: str) -> str:
    """The text without what is, or has the form of, a secret. Doing it twice changes nothing."""
    return masked_shapes(masked_urls(_kept.masked(text)))


def shortened(text: str, most: int) -> str:
    """The text redacted, and then cut to so many characters: the part of a secret before a cut has no form to be known
    by.
    """
    shown = redacted(text)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def redacted_values(value: Any) -> Any:
    """Plain values as JSON holds them, with every string in them redacted."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {redacted(key) if isinstance(key, str) else key: redacted_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_values(inner) for inner in value]
    return value


def secret_in(text: str) -> str | None:
    """What of a text must not be written down (`a password in a URL`), or None. Names it, and never shows it."""
    if "://" in text and secret_in_url(text):
        return "a password, token or signature in a URL"
    found = _kept.found(text)
    if found is not None:
        return f"the value of {found}"
    return shape_in(text)


def _forms(value: str) -> set[str]:
    """A value as it stands, line by line, in parts, and as URLs, JSON, HTML, `repr`, hex and base64 write it, the last
    also within more.
    """
    import base64
    import html
    import itertools
    import json
    from urllib.parse import quote, quote_plus, unquote

    plain = {value, value.strip(), unquote(value), *(line.strip() for line in value.splitlines())}
    # as a parser takes it apart
    plain |= {part for one in set(plain) for part in re.split("[/=@,;]", one) if len(part) >= MIN_CHARS}
    forms = set(plain)
    for one in plain:
        raw = one.encode(errors="surrogateescape")
        forms |= {
            quote(one, safe="", errors="replace"),
            quote(one, errors="replace"),
            quote_plus(one, errors="replace"),
        }
        forms |= {re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), form) for form in forms if "%" in form}
        forms |= {
            json.dumps(one)[1:-1],
            json.dumps(json.dumps(one)[1:-1])[1:-1],
            json.dumps(one, ensure_ascii=False)[1:-1],
        }
        forms |= {repr(one)[1:-1], html.escape(one), raw.hex(), raw.hex().upper()}
        for encode, shift in itertools.product((base64.b64encode, base64.urlsafe_b64encode), range(3)):
            # with up to two bytes before it
            digits = encode(bytes(shift) + raw).decode().rstrip("=")
            forms |= {digits[(0, 2, 3)[shift] : (shift + len(raw)) * 8 // 6], digits if shift == 0 else ""}
    return {form for form in forms if len(form) >= MIN_CHARS}
