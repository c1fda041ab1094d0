"""`pairs`: build pairs from citations, and give pairs their context documents; `pairs_pages.py` and `pairs_similar.py`
hold the commands that prepare documents."""

from __future__ import annotations

import time

import click

from relabel.jobs.commands.options import FORCE_HELP, Number, output_option
from relabel.jobs.commands.pairs_pages import chunk, tree
from relabel.jobs.commands.pairs_similar import similar
from relabel.jobs.output import emit, note, table
from relabel.manifests.storage.context import Storage


@click.group(epilog="Example: relabel pairs cited answers.parquet --docs docs.parquet --to pairs.parquet")
def pairs() -> None:
    """Build query-document pairs: from the citations of generated answers, their context by BM25, the chunks or the
    structure tree of their documents, and how similar these are to the query.

    Needs the extra `pairs` (polars, bm25s, lxml, markdown-it-py, mwparserfromhell).
    """


pairs.add_command(chunk)
pairs.add_command(similar)
pairs.add_command(tree)


@pairs.command(
    short_help="Likely positives and hard negatives, by citations.",
    epilog="Example: relabel pairs cited answers.parquet --docs docs.parquet --to pairs.parquet --random-negatives 3",
)
@click.argument("answers", metavar="ANSWERS")
@click.option("--docs", required=True, metavar="DOCS", help="Corpus: doc_id, and document or title and body.")
@click.option("--to", required=True, metavar="OUT", help="Parquet file to write.")
@click.option(
    "--answers-per-query",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="M: answers of a query that count.",
)
@click.option(
    "--cited-in",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="N: citations that make a likely positive.",
)
@click.option(
    "--random-negatives",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Documents sampled for each query.",
)
@click.option("--seed", type=int, default=7, show_default=True, help="Seed of the sampling.")
@click.option("--force", is_flag=True, help=FORCE_HELP)
@output_option
def cited(
    answers: str,
    docs: str,
    to: str,
    answers_per_query: int,
    cited_in: int,
    random_negatives: int,
    seed: int,
    force: bool,
    output: str,
) -> int:
    """Sort what answers were shown into likely positives and hard negatives by how many of them cite it.

    ANSWERS has the columns query_id, query, answer_id, cited and candidates (lists of document ids). A document cited
    in N of M answers is a likely positive, one shown and cited less a hard negative. Queries with fewer than M answers
    are left out.
    """
    from relabel.jobs.files.published_tables import check_target, publish
    from relabel.jobs.pairs.citations import KINDS, CitationRule, cited_pairs

    started, storage = time.perf_counter(), Storage()
    rule = CitationRule(answers_per_query, cited_in, random_negatives, seed)
    check_target(to, (answers, docs), storage, force=force)
    frame, counts = cited_pairs(answers, docs, rule, storage)
    if counts.short_queries:
        note(
            f"{len(counts.short_queries):,} queries have fewer than {answers_per_query} answers, left out: "
            f"{counts.short_names()}"
        )
    for count, what in (
        (counts.answers_unused, f"answers beyond a query's first {answers_per_query} by answer id, not counted"),
        (counts.strange_citations, "citations of documents that the query's answers were never shown, not counted"),
        (counts.missing_documents, f"candidates whose document is not in {docs}, left out"),
        (counts.twins, "hard negatives with the very text of a likely positive of their query, left out"),
        (counts.random_short, "random negatives that the corpus is too small for"),
    ):
        if count:
            note(f"{count:,} {what}")
    rows = publish(frame, to, storage, source=docs)
    result = {
        "output": to,
        "pairs": rows,
        "queries": counts.queries,
        **counts.pairs,
        "queries_left_out": len(counts.short_queries),
        "answers_unused": counts.answers_unused,
        "citations_ignored": counts.strange_citations,
        "documents_missing": counts.missing_documents,
        "same_text_left_out": counts.twins,
        "random_lacking": counts.random_short,
        "seed": seed,
        "seconds": round(time.perf_counter() - started, 3),
    }
    lines = [("queries", f"{counts.queries:,}, {len(counts.short_queries):,} left out")]
    lines += [(kind.replace("_", " "), f"{counts.pairs[kind]:,}") for kind in KINDS]
    return emit(result, f"Wrote {rows:,} pairs to {to}\n" + table(lines), output)


@pairs.command(
    short_help="The best documents of each query by BM25, as context for r3a.",
    epilog="Example: relabel pairs context pairs.parquet --to with-context.parquet",
)
@click.argument("pairs_file", metavar="PAIRS")
@click.option("--to", required=True, metavar="OUT", help="Parquet file to write.")
@click.option("--k", type=click.IntRange(1, 4), default=4, show_default=True, help="Context documents a query.")
@click.option("--corpus", metavar="FILE", help="Take them from this corpus. Default: from the documents of PAIRS.")
@click.option(
    "--max-chars", type=click.IntRange(min=1), default=2000, show_default=True, help="Cut each to this many characters."
)
@click.option(
    "--noisy",
    type=Number(0.0, 1.0, min_open=True),
    metavar="SHARE",
    help="Replace this share (0.5, 1) of each query's context, of PAIRS where it has one, by random documents.",
)
@click.option("--seed", type=click.IntRange(0), default=7, show_default=True, help="Of --noisy.")
@click.option("--force", is_flag=True, help=FORCE_HELP)
@output_option
def context(
    pairs_file: str,
    to: str,
    k: int,
    corpus: str | None,
    max_chars: int,
    noisy: float | None,
    seed: int,
    force: bool,
    output: str,
) -> int:
    """Add the column `context` for r3a: the documents that fit the query best by BM25, one list a query.

    Replaces high-click documents where there are no clicks. Grades are never looked at. With --noisy, random
    documents take the place of a share of them: how much noise does the teacher bear?
    """
    from relabel.jobs.files.published_tables import check_target, publish
    from relabel.jobs.pairs.contexts import ContextRule, with_context
    from relabel.jobs.pairs.noise import NoiseRule

    started, storage = time.perf_counter(), Storage()
    check_target(to, (pairs_file, corpus) if corpus else (pairs_file,), storage, force=force)
    rule = ContextRule(k, max_chars, None if noisy is None else NoiseRule(noisy, seed))
    frame, counts = with_context(pairs_file, rule, storage, corpus_path=corpus)
    rows = publish(frame, to, storage, source=pairs_file)
    if counts.queries_without:
        note(
            f"{counts.queries_without:,} queries have an empty context: none was given, or they share no word with "
            "any document"
        )
    result = {
        "output": to,
        "pairs": rows,
        "queries": counts.queries,
        "queries_without_context": counts.queries_without,
        "documents": counts.documents,
        "context_documents": counts.context_documents,
        "k": k,
        "noisy": noisy,
        "replaced": counts.replaced,
        "seed": seed,
        "seconds": round(time.perf_counter() - started, 3),
    }
    lines = [
        ("queries", f"{counts.queries:,}, {counts.queries_without:,} without context"),
        ("documents", f"{counts.documents:,} distinct, from {corpus or pairs_file}"),
    ]
    if noisy is not None:
        lines.append(
            (
                "noise",
                f"{counts.replaced:,} of {counts.context_documents:,} context documents of the queries, seed {seed}",
            )
        )
    return emit(result, f"Wrote {rows:,} pairs with up to {k} context documents to {to}\n" + table(lines), output)
