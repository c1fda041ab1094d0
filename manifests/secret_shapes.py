"""What has the form of a secret wherever it stands: PEM, base64 of a key, tokens, and what follows `password=` and its like."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

MASK = "***"

_NAME = (
    r"(?:password|passwd|passphrase|pwd|secret|(?:access|api|account|shared|private|secret|auth)[_-]?key|token|shared_?access_?signature"
    r"|signature|credentials?|jwt|(?<![a-z])(?:sig|pat))\d*"
)
_NEEDLES = (
    "pass",
    "pwd",
    "secret",
    "key",
    "token",
    "signature",
    "credential",
    "jwt",
    "sig=",
    "sig:",
    "sig ",
    "pat=",
    "pat:",
)
_QUOTE = r"(?:\\{0,4}[\"'])?+"
"""As it stands, or escaped in a text within JSON or `repr`."""
_FIRST = r"(?!\*\*\*|…)"
_VALUE = r"(?:[^\s\"'&;,)}\]\\]|\\[^\s\"'])"
_BASE64 = "A-Za-z0-9+/"
_KEY = rf"(?:^|(?<=/))(?:MC4CAQ|MFECAQ|MHcCAQ|MIG[A-Za-z0-9]AgE|MII[{_BASE64}]{{2}}[AIQgw]|b3BlbnNzaC1rZXk)[{_BASE64}=]{{24,}}"
"""A private key in base64, by how it begins: ed25519, EC, RSA and OpenSSH; also where it was taken for a path."""


class Shape(NamedTuple):
    """One form.

    Args:
        what: what it is, for errors that must not show it.
        needles: one of these is in the lower case of every text that has it; the pattern is tried on no other.
        pattern, replacement: as `re.sub` takes them; compiled when first needed, since most commands never do.
        is_sure: sure enough to refuse a text for it; a prompt may well say `token: something`, which is masked in a message alone.
    """

    what: str
    needles: tuple[str, ...]
    pattern: str
    replacement: str | Callable[[re.Match[str]], str]
    is_sure: bool = True


def _masked_word(match: re.Match[str]) -> str:
    """A long word of base64 without the key that it is, if it is one."""
    word, before = match[0], match.string[max(0, match.start() - 1) : match.start()]
    escape = re.match(r"ufeff|[nrt]", word) if before == "\\" else None  # of `repr` or JSON, right before the key
    kept = escape[0] if escape else ""
    word = word[len(kept) :]
    is_key = before != "." and _is_key(word, match.string[match.end() : match.end() + 2])
    return kept + (MASK if is_key else re.sub(_KEY, MASK, word))


def _is_key(word: str, after: str) -> bool:
    """Whether a word is 32 or 64 bytes, or a line from the middle of a PEM block; a folder such as `day=` is none."""
    body = word.rstrip("=")
    if word != body:
        return (len(body), len(word)) in ((43, 44), (86, 88)) and not re.match(r"\.\w|[\w%{$+/-]", after)
    kinds = (str.isupper, str.islower, str.isdigit)
    return len(word) in (43, 64, 86) and not {"-", "_"} & set(word) and all(any(map(kind, word)) for kind in kinds)


SHAPES = (
    Shape(
        "a PEM block",
        ("-----begin",),
        (
            r"(?s)-----BEGIN[A-Z0-9 %+]{1,60}-----"
            rf"(?:(?:(?!-----BEGIN).){{0,20000}}?-----END[A-Z0-9 %+]{{1,60}}-----|(?:[{_BASE64}=\s%]|\\+[nr])*)"
        ),
        MASK,
    ),
    Shape(
        "an authorization header",
        ("authorization",),
        (rf"(?i)\b(authorization{_QUOTE}\s?+[:=,]\s?+{_QUOTE}(?:(?:basic|bearer|token|digest) ++)?+){_FIRST}(?:[^\s\"'\\]|\\[^\s\"'])+"),
        rf"\1{MASK}",
    ),
    Shape(
        "a token",
        ("bearer ", "basic "),
        r"(?i)\b((?:bearer|basic) )(?=[\w.~+/-]*[\d=])[\w.~+/-]{12,}=*",
        rf"\1{MASK}",
    ),
    Shape("a cookie", ("cookie:",), r"(?i)\b(cookie: *+)(?!\*\*\*|…)(?:[^\r\n\"'\\]|\\[^\s\"'])+", rf"\1{MASK}", is_sure=False),
    Shape(
        "a password, key or token",
        _NEEDLES,
        rf"(?i)(?<![\w./-])([\w.-]*?{_NAME}{_QUOTE} ?= ?{_QUOTE}){_FIRST}{_VALUE}+",
        rf"\1{MASK}",
    ),
    Shape(
        "a password, key or token",
        _NEEDLES,
        rf"(?i)(?<![\w./-])([\w.-]*?{_NAME}{_QUOTE}: ?{_QUOTE})(?!\d+\b){_FIRST}{_VALUE}{{8,}}",
        rf"\1{MASK}",
        is_sure=False,
    ),
    Shape("a password, key or token", _NEEDLES, rf"(?i)(--[\w-]*?{_NAME} +){_FIRST}{_VALUE}{{8,}}", rf"\1{MASK}", is_sure=False),
    Shape("a password", (" -u ",), r"( -u )[^\s:]+:(?!\*\*\*)\S+", rf"\1{MASK}", is_sure=False),
    Shape(
        "a token",
        ("sk-", "k_live_", "k_test_", "hf_", "gh", "glpat-", "xox", "aiza", "ya29.", "eyj", "npm_", "pypi-age", "sg."),
        (
            r"\b(?:sk-[\w-]{16,}|[rs]k_(?:live|test)_\w{16,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
            r"|xox[a-z]-[\w-]{10,}|AIza[\w-]{30,}|ya29\.[\w.-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?|npm_\w{30,}|pypi-AgE[\w-]{16,}"
            r"|SG\.[\w-]{16,}\.[\w-]{16,})"
        ),
        MASK,
    ),
    Shape(
        "an access key",
        ("akia", "asia"),
        rf"\b(?:AKIA|ASIA)[A-Z0-9]{{16}}\b(?:\W{{1,3}}[{_BASE64}]{{40}}(?![{_BASE64}]))?",
        MASK,
    ),
    Shape("a key in base64", ("",), rf"[{_BASE64}_-]{{40,}}={{0,2}}", _masked_word),
)


def masked_shapes(text: str) -> str:
    """The text without what has the form of a secret."""
    for shape in _likely(text):
        text = re.sub(shape.pattern, shape.replacement, text)
    return text


def shape_in(text: str) -> str | None:
    """What of a text surely has the form of a secret, or None."""
    sure = (shape for shape in _likely(text) if shape.is_sure)
    return next((shape.what for shape in sure if re.sub(shape.pattern, shape.replacement, text) != text), None)


def _likely(text: str) -> list[Shape]:
    lowered = text.lower()
    return [shape for shape in SHAPES if any(needle in lowered for needle in shape.needles)]
