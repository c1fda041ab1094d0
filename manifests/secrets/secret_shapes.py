"""What has the form of a secret wherever it occurs: PEM, base64 of a key, tokens, and what follows `password=` and its
like.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

MASK = "***"

_NAME = (
    r"(?:password|passwd|passphrase|passcode|(?:(?<![a-z])|db)pass|pwd|secret|token|shared_?access_?signature|signature|credentials?|jwt"
    r"|(?:access|api|account|shared|private|secret|auth|subscription|encryption|master|session)[_-]?key|session_?id|(?<![a-z])(?:sig|pat|auth))\d*"
)
_NEEDLES = ("pass", "pwd", "secret", "key", "token", "sig", "credential", "jwt", "pat", "auth", "session")
_MARK = r"(?:\\{0,4}[\"']|&quot;|&#3[49];)"
_QUOTE = rf"{_MARK}?+"
"""As it stands, or escaped in a text within JSON, `repr` or HTML."""
_FIRST = r"(?!\*\*\*|…)"
_VALUE = r"(?:[^\s\"'&;,)}\]\\]|\\[^\s\"']|[)}\]](?=\w))"
_OPENS = rf"(?:b?({_MARK}))?+"
_QUOTED = r"(?:(?(2)(?:(?!\2)[^\r\n]){1,400}(?=\2)|(?!))"
"""What is between two equal quotes, blanks and all; follows `_OPENS` as the second group, and wants another way
with its `)`.
"""
_HEADER = r"(?:=\\{0,4}\"(?=[\w/+\"\\])[^\"\\\r\n]*\\{0,4}\"|[^\r\n\"'\\]|\\(?![nr])[^\s\"'])+"
"""The rest of a header's line, or of the string that holds it, with `name="value"` in it."""
_SLASH = r"(?:\\*/|%2F)"
_BASE64 = "A-Za-z0-9+/"
_KEY = (
    rf"(?:^|(?<=/))(?:MC4CAQ|MFECAQ|MHcCAQ|MIG[A-Za-z0-9]AgE|MII[{_BASE64}]{{2}}[AIQgw]|b3BlbnNzaC1rZXk)"
    rf"[{_BASE64}=]{{24,}}"
)
"""A private key in base64, by how it begins: ed25519, EC, RSA and OpenSSH; also where it was taken for a path."""


