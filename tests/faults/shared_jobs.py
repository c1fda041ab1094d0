"""Jobs of labelers whose asks the rows of a query share, and what must hold of any output of theirs. The labelers come
from the registry: a new one is covered at birth.
"""

import io
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.labelers.registry import LABELERS, labeler_class
from relabel.manifests.labels import ANSWERS
from relabel.manifests.plan import Receipt, load_plan, load_receipt
from relabel.manifests.run_folder import RunFolder
from relabel.manifests.tables import CHUNK
from tests.faults.places import ROWS, Place, pairs

QUERIES = 10


def _made(name: str) -> Any:
    cls = labeler_class(name)
    return cls(cls.Options(name=name))


SHARED = [name for name in LABELERS if any(ask.shared_by is not None for ask in _made(name).probe())]
"""Labelers with an ask that rows of a query share."""
WHOLE_QUERY = [name for name in SHARED if _made(name).reads.whole_query]
"""Those of which a row's label is its part of one answer."""
SIBLINGS = [name for name in SHARED if _made(name).reads.siblings]


def options_of(name: str, **more: Any) -> dict[str, Any]:
    """A job's `labeler` section; where documents share a window it is as small as can be, so that some are left out."""
    fields = labeler_class(name).Options.model_fields
    window = {"window_tokens": 256} if "window_tokens" in fields else {}
    return {"name": name, "attempts": 2, **window, **more}


def chunks_of(document: str) -> list[dict[str, Any]]:
    """A document's chunks: its halves."""
    middle = len(document) // 2
    spans = [(0, middle), (middle, len(document))] if middle else []
    return [
        {"n": n, "heading_path": [], "text": document[a:b], "token_len": len(document[a:b]) // 4, "start": a, "end": b}
        for n, (a, b) in enumerate(spans, start=1)
    ]


def with_chunks(table: pa.Table) -> pa.Table:
    """The table, with the column that labelers of chunks need."""
    chunks = [chunks_of(document) for document in table["document"].to_pylist()]
    return table.append_column("chunks", pa.array(chunks, pa.large_list(CHUNK)))


def write(place: Place, name: str, **changes: Any) -> None:
    """A job of queries of six documents each, in chunks of four rows."""
    place.write(**{"labeler": options_of(name), **changes, "run": {"chunk_rows": 4, **changes.get("run", {})}})
    table = pairs(ROWS)
    longer = [f"{document} Kind {row}. " * 8 for row, document in enumerate(table["document"].to_pylist())]
    table = table.set_column(3, "document", pa.array(longer))
    sink = io.BytesIO()
    pq.write_table(with_chunks(table), sink, row_group_size=16)
    place.put("pairs.parquet", sink.getvalue())


def receipts_of(place: Place) -> list[Receipt]:
    store = place.store()
    return [load_receipt(store, name) for name in store.etags("receipts")]


def lives(log: Path) -> Iterator[list[str]]:
    """What each life of the engine was asked, a line a request."""
    return (file.read_text().splitlines() for file in log.glob("life-*"))


def faults_of(place: Place, name: str, log: Path) -> str | None:
    """What is wrong with a finished output of an engine that is `Fickle`, or None."""
    store, manifest = place.store(), place.manifest()
    place.committed()
    kinds = {
        kind: [pq.read_table(io.BytesIO(store.read(file["path"]))).to_pylist() for file in manifest[kind]]
        for kind in ("labels", "quarantine")
    }
    states = Counter(row["row_id"] for files in kinds.values() for rows in files for row in rows)
    if states != Counter(range(ROWS)):
        return f"states by row {states}"
    receipts = receipts_of(place)
    asked_of_lives = Counter[str]()
    for lines in lives(log):
        shared = Counter(line for line in lines if line.split()[1] != "None")
        if shared.total() > len(shared):
            return f"asked twice by one engine: {shared.most_common(2)}"
        asked_of_lives.update(line.split()[0] for line in lines)
    for stage, asks in asked_of_lives.items():
        if sum(receipt.stages.get(stage, {}).get("asks", 0) for receipt in receipts) > asks:
            return f"receipts count more asks of stage {stage} than the {asks} that there were"
    return _faults_of_answers(place, receipts) or (_mixed(kinds) if name in WHOLE_QUERY else None)


def _faults_of_answers(place: Place, receipts: list[Receipt]) -> str | None:
    """Each shared ask of a chunk is counted once: no more and no fewer than the answers that are kept."""
    plan = load_plan(place.store())
    folder = RunFolder(place.store(), plan)
    for receipt in receipts:
        held = folder.table(receipt.answers, ANSWERS).to_pylist() if receipt.answers else []
        kept = Counter(row["stage"] for row in held)
        asks = sum(receipt.stages.get(stage, {}).get("asks", 0) for stage in kept)
        if asks != kept.total() - receipt.reused_answers:
            return f"{receipt.id}: {asks} asks, {kept.total()} answers kept, {receipt.reused_answers} of them known"
    return None


def _mixed(kinds: dict[str, list[list[dict[str, Any]]]]) -> str | None:
    """A query with rows of two answers, or in two chunks; every answer has its own number of tokens."""
    answers, places = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
    labelled = {row["query_id"] for rows in kinds["labels"] for row in rows}
    for rows in (rows for files in kinds.values() for rows in files):
        for row in rows:
            if row["query_id"] in labelled:
                answers[row["query_id"]].add(row["output_tokens"])
    for number, rows in enumerate(kinds["labels"]):
        for row in rows:
            places[row["query_id"]].add(number)
    mixed = [query_id for query_id, found in answers.items() if len(found) > 1]
    torn = [query_id for query_id, found in places.items() if len(found) > 1]
    return f"queries of two answers: {mixed}; of two files: {torn}" if mixed or torn else None
