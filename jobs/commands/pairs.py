"""The commands `pairs cited`, `pairs context`, `pairs chunk`, `pairs tree`, `pairs similar` and `pairs unjudged`."""

import time
from collections.abc import Mapping
from typing import Any

import click

from relabel.jobs.commands.options import FORCE_HELP, Number, given_parameters, output_option, refuse_given, together
from relabel.jobs.delivery import fetch_model
from relabel.jobs.job import cache_dir
from relabel.jobs.output import Summary, emit, note
from relabel.jobs.pairs.chunks import CHUNK_COUNTS, add_cosines, chunk_pairs, open_compared, token_counter, tree_pairs
from relabel.jobs.pairs.citations import CitationRule, cited_pairs
from relabel.jobs.pairs.context import with_context
from relabel.jobs.pairs.queries import TITLE, QueryRule, made_pairs, ways_to_more
from relabel.jobs.pairs.unjudged import unjudged_pairs
from relabel.jobs.score import local_student
from relabel.jobs.systems import SystemsOptions
from relabel.jobs.tables import check_target, publish
from relabel.manifests.errors import UsageError
from relabel.manifests.files import Storage
from relabel.manifests.models import resolve_model
from relabel.manifests.secrets import counted

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
    "--max-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Tokens of a chunk at most.",
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
    started = time.perf_counter()
    storage = Storage()
    check_target(to, (pairs_file,), storage, force=force)
    count = token_counter(tokenizer, storage, cache_dir=cache_dir())
    counts = chunk_pairs(
        pairs_file,
        to,
        form,
        column,
        storage,
        max_tokens=max_tokens,
        count=count,
    )
    return emit(
        Summary(
            f"Wrote {counted(counts['pairs'], 'pair')} with their chunks to {to}",
            {
                "output": to,
                "pairs": counts["pairs"],
                "format": form,
                "max_tokens": max_tokens,
                "tokenizer": tokenizer,
                **{name: counts[name] for name in CHUNK_COUNTS},
                "seconds": round(time.perf_counter() - started, 3),
            },
        ),
        output,
    )


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
    started = time.perf_counter()
    storage = Storage()
    check_target(to, (pairs_file,), storage, force=force)
    counts = tree_pairs(
        pairs_file,
        to,
        form,
        column,
        storage,
    )
    return emit(
        Summary(
            f"Wrote {counted(counts['pairs'], 'pair')} with their trees to {to}",
            {
                "output": to,
                "pairs": counts["pairs"],
                "format": form,
                **{name: counts[name] for name in ("structure_nodes", "content_nodes", "documents_without_content")},
                "seconds": round(time.perf_counter() - started, 3),
            },
        ),
        output,
    )


@click.command(
    short_help="Cosines of query and document by an encoder; similar chunks.",
    epilog="Example: relabel pairs similar chunked.parquet --to similar.parquet --model hf:org/all-MiniLM-L6-v2",
)
@click.argument("pairs_file", metavar="PAIRS")
@click.option("--to", required=True, metavar="OUT", help="Parquet file to write.")
@click.option("--model", required=True, metavar="MODEL", help="The encoder: a directory, hf:org/name, ...")
@click.option(
    "--threshold",
    type=Number(-1.0, 1.0),
    default=0.4,
    show_default=True,
    help="A chunk is similar above this cosine.",
)
@click.option("--max-tokens", type=click.IntRange(min=8), help="Cut a text there. Default: what the model takes.")
@click.option(
    "--batch-tokens",
    type=click.IntRange(min=1),
    show_default="1024 on a CPU, 8192 on a GPU",
    help="Tokens of a batch, padding included.",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="What torch calls it: cpu, cuda, cuda:1.",
)
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
    force: bool,
    output: str,
) -> int:
    """Add the cosine of query and document as `cosine`, by the embeddings of an encoder.

    Where PAIRS has chunks (relabel pairs chunk), `cosine` is that of the best chunk, `cosines` those of all, and
    `similar` the numbers of the chunks above --threshold, most similar first: RES-RAG's heuristic labels.
    """
    from relabel.distill.students.networks import Embedder  # with torch, which no help needs

    started = time.perf_counter()
    storage = Storage()
    check_target(to, (pairs_file,), storage, force=force)
    compared = open_compared(pairs_file, storage)
    fetch_model(model, storage, cache_dir=cache_dir())
    path = resolve_model(model, cache_dir=cache_dir()).path
    embedder = Embedder(path, max_tokens=max_tokens, batch_tokens=batch_tokens, device=device)
    if not embedder.settings.is_stated:
        note(f"{model} does not say how it pools: the mean over its tokens is taken")
    counts = add_cosines(
        compared,
        to,
        embedder,
        threshold,
        storage,
    )
    return emit(
        Summary(
            f"Wrote {counted(counts['pairs'], 'pair')} with their cosines to {to}",
            {
                "output": to,
                "pairs": counts["pairs"],
                "chunks": counts["chunks"] if "chunks" in compared.schema.names else None,
                "similar": counts["similar"] if "chunks" in compared.schema.names else None,
                "pairs_without_cosine": counts["pairs_without_cosine"],
                "threshold": threshold,
                "model": model,
                "pooling": embedder.settings.pooling,
                "max_tokens": embedder.max_tokens,
                "device": embedder.device,
                "seconds": round(time.perf_counter() - started, 3),
            },
        ),
        output,
    )


