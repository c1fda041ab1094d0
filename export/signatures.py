"""Ed25519 signatures of published records: signing keys, trusted keys, and the files that hold them."""

from __future__ import annotations

import base64
import codecs
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relabel.export import puller
from relabel.export.bundles import translate_refusals
from relabel.export.puller import Trust
from relabel.manifests.errors import ConfigError
from relabel.manifests.files import translate_errors
from relabel.manifests.process import require
from relabel.manifests.secrets import keep_secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_PEM_START = "-----BEGIN "
_AROUND = "\ufeff'\"` \t\r\n"
_MAX_KEY_BYTES = 1 << 16
_MIN_KEY_CHARS = 40
"""Of 32 bytes in hex or base64, with some lost."""
_PRIMITIVES = "cryptography.hazmat.primitives"
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


# ------------------------------------------------------------------------------
# Signatures by ed25519: who publishes holds the private key, who pulls is given the public one.
#
# What is signed is a line that names the kind of record and then the canonical JSON of its body, so that a signature of
# one kind is none of another. Keys are PEM as `openssl genpkey -algorithm ed25519` writes them.


Signature = dict[str, str]
"""`algorithm`, `key_id` and `signature` (64 bytes in base64), as a record holds it."""


class SigningKey:
    """A private key.

    Args:
        source: path of a PEM file, or the PEM text itself.
    Raises:
        ConfigError: no unencrypted ed25519 private key there.
        MissingExtraError: the package cryptography is not here.
    """

    def __init__(self, source: str) -> None:
        private_key = require(f"{_PRIMITIVES}.asymmetric.ed25519", extra="sign", purpose="Signing").Ed25519PrivateKey
        serialization = require(f"{_PRIMITIVES}.serialization", extra="sign", purpose="Signing")
        where, pem = pem_of(source, "the signing key")
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as exc:  # TypeError: it is encrypted
            raise ConfigError(f"{where}: no unencrypted PEM private key. Make one: {_MAKE}.") from exc
        if not isinstance(key, private_key):
            raise ConfigError(f"{where}: not an ed25519 key. Make one: {_MAKE}.")
        self._key: Ed25519PrivateKey = key
        self.key_id = puller.key_id(key.public_key())

    def sign(self, kind: str, body: Mapping[str, Any]) -> Signature:
        """Sign a record's body."""
        signed = self._key.sign(puller.signed_bytes(kind, body))
        return {"algorithm": "ed25519", "key_id": self.key_id, "signature": base64.b64encode(signed).decode()}

    def has_signed(self, kind: str, body: Mapping[str, Any], signatures: Sequence[Signature]) -> bool:
        """Whether one of the signatures is truly ours, of this very body; a key id alone proves nothing."""
        return puller.is_signed(kind, body, signatures, {self.key_id: self._key.public_key()})


@translate_refusals()
def trusted_keys(sources: Sequence[str]) -> Trust:
    """Public keys, each of which is good enough: give the old and the new one while they change.

    Args:
        sources: paths of PEM files, or PEM text; without one nothing need be signed.
    Raises:
        ConfigError, ManifestError: one is not an ed25519 public key.
        MissingExtraError: the package cryptography is not here.
    """
    if sources:
        require(f"{_PRIMITIVES}.serialization", extra="sign", purpose="Checking a signature")
    return Trust([pem_of(source, "the public key")[1].decode(errors="replace") for source in sources])
