"""`publish`, `channel`, `rollback`, `list`, `show` and `gc`: bundles in a store. `pull` has a file of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.commands.options import emit, local_folder, output_option, table
from jobs.commands.pull import is_destination, show_destination
from jobs.exits import Exit

if TYPE_CHECKING:
    from export.signatures import SigningKey
    from manifests.depots import Depot

SIGN_KEY_VARIABLE = "RELABEL_SIGN_KEY"
KEEP_MOVES = 10
SHORT_DIGITS = 12
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)?")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

sign_key_option = click.option(
    "--sign-key",
    metavar="FILE",
    envvar=SIGN_KEY_VARIABLE,
    help=f"Private ed25519 key (PEM) to sign with; {SIGN_KEY_VARIABLE} may hold the path or the PEM text.",
)


@click.command(epilog="Example: relabel publish out/bundle s3://bucket/models --channel candidate")
@click.argument("bundle", metavar="BUNDLE")
@click.argument("url", metavar="URL")
@click.option("--channel", metavar="NAME", help="Point this channel at the version afterwards.")
@click.option("--name", metavar="NAME", help="Publish under this name.  [default: the bundle's own]")
@click.option("--version", metavar="ID", help="Call the version this.  [default: 16 digits of its manifest's sha256]")
@click.option("--reread", is_flag=True, help="Read every object back, known ones too, and mend what is damaged in the store.")
@sign_key_option
@output_option
def publish(
    bundle: str, url: str, channel: str | None, name: str | None, version: str | None, reread: bool, sign_key: str | None, output: str
) -> int:
    """Publish a bundle: its files, each once, then its version, then the channel's pointer.

    Every file's digest is checked before and after it is uploaded. The same bundle again uploads nothing and exits 10. Killed or cut off
    anywhere, the same command does what is left. Where somebody else moved the channel meanwhile, it exits 20.
    """
    from export.bundles import open_bundle
    from export.publishing import PublishOptions
    from export.publishing import publish as publish_bundle
    from jobs.transfers import TransferDisplay, size_text
    from manifests.depots import open_depot

    depot = open_depot(url)
    options = PublishOptions(name, version, channel, _signing_key(sign_key), reread)
    with TransferDisplay() as display:
        display("checking the bundle", 0)
        done = publish_bundle(open_bundle(local_folder(bundle, "BUNDLE")), depot, options, display)
    code = Exit.DONE if done.has_changed else Exit.NOTHING_TO_DO
    result = {
        "url": depot.url,
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
        ("version", f"{done.version.version}, {len(done.version.files)} files, {size_text(done.version.size_bytes)}"),
        ("uploaded", _uploaded_text(done)),
    ]
    if done.channel is not None:
        rows.append(("channel", f"{channel} points to it (sequence {done.channel.head.sequence})"))
    state = "published" if done.has_changed else "nothing to do, all of it is there"
    emit(result, f"{depot.url}/{done.version.name}: {state}\n" + table(rows), output)
    return code


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

    Exits 10 if it stands there already, 20 if somebody else moved it meanwhile.
    """
    from export.publishing import set_channel

    depot, bundle_name = _bundle_at(bundle)
    moved, has_moved = set_channel(depot, bundle_name, name, version, _signing_key(sign_key))
    return _emit_move(depot, moved, output, Exit.DONE if has_moved else Exit.NOTHING_TO_DO)


@click.command(epilog="Example: relabel rollback s3://bucket/models/ecom stable")
@click.argument("bundle", metavar="URL/NAME")
@click.argument("name", metavar="CHANNEL")
@sign_key_option
@output_option
def rollback(bundle: str, name: str, sign_key: str | None, output: str) -> int:
    """Point a channel at the version that it pointed to before; again: one further back.

    Its sequence rises all the same, so whoever follows it comes along. To go back on one machine alone: relabel pull --rollback DEST.
    """
    from export.publishing import roll_back

    depot, bundle_name = _bundle_at(bundle)
    return _emit_move(depot, roll_back(depot, bundle_name, name, _signing_key(sign_key)), output, Exit.DONE)


@click.command("list", epilog="Example: relabel list s3://bucket/models")
@click.argument("url", metavar="URL")
@output_option
def list_bundles(url: str, output: str) -> int:
    """List the bundles that are published at a place, and where their channels stand."""
    from export.catalog import bundles_in
    from manifests.depots import open_depot

    depot = open_depot(url)
    found = bundles_in(depot)
    lines = [f"{depot.url}: {len(found)} bundles"]
    for bundle in found:
        stands = ", ".join(f"{one['channel']} → {one['version']} (sequence {one['sequence']})" for one in bundle["channels"])
        lines.append(f"  {bundle['name']}  {bundle['versions']} versions  {stands or 'no channel'}")
    emit({"url": depot.url, "bundles": found}, "\n".join(lines), output)
    return Exit.DONE


@click.command(epilog="Example: relabel show s3://bucket/models/ecom@stable")
@click.argument("bundle", metavar="URL/NAME[@CHANNEL|@VERSION]|DEST")
@output_option
def show(bundle: str, output: str) -> int:
    """Show a bundle's versions and the history of its channels; with @, one version's files and facts; of a folder that was pulled to,
    what serves there.

    Of DEST, files that changed since they were last proven are read; exits 3 and names them where they are not what was pulled. Writes
    nothing and needs no network.
    """
    if is_destination(bundle):
        return show_destination(Path(bundle), output)
    from export.catalog import bundle_in, version_in
    from export.versions import parse_address
    from manifests.depots import open_depot

    address = parse_address(bundle)
    depot = open_depot(address.url)
    if address.at is None:
        found = bundle_in(depot, address.name)
        emit({"url": depot.url, **found}, _bundle_text(depot.url, found), output)
    else:
        found = version_in(depot, address)
        emit({"url": depot.url, "name": address.name, **found}, _version_text(f"{depot.url}/{address.name}", found), output)
    return Exit.DONE


