"""Text for messages and logs: secrets are masked, characters that no file can hold are escaped, counts are worded."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

STORAGE_KEY = "storage_options"
"""A spec's key whose values are secrets, all of them."""
_INNOCENT = re.compile(
    r"TOKENIZ\w*|AUTHOR(?!I)S?|PASS(?:AGE|IVE|ES)|(?:BY|COM|SUR|TRES)PASS"
    r"|(?:MON|DON|TUR|WHIS|HOC)KEY|KEY(?:BOARD|WORD|NOTE|STONE|FRAME)|CONNECT(?!ION_?STR)|CREDIT|CERTAIN|DISCONN"
    r"|^(?:OLD)?PWD$|^_*PASS_AT$"  # the shell's working directory; an option of evaluate
    r"|MAX_TOKENS_FIELD$"  # of the openai engine
)
_TELLING = re.compile(
    r"PASSWORD|PASSWD|PASSPHRASE|PASS|PWD|SECRET|TOKEN|KEY|CREDENTIAL|CREDS?|AUTH|JWT|CERT|PRIVATE|BEARER|COOKIE|SIGNATURE"
    r"|CONN(?!ECTION(?!_?STR))|DSN|NETRC|(?:^|_)(?:SIG|SAS)\d*(?:_|$)|PAT\d*(?:_|$)"
)


def names_secret(name: str, value: str = "") -> bool:
    """Whether a name (`PGPASSWORD`, `x-amz-signature`, `accountKey`) is that of a secret.

    Args:
        value: what it holds; a short number under a plural (`API_KEYS`) is a count, and any number under a limit
            (`max_prompt_tokens`).
    """
    parts = _INNOCENT.sub("_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").upper())
    if len(value) < 8 and value.isdecimal():
        parts = re.sub(r"(?:TOKENS|KEYS|CONNS)\d*(?:_|$)", "_", parts)
    if re.fullmatch(r"[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?", value):
        parts = re.sub(r"(?:^|_)(?:MAX|WINDOW|BATCH|PREFILL)(?:_[A-Z]+)*?_TOKENS$|^TOKENS_PER_", "_", parts)
    return _TELLING.search(parts) is not None


MASK = "***"

