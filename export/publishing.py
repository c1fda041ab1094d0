"""The records of a bundle store (versions, channels that point to them, signatures), publishing, moves of channels, and
garbage collection.

    objects/ab/ab12…                  a file, by its sha256; shared by all versions that hold it
    NAME/versions/VERSION.json        a version: files with sizes and digests, and signatures
    NAME/channels/CHANNEL.json        a pointer with its history
    gc.json                           names that are on their way out
"""

from __future__ import annotations

import base64
import contextlib
import secrets
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain, groupby
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from relabel.export import puller
from relabel.export.bundles import MANIFEST_NAME, Bundle, read_manifest, translate_refusals
from relabel.export.puller import STABLE, Address, File, Progress, Trust
from relabel.manifests import failpoints
from relabel.manifests.errors import (
    ChannelMovedError,
    ConfigError,
    GateError,
    InputError,
    LockHeldError,
    ManifestError,
    StoreError,
    TransientError,
    UsageError,
)
from relabel.manifests.files import translate_errors
from relabel.manifests.process import require
from relabel.manifests.records import checked, digest_of, fault_of, plain, readable_json, sha256_bytes
from relabel.manifests.secrets import keep_secret
from relabel.manifests.store import Held, Store

if TYPE_CHECKING:
    from relabel.manifests.objects import Entry

OBJECTS = "objects"
_SWAPS = 8
"""Tries of a compare and swap while others write the same record."""

# ------------------------------------------------------------------------------
# Signatures by ed25519: who publishes holds the private key, who pulls is given the public one.
#
# What is signed is a line that names the kind of record and then the canonical JSON of its body, so that a signature of
# one kind is none of another. Keys are PEM as `openssl genpkey -algorithm ed25519` writes them.


_PRIMITIVES = "cryptography.hazmat.primitives"
Signature = dict[str, str]
"""`algorithm`, `key_id` and `signature` (64 bytes in base64), as a record holds it."""


class SigningKey:
    """A private key.

    Args:
        source: path of a PEM file, or the PEM text itself.
    Raises:
        ConfigError, ManifestError: no unencrypted ed25519 private key there.
        MissingExtraError: the package cryptography is not here.
    """

    def __init__(self, source: str) -> None:
        private_key = require(f"{_PRIMITIVES}.asymmetric.ed25519", extra="sign", purpose="Signing").Ed25519PrivateKey
        serialization = require(f"{_PRIMITIVES}.serialization", extra="sign", purpose="Signing")
        with translate_refusals(), translate_errors("read the signing key from", Path(source)):
            where, pem = puller.read_pem(source, "the signing key")
        keep_secret(pem.decode(errors="replace"), "the signing key")
        try:
            self._key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError):  # TypeError: it is encrypted
            self._key = None
        if not isinstance(self._key, private_key):
            raise ConfigError(
                f"{where}: no unencrypted PEM private key of ed25519. Make one: openssl genpkey -algorithm ed25519."
            )
        self.public_key = self._key.public_key()
        self.key_id = puller.key_id(self.public_key)

    def sign(self, kind: str, body: Mapping[str, Any]) -> Signature:
        """Sign a record's body."""
        return {
            "algorithm": "ed25519",
            "key_id": self.key_id,
            "signature": base64.b64encode(self._key.sign(puller.signed_bytes(kind, body))).decode(),
        }


@translate_refusals()
def trusted_keys(sources: Sequence[str]) -> Trust:
    """Public keys, each of which is good enough: give the old and the new one while they change.

    Args:
        sources: paths of PEM files, or PEM text; without one nothing need be signed.
    Raises:
        ManifestError: one is not an ed25519 public key.
        MissingExtraError: the package cryptography is not here.
    """
    if sources:
        require(f"{_PRIMITIVES}.serialization", extra="sign", purpose="Checking a signature")
    return Trust(sources)


# ------------------------------------------------------------------------------
# Names and records.


@translate_refusals()
def parse_address(text: str) -> Address:
    """Read `URL/NAME`, `URL/NAME@CHANNEL` or `URL/NAME@VERSION`.

    Raises:
        UsageError: no name in it, or one that can't be a name.
    """
    return puller.parse_address(text)


def check_name(text: str, what: str) -> str:
    """A bundle's, version's or channel's name.

    Raises:
        UsageError: it can't be one.
    """
    if not puller.fits(text, puller.NAME):
        raise UsageError(
            f"{text!r} can't be a {what}: letters, digits, dots, dashes and underscores, at most 100, not {OBJECTS!r}."
        )
    return text


