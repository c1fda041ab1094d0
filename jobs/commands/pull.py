"""`pull`: what a channel points to comes to serve in a folder; and what `verify` and `show` say of such a folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from relabel.jobs.commands.options import TRUST_KEY_VARIABLE, Number, _trusted_keys, local_folder, output_option
from relabel.jobs.exits import Exit, exit_for
from relabel.jobs.output import emit, table
from relabel.jobs.run.stop import LONGEST_S
from relabel.manifests.files import Storage

FAULTS_SHOWN = 3


@click.command(epilog="Example: relabel pull s3://bucket/models/ecom@stable models/ecom")
@click.argument("arguments", nargs=-1, metavar="URL/NAME[@CHANNEL|@VERSION] DEST")
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="FILE",
    help=f"Public ed25519 key (PEM) that must have signed; or {TRUST_KEY_VARIABLE}.",
)
@click.option("--keep", type=click.IntRange(1, 1000), default=3, show_default=True, help="Versions that stay in DEST.")
@click.option(
    "--watch",
    type=Number(1, LONGEST_S),
    metavar="SECONDS",
    help="Follow the channel: pull again every so often, until SIGTERM.",
)
@click.option("--rollback", is_flag=True, help="Serve again what served before; takes DEST alone and needs no network.")
@click.option(
    "--to",
    metavar="VERSION",
    help="With --rollback: go to this version of those kept, also one that a channel left by a rollback.",
)
@click.option("--unhold", is_flag=True, help="Switch to the version that was rolled back from.")
@click.option(
    "--check",
    is_flag=True,
    help="Read every byte of what serves, also of files that were not written to since they were proven.",
)
@click.option(
    "--check-parity",
    is_flag=True,
    help="Before the switch, ask the bundle's reference pairs on this machine; exit 5 where its answers differ.",
)
@click.option(
    "--script",
    metavar="FILE",
    help="Write pull.py there, which does the same with Python's standard library alone; takes no argument.",
)
@output_option
def pull(
    arguments: tuple[str, ...],
    keys: tuple[str, ...],
    keep: int,
    watch: float | None,
    rollback: bool,
    to: str | None,
    unhold: bool,
    check: bool,
    check_parity: bool,
    script: str | None,
    output: str,
) -> int:
    """Let DEST/current be the version that a channel points to (stable by default).

    What is here is kept, what is missing is fetched and resumed, every digest is checked, and one link is switched. A
    damaged or hostile bundle is refused with exit 3, an unsigned (with --key) or downgraded one with exit 5, and what
    serves stays. Where the version serves already, its link and files are checked, and what is damaged is
    fetched again. After --rollback, pulls leave DEST alone until the channel moves on. It never goes to a version that
    a channel left by a rollback, unless --to names it.
    """
    if script is not None:
        if arguments or rollback or keys or watch is not None or to is not None or unhold or check or check_parity:
            raise click.UsageError("--script stands alone: relabel pull --script pull.py")
        return _write_script(local_folder(script, "--script"), output)
    if rollback:
        if len(arguments) != 1 or keys or watch is not None or unhold or check or check_parity:
            raise click.UsageError("--rollback takes one argument, DEST, and no other option but --to and --output.")
        return _roll_back_here(local_folder(arguments[0], "DEST"), to, output)
    if to is not None:
        raise click.UsageError("--to goes with --rollback. To pull a version: URL/NAME@VERSION.")
    if len(arguments) != 2:
        raise click.UsageError(
            "Give URL/NAME@CHANNEL and DEST, for instance: relabel pull s3://bucket/models/ecom@stable models/ecom"
        )
    from relabel.export.destinations import Destination
    from relabel.export.pulling import PullOptions
    from relabel.export.pulling import pull as pull_version
    from relabel.export.store import parse_address
    from relabel.jobs.delivery import TransferDisplay
    from relabel.manifests.bundle_store import open_bundle_store

    address = parse_address(arguments[0])
    destination = Destination(local_folder(arguments[1], "DEST"))
    bundle_store = open_bundle_store(address.url, Storage())
    options = PullOptions(_trusted_keys(keys), keep, unhold, check, check_parity)
    if watch is not None:
        with TransferDisplay() as display:
            seen = _watch(
                lambda: pull_version(bundle_store, address, destination, options, display), destination, watch, display
            )
        return _emit_watch(seen, destination, output)
    with TransferDisplay() as display:
        pulled = pull_version(bundle_store, address, destination, options, display)
    code = Exit.DONE if pulled.has_switched else Exit.NOTHING_TO_DO
    return emit(
        {**_plain_pull(pulled, destination), "exit_code": int(code)}, _pull_text(pulled, destination), output, code
    )


def _write_script(path: Path, output: str) -> int:
    from relabel.export import puller
    from relabel.manifests.records import sha256_file
    from relabel.manifests.store import LocalRunStore

    data = Path(puller.__file__).read_bytes()
    if path.is_dir():
        raise click.UsageError(f"--script {path}: is a folder. Name the file: {path}/pull.py")
    if path.exists() and not path.read_bytes().startswith(data[: data.index(b":")]):
        raise click.UsageError(f"--script {path}: is there and is no pull.py. Name another file.")
    LocalRunStore(path.parent).put(path.name, data)
    sha256 = sha256_file(path)
    text = f"{path}: written, sha256 {sha256}. Run it: python3 {path} URL/NAME[@CHANNEL|@VERSION] DEST"
    return emit({"path": str(path), "sha256": sha256, "exit_code": 0}, text, output)


def _watch(pull_once: Callable[[], Any], destination: Any, every_s: float, display: Any) -> Any:
    from relabel.jobs.delivery import StoppedError, follow

    def once() -> bool:
        was = destination.serving()
        try:
            pulled = pull_once()
        except StoppedError:
            if destination.serving() != was:  # the switch was made, and the tidying up broken off
                return True
            raise
        if pulled.has_switched:
            display.say(_pull_text(pulled, destination))
        return bool(pulled.has_switched)

    return follow(once, every_s, display.say)


def _emit_watch(watch: Any, destination: Any, output: str) -> int:
    state = destination.reconciled()  # the signal may have come between a switch and its being noted
    served = state.served[0].version if state and state.served else None
    by_hand = watch.stopped_by is not None and watch.stopped_by.name == "SIGINT"
    code = Exit.STOPPED if by_hand else exit_for(watch.last_error) if watch.last_error else Exit.DONE
    result = {
        "destination": str(destination.folder),
        "version": served,
        "pulls": watch.pulls,
        "switches": watch.switches,
        "refused": watch.refused,
        "exit_code": int(code),
    }
    text = (
        f"{destination.folder}: serves {served}; {watch.pulls} looks, {watch.switches} switches, {watch.refused} "
        "refused or in trouble"
    )
    return emit(result, text, output, code)


def _roll_back_here(folder: Path, to: str | None, output: str) -> int:
    from relabel.export.destinations import Destination

    started_s = time.monotonic()
    destination = Destination(folder)
    was = destination.serving()
    served = destination.roll_back(to)
    seconds = round(time.monotonic() - started_s, 3)
    code = Exit.NOTHING_TO_DO if was == destination.path_of(served) else Exit.DONE
    text = (
        f"{folder}: serves {served.version} {'already' if code else 'again'}, after {seconds:.2f} s. Pulls leave it "
        "so until the channel moves on (or --unhold). To take others along: relabel rollback URL/NAME CHANNEL."
    )
    return emit(
        {"destination": str(folder), "version": served.version, "seconds": seconds, "exit_code": int(code)},
        text,
        output,
        code,
    )


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
        "repaired": list(pulled.repaired),
    }


def _pull_text(pulled: Any, destination: Any) -> str:
    from relabel.jobs.delivery import size_text

    served = pulled.served
    if pulled.repaired:
        return (
            f"{destination.folder}: serves {served.version}, repaired, {size_text(pulled.fetched_bytes)} fetched. "
            f"Damaged: {'; '.join(pulled.repaired[:FAULTS_SHOWN])}{_more(pulled.repaired)}."
        )
    if pulled.is_held:
        return (
            f"{destination.folder}: left at {served.version}, since DEST was rolled back. It follows the "
            "channel's next move; --unhold follows now."
        )
    if not pulled.has_switched:
        return f"{destination.folder}: serves {served.version} already."
    by = f" ({served.channel}, sequence {served.sequence})" if served.channel else ""
    return f"{destination.folder}: serves {served.version}{by}, {size_text(pulled.fetched_bytes)} fetched."


def is_destination(target: str) -> bool:
    """Whether bundles were pulled to a folder."""
    if "://" in target or not os.path.isdir(target):  # noqa: PTH112 (most targets are none, and the import is dear)
        return False
    from relabel.export.destinations import is_destination as is_one

    return is_one(Path(target))


def verify_destination(folder: Path, output: str) -> int:
    """Prove that what serves is what was pulled, byte for byte; writes nothing, needs no network.

    Raises:
        ManifestError: it is not; names a file.
    """
    from relabel.export.destinations import LINK, Destination
    from relabel.manifests.errors import ManifestError

    state, proof = Destination(folder).look(checks_bytes=True)
    served = state.served[0]
    if proof.faults:
        raise ManifestError(
            f"{folder}/{LINK}: {proof.faults[0]}{_more(proof.faults, 1)}. To repair it: relabel pull URL/{state.name} "
            f"{folder}."
        )
    result = {
        "destination": str(folder),
        "name": state.name,
        "version": served.version,
        "sha256": served.version_sha256,
        "exit_code": 0,
    }
    return emit(
        result,
        f"{folder}: verified. Version {served.version} of {state.name} serves, every byte as it was pulled.",
        output,
    )


def show_destination(folder: Path, output: str) -> int:
    """Show what serves in a folder, what is kept beside it, and whether what serves is whole."""
    from relabel.export.destinations import Destination

    state, proof = Destination(folder).look(checks_bytes=False)
    code = Exit.BAD_INPUT if proof.faults else Exit.DONE
    served = state.served[0]
    result = {
        "destination": str(folder),
        "name": state.name,
        "version": served.version,
        "channel": served.channel,
        "sequence": served.sequence,
        "faults": list(map(str, proof.faults)),
        "kept": [{"version": one.version, "left_by": state.leavers(one)} for one in state.served],
        "held": state.held,
        "exit_code": int(code),
    }
    rows = [("serves", served.version + (f" ({served.channel}, sequence {served.sequence})" if served.channel else ""))]
    rows += _first([("damaged", str(fault)) for fault in proof.faults], 2)
    rows += [] if proof.faults else [("whole", "link and files are as they were pulled")]
    rows += _first(
        [
            ("kept", one.version + "".join(f", {by} left it by a rollback" for by in state.leavers(one)))
            for one in state.served[1:]
        ],
        3 if not proof.faults else 2,
    )
    held = [f"follows {channel} from sequence {sequence + 1} on" for channel, sequence in state.held.items()]
    rows += [("held", "; ".join(held))] if held else []
    return emit(result, f"{folder}: {state.name}\n" + table(rows), output, code)


def _first(rows: list[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    """The first of some rows, the last of which says how many are left out."""
    left = rows[most:]
    return [*rows[: most - bool(left)], *([(rows[0][0], f"and {len(left) + 1} more: --output json")] if left else [])]


def _more(faults: Sequence[object], shown: int = FAULTS_SHOWN) -> str:
    return f" and {len(faults) - shown} more" if len(faults) > shown else ""
