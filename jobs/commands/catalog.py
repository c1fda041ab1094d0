"""`list` and `show`: what a bundle store holds, and what serves in a folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relabel.jobs.commands.options import output_option
from relabel.jobs.commands.pull import is_destination, show_destination
from relabel.jobs.output import emit, table
from relabel.manifests.errors import UsageError
from relabel.manifests.storage.context import Storage

if TYPE_CHECKING:
    from relabel.export.catalog import ShownBundle, VersionContents


VERSIONS_SHOWN, CHANNELS_SHOWN, FILES_SHOWN, LINE_CHARS = 3, 3, 3, 100
"""What fits into eight lines for a person; JSON has the rest."""


@click.command("list", epilog="Example: relabel list s3://bucket/models")
@click.argument("url", metavar="URL")
@output_option
def list_bundles(url: str, output: str) -> int:
    """List the bundles that are published at a place, and where their channels point."""
    from relabel.export.catalog import bundles_in
    from relabel.manifests.records import plain
    from relabel.manifests.storage.bundle_stores import open_bundle_store

    bundle_store = open_bundle_store(url, Storage())
    found = bundles_in(bundle_store)
    lines = [f"{bundle_store.url}: {len(found)} bundles"]
    for bundle in found:
        channels = ", ".join(f"{one.channel} → {one.version} (sequence {one.sequence})" for one in bundle.channels)
        lines.append(f"  {bundle.name}  {bundle.versions} versions  {channels or 'no channel'}")
    return emit({"url": bundle_store.url, "bundles": plain(found)}, "\n".join(lines), output)


@click.command(epilog="Example: relabel show s3://bucket/models/ecom@stable")
@click.argument("bundle", metavar="URL/NAME[@CHANNEL|@VERSION]|DEST")
@output_option
def show(bundle: str, output: str) -> int:
    """Show a bundle's versions and the history of its channels; with @, one version's files and facts; of a folder that
    was pulled to, what serves there.

    Of DEST, files that changed since they were last proven are read; exits 3 and names them where they are not what was
    pulled. Writes nothing and needs no network. The text is eight lines at most; --output json has all there is.
    """
    if is_destination(bundle):
        return show_destination(Path(bundle), output)
    from relabel.export.addresses import parse_address
    from relabel.export.bundles import MANIFEST_NAME
    from relabel.export.catalog import bundle_in, version_in
    from relabel.manifests.records import plain
    from relabel.manifests.storage.bundle_stores import open_bundle_store

    if (Path(bundle) / MANIFEST_NAME).is_file():
        raise UsageError(
            f"{bundle}: an output, which is in no bundle store. See it: relabel report {shlex.quote(bundle)}"
        )
    address = parse_address(bundle)
    bundle_store = open_bundle_store(address.url, Storage())
    if address.at is None:
        shown = bundle_in(bundle_store, address.name)
        return emit({"url": bundle_store.url, **plain(shown)}, _bundle_text(bundle_store.url, shown), output)
    found = version_in(bundle_store, address)
    text = _version_text(f"{bundle_store.url}/{address.name}", found)
    return emit({"url": bundle_store.url, "name": address.name, **plain(found)}, text, output)


def _bundle_text(url: str, found: ShownBundle) -> str:
    from relabel.jobs.delivery.transfers import size_text

    lines = [f"{url}/{found.name}: {len(found.versions)} versions, newest first"]
    for one in found.versions[:VERSIONS_SHOWN]:
        marks = [*one.channels, *(f"signed by {key}" for key in one.signed_by)]
        lines.append(f"  {one.version}  {one.files} files, {size_text(one.size_bytes)}  {', '.join(marks)}".rstrip())
    channels = sorted(found.channels, key=lambda channel: channel.moved, reverse=True)
    for channel in channels[:CHANNELS_SHOWN]:
        signed = "".join(f", signed by {key}" for key in channel.signed_by)
        lines.append(
            f"channel {channel.channel}: {channel.version}, move {channel.sequence} ({channel.reason}) of "
            f"{channel.moved}{signed}"
        )
    left = [f"{len(found.versions) - VERSIONS_SHOWN} older versions"] if found.versions[VERSIONS_SHOWN:] else []
    left += [f"channels {', '.join(one.channel for one in more)}"] if (more := channels[CHANNELS_SHOWN:]) else []
    return "\n".join([*lines, f"{_line(', '.join([*left, 'all moves']))}: --output json"])


def _version_text(where: str, found: VersionContents) -> str:
    from relabel.jobs.delivery.transfers import size_text

    rows = [("sha256", found.sha256), ("signed by", ", ".join(found.signed_by) or "nobody")]
    if found.channel:
        rows.append(("channel", f"{found.channel.channel}, sequence {found.channel.sequence}"))
    short = {key: value for key, value in found.facts.items() if not isinstance(value, dict | list)}
    rows.append(("facts", _cut(", ".join(f"{_line(key)} {_line(value)}" for key, value in short.items()))))
    largest = sorted(found.list, key=lambda file: -file.size_bytes)[:FILES_SHOWN]
    shown = [f"{_line(file.path)} {size_text(file.size_bytes)}" for file in largest]
    rest = len(found.list) - len(largest)
    rows.append(("files", ", ".join([*shown, *([f"and {rest} more"] if rest > 0 else [])])))
    rows.append(
        ("more", _cut(", ".join([*(_line(key) for key in found.facts if key not in short), "digests of files"])))
    )
    return f"{where}: version {found.version}\n{table(rows)}\nAll of it: --output json"


def _cut(text: str) -> str:
    return text if len(text) <= LINE_CHARS else text[: LINE_CHARS - 1] + "…"


def _line(value: Any) -> str:
    """A fact of a bundle's author on one line; nothing in it reaches the terminal as a command."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)