def object_name(sha256: str) -> str:
    """Where a file of that digest lies."""
    return f"{OBJECTS}/{sha256[:2]}/{sha256}"


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A version's or channel's record.

    Args:
        body: what is signed, of the shape that `puller.BODIES` gives.
        signatures: of the whole body; not checked yet.
        tag: of the record as it was read, which a compare and swap holds it to; empty for one that is not written yet.
        refused_by: of a version, the gates that it failed when it was published. They lie next to the body: they are
            no contents, so that the same bundle is the same version with and without them.
    """

    kind: ClassVar[str]
    body: dict[str, Any]
    signatures: tuple[Signature, ...] = ()
    tag: str = ""
    refused_by: tuple[str, ...] = ()

    @classmethod
    def path_of(cls, name: str, at: str) -> str:
        """Where a record lies."""
        return f"{name}/{cls.kind}s/{at}.json"

    @classmethod
    @translate_refusals()
    def find(cls, bundle_store: Store, name: str, at: str) -> Self | None:
        """Read a record; None if there is none.

        Raises:
            ManifestError: it is damaged, hostile, or of another version or channel than its name.
        """
        path = cls.path_of(name, at)
        try:
            data, tag, _ = bundle_store.read_tagged(path)
        except FileNotFoundError:
            return None
        parsed = puller.parse_record(
            data,
            cls.kind,
            name,
            at,
            f"{bundle_store.url}/{path}",
        )
        return cls(parsed.body, tuple(parsed.signatures), tag, tuple(parsed.refused_by))

    @classmethod
    def load(cls, bundle_store: Store, name: str, at: str) -> Self:
        """Read a record.

        Raises:
            InputError: there is none.
            ManifestError: as `find`.
        """
        record = cls.find(bundle_store, name, at)
        if record is None:
            check_bundle(bundle_store, name)
            where = f"{bundle_store.url}/{name}"
            there = [*names_in(bundle_store, name, "channels"), *names_in(bundle_store, name, "versions")]
            hint = _hint(at, there)
            raise InputError(
                f"{where}: no {cls.kind} {at} there.{hint} See what there is: relabel show {shlex.quote(where)}."
            )
        return record

    @classmethod
    def load_all(cls, bundle_store: Store, name: str) -> list[Self]:
        """All of a bundle: channels by name, versions newest first."""
        age = {"channel": 0, "version": -1}[cls.kind]
        return [
            cls.load(bundle_store, name, PurePath(entry.name).stem)
            for entry in sorted(
                bundle_store.entries(f"{name}/{cls.kind}s"),
                key=lambda entry: (age * entry.written_s, entry.name.removesuffix(".json")),
            )
        ]

    @property
    def name(self) -> str:
        """The bundle's."""
        return str(self.body["name"])

    @property
    def at(self) -> str:
        """Its own name."""
        return str(self.body[self.kind])

    @property
    def path(self) -> str:
        """Where it lies."""
        return self.path_of(self.name, self.at)

    @property
    def sha256(self) -> str:
        """Digest of the body; what a channel points to."""
        return digest_of(self.body)

    @property
    def signed_by(self) -> list[str]:
        """Ids of the keys that claim to have signed it."""
        return [signature["key_id"] for signature in self.signatures]

    def record(self) -> bytes:
        """The record as it is written."""
        held = {"kind": self.kind, "format": 1, "body": self.body, "signatures": list(self.signatures)}
        if self.refused_by:
            held["refused_by"] = list(self.refused_by)
        return readable_json(held)

    def is_signed_by(self, key: SigningKey) -> bool:
        """Whether this key signed all that the record holds; a key id alone proves nothing."""
        return puller.is_signed(self.kind, self.body, self.signatures, {key.key_id: key.public_key})

    def signed(self, key: SigningKey | None) -> Self:
        """The record with a signature by the key, if one is given."""
        if key is None or self.is_signed_by(key):
            return self
        return replace(self, signatures=(*self.signatures, key.sign(self.kind, self.body)))

    def write(self, bundle_store: Store, before: StoredRecord | None) -> bool:
        """Write the record in place of the one that was read; whether that is still as it was read."""
        if before is None:
            return bundle_store.create(self.path, self.record())
        return bundle_store.replace(self.path, self.record(), before.tag)


class Version(StoredRecord):
    """A version of a published bundle, written once and last, after all its objects. Its body never changes;
    signatures are added to it, each of the whole body, and which gates it failed.
    """

    kind = "version"

    @property
    def files(self) -> tuple[File, ...]:
        """All files of the bundle, its manifest among them."""
        return tuple(File(**file) for file in self.body["files"])

    @property
    def distinct_files(self) -> list[File]:
        """One file for each digest: what a bundle store holds of it."""
        return list({file.sha256: file for file in self.files}.values())

    @property
    def names(self) -> list[str]:
        """What a bundle store holds of it: its record and its objects."""
        return [self.path, *(object_name(file.sha256) for file in self.distinct_files)]

    def about(self) -> dict[str, Any]:
        """What is shown of it."""
        return {
            "version": self.at,
            "sha256": self.sha256,
            "files": len(self.files),
            "size_bytes": sum(file.size_bytes for file in self.files),
            "signed_by": self.signed_by,
            "refused_by": list(self.refused_by),
        }


