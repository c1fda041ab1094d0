#!/usr/bin/env python3
"""Lets DEST/current be a published bundle: `relabel pull` in one file, for Python 3.11 or newer without a package.

    python3 pull.py URL/NAME[@CHANNEL|@VERSION] DEST [--key FILE] [--keep 3] [--unhold] [--check-parity]
    python3 pull.py --rollback DEST [--to VERSION]

URL is https://…, s3://bucket/prefix, file:///path or a path. Digests of all bytes are checked before a version serves,
signatures by `cryptography` where --key or RELABEL_TRUST_KEY names a key; without that package such a pull ends with 4.
With --check-parity the new version's own load.py asks its reference pairs before the switch, in a process of its own
that needs numpy, onnxruntime and tokenizers. `relabel pull` is this code over relabel's own stores. Exit codes: 0
switched or repaired, 10 nothing new, 2 usage, 3 damaged or hostile, 4 a library is missing, 5 unsigned, downgraded or
answering otherwise, 20 run again, 75 another pull is running. From top to bottom: store, records, what lies in DEST,
the pull itself.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import errno
import fcntl
import hashlib
import hmac
import http.client
import json
import os
import random
import re
import shlex
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

DONE, USAGE, BAD, MISSING, GATE, NOTHING, AGAIN, LOCKED, STOPPED = 0, 2, 3, 4, 5, 10, 20, 75, 130
TRIES, RETRY_S, TIMEOUT_S = 12, 120.0, 60.0
BLOCK_BYTES, RECORD_BYTES, SPARE_BYTES = 1 << 20, 64 << 20, 16 << 20
MANIFEST, VERSIONS, STABLE = "manifest.json", ".versions", "stable"
HERE = "this machine"  # who left a version, next to channels, whose names hold no space
NOT_OURS = ("__pycache__", ".gitattributes")
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
YOUNG_NS = 100_000_000
PROVEN: dict[tuple[int, ...], str] = {}
"""sha256 by what the file system says of a file, so that a process reads each file once: a write changes the time of
the last change, which nobody can set; within a tick of its clock, which is younger than YOUNG_NS, it could stay.
"""

Progress = Callable[[str, int], None]
"""Receives what is going on, and bytes that came in since the last call; may raise to stop the pull."""

# Texts in records, by their patterns.
NAME, SHA256, TEXT = "(?!objects$)[A-Za-z0-9][A-Za-z0-9._-]{0,99}", "[0-9a-f]{64}", "[ -~]{0,100}"
STEP, DEVICE = r"(?!\.$)[\w.+=@~-]([\w.+=@~ ()-]{0,198}[\w+=@~()-])?", r"(con|prn|aux|nul|(com|lpt)\d)(\..*)?"
FILE: dict[str, Any] = {"path": "(?s).*", "size_bytes": int, "sha256": SHA256}
MOVE: dict[str, Any] = {"sequence": int, "version": NAME, "version_sha256": SHA256, "reason": "publish|set|rollback"}
MOVE |= {"restores": (int, None), "moved": TEXT, "write": TEXT}
BODIES: dict[str, dict[str, Any]] = {
    "version": {"kind": "version", "name": NAME, "version": NAME, "files": [FILE]},
    "channel": {"kind": "channel", "name": NAME, "channel": NAME, "moves": [MOVE]},
}
SERVED: dict[str, Any] = {"folder": "[^/]+", "version": NAME, "version_sha256": f"({SHA256})?"}
SERVED |= {"manifest_sha256": SHA256, "channel": (NAME, None), "sequence": (int, None)}
REMARKED = {**SERVED, "refused_by": [TEXT]}
STATE: dict[str, Any] = {
    "format": int,
    "name": NAME,
    "served": [(REMARKED, SERVED)],
    "held": {"*": int},
    "left": {"*": [SHA256]},
}
STATE |= {"seen": {"*": {"sequence": int, "version_sha256": SHA256}}}
SIGNATURE = {"algorithm": TEXT, "key_id": "[0-9a-f]{16}", "signature": TEXT}


class Refused(Exception):  # noqa: N818
    """Ends the pull with an exit code and a reason; the active version is unchanged."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text


def need(is_so: bool, text: str, code: int = BAD) -> None:
    """Raise Refused unless something is so."""
    if not is_so:
        raise Refused(code, text)


# The store: a folder, or a server that answers GET.


class Store(Protocol):
    """What a pull reads from."""

    url: str

    def blocks(self, name: str, start: int) -> Iterator[bytes]:
        """A file's bytes from an offset on. Raises FileNotFoundError."""


class FolderStore:
    """A bundle store in a folder of this machine."""

    def __init__(self, url: str) -> None:
        self.url = url

    def blocks(self, name: str, start: int) -> Iterator[bytes]:
        """A file's bytes from an offset on. Raises FileNotFoundError."""
        path = Path(self.url, name)
        need(stat.S_ISREG(path.stat().st_mode), f"{path}: is not an ordinary file.")
        with path.open("rb") as file:
            file.seek(start)
            while block := file.read(BLOCK_BYTES):
                yield block


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """A signature, and the trust in a host, are of the URL that was given."""

    def redirect_request(self, *_: Any) -> None:
        return None


