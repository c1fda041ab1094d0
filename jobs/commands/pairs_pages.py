"""`pairs chunk` and `pairs tree`: documents as pages, cut into chunks or given their structure."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click

from relabel.jobs.commands.options import FORCE_HELP, output_option, together
from relabel.jobs.output import emit, note, table
from relabel.manifests.storage.context import Storage

page_options = together(
    click.option(
        "--column", metavar="NAME", help="Column of the documents. Default: html, document, or title and body."
    ),
    click.option(
        "--format",
        "form",
        type=click.Choice(["html", "markdown", "wikitext", "text"]),
        default="html",
        show_default=True,
        help="What the documents are.",
    ),
    click.option("--to", required=True, metavar="OUT", help="Parquet file to write."),
    click.argument("pairs_file", metavar="PAIRS"),
)
"""Which documents are read, as what, and where they go."""


@click.command(
    short_help="Clean the documents and cut them into chunks to choose evidence from.",
    epilog="Example: relabel pairs chunk pages.parquet --to chunked.parquet --format html",
)
@page_options
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Tokens of a chunk at most."
)
@click.option(
    "--tokenizer",
    metavar="MODEL",
    help="Count by this model's tokenizer: a directory, hf:org/name, ... Default: 6 letters are a token, and any other "
    "character.",
)
@click.option("--force", is_flag=True, help=FORCE_HELP)
@output_option
def chunk(
    pairs_file: str,
    to: str,
    form: Any,
    column: str | None,
    max_tokens: int,
    tokenizer: str | None,
    force: bool,
    output: str,
) -> int:
    """Write the cleaned text of each document as `document`, its chunks as `chunks`, and its JSON-LD as `jsonld`.

    A chunk is text under one heading, a table or a list, with its headings and its place in `document`. What is too
    long is cut at sentences, rows or items. Scripts, styles, navigation and hidden parts of HTML are left out.
    """
    from relabel.jobs.files.published_tables import check_target
    from relabel.jobs.pairs.chunking import ChunkRule, chunk_pairs
    from relabel.jobs.pairs.token_counts import token_counter
    from relabel.jobs.planning.job_files import CACHE_VARIABLE

    started, storage = time.perf_counter(), Storage()
    check_target(to, (pairs_file,), storage, force=force)
    cache = os.environ.get(CACHE_VARIABLE)
    count = token_counter(tokenizer, storage, cache_dir=Path(cache) if cache else None)
    counts = chunk_pairs(pairs_file, to, ChunkRule(form, column, count, max_tokens), storage)
    for number, what in (
        (counts.without_chunks, "documents hold no text, so no chunk"),
        (counts.unreadable_json_ld, "scripts of JSON-LD can't be read, left out"),
    ):
        if number:
            note(f"{number:,} {what}")
    num_chunks = sum(counts.chunks.values())
    result = {
        "output": to,
        "pairs": counts.pairs,
        "format": form,
        "max_tokens": max_tokens,
        "tokenizer": tokenizer,
        "chunks": num_chunks,
        **{f"{kind}_chunks": count for kind, count in counts.chunks.items()},
        "tokens": counts.tokens,
        "duplicates_left_out": counts.duplicates,
        "documents_without_chunks": counts.without_chunks,
        "json_ld": counts.json_ld,
        "json_ld_unreadable": counts.unreadable_json_ld,
        "seconds": round(time.perf_counter() - started, 3),
    }
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.chunks.items())
    lines = [
        ("chunks", f"{num_chunks:,}: {kinds}; {counts.duplicates:,} duplicates left out"),
        (
            "tokens",
            f"{counts.tokens:,}, by {tokenizer or 'the rule without a tokenizer'}",
        ),
        ("JSON-LD", f"{counts.json_ld:,} objects"),
    ]
    return emit(result, f"Wrote {counts.pairs:,} pairs with their chunks to {to}\n" + table(lines), output)


@click.command(
    short_help="Clean the documents and give each its structure tree.",
    epilog="Example: relabel pairs tree pages.parquet --to trees.parquet --format wikitext",
)
@page_options
@click.option("--force", is_flag=True, help=FORCE_HELP)
@output_option
def tree(pairs_file: str, to: str, form: Any, column: str | None, force: bool, output: str) -> int:
    """Write the cleaned text of each document as `document`, and its headings and passages as `tree`.

    The root is the title (the column title, where there is one). A heading is a structure node below the last heading
    of a lower level; a paragraph, a table or an item of a list is a content node. Each has its place in `document`.
    """
    from relabel.jobs.files.published_tables import check_target
    from relabel.jobs.pairs.page_trees import tree_pairs

    started, storage = time.perf_counter(), Storage()
    check_target(to, (pairs_file,), storage, force=force)
    counts = tree_pairs(pairs_file, to, form, column, storage)
    result = {
        "output": to,
        "pairs": counts.pairs,
        "format": form,
        "structure_nodes": counts.structure_nodes,
        "content_nodes": counts.content_nodes,
        "documents_without_content": counts.without_content,
        "seconds": round(time.perf_counter() - started, 3),
    }
    lines = [
        ("nodes", f"{counts.structure_nodes:,} structure, {counts.content_nodes:,} content, beside the roots"),
        ("without content", f"{counts.without_content:,} documents"),
    ]
    return emit(result, f"Wrote {counts.pairs:,} pairs with their trees to {to}\n" + table(lines), output)