Move = dict[str, Any]
"""One move of a channel, as `puller.MOVE` shapes it: `sequence`, 1 for the first and one more each time; `version`,
what it points to from then on, and `version_sha256`, the digest of its body; `reason`; `restores`, of a rollback the
sequence of the move that it goes back to; `moved`, when, by the mover's clock, for people; `write`, the write's own id.
"""


class Channel(StoredRecord):
    """A pointer with its history, newest move last. Its sequence rises by one with every move, a rollback's too, so
    that a reader that has seen 7 can refuse 6: an old pointer that somebody put back.
    """

    kind = "channel"

    @property
    def moves(self) -> list[Move]:
        """All that it remembers, oldest first, at least one; the last is where it points."""
        return list(self.body["moves"])

    @property
    def head(self) -> Move:
        """The last move."""
        return self.moves[-1]

    def points_to(self, version: Version, key: SigningKey | None) -> bool:
        """Whether a move there would change nothing: it is there, and is signed by the key if there is one."""
        head = self.head
        if (head["version"], head["version_sha256"]) != (version.at, version.sha256):
            return False
        return key is None or self.is_signed_by(key)

    def about(self) -> dict[str, Any]:
        """What is shown of it."""
        head = self.head
        return {
            "channel": self.at,
            "version": head["version"],
            "sequence": head["sequence"],
            "moved": head["moved"],
            "reason": head["reason"],
            "signed_by": self.signed_by,
        }


# ------------------------------------------------------------------------------
# What a bundle store holds, as JSON, without changing it.


def _is_record(name: str) -> bool:
    bundle, _, rest = name.partition("/")
    return puller.fits(bundle, puller.NAME) and rest.startswith(("versions/", "channels/"))


def bundles_in(bundle_store: Store) -> list[dict[str, Any]]:
    """Every bundle with its channels and the number of its versions; records are read of channels alone."""
    names = [entry.name.removesuffix(".json") for entry in bundle_store.entries("") if _is_record(entry.name)]
    bundles = []
    for name, own in groupby(sorted(map(PurePath, names)), lambda path: path.parts[0]):
        num_versions = 0
        channels = []
        for path in own:
            if path.parts[1] == "versions":
                num_versions += 1
            else:
                channels.append(Channel.load(bundle_store, name, path.name).about())
        bundles.append({"name": name, "versions": num_versions, "channels": channels})
    return bundles


def names_in(bundle_store: Store, name: str, kind: Literal["channels", "versions"]) -> list[str]:
    """The names of a bundle's channels or versions; none is read."""
    return sorted(PurePath(entry.name).stem for entry in bundle_store.entries(f"{name}/{kind}"))


def _hint(name: str, known: Iterable[str]) -> str:
    """` Did you mean stable?` for `stabel`; empty where nothing known is similar."""
    from relabel.manifests.specs import nearest  # brings pydantic, which a pull does without

    meant = nearest(name, sorted(known))
    return f" Did you mean {meant}?" if meant else ""


def check_bundle(bundle_store: Store, name: str) -> None:
    """
    Raises:
        InputError: there is no bundle of that name.
    """
    for kind in ("versions", "channels"):
        if any(True for _ in bundle_store.entries(f"{name}/{kind}")):
            return
    raise _no_bundle(bundle_store, name)


def _no_bundle(bundle_store: Store, name: str) -> InputError:
    return InputError(
        f"{bundle_store.url}: no bundle {name} there. See what there is: relabel list {shlex.quote(bundle_store.url)}; "
        f"or, if {name} is a bundle store itself: relabel list {shlex.quote(f'{bundle_store.url}/{name}')}"
    )


def bundle_in(bundle_store: Store, name: str) -> dict[str, Any]:
    """One bundle: its versions, newest first, and its channels with their history.

    Raises:
        InputError: there is none of that name.
    """
    versions = Version.load_all(bundle_store, name)
    channels = Channel.load_all(bundle_store, name)
    if not versions and not channels:
        raise _no_bundle(bundle_store, name)
    return {
        "name": name,
        "versions": [{**version.about(), "channels": _pointing_to(version, channels)} for version in versions],
        "channels": [{**channel.about(), "moves": channel.moves} for channel in channels],
    }


def _pointing_to(version: Version, channels: Sequence[Channel]) -> list[str]:
    return [channel.at for channel in channels if channel.head["version"] == version.at]


def version_in(bundle_store: Store, address: Address) -> dict[str, Any]:
    """One version: its files, and its own manifest.

    Raises:
        InputError: neither a channel nor a version of that name.
        ManifestError: its manifest is not the one published.
    """
    at = address.at or STABLE
    channel = Channel.find(bundle_store, address.name, at)
    version = Version.load(bundle_store, address.name, channel.head["version"] if channel else at)
    return {
        **version.about(),
        "channel": channel.about() if channel else None,
        "list": plain(version.files),
        "facts": facts_of(bundle_store, version),
    }


