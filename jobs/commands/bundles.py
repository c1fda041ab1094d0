"""The commands `publish`, `channel`, `rollback`, `list`, `show` and `gc` over a bundle store."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click

from relabel.export.bundles import MANIFEST_NAME, open_bundle
from relabel.export.publishing import collect, roll_back, set_channel
from relabel.export.publishing import publish as publish_bundle
from relabel.export.store import bundle_in, bundles_in, parse_address, version_in
from relabel.jobs.commands.options import _signing_key, local_folder, output_option, sign_key_option
from relabel.jobs.commands.pull import is_destination, show_destination
from relabel.jobs.delivery import TransferDisplay, files_text, size_text
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit, grid
from relabel.jobs.run.stop import span_s
from relabel.manifests.errors import UsageError
from relabel.manifests.files import Storage
from relabel.manifests.secrets import counted
from relabel.manifests.store import Store, open_bundle_store

# ------------------------------------------------------------------------------
# `publish`, `channel`, `rollback`, `list`, `show` and `gc`: bundles in a store. `pull` has a file of its own.


anyway_option = click.option(
    "--anyway", is_flag=True, help="Point the channel at a student that is no better than a baseline, too."
)


@click.command(epilog="Example: relabel publish out/bundle s3://bucket/models --channel candidate")
@click.argument("bundle", metavar="BUNDLE")
@click.argument("url", metavar="URL")
@click.option("--channel", metavar="NAME", help="Point this channel at the version afterwards.")
@click.option("--name", metavar="NAME", help="Publish under this name.  [default: the bundle's own]")
@click.option("--version", metavar="ID", help="Call the version this.  [default: 16 digits of its manifest's sha256]")
@click.option(
    "--reread", is_flag=True, help="Read every object back, known ones too, and repair what is damaged in the store."
)
@anyway_option
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
    bundle_store = open_bundle_store(url, Storage())
    key = _signing_key(sign_key)
    with TransferDisplay() as display:
        display("checking the bundle", 0)
        done = publish_bundle(
            open_bundle(local_folder(bundle, "BUNDLE")),
            bundle_store,
            display,
            name=name,
            version=version,
            channel=channel,
            key=key,
            rereads=reread,
            is_anyway=anyway,
        )
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
    return emit(result, f"{bundle_store.url}/{done.version.name}: {state}\n" + grid(rows), output, code)


def _uploaded_text(done: Any) -> str:
    if not done.uploaded:
        return f"nothing, all {done.objects} objects were there"
    moved = f"{done.uploaded} of {done.objects} objects, {size_text(done.uploaded_bytes)}"
    return moved if done.uploaded == done.objects else f"{moved}; the rest was there"


# ------------------------------------------------------------------------------
# `channel` and `rollback`: which version a channel points to.


@click.group(epilog="Example: relabel channel set s3://bucket/models/ecom stable 4f2a9c01b7d3e855")
def channel() -> None:
    """Move a channel by hand."""


@channel.command("set", epilog="Example: relabel channel set s3://bucket/models/ecom stable 4f2a9c01b7d3e855")
@click.argument("bundle", metavar="URL/NAME")
@click.argument("name", metavar="CHANNEL")
@click.argument("version", metavar="VERSION")
@anyway_option
@sign_key_option
@output_option
def channel_set(bundle: str, name: str, version: str, anyway: bool, sign_key: str | None, output: str) -> int:
    """Point a channel at a version that is published and whole.

    Exits 10 if it points there already, 20 if another process moved it meanwhile, and 5, as `publish` does, at a
    student that is no better than a baseline, unless --anyway is given.
    """
    bundle_store, bundle_name = _bundle_at(bundle)
    moved, has_moved = set_channel(bundle_store, bundle_name, name, version, _signing_key(sign_key), is_anyway=anyway)
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
    bundle_store, bundle_name = _bundle_at(bundle)
    return _emit_move(
        bundle_store, roll_back(bundle_store, bundle_name, name, _signing_key(sign_key)), output, Exit.DONE
    )


def _emit_move(bundle_store: Store, moved: Any, output: str, code: Exit) -> int:
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


def _bundle_at(text: str) -> tuple[Store, str]:
    address = parse_address(text)
    if address.at is not None:
        raise click.UsageError(f"{text}: give URL/NAME without @{address.at} here.")
    return open_bundle_store(address.url, Storage()), address.name


# ------------------------------------------------------------------------------
# `list` and `show`: what a bundle store holds, and the active version of a folder.


@click.command("list", epilog="Example: relabel list s3://bucket/models")
@click.argument("url", metavar="URL")
@output_option
def list_bundles(url: str, output: str) -> int:
    """List the bundles that are published at a place, and where their channels point."""
    bundle_store = open_bundle_store(url, Storage())
    found = bundles_in(bundle_store)
    lines = [f"{bundle_store.url}: {counted(len(found), 'bundle')}"]
    for bundle in found:
        channels = ", ".join(
            f"{one['channel']} → {one['version']} (sequence {one['sequence']})" for one in bundle["channels"]
        )
        lines.append(f"  {bundle['name']}  {counted(bundle['versions'], 'version')}  {channels or 'no channel'}")
    return emit({"url": bundle_store.url, "bundles": found}, "\n".join(lines), output)


@click.command(epilog="Example: relabel show s3://bucket/models/ecom@stable")
@click.argument("bundle", metavar="URL/NAME[@CHANNEL|@VERSION]|DEST")
@output_option
def show(bundle: str, output: str) -> int:
    """Show a bundle's versions and the history of its channels; with @, one version's files and facts; of a folder that
    was pulled to, its active version.

    Of DEST, every byte is read; exits 3 and names a file that is not what was pulled. Writes nothing and needs no
    network. --output json has all there is.
    """
    if is_destination(bundle):
        return show_destination(Path(bundle), output)
    if (Path(bundle) / MANIFEST_NAME).is_file():
        raise UsageError(
            f"{bundle}: an output, which is in no bundle store. See it: relabel report {shlex.quote(bundle)}"
        )
    address = parse_address(bundle)
    bundle_store = open_bundle_store(address.url, Storage())
    if address.at is None:
        shown = bundle_in(bundle_store, address.name)
        return emit({"url": bundle_store.url, **shown}, _bundle_text(bundle_store.url, shown), output)
    found = version_in(bundle_store, address)
    text = _version_text(f"{bundle_store.url}/{address.name}", found)
    return emit({"url": bundle_store.url, "name": address.name, **found}, text, output)


def _bundle_text(url: str, found: dict[str, Any]) -> str:
    lines = [f"{url}/{found['name']}: {counted(len(found['versions']), 'version')}, newest first"]
    for one in found["versions"]:
        marks = ", ".join([*one["channels"], *(f"signed by {key}" for key in one["signed_by"])])
        size = f"{counted(one['files'], 'file')}, {size_text(one['size_bytes'])}"
        lines.append(f"  {one['version']}  {size}  {marks}".rstrip())
    for channel in sorted(found["channels"], key=lambda channel: channel["moved"], reverse=True):
        signed = "".join(f", signed by {key}" for key in channel["signed_by"])
        lines.append(
            f"channel {channel['channel']}: {channel['version']}, move {channel['sequence']} ({channel['reason']}) of "
            f"{channel['moved']}{signed}"
        )
    return "\n".join([*lines, "All moves: --output json"])


def _version_text(where: str, found: dict[str, Any]) -> str:
    rows = [("sha256", found["sha256"]), ("signed by", ", ".join(found["signed_by"]) or "nobody")]
    if found["channel"]:
        rows.append(("channel", f"{found['channel']['channel']}, sequence {found['channel']['sequence']}"))
    rows += [(_line(key), _line(value)) for key, value in found["facts"].items() if not isinstance(value, dict | list)]
    rows += [("file", f"{_line(file['path'])} {size_text(file['size_bytes'])}") for file in found["list"]]
    return f"{where}: version {found['version']}\n{grid(rows)}\nAll of it: --output json"


def _line(value: Any) -> str:
    """A fact of a bundle's author on one line; nothing in it reaches the terminal as a command."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)


