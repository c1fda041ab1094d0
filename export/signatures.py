"""Ed25519 signatures of published records: signing keys, trusted keys, and the files that hold them."""

from __future__ import annotations

import base64
import codecs
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from relabel.manifests.errors import ConfigError, GateError
from relabel.manifests.files import translate_errors
from relabel.manifests.process import require
from relabel.manifests.records import canonical_json, sha256_bytes
from relabel.manifests.secrets import keep_secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

# ------------------------------------------------------------------------------
# Keys in PEM, from a file or as text.


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


# ------------------------------------------------------------------------------
# Signatures by ed25519: who publishes holds the private key, who pulls is given the public one.
#
# What is signed is the canonical JSON of a record's body behind a line that says what kind of record it is, so that no
# signature of one kind can stand for another. Keys are PEM as `openssl genpkey -algorithm ed25519` writes them.


ALGORITHM = "ed25519"
KEY_ID_DIGITS = 16
MAX_SIGNATURES = 16


class Signature(NamedTuple):
    """A signature, as a record holds it: 64 bytes in base64, and the first digits of the sha256 of the public key."""

    algorithm: str
    key_id: str
    signature: str


class SigningKey:
    """A private key.

    Args:
        source: path of a PEM file, or the PEM text itself.
    Raises:
        ConfigError: no unencrypted ed25519 private key there.
        MissingExtraError: the package cryptography is not here.
    """

    def __init__(self, source: str) -> None:
        ed25519 = _ed25519()
        serialization = require("cryptography.hazmat.primitives.serialization", extra="sign", purpose="Signing")
        where, pem = pem_of(source, "the signing key")
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as exc:  # TypeError: it is encrypted
            raise ConfigError(
                f"{where}: no unencrypted PEM private key. Make one: openssl genpkey -algorithm ed25519."
            ) from exc
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise ConfigError(f"{where}: not an ed25519 key. Make one: openssl genpkey -algorithm ed25519.")
        self._key: Ed25519PrivateKey = key
        self.key_id = _key_id(key.public_key())

    def sign(self, kind: str, body: Mapping[str, Any]) -> Signature:
        """Sign a record's body."""
        signed = self._key.sign(_message(kind, body))
        return Signature(ALGORITHM, self.key_id, base64.b64encode(signed).decode())

    def has_signed(self, kind: str, body: Mapping[str, Any], signatures: Sequence[Signature]) -> bool:
        """Whether one of the signatures is truly ours, of this very body; a key id alone proves nothing."""
        return any(_is_true(self._key.public_key(), self.key_id, kind, body, signature) for signature in signatures)


class TrustedKeys:
    """Public keys, each of which is good enough: give the old and the new one while they change.

    Args:
        sources: paths of PEM files, or PEM text.
    Raises:
        ConfigError: one is not an ed25519 public key.
        MissingExtraError: the package cryptography is not here.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        ed25519 = _ed25519()
        serialization = require(
            "cryptography.hazmat.primitives.serialization", extra="sign", purpose="Checking a signature"
        )
        self._keys: dict[str, Ed25519PublicKey] = {}
        for source in sources:
            where, pem = pem_of(source, "the public key")
            try:
                key = serialization.load_pem_public_key(pem)
            except ValueError as exc:
                raise ConfigError(
                    f"{where}: no PEM public key. Take it from the private one: openssl pkey -pubout."
                ) from exc
            if not isinstance(key, ed25519.Ed25519PublicKey):
                raise ConfigError(f"{where}: not an ed25519 key.")
            self._keys[_key_id(key)] = key

    def check(self, kind: str, body: Mapping[str, Any], signatures: Sequence[Signature], where: str) -> str:
        """The id of the trusted key that signed this body.

        Raises:
            GateError: none of them did.
        """
        if not signatures:
            raise GateError(
                f"{where}: is not signed, and a key was given. Have it signed (--sign-key), or pull without --key."
            )
        for signature in signatures:
            key = self._keys.get(signature.key_id)
            if key is not None and _is_true(key, signature.key_id, kind, body, signature):
                return signature.key_id
        signers = sorted({signature.key_id for signature in signatures})
        if claimed := [signer for signer in signers if signer in self._keys]:
            raise GateError(
                f"{where}: its signature by key {claimed[0]} is false: what was signed has changed. Refused."
            )
        raise GateError(
            f"{where}: signed by {', '.join(signers)}, trusted are {', '.join(sorted(self._keys))}. Give that key "
            "with --key if it is good."
        )


def read_signatures(held: Any) -> tuple[Signature, ...]:
    """Signatures as JSON holds them.

    Raises:
        ValueError: they are none.
    """
    if not isinstance(held, list) or len(held) > MAX_SIGNATURES:
        raise ValueError("`signatures` is not a list, or too long")
    return tuple(_signature(item) for item in held)


def _signature(held: Any) -> Signature:
    is_one = isinstance(held, dict) and held.keys() == set(Signature._fields)
    if not is_one or not all(isinstance(value, str) for value in held.values()):
        raise ValueError("a signature is not algorithm, key_id and signature")
    found = Signature(**held)
    if len(found.key_id) != KEY_ID_DIGITS or set(found.key_id) - set("0123456789abcdef"):
        raise ValueError(f"a signature's key_id is not {KEY_ID_DIGITS} hex digits")
    return found


def _is_true(key: Ed25519PublicKey, key_id: str, kind: str, body: Mapping[str, Any], signature: Signature) -> bool:
    from cryptography.exceptions import InvalidSignature

    if (signature.algorithm, signature.key_id) != (ALGORITHM, key_id):
        return False
    try:
        key.verify(base64.b64decode(signature.signature, validate=True), _message(kind, body))
    except (InvalidSignature, ValueError):
        return False
    return True


def _message(kind: str, body: Mapping[str, Any]) -> bytes:
    return f"relabel {kind} 1\n".encode() + canonical_json(body)


def _key_id(key: Ed25519PublicKey) -> str:
    return sha256_bytes(key.public_bytes_raw())[:KEY_ID_DIGITS]


def _ed25519() -> Any:
    return require(
        "cryptography.hazmat.primitives.asymmetric.ed25519", extra="sign", purpose="Signing and checking signatures"
    )