class WebStore:
    """A bundle store at an https:// URL, or at an s3:// URL with requests that are signed (SigV4)."""

    def __init__(self, url: str) -> None:
        self.url, base, self._is_s3 = url, url, url.startswith("s3://")
        if self._is_s3:
            how = 'eval "$(aws configure export-credentials --format env)"'
            need(
                bool(variable("AWS_ACCESS_KEY_ID") and variable("AWS_SECRET_ACCESS_KEY")),
                f"AWS_ACCESS_KEY_ID or its secret is not set. Of a role or profile: {how}.",
            )
            endpoint = variable("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") or f"https://s3.{region()}.amazonaws.com"
            base = f"{endpoint.rstrip('/')}/{url.removeprefix('s3://')}"
        scheme, _, rest = base.partition("://")
        self._base = f"{scheme}://{urllib.parse.quote(rest, safe='/:-_.~[]')}"
        self._opener = urllib.request.build_opener(NoRedirects)

    def blocks(self, name: str, start: int) -> Iterator[bytes]:
        """A file's bytes from an offset on; a broken reply is continued. Raises FileNotFoundError."""
        failures, since, where = 0, time.monotonic(), f"{self.url}/{name}"
        while True:
            try:
                with self._ask(name, start) as reply:
                    left = int(reply.headers.get("Content-Length") or -1)
                    skip = start if reply.status == http.client.OK else 0  # a server without ranges sends all of it
                    while block := reply.read1(BLOCK_BYTES):
                        left, block, skip = left - len(block), block[skip:], max(0, skip - len(block))
                        start, failures, since = start + len(block), 0, time.monotonic()
                        yield block
                    if left <= 0:
                        return
                    why = "the reply was cut short"
            except urllib.error.HTTPError as exc:
                code = None
                with exc, contextlib.suppress(OSError, http.client.HTTPException):
                    code = re.search(rb"<Code>(\w+)</Code>", exc.read(1 << 16))
                why = f"{exc.code} {code[1].decode() if code else exc.reason}"
                if exc.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:  # no byte is left
                    return
                if exc.code == http.client.NOT_FOUND:
                    raise FileNotFoundError(where) from exc
                need(
                    exc.code in (408, 409, 425, 429) or exc.code >= 500 or "Timeout" in why,
                    f"{where}: refused ({why}). Check the URL, the credentials and what they allow.",
                )
            except (OSError, http.client.HTTPException) as exc:
                need(
                    not isinstance(getattr(exc, "reason", exc), ssl.SSLCertVerificationError),
                    f"{where}: the server's certificate is not trusted (SSL_CERT_FILE).",
                )
                why = f"{type(exc).__name__} {getattr(exc, 'reason', '')}".strip()
            failures += 1
            pause = random.uniform(0, min(15.0, 0.2 * 2 ** (failures - 1)))
            is_over = failures == TRIES or time.monotonic() - since + pause > RETRY_S
            need(not is_over, f"{where}: no good answer ({why}). Run the same command again.", AGAIN)
            time.sleep(pause)

    def _ask(self, name: str, start: int) -> Any:
        url, headers = f"{self._base}/{name}", {"range": f"bytes={start}-"} if start else {}
        if self._is_s3:
            headers = signed(url, headers, time.time())
        return self._opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S)


def variable(*names: str) -> str:
    """The first environment variable of these that is set; empty without one."""
    return next(filter(None, map(os.environ.get, names)), "")


def region() -> str:
    return variable("AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1"


def signed(url: str, headers: Mapping[str, str], now_s: float) -> dict[str, str]:
    """Headers of a GET with AWS's Signature Version 4 over all of them, by the keys of the usual variables."""
    parts, stamp = urllib.parse.urlsplit(url), time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
    signed_headers = {**headers, "host": parts.netloc, "x-amz-date": stamp, "x-amz-content-sha256": EMPTY_SHA256}
    if token := variable("AWS_SESSION_TOKEN"):
        signed_headers["x-amz-security-token"] = token
    names = sorted(signed_headers)
    lines = [
        "GET",
        parts.path,
        "",
        *(f"{name}:{signed_headers[name]}" for name in names),
        "",
        ";".join(names),
        EMPTY_SHA256,
    ]
    scope = f"{stamp[:8]}/{region()}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256("\n".join(lines).encode()).hexdigest()])
    key = b"AWS4" + variable("AWS_SECRET_ACCESS_KEY").encode()
    for part in (*scope.split("/"), text):
        key = hmac.new(key, part.encode(), "sha256").digest()
    who = f"{variable('AWS_ACCESS_KEY_ID')}/{scope}, SignedHeaders={';'.join(names)}, Signature={key.hex()}"
    return {**signed_headers, "Authorization": f"AWS4-HMAC-SHA256 Credential={who}"}


# Records: strict JSON of a known shape, signed where a key was given.


def fits(value: Any, shape: Any) -> bool:
    """Whether a JSON value is what a shape says: exactly these keys (`*`: any), a list of one shape, a text of a
    pattern, a whole number (`int`), None, or one of several (a tuple).
    """
    if isinstance(shape, dict):
        shape = dict.fromkeys(value, shape["*"]) if "*" in shape and isinstance(value, dict) else shape
        is_object = isinstance(value, dict) and value.keys() == shape.keys()
        return is_object and all(fits(value[key], inner) for key, inner in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(one, shape[0]) for one in value)
    if isinstance(shape, tuple):
        return any(fits(value, one) for one in shape)
    if isinstance(shape, str):
        return isinstance(value, str) and re.fullmatch(shape, value) is not None
    return value is None if shape is None else type(value) is int and 0 <= value < 2**53


def canonical(value: Any) -> bytes:
    """What is signed and digested: one text per value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def strict_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object with no key twice and nothing in it that two readers could read in two ways."""

    def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(pairs)) == len(pairs), f"{where}: a key occurs twice.")
        return dict(pairs)

    try:
        held = json.loads(data, object_pairs_hook=once)
        canonical(held)  # no NaN, no half of a surrogate pair
    except (ValueError, RecursionError) as exc:
        raise Refused(BAD, f"{where}: not readable as JSON ({type(exc).__name__}).") from exc
    need(isinstance(held, dict), f"{where}: not a JSON object.")
    return dict(held)


class File(NamedTuple):
    """A file of a bundle; its path counts from the bundle's folder."""

    path: str
    size_bytes: int
    sha256: str