_NAME = (
    r"(?:password|passwd|passphrase|passcode|(?:(?<![a-z])|db)pass|pwd|secret|token|shared_?access_?signature|signature|credentials?|jwt"
    r"|(?:access|api|account|shared|private|secret|auth|subscription|encryption|master|session)[_-]?key|session_?id|(?<![a-z])(?:sig|pat|auth))\d*"
)
_NEEDLES = ("pass", "pwd", "secret", "key", "token", "sig", "credential", "jwt", "pat", "auth", "session")
_MARK = r"(?:\\{0,4}[\"']|&quot;|&#3[49];)"
_QUOTE = rf"{_MARK}?+"
"""As it is, or escaped in a text within JSON, `repr` or HTML."""
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
        is_sure: sure enough to refuse a text for it; a prompt may well hold `token: something`, which is masked in a
            message alone.
    """

    what: str
    needles: tuple[str, ...]
    pattern: str | re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str]
    is_sure: bool = True


def _masked_word(match: re.Match[str]) -> str:
    """A long word of base64 without the key that it is, if it is one."""
    word = match[0]
    before = match.string[max(0, match.start() - 1) : match.start()]
    escape = ""
    if before == "\\" and (start := re.match(r"ufeff|[nrt]", word)):  # of `repr` or JSON, right before the key
        escape = start[0]
    word = word.removeprefix(escape)
    after = match.string[match.end() : match.end() + 2]
    if before != "." and _is_key(word, after):
        return escape + MASK
    return escape + re.sub(_KEY, MASK, word)


def _is_key(word: str, after: str) -> bool:
    """Whether a word is 32 or 64 bytes, or a line from the middle of a PEM block; a folder such as `day=` is none."""
    body = word.rstrip("=")
    if word != body:
        is_whole = (len(body), len(word)) in ((43, 44), (86, 88))
        return is_whole and not re.match(r"\.\w|[\w%{$+/-]", after)
    if len(word) not in (43, 64, 86):
        return False
    # a key has one or two slashes, and more than six once in 100,000
    if "-" in word or "_" in word or word.count("/") > 6:
        return False
    return all(any(map(kind, word)) for kind in (str.isupper, str.islower, str.isdigit))


class Token(NamedTuple):
    """A token that shows by its first letters whose it is.

    Args:
        needle: what the lower case of every text that has one holds.
    """

    vendor: str
    needle: str
    pattern: str


TOKENS = (
    Token("OpenAI, Anthropic, OpenRouter, DeepSeek", "sk-", r"sk-[\w-]{16,}"),
    Token("Stripe, a live key", "k_live_", r"[rs]k_live_\w{16,}"),
    Token("Stripe, a test key", "k_test_", r"[rs]k_test_\w{16,}"),
    Token("Stripe, a webhook's secret", "whsec_", r"whsec_[\w+=]{16,}"),
    Token("Hugging Face", "hf_", r"hf_[A-Za-z0-9]{20,}"),
    Token("Replicate", "r8_", r"r8_[A-Za-z0-9]{30,}"),
    Token("Groq", "gsk_", r"gsk_[A-Za-z0-9]{20,}"),
    Token("xAI", "xai-", r"xai-[A-Za-z0-9]{30,}"),
    Token("Perplexity", "pplx-", r"pplx-[A-Za-z0-9]{30,}"),
    Token("NVIDIA", "nvapi-", r"nvapi-[\w-]{20,}"),
    Token("Pinecone", "pcsk_", r"pcsk_\w{20,}"),
    Token("GitHub", "gh", r"gh[pousr]_\w{20,}"),
    Token("GitHub, fine-grained", "github_pat_", r"github_pat_\w{20,}"),
    Token("GitLab", "gl", r"gl(?:pat|dt|rt|ft|ptt|cbt|oas|soat|agent)-[\w-]{16,}"),
    Token("Slack", "xox", r"xox[a-z]-[\w-]{10,}"),
    Token("Slack, of an app", "xapp-", r"xapp-\d-[\w-]{10,}"),
    Token("Google, an API key", "aiza", r"AIza[\w-]{30,}"),
    Token("Google, OAuth", "ya29.", r"ya29\.[\w.-]{16,}"),
    Token("Google, a client's secret", "gocspx-", r"GOCSPX-[\w-]{20,}"),
    Token("Google, a refresh token", "1//0", r"1//0[\w-]{20,}"),
    Token("Azure, a client's secret", "q~", r"[\w.~-]{3}\dQ~[\w.~-]{30,}"),
    Token("a JSON web token", "eyj", r"eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*){0,3}"),
    Token("npm", "npm_", r"npm_\w{30,}"),
    Token("PyPI", "pypi-age", r"pypi-AgE[\w-]{16,}"),
    Token("RubyGems", "rubygems_", r"rubygems_[0-9a-f]{40,}"),
    Token("Docker", "dckr_", r"dckr_[a-z]at_[\w-]{16,}"),
    Token("SendGrid", "sg.", r"SG\.[\w-]{16,}\.[\w-]{16,}"),
    Token("Telegram", ":aa", r"(?:bot)?\d{8,10}:AA[\w-]{30,}"),
    Token("DigitalOcean", "_v1_", r"do[opr]_v1_[0-9a-f]{40,}"),
    Token("Databricks", "dapi", r"dapi[0-9a-f]{32}"),
    Token("Shopify", "shp", r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}"),
    Token("HashiCorp Vault", "hv", r"hv[sbr]\.[\w-]{20,}"),
    Token("Linear", "lin_api_", r"lin_api_\w{20,}"),
    Token("Notion", "ntn_", r"ntn_[A-Za-z0-9]{30,}"),
    Token("Grafana", "glsa_", r"gl(?:sa|c)_\w{20,}"),
    Token("Atlassian", "atatt3", r"ATATT3[\w=-]{20,}"),
    Token("Figma", "figd_", r"figd_[\w-]{20,}"),
    Token("Supabase", "sbp_", r"sbp_[0-9a-f]{36,}"),
    Token("Postman", "pmak-", r"PMAK-[0-9a-f-]{40,}"),
    Token("New Relic", "nrak-", r"NRAK-[A-Z0-9]{20,}"),
    Token("Sentry", "sntry", r"sntry[su]_[\w+=-]{20,}"),
    Token("age", "age-secret-key-1", r"AGE-SECRET-KEY-1[0-9A-Z]{20,}"),
)
"""Masked wherever they stand, since a server shows them without a word such as `key` before them.

