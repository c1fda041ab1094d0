"""`pairs similar`: how similar a query and its documents are, by an encoder's embeddings."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from relabel.jobs.commands.options import FORCE_HELP, Number, output_option
from relabel.jobs.exits import Exit
from relabel.jobs.output import emit, note, table
from relabel.manifests.storage.context import Storage


@click.command(
    short_help="Cosines of query and document by an encoder; similar chunks.",
    epilog="Example: relabel pairs similar chunked.parquet --to similar.parquet --model hf:org/all-MiniLM-L6-v2",
)
@click.argument("pairs_file", metavar="PAIRS")
@click.option("--to", required=True, metavar="OUT", help="Parquet file to write; with --shard, a folder.")
@click.option("--model", required=True, metavar="MODEL", help="The encoder: a directory, hf:org/name, ...")
@click.option(
    "--threshold", type=Number(-1.0, 1.0), default=0.4, show_default=True, help="A chunk is similar above this cosine."
)
@click.option("--max-tokens", type=click.IntRange(min=8), help="Cut a text there. Default: what the model takes.")
@click.option(
    "--batch-tokens",
    type=click.IntRange(min=1),
    show_default="1024 on a CPU, 8192 on a GPU",
    help="Tokens of a batch, padding included.",
)
@click.option(
    "--device", default="auto", show_default=True, metavar="NAME", help="What torch calls it: cpu, cuda, cuda:1."
)
@click.option("--shard", metavar="I/N|auto", help="Take part I (from 0) of N of the rows; auto: as a scheduler says.")
@click.option("--force", is_flag=True, help=FORCE_HELP)
@output_option
def similar(
    pairs_file: str,
    to: str,
    model: str,
    threshold: float,
    max_tokens: int | None,
    batch_tokens: int | None,
    device: str,
    shard: str | None,
    force: bool,
    output: str,
) -> int:
    """Add the cosine of query and document as `cosine`, by the embeddings of an encoder.

    Where PAIRS has chunks (relabel pairs chunk), `cosine` is that of the best chunk, `cosines` those of all, and
    `similar` the numbers of the chunks above --threshold, most similar first: RES-RAG's heuristic labels.

    With --shard each worker writes one file of the folder OUT; one that is there already is not made again.
    """
    from relabel.distill.students.embedding import Embedder
    from relabel.jobs.fetching.models import fetch_model
    from relabel.jobs.files.published_tables import check_target
    from relabel.jobs.pairs.similar import SimilarPairs, SimilarRule
    from relabel.jobs.planning.job_files import CACHE_VARIABLE
    from relabel.jobs.planning.shard_choice import worker_of
    from relabel.manifests.models.references import resolve_model

    started, storage = time.perf_counter(), Storage()
    index, count = (0, 1) if shard is None else worker_of(shard)
    target = to if shard is None else f"{to.rstrip('/')}/part-{index:05}-of-{count:05}.parquet"
    check_target(target, (pairs_file,), storage, force=force or shard is not None)
    compared = SimilarPairs(pairs_file, SimilarRule(threshold, (index, count)), storage)
    cache = Path(os.environ[CACHE_VARIABLE]) if os.environ.get(CACHE_VARIABLE) else None
    fetch_model(model, storage, cache_dir=cache)
    found = resolve_model(model, cache_dir=cache)
    embedder = Embedder(found.path, max_tokens=max_tokens, batch_tokens=batch_tokens, device=device)
    fingerprint = compared.fingerprint(found.digest, embedder.max_tokens)
    if shard is not None and not force and compared.is_done(target, fingerprint):
        return emit(
            {"output": target, "pairs": len(compared.rows)}, f"{target} is there already.", output, Exit.NOTHING_TO_DO
        )
    if not embedder.settings.is_stated:
        note(f"{model} does not say how it pools: the mean over its tokens is taken")
    counts = compared.write(target, embedder, fingerprint)
    if counts.without:
        note(f"{counts.without:,} pairs have no cosine: their query or all of their document is blank")
    result = {
        "output": target,
        "pairs": counts.pairs,
        "chunks": counts.chunks if compared.has_chunks else None,
        "similar": counts.similar if compared.has_chunks else None,
        "pairs_without_cosine": counts.without,
        "threshold": threshold,
        "model": model,
        "pooling": embedder.settings.pooling,
        "max_tokens": embedder.max_tokens,
        "device": embedder.device,
        "seconds": round(time.perf_counter() - started, 3),
    }
    lines = [("model", f"{model}, {embedder.settings.pooling} pooling, up to {embedder.max_tokens} tokens")]
    if compared.has_chunks:
        lines.append(("chunks", f"{counts.chunks:,}, {counts.similar:,} above {threshold:g}"))
    return emit(result, f"Wrote {counts.pairs:,} pairs with their cosines to {target}\n" + table(lines), output)
