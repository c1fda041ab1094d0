"""`pull`: a folder serves what a channel points to; and `verify` and `show` of such a folder."""

import os
import shlex
from pathlib import Path

import click

from relabel.export import puller
from relabel.export.bundles import kind_of, open_bundle, translate_refusals
from relabel.export.publishing import parse_address, trusted_keys
from relabel.export.puller import Pulled, ServingFolder, ServingState, roll_back
from relabel.jobs.commands.options import (
    Number,
    given_parameters,
    local_folder,
    output_option,
)
from relabel.jobs.output import Exit, Summary, TextResult, emit, exit_for
from relabel.jobs.pulling import ChannelWatch, follow, pull_version
from relabel.jobs.run.stop import LONGEST_S
from relabel.jobs.transfers import TransferDisplay
from relabel.manifests.errors import ManifestError
from relabel.manifests.files import Storage, translate_errors
from relabel.manifests.records import sha256_file
from relabel.manifests.secrets import counted
from relabel.manifests.store import LocalStore, open_bundle_store


@click.command(epilog="Example: relabel pull s3://bucket/models/ecom@stable models/ecom")
@click.argument("arguments", nargs=-1, metavar="URL/NAME[@CHANNEL|@VERSION] DEST")
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="FILE",
    help="Public ed25519 key (PEM) that must have signed; or RELABEL_TRUST_KEY.",
)
@click.option(
    "--keep",
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    help="Versions that stay in DEST.",
)
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
    check_parity: bool,
    script: str | None,
    output: str,
) -> int:
    """Let DEST/current be the version that a channel points to (stable by default).

    What is here is kept, what is missing is fetched and resumed, every digest is checked, and one link is switched. A
    damaged or hostile bundle is refused with exit 3, an unsigned (with --key) or downgraded one with exit 5, and the
    active version is unchanged. Where the version serves already, its link and files are read, and what is damaged is
    fetched again. After --rollback, pulls leave DEST alone until the channel moves on. It never goes to a version that
    a channel left by a rollback, unless --to names it.
    """
    given = given_parameters().keys() - {"output"}
    if script is not None:
        if given != {"script"}:
            raise click.UsageError("--script takes no other option: relabel pull --script pull.py")
        return _write_script(local_folder(script, "--script"), output)
    if rollback:
        if len(arguments) != 1 or given - {"arguments", "rollback", "to"}:
            raise click.UsageError("--rollback takes one argument, DEST, and no other option but --to and --output.")
        destination = ServingFolder(local_folder(arguments[0], "DEST"))
        with translate_refusals(), translate_errors("roll back in", destination.folder):
            return _emit_pull(roll_back(destination, to), destination, output)
    if to is not None:
        raise click.UsageError("--to goes with --rollback. To pull a version: URL/NAME@VERSION.")
    if len(arguments) != 2:
        raise click.UsageError(
            "Give URL/NAME@CHANNEL and DEST, for instance: relabel pull s3://bucket/models/ecom@stable models/ecom"
        )
    address = parse_address(arguments[0])
    destination = ServingFolder(local_folder(arguments[1], "DEST"))
    own = os.environ.get("RELABEL_TRUST_KEY")
    bundle_store = open_bundle_store(address.url, Storage())
    trust = trusted_keys(keys or ((own,) if own else ()))
    with TransferDisplay() as display:

        def pull_once() -> Pulled:
            return pull_version(
                bundle_store,
                address,
                destination,
                trust,
                display,
                keep=keep,
                lifts_hold=unhold,
                checks_parity=check_parity,
            )

        done = pull_once() if watch is None else follow(pull_once, destination, watch, display.write)
    if isinstance(done, ChannelWatch):
        return _emit_watch(done, destination, output)
    return _emit_pull(done, destination, output)


def _emit_pull(pulled: Pulled, destination: ServingFolder, output: str) -> int:
    code = Exit.DONE if pulled.has_switched else Exit.NOTHING_TO_DO
    result = {
        "destination": str(destination.folder),
        "current": str(destination.serving()),
        "version": pulled.served.version,
        "channel": pulled.served.channel,
        "sequence": pulled.served.sequence,
        "has_switched": pulled.has_switched,
        "is_held": pulled.is_held,
        "fetched_bytes": pulled.fetched_bytes,
        "repaired": [pulled.repaired] if pulled.repaired else [],
        "refused_by": pulled.served.refused_by,
        "exit_code": int(code),
    }
    return emit(TextResult(str(pulled), result), output, code)


