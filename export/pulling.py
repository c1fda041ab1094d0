"""From a channel to a folder that serves: what may be trusted is decided first, then files come in, then one link is
switched.

Nothing that serves is touched until the new version lies beside it, whole and proven. The same command again resumes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from relabel.export.addresses import Address
from relabel.export.channels import CHANNEL_KIND, Channel, find_channel, left_by_rollback
from relabel.export.destinations import VERSIONS, Destination, Seen, ServedVersion, State
from relabel.export.downloads import Progress, Unpacked, fetch_version
from relabel.export.signatures import TrustedKeys
from relabel.export.versions import VERSION_KIND, Version, find_version, load_version
from relabel.manifests import failpoints
from relabel.manifests.errors import GateError, InputError, ManifestError
from relabel.manifests.storage.bundle_store_ports import BundleStore
from relabel.manifests.storage.disk_errors import translate_errors

DEFAULT_CHANNEL = "stable"


class PullOptions(NamedTuple):
    """What a puller may ask for.

    Args:
        keys: public keys; then version and channel must be signed by one of them.
        keep: versions that stay in the destination, the serving one included.
        lifts_hold: switch although somebody rolled back from this very move of the channel.
        checks_bytes: read every file that serves, those too whose stamp says that nothing changed.
        checks_parity: before a switch, ask the new version's reference pairs here.
    """

    keys: TrustedKeys | None = None
    keep: int = 3
    lifts_hold: bool = False
    checks_bytes: bool = False
    checks_parity: bool = False


class Pulled(NamedTuple):
    """What a pull did.

    Args:
        has_switched: whether another version serves now.
        is_held: nothing was done because somebody rolled back from there.
        fetched_bytes: bytes that came over; the rest was here already.
        repaired: what was wrong with what served, and is put right.
    """

    served: ServedVersion
    has_switched: bool
    is_held: bool
    fetched_bytes: int
    repaired: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """A version that may be trusted, and the pointer that named it."""

    version: Version
    channel: Channel | None

    @property
    def seen(self) -> Seen | None:
        """The channel's move that this is, to be noted; None where a version was named itself."""
        return Seen(self.channel.head.sequence, self.version.sha256) if self.channel else None


def pull(
    bundle_store: BundleStore, address: Address, destination: Destination, options: PullOptions, progress: Progress
) -> Pulled:
    """Let a destination serve what a channel points to, or a version that is named.

    Raises:
        InputError: no such bundle, channel or version; or the destination holds another bundle.
        ManifestError: a record or file is damaged or hostile.
        GateError: unsigned, signed by an untrusted key, older than what was seen already, or with answers that differ.
        MissingExtraError: its answers were to be checked, and onnxruntime is absent.
        LockHeldError: another pull to this destination is at work.
        DiskFullError: no space for it.
        StoreError: store or disk fail.
    """
    with translate_errors("pull to", destination.folder):
        return _pull(bundle_store, address, destination, options, progress)


def _pull(
    bundle_store: BundleStore, address: Address, destination: Destination, options: PullOptions, progress: Progress
) -> Pulled:
    destination.refuse_foreign()
    destination.serving()
    state = destination.state()
    if state is not None and state.name != address.name:
        raise InputError(f"{destination.folder}: holds {state.name}; {address.name} needs a folder of its own.")
    wanted = find_wanted(bundle_store, address, options.keys)
    with destination.pulling():
        state = _remember(destination, address.name, wanted)
        is_held = _is_held(state, wanted) and not options.lifts_hold
        if is_held or (state.served and state.served[0].version_sha256 == wanted.version.sha256):
            return _keep(bundle_store, destination, state, wanted, options, progress, is_held=is_held)
        ready = fetch_version(bundle_store, destination, state, wanted.version, progress)
        if options.checks_parity:
            _check_parity(destination, ready, progress)
        return _switch(destination, ready, wanted, options)


def _check_parity(destination: Destination, ready: Unpacked, progress: Progress) -> None:
    """Refuse a version that answers otherwise here than where it was made; what serves stays.

    Raises:
        GateError: it does.
        ManifestError, MissingExtraError: it can't be asked.
    """
    from relabel.export.reference_answers import check_here  # a pull needs neither numpy nor onnxruntime

    progress("asking the reference pairs", 0)
    check_here(destination.folder / VERSIONS / ready.folder)


def _keep(
    bundle_store: BundleStore,
    destination: Destination,
    state: State,
    wanted: Wanted,
    options: PullOptions,
    progress: Progress,
    *,
    is_held: bool,
) -> Pulled:
    """Leave what serves, after a proof that it is what was pulled; what is damaged is fetched again and takes its place
    in one step.
    """
    served = state.served[0]
    progress("checking what serves", 0)
    proof = destination.prove(served, checks_bytes=options.checks_bytes)
    if not proof.faults:
        destination.remember(state, served, proof)
        destination.tidy(state)
        return Pulled(served, False, is_held, 0)
    repaired = tuple(map(str, proof.faults))
    try:
        version = wanted.version if not is_held else _load_served(bundle_store, state, options.keys)
        ready = fetch_version(bundle_store, destination, state, version, progress)
    except (InputError, ManifestError) as exc:
        raise ManifestError(f"{destination.path_of(served)}: {repaired[0]}, and can't be repaired. {exc}") from exc
    with destination.switching():
        state = destination.reconciled() or state
        if state.served[0].version_sha256 != served.version_sha256:  # somebody rolled back while files came in
            return Pulled(state.served[0], False, True, ready.fetched_bytes)
        served = replace(served, folder=ready.folder)
        state = destination.switch(state, served, options.keep)
    destination.remember(state, served, ready.proof)
    destination.tidy(state)
    return Pulled(served, True, is_held, ready.fetched_bytes, repaired)


