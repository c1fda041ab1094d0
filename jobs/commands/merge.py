"""`merge`: several outputs become one."""

from __future__ import annotations

import click

from relabel.jobs.commands.options import output_option
from relabel.jobs.exits import Exit
from relabel.jobs.merge import merge_outputs
from relabel.jobs.output import emit_record
from relabel.manifests.files import Storage
from relabel.manifests.records import plain


@click.command(epilog="Example: relabel merge out/monday out/tuesday --to out/week")
@click.argument("outputs", nargs=-1, required=True, metavar="OUTPUT...")
@click.option("--to", required=True, metavar="FOLDER", help="Where the merged output goes; a folder of its own.")
@click.option("--name", metavar="NAME", help="Name of the merged output.  [default: that of the first]")
@click.option(
    "--allow-mixed",
    is_flag=True,
    help="Merge also what different engines, models or templates made; the manifest says so.",
)
@output_option
def merge(outputs: tuple[str, ...], to: str, name: str | None, allow_mixed: bool, output: str) -> int:
    """Join outputs that were made in one way into one that reads like any other.

    OUTPUTs are finished runs over different inputs, or parts of one run whose shards were done in different places. Row
    ids are counted on through the inputs in the order given. Outputs of different engines, models or templates are
    refused (exit 5) with what differs. The same command again continues where it was stopped, and follows OUTPUTs that
    were retried or redone since.
    """
    merged, was_written_now = merge_outputs(outputs, to, Storage(), name=name, allow_mixed=allow_mixed)
    rows = merged.rows
    code = Exit.OVER_LIMIT if merged.over_limit else Exit.DONE if was_written_now else Exit.NOTHING_TO_DO
    result = {
        "exit_code": int(code),
        "output": to,
        "name": merged.name,
        "fingerprint": merged.fingerprint,
        "outputs": list(outputs),
        "rows": rows.in_,
        "labelled": rows.labelled,
        "reused": rows.reused,
        "quarantined": rows.quarantined,
        "over_limit": merged.over_limit,
        "mixed": plain(merged.mixed),
        "files": len(merged.labels) + len(merged.quarantine),
    }
    state = "merged, every row accounted for" if was_written_now else "nothing to do, merged already"
    if merged.over_limit:
        state += f", but {merged.failed_fraction:.1%} of rows are quarantined, over the limit of "
        state += f"{merged.max_failed_fraction:.1%}; everything is kept"
    return emit_record(f"{merged.name}: {state}, {to}", result, output, code)