@click.group(epilog="Example: relabel pairs cited answers.parquet --docs docs.parquet --to pairs.parquet")
def pairs() -> None:
    """Build query-document pairs: from the citations of generated answers, their context by BM25, the chunks or the
    structure tree of their documents, and how similar these are to the query; and what searches return unjudged.

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
@click.option(
    "--seed",
    type=int,
    default=7,
    show_default=True,
    help="Seed of the sampling.",
)
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
    started = time.perf_counter()
    storage = Storage()
    check_target(to, (answers, docs), storage, force=force)
    rule = CitationRule(answers_per_query, cited_in, random_negatives, seed)
    frame, counts = cited_pairs(answers, docs, rule, storage)
    rows = publish(frame, to, storage, source=docs)
    return emit(
        Summary(
            f"Wrote {counted(rows, 'pair')} to {to}",
            {
                "output": to,
                "pairs": rows,
                **counts,
                "seed": seed,
                "seconds": round(time.perf_counter() - started, 3),
            },
        ),
        output,
    )


@pairs.command(
    short_help="The best documents of each query by BM25, as context for r3a.",
    epilog="Example: relabel pairs context pairs.parquet --to with-context.parquet",
)
@click.argument("pairs_file", metavar="PAIRS")
@click.option("--to", required=True, metavar="OUT", help="Parquet file to write.")
@click.option(
    "--k",
    type=click.IntRange(1, 4),
    default=4,
    show_default=True,
    help="Context documents a query.",
)
@click.option("--corpus", metavar="FILE", help="Take them from this corpus. Default: from the documents of PAIRS.")
@click.option(
    "--max-chars",
    type=click.IntRange(min=1),
    default=2000,
    show_default=True,
    help="Cut each to this many characters.",
)
@click.option("--force", is_flag=True, help=FORCE_HELP)
@output_option
def context(
    pairs_file: str,
    to: str,
    k: int,
    corpus: str | None,
    max_chars: int,
    force: bool,
    output: str,
) -> int:
    """Add the column `context` for r3a: the documents that fit the query best by BM25, one list a query.

    Replaces high-click documents where there are no clicks. Grades are never read.
    """
    started = time.perf_counter()
    storage = Storage()
    check_target(to, (pairs_file, corpus) if corpus else (pairs_file,), storage, force=force)
    frame, counts = with_context(
        pairs_file,
        storage,
        k=k,
        max_chars=max_chars,
        corpus_path=corpus,
    )
    rows = publish(frame, to, storage, source=pairs_file)
    return emit(
        Summary(
            f"Wrote {counted(rows, 'pair')} with up to {k} context documents to {to}",
            {
                "output": to,
                "pairs": rows,
                **counts,
                "k": k,
                "seconds": round(time.perf_counter() - started, 3),
            },
        ),
        output,
    )


_LANGUAGES = (
    "english chinese danish dutch french german italian korean norwegian portuguese russian spanish swedish turkish"
)


@pairs.command(
    short_help="Make queries out of documents, each with candidates to label.",
    epilog="Example: relabel pairs queries docs.parquet --to more.parquet --queries 2000 --unlike test.parquet",
)
@click.argument("docs", metavar="DOCS")
@click.option("--to", required=True, metavar="OUT", help="Parquet file to write.")
@click.option(
    "--queries",
    type=click.IntRange(min=1),
    default=1200,
    show_default=True,
    help="How many, at most.",
)
@click.option("--column", metavar="NAME", help="Cut them out of this column. Default: title, or else the document.")
@click.option("--queries-in", metavar="NAME", help="Take all of this column, and cut none.")
@click.option("--by", metavar="RUN", help="Take the queries that a run of the labeler `query` over DOCS wrote.")
@click.option("--allow-partial", is_flag=True, help="Take a run that is not finished or is over its quarantine limit.")
@click.option(
    "--unlike", multiple=True, metavar="FILE", help="Held-out pairs: no query like theirs, and none of their documents."
)
@click.option(
    "--language",
    type=click.Choice(_LANGUAGES.split()),
    default="english",
    show_default=True,
    help="Its stop words are in none.",
)
@click.option(
    "--min-words",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Words of a query that is cut, at least.",
)
@click.option(
    "--max-words",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Words of a query that is cut, at most.",
)
@click.option(
    "--min-documents",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Documents that each of its words is in, at least.",
)
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    default=(1, 4, 14, 49),
    show_default=True,
    help="A candidate's place in the ranking, from 0.",
)
@click.option(
    "--candidates", metavar="STUDENT|BUNDLE", help="Rank the first --depth by its expected grade. Default: BM25 ranks."
)
@click.option(
    "--depth",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="Documents that it ranks for a query.",
)
@click.option(
    "--margin", type=Number(0.0, 1.0), help="Leave out candidates above this share of the score of a query's own."
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the drawing.",
)
@click.option("--force", is_flag=True, help=FORCE_HELP)
@output_option
def queries(
    docs: str, to: str, unlike: tuple[str, ...], allow_partial: bool, force: bool, output: str, **rule: Any
) -> int:
    """Write pairs for a teacher to label whose queries nobody searched for.

    A query is a run of words of one title, sentence or line, or a model wrote it (--by). It comes with its document,
    and with documents further down a ranking by BM25 or a student. DOCS has doc_id, and document or title and body.
    """
    _refuse_without_effect(rule)
    if rule["candidates"] and (beyond := max(rule["ranks"])) >= rule["depth"]:
        raise UsageError(f"--rank {beyond}: the student ranks --depth {rule['depth']} documents, from 0.")
    started = time.perf_counter()
    storage = Storage()
    check_target(to, (docs, *unlike, *filter(None, (rule["by"], rule["candidates"]))), storage, force=force)
    if rule["candidates"]:
        rule["candidates"] = local_student(rule["candidates"], storage)
    asked = QueryRule(**rule)
    counts = made_pairs(
        docs,
        to,
        asked,
        storage,
        unlike=unlike,
        allow_partial=allow_partial,
    )
    if counts.get("without_query"):
        note(f"{rule['by']}: {counts['without_query']:,} of its rows have no query and are left out")
    if counts.get("of_other_documents"):
        note(f"{rule['by']}: {counts['of_other_documents']:,} of its queries are left out, with their documents")
    if counts["queries"] < rule["queries"] and not rule["queries_in"] and not rule["by"]:
        note(
            f"asked for {rule['queries']:,} queries; the {counts['documents']:,} different documents give "
            f"{counts['queries']:,}. For more: {ways_to_more(asked)}"
        )
    if counts.get("cut_from") not in (None, TITLE, rule["column"]):
        note(
            f"the documents have no column `{TITLE}`: queries are phrases of sentences, many of which nobody would "
            "type. A column of titles or keywords gives better ones (--column), and a model (--by): docs/pairs.md"
        )
    return emit(
        Summary(
            f"Wrote {counted(counts['pairs'], 'pair')} of {counts['queries']:,} queries to {to}",
            {
                "output": to,
                **rule,
                **counts,
                "unlike": list(unlike),
                "seconds": round(time.perf_counter() - started, 3),
            },
        ),
        output,
    )


_OF_CUTTING = ("queries", "column", "language", "min_words", "max_words", "min_documents", "seed")


def _refuse_without_effect(rule: Mapping[str, Any]) -> None:
    """Refuse options of `queries` that say nothing about what will be made.

    Raises:
        UsageError: names them.
    """
    given = given_parameters()
    if rule["by"]:
        refuse_given(given, ("queries_in", *_OF_CUTTING), "--by takes all queries of a run, and cuts none.")
    elif rule["queries_in"]:
        refuse_given(given, _OF_CUTTING, "--queries-in takes all queries of a column, and cuts none.")
    elif rule["min_words"] > rule["max_words"]:
        raise UsageError(f"--min-words {rule['min_words']} is more than --max-words {rule['max_words']}.")
    if not rule["by"]:
        refuse_given(given, ("allow_partial",), "It is about the run that --by names.")
    if not rule["candidates"]:
        refuse_given(given, ("depth",), "Without --candidates BM25 ranks all documents.")


@pairs.command(
    short_help="What systems return and nobody labelled yet.",
    epilog="Example: relabel pairs unjudged old.run new.run --labels out/ecom --corpus docs.parquet --to more.parquet",
)
@click.argument("systems", nargs=-1, required=True, metavar="[NAME=]SYSTEM...")
@click.option("--labels", required=True, metavar="LABELS", help="What is labelled: a run's output, or a label file.")
@click.option(
    "--corpus",
    required=True,
    metavar="FILE",
    help="Corpus: doc_id, and document or title and body; of a run, the columns of its input.",
)
@click.option(
    "--queries",
    metavar="FILE",
    help="Texts of the queries: query_id and query.  [default: the input of the labels' run, or the column query of a "
    "label file]",
)
@click.option("--to", required=True, metavar="OUT", help="Parquet file to write.")
@click.option(
    "--k",
    type=click.IntRange(1, 1000),
    default=10,
    show_default=True,
    help="Documents of a query that are looked at.",
)
@click.option("--score", metavar="COL", help="Column that a table ranks by.  [default: score, else rank]")
@click.option("--by", metavar="COL", help="Query column of tables of systems and labels.  [default: query_id]")
@click.option("--doc", default="doc_id", show_default=True, metavar="COL", help="Document column of the same.")
@click.option("--label", default="grade", show_default=True, metavar="COL", help="Label column of a label file.")
@click.option(
    "--allow-partial", is_flag=True, help="Take runs that are not finished or are over their quarantine limit."
)
@click.option("--force", is_flag=True, help=FORCE_HELP)
@output_option
def unjudged(
    systems: tuple[str, ...],
    corpus: str,
    queries: str | None,
    to: str,
    force: bool,
    output: str,
    **options: Any,
) -> int:
    """Write the pairs of the systems' top k that have no label, as input of the job that made the labels.

    SYSTEM is a ranking, as `relabel systems` takes it. Columns are called as in the job's input, so that the same job
    labels the pairs, with `reuse` for those that it labelled before.
    """
    started = time.perf_counter()
    storage = Storage()
    inputs = (corpus, options["labels"], *filter(None, [queries]))
    check_target(to, inputs, storage, force=force)
    frame, counts = unjudged_pairs(systems, corpus, queries, SystemsOptions(**options), storage)
    rows = publish(frame, to, storage, source=corpus)
    if counts["without_query_text"]:
        note(
            f"{counts['without_query_text']:,} pairs are left out for want of their query's text, which a table of "
            "query_id and query gives: --queries"
        )
    return emit(
        Summary(
            f"Wrote {rows:,} unjudged pairs to {to}",
            {
                "output": to,
                "pairs": rows,
                **counts,
                "k": options["k"],
                "seconds": round(time.perf_counter() - started, 3),
            },
        ),
        output,
    )