def read_files(held: Any, where: str) -> list[File]:
    """A list of files. Names are plain ASCII, stay in their folder, and differ in more than case."""
    need(fits(held, [FILE]) and len(held) <= 10_000, f"{where}: `files` is no list of files, or too long.")
    files, spelled = [File(**one) for one in held], dict[str, str]()
    for name in (file.path for file in files):
        steps = name.split("/")
        is_plain = len(name) <= 512 and len(steps) <= 16 and all(re.fullmatch(STEP, step, re.A) for step in steps)
        is_plain = is_plain and not any(re.fullmatch(DEVICE, step, re.I) for step in steps)
        above = ["/".join(steps[:depth]) + "/" for depth in range(1, len(steps))]
        is_alone = name.lower() not in spelled and all(spelled.setdefault(f[:-1].lower(), f) == f for f in above)
        need(is_plain and is_alone, f"{where}: refuses the file name {name!r}.")
        spelled[name.lower()] = name
    return files


class Record(NamedTuple):
    """A version's or channel's record of the right shape; not believed before `Trust.check`."""

    kind: str
    where: str
    body: dict[str, Any]
    signatures: list[dict[str, str]]
    refused_by: Sequence[str] = ()
    """Of a version: gates that it failed when it was published. Not signed: a remark, which refuses nothing."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(canonical(self.body)).hexdigest()

    @property
    def files(self) -> list[File]:
        """Of a version."""
        return [File(**one) for one in self.body["files"]]

    @property
    def manifest_sha256(self) -> str:
        return next(file.sha256 for file in self.files if file.path == MANIFEST)


def parse_record(data: bytes, kind: str, name: str, at: str, where: str) -> Record:
    """The record of a channel or version, with all checks that need no other file."""
    record = strict_json(data, where)
    body, signatures, refused_by = record.get("body"), record.get("signatures"), record.get("refused_by", [])
    is_one = (record.get("kind"), record.get("format")) == (kind, 1) and fits(body, BODIES[kind])
    is_one = is_one and fits(signatures, [SIGNATURE]) and len(signatures or ()) <= 16
    is_one = is_one and fits(refused_by, [TEXT]) and len(refused_by) <= 100
    if not is_one or body is None or signatures is None:
        raise Refused(BAD, f"{where}: no {kind} of format 1.")
    need((body["name"], body[kind]) == (name, at), f"{where}: is another {kind}'s record.")
    if kind == "version":
        need(MANIFEST in [file.path for file in read_files(body["files"], where)], f"{where}: lists no {MANIFEST}.")
    else:
        sequences = [move["sequence"] for move in body["moves"]]
        first = sequences[0] if sequences else 0
        need(
            first > 0 and sequences == list(range(first, first + len(sequences))),
            f"{where}: its sequence does not rise by one with every move.",
        )
    return Record(kind, where, body, signatures, refused_by)


def read_record(store: Store, kind: str, name: str, at: str) -> Record | None:
    """The record of a channel or version, None where there is none."""
    path, data = f"{name}/{kind}s/{at}.json", b""
    where = f"{store.url}/{path}"
    try:
        for block in store.blocks(path, 0):
            data += block
            need(len(data) <= RECORD_BYTES, f"{where}: too big to be a record.")
    except FileNotFoundError:
        return None
    return parse_record(data, kind, name, at, where)


def signed_bytes(kind: str, body: Mapping[str, Any]) -> bytes:
    """What a signature is of."""
    return f"relabel {kind} 1\n".encode() + canonical(body)


def is_signed(
    kind: str, body: Mapping[str, Any], signatures: Sequence[Mapping[str, str]], keys: Mapping[str, Any]
) -> bool:
    """Whether one of the public keys, by id, truly signed a body; a key id alone proves nothing."""
    from cryptography.exceptions import InvalidSignature

    for one in signatures:
        if one["algorithm"] == "ed25519" and one["key_id"] in keys:
            with contextlib.suppress(ValueError, InvalidSignature):
                keys[one["key_id"]].verify(base64.b64decode(one["signature"], validate=True), signed_bytes(kind, body))
                return True
    return False


def key_id(public_key: Any) -> str:
    """The first digits of the sha256 of a public key."""
    return hashlib.sha256(public_key.public_bytes_raw()).hexdigest()[:16]


def read_pem(source: str, what: str) -> tuple[str, bytes]:
    """Where a key comes from, for messages that must not show it, and its bytes.

    Blanks, quotes, a byte order mark around a key and a written-out `\\n` in it, which variables often bring along, do
    no harm.
    """
    text = source.strip("\ufeff'\"` \t\r\n")
    if "-----BEGIN " in text:
        return what, text.replace("\\r", "").replace("\\n", "\n").encode()
    is_there = os.path.exists(text)  # noqa: PTH110 (a text may be no path at all)
    need(is_there, f"{what}: neither a PEM text nor the path of a file that is there (is a variable not set?).")
    return text, Path(text).read_bytes().removeprefix(b"\xef\xbb\xbf")


class Trust:
    """Public ed25519 keys, by PEM files or PEM text; without one nothing need be signed."""

    def __init__(self, sources: Sequence[str] = ()) -> None:
        self._keys: dict[str, Any] = {}
        if not sources:
            return
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
            from cryptography.hazmat.primitives.serialization import load_pem_public_key
        except ImportError as exc:
            raise Refused(MISSING, "a key was given, and checking signatures needs `cryptography`.") from exc
        for source in sources:
            where, pem = read_pem(source, "the public key")
            key = None
            with contextlib.suppress(ValueError):
                key = load_pem_public_key(pem)
            if not isinstance(key, Ed25519PublicKey):
                raise Refused(BAD, f"{where}: no PEM public key of ed25519. Make one: openssl pkey -pubout.")
            self._keys[key_id(key)] = key

    def check(self, record: Record) -> None:
        """Refuse a record that no trusted key signed."""
        if self._keys and not is_signed(record.kind, record.body, record.signatures, self._keys):
            by = ", ".join(sorted({one["key_id"] for one in record.signatures})) or "nobody"
            trusted = ", ".join(sorted(self._keys))
            text = f"{record.where}: no valid signature by a trusted key (signed by {by}; trusted: {trusted})."
            raise Refused(GATE, text)


# What lies in DEST: the link, whole versions, and what is remembered of the channel.


@dataclass(frozen=True)
class Served:
    folder: str
    version: str
    version_sha256: str
    manifest_sha256: str
    channel: str | None
    sequence: int | None
    refused_by: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ServingState:
    """`.pull.json`: versions that are kept, the active one first; by channel the newest move that was seen (`sequence`,
    `version_sha256`), the sequence up to which somebody rolled back here, and the versions that the channel left by a
    rollback, by digest; under `HERE` those that are kept and that somebody rolled back from here.
    """

    name: str
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)
    served: tuple[Served, ...] = ()
    held: dict[str, int] = field(default_factory=dict)
    left: dict[str, list[str]] = field(default_factory=dict)

    def leavers(self, served: Served) -> list[str]:
        """Channels that left a version by a rollback, and `HERE` where somebody did on this machine."""
        return sorted(channel for channel, versions in self.left.items() if served.version_sha256 in versions)

    def describe(self, served: Served) -> str:
        """A version, and who left it."""
        by = ", ".join(self.leavers(served))
        return f"{served.version} ({by} left it by a rollback)" if by else served.version

    def with_active(self, to: Served, keep: int) -> ServingState:
        """After a switch."""
        others = [one for one in self.served if to.folder != one.folder and to.version_sha256 != one.version_sha256]
        others = others[: keep - 1]
        kept = {one.version_sha256 for one in others}
        here = [sha256 for sha256 in self.left.get(HERE, ()) if sha256 in kept]
        return replace(self, served=(to, *others), left={**self.left, HERE: here})

    def remarks(self) -> list[str]:
        """What spoke against versions when they were published, a line each."""
        return [f"version {one.version} {ALTHOUGH}{'; '.join(one.refused_by)}" for one in self.served if one.refused_by]


class ServingFolder:
    """A folder to pull to."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.versions, self.link = folder, folder / VERSIONS, folder / "current"

    @property
    def unchanged(self) -> str:
        """What a refusal ends with."""
        return "The active version is unchanged." if self.link.is_symlink() else "No version is active there."

    def serving(self) -> Path | None:
        """The folder that the link leads to."""
        if self.link.is_symlink():
            return self.folder / os.readlink(self.link)  # noqa: PTH115
        need(not self.link.exists(), f"{self.link}: is not a link that a pull made. Move it away.")
        return None

    def state(self) -> ServingState | None:
        """What is remembered, put right by the link: a kill may have come between the two."""
        path, serving = self.folder / ".pull.json", self.serving()
        need(path.is_file() or not path.exists(), f"{path}: is not an ordinary file. Move it away and pull again.")
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            values = None
        need(
            fits(values, STATE) and values.pop("format") == 1,
            f"{path}: not what a pull of this version writes. Move it away and pull again.",
        )
        state = ServingState(**{**values, "served": tuple(Served(**one) for one in values["served"])})
        if not state.served or serving in (None, self.path_of(state.served[0])) or serving.parent != self.versions:
            return state
        known = [place for place, one in enumerate(state.served) if one.folder == serving.name]
        if known and HERE in state.leavers(state.served[known[0]]):
            return state.with_active(state.served[known[0]], len(state.served))
        if known:
            return replace(state, served=state.served[known[0] :])
        sha256 = sha256_of(serving / MANIFEST)
        unknown = Served(serving.name, serving.name.partition("~")[0], "", sha256, None, None)
        return replace(state, served=(unknown, *state.served)) if sha256 else state

    def pulled(self) -> ServingState:
        """What is remembered, where anything was pulled."""
        state = self.state()
        if state is None or not state.served:
            raise Refused(BAD, f"{self.folder}: no version was pulled here. Pull one: pull URL/NAME {self.folder}.")
        return state

    def path_of(self, served: Served) -> Path:
        return self.versions / served.folder

    def fault(self, served: Served) -> str:
        """What is wrong with a version that should serve, every byte of it read; empty where it is whole."""
        if self.serving() != self.path_of(served):
            return f"{self.link}: is missing, or leads elsewhere"
        return fault_in(self.path_of(served), served.manifest_sha256)[0]

    def check(self) -> tuple[ServingState, str]:
        """The active version, and what is wrong with it; writes nothing and waits for nobody."""
        while True:
            state = self.pulled()
            fault = self.fault(state.served[0])
            if not fault or self.state() == state:  # else a pull switched and tidied up while files were read
                return state, fault

    def write(self, state: ServingState) -> None:
        """Make the state durable; the switch lock is held."""
        temp = self.folder / f".tmp-{os.urandom(4).hex()}"
        temp.write_bytes((json.dumps({"format": 1, **asdict(state)}, indent=1, ensure_ascii=False) + "\n").encode())
        sync(temp)
        temp.replace(self.folder / ".pull.json")
        sync(self.folder)

    def switch(self, state: ServingState, to: Served, keep: int) -> ServingState:
        """Let a whole version serve, in one step; the switch lock is held."""
        link = self.folder / f".link-{os.urandom(4).hex()}"
        link.symlink_to(Path(VERSIONS, to.folder))
        link.replace(self.link)
        sync(self.folder)
        state = state.with_active(to, keep)
        self.write(state)
        return state

    def tidy(self, state: ServingState) -> None:
        """Remove versions that are kept no more, and what killed pulls left; the pull lock is held."""
        serving = self.serving()
        kept = {one.folder for one in state.served} | ({serving.name} if serving else set())
        old = [path for path in self.versions.iterdir() if path.name not in kept]
        with self.locked("switch", waits=True):
            old += [path for start in ("trash", "link", "tmp") for path in self.folder.glob(f".{start}-*")]
            for path in (*old, self.folder / ".partial"):
                remove(path)

    @contextlib.contextmanager
    def locked(self, what: str, *, waits: bool) -> Iterator[None]:
        """Hold the `pull` lock (one pull at a time) or the `switch` lock (for the moment that one takes)."""
        path = self.folder / ".locks" / f"{what}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError as exc:
                raise Refused(LOCKED, f"{self.folder}: another pull is running ({path}).") from exc
            yield


