"""Reads ColDeR, MTEB's pairs that show what rankers fall for: two documents a query, of which the one that a biased
ranker likes must not get the higher grade.

Source: Fayyaz et al. 2025, Collapse of Dense Retrievers (arXiv:2503.05037). A subset is a file of JSON lines with
`query`, `document_1` and `document_2`. Which document is preferred is as in MTEB's task ColDeRReranking.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.jobs.probes import Judge, Probe
from relabel.jobs.tables import written
from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.forms import JSONL
from relabel.manifests.labels import Pair
from relabel.manifests.tables import NeededColumn, require_columns

TEXTS = (
    NeededColumn("query", "the query"),
    NeededColumn("document_1", "the first document"),
    NeededColumn("document_2", "the second document"),
)
FIRST_IS_BETTER = ("answer_importance",)
"""Subsets whose first document is to be preferred; of all others it is the second."""


def read_colder(path: str, pairs: Path, storage: Storage) -> Probe:
    """Write the better document of each query as a pair, and return the probe that puts the other in its place.

    Raises:
        InputError: the file is no subset of ColDeR.
    """

    def choose(names: list[str]) -> list[str]:
        require_columns(TEXTS, names, path=path)
        return [text.name for text in TEXTS]

    columns = JSONL.read(path, choose, storage)
    queries, first, second = (list(columns[text.name]) for text in TEXTS)
    if not all(isinstance(text, str) for text in (*queries, *first, *second)):
        raise InputError(f"{path}: a row of query, document_1 or document_2 holds no text. Is it a file of ColDeR?")
    name = Path(path).stem
    better, worse = (first, second) if name in FIRST_IS_BETTER else (second, first)
    numbers = [f"{name}-{place}" for place in range(len(queries))]
    table = pa.table({"query_id": numbers, "query": queries, "doc_id": numbers, "document": better})
    with written(str(pairs), storage) as file:
        pq.write_table(table, file)

    def other(pair: Pair, _judge: Judge) -> Pair:
        return pair._replace(document=worse[pair.row_id])

    return Probe(name, f"the other document of ColDeR's {name}", "up", other)
