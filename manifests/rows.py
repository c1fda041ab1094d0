"""An input cut into shards and chunks of whole queries, and its rows read as pairs, chunk by chunk or by number."""

import contextlib
import itertools
import logging
import math
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from relabel.manifests.errors import InputError, ManifestError
from relabel.manifests.files import Storage, translate_errors
from relabel.manifests.inputs import Dataset, changed_files, changed_under_way, open_dataset, open_planned, stamp_of
from relabel.manifests.labels import QUERY_AND_DOCUMENT, Pair, Reads
from relabel.manifests.plan import FileRef, Plan, RowIdFile, ShardPlan, row_group_sizes
from relabel.manifests.process import WhenUsed
from relabel.manifests.query_numbers import Joined, QueryNumbers, SameHashError
from relabel.manifests.records import digest_of
from relabel.manifests.specs import InputSpec
from relabel.manifests.tables import STRUCT_KINDS, mended_texts, open_parquet, reading

pc = WhenUsed("pyarrow.compute")

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------
# An input's query ids, as its files hold them: a batch at a time, with the estimated tokens a row.


# Shape legend: R rows, Q queries, S shards

ID_BATCH_ROWS = 1 << 17
BYTES_PER_TOKEN = 4.0
"""UTF-8 bytes of text per token: English web text measures 4.1 to 4.5 on Qwen2.5's and SmolLM2's tokenizers."""
TOKENS_PER_PROMPT = 250.0
"""Tokens of instructions around a pair, counted on the built-in templates; used only to balance
shards and to estimate.
"""


def id_batches(dataset: Dataset) -> Iterator[tuple[pa.Array, float, str]]:
    """For each run of rows within a row group: their query ids, the estimated tokens a row, and the file.

    A footer knows a row group's bytes and no row's, so the estimate is flat within a row group.

    Raises:
        InputError: a query id that is null or not UTF-8, or a file that can't be read.
    """
    name = dataset.columns.query_id
    done = 0
    for file, groups in zip(dataset.files, dataset.group_bytes, strict=True):
        before = done
        with open_parquet(file.path, dataset.storage) as parquet, reading(file.path):
            for number, (rows, size) in enumerate(groups):
                weight = TOKENS_PER_PROMPT + size / max(rows, 1) / BYTES_PER_TOKEN
                for batch in parquet.plain_batches([name], ids=[name], batch_rows=ID_BATCH_ROWS, row_groups=[number]):
                    column = batch.column(name).slice(0, dataset.rows - done)
                    if column.null_count:
                        row = pc.index(column.is_null(), True).as_py() + done - before
                        raise InputError(
                            f"{file.path}: `{name}` is null in row {row} of the file. Every row needs a query id; "
                            "fix it."
                        )
                    yield column, weight, file.path
                    done += len(column)
                    if done == dataset.rows:
                        return


@contextlib.contextmanager
def scanned_queries(dataset: Dataset) -> Iterator[QueryNumbers]:
    """One pass over the query ids, weighed by estimated prompt tokens.

    Raises:
        InputError: as `id_batches`.
        DiskFullError: no space in TMPDIR.
    """
    for seed in itertools.count():
        with QueryNumbers(seed) as numbers:
            try:
                for ids, weight, _ in id_batches(dataset):
                    numbers.add(ids, weight)
                numbers.finish()
            except SameHashError:
                continue
            yield numbers
            return


# ------------------------------------------------------------------------------
# How the work is cut: shards of whole queries, and chunks within them, by sizes and weights of queries alone.


CHUNKS_OF_A_SHARD = 16
"""About as many chunks has a small shard by default: what becomes readable with a commit is then a small part of it,
however slow the engine is."""
FEWEST_CHUNK_ROWS = 8
CHEAP_CHUNK_ROWS = 256
"""Below it a commit costs more than the rows that it saves; a shard of 4,096 rows or more has the larger size."""
CHUNKS_OF_A_LARGE_SHARD = 64
MOST_CHUNK_ROWS = 1024
"""A file costs `run`, `verify` and `report` as much as a few hundred rows, so that a large shard has larger chunks: a
commit is still no more than a 64th of it. A shard of 65,536 rows or more has this size."""


FEWEST_SHARD_ROWS = 64
MOST_SHARDS = 16
MOST_SCATTERED_SHARDS = 4
"""Shards by default: so many that a second worker, or a fourth, finds work whenever it comes. Each scattered shard may
read all of the data.
"""