def facts_of(bundle_store: Store, version: Version) -> dict[str, Any]:
    """A published version's own manifest, without its files.

    Raises:
        ManifestError: its manifest is not the one published.
    """
    sha256 = next(file.sha256 for file in version.files if file.path == MANIFEST_NAME)
    where = f"{bundle_store.url}/{object_name(sha256)}"
    data = b""
    with contextlib.suppress(FileNotFoundError):
        data = bundle_store.read_tagged(object_name(sha256)).data
    if sha256_bytes(data) != sha256:
        raise ManifestError(f"{where}: is missing, or not the manifest that was published. Publish the bundle again.")
    return {key: value for key, value in read_manifest(data, where).items() if key != "files"}


# ------------------------------------------------------------------------------
# From a bundle to a version that a channel points to: objects first, each proven, then the version's record, then the
# pointer.
#
# Whatever is killed or lost on the way, a version's record exists only when all its objects are whole, and a pointer
# points only to a version whose record exists. The same command again does what is left.


UPLOAD_TRIES = 3
"""Uploads of one file before a bundle store that keeps holding other bytes is given up."""
HISTORY_KEPT = 200
"""Moves that a pointer remembers; at 300 bytes each it stays a small object."""


class Published(NamedTuple):
    """What a publish did.

    Args:
        uploaded: objects that were uploaded; the rest was there.
        channel: the pointer afterwards, None if none was asked for.
        has_changed: whether anything was written at all.
    """

    version: Version
    uploaded: list[File]
    channel: Channel | None
    has_changed: bool


def publish(
    bundle: Bundle,
    bundle_store: Store,
    progress: Progress,
    *,
    name: str | None = None,
    version: str | None = None,
    channel: str | None = None,
    key: SigningKey | None = None,
    rereads: bool = False,
    is_anyway: bool = False,
    failed_audits: Mapping[Path, Sequence[str]] | None = None,
) -> Published:
    """Make a bundle a version, and point a channel at it if one is given.

    Args:
        bundle: whose bytes were just checked against its manifest.
        name: under which name; the bundle's own by default.
        version: instead of the first digits of its manifest's sha256.
        channel: to be moved there.
        key: to sign version and pointer with.
        rereads: prove every object by reading it back, those of a published version too, and repair what is damaged.
        is_anyway: point the channel at a student that beats no baseline or failed an audit, too.
        failed_audits: gates that it failed, by audit; kept with the version, as the baselines that it does not beat.
    Raises:
        GateError: a channel is to be moved to a student that is no better than a baseline or failed an audit; names all
            that refuses it, and nothing was uploaded.
        ManifestError: the version is there with other contents.
        ChannelMovedError: another process moved the channel since this call began; the version is published anyway.
        LockHeldError: gc is removing something that this version needs.
        StoreError: store or disk fail.
    """
    failed_audits = failed_audits or {}
    below = _below_baselines(bundle.facts)
    if channel is not None and not is_anyway:
        reasons = _below_reasons(below)
        reasons += [f"{path} failed: {'; '.join(gates)}" for path, gates in failed_audits.items()]
        _refuse(reasons, str(bundle.folder), "Nothing was uploaded, and the channel is where it was.")
    name = check_name(name or bundle.name, "name")
    at = check_name(version or bundle.version, "version")
    files = [file._asdict() for file in bundle.all_files]
    failed_gates = chain.from_iterable(failed_audits.values())
    remarks = tuple(_as_remark(text) for text in [*failed_gates, *below])
    wanted = Version({"kind": Version.kind, "name": name, "version": at, "files": files}, refused_by=remarks)
    # read first, so that a move made during a long upload is not overruled
    pointer = None if channel is None else _find_channel(bundle_store, name, channel, key)
    if Channel.find(bundle_store, name, at) is not None:
        raise InputError(f"{bundle_store.url}/{name}: {at} is a channel there. Give another --version.")
    spare(bundle_store, wanted.names)
    published = Version.find(bundle_store, name, at)
    _check_same(bundle_store, published, wanted)
    sizes = bundle_store.sizes(wanted.names[1:])
    uploaded = []
    with translate_errors("publish", bundle.folder):
        for file in wanted.distinct_files:
            is_there = sizes[object_name(file.sha256)] == file.size_bytes
            is_vouched = is_there and published is not None and not rereads
            if is_vouched:
                continue
            was_uploaded = _upload(
                bundle_store,
                bundle,
                file,
                progress,
                is_there=is_there,
                rereads=rereads,
            )
            if was_uploaded:
                uploaded.append(file)
    failpoints.hit("after_objects")
    has_changed = _write_version(bundle_store, wanted, published, key) or bool(uploaded)
    failpoints.hit("after_version")
    if channel is not None and (pointer is None or not pointer.points_to(wanted, key)):
        pointer = _move(
            bundle_store,
            channel,
            pointer,
            wanted,
            "publish",
            key=key,
        )
        has_changed = True
    return Published(wanted, uploaded, pointer, has_changed)


