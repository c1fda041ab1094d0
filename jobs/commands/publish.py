"""`publish`, `channel`, `rollback`, `list`, `show` and `gc`: bundles in a store. `pull` has a file of its own."""

from __future__ import annotations

from typing import Any

import click

from relabel.jobs.commands.options import _signing_key, local_folder, output_option, sign_key_option
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit, table
from relabel.manifests.storage.context import Storage


@click.command(epilog="Example: relabel publish out/bundle s3://bucket/models --channel candidate")
@click.argument("bundle", metavar="BUNDLE")
@click.argument("url", metavar="URL")
@click.option("--channel", metavar="NAME", help="Point this channel at the version afterwards.")
@click.option("--name", metavar="NAME", help="Publish under this name.  [default: the bundle's own]")
@click.option("--version", metavar="ID", help="Call the version this.  [default: 16 digits of its manifest's sha256]")
@click.option(
    "--reread", is_flag=True, help="Read every object back, known ones too, and repair what is damaged in the store."
)
@click.option("--anyway", is_flag=True, help="Point the channel at a student that is no better than a baseline, too.")
@sign_key_option
@output_option
def publish(
    bundle: str,
    url: str,
    channel: str | None,
    name: str | None,
    version: str | None,
    reread: bool,
    anyway: bool,
    sign_key: str | None,
    output: str,
) -> int:
    """Publish a bundle: its files, each once, then its version, then the channel's pointer.

    Every file's digest is checked before and after it is uploaded. The same bundle again uploads nothing and exits 10.
    If it is killed or cut off, the same command does what is left. If another process moved the channel meanwhile, it
    exits 20. A channel is not pointed at a student that is no better than a baseline on its test split (a constant
    grade, BM25), unless --anyway is given: exit 5.
    """
    from relabel.export.bundles import open_bundle
    from relabel.export.publishing import PublishOptions
    from relabel.export.publishing import publish as publish_bundle
    from relabel.jobs.delivery.transfers import TransferDisplay, files_text
    from relabel.manifests.storage.bundle_stores import open_bundle_store

    bundle_store = open_bundle_store(url, Storage())
    options = PublishOptions(name, version, channel, _signing_key(sign_key), reread, anyway)
    with TransferDisplay() as display:
        display("checking the bundle", 0)
        done = publish_bundle(open_bundle(local_folder(bundle, "BUNDLE")), bundle_store, options, display)
    code = Exit.DONE if done.has_changed else Exit.NOTHING_TO_DO
    result = {
        "url": bundle_store.url,
        "name": done.version.name,
        "version": done.version.version,
        "sha256": done.version.sha256,
        "objects": done.objects,
        "uploaded": done.uploaded,
        "uploaded_bytes": done.uploaded_bytes,
        "channel": channel,
        "sequence": done.channel.head.sequence if done.channel else None,
        "exit_code": int(code),
    }
    rows = [
        ("version", f"{done.version.version}, {files_text(done.version.files)}"),
        ("uploaded", _uploaded_text(done)),
    ]
    if done.channel is not None:
        rows.append(("channel", f"{channel} points to it (sequence {done.channel.head.sequence})"))
    state = "published" if done.has_changed else "nothing to do, all of it is there"
    return emit(result, f"{bundle_store.url}/{done.version.name}: {state}\n" + table(rows), output, code)


def _uploaded_text(done: Any) -> str:
    from relabel.jobs.delivery.transfers import size_text

    if not done.uploaded:
        return f"nothing, all {done.objects} objects were there"
    moved = f"{done.uploaded} of {done.objects} objects, {size_text(done.uploaded_bytes)}"
    return moved if done.uploaded == done.objects else f"{moved}; the rest was there"