def fitting_shards(rows: int, *, chunk_rows: int | None, is_scattered: bool) -> int:
    """Number of shards where the job names none: by the rows alone, so that the same input and spec give the same plan
    on any machine.

    Args:
        chunk_rows: rows that the job wants in a chunk; a shard has at least one that is full.
    """
    fewest_rows = max(FEWEST_SHARD_ROWS, chunk_rows or 0)
    most = MOST_SCATTERED_SHARDS if is_scattered else MOST_SHARDS
    return min(max(rows // fewest_rows, 1), most)


def cut_queries(
    sizes_Q: np.ndarray, weights_Q: np.ndarray, *, shards: int, chunk_rows: int | None, whole: bool = False
) -> tuple[list[int], list[list[int]], list[float]]:
    """Cut queries, in their order, into shards of nearly equal weight and chunks of whole queries.

    Args:
        sizes_Q: rows per query, int64, each at least 1.
        weights_Q: estimated tokens per query, float64.
        shards: how many; with fewer queries than shards some stay empty.
        chunk_rows: most rows a chunk, None for what fits the shard; only a query larger than that is split over chunks.
        whole: not even that one is split; it is a chunk of its own.
    Returns:
        Shards as ranges over the rows in shard order (shards + 1 bounds); the row counts of the chunks of each shard,
        and its weight.
    """
    middles_Q = np.cumsum(weights_Q) - weights_Q / 2
    shard_of_Q = np.minimum((middles_Q * (shards / weights_Q.sum())).astype(np.int64), shards - 1)
    query_bounds = np.searchsorted(shard_of_Q, np.arange(shards + 1))
    bounds = np.append(0, np.cumsum(sizes_Q))[query_bounds]
    chunks = [
        _cut_chunks(sizes_S.tolist(), chunk_rows or fitting_chunk_rows(int(sizes_S.sum())), whole=whole)
        for sizes_S in np.split(sizes_Q, query_bounds[1:-1])
    ]
    return bounds.tolist(), chunks, np.diff(np.append(0.0, np.cumsum(weights_Q))[query_bounds]).tolist()


def fitting_chunk_rows(shard_rows: int) -> int:
    """Rows of a chunk where the job names no number: by the shard's rows alone, so that the same input and spec give
    the same plan on any machine.
    """
    small = min(max(math.ceil(shard_rows / CHUNKS_OF_A_SHARD), FEWEST_CHUNK_ROWS), CHEAP_CHUNK_ROWS)
    large = min(math.ceil(shard_rows / CHUNKS_OF_A_LARGE_SHARD), MOST_CHUNK_ROWS)
    return max(small, large)


def _cut_chunks(sizes: list[int], chunk_rows: int, *, whole: bool) -> list[int]:
    chunks: list[int] = []
    filled = 0
    for size in sizes:
        if filled and filled + size > chunk_rows:
            chunks.append(filled)
            filled = 0
        filled += size
        while filled > chunk_rows and not whole:
            chunks.append(chunk_rows)
            filled -= chunk_rows
    if filled:
        chunks.append(filled)
    return chunks


# ------------------------------------------------------------------------------
# How a plan is made: footers and the query-id column are read and nothing else. The same input and spec give the same
# plan.


def make_plan(
    dataset: Dataset, parts: dict[str, Any], *, name: str, shards: int | None, chunk_rows: int | None
) -> tuple[Plan, dict[str, bytes]]:
    """Read the query ids and cut the work.

    Args:
        shards, chunk_rows: None for what fits the rows.
    Returns:
        The plan, and the files that must lie next to it, by name: row ids of scattered shards.
    Raises:
        InputError: a null query id, or a file that can't be read.
        DiskFullError: no space in TMPDIR.
    """
    with scanned_queries(dataset) as numbers:
        return _planned(dataset, numbers, parts, name=name, shards=shards, chunk_rows=chunk_rows)


def _planned(
    dataset: Dataset,
    numbers: QueryNumbers,
    parts: dict[str, Any],
    *,
    name: str,
    shards: int | None,
    chunk_rows: int | None,
) -> tuple[Plan, dict[str, bytes]]:
    """`make_plan` of queries that were scanned."""
    sizes_Q = numbers.sizes_Q
    is_scattered = numbers.is_scattered
    if shards is None:
        shards = fitting_shards(dataset.rows, chunk_rows=chunk_rows, is_scattered=is_scattered)
    # no query is in two shards, so that those beyond the number of queries would be empty, and each costs time wherever
    # shards are counted
    bounds, chunks, weights = cut_queries(
        sizes_Q,
        numbers.weights_Q,
        shards=min(shards, len(sizes_Q)),
        chunk_rows=chunk_rows,
        whole=dataset.reads.whole_query,
    )
    # first row id of every row group that is in use, and its bytes in the columns read
    groups = itertools.chain.from_iterable(dataset.group_bytes)
    group_rows, group_bytes = np.array([group for group in groups if group[0]]).T
    group_starts = np.cumsum(group_rows) - group_rows
    group_starts = group_starts[group_starts < dataset.rows]
    group_bytes = group_bytes[: len(group_starts)]
    ordered = Joined(numbers.rows_by_query())  # read where queries lie scattered alone
    plan_files: dict[str, bytes] = {}
    planned = []
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        row_ids: FileRef | None = None
        is_touched = np.zeros(len(group_starts), np.bool_)
        if not is_scattered:
            first, last = np.searchsorted(group_starts, [start, stop - 1], side="right")
            is_touched[first - 1 : last if start < stop else first - 1] = True
        elif start < stop:
            file = RowIdFile()
            for count in row_group_sizes(stop - start):
                rows = ordered.take(count)
                is_touched[np.searchsorted(group_starts, rows, side="right") - 1] = True
                file.add(rows)
            row_ids, data = file.finish(number)
            plan_files |= data
        planned.append(
            ShardPlan(
                rows=stop - start,
                first_row=None if is_scattered else start,
                row_ids=row_ids,
                chunks=chunks[number],
                estimated_tokens=round(weights[number]),
                read_bytes=int(group_bytes[is_touched].sum()),
            )
        )
    plan = Plan(
        name=name,
        fingerprint=digest_of(parts),
        parts=parts,
        rows=dataset.rows,
        queries=len(sizes_Q),
        is_scattered=is_scattered,
        text_bytes=int(group_bytes.sum()),
        files=list(dataset.files),
        shards=planned,
    )
    return plan, plan_files


# ------------------------------------------------------------------------------
# Rows of an input's columns as pairs.


def pairs_of(rows: np.ndarray, batch: pa.RecordBatch, path: str, dataset: Dataset) -> Iterator[Pair]:
    names = dataset.columns
    values: dict[str, list[Any]] = {}
    broken: dict[int, str] = {}
    for name in dataset.text_columns:
        with reading(path):
            column, positions = mended_texts(batch.column(name))
            values[name] = column.to_pylist()
        if dataset.reads.document or name == names.query or name not in names.document:
            broken |= dict.fromkeys(positions, name)
    pairs = _pairs(rows, values, dataset)
    return _with_broken_texts(pairs, broken, dataset) if broken else pairs


def _with_broken_texts(pairs: Iterator[Pair], broken: Mapping[int, str], dataset: Dataset) -> Iterator[Pair]:
    """The pairs, with a note on those of which a column is not UTF-8.

    Args:
        broken: the column, by the pair's position.
    """
    for position, pair in enumerate(pairs):
        column = broken.get(position)
        if column is None:
            yield pair
            continue
        path, row = dataset.file_row(pair.row_id)
        if (path, column) not in dataset.warned:
            dataset.warned.add((path, column))
            logger.warning(
                "%s: row %d: `%s` is not UTF-8; runs quarantine this row, and all others like it",
                path,
                row,
                column,
            )
        yield pair._replace(broken_text=f"`{column}` is not UTF-8 (row {row} of {path})")


def _pairs(rows: np.ndarray, values: Mapping[str, list[Any]], dataset: Dataset) -> Iterator[Pair]:
    names = dataset.columns
    query_column, doc_column = dataset.id_columns
    query_ids = [query_id or "" for query_id in values[query_column]]
    doc_ids = [doc_id or "" for doc_id in values[doc_column]]
    queries = [query or "" for query in values[names.query]]
    texts = [values[name] for name in names.document]
    if len(texts) == 1:
        documents = [text or "" for text in texts[0]]
    else:
        documents = ["\n\n".join(filter(None, parts)) for parts in zip(*texts, strict=True)]
    contexts: list[tuple[str, ...]] = [()] * len(rows)
    if names.context:
        contexts = [_texts(context)[:4] for context in values[names.context]]
    own = dataset.reads.columns
    if not own:
        return map(
            Pair,
            rows.tolist(),
            query_ids,
            queries,
            doc_ids,
            documents,
            contexts,
        )
    own_names = [column.name for column in own]
    own_values = [list(map(_READ_AS[column.kind], values[column.name])) for column in own]
    columns = [dict(zip(own_names, row, strict=True)) for row in zip(*own_values, strict=True)]
    return map(
        Pair,
        rows.tolist(),
        query_ids,
        queries,
        doc_ids,
        documents,
        contexts,
        columns,
    )


def _texts(values: list[str | None] | None) -> tuple[str, ...]:
    return tuple(text for text in values or () if text)


def _structs_of(kind: pa.StructType) -> Callable[[Any], tuple[dict[str, Any], ...]]:
    """With all fields in each: a null text is `""`, and a null number stays null, as all numbers of a null struct do:
    what one means is for the labeler to refuse.
    """
    fields: dict[str, Any] = {field.name: _NOTHING[field.type] for field in kind}
    null = dict.fromkeys(fields)

    def read_one(struct: dict[str, Any] | None) -> dict[str, Any]:
        struct = null if struct is None else struct
        return {name: nothing if struct[name] is None else struct[name] for name, nothing in fields.items()}

    def read(values: list[dict[str, Any] | None] | None) -> tuple[dict[str, Any], ...]:
        return tuple(map(read_one, values or ()))

    return read


_NOTHING: dict[pa.DataType, Any] = {pa.int32(): None, pa.large_string(): "", pa.large_list(pa.large_string()): []}
_READ_AS: dict[str, Callable[[Any], Any]] = {
    "string": lambda value: value or "",
    "list<string>": _texts,
    **{name: _structs_of(kind) for name, kind in STRUCT_KINDS.items()},
}
"""By kind of a labeler's input column: its value for a row."""


# ------------------------------------------------------------------------------
# Batches of an input's rows, held together where a query is, within a limit of memory.


BATCH_ROWS = 2048
BATCH_BYTES = 16 << 20
"""Rows decoded at a time, a few megabytes of ordinary text, and of about how many bytes where rows are long."""


def batches_in(dataset: Dataset, start: int, stop: int) -> Iterator[tuple[np.ndarray, pa.RecordBatch, str]]:
    """Row ids, columns and file of the rows start..stop, in order, touching only the row groups that hold them."""
    for row, batch, path in _group_batches(dataset, lambda low, high: low < stop and high > start):
        low = max(start, row)
        high = min(stop, row + batch.num_rows)
        if low < high:
            yield np.arange(low, high), batch.slice(low - row, high - low), path


def _group_batches(dataset: Dataset, wants: Callable[[int, int], bool]) -> Iterator[tuple[int, pa.RecordBatch, str]]:
    """First row id, columns and file of every batch of the row groups low..high that are wanted. A
    file is opened once.
    """
    file_first = 0
    for file, groups in zip(dataset.files, dataset.group_bytes, strict=True):
        starts = list(itertools.accumulate((rows for rows, _ in groups), initial=file_first))
        bounds = enumerate(itertools.pairwise(starts))
        touched = [group for group, (low, high) in bounds if low < high and wants(low, high)]
        if touched:
            stamp = stamp_of(file.path)
            longest = max(size / rows for rows, size in groups if rows)
            batch_rows = max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(longest, 1))))
            with open_planned(file, dataset) as parquet:
                for some in _neighbours(touched, [rows for rows, _ in groups]):
                    row = starts[some[0]]
                    for batch in parquet.plain_batches(
                        dataset.text_columns, ids=dataset.id_columns, batch_rows=batch_rows, row_groups=some
                    ):
                        if stamp_of(file.path) != stamp:
                            # before its rows are used: they may be another file's, or half of each
                            raise changed_under_way(file.path)
                        yield row, batch, file.path
                        row += batch.num_rows
        file_first += file.rows


