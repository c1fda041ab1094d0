"""Labels to learn from: of finished runs, through their manifest alone, or of Parquet files with the label schema;
texts rejoined by row.

A run is read only if it is finished, proves itself row by row and byte by byte (what `relabel verify` does), and lies
within its quarantine limit. A label's text is the row of the input that it names; query and document id must agree,
else somebody changed one of the two.
"""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.distill.students.data_facts import LearnedLabels, SourceRows
from relabel.distill.students.heads import NODE_HEADS
from relabel.distill.students.label_file_columns import COLUMNS, NODE_COLUMNS, check_schema, file_columns
from relabel.distill.students.label_targets import Target, check_outside, targets_of
from relabel.distill.students.pair_texts import rejoin
from relabel.distill.students.sources import LabelSource
from relabel.distill.training.proven_runs import open_proven_run
from relabel.manifests.digests import sha256_bytes
from relabel.manifests.errors import ConfigError, InputError
from relabel.manifests.inputs.dataset import Dataset, open_dataset
from relabel.manifests.inputs.input_faults import reading
from relabel.manifests.inputs.input_folders import PARQUET_SUFFIXES
from relabel.manifests.labels import Pair
from relabel.manifests.phi import NODE_SCORES, PhiTable
from relabel.manifests.row_files import table_of
from relabel.manifests.runs.label_files import read_labels
from relabel.manifests.runs.plans import Plan
from relabel.manifests.runs.readings import Readings
from relabel.manifests.runs.run_inputs import open_run_input
from relabel.manifests.schemas import LABELS
from relabel.manifests.specs import Columns, InputSpec
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import is_url
from relabel.manifests.storage.url_files import read_whole


@dataclass
class LabelTable:
    """The usable labels of one source, a list entry a row, with their texts.

    Args:
        grades: K of the relevance grade, where the source says; None for a file of bare grades.
        targets: by head, what each row says; None where it says nothing.
        outside_mass: None where the teacher gave no distribution.
        plan: of a run.
        phi: of a run whose labeler has a rule map.
        columns: of the pairs.
        about: what made the labels, for the manifest; None for rows that have gold grades alone.
    """

    where: str
    kind: Literal["run", "file"]
    grades: int | None
    pairs: list[Pair]
    targets: dict[str, list[Target | None]]
    outside_mass: list[float | None]
    plan: Plan | None
    phi: PhiTable | None
    columns: Columns
    about: LearnedLabels | None

    @property
    def relevance(self) -> list[Target | None]:
        """What each row says of the relevance head."""
        return self.targets["relevance"]

    def head_grades(self, name: str) -> int | None:
        """Number of grades of a head."""
        return self.grades if name == "relevance" else NODE_SCORES


def load_labels(source: LabelSource, storage: Storage, *, allow_over_limit: bool) -> LabelTable:
    """Read one source.

    Raises:
        InputError: there is nothing, it is not a label file, its texts do not fit, or it holds no usable label.
        ManifestError: a run is unfinished, over its limit, damaged, or its inputs changed.
        ConfigError: a label file without `pairs`.
    """
    is_run = not source.path.endswith(PARQUET_SUFFIXES) if is_url(source.path) else Path(source.path).is_dir()
    if is_run:
        return _load_run(source, storage, allow_over_limit=allow_over_limit or source.allow_over_limit)
    return _load_file(source, storage)


def _load_run(source: LabelSource, storage: Storage, *, allow_over_limit: bool) -> LabelTable:
    run = open_proven_run(source.path, storage, allow_over_limit=allow_over_limit, then="distill")
    root, plan, manifest = run.root, run.plan, run.manifest
    labeler = plan.facts.labeler
    tables = [read_labels(run.folder, file, [*COLUMNS, *NODE_COLUMNS]) for file in manifest.labels]
    dataset, readings = open_run_input(root, run.store, plan, storage)
    held = pa.concat_tables(tables) if tables else LABELS.empty_table().select(COLUMNS)
    table = _usable(held, dataset, root, labeler.grades, readings)
    about = LearnedLabels(
        path=root,
        kind="run",
        name=plan.name,
        labeler=labeler.name,
        model=plan.facts.model,
        fingerprint=plan.fingerprint,
        manifest_sha256=run.manifest_sha256,
        rows=SourceRows(**vars(manifest.rows)),
        quarantined_by_status=manifest.quarantined_by_status,
        over_limit=manifest.over_limit,
        weight=source.weight,
        labels=len(table.pairs),
    )
    return replace(table, kind="run", plan=plan, phi=labeler.phi or None, about=about)


def _load_file(source: LabelSource, storage: Storage) -> LabelTable:
    path = source.path
    try:
        data = read_whole(path, storage)
    except FileNotFoundError as exc:
        raise InputError(
            f"{path}: no such file or folder (looked from {Path.cwd()}). `labels` wants outputs of runs, or Parquet "
            "files."
        ) from exc
    with reading(path):
        schema = pq.read_schema(io.BytesIO(data))
        check_schema(schema, path)
        held = table_of(data, file_columns(schema))
    if source.pairs is None:
        raise ConfigError(
            f"{path}: labels without their texts. Name them: {{path: {path}, pairs: {{path: pairs.parquet}}}}"
        )
    dataset = open_dataset(InputSpec(path=source.pairs.path, columns=source.pairs.columns), storage)
    statuses = Counter(held["status"].to_pylist()) if "status" in held.column_names else Counter({"ok": held.num_rows})
    table = _usable(held, dataset, path, None, None)
    about = LearnedLabels(
        path=path,
        kind="file",
        sha256=sha256_bytes(data),
        rows=SourceRows(held.num_rows),
        rows_by_status=dict(sorted(statuses.items())),
        weight=source.weight,
        labels=len(table.pairs),
    )
    return replace(table, about=about)


def _usable(held: pa.Table, dataset: Dataset, where: str, grades: int | None, readings: Readings | None) -> LabelTable:
    """The labels that can be learned from, as of a file; what made them is not known yet."""
    columns = {name: held[name].to_pylist() for name in held.column_names}
    size = held.num_rows
    statuses = columns.get("status") or ["ok"] * size
    usable = [row for row in range(size) if statuses[row] == "ok" and columns["grade"][row] is not None]
    if not usable:
        raise InputError(f"{where}: no row with status ok and a grade, of {size}. There is nothing to learn from.")
    columns = {name: [values[row] for row in usable] for name, values in columns.items()}
    probs = columns.get("probs") or [None] * len(usable)
    widths = {len(row) for row in probs if row is not None}
    if len(widths) > 1:
        raise InputError(
            f"{where}: distributions over {' and '.join(map(str, sorted(widths)))} grades in one source; one scale is "
            "wanted."
        )
    width = widths.pop() if widths else None
    if grades is not None and width is not None and width != grades:
        raise InputError(f"{where}: distributions over {width} grades of a labeler with {grades}.")
    grades = grades or width
    targets = {"relevance": targets_of(columns["grade"], probs, grades, where, "grade")}
    nothing = [None] * len(usable)
    for name in NODE_HEADS:
        targets[name] = targets_of(
            columns.get(name, nothing), columns.get(f"{name}_probs", nothing), NODE_SCORES, where, name
        )
    pairs = rejoin(columns, dataset, readings, where)
    outside = columns.get("outside_mass") or [None] * len(usable)
    check_outside(outside, where)
    return LabelTable(where, "file", grades, pairs, targets, outside, None, None, dataset.columns, None)