def sha256_of(path: Path, size_bytes: int | None = None, *, follows: bool = False) -> str:
    """sha256 of a plain file that its owner may read; empty of anything else, and of a file of another size.

    Args:
        follows: a link is the file that it leads to, and not something else.
    """
    with contextlib.suppress(OSError):
        now_ns = time.time_ns()
        status = path.stat() if follows else path.lstat()
        is_plain = stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IRUSR
        if not is_plain or size_bytes not in (None, status.st_size):
            return ""
        stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if stamp in PROVEN:
            return PROVEN[stamp]
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if now_ns - status.st_ctime_ns > YOUNG_NS:
            PROVEN[stamp] = sha256
        return sha256
    return ""


def is_file(path: Path, file: File, *, follows: bool = False) -> bool:
    """Whether a plain file lies there with the bytes that it must have."""
    return sha256_of(path, file.size_bytes, follows=follows) == file.sha256


def entries_in(folder: Path, *, follows: bool = False, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """All that lies below a folder but for folders that hold something, for Python's caches of modules, and for the
    note that a hub adds to what it keeps.

    Args:
        follows: a link to a folder is that folder.
        above: the folders, resolved, that the walk is in: a link back to one of them is no folder.
    """
    above = above | {folder.resolve()}
    for path in folder.iterdir():
        if path.name in NOT_OURS:
            continue
        is_folder = path.is_dir()
        if is_folder and path.is_symlink():
            is_folder = follows and path.resolve() not in above
        inner = list(entries_in(path, follows=follows, above=above)) if is_folder else []
        yield from inner or [path]


def read_manifest(data: bytes, where: str) -> tuple[dict[str, Any], list[File]]:
    """What a bundle says of itself, and all its files, the manifest last."""
    held = strict_json(data, where)
    is_manifest = (held.get("kind"), held.get("format")) == ("bundle", 1) and fits(held.get("name"), ".+")
    is_manifest = is_manifest and isinstance(held.get("lineage"), dict) and isinstance(held.get("files"), list)
    need(is_manifest, f"{where}: no bundle's manifest of format 1 (kind, format, name, lineage, files).")
    itself = File(MANIFEST, len(data), hashlib.sha256(data).hexdigest())
    return held, read_files([*held["files"], itself._asdict()], where)


def fault_in(folder: Path, manifest_sha256: str) -> tuple[str, list[File]]:
    """What is wrong with a bundle, every byte of it read, and the files that it lists."""
    where = folder / MANIFEST
    if folder.is_symlink() or sha256_of(where) != manifest_sha256:
        return f"{where}: is missing, or not the one that was pulled", []
    try:
        files = read_manifest(where.read_bytes(), str(where))[1]
    except Refused as exc:
        return exc.text, []
    return fault_among(folder, files), files


def fault_among(folder: Path, files: Sequence[File], *, follows: bool = False) -> str:
    """What is wrong with a folder that should hold these files and no other; empty where nothing is.

    Args:
        follows: links are the files and folders that they lead to. Not where a pull serves: it wrote none, and what
            they lead to may change any time.
    """
    try:
        names = {path.relative_to(folder).as_posix() for path in entries_in(folder, follows=follows)}
    except OSError as exc:
        return f"{folder}: can't be listed ({exc.strerror})"
    strangers = names - {one.path for one in files}
    for file in files:
        path = folder / file.path
        above = [folder / parent for parent in Path(file.path).parents]
        if is_file(path, file, follows=follows) and all(one.stat().st_mode & 0o500 == 0o500 for one in above):
            continue
        if not os.path.lexists(path):
            return f"{path}: is missing"
        if follows and not path.exists():
            return f"{path}: is a link to {os.readlink(path)}, where nothing is"  # noqa: PTH115
        if path.is_symlink() and not follows:
            return f"{path}: is a link, and not what a pull wrote"
        return f"{path}: is not what its manifest says"
    return f"{folder}/{min(strangers)}: is not in the manifest" if strangers else ""


def remove(path: Path) -> None:
    """Remove what lies there; a folder loses its name first, so that nobody finds half of it."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    trash = path.with_name(f".trash-{os.urandom(4).hex()}")
    path.rename(trash)
    trash.chmod(0o700)
    for top, folders, _ in os.walk(trash):
        for folder in (Path(top, name) for name in folders):
            if not folder.is_symlink():
                folder.chmod(0o700)
    shutil.rmtree(trash)


def sync(path: Path) -> None:
    """Bring a file's bytes, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# The pull: what may be trusted first, then files, then the link.


ALTHOUGH = "was published although this refuses it: "


class Pulled(NamedTuple):
    """What a pull did; `is_held` where it left a version that somebody rolled back to."""

    dest: Path
    served: Served
    has_switched: bool = False
    is_held: bool = False
    fetched_bytes: int = 0
    repaired: str = ""

    def __str__(self) -> str:
        by = f" ({self.served.channel}, sequence {self.served.sequence})" if self.served.channel else ""
        notes = [f"{self.fetched_bytes:,} bytes fetched" if self.has_switched else "already"]
        if self.repaired:
            notes.append(f"repaired what was damaged: {self.repaired}")
        if self.is_held:
            notes.append("left so after a rollback until the channel moves on (--unhold follows now)")
        if self.served.refused_by:
            notes.append(f"it {ALTHOUGH}{'; '.join(self.served.refused_by)}")
        return f"{self.dest}: serves {self.served.version}{by}, {'; '.join(notes)}."


class Address(NamedTuple):
    """A bundle's store and name, and a channel or version where one is named."""

    url: str
    name: str
    at: str | None


def parse_address(text: str) -> Address:
    """Read `URL/NAME`, `URL/NAME@CHANNEL` or `URL/NAME@VERSION`."""
    url, slash, last = text.rstrip("/").rpartition("/")
    name, sign, at = last.partition("@")
    need(
        fits(name, NAME) and (fits(at, NAME) or not sign) and bool(url or not slash) and not url.endswith(":/"),
        f"{text}: write URL/NAME or URL/NAME@CHANNEL, for instance s3://bucket/models/ecom@stable.",
        USAGE,
    )
    return Address(url or ".", name, at or None)


def find_wanted(store: Store, address: Address, trust: Trust) -> tuple[Record, Record | None]:
    """The version that an address names, and the channel that points to it, which goes before a version of the same
    name; both may be trusted.
    """
    at = address.at or STABLE
    pointer = read_record(store, "channel", address.name, at)
    if pointer is None:
        return find_version(store, address.name, at, trust), None
    trust.check(pointer)
    head = pointer.body["moves"][-1]
    return find_version(store, address.name, head["version"], trust, head["version_sha256"]), pointer


def find_version(store: Store, name: str, at: str, trust: Trust, sha256: str | None = None) -> Record:
    """A version by its name, and by its digest where that is known."""
    record = read_record(store, "version", name, at)
    if record is None:
        where = f"{store.url}/{name}"
        raise Refused(
            BAD, f"{where}@{at}: no such bundle, channel or version. List them: relabel list {shlex.quote(store.url)}."
        )
    need(sha256 in (None, record.sha256), f"{record.where}: is not the record that was named by its digest. Refused.")
    trust.check(record)
    return record


def note_seen(dest: ServingFolder, state: ServingState, pointer: Record | None) -> ServingState:
    """Note the newest of the channel before anything is fetched, and refuse a pointer that somebody put back."""
    if pointer is None:
        return state
    channel, moves = pointer.body["channel"], pointer.body["moves"]
    last, now = state.seen.get(channel), {key: moves[-1][key] for key in ("sequence", "version_sha256")}
    why = f"a newer sequence than {now['sequence']}, or another version under it, was seen already"
    where = f"{dest.folder}: {state.name}@{channel}"
    need(
        last is None or now["sequence"] > last["sequence"] or now == last,
        f"{where}: downgraded: {why}. Move the channel until its sequence is higher.",
        GATE,
    )
    left = sorted(left_by_rollback(moves, state.left.get(channel, ()), last))
    noted = replace(state, seen={**state.seen, channel: now}, left={**state.left, channel: left})
    if noted != state:
        dest.write(noted)
    return noted


def left_by_rollback(
    moves: Sequence[Mapping[str, Any]], known: Collection[str], last: Mapping[str, Any] | None
) -> set[str]:
    """Versions, by digest, that a channel left by a rollback and was not pointed to since."""
    found = set(known)
    at = last["version_sha256"] if last and last["sequence"] == moves[0]["sequence"] - 1 else None
    for move in moves:
        if at is not None and move["reason"] == "rollback":
            found.add(at)
        at = move["version_sha256"]
        found.discard(at)
    return found


def as_published(served: Served, version: Record, pointer: Record | None) -> Served:
    """What is to be remembered of the active version: what the store says, not what lies here and may be damaged.
    Without a pointer, it came by the channel by which it came.
    """
    truth = replace(
        served,
        version=version.body["version"],
        manifest_sha256=version.manifest_sha256,
        refused_by=list(version.refused_by),
    )
    if pointer is None:
        return truth
    return replace(truth, channel=pointer.body["channel"], sequence=pointer.body["moves"][-1]["sequence"])


def fetch(store: Store, dest: ServingFolder, state: ServingState, version: Record, progress: Progress) -> str:
    """Bring a version into `.versions`, whole; the name of its folder."""
    at, listed = str(version.body["version"]), sorted(version.files)
    here = [dest.versions / at, *sorted(dest.versions.glob(f"{at}~*"))]
    for path in here:
        fault, files = fault_in(path, version.manifest_sha256)
        if not fault and sorted(files) == listed:
            return path.name
    building = dest.versions / f".new-{version.sha256[:16]}"  # found again by the next pull, if this one is killed
    bring_in(store, dest, building, version.files, [*here, *map(dest.path_of, state.served)], progress)
    fault, files = fault_in(building, version.manifest_sha256)
    if fault or sorted(files) != listed:
        remove(building)
        raise Refused(BAD, f"{fault or f'version {at} lists other files than its own {MANIFEST}'}.")
    names = [at, *(f"{at}~{number}" for number in range(2, 100))]
    name = next(name for name in names if not os.path.lexists(dest.versions / name))
    for top, _, _ in os.walk(building):
        sync(Path(top))
    building.rename(dest.versions / name)
    sync(dest.versions)
    return name


def bring_in(
    store: Store,
    dest: ServingFolder,
    building: Path,
    files: Sequence[File],
    kept: Sequence[Path],
    progress: Progress,
) -> None:
    """Every file of a version into a folder: copied from versions that are kept, else fetched."""
    partial, ours = dest.folder / ".partial", {file.path for file in files}
    for folder in (building, partial):
        folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(building.rglob("*"), reverse=True):  # what a killed pull left there, or anybody else
        if path.is_symlink() or path.is_dir() == (path.relative_to(building).as_posix() in ours):
            remove(path)
    missing = [file for file in files if not is_file(building / file.path, file)]
    partial_bytes = {path.name: path.stat().st_size for path in partial.iterdir()}
    sizes = {file.sha256: file.size_bytes - partial_bytes.get(file.sha256, 0) for file in missing}
    needed, free = sum(sizes.values()) + SPARE_BYTES, shutil.disk_usage(building).free
    need(needed <= free, f"{dest.folder}: {needed:,} bytes are needed, {free:,} are free.", AGAIN)
    for file in missing:
        target = building / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        same = [one.path for one in files if one.sha256 == file.sha256]
        twins = [building / path for path in same if path != file.path]
        if not copy_from(twins, [folder / path for folder in kept for path in same], file, target, partial):
            download(store, file, target, partial, progress)


def copy_from(twins: Sequence[Path], kept: Sequence[Path], file: File, target: Path, partial: Path) -> bool:
    """Copy a file from where its bytes lie already; whether they did. One that the bundle itself holds twice takes its
    space once, where the disk has links.
    """
    copy = partial / f"{file.sha256}.copy"
    for source in (*twins, *kept):
        copy.unlink(missing_ok=True)
        if is_file(source, file):
            with contextlib.suppress(OSError):
                if source in twins:
                    copy.hardlink_to(source)
            if not copy.exists():
                shutil.copyfile(source, copy)
        if is_file(copy, file):
            sync(copy)
            copy.replace(target)
            return True
    return False


def download(store: Store, file: File, target: Path, partial: Path, progress: Progress) -> None:
    """Fetch what is missing of a file; a bad part is fetched again, once."""
    part, name = partial / file.sha256, f"objects/{file.sha256[:2]}/{file.sha256}"
    for _ in range(2):
        size = part.stat().st_size if part.is_file() else 0
        what = f"fetching {file.path} from byte {size:,} of {file.size_bytes:,}"
        progress(what, 0)
        with part.open("ab") as out:
            try:
                for block in store.blocks(name, size) if size < file.size_bytes else ():
                    size += len(block)
                    if size > file.size_bytes:  # an object that grew must not fill the disk
                        break
                    out.write(block)
                    out.flush()  # what came in is there for the next pull, if this one is killed
                    progress(what, len(block))
            except FileNotFoundError as exc:
                raise Refused(BAD, f"{store.url}/{name} ({file.path}): is missing. Publish the bundle again.") from exc
        if size == file.size_bytes and is_file(part, file):
            sync(part)
            part.replace(target)
            return
        part.unlink()
    text = "its bytes are not those published. Publish the bundle again with --reread"
    raise Refused(BAD, f"{store.url}/{name} ({file.path}): {text}.")


def check_parity(version: Path) -> None:
    """Refuse a version that answers its reference pairs otherwise here than where it was made."""
    done = subprocess.run(
        [sys.executable, "-P", str(version / "load.py"), "--check"], capture_output=True, text=True, check=False
    )
    code = done.returncode if done.returncode in (DONE, MISSING, GATE) else BAD
    last = (done.stderr.strip() or f"{version}: load.py ended with {done.returncode}.").splitlines()[-1]
    need(code == DONE, f"--check-parity: {last}", code)


def pull(
    store: Store,
    address: Address,
    dest: ServingFolder,
    trust: Trust,
    progress: Progress,
    *,
    keep: int = 3,
    lifts_hold: bool = False,
    checks_parity: bool = False,
) -> Pulled:
    """Let DEST serve what an address names, whole.

    Args:
        keep: versions that stay, the active one among them.
        lifts_hold: switch although somebody rolled back from this very move of the channel.
        checks_parity: ask the new version's reference pairs before the switch.
    """
    for entry_name in (MANIFEST, "objects"):
        need(
            not (dest.folder / entry_name).exists(),
            f"{dest.folder}: holds {entry_name}, so it is a bundle, an output or a store. Pull to another folder.",
        )
    name, fetched = address.name, [0]
    there = (dest.state() or ServingState(name)).name
    need(there == name, f"{dest.folder}: the bundle {there} is pulled there; {name} needs a folder of its own.")
    version, pointer = find_wanted(store, address, trust)
    channel = pointer.body["channel"] if pointer else None
    sequence = pointer.body["moves"][-1]["sequence"] if pointer else None

    def counted(what: str, count: int) -> None:
        fetched[0] += count
        progress(what, count)

    with dest.locked("pull", waits=False):
        with dest.locked("switch", waits=True):
            noted = note_seen(dest, dest.state() or ServingState(name), pointer)
        served, was, fault = noted.served[0] if noted.served else None, dest.serving(), ""
        is_held = served is not None and (sequence or 0) <= noted.held.get(channel or "", -1) and not lifts_hold
        if served is not None and (is_held or served.version_sha256 == version.sha256):
            progress("checking the active version", 0)
            fault = dest.fault(served)
            if is_held and not fault:
                dest.tidy(noted)
                return Pulled(dest.folder, served, is_held=True)
            if is_held:  # the active version is repaired, and stays what it is
                version = find_version(store, name, served.version, trust, served.version_sha256)
            to = as_published(served, version, None if is_held else pointer)
            if (to.version, to.manifest_sha256) != (served.version, served.manifest_sha256):
                fault = dest.fault(to) or f"{dest.folder}/.pull.json: is not what the store says of {to.version}"
            if to == served and not fault:
                dest.tidy(noted)
                return Pulled(dest.folder, served)
            to = replace(to, folder=fetch(store, dest, noted, version, counted))
        else:
            folder = fetch(store, dest, noted, version, counted)
            if checks_parity:
                progress("asking the reference pairs", 0)
                check_parity(dest.versions / folder)
            at, manifest_sha256 = version.body["version"], version.manifest_sha256
            to = Served(folder, at, version.sha256, manifest_sha256, channel, sequence, list(version.refused_by))
        with dest.locked("switch", waits=True):
            state = dest.state() or ServingState(name)
            if state != noted and not lifts_hold:  # somebody rolled back while files came in
                return Pulled(dest.folder, state.served[0], is_held=True, fetched_bytes=fetched[0])
            if served is None or served.version_sha256 != to.version_sha256:
                state = replace(
                    state,
                    held={channel: upto for channel, upto in state.held.items() if channel != to.channel},
                )
            state = dest.switch(state, to, keep)
        dest.tidy(state)
        has_switched = bool(fault) or was != dest.path_of(to)
        return Pulled(dest.folder, to, has_switched, is_held, fetched[0], fault)


def roll_back(dest: ServingFolder, to: str | None = None) -> Pulled:
    """Let the version serve that did before, without network; none that was left by a rollback, unless named. What is
    left stays, as the last to give way to new ones.
    """
    dest.pulled()  # before a lock makes a folder where none was
    with dest.locked("switch", waits=True):
        state, was = dest.pulled(), dest.serving()
        places = [place for place, one in enumerate(state.served) if one.version == to]
        if to is None:
            places = [place for place, one in enumerate(state.served) if place > 0 and not state.leavers(one)]
        why = f"version {to} is not kept" if to else "keeps no version to go back to"
        others = "; ".join(map(state.describe, state.served[1:]))
        advice = "Only the active one is. Pull another."
        if others:
            advice = f"Here are: {others}. Name one of them: --to VERSION; or pull another."
        need(bool(places), f"{dest.folder}: {why}. {advice}")
        target, left = state.served[places[0]], state.served[: places[0]]
        fault = fault_in(dest.path_of(target), target.manifest_sha256)[0]
        need(not fault, f"{fault}. Name another one by --to VERSION, or pull it again.")
        if HERE not in state.leavers(target):  # else somebody takes a rollback back, and leaves nothing
            here = {*state.left.get(HERE, ()), *filter(None, (one.version_sha256 for one in left))}
            in_order = (*state.served[places[0] :], *left)
            state = replace(state, served=in_order, left={**state.left, HERE: sorted(here)})
        held = {**state.held, **{channel: seen["sequence"] for channel, seen in state.seen.items()}}
        dest.switch(replace(state, held=held), target, len(state.served))
        return Pulled(dest.folder, target, was != dest.path_of(target))


def open_store(url: str, *, is_signed: bool) -> Store:
    """The store at a URL; a server that nobody vouches for only where signatures are checked."""
    need(is_signed or not url.startswith("http://"), "http:// proves nobody: write https://, or give --key.", USAGE)
    if url.startswith(("https://", "http://", "s3://")):
        return WebStore(url)
    path = url.removeprefix("file://") or "."
    need("://" not in path, f"{url}: https://, s3://, file:// or a path.", USAGE)
    return FolderStore(path)


def main(arguments: Sequence[str]) -> int:
    """Parse, pull, and report; the exit code."""
    usage = "pull.py URL/NAME[@CHANNEL|@VERSION] DEST [options]\n       pull.py --rollback DEST [--to VERSION]"
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("pull.py", usage, about, allow_abbrev=False)
    parser.add_argument("places", nargs="+", metavar="URL/NAME DEST")
    parser.add_argument("--key", action="append", default=[], help="public ed25519 key (PEM) that must have signed")
    parser.add_argument("--keep", type=int, default=3, help="versions that stay in DEST (3)")
    parser.add_argument("--unhold", action="store_true", help="switch to what was rolled back from")
    parser.add_argument("--check-parity", action="store_true", help="ask the reference pairs before a switch")
    parser.add_argument("--rollback", action="store_true", help="serve again what served before; takes DEST alone")
    parser.add_argument("--to", metavar="VERSION", help="with --rollback: go to this version of those kept")
    options = parser.parse_args(arguments)
    if len(options.places) != (1 if options.rollback else 2) or (options.to and not options.rollback):
        parser.error("give URL/NAME@CHANNEL and DEST, or --rollback and DEST; --to goes with --rollback alone")
    if options.rollback and (options.key or options.unhold or options.check_parity):
        parser.error("--rollback takes one argument, DEST, and no other option but --to")
    dest = ServingFolder(Path(options.places[-1]))
    try:
        need(bool(options.places[-1]), "DEST is empty: a variable that is not set?", USAGE)
        need(1 <= options.keep <= 1000, f"--keep {options.keep}: write 1 to 1000.", USAGE)
        if options.rollback:
            done = roll_back(dest, options.to)
        else:
            address = parse_address(options.places[0])
            keys = options.key or list(filter(None, [os.environ.get("RELABEL_TRUST_KEY")]))
            done = pull(
                open_store(address.url, is_signed=bool(keys)),
                address,
                dest,
                Trust(keys),
                lambda what, count: None if count else print(what, file=sys.stderr),
                keep=options.keep,
                lifts_hold=options.unhold,
                checks_parity=options.check_parity,
            )
    except Refused as exc:
        print(f"pull.py: {exc.text} {dest.unchanged}", file=sys.stderr)
        return exc.code
    except OSError as exc:
        print(f"pull.py: {exc}. {dest.unchanged}", file=sys.stderr)
        return AGAIN if exc.errno in (errno.ENOSPC, errno.EDQUOT) else BAD
    except KeyboardInterrupt:
        return STOPPED
    print(done)
    return DONE if done.has_switched else NOTHING


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, which takes a check under way along
    sys.exit(main(sys.argv[1:]))