def _neighbours(touched: list[int], group_rows: list[int]) -> Iterator[list[int]]:
    """Row groups that are read in one go: without gaps, and no more once they hold a batch of rows."""
    some: list[int] = []
    for group in touched:
        if some and (group != some[-1] + 1 or sum(group_rows[one] for one in some) >= BATCH_ROWS):
            yield some
            some = []
        some.append(group)
    if some:
        yield some


# ------------------------------------------------------------------------------
# Rows of a shard as pairs, chunk by chunk, in the shard's own order, with memory that does not grow with the data.
#
# Where queries lie together a shard is a row range: its row groups are streamed, and those without a pending chunk are
# skipped. Where they lie scattered, the row groups that hold the shard's rows are streamed once, its rows are spilled
# to a temporary Arrow file, and chunks are taken from that file by memory map, so that the operating system decides
# what stays in memory.


class ChunkRows(NamedTuple):
    """One pending chunk: its number within the shard and its pairs in order."""

    chunk: int
    pairs: list[Pair]


def read_chunks(
    dataset: Dataset,
    shard: ShardPlan,
    row_ids: np.ndarray | None,
    pending: Sequence[int],
    *,
    wanted: dict[int, set[int]] | None = None,
) -> Iterator[ChunkRows]:
    """Yield the pending chunks of a shard in order.

    Args:
        shard: the shard's plan.
        row_ids: the shard's row ids, for a scattered shard; None for a row range.
        pending: chunk numbers, ascending.
        wanted: row ids to keep, by chunk; all rows of a chunk that is not in it.
    Raises:
        InputError: a file can't be read, or changed meanwhile.
        DiskFullError: no space to spill a scattered shard (TMPDIR).
    """
    if not pending:
        return
    bounds = [0, *itertools.accumulate(shard.chunks)]
    spans = [(chunk, bounds[chunk], bounds[chunk + 1]) for chunk in pending]
    if row_ids is None:
        chunks = _from_range(dataset, shard.first_row or 0, spans)
    else:
        chunks = _from_spill(dataset, row_ids, spans)
    for chunk, rows in chunks:
        pairs = _with_siblings(rows) if dataset.reads.siblings else rows
        wanted_rows = wanted.get(chunk) if wanted is not None else None
        if wanted_rows is not None:
            pairs = [pair for pair in pairs if pair.row_id in wanted_rows]
        yield ChunkRows(chunk, pairs)