class Shape(NamedTuple):
    """One form.

    Args:
        what: what it is, for errors that must not show it.
        needles: one of these is in the lower case of every text that has it; the pattern is tried on no other.
        pattern, replacement: as `re.sub` takes them; compiled when first needed, since most commands never do.
        is_sure: sure enough to refuse a text for it; a prompt may well say `token: something`, which is masked in a
            message alone.
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
    # a key has one or two, and more than six once in 100,000
    is_path = len({"-", "_"} & set(word)) > 0 or word.count("/") > 6
    return len(word) in (43, 64, 86) and not is_path and all(any(map(kind, word)) for kind in kinds)


_TOKENS = {
    "sk-": r"sk-[\w-]{16,}",  # OpenAI, Anthropic, OpenRouter, DeepSeek
    "k_live_": r"[rs]k_live_\w{16,}",
    "k_test_": r"[rs]k_test_\w{16,}",
    "whsec_": r"whsec_[\w+=]{16,}",
    "hf_": r"hf_[A-Za-z0-9]{20,}",
    "r8_": r"r8_[A-Za-z0-9]{30,}",
    "gsk_": r"gsk_[A-Za-z0-9]{20,}",
    "xai-": r"xai-[A-Za-z0-9]{30,}",
    "pplx-": r"pplx-[A-Za-z0-9]{30,}",
    "nvapi-": r"nvapi-[\w-]{20,}",
    "pcsk_": r"pcsk_\w{20,}",
    "gh": r"gh[pousr]_\w{20,}",
    "github_pat_": r"github_pat_\w{20,}",
    "gl": r"gl(?:pat|dt|rt|ft|ptt|cbt|oas|soat|agent)-[\w-]{16,}",
    "xox": r"xox[a-z]-[\w-]{10,}",
    "xapp-": r"xapp-\d-[\w-]{10,}",
    "aiza": r"AIza[\w-]{30,}",
    "ya29.": r"ya29\.[\w.-]{16,}",
    "gocspx-": r"GOCSPX-[\w-]{20,}",
    "1//0": r"1//0[\w-]{20,}",
    "q~": r"[\w.~-]{3}\dQ~[\w.~-]{30,}",  # a client's secret of Azure
    "eyj": r"eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*){0,3}",
    "npm_": r"npm_\w{30,}",
    "pypi-age": r"pypi-AgE[\w-]{16,}",
    "rubygems_": r"rubygems_[0-9a-f]{40,}",
    "dckr_": r"dckr_[a-z]at_[\w-]{16,}",
    "sg.": r"SG\.[\w-]{16,}\.[\w-]{16,}",
    ":aa": r"(?:bot)?\d{8,10}:AA[\w-]{30,}",
    "_v1_": r"do[opr]_v1_[0-9a-f]{40,}",
    "dapi": r"dapi[0-9a-f]{32}",
    "shp": r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}",
    "hv": r"hv[sbr]\.[\w-]{20,}",
    "lin_api_": r"lin_api_\w{20,}",
    "ntn_": r"ntn_[A-Za-z0-9]{30,}",
    "glsa_": r"gl(?:sa|c)_\w{20,}",
    "atatt3": r"ATATT3[\w=-]{20,}",
    "figd_": r"figd_[\w-]{20,}",
    "sbp_": r"sbp_[0-9a-f]{36,}",
    "pmak-": r"PMAK-[0-9a-f-]{40,}",
    "nrak-": r"NRAK-[A-Z0-9]{20,}",
    "sntry": r"sntry[su]_[\w+=-]{20,}",
    "age-secret-key-1": r"AGE-SECRET-KEY-1[0-9A-Z]{20,}",
}
"""Tokens that say themselves whose they are: what the lower case of a text must hold, and the pattern."""

SHAPES = (
    Shape(
        "a PEM block",
        ("---begin", "--- begin", "---%20begin", "---+begin"),
        (
            r"(?s)-{4,5}[ %+20]{0,3}BEGIN[A-Z0-9 %+._/-]{1,60}?-{4,5}(?!-)"
            r"(?:(?:(?!---[ %+20]{0,3}BEGIN).){0,20000}?-{4,5}[ %+20]{0,3}END[A-Z0-9 %+._/-]{1,60}?-{4,5}(?!-)"
            rf"|(?:(?:\s|\\+[nr])*[A-Z][A-Za-z-]+: [^\r\n\\]*)*(?:[{_BASE64}=\s%]|\\+[nr])*)"
        ),
        MASK,
    ),
    Shape(
        "a private key",
        ("private-lines:",),
        r"(?is)(private-lines:)(?!\*\*\*).*?(?:private-mac: ?\w+|\Z)",
        rf"\1{MASK}",
    ),
    Shape(
        "an authorization header",
        ("authorization",),
        rf"(?i)\b(authorization{_QUOTE}\s?+[:=,]\s?+(?:b?{_MARK})?+(?:(?:basic|bearer|token|digest)\s++)?+){_FIRST}{_HEADER}",
        rf"\1{MASK}",
    ),
    Shape("a token", ("digest ",), rf"(?i)\b(digest )(?=(?:username|realm|nonce|uri|qop)=){_HEADER}", rf"\1{MASK}"),
    Shape(
        "a token",
        ("bearer", "basic"),
        r"(?i)\b((?:bearer|basic)(?:[:\s]\s?|\\+t))(?=[\w.~+/-]*[\d=])[\w.~+/-]{12,}=*",
        rf"\1{MASK}",
    ),
    Shape(
        "a cookie",
        ("cookie",),
        rf"(?i)\b(cookie(?:: *+|=|{_MARK}[:,] ?{_MARK})){_FIRST}(?:[^\r\n\"'\\]|\\[^\s\"'])+",
        rf"\1{MASK}",
        is_sure=False,
    ),
    Shape(
        "the secret of a webhook",
        ("hook", "services", "workflows", "triggers", "with"),
        (
            rf"(?i)({_SLASH}(?:services|workflows|triggers){_SLASH}T(?-i:[A-Z0-9]){{3,}}{_SLASH}"
            rf"|{_SLASH}api{_SLASH}(?:v\d+{_SLASH})?webhooks?{_SLASH}(?:\d{{6,}}{_SLASH})?+(?=[\w-]{{16}})"
            rf"|{_SLASH}webhook(?:b2)?{_SLASH}(?=[\w@%-]+{_SLASH}IncomingWebhook)"
            rf"|\bhooks\.zapier\.com{_SLASH}hooks{_SLASH}catch{_SLASH}|\bhook\.[\w.]*make\.com{_SLASH}|{_SLASH}with{_SLASH}key{_SLASH}"
            rf"|{_SLASH}hooks{_SLASH}(?=[a-z0-9]{{26}}\b)){_FIRST}[\w@%/\\-]*[\w@%/-]"
        ),
        rf"\1{MASK}",
    ),
    Shape(
        "a password, key or token",
        _NEEDLES,
        rf"(?i)(?<![\w./-])([\w.-]*?{_NAME}{_QUOTE}\]? ?(?:=[=>]?+|:=|%3D) ?+{_OPENS}){_FIRST}{_QUOTED}|{_VALUE}+)",
        rf"\1{MASK}",
    ),
    Shape(
        "a password, key or token",
        _NEEDLES,
        rf"(?i)(?<![\w./-])([\w.-]*?{_NAME}{_QUOTE}: ?{_OPENS})(?!\d+\b){_FIRST}{_QUOTED}|{_VALUE}{{8,}})",
        rf"\1{MASK}",
        is_sure=False,
    ),
    Shape(
        "a password, key or token",
        _NEEDLES,
        rf"(?i)({_NAME}{_MARK}, ?b?{_MARK})(?=[^\"'\s]*\d){_VALUE}{{8,}}|(<[\w:.-]*?{_NAME}>){_FIRST}[^<\s]+",
        rf"\1\2{MASK}",
        is_sure=False,
    ),
    Shape(
        "a password, key or token",
        _NEEDLES,
        rf"(?i)(--[\w-]*?{_NAME} +){_FIRST}{_VALUE}{{8,}}",
        rf"\1{MASK}",
        is_sure=False,
    ),
    Shape("a password", (" -u", " --user"), r"( (?:-u|--user)[ =])[^\s:]+:(?!\*\*\*)\S+", rf"\1{MASK}", is_sure=False),
    Shape("a password", ("login ",), rf"(\blogin \S+\s+password\s+){_FIRST}{_VALUE}+", rf"\1{MASK}", is_sure=False),
    Shape("a password", ("jdbc:oracle:",), r"(?i)(jdbc:oracle:\w+:)[^/\s:]+/[^\s\"']+@", rf"\1{MASK}@"),
    Shape("a token", tuple(prefix.lower() for prefix in _TOKENS), rf"\b(?:{'|'.join(_TOKENS.values())})", MASK),
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
