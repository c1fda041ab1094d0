"""A run's labels: which columns its files hold by the plan that they were written under, all of them read as rows of
one kind, and the committed ones as evaluation and merging open them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from relabel.manifests.errors import InputError, ManifestError
from relabel.manifests.files import Storage, absence_of, is_url
from relabel.manifests.labels import CASCADE_COLUMNS, SCHEMA_VERSION, label_schema
from relabel.manifests.plan import PLAN_NAME, FileRef, Plan, facts_of
from relabel.manifests.run_folder import RunFolder, Snapshot, open_planned
from relabel.manifests.run_manifest import load_manifest


def own_columns(parts: dict[str, Any]) -> dict[str, str]:
    """The columns that a plan's labeler adds to its labels, name → kind."""
    return dict(facts_of(parts).label_columns)


def labeler_columns(parts: dict[str, Any]) -> dict[str, str]:
    """As `own_columns`, without those of a cascade: what a label of an earlier run must have."""
    left_out = {column.name for column in CASCADE_COLUMNS} if "cascade" in parts else set()
    return {name: kind for name, kind in own_columns(parts).items() if name not in left_out}


def file_schema(parts: dict[str, Any]) -> pa.Schema:
    """How the label files of a plan with these parts lie."""
    return label_schema(own_columns(parts))


def joined_form(plans: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The parts that tell how label files lie, for files with a place for all labels of some plans: the columns of each
    after one another.

    Args:
        plans: what to call each in an error, and its parts.
    Raises:
        ManifestError: a plan is of a version whose labels can't be mixed with others, or two have a column of one name
            and two kinds.
    """
    columns: dict[str, str] = {}
    for where, parts in plans:
        version = facts_of(parts).schema
        if version != SCHEMA_VERSION:
            raise ManifestError(
                f"{where}: has label files of version {version}, which don't merge with others. Label it again."
            )
        for name, kind in own_columns(parts).items():
            if columns.setdefault(name, kind) != kind:
                raise ManifestError(
                    f"{where}: its column `{name}` holds {kind}, that of an output named before it {columns[name]}."
                )
    return {"schema": SCHEMA_VERSION, "label_columns": [list(column) for column in columns.items()]}


def read_labels(
    folder: RunFolder, file: FileRef, names: list[str] | None = None, *, check_bytes: bool = True
) -> pa.Table:
    """A committed label file's columns, the labeler's own after the others.

    Args:
        names: those to read, all by default; what the file does not have is left out.
    Raises:
        ManifestError: as `RunFolder.table`.
    """
    schema = file_schema(folder.plan.parts)
    return folder.table(
        file, schema, [name for name in schema.names if names is None or name in names], check_bytes=check_bytes
    )


def conformed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A table's columns in the order of a schema, null where the table has none; columns that the schema does not name
    are left out.
    """
    held = {name: table[name] for name in table.column_names}
    columns = [held[one.name] if one.name in held else pa.nulls(table.num_rows, one.type) for one in schema]
    return pa.Table.from_arrays(columns, schema=schema)


@dataclass(frozen=True)
class RunLabels:
    """A run's output, ready to be read.

    Args:
        found: by the manifest, or by the receipts where it is not finished.
        notes: remarks for a reader of a report.
    """

    root: str
    plan: Plan
    folder: RunFolder
    found: Snapshot
    notes: list[str]

    @property
    def grades(self) -> int:
        """K."""
        return self.plan.facts.labeler.grades


def open_run_labels(root: str, storage: Storage, *, allow_partial: bool) -> RunLabels:
    """The files of an output folder, none of them read yet.

    Raises:
        InputError: the folder holds no run.
        ManifestError: the run is not finished, or over its quarantine limit, and `allow_partial` is off; or a file is
            damaged.
    """
    no_run = f"{root}: a folder without {PLAN_NAME}, so no run's output. Give a run's output folder, or a label file."
    if is_url(root):
        no_run = f"{root}: there is no {root}/{PLAN_NAME}, so it is no run's output. Give the folder of one."
    folder = open_planned(root, storage, InputError(absence_of(root) or no_run))
    manifest = load_manifest(folder.store)
    snapshot = folder.snapshot(manifest=manifest)
    advice = dict[str, str]()
    if manifest is None or manifest.receipts_sha256 != snapshot.digest:
        older = "" if manifest is None else ", and its manifest is older than its receipts"
        state = f"not finished: {snapshot.tally.rows:,} of {folder.plan.rows:,} rows are done{older}"
        advice[state] = "Run the job again to finish it"
    if manifest is not None and manifest.over_limit:
        share = f"{snapshot.tally.num_quarantined:,} of {manifest.rows.in_:,} rows are in quarantine"
        state = f"over its quarantine limit: {share}, limit {manifest.max_failed_fraction:.0%}"
        advice[state] = "Complete it with `relabel retry`"
    if advice and not allow_partial:
        state = next(iter(advice))
        raise ManifestError(
            f"{root}: {state}; no labels but those of the whole run are a fair sample. {advice[state]}, or judge what "
            "is there with --allow-partial."
        )
    return RunLabels(
        root,
        folder.plan,
        folder,
        snapshot,
        [f"{root} is {state}" for state in advice],
    )
