"""Which names say that their value is a secret: of variables, storage options and URL queries. Generous: a wrong yes
costs a rename.
"""

from __future__ import annotations

import re

STORAGE_KEY = "storage_options"
"""A spec's key whose values are secrets, all of them."""
_INNOCENT = re.compile(
    r"TOKENIZ\w*|AUTHOR(?!I)S?|PASS(?:AGE|IVE|ES)|(?:BY|COM|SUR|TRES)PASS"
    r"|(?:MON|DON|TUR|WHIS|HOC)KEY|KEY(?:BOARD|WORD|NOTE|STONE|FRAME)|CONNECT(?!ION_?STR)|CREDIT|CERTAIN|DISCONN"
    r"|^(?:OLD)?PWD$|^_*PASS_AT$"  # the shell's working directory; an option of evaluate
)
_TELLING = re.compile(
    r"PASSWORD|PASSWD|PASSPHRASE|PASS|PWD|SECRET|TOKEN|KEY|CREDENTIAL|CREDS?|AUTH|JWT|CERT|PRIVATE|BEARER|COOKIE|SIGNATURE"
    r"|CONN(?!ECTION(?!_?STR))|DSN|NETRC|(?:^|_)(?:SIG|SAS)\d*(?:_|$)|PAT\d*(?:_|$)"
)
_COUNTS = re.compile(r"(?:TOKENS|KEYS|CONNS)\d*(?:_|$)")
_LIMITS = re.compile(r"(?:^|_)(?:MAX|WINDOW|BATCH|PREFILL)(?:_[A-Z]+)*?_TOKENS$|^TOKENS_PER_")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")


def names_secret(name: str, value: str = "") -> bool:
    """Whether a name (`PGPASSWORD`, `x-amz-signature`, `accountKey`) is that of a secret.

    Args:
        value: what it holds; a short number beside a plural (`API_KEYS`) is a count, and any number beside a limit
            (`max_prompt_tokens`).
    """
    parts = _INNOCENT.sub("_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").upper())
    if len(value) < 8 and value.isdecimal():
        parts = _COUNTS.sub("_", parts)
    if _NUMBER.fullmatch(value):
        parts = _LIMITS.sub("_", parts)
    return _TELLING.search(parts) is not None
