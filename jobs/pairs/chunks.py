"""Adds to pairs what is read of their documents: the structure tree of each, its chunks of at most a given number of
tokens, or how similar they are to the query."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from relabel.jobs.pairs.pages import BlockKind, CleanedPage, Extent, Form, PageBlock, fit, read_page
from relabel.jobs.tables import OpenTables, add_columns, open_tables
from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.tables import CHUNK, INPUT_KINDS, document_columns, is_text
from relabel.manifests.trees import COLUMN, CONTENT, NO_PARENT, NODES, ROOT, STRUCTURE, Node

if TYPE_CHECKING:
    from relabel.distill.students.networks import Embedder
    from relabel.labelers.engines.transformers import TokenizerFolder

# ------------------------------------------------------------------------------
# Reads the document of each pair and adds columns to the pairs. Memory does not grow with the file.


DOCUMENT = "document"
TITLE = "title"
TEXT = pa.large_string()
_BATCH_ROWS = 32
"""Rows read at a time; a page may have megabytes."""


def add_page_columns(
    pairs_path: str,
    to: str,
    form: Form,
    column: str | None,
    added: Mapping[str, pa.DataType],
    values: Callable[[CleanedPage, str, bool], Sequence[Any]],
    storage: Storage,
) -> None:
    """Write the pairs with further columns, rows in the order of the input.

    Args:
        form: of the documents; a title is text in any case.
        column: that holds the documents; None for `html`, else the columns that a job would read.
        added: name and type of each; `document` may take the place of the one that was read.
        values: one for each added column, of a page, its title (of the column `title`, else empty), and whether the
            title is the page's first block.
    Raises:
        InputError: a file or column is off, or a column that is written is there already.
        DiskFullError, StoreError: it can't be written; what was at `to` before stays.
        MissingExtraError: what reads the documents is not installed.
    """
    pairs = open_tables(pairs_path, {column: "string"} if column else {}, storage, role="PAIRS")
    columns = _document_columns(column, pairs)
    pairs.refuse_taken([name for name in added if name != DOCUMENT or DOCUMENT not in columns])
    names = set(columns)
    if TITLE in pairs.schema.names and is_text(pairs.schema.field(TITLE).type):
        names.add(TITLE)

    def values_of_rows(table: pa.Table) -> dict[str, Sequence[Any]]:
        texts = table.select(sorted(names)).to_pylist()
        rows = [values(*_read(row, columns, form, column)) for row in texts]
        if not rows:
            return dict.fromkeys(added, ())
        return dict(zip(added, zip(*rows, strict=True), strict=True))

    add_columns(
        pairs,
        to,
        added,
        values_of_rows,
        storage,
        batch_rows=_BATCH_ROWS,
    )


def _document_columns(column: str | None, pairs: OpenTables) -> tuple[str, ...]:
    """The columns that hold the documents.

    Raises:
        InputError: there are none, or they hold no text.
    """
    names = pairs.schema.names
    columns: tuple[str, ...]
    if column:
        columns = (column,)
    elif "html" in names:
        columns = ("html",)
    elif DOCUMENT in names:
        columns = (DOCUMENT,)
    else:
        columns = tuple(name for name in (TITLE, "body") if name in names)
    if not columns:
        raise InputError(
            f"{pairs.named} (PAIRS): no column for the document: neither `html`, `document`, `title` nor `body`. It "
            f"has {', '.join(names)}. Name it with --column."
        )
    pairs.check_columns(dict.fromkeys(columns, "string"))
    return columns


def _read(
    row: Mapping[str, str | None], columns: Sequence[str], form: Form, column: str | None
) -> tuple[CleanedPage, str, bool]:
    has_title = TITLE in columns and column is None
    texts = [(text, name) for name in columns if (text := row[name])]
    page = read_page((text, "text" if name == TITLE and has_title else form) for text, name in texts)
    title = " ".join((row.get(TITLE) or "").split()) if column != TITLE else ""
    return page, title, has_title and bool(title)


# The structure tree of a page: its headings, and what is under each.
#
# Source: RDR2 (papers, section 3.2). A paragraph is a node, a table is one, and so is each outermost item of a list, as
# in the paper's own example. A heading is under the last one of a lower level, whatever levels are skipped.


def tree_pairs(pairs_path: str, to: str, form: Form, column: str | None, storage: Storage) -> Counter[str]:
    """Write the pairs with the columns `document` and `tree`, rows in the order of the input; pairs and nodes (without
    the roots) by type, and documents without content.

    Raises:
        InputError, DiskFullError, StoreError, MissingExtraError: see `add_page_columns`.
    """
    counts = Counter[str]()

    def values(page: CleanedPage, title: str, has_title: bool) -> Sequence[Any]:
        nodes = tree_of(page, title, has_title=has_title)
        num_content = sum(node.is_content for node in nodes[1:])
        counts.update(
            pairs=1,
            documents_without_content=int(not any(node.is_content for node in nodes)),
            content_nodes=num_content,
            structure_nodes=len(nodes) - 1 - num_content,
        )
        return page.text, [node._asdict() for node in nodes]

    add_page_columns(
        pairs_path=pairs_path,
        to=to,
        form=form,
        column=column,
        added={DOCUMENT: TEXT, COLUMN: NODES},
        values=values,
        storage=storage,
    )
    return counts


def tree_of(page: CleanedPage, title: str = "", *, has_title: bool = False) -> list[Node]:
    """The nodes of a page, the root first.

    Args:
        title: the root's text.
        has_title: the page begins with it, so that the root is there, and is not also content.
    """
    blocks = list(page.blocks)
    span = blocks.pop(0).span if has_title else Extent(0, 0)
    text = page.text[span.start : span.end] if has_title else fit(title)
    nodes = [
        Node(
            id=ROOT,
            type=STRUCTURE,
            level=0,
            text=text,
            start=span.start,
            end=span.end,
            parent=NO_PARENT,
        )
    ]
    above = [(0, nodes[0])]
    """The headings that the next block is under, each with its level on the page."""
    for block in blocks:
        if block.kind == "heading":
            while above[-1][0] >= block.level:
                above.pop()
        parent = above[-1][1]
        is_heading = block.kind == "heading"
        spans: Sequence[Extent] = (block.span,)
        if is_heading:  # without its marks
            spans = (Extent(block.span.end - len(block.title), block.span.end),)
        elif block.kind == "list":
            spans = block.parts
        for start, end in spans:
            nodes.append(
                Node(
                    id=len(nodes),
                    type=STRUCTURE if is_heading else CONTENT,
                    level=parent.level + 1,
                    text=page.text[start:end],
                    start=start,
                    end=end,
                    parent=parent.id,
                )
            )
        if is_heading:
            above.append((block.level, nodes[-1]))
    return nodes


# ------------------------------------------------------------------------------
# Splits documents into chunks of at most a given number of tokens, and adds the chunks to the pairs.


CountTokens = Callable[[str], int]
_PIECE = re.compile(r"[A-Za-z]{1,6}|\S")


def count_pieces(text: str) -> int:
    """Runs of up to 6 ASCII letters, and any other character that is no white space.

    Of 196 web pages' tokens by SmolLM2's tokenizer that is 0.97 for English and 0.98 for Chinese, Japanese and Korean,
    and 1.12 and 1.0 of those by BERT's.
    """
    return sum(1 for _ in _PIECE.finditer(text))


def counter_digest(reference: str | None, storage: Storage, *, cache_dir: Path | None = None) -> str:
    """What the counts of `token_counter` depend on: the digest of the tokenizer's files, or `none` without one.

    Raises:
        ModelError: as `token_counter`.
    """
    return "none" if reference is None else _folder(reference, storage, cache_dir).digest


def token_counter(
    reference: str | None,
    storage: Storage,
    *,
    cache_dir: Path | None = None,
    purpose: str = "relabel pairs chunk --tokenizer",
) -> CountTokens:
    """Count by the tokenizer that a model reference names, or by `count_pieces`.

    The texts of control tokens count as ordinary characters, which they are in data; no token of a sequence's start or
    end counts.

    Args:
        reference: a local directory may hold the tokenizer alone.
        cache_dir: where fetched models are kept; default `~/.cache/relabel`.
        purpose: who needs it, for the message where transformers is not there.
    Raises:
        ModelError: there is no such model, it can't be fetched, or it has no fast tokenizer.
        MissingExtraError: transformers is not installed.
    """
    if reference is None:
        return count_pieces
    backend: Any = _folder(reference, storage, cache_dir).load(purpose=purpose).backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return lambda text: len(backend.encode(text, add_special_tokens=False).ids)


def _folder(reference: str, storage: Storage, cache_dir: Path | None) -> TokenizerFolder:
    from relabel.jobs.delivery import fetch_model
    from relabel.labelers.engines.transformers import tokenizer_folder

    fetch_model(reference, storage, cache_dir=cache_dir)
    return tokenizer_folder(reference, str(cache_dir) if cache_dir else None)


_CLOSING = "[\"')\\]\u2019\u201d\u00bb\u300d\u300f\u3011\uff09]*+"
_SENTENCE_END = re.compile(
    # A small letter goes on ("approx. five"). The rest is for time that grows with the text alone.
    rf"(?<![.!?…])[.!?…]++{_CLOSING}(?=\s++[^\sa-z])|(?<![。！？｡])[。！？｡]++{_CLOSING}"
)
_LEVELS = (re.compile("\n"), _SENTENCE_END, re.compile(r"\s+"))
"""What ends a line, a sentence and a word."""


class Piece(NamedTuple):
    """A stretch of text and its tokens."""

    span: Extent
    num_tokens: int


def split(text: str, parts: Sequence[Extent], max_tokens: int, count: CountTokens) -> Iterator[Piece]:
    """Pieces that hold as much as fits, in order; what lies between two is white space.

    Args:
        parts: in order, parted by white space alone; at least one.
        max_tokens: at least 1; only a single character that has more tokens by itself is a piece with more.
    """
    whole = Extent(parts[0].start, parts[-1].end)
    num_tokens = count(text[whole.start : whole.end])
    if num_tokens <= max_tokens:
        yield Piece(whole, num_tokens)
        return
    yield from _packed(text, [*_fitting(text, parts, max_tokens, count)], max_tokens, count)


def _packed(text: str, units: Sequence[Piece], max_tokens: int, count: CountTokens) -> Iterator[Piece]:
    """Neighbours put together. Tokens of two texts needn't add up to those of both, so what is put together is
    counted again.
    """
    first = 0
    while first < len(units):
        last = first
        total = units[first].num_tokens
        while last + 1 < len(units) and total + units[last + 1].num_tokens <= max_tokens:
            last += 1
            total += units[last].num_tokens
        while last > first:
            total = count(text[units[first].span.start : units[last].span.end])
            if total <= max_tokens:
                break
            last -= 1
        yield units[first] if last == first else Piece(Extent(units[first].span.start, units[last].span.end), total)
        first = last + 1


def _fitting(
    text: str, spans: Sequence[Extent], max_tokens: int, count: CountTokens, level: int = 0
) -> Iterator[Piece]:
    """The spans, those that are too long cut up by the levels below."""
    for span in spans:
        num_tokens = count(text[span.start : span.end])
        if num_tokens <= max_tokens or span.end - span.start == 1:
            yield Piece(span, num_tokens)
        else:
            finer = [*_stretches(text, span, _LEVELS[level])] if level < len(_LEVELS) else [*_cuts(span, max_tokens)]
            yield from _fitting(
                text,
                finer,
                max_tokens,
                count,
                level + 1,
            )


def _stretches(text: str, span: Extent, ends: re.Pattern[str]) -> Iterator[Extent]:
    """What lies between the ends that a pattern finds, without white space around it."""
    start = span.start
    for end in itertools.chain((match.end() for match in ends.finditer(text, *span)), [span.end]):
        if (stretch := text[start:end]).strip():
            yield Extent(start + len(stretch) - len(stretch.lstrip()), start + len(stretch.rstrip()))
        start = end


def _cuts(span: Extent, max_tokens: int) -> Iterator[Extent]:
    """Stretches of as many characters as tokens are allowed, and of half as many where those are too long."""
    length = span.end - span.start
    step = max_tokens if length > max_tokens else -(-length // 2)
    for start in range(span.start, span.end, step):
        yield Extent(start, min(start + step, span.end))


# Chunks of a document: what a labeler chooses evidence from.
#
# Source: RES-RAG, Algorithm 1: a heading ends the chunk before it and becomes the path of those after it; tables and
# lists are chunks of their own; what is too long is cut at sentences, rows or items; duplicates go; by offset, numbered
# from 1. Ours differs in three ways. A table or list ends the text before it too, else the text around it would be no
# stretch of the document. Duplicates have the same headings above them, as the paper's chunks begin with these. And a
# heading with nothing under it is a chunk, which would otherwise get lost.

MOST_HEADING_CHARS = 160
"""Of a heading as part of a path, which is in each chunk below it: a page with a heading of a megabyte would become
gigabytes.
"""


class PageChunk(NamedTuple):
    """A chunk, as it is written.

    Args:
        n: its number, from 1.
        heading_path: the headings that it is under, the outermost first, each cut to `MOST_HEADING_CHARS`.
        text: the document's code points `start` up to `end`.
        token_len: tokens of the text, without its headings.
    """

    n: int
    type: BlockKind
    heading_path: tuple[str, ...]
    text: str
    token_len: int
    start: int
    end: int


def chunk_page(page: CleanedPage, max_tokens: int, count: CountTokens) -> tuple[list[PageChunk], int]:
    """The chunks, and how many duplicates were dropped.

    Chunks are in order and don't overlap. Every character that is no white space lies in one, in a heading, or in a
    duplicate. None has more than `max_tokens`, unless it is a single character.
    """
    chunks: list[PageChunk] = []
    seen: set[bytes] = set()
    num_duplicates = 0
    for kind, heading_path, parts in _sections(page):
        for span, num_tokens in split(page.text, parts, max_tokens, count):
            text = page.text[span.start : span.end]
            # equal for texts that differ in white space and case alone, under the same headings
            normal = "\n".join(" ".join(line.casefold().split()) for line in (*heading_path, text))
            key = hashlib.blake2b(normal.encode(), digest_size=16).digest()
            if key in seen:
                num_duplicates += 1
                continue
            seen.add(key)
            chunks.append(
                PageChunk(
                    n=len(chunks) + 1,
                    type=kind,
                    heading_path=heading_path,
                    text=text,
                    token_len=num_tokens,
                    start=span.start,
                    end=span.end,
                )
            )
    return chunks, num_duplicates


def _sections(page: CleanedPage) -> Iterator[tuple[BlockKind, tuple[str, ...], Sequence[Extent]]]:
    """What will be one chunk each, or several where it is too long: its kind, the headings above it, and its parts."""
    above: list[PageBlock] = []
    """The headings that the next block is under."""
    buffer: list[Extent] = []
    is_bare = False
    """Whether nothing is under the last heading yet."""
    for block in (*page.blocks, PageBlock("heading", Extent(0, 0), ())):  # of level 0: the end of all that is above
        path = tuple(heading.title[:MOST_HEADING_CHARS] for heading in above)
        if buffer and block.kind != "text":
            yield "text", path, buffer
            buffer = []
        if block.kind == "text":
            buffer.append(block.span)
        elif block.kind == "heading":
            if is_bare and block.level <= above[-1].level:
                yield "text", path[:-1], [above[-1].span]
            while above and above[-1].level >= block.level:
                above.pop()
            above.append(block)
        else:
            yield block.kind, path, block.parts
        is_bare = block.kind == "heading"


_CHUNK = pa.struct([CHUNK[0], ("type", TEXT), *list(CHUNK)[1:]])  # the fields of `PageChunk`, in its order
_CHUNK_COLUMNS = {DOCUMENT: TEXT, "chunks": pa.large_list(_CHUNK), "jsonld": pa.large_list(TEXT)}


CHUNK_COUNTS = (
    *("chunks", "text_chunks", "table_chunks", "list_chunks", "tokens"),
    *("duplicates_left_out", "documents_without_chunks", "json_ld", "json_ld_unreadable"),
)
"""What is counted besides pairs, in the order in which it is shown."""


def chunk_pairs(
    pairs_path: str,
    to: str,
    form: Form,
    column: str | None,
    storage: Storage,
    *,
    max_tokens: int,
    count: CountTokens,
) -> Counter[str]:
    """Write the pairs with the columns `document`, `chunks` and `jsonld`, rows in the order of the input; pairs, chunks
    by type, and what was left out.

    Args:
        form, column: see `add_page_columns`.
        max_tokens: of a chunk.
        count: tokens of a text.
    Raises:
        InputError, DiskFullError, StoreError, MissingExtraError: see `add_page_columns`.
    """
    counts = Counter[str]()

    def values(page: CleanedPage, *_: object) -> Sequence[Any]:
        cut, num_duplicates = chunk_page(page, max_tokens, count)
        counts.update(
            pairs=1,
            documents_without_chunks=int(not cut),
            duplicates_left_out=num_duplicates,
            json_ld=len(page.json_ld),
            json_ld_unreadable=page.unreadable_json_ld,
            chunks=len(cut),
            tokens=sum(chunk.token_len for chunk in cut),
        )
        counts.update(f"{chunk.type}_chunks" for chunk in cut)
        return page.text, cut, page.json_ld

    add_page_columns(
        pairs_path=pairs_path,
        to=to,
        form=form,
        column=column,
        added=_CHUNK_COLUMNS,
        values=values,
        storage=storage,
    )
    return counts


# ------------------------------------------------------------------------------
# How similar a query and its documents are, by the cosine of their embeddings: for a ranking, and for RES-RAG's
# heuristic labels, the chunks of a document whose cosine is above 0.4. Source: RES-RAG, section 3.4.1 (a sentence
# embedding model, chunks above 0.4).


COSINE = "cosine"
COSINES = "cosines"
SIMILAR = "similar"
_CHUNKS = "chunks"
_ADDED = {COSINE: pa.float32(), COSINES: pa.large_list(pa.float32()), SIMILAR: pa.large_list(pa.int32())}
_EMBEDDED_ROWS = 256
"""Rows whose texts are embedded together, so that texts of like length share a batch."""


def open_compared(path: str, storage: Storage) -> OpenTables:
    """Pairs to be compared, checked without reading rows.

    Raises:
        InputError: a file or column is off, or a column that is written is there already.
    """
    pairs = open_tables(path, {"query": "string"}, storage, role="PAIRS")
    if _CHUNKS not in pairs.schema.names:
        pairs.check_columns(dict.fromkeys(_documents(pairs), "string"))
    elif not INPUT_KINDS["list<chunk>"][1](pairs.schema.field(_CHUNKS).type):
        raise InputError(f"{pairs.named} (PAIRS): column `chunks` is not as `relabel pairs chunk` writes it.")
    pairs.refuse_taken(_added(pairs))
    return pairs


def _documents(pairs: OpenTables) -> tuple[str, ...]:
    return document_columns(pairs.schema.names, f"{pairs.named} (PAIRS)")


def _added(pairs: OpenTables) -> dict[str, pa.DataType]:
    return {name: kind for name, kind in _ADDED.items() if _CHUNKS in pairs.schema.names or name == COSINE}


def add_cosines(pairs: OpenTables, to: str, embedder: Embedder, threshold: float, storage: Storage) -> Counter[str]:
    """Write the pairs with the columns `cosine` and, where they have chunks, `cosines` and `similar`; counts of pairs,
    chunks and similar ones.

    Args:
        threshold: a chunk is similar above this cosine.
    Raises:
        InputError, DiskFullError, StoreError: see `add_columns`.
    """
    counts = Counter[str]()

    def values(table: pa.Table) -> dict[str, Sequence[Any]]:
        queries = [text or "" for text in table["query"].to_pylist()]
        chunks = table[_CHUNKS].to_pylist() if _CHUNKS in pairs.schema.names else None
        if chunks is not None:
            texts = [[chunk["text"] or "" for chunk in row or ()] for row in chunks]
        else:
            parts = zip(*(table[name].to_pylist() for name in _documents(pairs)), strict=True)
            texts = [["\n\n".join(part for part in row if part)] for row in parts]
        cosines = cosines_of(queries, texts, embedder)
        best = [max((cosine for cosine in row if cosine is not None), default=None) for row in cosines]
        counts["pairs"] += len(queries)
        counts["pairs_without_cosine"] += best.count(None)
        if chunks is None:
            return {COSINE: best}
        numbers = [[chunk["n"] for chunk in row or ()] for row in chunks]
        chosen = [above(*pair, threshold) for pair in zip(numbers, cosines, strict=True)]
        counts["chunks"] += sum(map(len, numbers))
        counts["similar"] += sum(map(len, chosen))
        return {COSINE: best, COSINES: cosines, SIMILAR: chosen}

    add_columns(
        pairs,
        to,
        _added(pairs),
        values,
        storage,
        batch_rows=_EMBEDDED_ROWS,
    )
    return counts


def cosines_of(queries: Sequence[str], texts: Sequence[Sequence[str]], embedder: Embedder) -> list[list[float | None]]:
    """The cosine of each row's query with each of its texts, -1 to 1; None where either is blank."""
    distinct = {text: number for number, text in enumerate(dict.fromkeys(queries))}
    queries_QD = embedder.embed(list(distinct), "query")
    texts_ND = embedder.embed(list(itertools.chain.from_iterable(texts)), "document")
    query_N = np.repeat([distinct[query] for query in queries], [len(row) for row in texts]).astype(np.int64)
    cosines = iter(np.einsum("nd,nd->n", queries_QD[query_N], texts_ND).clip(-1.0, 1.0).tolist())
    return [
        [cosine if query.strip() and text.strip() else None for text, cosine in zip(row, cosines, strict=False)]
        for query, row in zip(queries, texts, strict=True)
    ]


def above(numbers: Sequence[int], cosines: Sequence[float | None], threshold: float) -> list[int]:
    """The numbers of the chunks whose cosine is above the threshold, the most similar first, of equals the earlier."""
    similar = []
    for chunk, cosine in enumerate(cosines):
        if cosine is not None and cosine > threshold:
            similar.append((-cosine, chunk))
    return [numbers[chunk] for _, chunk in sorted(similar)]
