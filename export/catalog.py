"""What a bundle store holds, listed as JSON without changing it: bundles, versions, and where channels point."""

from __future__ import annotations

from collections import Counter
from typing import Any

from relabel.export.bundles import read_manifest
from relabel.export.puller import STABLE, Address
from relabel.export.store import Channel, Version, channels_of, find_channel, is_name, load_version, object_name
from relabel.manifests.errors import InputError, ManifestError
from relabel.manifests.records import plain, sha256_bytes
from relabel.manifests.store import Store


def bundles_in(bundle_store: Store) -> list[dict[str, Any]]:
    """Every bundle with its channels and the number of its versions; records are read of channels alone."""
    versions = Counter[str]()
    for entry in bundle_store.entries(""):
        name, _, rest = entry.name.partition("/")
        if is_name(name) and rest.startswith(("versions/", "channels/")):
            versions[name] += rest.startswith("versions/")
    return [
        {
            "name": name,
            "versions": versions[name],
            "channels": [_about_channel(one) for one in channels_of(bundle_store, name)],
        }
        for name in sorted(versions)
    ]


def bundle_in(bundle_store: Store, name: str) -> dict[str, Any]:
    """One bundle: its versions, newest first, and its channels with their history.

    Raises:
        InputError: there is none of that name.
    """
    entries = sorted(bundle_store.entries(f"{name}/versions"), key=lambda entry: (-entry.written_s, entry.name))
    channels = channels_of(bundle_store, name)
    if not entries and not channels:
        raise InputError(
            f"{bundle_store.url}: no bundle {name} there. See what there is: relabel list {bundle_store.url}; or, if "
            f"{name} is a bundle store itself: relabel list {bundle_store.url}/{name}"
        )
    versions = [
        load_version(bundle_store, name, entry.name.removeprefix(f"{name}/versions/").removesuffix(".json"))
        for entry in entries
    ]
    pointed = [(channel.channel, channel.head.version) for channel in channels]
    return {
        "name": name,
        "versions": [
            {**_about(version), "channels": [name for name, at in pointed if at == version.version]}
            for version in versions
        ],
        "channels": [{**_about_channel(channel), "moves": plain(channel.moves)} for channel in channels],
    }


def version_in(bundle_store: Store, address: Address) -> dict[str, Any]:
    """One version: its files, and what its own manifest says of it.

    Raises:
        InputError: neither a channel nor a version of that name.
        ManifestError: its manifest is not the one published.
    """
    at = address.at or STABLE
    channel = find_channel(bundle_store, address.name, at)
    version = load_version(bundle_store, address.name, channel.head.version if channel else at)
    manifest = version.manifest
    name = object_name(manifest.sha256)
    try:
        data = bundle_store.read_tagged(name).data
    except FileNotFoundError as exc:
        raise ManifestError(
            f"{bundle_store.url}/{name}: the manifest of version {version.version} is missing. Publish the bundle "
            "again."
        ) from exc
    if sha256_bytes(data) != manifest.sha256:
        raise ManifestError(
            f"{bundle_store.url}/{name}: is not the manifest that was published. Publish the bundle again."
        )
    facts, _ = read_manifest(data, f"{bundle_store.url}/{name}")
    return {
        **_about(version),
        "channel": _about_channel(channel) if channel else None,
        "list": plain(version.files),
        "facts": {key: value for key, value in facts.items() if key != "files"},
    }


def _about(version: Version) -> dict[str, Any]:
    return {
        "version": version.version,
        "sha256": version.sha256,
        "files": len(version.files),
        "size_bytes": version.size_bytes,
        "signed_by": [signature["key_id"] for signature in version.signatures],
    }


def _about_channel(channel: Channel) -> dict[str, Any]:
    head = channel.head
    return {
        "channel": channel.channel,
        "version": head.version,
        "sequence": head.sequence,
        "moved": head.moved,
        "reason": head.reason,
        "signed_by": [signature["key_id"] for signature in channel.signatures],
    }
