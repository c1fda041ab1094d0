"""What a bundle store holds, told without touching it: bundles, their versions, and where their channels stand."""

from __future__ import annotations

from typing import Any

from export.bundles import read_manifest
from export.channels import Channel, channels_of, find_channel
from export.pulling import DEFAULT_CHANNEL
from export.versions import Address, Version, is_name, load_version, object_name
from manifests.digests import sha256_bytes
from manifests.errors import InputError, ManifestError
from manifests.storage.bundle_store_ports import BundleStore


def bundles_in(bundle_store: BundleStore) -> list[dict[str, Any]]:
    """Every bundle with its channels and the number of its versions; records are read of channels alone."""
    found = []
    for name in bundle_store.folders():
        if not is_name(name):
            continue
        versions = sum(1 for _ in bundle_store.entries(f"{name}/versions"))
        channels = channels_of(bundle_store, name)
        if versions or channels:
            found.append({"name": name, "versions": versions, "channels": [_plain_channel(channel) for channel in channels]})
    return found


def bundle_in(bundle_store: BundleStore, name: str) -> dict[str, Any]:
    """One bundle: its versions, newest first, and its channels with their history.

    Raises:
        InputError: there is none of that name.
    """
    entries = sorted(bundle_store.entries(f"{name}/versions"), key=lambda entry: (-entry.written_s, entry.name))
    channels = channels_of(bundle_store, name)
    if not entries and not channels:
        raise InputError(f"{bundle_store.url}: no bundle {name} there. See what there is: relabel list {bundle_store.url}.")
    versions = [load_version(bundle_store, name, entry.name.removeprefix(f"{name}/versions/").removesuffix(".json")) for entry in entries]
    return {
        "name": name,
        "versions": [
            {**_plain_version(version), "channels": [channel.channel for channel in channels if channel.head.version == version.version]}
            for version in versions
        ],
        "channels": [{**_plain_channel(channel), "moves": channel.body["moves"]} for channel in channels],
    }


def version_in(bundle_store: BundleStore, address: Address) -> dict[str, Any]:
    """One version: its files, and what its own manifest says of it.

    Raises:
        InputError: neither a channel nor a version of that name.
        ManifestError: its manifest is not the one published.
    """
    at = address.at or DEFAULT_CHANNEL
    channel = find_channel(bundle_store, address.name, at)
    version = load_version(bundle_store, address.name, channel.head.version if channel else at)
    manifest = version.manifest
    name = object_name(manifest.sha256)
    try:
        data = bundle_store.read(name).data
    except FileNotFoundError as exc:
        raise ManifestError(
            f"{bundle_store.url}/{name}: the manifest of version {version.version} is missing. Publish the bundle again."
        ) from exc
    if sha256_bytes(data) != manifest.sha256:
        raise ManifestError(f"{bundle_store.url}/{name}: is not the manifest that was published. Publish the bundle again.")
    facts, _ = read_manifest(data, f"{bundle_store.url}/{name}")
    return {
        **_plain_version(version),
        "channel": _plain_channel(channel) if channel else None,
        "list": [file._asdict() for file in version.files],
        "facts": {key: value for key, value in facts.items() if key != "files"},
    }


def _plain_version(version: Version) -> dict[str, Any]:
    return {
        "version": version.version,
        "sha256": version.sha256,
        "files": len(version.files),
        "size_bytes": version.size_bytes,
        "signed_by": [signature["key_id"] for signature in version.signatures],
    }


def _plain_channel(channel: Channel) -> dict[str, Any]:
    head = channel.head
    return {
        "channel": channel.channel,
        "version": head.version,
        "sequence": head.sequence,
        "moved": head.moved,
        "reason": head.reason,
        "signed_by": [signature["key_id"] for signature in channel.signatures],
    }