def _upload(
    bundle_store: Store, bundle: Bundle, file: File, progress: Progress, *, is_there: bool, rereads: bool
) -> bool:
    """See to it that the bundle store holds a file, whole; whether it had to be uploaded.

    An object that is there but not vouched for by a version's record may be what a killed or broken publisher left: it
    is proven too.

    Raises:
        StoreError: the bundle store keeps holding other bytes than it was given.
    """
    failpoints.hit("before_object")
    name = object_name(file.sha256)
    wanted = Held(file.size_bytes, file.sha256)

    def on_upload(count: int) -> None:
        failpoints.hit("during_upload")
        progress(f"uploading {file.path}", count)

    def on_check(_count: int) -> None:
        progress("checking", 0)

    def is_whole() -> bool:
        try:
            return bundle_store.holds(name, wanted, on_check, rereads=rereads)
        except FileNotFoundError:
            return False

    if is_there and is_whole():
        return False
    for _ in range(UPLOAD_TRIES):
        bundle_store.put_file(name, bundle.folder / file.path, wanted, on_upload)
        if is_whole():
            failpoints.hit("after_object")
            return True
    raise StoreError(
        f"{bundle_store.url}/{name}: after {UPLOAD_TRIES} uploads the bundle store still holds other bytes than "
        f"{file.path}. Check its disk."
    )


def _check_same(bundle_store: Store, published: Version | None, version: Version) -> None:
    """Refuse to give one version two contents."""
    if published is not None and published.sha256 != version.sha256:
        raise ManifestError(
            f"{bundle_store.url}/{version.name}: version {version.at} is there with other contents, and versions "
            "never change. Give another --version, or none: then the contents name it."
        )


def _write_version(bundle_store: Store, version: Version, published: Version | None, key: SigningKey | None) -> bool:
    """Write a version's record if there is none, and add our signature if it lacks it, and what refuses it now;
    whether anything was written.
    """
    for _ in range(_SWAPS):
        _check_same(bundle_store, published, version)
        wanted = published or version
        if version.refused_by and wanted.refused_by != version.refused_by:
            wanted = replace(wanted, refused_by=version.refused_by)
        signed = wanted.signed(key)
        if signed is published:
            return False
        if signed.write(bundle_store, published):
            return True
        published = Version.find(bundle_store, version.name, version.at)
    raise TransientError(f"{bundle_store.url}/{version.path}: others keep signing it. Run the same command again.")