def _load_served(bundle_store: BundleStore, state: State, keys: TrustedKeys | None) -> Version:
    """The record of the version that serves though the channel points elsewhere, to repair it by."""
    served = state.served[0]
    version = load_version(bundle_store, state.name, served.version)
    where = f"{bundle_store.url}/{version.name}@{served.version}"
    if version.sha256 != served.version_sha256:
        raise ManifestError(f"{where}: is not the version that was pulled.")
    _check_signed(keys, VERSION_KIND, version, where)
    return version


def find_wanted(bundle_store: BundleStore, address: Address, keys: TrustedKeys | None) -> Wanted:
    """Read what an address names, and check that it may be trusted. A channel goes before a version of the same name.

    Raises:
        InputError: there is nothing of that name.
        ManifestError, GateError: it is not to be trusted.
    """
    at = address.at or DEFAULT_CHANNEL
    where = f"{bundle_store.url}/{address.name}@{at}"
    channel = find_channel(bundle_store, address.name, at)
    if channel is None:
        version = find_version(bundle_store, address.name, at)
        if version is None:
            raise InputError(
                f"{where}: neither a channel nor a version. See what there is: relabel show "
                f"{bundle_store.url}/{address.name}."
            )
        _check_signed(keys, VERSION_KIND, version, where)
        return Wanted(version, None)
    _check_signed(keys, CHANNEL_KIND, channel, where)
    version = load_version(bundle_store, address.name, channel.head.version)
    if version.sha256 != channel.head.version_sha256:
        raise ManifestError(
            f"{where}: the record of version {version.version} is not the one that the channel names. Refused."
        )
    _check_signed(keys, VERSION_KIND, version, where)
    return Wanted(version, channel)


def _check_signed(keys: TrustedKeys | None, kind: str, record: Channel | Version, where: str) -> None:
    if keys is not None:
        keys.check(kind, record.body, record.signatures, f"{where}: the {kind}'s record")


def _remember(destination: Destination, name: str, wanted: Wanted) -> State:
    """Note the newest sequence of the channel and what it left by a rollback, before anything is fetched; refuse an
    older one.
    """
    with destination.switching():
        state = destination.reconciled() or State(name)
        if wanted.channel is None or wanted.seen is None:
            return state
        channel = wanted.channel
        last = state.seen.get(channel.channel)
        _check_not_older(last, wanted.seen, f"{destination.folder}: {name}@{channel.channel}")
        left = left_by_rollback(
            channel, state.left.get(channel.channel, ()), (last.sequence, last.version_sha256) if last else None
        )
        now = replace(
            state,
            seen={**state.seen, channel.channel: wanted.seen},
            left={**state.left, channel.channel: tuple(sorted(left))},
        )
        if now != state:
            failpoints.hit("before_seen")
            destination.write(now)
            failpoints.hit("after_seen")
        return now


def _check_not_older(seen: Seen | None, now: Seen, where: str) -> None:
    if seen is None or now.sequence > seen.sequence or now == seen:
        return
    if now.sequence == seen.sequence:
        raise GateError(
            f"{where}: sequence {now.sequence} pointed to another version when it was last seen. The channel was "
            "overwritten."
        )
    raise GateError(
        f"{where}: downgraded: its sequence is {now.sequence}, and {seen.sequence} was seen already. A rollback would "
        "have a higher one: an old pointer was put back, or the store was restored from a copy. Set the channel "
        "anew until its sequence is higher."
    )


def _is_held(state: State, wanted: Wanted) -> bool:
    if wanted.channel is None or not state.served:
        return False
    return wanted.channel.head.sequence <= state.held.get(wanted.channel.channel, 0)


def _switch(destination: Destination, ready: Unpacked, wanted: Wanted, options: PullOptions) -> Pulled:
    version, channel = wanted.version, wanted.channel
    served = ServedVersion(
        ready.folder,
        version.version,
        version.sha256,
        version.manifest.sha256,
        channel.channel if channel else None,
        channel.head.sequence if channel else None,
    )
    with destination.switching():
        state = destination.reconciled() or State(version.name)
        if _is_held(state, wanted) and not options.lifts_hold:  # somebody rolled back while files came in
            return Pulled(state.served[0], False, True, ready.fetched_bytes)
        if channel is not None and wanted.seen is not None:
            _check_not_older(
                state.seen.get(channel.channel), wanted.seen, f"{destination.folder}: {version.name}@{channel.channel}"
            )
            state = replace(
                state, held={name: sequence for name, sequence in state.held.items() if name != channel.channel}
            )
        was_serving = destination.serving()
        state = destination.switch(state, served, options.keep)
    destination.remember(state, served, ready.proof)
    destination.tidy(state)
    return Pulled(served, was_serving != destination.path_of(served), False, ready.fetched_bytes)
