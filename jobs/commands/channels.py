"""`channel` and `rollback`: which version a channel points to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from relabel.jobs.commands.options import _signing_key, output_option, sign_key_option
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit
from relabel.manifests.storage.context import Storage

if TYPE_CHECKING:
    from relabel.manifests.storage.bundle_store_ports import BundleStore


@click.group(epilog="Example: relabel channel set s3://bucket/models/ecom stable 4f2a9c01b7d3e855")
def channel() -> None:
    """Move a channel by hand."""


@channel.command("set", epilog="Example: relabel channel set s3://bucket/models/ecom stable 4f2a9c01b7d3e855")
@click.argument("bundle", metavar="URL/NAME")
@click.argument("name", metavar="CHANNEL")
@click.argument("version", metavar="VERSION")
@sign_key_option
@output_option
def channel_set(bundle: str, name: str, version: str, sign_key: str | None, output: str) -> int:
    """Point a channel at a version that is published and whole.

    Exits 10 if it points there already, 20 if another process moved it meanwhile.
    """
    from relabel.export.publishing import set_channel

    bundle_store, bundle_name = _bundle_at(bundle)
    moved, has_moved = set_channel(bundle_store, bundle_name, name, version, _signing_key(sign_key))
    return _emit_move(bundle_store, moved, output, Exit.DONE if has_moved else Exit.NOTHING_TO_DO)


@click.command(epilog="Example: relabel rollback s3://bucket/models/ecom stable")
@click.argument("bundle", metavar="URL/NAME")
@click.argument("name", metavar="CHANNEL")
@sign_key_option
@output_option
def rollback(bundle: str, name: str, sign_key: str | None, output: str) -> int:
    """Point a channel at the version that it pointed to before; again: one further back.

    Its sequence still rises, so all who follow it change too. To go back on one machine alone: relabel pull
    --rollback DEST.
    """
    from relabel.export.publishing import roll_back

    bundle_store, bundle_name = _bundle_at(bundle)
    return _emit_move(
        bundle_store, roll_back(bundle_store, bundle_name, name, _signing_key(sign_key)), output, Exit.DONE
    )


def _emit_move(bundle_store: BundleStore, moved: Any, output: str, code: Exit) -> int:
    head = moved.head
    result = {
        "url": bundle_store.url,
        "name": moved.name,
        "channel": moved.channel,
        "version": head.version,
        "sequence": head.sequence,
        "reason": head.reason,
        "exit_code": int(code),
    }
    verb = "points to" if code == Exit.DONE else "points already to"
    return emit(
        result,
        f"{bundle_store.url}/{moved.name}@{moved.channel}: {verb} {head.version} (sequence {head.sequence}).",
        output,
        code,
    )


def _bundle_at(text: str) -> tuple[BundleStore, str]:
    from relabel.export.addresses import parse_address
    from relabel.manifests.storage.bundle_stores import open_bundle_store

    address = parse_address(text)
    if address.at is not None:
        raise click.UsageError(f"{text}: give URL/NAME without @{address.at} here.")
    return open_bundle_store(address.url, Storage()), address.name