def _with_siblings(pairs: list[Pair]) -> list[Pair]:
    """The pairs of a chunk of whole queries, each with its query's."""
    whole: list[Pair] = []
    for _, rows in itertools.groupby(pairs, key=lambda pair: pair.query_id):
        siblings = tuple(rows)
        whole += [pair._replace(siblings=siblings) for pair in siblings]
    return whole


def _from_range(dataset: Dataset, first: int, spans: list[tuple[int, int, int]]) -> Iterator[tuple[int, list[Pair]]]:
    waiting: list[Pair] = []
    for _, group in itertools.groupby(enumerate(spans), key=lambda item: item[1][0] - item[0]):
        # runs of consecutive chunks
        run = [span for _, span in group]
        batches = batches_in(dataset, first + run[0][1], first + run[-1][2])
        for chunk, start, stop in run:
            while len(waiting) < stop - start:
                waiting.extend(pairs_of(*next(batches), dataset))
            yield chunk, waiting[: stop - start]
            del waiting[: stop - start]


def _from_spill(
    dataset: Dataset, row_ids: np.ndarray, spans: list[tuple[int, int, int]]
) -> Iterator[tuple[int, list[Pair]]]:
    needed = np.sort(np.concatenate([row_ids[start:stop] for _, start, stop in spans]))
    ends: list[int] = []  # of each spilled batch, counted in spilled rows

    def wants(low: int, high: int) -> bool:
        """Whether a needed row is in a row group: the others are not read."""
        first, last = needed.searchsorted((low, high))
        return bool(first < last)

    kinds = _spilled_types(dataset)
    with tempfile.TemporaryFile(prefix="relabel-rows-") as spill:
        writer = None
        for first, batch, path in _group_batches(dataset, wants):
            rows = np.arange(first, first + batch.num_rows)
            with reading(path):
                wanted_rows = pa.array(np.flatnonzero(np.isin(rows, needed, assume_unique=True)))
                columns = [_cast(batch.column(name).take(wanted_rows), kinds[name]) for name in dataset.text_columns]
                plain = pa.RecordBatch.from_arrays(columns, names=dataset.text_columns)
            with translate_errors("spill rows to", tempfile.gettempdir()):
                writer = writer or pa.ipc.new_file(spill, plain.schema)
                writer.write_batch(plain)
            ends.append(plain.num_rows + (ends[-1] if ends else 0))
        with translate_errors("spill rows to", tempfile.gettempdir()):
            if writer is not None:
                writer.close()
            spill.flush()
        with pa.memory_map(f"/proc/self/fd/{spill.fileno()}") as mapped:
            spilled = pa.ipc.open_file(mapped)
            for chunk, start, stop in spans:
                wanted = row_ids[start:stop]
                batch = _spilled_rows(spilled, np.array(ends), np.searchsorted(needed, wanted))
                yield chunk, list(pairs_of(wanted, batch, "the spilled rows", dataset))


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column as another type; of structs the fields that it has."""
    if "struct" in str(kind):
        return pa.array(column.to_pylist(), kind)
    return column.cast(kind)


def _spilled_rows(spilled: pa.RecordBatchFileReader, ends: np.ndarray, places: np.ndarray) -> pa.RecordBatch:
    """Spilled rows in the order of `places`. Batch by batch, since pyarrow's `take` of a table of several batches
    copies the whole table: over a shard's chunks that is quadratic (2,000,000 rows: 127 ms for a chunk of 256, against
    6 ms; 2026-11-20).
    """
    order = np.argsort(places, kind="stable")
    ascending = places[order]
    numbers = np.searchsorted(ends, ascending, side="right")
    firsts = np.append(0, ends[:-1])
    pieces = [
        spilled.get_batch(number).take(pa.array(ascending[numbers == number] - firsts[number]))
        for number in np.unique(numbers).tolist()
    ]
    whole = pa.Table.from_batches(pieces).combine_chunks().to_batches()[0]
    return whole.take(pa.array(np.argsort(order)))


def _spilled_types(dataset: Dataset) -> dict[str, pa.DataType]:
    """One type for each column that is read, whatever a file's is, so that batches of all files go into one spill."""
    own = {column.name: column.kind for column in dataset.reads.columns}
    if dataset.columns.context is not None:
        own[dataset.columns.context] = "list<string>"
    kinds = {"string": pa.large_string(), "list<string>": pa.large_list(pa.large_string())}
    kinds |= {kind: pa.large_list(item) for kind, item in STRUCT_KINDS.items()}
    return {name: kinds[own.get(name, "string")] for name in dataset.text_columns}