def _as_remark(text: str) -> str:
    """As a record holds it: ASCII of one line, 100 characters at most."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)[:100]


def _below_baselines(facts: Mapping[str, Any]) -> list[str]:
    """Where the student is no better than a baseline on its test split, by the figures that a bundle carries; older
    bundles have none.
    """
    test = _test_figures(facts)
    if test is None:
        return []
    from relabel.manifests.metrics.evaluation import Baselines, not_beaten  # brings numpy, which a move does without

    return not_beaten(test["student"], checked(Baselines, test["baselines"]))


def baselines_within_chance(facts: Mapping[str, Any]) -> list[str]:
    """Where the student is better than a baseline on its test split by no more than chance explains."""
    test = _test_figures(facts)
    if test is None:
        return []
    from relabel.manifests.metrics.evaluation import Baselines, not_shown_to_beat

    return not_shown_to_beat(test["student"], test.get("intervals"), checked(Baselines, test["baselines"]))


def _test_figures(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    test: Any = facts
    for name in ("lineage", "student", "metrics", "test"):
        test = test.get(name) if isinstance(test, dict) else None
    return test if isinstance(test, dict) and test.get("baselines") else None


def _below_reasons(below: Sequence[str]) -> list[str]:
    return [f"on its test split the student is no better than a baseline: {'; '.join(below)}"] if below else []


def _refuse(reasons: Sequence[str], where: str, outcome: str) -> None:
    """
    Args:
        reasons: all that speaks against pointing a channel at it.
        outcome: how things are after a refusal, a sentence.
    Raises:
        GateError: there is one.
    """
    if reasons:
        raise GateError(
            f"{where}: {'. '.join(reasons)}. Train a better student, or point the channel at it with --anyway. "
            f"{outcome}"
        )


class Moved(NamedTuple):
    """A channel's pointer after a move, the version that it points to, and whether it was moved (else it was there
    already).
    """

    channel: Channel
    version: Version
    has_moved: bool = True


def set_channel(
    bundle_store: Store, name: str, channel: str, version: str, key: SigningKey | None, *, is_anyway: bool = False
) -> Moved:
    """Point a channel at a version that is published and whole.

    Args:
        is_anyway: point it at a student that beats no baseline, too.
    Raises:
        GateError: the student is no better than a baseline; names all that the version's record holds against it, too.
            The channel is where it was.
        InputError: no such version, or a version has the channel's name.
        ManifestError: the version is not whole.
        ChannelMovedError: another process moved it meanwhile.
    """
    pointer = _find_channel(bundle_store, name, channel, key)
    wanted = Version.load(bundle_store, name, version)
    if pointer is not None and pointer.points_to(wanted, key):
        return Moved(pointer, wanted, has_moved=False)
    spare(bundle_store, wanted.names)
    check_whole(bundle_store, wanted)
    if not is_anyway:
        below = _below_baselines(facts_of(bundle_store, wanted))
        reasons = _below_reasons(below)
        failed = [remark for remark in wanted.refused_by if remark not in map(_as_remark, below)]
        if below and failed:  # an audit alone refuses no move: going back has to work
            reasons.append(f"when it was published, this refused it, too: {'; '.join(failed)}")
        _refuse(reasons, f"{bundle_store.url}/{name}: version {version}", "The channel is where it was.")
    moved = _move(
        bundle_store,
        channel,
        pointer,
        wanted,
        "set",
        key=key,
    )
    return Moved(moved, wanted)


def roll_back(bundle_store: Store, name: str, channel: str, key: SigningKey | None) -> Moved:
    """Point a channel at the version that it pointed to before; again: one further back. A rollback of a rollback goes
    further back, never forth again: a move that restored an earlier one counts as that earlier one.

    Raises:
        GateError: its history holds nothing earlier, or is not signed by the key given.
        ManifestError: that version is not whole any more.
        ChannelMovedError: another process moved it meanwhile.
    """
    pointer = _find_channel(bundle_store, name, channel, key) or Channel.load(bundle_store, name, channel)
    where = f"{bundle_store.url}/{name}@{channel}"
    head = pointer.head
    if key is not None and not pointer.is_signed_by(key):
        raise GateError(f"{where}: its history is not signed by the key given, so it may be forged. {_SET}")
    before = head["restores"] or head["sequence"]
    now = head["version_sha256"]
    earlier = [move for move in pointer.moves if move["sequence"] < before and move["version_sha256"] != now]
    if not earlier:
        raise GateError(f"{where}: points to {head['version']}, and its history holds nothing earlier. {_SET}")
    target = earlier[-1]
    version = Version.load(bundle_store, name, target["version"])
    if version.sha256 != target["version_sha256"]:
        raise GateError(f"{where}: version {version.at} is no longer what it was when it pointed there. {_SET}")
    spare(bundle_store, version.names)
    check_whole(bundle_store, version)
    moved = _move(
        bundle_store,
        channel,
        pointer,
        version,
        "rollback",
        key=key,
        restores=target["restores"] or target["sequence"],
    )
    return Moved(moved, version)


_SET = "Name the version: relabel channel set."


def _find_channel(bundle_store: Store, name: str, channel: str, key: SigningKey | None) -> Channel | None:
    """A channel that is to be moved, None where there is none yet.

    Raises:
        InputError: a version has its name.
        UsageError: it can't be a name; the pointer is signed and no key was given: everybody who pulls with a key would
            refuse it from then on.
    """
    where = f"{bundle_store.url}/{name}"
    if bundle_store.size(Version.path_of(name, check_name(channel, "channel"))) is not None:
        raise InputError(f"{where}: {channel} is a version there, so no channel can be called that.")
    pointer = Channel.find(bundle_store, name, channel)
    if pointer is not None and pointer.signatures and key is None:
        raise UsageError(
            f"{where}@{channel}: this channel is signed. Give --sign-key, or pulls with a key will refuse the move."
        )
    return pointer


def check_whole(bundle_store: Store, version: Version) -> None:
    """Check that every object of a version is there with its size; reads no object.

    Raises:
        ManifestError: one is missing or cut off.
    """
    sizes = bundle_store.sizes(version.names[1:])
    for file in version.files:
        size_bytes = sizes[object_name(file.sha256)]
        if size_bytes != file.size_bytes:
            what = "is missing" if size_bytes is None else f"holds {size_bytes:,} bytes of {file.size_bytes:,}"
            raise ManifestError(
                f"{bundle_store.url}/{version.name}: version {version.at} is not whole: {file.path} "
                f"({object_name(file.sha256)}) {what}. Publish the bundle again."
            )


def _move(
    bundle_store: Store,
    channel: str,
    pointer: Channel | None,
    version: Version,
    reason: Literal["publish", "set", "rollback"],
    *,
    key: SigningKey | None,
    restores: int | None = None,
) -> Channel:
    """Point a channel at a version that is whole, if it is still as it was read.

    With a key, a history that this key did not sign is dropped and only its sequence goes on: signing it would make
    true what anybody may have written. A write carries an id of its own, so that a mover whose reply was lost finds its
    move.

    Args:
        pointer: as it was read, None where there was none.
        restores: a rollback's: the sequence of the move that it goes back to.
    Raises:
        ChannelMovedError: another mover was first.
    """
    moves = pointer.moves if pointer and (key is None or pointer.is_signed_by(key)) else []
    move = {
        "sequence": pointer.head["sequence"] + 1 if pointer else 1,
        "version": version.at,
        "version_sha256": version.sha256,
        "reason": reason,
        "restores": restores,
        "moved": datetime.now(UTC).isoformat(timespec="seconds"),
        "write": secrets.token_hex(8),
    }
    history = [*moves, move][-HISTORY_KEPT:]
    moved = Channel({"kind": Channel.kind, "name": version.name, "channel": channel, "moves": history}).signed(key)
    failpoints.hit("before_channel")
    was_first = moved.write(bundle_store, pointer)
    failpoints.hit("after_channel")
    now = moved if was_first else Channel.load(bundle_store, version.name, channel)
    if move["write"] not in [known["write"] for known in now.moves]:
        raise ChannelMovedError(
            f"{bundle_store.url}/{version.name}@{channel}: another process moved it to {now.head['version']} (sequence "
            f"{now.head['sequence']}) in the meantime. Nothing is lost: check that this is what you want, then run the "
            "same command again."
        )
    return moved


# ------------------------------------------------------------------------------
# Garbage: versions that no channel points to any more, and objects that no version names.
#
# Kept are: every version among the last moves of a channel, every version and object younger than the grace time, and
# every object of a kept version. The rest leaves in two steps. A name is first marked, in one small record that is
# replaced by compare and swap; a later `gc` claims it, and only then deletes, versions before objects. Who is about to
# rely on a name (a publisher that finds an object already there, a channel set to an old version) first takes it off
# the list. So a name is either spared or claimed, never both; and no clock but the bundle store's decides.


GC_NAME = "gc.json"
SETTLE_S = 24 * 3600.0
"""How long a name stays marked before it is deleted, at most: no publish or channel move may take longer from its
begin to its end.
"""
TAKE_OVER_S = 900.0
"""A `gc` that has not renewed its claim for so long is dead."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one `gc` is deleting, or was when it was killed.

    Args:
        owner: made up by that `gc`.
        renewed_s: when it last reported that it is alive, by the bundle store's clock.
    """

    owner: str
    renewed_s: float
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GcMarks:
    """The list.

    Args:
        since: name → when it was marked, seconds since the epoch by the bundle store's clock.
    """

    since: dict[str, float] = field(default_factory=dict)
    claim: Claim | None = None


def load_gc_marks(bundle_store: Store) -> tuple[GcMarks, str]:
    """The list and its tag; an empty one without a tag where no `gc` ran yet.

    Raises:
        ManifestError: it is damaged.
    """
    try:
        data, tag, _ = bundle_store.read_tagged(GC_NAME)
    except FileNotFoundError:
        return GcMarks(), ""
    where = f"{bundle_store.url}/{GC_NAME}"
    with translate_refusals():
        values = puller.strict_json(data, where)
    try:
        return checked(GcMarks, {"since": values.get("since"), "claim": values.get("claim")}), tag
    except ValueError as exc:
        raise ManifestError(
            f"{where}: not what gc writes ({fault_of(exc)}). Move it away; the next gc starts over."
        ) from exc


def change_gc_marks(bundle_store: Store, change: Callable[[GcMarks], GcMarks]) -> GcMarks:
    """Replace the list by what `change` makes of it, again if others change it meanwhile.

    Args:
        change: pure; may raise, and then nothing is written.
    Raises:
        TransientError: others keep changing it.
    """
    for _ in range(_SWAPS):
        marks, tag = load_gc_marks(bundle_store)
        wanted = change(marks)
        if wanted == marks:
            return marks
        data = readable_json({"kind": "gc", "format": 1, **plain(wanted)})
        is_written = bundle_store.replace(GC_NAME, data, tag) if tag else bundle_store.create(GC_NAME, data)
        if is_written or load_gc_marks(bundle_store)[0] == wanted:  # or its reply was lost
            return wanted
    raise TransientError(f"{bundle_store.url}/{GC_NAME}: others keep changing it. Run the same command again.")


def spare(bundle_store: Store, names: Iterable[str]) -> None:
    """Take names off the list, before anything relies on them.

    Raises:
        LockHeldError: `gc` is deleting one of them right now.
    """
    wanted = set(names)

    def without(marks: GcMarks) -> GcMarks:
        claimed = wanted & set(marks.claim.names) if marks.claim else set()
        if claimed:
            raise LockHeldError(
                f"{bundle_store.url}: gc is removing {min(claimed)}. Try again when it has ended; if it was killed, "
                f"`relabel gc {shlex.quote(bundle_store.url)} --delete` ends its work."
            )
        return replace(marks, since={name: since for name, since in marks.since.items() if name not in wanted})

    change_gc_marks(bundle_store, without)


def find_garbage(bundle_store: Store, *, keep: int, grace_s: float) -> tuple[list[Entry], int, int]:
    """Find what nothing points to.

    Args:
        keep: how many of a channel's last moves keep their versions.
        grace_s: what is younger stays, seconds.
    Returns:
        The garbage, versions first, and how many versions and objects stay.
    Raises:
        ManifestError: a record can't be read; nothing is garbage while one can't.
    """
    now_s = bundle_store.now_s()
    entries = list(bundle_store.entries(""))  # all are listed before a record is read: what that one adds is young
    pointed = set[tuple[str, str]]()
    live = set[str]()
    for name in {entry.name.partition("/")[0] for entry in entries if _is_record(entry.name)}:
        for channel in Channel.load_all(bundle_store, name):
            pointed |= {(name, move["version"]) for move in channel.moves[-keep:]}
    versions = [entry for entry in entries if _is_record(entry.name) and "/versions/" in entry.name]
    dead_versions = []
    for entry in versions:
        version = Version.load(bundle_store, entry.name.partition("/")[0], PurePath(entry.name).stem)
        if (version.name, version.at) in pointed or now_s - entry.written_s < grace_s:
            live |= set(version.names)
        else:
            dead_versions.append(entry)
    objects = [entry for entry in entries if entry.name.startswith(f"{OBJECTS}/")]
    dead_objects = [entry for entry in objects if entry.name not in live and now_s - entry.written_s >= grace_s]
    return (
        [*sorted(dead_versions), *sorted(dead_objects)],
        len(versions) - len(dead_versions),
        len(objects) - len(dead_objects),
    )


def collect(bundle_store: Store, *, keep: int, grace_s: float, deletes: bool) -> dict[str, Any]:
    """Mark what is garbage now, delete what was marked long enough ago and still is.

    Args:
        deletes: otherwise only report what would happen.
    Returns:
        `kept_versions` and `kept_objects`, how many stay; `marked`, names that a later gc will delete; `deleted`, names
        that were deleted, or would be, and `deleted_bytes`; `swept`, how many leavings of killed uploads were removed.
    Raises:
        LockHeldError: another gc is running.
    """
    garbage, kept_versions, kept_objects = find_garbage(bundle_store, keep=keep, grace_s=grace_s)
    now_s = bundle_store.now_s()
    owner = secrets.token_hex(8)

    def mark(before: GcMarks) -> GcMarks:
        if before.claim is not None and now_s - before.claim.renewed_s < TAKE_OVER_S:
            raise LockHeldError(
                f"{bundle_store.url}: another gc is running, or was killed less than {TAKE_OVER_S / 60:.0f} minutes "
                "ago. Try again later."
            )
        since = {entry.name: before.since.get(entry.name, now_s) for entry in garbage}
        names = list(before.claim.names) if before.claim else []
        names += [name for name, when in since.items() if now_s - when >= min(grace_s, SETTLE_S)]
        claimed = tuple(dict.fromkeys(names))
        since = {name: when for name, when in since.items() if name not in claimed}
        return GcMarks(since, Claim(owner, now_s, claimed) if claimed else None)

    marks = change_gc_marks(bundle_store, mark) if deletes else mark(load_gc_marks(bundle_store)[0])
    names = list(marks.claim.names) if marks.claim else []
    swept = 0
    if deletes:
        _delete(bundle_store, owner, names)
        swept = bundle_store.sweep_uploads(max(grace_s, SETTLE_S))
    sizes = {entry.name: entry.size_bytes for entry in garbage}
    return {
        "kept_versions": kept_versions,
        "kept_objects": kept_objects,
        "marked": sorted(marks.since),
        "deleted": names,
        "deleted_bytes": sum(sizes.get(name, 0) for name in names),
        "swept": swept,
    }


def _delete(bundle_store: Store, owner: str, names: list[str]) -> None:
    """Delete what is claimed, and give the claim back.

    Raises:
        LockHeldError: another gc took over.
    """
    renewed = time.monotonic()
    for name in names:
        if time.monotonic() - renewed > 300.0:
            now_s = bundle_store.now_s()
            renewed = time.monotonic()
            change_gc_marks(bundle_store, partial(_with_claim, owner=owner, now_s=now_s))
        bundle_store.remove(name)
    if names:
        change_gc_marks(bundle_store, partial(_with_claim, owner=owner, now_s=None))


def _with_claim(marks: GcMarks, owner: str, now_s: float | None) -> GcMarks:
    """The list with our claim renewed; None: without it, if it is still there."""
    if marks.claim is None or marks.claim.owner != owner:
        if now_s is None:
            return marks
        raise LockHeldError("another gc took over while this one slept. Nothing is lost.")
    return replace(marks, claim=None if now_s is None else replace(marks.claim, renewed_s=now_s))