@click.command(epilog="Example: relabel gc s3://bucket/models --delete")
@click.argument("url", metavar="URL")
@click.option("--delete", "deletes", is_flag=True, help="Do it; without, only say what would be done.")
@click.option("--keep", type=click.IntRange(1), default=KEEP_MOVES, show_default=True, help="Last moves of a channel whose versions stay.")
@click.option("--grace", default="7d", show_default=True, metavar="TIME", help="What is younger stays, for instance 12h or 30d.")
@output_option
def gc(url: str, deletes: bool, keep: int, grace: str, output: str) -> int:
    """Remove versions that no channel points to any more, and objects that no version names.

    In two steps: what is found is condemned, and a gc that runs a day later deletes it, so that nobody loses what he is about to rely on.
    Never touched: what a channel or its last moves point to, and what is younger than the grace time.
    """
    from export.collecting import collect
    from jobs.transfers import size_text
    from manifests.depots import open_depot

    depot = open_depot(url)
    found = collect(depot, keep=keep, grace_s=_seconds(grace), deletes=deletes, tick=lambda _count: None)
    code = Exit.DONE if found.condemned or found.deleted or found.swept or not deletes else Exit.NOTHING_TO_DO
    would = "" if deletes else "would be "
    rows = [
        ("kept", f"{found.garbage.kept_versions} versions, {found.garbage.kept_objects} objects"),
        (f"{would}deleted", f"{len(found.deleted)} versions and objects, {size_text(found.deleted_bytes)}"),
        (f"{would}condemned", f"{len(found.condemned)}, for a gc a day later to delete"),
    ]
    if deletes:
        rows.append(("swept", f"{found.swept} leavings of killed uploads"))
    result = {
        "url": depot.url,
        "dry_run": not deletes,
        "kept_versions": found.garbage.kept_versions,
        "kept_objects": found.garbage.kept_objects,
        "condemned": found.condemned,
        "deleted": found.deleted,
        "deleted_bytes": found.deleted_bytes,
        "swept": found.swept,
        "exit_code": int(code),
    }
    tail = "" if deletes else "\nNothing was touched. To do it: --delete"
    emit(result, f"{depot.url}\n" + table(rows) + tail, output)
    return code


def _uploaded_text(done: Any) -> str:
    from jobs.transfers import size_text

    if not done.uploaded:
        return f"nothing, all {done.objects} objects were there"
    moved = f"{done.uploaded} of {done.objects} objects, {size_text(done.uploaded_bytes)}"
    return moved if done.uploaded == done.objects else f"{moved}; the rest was there"


def _emit_move(depot: Depot, moved: Any, output: str, code: Exit) -> int:
    head = moved.head
    result = {
        "url": depot.url,
        "name": moved.name,
        "channel": moved.channel,
        "version": head.version,
        "sequence": head.sequence,
        "reason": head.reason,
        "exit_code": int(code),
    }
    verb = "points to" if code == Exit.DONE else "points already to"
    emit(result, f"{depot.url}/{moved.name}@{moved.channel}: {verb} {head.version} (sequence {head.sequence}).", output)
    return code


def _bundle_text(url: str, found: dict[str, Any]) -> str:
    from jobs.transfers import size_text

    lines = [f"{url}/{found['name']}", "versions, newest first"]
    for one in found["versions"]:
        marks = [*one["channels"], *(f"signed by {key}" for key in one["signed_by"])]
        lines.append(f"  {one['version']}  {one['files']} files, {size_text(one['size_bytes'])}  {', '.join(marks)}".rstrip())
    for one in found["channels"]:
        lines.append(f"channel {one['channel']}" + "".join(f", signed by {key}" for key in one["signed_by"]))
        lines += [f"  {move['sequence']:>4}  {move['moved']}  {move['reason']:<8}  {move['version']}" for move in reversed(one["moves"])]
    return "\n".join(lines)


def _version_text(where: str, found: dict[str, Any]) -> str:
    from jobs.transfers import size_text

    rows = [("sha256", found["sha256"]), ("signed by", ", ".join(found["signed_by"]) or "nobody")]
    if found["channel"]:
        rows.append(("channel", f"{found['channel']['channel']}, sequence {found['channel']['sequence']}"))
    rows += [(_plain(key), _plain(value)) for key, value in found["facts"].items()]
    files = [(file["path"], f"{file['sha256'][:SHORT_DIGITS]}  {size_text(file['size_bytes'])}") for file in found["list"]]
    return f"{where}: version {found['version']}\n{table(rows)}\nfiles\n{table(files)}"


def _plain(value: Any) -> str:
    """A fact of a bundle's author on one line; nothing in it reaches the terminal as a command."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)


def _bundle_at(text: str) -> tuple[Depot, str]:
    from export.versions import parse_address
    from manifests.depots import open_depot

    address = parse_address(text)
    if address.at is not None:
        raise click.UsageError(f"{text}: give URL/NAME without @{address.at} here.")
    return open_depot(address.url), address.name


def _signing_key(source: str | None) -> SigningKey | None:
    from export.signatures import SigningKey

    return SigningKey(source) if source else None


def _seconds(text: str) -> float:
    matched = _DURATION.fullmatch(text.strip())
    if matched is None:
        raise click.UsageError(f"--grace {text}: write a number and s, m, h or d, for instance 12h.")
    return float(matched[1]) * _UNIT_S[matched[2] or "s"]