No general rule covers them: a prefix, a separator and twenty letters and digits would be the name of many a model and
the id of many a document too.
"""

WEBHOOKS = (
    rf"{_SLASH}(?:services|workflows|triggers){_SLASH}T(?-i:[A-Z0-9]){{3,}}{_SLASH}",  # Slack
    rf"{_SLASH}api{_SLASH}(?:v\d+{_SLASH})?webhooks?{_SLASH}(?:\d{{6,}}{_SLASH})?+(?=[\w-]{{16}})",  # Discord
    rf"{_SLASH}webhook(?:b2)?{_SLASH}(?=[\w@%-]+{_SLASH}IncomingWebhook)",  # Teams
    rf"\bhooks\.zapier\.com{_SLASH}hooks{_SLASH}catch{_SLASH}",
    rf"\bhook\.[\w.]*make\.com{_SLASH}",
    rf"{_SLASH}with{_SLASH}key{_SLASH}",  # IFTTT
    rf"{_SLASH}hooks{_SLASH}(?=[a-z0-9]{{26}}\b)",  # Mattermost
)
"""Beginnings of URLs whose path is the secret from there on."""

_PEM_BEGIN = r"-{4,5}[ %+20]{0,3}BEGIN[A-Z0-9 %+._/-]{1,60}?-{4,5}(?!-)"
_PEM_END = r"-{4,5}[ %+20]{0,3}END[A-Z0-9 %+._/-]{1,60}?-{4,5}(?!-)"
"""Also with blanks as URLs write them."""
_PEM_WHOLE = rf"(?:(?!---[ %+20]{{0,3}}BEGIN).){{0,20000}}?{_PEM_END}"
_PEM_CUT = rf"(?:(?:\s|\\+[nr])*[A-Z][A-Za-z-]+: [^\r\n\\]*)*(?:[{_BASE64}=\s%]|\\+[nr])*"
"""What follows a beginning without an end: headers, and lines of base64."""

SHAPES = (
    Shape(
        "a PEM block",
        ("---begin", "--- begin", "---%20begin", "---+begin"),
        rf"(?s){_PEM_BEGIN}(?:{_PEM_WHOLE}|{_PEM_CUT})",
        MASK,
    ),
    Shape(
        "a private key",  # of PuTTY
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
    Shape(
        "a token",
        ("digest ",),
        rf"(?i)\b(digest )(?=(?:username|realm|nonce|uri|qop)=){_HEADER}",
        rf"\1{MASK}",
    ),
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
        rf"(?i)({'|'.join(WEBHOOKS)}){_FIRST}[\w@%/\\-]*[\w@%/-]",
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
    Shape(
        "a password",
        (" -u", " --user"),
        r"( (?:-u|--user)[ =])[^\s:]+:(?!\*\*\*)\S+",
        rf"\1{MASK}",
        is_sure=False,
    ),
    Shape(
        "a password",
        ("login ",),
        rf"(\blogin \S+\s+password\s+){_FIRST}{_VALUE}+",
        rf"\1{MASK}",
        is_sure=False,
    ),
    Shape(
        "a password",
        ("jdbc:oracle:",),
        r"(?i)(jdbc:oracle:\w+:)[^/\s:]+/[^\s\"']+@",
        rf"\1{MASK}@",
    ),
    Shape(
        "a token",
        tuple(token.needle for token in TOKENS),
        rf"\b(?:{'|'.join(token.pattern for token in TOKENS)})",
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


def _likely(text: str, shapes: Sequence[Shape]) -> list[Shape]:
    lowered = text.lower()
    return [shape for shape in shapes if any(needle in lowered for needle in shape.needles)]


MIN_CHARS = 8
"""A shorter value of a query is a plain option, and a shorter value of anything would be found in every other word."""

_TOKEN_SCHEMES = frozenset({"http", "https", "s3", "s3a", "gs", "gcs", "ftp", "git+https", "ws", "wss"})
"""Schemes whose user without a password is a token or a key; elsewhere it is a name (`abfs://box@account`,
`sftp://me@host`).
"""
_BUCKET_SCHEMES = ("s3", "s3a", "gs", "gcs")
"""Schemes without a port."""
_SCHEME = r"(?:\b|(?<=\dm))([A-Za-z][A-Za-z0-9+.-]{0,30})://"  # also after the end of a terminal's colour
_URL = re.compile(rf"{_SCHEME}((?:(?!::[A-Za-z][A-Za-z0-9+.-]*://)[^\s\"'<>`])+)")
_WHOLE_URL = re.compile(rf"{_SCHEME}((?:(?!::[A-Za-z][A-Za-z0-9+.-]*://).)+)", re.DOTALL)
_PORT = r"(?:\[[^\]]*\]|[^:/?#]*):\d{1,5}(?:/|$)"
_REST = re.compile(  # a heading's name is none
    r"(\?|#(?![A-Za-z]+(?:[_-][A-Za-z]+)*(?:[\s\"'<>`:.,;)]|$)))[^\s\"'<>`]*[^\s\"'<>`:.,;)]"
)
_NOT_QUITE = re.compile(  # a URL with a slip in it, or a part of one
    r"((?:\b[A-Za-z][A-Za-z0-9+.-]{0,30}:(?!//[^/])[/\\]{1,10}|(?<![:\w])//|(?<=[a-z0-9])//(?!/)))[^\s/\\:@\"'<>]+:[^\s\"'<>@]*[^\s\"'<>]*@"
    r"|(?<![\w/.-])(?!hf:|pypi:|mailto:)[\w.-]{1,40}:[^\s/@:\"'<>(){},]{3,}@(?=[\w.-]+[:/(])"
)


def _masked_pair(match: re.Match[str]) -> str:
    """An option of a query without its value, where it may be a secret; most of `?page=2&sort=new` is none."""
    start, name, value = match.groups()
    if len(value) >= MIN_CHARS or names_secret(name, value):
        return f"{start}{MASK}"
    return match[0]


def secret_in_url(url: str) -> bool:
    """Whether a URL holds a user's password or token, or a query that may be one: by its name, or longer than a plain
    option.

    A text that begins as a URL is one to its end, blanks and quotes included; in another every URL is checked.
    """
    is_whole = re.match(r"\S{0,200}?://", url) is not None
    for match in (_WHOLE_URL if is_whole else _URL).finditer(url):
        scheme = match[1].lower()
        rest = match[2]
        if _userinfo_end(scheme, rest):
            return True
        for name, value in re.findall(r"[?&;#]([A-Za-z][\w.~%-]*)=([^&;#]*)", rest):
            if names_secret(name, value) or (len(value) >= MIN_CHARS and "?" in rest):
                return True
        query = rest.partition("?")[2]
        if scheme in ("http", "https") and "=" not in query and len(query) >= MIN_CHARS:
            return True
    return any(match[1] and "@" in match[0] for match in _NOT_QUITE.finditer(url))


def _masked(match: re.Match[str]) -> str:
    scheme = match[1]
    rest = match[2]
    end = _userinfo_end(scheme.lower(), rest)
    shown = f"{MASK}@{rest[end:]}" if end else rest
    if scheme.lower() in ("http", "https"):
        shown = _REST.sub(rf"\1{MASK}", shown, count=1)
    return f"{scheme}://{shown}"


_IN_URLS = (
    Shape("a URL", ("://",), _URL, _masked),
    Shape("a URL", ("@",), _NOT_QUITE, lambda match: f"{match[1] or ''}{MASK}@"),
    Shape("a URL", ("%",), r"(?i)(%(?:25)*3A(?:%(?:25)*2F){2})[^\s\"'<>`&]{0,400}?(%(?:25)*40)", rf"\1{MASK}\2"),
    Shape("a URL", ("?",), r"([?&](?:amp;)?([A-Za-z][\w.~%-]*)=)([^\s\"'<>`&;#]+)", _masked_pair),
)
"""Users and queries of URLs, which are masked first; `secret_in_url` decides which of them are secrets."""


def _userinfo_end(scheme: str, rest: str) -> int:
    """How many characters after `://` are a secret userinfo with its `@`; 0 if there is none.

    A password may hold `/`, `?` and `@` as they are, though it should not: then it is unclear where it ends, and the
    last `@` is taken.
    """
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    user, at, _ = authority.rpartition("@")
    if at and ":" not in user:
        return len(user) + 1 if scheme in _TOKEN_SCHEMES else 0
    if not at:
        if ":" not in authority:
            return 0
        if scheme not in _BUCKET_SCHEMES and re.match(_PORT, rest):
            return 0
    return rest.rfind("@") + 1


# The door that every text leaves by: what may be a secret is taken out of it.
#
# `redacted` masks what has the form of a secret (a URL's user and query, PEM, keys, tokens), and the very values that
# this process was given (`keep_secret`; a process does one job, so they are the process's own). Digests, row ids and
# paths pass unharmed. What is refused rather than masked, because it would be written down, `secret_in` names.


_kept: dict[str, str] = {}
"""The values that this process was given, in every form that a text may show them in, and where each comes from."""


_kept_pattern = re.compile("(?!)")


def _keep(forms: dict[str, str]) -> None:
    global _kept, _kept_pattern
    _kept = forms
    _kept_pattern = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))) or "(?!)")


def keep_secret(value: str, what: str) -> None:
    """From now on this value is shown nowhere; one of less than eight characters is no secret.

    Args:
        what: where it comes from, for errors that must not show it (`the variable PGPASSWORD`).
    """
    if len(value.strip()) >= MIN_CHARS:
        _keep(dict.fromkeys(_forms(value), what) | _kept)


def forget_secrets() -> None:
    """Let go of the values: a command begins with none of an earlier one in its process."""
    _keep({})


def redacted(text: str) -> str:
    """The text without what is, or has the form of, a secret. Doing it twice changes nothing."""
    text = _kept_pattern.sub(MASK, text)
    for shape in _likely(text, (*_IN_URLS, *SHAPES)):
        text = re.sub(shape.pattern, shape.replacement, text)
    return text


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
    given = _kept_pattern.search(text)
    if given is not None:
        return f"the value of {_kept[given[0]]}"
    for shape in _likely(text, SHAPES):
        if shape.is_sure and re.sub(shape.pattern, shape.replacement, text) != text:
            return shape.what
    return None


def _forms(value: str) -> set[str]:
    """A value as it is, line by line, in parts, and as URLs, JSON, HTML, `repr`, hex and base64 write it, the last
    also within more.
    """
    import base64
    import html
    import json
    from urllib.parse import quote, quote_plus, unquote

    plain = {value, value.strip(), unquote(value)}
    plain |= {line.strip() for line in value.splitlines()}
    for text in list(plain):  # as a parser takes it apart
        plain |= {part for part in re.split("[/=@,;]", text) if len(part) >= MIN_CHARS}
    forms = set(plain)
    for text in plain:
        quoted = {
            quote(text, safe="", errors="replace"),
            quote(text, errors="replace"),
            quote_plus(text, errors="replace"),
        }
        forms |= quoted
        forms |= {re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), form) for form in quoted | {text}}
        escaped = json.dumps(text)[1:-1]
        forms |= {escaped, json.dumps(escaped)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
        forms |= {repr(text)[1:-1], html.escape(text)}
        raw = text.encode(errors="surrogateescape")
        forms |= {raw.hex(), raw.hex().upper()}
        forms |= _base64_forms(raw, base64.b64encode)
        forms |= _base64_forms(raw, base64.urlsafe_b64encode)
    return {form for form in forms if len(form) >= MIN_CHARS}


def _base64_forms(raw: bytes, encode: Callable[[bytes], bytes]) -> set[str]:
    """Bytes in base64: alone, and what of them shows after one or two other bytes and before more."""
    forms = {encode(raw).decode().rstrip("=")}
    for num_before, start in ((0, 0), (1, 2), (2, 3)):
        text = encode(bytes(num_before) + raw).decode()
        end = (num_before + len(raw)) * 8 // 6
        forms.add(text[start:end])
    return forms


def oddity_of(text: str) -> str | None:
    """What is wrong with a text, in a few words; None if nothing is."""
    if "\0" in text:
        return "holds a NUL"
    if re.search("[\ud800-\udfff]", text):
        return "is not UTF-8"
    return None


def shown(text: str) -> str:
    """A text as an error can show it: bytes that are no UTF-8 are spelled."""
    spelled = text.encode("utf-8", "backslashreplace").decode()  # a byte is a surrogate above U+DC00
    return shortened(spelled.replace("\\udc", "\\x").replace("\0", "\\0"), 200)


def one_line(text: str) -> str:
    """A message as one line: no id, path or text in it begins a line of its own or commands a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def texts_in(values: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Every text among plain values, each after the dotted keys and numbers that lead to it."""
    if isinstance(values, str):
        yield where, values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from texts_in(value, f"{where}.{key}" if where else str(key))
    elif isinstance(values, Sequence):
        for number, value in enumerate(values):
            yield from texts_in(value, f"{where}.{number}")


def counted(number: int, thing: str) -> str:
    """How many of something there are: `1 row`, `2,000 rows`."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")
