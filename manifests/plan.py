"""The immutable plan of an output, its fingerprint and recipe, and what is known of its input."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relabel.manifests import failpoints
from relabel.manifests.errors import ManifestError, StaleRunError
from relabel.manifests.files import absolute_path
from relabel.manifests.inputs import Dataset, InputFile, changed_files
from relabel.manifests.labels import PhiTable
from relabel.manifests.receipts import FileRef, read_file_of
from relabel.manifests.records import (
    canonical_json,
    digest_of,
    plain,
    read_record,
    readable_json,
    sha256_bytes,
)
from relabel.manifests.schemas import SCHEMA_VERSION, table_of
from relabel.manifests.specs import Columns, TableFormat
from relabel.manifests.store import Store, read_if_there

# ------------------------------------------------------------------------------
# A recipe: what a run settles once about how its labels are made (labeler, templates, model, sampling, engine), as the
# `parts` of its plan say it; and how two of them differ.


PERSON_LABEL = b"relabel label 1"
SETTLED = ("model", "engine", "overlong")
"""Parts of a plan that every answer depends on."""
_NOT_IN_A_LABEL = frozenset({"attempts"})
"""Options that decide how often an unreadable answer is asked again, and never what a readable one says."""
BY_CONTENT = "by its files"
"""Replaces a path among an engine's options in the fingerprint: its content is part of the model's digest, and where
it lies is no part of a label.
"""


def recipe_parts(parts: dict[str, Any]) -> dict[str, Any]:
    """What a plan's `parts` say about how a label is made: everything but the input and how the work is cut.

    The prompt's limit stays in (`engine.max_prompt_tokens`, `overlong`): which documents it would cut is known only
    once they are encoded.
    """
    labeler = {key: value for key, value in parts["labeler"].items() if key not in _NOT_IN_A_LABEL}
    return {
        "labeler": labeler,
        "templates": parts["templates"],
        "stages": parts.get("stages"),
        "model": parts["model"],
        "engine": parts["engine"],
        "overlong": parts["overlong"],
    }


def recipe_digest(parts: dict[str, Any]) -> bytes:
    """32 bytes that represent `recipe_parts`."""
    return blake2b(canonical_json(recipe_parts(parts)), digest_size=32, person=PERSON_LABEL).digest()


def recipe_differences(was: dict[str, Any], now: dict[str, Any]) -> dict[str, list[str]]:
    """What differs between two plans' recipes, by part (`labeler`, `templates`, …): the names of the settings that
    changed.
    """
    found: dict[str, list[str]] = {}
    for path, *_ in differing(recipe_parts(was), recipe_parts(now)):
        part, _, name = path.partition(".")
        found.setdefault(part, []).append(name or part)
    return found


def stages_changed(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Stages of a plan's parts whose answers to the same texts may differ from another plan's, in order.

    A stage goes on from the answers before it, which its own ask shows, so a changed first stage changes those after
    it.
    """
    stages: dict[str, str] = now["stages"]
    if any(was[part] != now[part] for part in SETTLED):
        return list(stages)
    held = was.get("stages") or {}
    return [stage for stage, digest in stages.items() if held.get(stage) != digest]


# ------------------------------------------------------------------------------
# The plan of an output, which is immutable: what it labels, how the work is cut, and the files that hold both.


# Shape legend: R rows, Q queries, S shards

PLAN_NAME = "plan.json"
PLAN_VERSION = 1
ROUNDS_NAME = "rounds.json"
"""What the output of `relabel rounds` holds; each of its rounds is a run in a folder below."""


class ShardPlan(NamedTuple):
    """One shard: rows `first_row .. first_row + rows`, or, where queries lie scattered, the row ids in a file next to
    the plan.

    `chunks` are row counts in the shard's own order; chunk k covers the rows after those of chunks 0..k-1.
    """

    rows: int
    first_row: int | None
    row_ids: FileRef | None
    chunks: list[int]
    estimated_tokens: int
    read_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedLabeler:
    """The labeler: K grades, and its rule map where it has one."""

    name: str
    grades: int
    phi: PhiTable | None = None


@dataclass(frozen=True, slots=True)
class PlannedTable:
    """The snapshot of a table that was planned; ids as text (`TableSnapshot.identity`)."""

    format: TableFormat
    id: str
    snapshot: str
    since: str | None

    def __str__(self) -> str:
        return f"snapshot {self.snapshot}" + (f" since {self.since}" if self.since is not None else "")


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """A plan's parts, as far as readers of its labels need them.

    Args:
        model: digest.
        schema: version of the label files.
        label_columns: the labeler's own, name and kind.
        cut: `shards` and `chunk_rows`; None where each shard has what fits it.
        kind: `student` for scores.
        table: what the input is a snapshot of; None for plain files.
    """

    columns: Columns
    labeler: PlannedLabeler
    model: str
    schema: int
    cut: dict[str, int | None]
    label_columns: list[tuple[str, str]]
    kind: str | None = None
    table: PlannedTable | None = None


