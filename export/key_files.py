"""Keys in PEM, from a file or as text."""

from __future__ import annotations

import codecs
from pathlib import Path

from relabel.manifests.errors import ConfigError
from relabel.manifests.secrets.redaction import keep_secret
from relabel.manifests.storage.disk_errors import translate_errors

_PEM_START = "-----BEGIN "
_AROUND = "\ufeff'\"` \t\r\n"
_MAX_KEY_BYTES = 1 << 16
_MIN_KEY_CHARS = 40
"""Of 32 bytes in hex or base64, with some lost."""
_MAKE = "openssl genpkey -algorithm ed25519"


def pem_of(source: str, what: str) -> tuple[str, bytes]:
    """Where a key comes from, for messages that must not show it, and its bytes.

    Blanks, quotes, a byte order mark around a key and a written-out `\\n` in it, which variables often bring along, do
    no harm.

    Raises:
        ConfigError: empty, or neither a PEM text nor what could be the path of one; what it is is not shown, since it
            may be a key.
    """
    text = source.strip(_AROUND)
    if not text:
        raise ConfigError(f"{what}: is empty: a variable that is not set?")
    if _PEM_START in text:
        keep_secret(text, what)
        return what, text.replace("\\r", "").replace("\\n", "\n").encode()
    path = Path(text)
    if not _names_a_file(text):
        keep_secret(text, what)
        raise ConfigError(
            f"{what}: neither a PEM text with its {_PEM_START}line nor the path of a file. Make one: {_MAKE}."
        )
    with translate_errors(f"read {what} from", path), path.open("rb") as file:
        held = file.read(_MAX_KEY_BYTES)  # a device may never end
    if held.lstrip().startswith(_PEM_START.encode()):
        keep_secret(held.decode(errors="replace"), f"{what} in {path}")
    return str(path), held.removeprefix(codecs.BOM_UTF8)


def _names_a_file(text: str) -> bool:
    """Whether a text is a path: of a file that is there, or one that is not a key, by its suffix or being shorter than
    any.
    """
    try:
        is_there = Path(text).exists()
    except (OSError, ValueError):  # too long a name, or a NUL in it
        return False
    return is_there or ("\n" not in text and (len(text) < _MIN_KEY_CHARS or Path(text).suffix[1:].isalpha()))