# ------------------------------------------------------------------------------
# A few rows of an input by number or by query, outside of any plan, to be shown.


def pairs_by_number(dataset: Dataset, rows: Sequence[int]) -> Iterator[Pair]:
    """The pairs of rows, in the order given; one is in memory at a time, unless the labeler sees whole queries. Then
    rows of one query lie together and are all of it.

    Raises:
        InputError: a file can't be read.
    """
    chunks = [len(rows)] if dataset.reads.siblings else [1] * len(rows)
    picked = ShardPlan(
        rows=len(rows),
        first_row=None,
        row_ids=None,
        chunks=chunks,
        estimated_tokens=0,
        read_bytes=0,
    )
    for chunk in read_chunks(dataset, picked, np.array(rows, np.int64), range(len(chunks))):
        yield from chunk.pairs


def rows_of_queries(dataset: Dataset, query_ids: Collection[str]) -> dict[str, list[int]]:
    """Row numbers of each query, ascending; reads one column of the whole input.

    Raises:
        InputError: a query id is null, or no row has one that is wanted.
    """
    rows_by_query: dict[str, list[int]] = {query_id: [] for query_id in query_ids}
    names = list(rows_by_query)
    first = 0
    for column, _, path in id_batches(dataset):
        with reading(path):
            query_N = pc.index_in(column, pa.array(names, pa.large_string())).fill_null(-1).to_numpy()
        for row in np.flatnonzero(query_N >= 0).tolist():
            rows_by_query[names[query_N[row]]].append(first + row)
        first += len(column)
    missing = [query_id for query_id, rows in rows_by_query.items() if not rows]
    if missing:
        raise InputError(f"no row of the input has the query id `{missing[0]}` (of {dataset.rows:,} rows).")
    return rows_by_query


# ------------------------------------------------------------------------------
# The input that a run labelled, opened again, to join its texts to labels.


def open_run_input(root: str, plan: Plan, storage: Storage, *, reads: Reads = QUERY_AND_DOCUMENT) -> Dataset:
    """Open the files that a run labelled, context and gold left out unless they are read.

    Args:
        root: the run's output, for messages.
        reads: what its labeler reads, for a caller that asks it again.
    Raises:
        InputError: they are not there any more, or can't be read.
        ManifestError: they are not those that it planned.
    """
    unread = {"gold": None} if reads.context else {"context": None, "gold": None}
    wanted = InputSpec(
        path=tuple(file.path for file in plan.files), columns=plan.facts.columns.model_copy(update=unread)
    )
    try:
        dataset = open_dataset(wanted, storage, reads=reads)
    except InputError as exc:
        raise InputError(f"{root}: the texts that it labelled can't be read: {exc}") from exc
    changed = changed_files(plan.files, dataset.files)
    if changed:
        raise ManifestError(
            f"{root}: the inputs that it labelled changed since: {'; '.join(changed[:5])}. Restore them, or label "
            "again."
        )
    return dataset