def facts_of(parts: dict[str, Any]) -> PlanFacts:
    """Read a plan's parts.

    Raises:
        ManifestError: one is missing or is not what it should be.
    """
    what, advice = "its `parts` are not a job's", "Restore it, or use another output folder."
    return read_record(PlanFacts, parts, PLAN_NAME, what, advice)


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a worker needs to know apart from the spec.

    Args:
        fingerprint: digest of `parts`; every receipt carries it.
        parts: what makes a label what it is (inputs, columns, labeler, templates, engine, model, schema, cut),
            readable.
        rows, queries: counts over the rows in use.
        is_scattered: rows of one query do not all lie together, so that shards carry row ids.
        text_bytes: uncompressed bytes of the columns that a run reads, once.
    """

    name: str
    fingerprint: str
    parts: dict[str, Any]
    rows: int
    queries: int
    is_scattered: bool
    text_bytes: int
    files: list[InputFile]
    shards: list[ShardPlan]

    @property
    def read_ratio(self) -> float:
        """Bytes that all shards together read, over one reading of the data: 1 where queries lie together, up to the
        number of shards.
        """
        return sum(shard.read_bytes for shard in self.shards) / self.text_bytes if self.text_bytes else 1.0

    @property
    def facts(self) -> PlanFacts:
        """What readers of the labels need of the parts.

        Raises:
            ManifestError: as `facts_of`.
        """
        return facts_of(self.parts)

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk: as the job had them, else those of the largest one."""
        return self.facts.cut["chunk_rows"] or max((max(shard.chunks, default=1) for shard in self.shards), default=1)

    @property
    def num_chunks(self) -> int:
        return sum(len(shard.chunks) for shard in self.shards)


def write_plan(store: Store, plan: Plan, plan_files: Mapping[str, bytes]) -> bool:
    """Make a plan durable, row ids first. Returns False if a plan is there already (the caller reads and checks that
    one).

    Raises:
        StaleRunError: the place is that of a search in rounds; nothing was written.
    """
    if read_if_there(store, ROUNDS_NAME) is not None:
        raise StaleRunError(
            f"{store.root}: belongs to a search in rounds ({ROUNDS_NAME}), each of which is a run in a folder below. "
            "Name another `output`."
        )
    failpoints.hit("before_plan_rows")
    for name, data in plan_files.items():
        store.put(name, data)
    failpoints.hit("before_plan")
    held = replace(plan, files=[file._replace(path=absolute_path(file.path)) for file in plan.files])
    was_created = store.create(PLAN_NAME, readable_json({"version": PLAN_VERSION, **plain(held)}))
    failpoints.hit("after_plan")
    return was_created


def load_plan(store: Store) -> Plan | None:
    """The plan of an output, or None if it has none.

    Raises:
        ManifestError: it can't be read as a plan, or another version of relabel wrote it.
    """
    data = read_if_there(store, PLAN_NAME)
    return None if data is None else parse_plan(data, f"{store.root}/{PLAN_NAME}")


def refuse_rounds(store: Store) -> None:
    """Called where an output has no plan: that of a search in rounds has one for each round.

    Raises:
        ManifestError: it is such an output; names its rounds.
    """
    if read_if_there(store, ROUNDS_NAME) is None:
        return
    places = (f"round-{number}" for number in itertools.count(1))
    begun = list(itertools.takewhile(lambda place: read_if_there(store, f"{place}/{PLAN_NAME}") is not None, places))
    named = ", ".join(f"{store.root}/{place}" for place in begun)
    raise ManifestError(
        f"{store.root}: the output of a search in rounds, each of which is a run of its own. "
        + (f"Name one: {named}." if named else "None is begun: run `relabel rounds` with its job file.")
    )


def parse_plan(data: bytes, where: str) -> Plan:
    """The plan that a file holds.

    Raises:
        ManifestError: as `load_plan`.
    """
    advice = "Restore it, or use another output folder."
    plan = read_record(Plan, data, where, "not a plan", advice, version=PLAN_VERSION)
    if digest_of(plan.parts) != plan.fingerprint:
        raise ManifestError(f"{where}: damaged: its fingerprint is not that of its parts. Restore it from a copy.")
    return plan


def shard_row_ids(store: Store, shard: ShardPlan) -> np.ndarray:
    """Row ids of a shard in its own order, int64.

    Raises:
        ManifestError: the row-id file is missing or is not the one that was planned.
    """
    if shard.row_ids is None:
        return np.arange(shard.rows) + (shard.first_row or 0)
    data = read_file_of(store, shard.row_ids, "Restore it from a copy.")
    return np.asarray(table_of(data).column("row_id").to_numpy())


def chunk_row_ids(store: Store, shard: ShardPlan) -> list[np.ndarray]:
    """Row ids of a shard, int64, by chunk.

    Raises:
        ManifestError: as `shard_row_ids`.
    """
    return np.split(shard_row_ids(store, shard), np.cumsum(shard.chunks)[:-1])


