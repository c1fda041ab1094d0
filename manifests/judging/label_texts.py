"""The labels of a run with the texts that they are of, chunk by chunk, from the run's own input."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from relabel.manifests.errors import InputError, ManifestError
from relabel.manifests.judging.gold_columns import load_gold_by_row
from relabel.manifests.judging.run_labels import RunLabels
from relabel.manifests.runs.label_files import file_schema, read_labels
from relabel.manifests.runs.plans import shard_row_ids
from relabel.manifests.runs.rows import read_chunks
from relabel.manifests.runs.run_inputs import RunInput, open_run_input
from relabel.manifests.storage.concurrency import map_concurrent
from relabel.manifests.storage.context import Storage


def join_texts(run: RunLabels, storage: Storage) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """Labels with the further columns `query`, `document` and, where the job names one, `gold`. In memory are one chunk
    of the run and the gold of all rows.

    Returns:
        The schema, and a table for each label file, in the order of the run's files. Taking one raises InputError where
        the input holds other texts than those that were labelled, ManifestError where a label file is damaged.
    Raises:
        InputError: the input is gone, or the labels have a column of such a name already.
        ManifestError: the input is not the one that was labelled.
    """
    opened = open_run_input(run.root, run.folder.store, run.plan, storage)
    schema = file_schema(run.plan.parts)
    further = [pa.field("query", pa.large_string()), pa.field("document", pa.large_string())]
    gold = None
    if (column := run.plan.facts.columns.gold) is not None:
        values = load_gold_by_row([file.path for file in opened.dataset.files], column, storage)
        gold = values if isinstance(values, pa.ChunkedArray) else pa.chunked_array([values])  # a list: of mixed types
        further.append(pa.field("gold", gold.type))
    for field in further:
        if field.name in schema.names:
            raise InputError(
                f"{run.root}: its labels have a column `{field.name}` of their own, so that texts can't be joined. "
                "Read the labels without texts, and join the input by `row_id`."
            )
        schema = schema.append(field)
    return schema, _tables(run, opened, schema, gold)


def _tables(run: RunLabels, opened: RunInput, schema: pa.Schema, gold: pa.ChunkedArray | None) -> Iterator[pa.Table]:
    folder, files = run.folder, [file for file in run.labels if file.rows]
    tables = map_concurrent(folder.store, lambda file: read_labels(folder, file), files)
    table = next(tables, None)
    for shard in run.plan.shards:
        row_ids = None if shard.row_ids is None else shard_row_ids(folder.store, shard)
        for chunk in read_chunks(opened.dataset, shard, row_ids, range(len(shard.chunks)), readings=opened.readings):
            pairs = {pair.row_id: (pair.query, pair.document) for pair in chunk.pairs}
            while table is not None and table["row_id"][0].as_py() in pairs:
                texts = map(list, zip(*(pairs[row] for row in table["row_id"].to_pylist()), strict=True))
                yield pa.table(
                    [*table.columns, *texts, *([] if gold is None else [gold.take(table["row_id"])])], schema=schema
                )
                table = next(tables, None)
    if table is not None:
        raise ManifestError(f"{run.root}: its label files are not in the order of its plan. Restore manifest.json.")
