"""What of a URL is a secret: the user, unless it is a mere name, and the query. Whatever is in a password, and
whatever is chained.
"""

from __future__ import annotations

import re

from relabel.manifests.secrets.secret_names import names_secret
from relabel.manifests.secrets.secret_shapes import MASK

MIN_CHARS = 8
"""A shorter value of a query is a plain option, and a shorter value of anything would be found in every other word."""

_TOKEN_SCHEMES = frozenset({"http", "https", "s3", "s3a", "gs", "gcs", "ftp", "git+https", "ws", "wss"})
"""Schemes whose user without a password is a token or a key; elsewhere it is a name (`abfs://box@account`,
`sftp://me@host`).
"""
_PORTLESS = frozenset({"s3", "s3a", "gs", "gcs"})
_SCHEME = r"(?:\b|(?<=\dm))([A-Za-z][A-Za-z0-9+.-]{0,30})://"  # also behind the end of a terminal's colour
_URL = re.compile(rf"{_SCHEME}((?:(?!::[A-Za-z][A-Za-z0-9+.-]*://)[^\s\"'<>`])+)")
_WHOLE_URL = re.compile(rf"{_SCHEME}((?:(?!::[A-Za-z][A-Za-z0-9+.-]*://).)+)", re.DOTALL)
_PORT = re.compile(r"(?:\[[^\]]*\]|[^:/?#]*):\d{1,5}(?:/|$)")
_PAIR = re.compile(r"[?&;#]([A-Za-z][\w.~%-]*)=([^&;#]*)")
_END = r"[^\s\"'<>`:.,;)]"
_STOP = r"(?:[\s\"'<>`:.,;)]|$)"
_REST = re.compile(rf"(\?|#(?![A-Za-z]+(?:[_-][A-Za-z]+)*{_STOP}))[^\s\"'<>`]*{_END}")  # a heading's name is none
_QUERY = re.compile(r"([?&](?:amp;)?([A-Za-z][\w.~%-]*)=)([^\s\"'<>`&;#]+)")
_NOT_QUITE = re.compile(  # a URL with a slip in it, or a part of one
    r"((?:\b[A-Za-z][A-Za-z0-9+.-]{0,30}:(?!//[^/])[/\\]{1,10}|(?<![:\w])//|(?<=[a-z0-9])//(?!/)))[^\s/\\:@\"'<>]+:[^\s\"'<>@]*[^\s\"'<>]*@"
    r"|(?<![\w/.-])(?!hf:|pypi:|mailto:)[\w.-]{1,40}:[^\s/@:\"'<>(){},]{3,}@(?=[\w.-]+[:/(])"
)
_ENCODED = re.compile(r"(?i)(%(?:25)*3A(?:%(?:25)*2F){2})[^\s\"'<>`&]{0,400}?(%(?:25)*40)")


def masked_urls(text: str) -> str:
    """The text without users and queries of URLs."""
    if "://" in text:
        text = _URL.sub(_masked, text)
    if "@" in text:
        text = _NOT_QUITE.sub(lambda match: f"{match[1] or ''}{MASK}@", text)
    if "%" in text:
        text = _ENCODED.sub(rf"\1{MASK}\2", text)
    return _QUERY.sub(_masked_pair, text) if "?" in text else text


def _masked_pair(match: re.Match[str]) -> str:
    """An option of a query without its value, where it may be a secret; most of `?page=2&sort=new` is none."""
    return f"{match[1]}{MASK}" if len(match[3]) >= MIN_CHARS or names_secret(match[2], match[3]) else match[0]


def secret_in_url(url: str) -> bool:
    """Whether a URL holds a user's password or token, or a query that may be one: by its name, or longer than a plain
    option.

    A text that begins as a URL is one to its end, blanks and quotes included; in another every URL is looked at.
    """
    is_whole = re.match(r"\S{0,200}?://", url) is not None
    for match in (_WHOLE_URL if is_whole else _URL).finditer(url):
        scheme, rest = match[1].lower(), match[2]
        if _userinfo_end(scheme, rest):
            return True
        for name, value in _PAIR.findall(rest):
            if names_secret(name, value) or (len(value) >= MIN_CHARS and "?" in rest):
                return True
        bare = rest.partition("?")[2]
        if scheme in ("http", "https") and "=" not in bare and len(bare) >= MIN_CHARS:
            return True
    return any(match[1] and "@" in match[0] for match in _NOT_QUITE.finditer(url))


def _masked(match: re.Match[str]) -> str:
    scheme, rest = match[1], match[2]
    end = _userinfo_end(scheme.lower(), rest)
    shown = f"{MASK}@{rest[end:]}" if end else rest
    if scheme.lower() in ("http", "https"):
        shown = _REST.sub(rf"\1{MASK}", shown, count=1)
    return f"{scheme}://{shown}"


def _userinfo_end(scheme: str, rest: str) -> int:
    """How many characters after `://` are a secret userinfo with its `@`; 0 if there is none.

    A password may hold `/`, `?` and `@` as they are, though it should not: then nobody can say where it ends, and the
    last `@` is taken.
    """
    if "@" not in rest:
        return 0
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    user, at, _ = authority.rpartition("@")
    if at and ":" not in user:
        return len(user) + 1 if scheme in _TOKEN_SCHEMES else 0
    if not at and (":" not in authority or (scheme not in _PORTLESS and _PORT.match(rest))):
        return 0
    return rest.rfind("@") + 1