def row_id_file(number: int, rows: np.ndarray) -> tuple[FileRef, dict[str, bytes]]:
    """The file of a scattered shard's row ids, int64, that must lie next to its plan: what the plan says of it, and its
    bytes by name.
    """
    sink = io.BytesIO()
    pq.write_table(
        pa.table({"row_id": pa.array(rows, pa.int64())}),
        sink,
        compression="zstd",
        use_dictionary=False,
        column_encoding="DELTA_BINARY_PACKED",
        write_statistics=False,
    )
    data = sink.getvalue()
    digest = sha256_bytes(data)
    path = f"plan/rows-{number:05d}-{digest[:16]}.parquet"
    return FileRef(path, len(rows), digest), {path: data}


# ------------------------------------------------------------------------------
# The fingerprint: what ties an output to one job, and whose plan a plan is.


def fingerprint_parts(
    dataset: Dataset,
    *,
    limit: int | None,
    overlong: str,
    labeler: dict[str, Any],
    label_columns: Mapping[str, str],
    templates: dict[str, str],
    stages: dict[str, str],
    engine: dict[str, Any],
    model_digest: str,
    cut: dict[str, int | None],
) -> dict[str, Any]:
    """What ties an output to one job, as plain values whose differences a person can read.

    Input paths are not part of it: a data set may move, its identity is what its footers say.

    Args:
        label_columns: those that the labeler declares, name → kind, in their order in the label files.
        stages: a digest of each stage's ask as it is rendered for a made-up pair (`reuse.stage_digests`): it names
            the stage that a changed template belongs to, and changes also where the code that renders it does.
    """
    parts: dict[str, Any] = {
        "inputs": digest_of([list(file.identity) for file in dataset.files]),
        "limit": limit,
        "overlong": overlong,
        "columns": dataset.columns.model_dump(mode="json"),
        "labeler": labeler,
        "label_columns": list(label_columns.items()),
        "templates": templates,
        "stages": stages,
        "engine": engine,
        "model": model_digest,
        "schema": SCHEMA_VERSION,
        "cut": cut,
    }
    if dataset.table is not None:
        parts["table"] = dataset.table.identity
    if dataset.reads.columns:
        parts["input_columns"] = [one.name for one in dataset.reads.columns]
    if dataset.reads.siblings:  # a chunk that cut a query would hold some of its siblings
        parts["whole_queries"] = True
    return dict(json.loads(canonical_json(parts)))  # as a plan that was written and read back holds them


def template_name(digest: str) -> str:
    """Where the template with this sha256 is kept, in the output: so that it can be compared when it changed."""
    return f"plan/template-{digest[:16]}.j2"


def check_plan(plan: Plan, dataset: Dataset, parts: dict[str, Any], *, output: str) -> None:
    """Refuse to go on with a plan made for other inputs or another job.

    Raises:
        StaleRunError: names every file that changed, or every setting that differs.
    """
    # a job's parts as a plan's: where the job names no chunk size, that of the plan holds
    held = plan.parts.get("cut")
    now = {**parts, "cut": held} if held and parts.get("cut") == {**held, "chunk_rows": None} else parts
    if plan.parts == now:
        return
    changed = changed_files(plan.files, dataset.files) if plan.parts.get("inputs") != parts.get("inputs") else []
    changes = list(_changes(plan.parts, now))
    if changed:
        also = f"\n   Settings differ too:{_listed(changes)}" if changes else ""
        raise StaleRunError(
            f"{output}: the inputs are not those that were planned, and an output never grows or changes its input. "
            f"Changed:{_listed(changed)}\n  Restore the files, or label the new ones into another output.{also}"
        )
    raise StaleRunError(
        f"{output}: belongs to another job. Different:{_listed(changes)}\n  Use another `output`, or restore the spec."
    )


def _listed(lines: list[str]) -> str:
    more = [f"… and {len(lines) - 20} more"] if len(lines) > 20 else []
    return "".join(f"\n  {line}" for line in (*lines[:20], *more))


def _changes(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What differs, a phrase each. What follows from a difference that is shown is left out: stages that ask otherwise,
    and the templates of another labeler.
    """
    is_asked_otherwise = any(was.get(key) != now.get(key) for key in ("labeler", "templates"))
    is_other_labeler = was.get("labeler", {}).get("name") != now.get("labeler", {}).get("name")
    left_out = {"inputs", "stages" if is_asked_otherwise else "", "templates" if is_other_labeler else ""}
    for key in sorted({*was, *now} - left_out):
        for path, before, after in differing(was.get(key), now.get(key), key):
            if path.startswith("templates."):
                yield f"{path}: another text than the planned one" + (f", {template_name(before)}" if before else "")
            else:
                yield _phrase(path, before, after)


def _phrase(path: str, before: Any, after: Any) -> str:
    return f"{path}: was {json.dumps(before)}, is {json.dumps(after)}"


def differences(was: Any, now: Any) -> Iterator[str]:
    """What differs between two plain values, a phrase each, by the path of keys to it."""
    return itertools.starmap(_phrase, differing(was, now))


def differing(was: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """What differs between two plain values: the path of keys to it, and both."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}):
            yield from differing(was.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif was != now:
        yield path, was, now