def _write_script(path: Path, output: str) -> int:
    data = Path(puller.__file__).read_bytes()
    if path.is_dir():
        raise click.UsageError(f"--script {path}: is a folder. Name the file: {path}/pull.py")
    if path.exists() and not path.read_bytes().startswith(data[: data.index(b":")]):
        raise click.UsageError(f"--script {path}: is there and is no pull.py. Name another file.")
    LocalStore(path.parent).put(path.name, data)
    return emit(
        Summary(
            f"Run it: python3 {path} URL/NAME[@CHANNEL|@VERSION] DEST",
            {"path": str(path), "sha256": sha256_file(path), "exit_code": 0},
        ),
        output,
    )


def _emit_watch(watch: ChannelWatch, destination: ServingFolder, output: str) -> int:
    state = destination.state()  # the signal may have come between a switch and the state's writing
    served = state.served[0].version if state and state.served else None
    code = Exit.DONE
    if watch.stopped_by is not None and watch.stopped_by.name == "SIGINT":
        code = Exit.STOPPED
    elif watch.last_error:
        code = exit_for(watch.last_error)
    result = {
        "destination": str(destination.folder),
        "version": served,
        "pulls": watch.pulls,
        "switches": watch.switches,
        "refused": watch.refused,
        "exit_code": int(code),
    }
    return emit(Summary(f"{destination.folder}: serves {served}", result), output, code)


def is_destination(target: str) -> bool:
    """Whether bundles were pulled to a folder."""
    if "://" in target or not os.path.isdir(target):  # noqa: PTH112 (most targets are none, and the import is dear)
        return False
    return Path(target, ".pull.json").exists() or Path(target, ".versions").is_dir()


def verify_destination(folder: Path, output: str) -> int:
    """Prove that the active version is what was pulled, byte for byte; writes nothing, needs no network.

    Raises:
        ManifestError: it is not; names a file.
    """
    state, fault = _checked(folder)
    served = state.served[0]
    if fault:
        raise ManifestError(
            f"{fault}. To repair it: relabel pull URL/{state.name}@{served.channel or served.version} "
            f"{shlex.quote(str(folder))}."
        )
    result = {
        "destination": str(folder),
        "name": state.name,
        "version": served.version,
        "sha256": served.version_sha256,
        "exit_code": 0,
    }
    text = f"{folder}: verified. Version {served.version} of {state.name} serves, every byte as it was pulled."
    return emit(TextResult(text, result), output)


def is_bundle(target: str) -> bool:
    """Whether a folder is a bundle."""
    if "://" in target or not os.path.exists(os.path.join(target, puller.MANIFEST)):  # noqa: PTH110, PTH118 (see above)
        return False
    return bool(kind_of(Path(target)) == "bundle")


def verify_bundle(folder: Path, output: str) -> int:
    """Prove that a bundle is what was exported, byte for byte.

    Raises:
        ManifestError: it is not; names a file.
    """
    bundle = open_bundle(folder)
    result = {
        "bundle": str(folder),
        "name": bundle.name,
        "version": bundle.version,
        "files": len(bundle.all_files),
        "exit_code": 0,
    }
    text = (
        f"{folder}: verified. Version {bundle.version} of {bundle.name}, "
        f"{counted(len(bundle.all_files), 'file')} as exported."
    )
    return emit(TextResult(text, result), output)


def show_destination(folder: Path, output: str) -> int:
    """Show a folder's active version, whether it is whole, and which versions are kept."""
    state, fault = _checked(folder)
    code = Exit.BAD_INPUT if fault else Exit.DONE
    served = state.served[0]
    result = {
        "destination": str(folder),
        "name": state.name,
        "version": served.version,
        "channel": served.channel,
        "sequence": served.sequence,
        "faults": [fault] if fault else [],
        "kept": [
            {"version": one.version, "left_by": state.leavers(one), "refused_by": one.refused_by}
            for one in state.served
        ],
        "held": state.held,
        "exit_code": int(code),
    }
    kept = ", ".join(map(state.describe, state.served))
    summary = Summary(f"{folder}: serves {state.describe(served)}", {**result, "kept": kept})
    return emit(TextResult("\n".join([*summary.lines(), *state.remarks()]), result), output, code)


def _checked(folder: Path) -> tuple[ServingState, str]:
    with translate_refusals(), translate_errors("read", folder):
        return ServingFolder(folder).check()
