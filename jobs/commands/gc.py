"""`gc`: versions and files that nothing points to."""

from __future__ import annotations

import re

import click

from relabel.jobs.commands.options import output_option
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit, table
from relabel.manifests.storage.context import Storage

KEEP_MOVES = 10


_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)?")


_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


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
    from relabel.export.gc import collect
    from relabel.jobs.delivery.transfers import size_text
    from relabel.manifests.storage.bundle_stores import open_bundle_store

    bundle_store = open_bundle_store(url, Storage())
    found = collect(bundle_store, keep=keep, grace_s=_seconds(grace), deletes=deletes, on_progress=lambda _count: None)
    code = Exit.DONE if found.marked or found.deleted or found.swept or not deletes else Exit.NOTHING_TO_DO
    would = "" if deletes else "would be "
    rows = [
        ("kept", f"{found.garbage.kept_versions} versions, {found.garbage.kept_objects} objects"),
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
    return emit(result, f"{bundle_store.url}\n" + table(rows) + tail, output, code)


def _seconds(text: str) -> float:
    matched = _DURATION.fullmatch(text.strip())
    if matched is None:
        raise click.UsageError(f"--grace {text}: write a number and s, m, h or d, for instance 12h.")
    return float(matched[1]) * _UNIT_S[matched[2] or "s"]