# ------------------------------------------------------------------------------
# `gc`: versions and files that nothing points to.


KEEP_MOVES = 10


@click.command(epilog="Example: relabel gc s3://bucket/models --delete")
@click.argument("url", metavar="URL")
@click.option("--delete", "deletes", is_flag=True, help="Do it; without, only say what would be done.")
@click.option(
    "--keep",
    type=click.IntRange(1),
    default=KEEP_MOVES,
    show_default=True,
    help="Last moves of a channel whose versions stay.",
)
@click.option(
    "--grace", default="7d", show_default=True, metavar="TIME", help="What is younger stays, for instance 12h or 30d."
)
@output_option
def gc(url: str, deletes: bool, keep: int, grace: str, output: str) -> int:
    """Remove versions that no channel points to any more, and objects that no version names.

    In two steps: what is found gets a gc mark, and a gc that runs a day later deletes it, so that no publisher loses
    what it is about to rely on.
    Never touched: what a channel or its last moves point to, and what is younger than the grace time.
    """
    bundle_store = open_bundle_store(url, Storage())
    grace_s = span_s(grace, "--grace")
    found = collect(bundle_store, keep=keep, grace_s=grace_s, deletes=deletes, on_progress=lambda _count: None)
    code = Exit.DONE if found.marked or found.deleted or found.swept or not deletes else Exit.NOTHING_TO_DO
    would = "" if deletes else "would be "
    rows = [
        ("kept", f"{counted(found.garbage.kept_versions, 'version')}, {counted(found.garbage.kept_objects, 'object')}"),
        (f"{would}deleted", f"{len(found.deleted)} versions and objects, {size_text(found.deleted_bytes)}"),
        (f"{would}marked", f"{len(found.marked)}, for a gc a day later to delete"),
    ]
    if deletes:
        rows.append(("swept", f"{found.swept} leavings of killed uploads"))
    result = {
        "url": bundle_store.url,
        "dry_run": not deletes,
        "kept_versions": found.garbage.kept_versions,
        "kept_objects": found.garbage.kept_objects,
        "marked": found.marked,
        "deleted": found.deleted,
        "deleted_bytes": found.deleted_bytes,
        "swept": found.swept,
        "exit_code": int(code),
    }
    tail = "" if deletes else "\nNothing was touched. To do it: --delete"
    return emit(result, f"{bundle_store.url}\n" + grid(rows) + tail, output, code)
