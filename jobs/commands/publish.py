"""`publish`, `pull`, `channel`, `rollback`, `list`, `show` and `gc`: bundles on their way to whoever deploys them, and back."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.commands.options import emit, output_option, table
from jobs.exits import Exit

if TYPE_CHECKING:
    from export.signatures import SigningKey, TrustedKeys
    from manifests.depots import Depot

SIGN_KEY_VARIABLE = "RELABEL_SIGN_KEY"
TRUST_KEY_VARIABLE = "RELABEL_TRUST_KEY"
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
        done = publish_bundle(open_bundle(_local(bundle, "BUNDLE")), depot, options, display)
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
        ("uploaded", f"{done.uploaded} of {done.objects} objects, {size_text(done.uploaded_bytes)}; the rest was there"),
    ]
    if done.channel is not None:
        rows.append(("channel", f"{channel} points to it (sequence {done.channel.head.sequence})"))
    state = "published" if done.has_changed else "nothing to do, all of it is there"
    emit(result, f"{depot.url}/{done.version.name}: {state}\n" + table(rows), output)
    return code


@click.command(epilog="Example: relabel pull s3://bucket/models/ecom@stable models/ecom")
@click.argument("arguments", nargs=-1, metavar="URL/NAME[@CHANNEL|@VERSION] DEST")
@click.option(
    "--key", "keys", multiple=True, metavar="FILE", help=f"Public ed25519 key (PEM) that must have signed; or {TRUST_KEY_VARIABLE}."
)
@click.option("--keep", type=click.IntRange(1, 1000), default=3, show_default=True, help="Versions that stay in DEST.")
@click.option("--watch", type=click.FloatRange(1), metavar="SECONDS", help="Follow the channel: pull again every so often, until SIGTERM.")
@click.option("--rollback", is_flag=True, help="Serve again what served before; takes DEST alone and needs no network.")
@click.option("--unhold", is_flag=True, help="Switch to what somebody rolled back from.")
@output_option
def pull(
    arguments: tuple[str, ...], keys: tuple[str, ...], keep: int, watch: float | None, rollback: bool, unhold: bool, output: str
) -> int:
    """Let DEST/current be the version that a channel points to (stable by default).

    What is here is kept, what is missing is fetched and resumed, every digest is checked, and one link is switched. A damaged or hostile
    bundle is refused with exit 3, an unsigned (with --key) or downgraded one with exit 5, and what serves goes on serving. After
    --rollback, pulls leave DEST alone until the channel moves on.
    """
    if rollback:
        if len(arguments) != 1 or keys or watch is not None or unhold:
            raise click.UsageError("--rollback takes one argument, DEST, and no other option but --output.")
        return _roll_back_here(_local(arguments[0], "DEST"), output)
    if len(arguments) != 2:
        raise click.UsageError("Give URL/NAME@CHANNEL and DEST, for instance: relabel pull s3://bucket/models/ecom@stable models/ecom")
    from export.destinations import Destination
    from export.pulling import PullOptions
    from export.pulling import pull as pull_version
    from export.versions import parse_address
    from jobs.transfers import TransferDisplay
    from manifests.depots import open_depot

    address = parse_address(arguments[0])
    destination = Destination(_local(arguments[1], "DEST"))
    depot = open_depot(address.url)
    options = PullOptions(_trusted_keys(keys), keep, unhold)
    if watch is not None:
        with TransferDisplay() as display:
            seen = _watch(lambda: pull_version(depot, address, destination, options, display), destination, watch, display)
        return _emit_watch(seen, destination, output)
    with TransferDisplay() as display:
        pulled = pull_version(depot, address, destination, options, display)
    code = Exit.DONE if pulled.has_switched else Exit.NOTHING_TO_DO
    emit({**_plain_pull(pulled, destination), "exit_code": int(code)}, _pull_text(pulled, destination), output)
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
@click.argument("bundle", metavar="URL/NAME[@CHANNEL|@VERSION]")
@output_option
def show(bundle: str, output: str) -> int:
    """Show a bundle's versions and the history of its channels; with @, one version's files and facts."""
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


def _watch(pull_once: Callable[[], Any], destination: Any, every_s: float, display: Any) -> Any:
    from jobs.watching import follow

    def once() -> bool:
        pulled = pull_once()
        if pulled.has_switched:
            display.say(_pull_text(pulled, destination))
        return bool(pulled.has_switched)

    return follow(once, every_s, display.say)


def _emit_watch(watch: Any, destination: Any, output: str) -> int:
    state = destination.reconciled()  # the signal may have come between a switch and its being noted
    served = state.served[0].version if state and state.served else None
    by_hand = watch.stopped_by is not None and watch.stopped_by.name == "SIGINT"
    code = Exit.STOPPED if by_hand else Exit.DONE
    result = {
        "destination": str(destination.folder),
        "version": served,
        "pulls": watch.pulls,
        "switches": watch.switches,
        "refused": watch.refused,
        "exit_code": int(code),
    }
    text = f"{destination.folder}: serves {served}; {watch.pulls} looks, {watch.switches} switches, {watch.refused} refused or in trouble"
    emit(result, text, output)
    return code


def _roll_back_here(folder: Path, output: str) -> int:
    from export.destinations import Destination

    started_s = time.monotonic()
    served = Destination(folder).roll_back()
    seconds = round(time.monotonic() - started_s, 3)
    text = (
        f"{folder}: serves {served.version} again, after {seconds:.2f} s. Pulls leave it so until the channel moves on (or --unhold). "
        "To take others along: relabel rollback URL/NAME CHANNEL."
    )
    emit({"destination": str(folder), "version": served.version, "seconds": seconds, "exit_code": 0}, text, output)
    return Exit.DONE


def _plain_pull(pulled: Any, destination: Any) -> dict[str, Any]:
    served = pulled.served
    return {
        "destination": str(destination.folder),
        "current": str(destination.serving()),
        "version": served.version,
        "channel": served.channel,
        "sequence": served.sequence,
        "has_switched": pulled.has_switched,
        "is_held": pulled.is_held,
        "fetched_bytes": pulled.fetched_bytes,
    }


def _pull_text(pulled: Any, destination: Any) -> str:
    from jobs.transfers import size_text

    served = pulled.served
    if pulled.is_held:
        return (
            f"{destination.folder}: left at {served.version}, since somebody rolled back here. It follows the channel's next move; "
            "--unhold follows now."
        )
    if not pulled.has_switched:
        return f"{destination.folder}: serves {served.version} already."
    by = f" ({served.channel}, sequence {served.sequence})" if served.channel else ""
    return f"{destination.folder}: serves {served.version}{by}, {size_text(pulled.fetched_bytes)} fetched."


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


def _local(text: str, what: str) -> Path:
    if "://" in text:
        raise click.UsageError(f"{text}: {what} is a folder on this machine.")
    return Path(text)


def _signing_key(source: str | None) -> SigningKey | None:
    from export.signatures import SigningKey

    return SigningKey(source) if source else None


def _trusted_keys(sources: tuple[str, ...]) -> TrustedKeys | None:
    """The keys of the command line, else of the environment."""
    import os

    from export.signatures import TrustedKeys

    named = sources or tuple(filter(None, (os.environ.get(TRUST_KEY_VARIABLE),)))
    return TrustedKeys(named) if named else None


def _seconds(text: str) -> float:
    matched = _DURATION.fullmatch(text.strip())
    if matched is None:
        raise click.UsageError(f"--grace {text}: write a number and s, m, h or d, for instance 12h.")
    return float(matched[1]) * _UNIT_S[matched[2] or "s"]
