"""`pairs tree`: the structure of documents, to be routed through."""

from __future__ import annotations

import time
from typing import Any

import click

from jobs.commands.options import output_option
from jobs.exits import Exit
from jobs.output import emit, table
from manifests.storage.context import Storage


@click.command(
    short_help="Clean the documents and give each its structure tree.",
    epilog="Example: relabel pairs tree pages.parquet --to trees.parquet --format wikitext",
)
@click.argument("pairs_file", metavar="PAIRS")
@click.option("--to", required=True, metavar="OUT", help="Parquet file to write.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["html", "markdown", "wikitext", "text"]),
    default="html",
    show_default=True,
    help="What the documents are.",
)
@click.option("--column", metavar="NAME", help="Column of the documents. Default: html, document, or title and body.")
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
@output_option
def tree(pairs_file: str, to: str, form: Any, column: str | None, force: bool, output: str) -> int:
    """Write the cleaned text of each document as `document`, and its headings and passages as `tree`.

    The root is the title (the column title, where there is one). A heading is a structure node below the last heading
    of a lower level; a paragraph, a table or an item of a list is a content node. Each has its place in `document`.
    """
    from jobs.files.tables import check_target
    from jobs.pairs.page_trees import tree_pairs

    started, storage = time.perf_counter(), Storage()
    check_target(to, (pairs_file,), storage, force=force)
    counts = tree_pairs(pairs_file, to, form, column, storage)
    result = {
        "output": to,
        "pairs": counts.pairs,
        "format": form,
        "structure_nodes": counts.nodes["structure"],
        "content_nodes": counts.nodes["content"],
        "documents_without_content": counts.without_content,
        "seconds": round(time.perf_counter() - started, 3),
    }
    lines = [
        ("nodes", f"{counts.nodes['structure']:,} structure, {counts.nodes['content']:,} content, beside the roots"),
        ("without content", f"{counts.without_content:,} documents"),
    ]
    emit(result, f"Wrote {counts.pairs:,} pairs with their trees to {to}\n" + table(lines), output)
    return Exit.DONE
