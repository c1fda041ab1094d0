"""The demo's pairs with their author's grades, and the labels that they got."""

from __future__ import annotations

import json
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from relabel.manifests.runs.run_manifest import load_manifest
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.run_stores import open_run_store


class DemoPair(NamedTuple):
    """A pair that ships with relabel; `grade` is its author's."""

    query_id: str
    query: str
    doc_id: str
    title: str
    body: str
    grade: int


class DemoLabel(NamedTuple):
    """What the demo shows of a label; `quotes` are its evidence."""

    grade: int
    probs: list[float]
    outside_mass: float
    quotes: list[str]


def load_pairs() -> list[DemoPair]:
    """The pairs that ship with relabel, in order, with their author's grades."""
    text = resources.files("relabel.jobs").joinpath("demo/pairs.jsonl").read_text(encoding="utf-8")
    return [DemoPair(**json.loads(line)) for line in text.split("\n") if line]


def write_pairs(path: Path, pairs: list[DemoPair]) -> None:
    """Write the Parquet file unless it holds these rows already: an output belongs to its input's footer, and a demo
    may be run again.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([pair._asdict() for pair in pairs])
    try:
        if path.exists() and pq.read_table(path).equals(table):
            return
    except (pa.ArrowInvalid, OSError):
        pass  # cut off while an earlier demo wrote it
    pq.write_table(table, path)


def labels_in(folder: Path) -> dict[int, DemoLabel]:
    """Labels by row id, found through the manifest, as a reader should."""
    import pyarrow.parquet as pq

    manifest = load_manifest(open_run_store(str(folder), Storage()))
    assert manifest is not None  # the step that writes it has ended well
    names = ["row_id", "grade", "probs", "outside_mass", "evidence"]
    tables = [pq.read_table(folder / file.path, columns=names).select(names) for file in manifest.labels]
    rows = (row for table in tables for row in zip(*(column.to_pylist() for column in table.columns), strict=True))
    return {
        row_id: DemoLabel(grade, probs, outside, [span["text"] for span in evidence or ()])
        for row_id, grade, probs, outside, evidence in rows
    }


def agreement(pairs: list[DemoPair], labels: dict[int, DemoLabel]) -> float:
    """Share of the labels that are their author's grades."""
    hits = sum(pairs[row_id].grade == label.grade for row_id, label in labels.items())
    return hits / max(len(labels), 1)


def most_frequent_share() -> float:
    """Share of the author's most frequent grade: what a judge without any sense reaches."""
    counts = Counter(pair.grade for pair in load_pairs())
    return max(counts.values()) / counts.total()
