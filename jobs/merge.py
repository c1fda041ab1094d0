"""Merges several run outputs into one: over different inputs, or shards of one plan that were labelled in different
places."""

import heapq
import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from relabel.jobs.output import Exit, values_table
from relabel.manifests import failpoints
from relabel.manifests.canaries import load_results
from relabel.manifests.errors import ConfigError, GateError, InputError, LockHeldError, ManifestError, StaleRunError
from relabel.manifests.files import Storage, place_of
from relabel.manifests.labels import ANSWERS, QUARANTINE, pair_codes, table_bytes
from relabel.manifests.plan import (
    FileRef,
    MergedFrom,
    Plan,
    Receipt,
    RowIdFile,
    ShardPlan,
    chunk_row_ids,
    load_plan,
    prove_chunk,
    put_data,
    recipe_differences,
    recipe_parts,
    row_group_sizes,
    shard_row_ids,
    write_plan,
)
from relabel.manifests.query_numbers import Joined
from relabel.manifests.records import digest_of, fields_of, plain, sealed_json
from relabel.manifests.reuse import EarlierOutput, open_earlier
from relabel.manifests.run_folder import RunFolder, build_manifest
from relabel.manifests.run_labels import conformed, file_schema, joined_form, open_run_labels, read_labels
from relabel.manifests.run_manifest import (
    EngineMix,
    MergedSource,
    RunManifest,
    engines_differ,
    load_manifest,
    write_manifest,
)
from relabel.manifests.secrets import counted, one_line
from relabel.manifests.specs import RunSpec
from relabel.manifests.store import Store, map_concurrent, open_run_store


@dataclass(frozen=True, slots=True)
class MergedRun:
    """Outputs of one fingerprint, and where in the merged output their rows and shards begin."""

    sources: list[EarlierOutput]
    first_row: int
    first_shard: int

    @property
    def plan(self) -> Plan:
        return self.sources[0].folder.plan

    @property
    def path(self) -> str:
        return self.sources[0].path

    def facts(self) -> list[MergedSource]:
        """What it is made of, for the manifest."""
        return [
            MergedSource(
                source.path,
                self.plan.fingerprint,
                source.manifest_sha256,
                source.found.digest,
                self.first_row,
            )
            for source in self.sources
        ]


def open_runs(paths: Sequence[str], storage: Storage) -> list[MergedRun]:
    """Finished outputs, those of one fingerprint together, in the order in which they are named.

    Raises:
        ConfigError: one is named twice.
        ManifestError: one is no output, is not finished, or has other columns or grades than the first.
        InputError: two of them were made of the same file.
    """
    if len({place_of(path) for path in paths}) != len(paths):
        raise ConfigError("merge: an output is named twice. Name each once.")
    grouped: dict[str, list[EarlierOutput]] = {}
    for source in (open_earlier(path, storage, "merge") for path in paths):
        grouped.setdefault(source.plan.fingerprint, []).append(source)
    runs: list[MergedRun] = []
    first_row = first_shard = 0
    for sources in grouped.values():
        run = MergedRun(sources, first_row, first_shard)
        for shard, chunks in sources[0].folder.open_chunks(*(source.found.etags for source in sources)).items():
            raise ManifestError(
                f"merge: {', '.join(source.path for source in sources)}: not finished: shard {shard} lacks "
                f"{len(chunks)} chunks. Run the "
                "job to its end, or name the output that has them."
            )
        runs.append(run)
        first_row += sum(file.rows for file in run.plan.files)
        first_shard += len(run.plan.shards)
    for run in runs[1:]:
        _check_columns(run, runs[0])
        _check_grades(run, runs[0])
    seen: dict[tuple[int, str], tuple[str, str]] = {}
    for run in runs:
        for file in run.plan.files:
            path, output = seen.setdefault(file.identity, (file.path, run.path))
            if (path, output) != (file.path, run.path):
                raise InputError(
                    f"merge: {file.path} of {run.path} is the same file as {path} of {output}, so its rows would be "
                    "counted twice. Drop one of the outputs."
                )
    return runs


def _check_columns(run: MergedRun, first: MergedRun) -> None:
    """
    Raises:
        ManifestError: they read other columns; says which.
    """
    ours, theirs = (
        {**(one.plan.parts.get("columns") or {}), "the labeler's": one.plan.parts.get("input_columns")}
        for one in (run, first)
    )
    differences = [
        f"{key} {ours.get(key)!r} and {theirs.get(key)!r}"
        for key in {**theirs, **ours}
        if ours.get(key) != theirs.get(key)
    ]
    if differences:
        raise ManifestError(
            f"merge: {run.path} and {first.path} read other columns: {'; '.join(differences)}. One manifest can't "
            f"describe both. Label one of them again, with the columns named alike and `reuse: [{run.path}]` in its "
            "job: what was answered is not asked again."
        )


def _check_grades(run: MergedRun, first: MergedRun) -> None:
    """
    Raises:
        ManifestError: they have other numbers of grades.
    """
    ours, theirs = (one.plan.facts.labeler.grades for one in (run, first))
    if ours != theirs:
        raise ManifestError(
            f"merge: {run.path} has {ours} grades, and {first.path} {theirs}. One manifest can't describe both; label "
            "one of them again, or bring them to one scale by `relabel combine --map-labels`."
        )


def merged_plan(runs: list[MergedRun], *, name: str, is_mixed: bool) -> tuple[Plan, dict[str, bytes]]:
    """One plan over all inputs: the runs' shards and chunks as they were cut, rows counted on through the list of
    files.
    """
    shards: list[ShardPlan] = []
    plan_files: dict[str, bytes] = {}
    for run in runs:
        for number, shard in enumerate(run.plan.shards):
            if shard.row_ids is not None:
                rows = shard_row_ids(run.sources[0].folder.store, shard) + run.first_row
                file = RowIdFile()
                joined = Joined(iter([rows]))
                for count in row_group_sizes(len(rows)):
                    file.add(joined.take(count))
                row_ids, data = file.finish(run.first_shard + number)
                moved = shard._replace(row_ids=row_ids)
                plan_files |= data
            else:
                moved = shard._replace(first_row=(shard.first_row or 0) + run.first_row)
            shards.append(moved)
    plans = [run.plan for run in runs]
    files = list(itertools.chain.from_iterable(plan.files for plan in plans))
    parts = {
        **plans[0].parts,
        **joined_form([(run.path, run.plan.parts) for run in runs]),
        "inputs": digest_of([list(file.identity) for file in files]),
        "limit": None,
        "cut": {"shards": len(shards), "chunk_rows": max(plan.chunk_rows for plan in plans)},
        "merged": [plan.fingerprint for plan in plans],
    }
    if is_mixed:
        parts["merged_recipes"] = [recipe_parts(plan.parts) for plan in plans]
    if len(plans) > 1:  # whose tables the plans of its sources say
        parts.pop("table", None)
    return (
        Plan(
            name=name,
            fingerprint=digest_of(parts),
            parts=parts,
            rows=sum(plan.rows for plan in plans),
            queries=sum(plan.queries for plan in plans),
            is_scattered=any(plan.is_scattered for plan in plans),
            text_bytes=sum(plan.text_bytes for plan in plans),
            files=files,
            shards=shards,
        ),
        plan_files,
    )


def _staged(
    run: MergedRun,
    source: EarlierOutput,
    merged: RunFolder,
    shard: int,
    held: list[Receipt],
    todo: list[Receipt],
    planned_R: np.ndarray,
    *,
    replaces_held: bool,
) -> list[Receipt]:
    """Write the data files of a chunk of the merged output, and prove the chunk as it will be with the receipts that
    are returned, and not yet written.

    Args:
        held: its receipts, by attempt.
        todo: receipts of the source to be repeated after them.
        planned_R: row ids of the chunk.
        replaces_held: they are all that the source has: what is held came from elsewhere, or was done again there.
    """
    tables: dict[str, pa.Table] = {}

    def repeated(receipt: Receipt, attempt: int) -> Receipt:
        target = receipt.id._replace(shard=shard, attempt=attempt)

        def copied(kind: str, file: FileRef | None, schema: pa.Schema, wanted: pa.Schema) -> FileRef | None:
            if file is None:
                return None
            table = _rebased(source.folder.table(file, schema), run.first_row, run.plan.fingerprint)
            table = table if wanted == schema else conformed(table, wanted)
            written = put_data(
                merged.store,
                kind,
                target,
                table_bytes(table),
                file.rows,
            )
            tables[written.path] = table
            return written

        return replace(
            receipt,
            fingerprint=merged.plan.fingerprint,
            shard=target.shard,
            attempt=attempt,
            labels=copied("labels", receipt.labels, file_schema(run.plan.parts), file_schema(merged.plan.parts)),
            quarantine=copied("quarantine", receipt.quarantine, QUARANTINE, QUARANTINE),
            answers=copied("answers", receipt.answers, ANSWERS, ANSWERS),
            replaces=replaces_held and bool(held) and receipt is todo[0],
            merged_from=MergedFrom(source.path, run.plan.fingerprint, receipt.content_digest),
        )

    def read(file: FileRef, schema: pa.Schema, columns: list[str]) -> pa.Table:
        if file.path in tables:
            return tables[file.path].select(columns)
        return merged.table(file, schema, columns, check_bytes=False)

    receipts = [repeated(receipt, number) for number, receipt in enumerate(todo, held[-1].attempt + 1 if held else 1)]
    try:
        prove_chunk(receipts if replaces_held else [*held, *receipts], planned_R, read, root=merged.store.root)
    except ManifestError as exc:
        where = f"{source.path}, shard {shard - run.first_shard}, chunk {todo[0].chunk}"
        raise ManifestError(
            f"merge: {where}: a row is lost or doubled there, so it was not merged. `relabel verify "
            f"{shlex.quote(source.path)}` says more."
        ) from exc
    return receipts


def _steps(run: MergedRun, merged: RunFolder) -> Iterator[Callable[[], list[Receipt]]]:
    """What stages the chunks of a run of which the merged output does not hold what the best of the sources has."""

    streams = [
        zip(itertools.repeat(source), source.folder.receipts_in(source.found.etags), strict=False)
        for source in run.sources
    ]
    by_chunk = itertools.groupby(heapq.merge(*streams, key=_chunk_of), key=_chunk_of)
    offers_of_chunks = ((chunk, list(offers)) for chunk, offers in by_chunk)
    for shard, of_shard in itertools.groupby(offers_of_chunks, key=lambda item: item[0][0]):
        merged_shard = run.first_shard + shard
        rows_by_chunk = chunk_row_ids(merged.store, merged.plan.shards[merged_shard])
        merged_by_chunk = {receipts[0].chunk: receipts for receipts in merged.chunk_receipts(merged_shard)}
        for (_, chunk), offers in of_shard:
            earlier = merged_by_chunk.get(chunk, [])
            offer = _best_offer(offers, earlier)
            if offer.todo:
                yield partial(
                    _staged,
                    run,
                    offer.source,
                    merged,
                    merged_shard,
                    earlier,
                    offer.todo,
                    rows_by_chunk[chunk],
                    replaces_held=not offer.goes_on,
                )


ChunkReceipts: TypeAlias = tuple[EarlierOutput, list[Receipt]]
"""A source, and its receipts of one chunk, one an attempt."""


def _chunk_of(offer: ChunkReceipts) -> tuple[int, int]:
    _, receipts = offer
    return receipts[0].shard, receipts[0].chunk


@dataclass(frozen=True)
class Offer:
    """A chunk as a source has it.

    Args:
        todo: its receipts that the merged output has not.
        goes_on: what the merged output has are the first of the source's, so that only `todo` are to follow.
        quarantined: rows in quarantine after the last attempt.
    """

    source: EarlierOutput
    todo: list[Receipt]
    goes_on: bool
    quarantined: int


def _best_offer(offers: Iterable[ChunkReceipts], held: Sequence[Receipt]) -> Offer:
    """The one with the fewest rows in quarantine; of equal ones, one that goes on from what the merged output has.

    Args:
        held: the merged output's receipts of the chunk.
    """
    done = [receipt.merged_from.sha256 if receipt.merged_from else "" for receipt in held]
    candidates = []
    for source, receipts in offers:
        goes_on = done == [receipt.content_digest for receipt in receipts[: len(done)]]
        quarantine = receipts[-1].quarantine
        candidates.append(
            Offer(
                source=source,
                todo=receipts[len(done) :] if goes_on else receipts,
                goes_on=goes_on,
                quarantined=quarantine.rows if quarantine else 0,
            )
        )
    return min(candidates, key=lambda offer: (offer.quarantined, not offer.goes_on))


def _rebased(table: pa.Table, first_row: int, fingerprint: str) -> pa.Table:
    """Row ids counted on, and the run that asked a row named where that went without saying."""
    if "row_id" in table.column_names:
        table = table.set_column(
            0, table.schema.field("row_id"), pa.array(table["row_id"].to_numpy() + first_row, pa.int64())
        )
    if "origin" in table.column_names:
        table = table.set_column(
            table.column_names.index("origin"), table.schema.field("origin"), table["origin"].fill_null(fingerprint)
        )
    return table


# Several outputs become one: of other inputs, or of one plan whose shards were done in different places.
#
# Outputs with one fingerprint are parts of one run: of each chunk the part that has the fewest rows in quarantine is
# taken. Outputs with different fingerprints but one recipe follow each other: their inputs become one list of files,
# and a row's id becomes its position in that list, as everywhere. What is written is an output like any other (plan,
# receipts, manifest), so that `status`, `verify`, `evaluate` and training read it without knowing.
#
# Each receipt says what it repeats (`MergedFrom`). So the same merge again goes on where it was stopped, and follows
# sources that changed since: a retry there is an attempt more here, and a chunk that was done again replaces what was
# here. Nothing is committed before it is proven, and where the target was whole before, nothing before all of it is.


@dataclass(frozen=True)
class MergeResult:
    """What a merge made, or found made already.

    Args:
        output: where the merged output lies.
        outputs: that it is made of.
        was_written_now: whether this call wrote its manifest.
        repeated_labels: see `repeated_labels`.
    """

    output: str
    outputs: list[str]
    manifest: RunManifest
    was_written_now: bool
    repeated_labels: int | None

    @property
    def code(self) -> Exit:
        """How the command ends."""
        if self.manifest.over_limit:
            return Exit.OVER_LIMIT
        return Exit.DONE if self.was_written_now else Exit.NOTHING_TO_DO

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        manifest = self.manifest
        return {
            "exit_code": int(self.code),
            "output": self.output,
            "name": manifest.name,
            "fingerprint": manifest.fingerprint,
            "outputs": self.outputs,
            "rows": manifest.rows.in_,
            "labelled": manifest.rows.labelled,
            "reused": manifest.rows.reused,
            "quarantined": manifest.rows.quarantined,
            "over_limit": manifest.over_limit,
            "mixed": plain(manifest.mixed),
            "repeated_labels": self.repeated_labels,
            "files": len(manifest.labels) + len(manifest.quarantine),
        }

    def lines(self) -> list[str]:
        """The result for people."""
        manifest = self.manifest
        state = "merged, every row accounted for" if self.was_written_now else "nothing to do, merged already"
        if manifest.over_limit:
            state += (
                f", but {manifest.failed_fraction:.1%} of rows are quarantined, over the limit of "
                f"{manifest.max_failed_fraction:.1%}; everything is kept"
            )
        values = self.as_json()
        counts = ("outputs", "rows", "labelled", "reused", "quarantined", "files")
        shown = {name: values[name] for name in counts}
        shown["fingerprint"] = manifest.fingerprint[:16]
        shown["made differently"] = manifest.mixed.differences
        lines = [one_line(f"{manifest.name}: {state}, {self.output}"), values_table(shown)]
        if self.repeated_labels:
            lines.append(
                f"{counted(self.repeated_labels, 'label')} of a pair (query_id, doc_id) that an earlier one has: all "
                "are kept, and `relabel evaluate` judges each."
            )
        return lines


MOST_COMPARED = 10_000_000
"""Labels whose pairs are compared: seconds, and a gigabyte."""


def repeated_labels(output: str, storage: Storage) -> int | None:
    """Labels of a merged output whose pair an earlier one has; None where there are too many to compare."""
    run = open_run_labels(output, storage, allow_partial=True)
    if run.plan.rows > MOST_COMPARED:
        return None
    tables = [read_labels(run.folder, file, ["query_id", "doc_id"]) for file in run.found.labels]
    if not any(map(len, tables)):
        return 0
    rows = pa.concat_tables(tables).combine_chunks()
    query_ids, doc_ids = (rows[name].chunk(0) for name in ("query_id", "doc_id"))
    return len(rows) - len(np.unique(pair_codes(query_ids, doc_ids)))


def merge_outputs(
    paths: Sequence[str], to: str, storage: Storage, *, name: str | None = None, allow_mixed: bool = False
) -> tuple[RunManifest, bool]:
    """Join finished outputs (or the parts of one run) into a new one, or bring one that was made of them up to date:
    its manifest, and whether it was written now.

    Args:
        name: of the merged output; by default the one that all outputs have, or else that of its folder.
        allow_mixed: let labels of different engines, models or templates into one output; the manifest says so.
    Raises:
        GateError: engines, models, templates or options differ, and `allow_mixed` is off.
        InputError: one file would be in the merged input twice.
        ConfigError: an output is named twice, or is to be merged into itself or a folder of its own.
        ManifestError: an output is not a run or not finished, columns or scales differ, a row is lost, or `to` holds
            something else.
        LockHeldError: another merge into `to` is under way.
    """
    for path in paths:
        if f"{place_of(to)}/".startswith(f"{place_of(path)}/"):
            raise ConfigError(f"merge: --to {to} lies inside {path}, which is merged. Give a folder outside of it.")
    runs = open_runs(paths, storage)
    differences = _differences(runs)
    if differences and not allow_mixed:
        raise GateError(
            f"merge: these outputs were not made in one way: {'; '.join(differences)}. Merged, they would be several "
            "teachers under one name. Merge those that agree, label the others again, or allow it with --allow-mixed."
        )
    plan, plan_files = merged_plan(runs, name=name or _name_of(runs, to), is_mixed=bool(differences))
    store = open_run_store(to, storage)
    there = load_plan(store)
    if there is None:
        store.check_conditional_writes()
        write_plan(store, plan, plan_files)
        there = load_plan(store) or plan
    if there.fingerprint != plan.fingerprint:
        raise StaleRunError(f"{store.root}: holds another run's output. Give a folder of its own for the merged one.")
    lock = store.lock("merge", f"the merge into {to}")
    lock.acquire()
    try:
        return _merge(runs, RunFolder(store, there), differences, allow_mixed=allow_mixed)
    finally:
        lock.release()


def _name_of(runs: Sequence[MergedRun], to: str) -> str:
    """The name that all runs have; else that of the folder, since one run's would hide the others."""
    names = {run.plan.name for run in runs}
    if len(names) == 1:
        return names.pop()
    folder = PurePosixPath(place_of(to)).name
    return re.sub("[^A-Za-z0-9._-]+", "-", folder) or runs[0].plan.name


def _differences(runs: Sequence[MergedRun]) -> list[str]:
    """What was not made in one way, each in words."""
    differences = []
    for run in runs[1:]:
        for part, names in recipe_differences(runs[0].plan.parts, run.plan.parts).items():
            differences.append(f"{part} of {run.path} ({', '.join(names)})")
    engines: list[dict[str, Any]] = []
    for source in _sources(runs):
        engines += source.found.all_engines
    differences += [f"engine {remark}" for remark in engines_differ(engines)]
    return differences


def _sources(runs: Sequence[MergedRun]) -> list[EarlierOutput]:
    return list(itertools.chain.from_iterable(run.sources for run in runs))


def _merge(
    runs: list[MergedRun], folder: RunFolder, differences: list[str], *, allow_mixed: bool
) -> tuple[RunManifest, bool]:
    store = folder.store
    manifest = load_manifest(store)
    facts = list(itertools.chain.from_iterable(run.facts() for run in runs))
    steps: Iterable[list[Receipt]] = itertools.chain.from_iterable(
        map_concurrent(store, lambda step: step(), _steps(run, folder)) for run in runs
    )
    if manifest is not None:
        was = [replace(source, output="") for source in manifest.merged_from or []]
        now = [replace(source, output="") for source in facts]
        if was == now and manifest.receipts_sha256 == folder.snapshot().digest:
            return manifest, False
        _check_all_named(runs, manifest, store)
        steps = list(steps)  # what is there was whole: it is left alone until all that is to come has been proven
    for receipt in itertools.chain.from_iterable(steps):
        name = receipt.id.receipt_name
        data = sealed_json(fields_of(receipt))
        failpoints.hit("before_receipt")
        if not store.create(name, data) and store.read(name) != data:
            raise LockHeldError(f"{store.root}/{name}: another merge has just written it. Run the same command again.")
        failpoints.hit("after_receipt")
    manifest = replace(
        _manifest_of(runs, folder, allow_mixed=allow_mixed),
        mixed=EngineMix(allow_mixed, differences),
        merged_from=facts,
    )
    write_manifest(store, manifest)
    return manifest, True


def _check_all_named(runs: Sequence[MergedRun], manifest: RunManifest, store: Store) -> None:
    """Raise where labels that a part alone has would go, since it is not named any more."""
    for run in runs:
        before = [fact.output for fact in manifest.merged_from or () if fact.fingerprint == run.plan.fingerprint]
        if len(run.sources) < len(before):
            raise ManifestError(
                f"merge: {store.root} was made of {', '.join(before)}, and now of these only "
                f"{', '.join(source.path for source in run.sources)} "
                "would be left. Name all of them, or merge into another folder."
            )


def _manifest_of(runs: Sequence[MergedRun], folder: RunFolder, *, allow_mixed: bool) -> RunManifest:
    """A manifest of all that is committed: with the first source's spec, over the inputs of all."""
    manifests = []
    canaries = []
    for source in _sources(runs):
        manifest = load_manifest(source.folder.store)
        if manifest is not None:
            manifests.append(manifest)
        canaries += [asdict(result) for result in load_results(source.folder.store)]
    spec = {}
    if manifests:
        inputs = {"path": [file.path for file in folder.plan.files], "limit": None}
        first = manifests[0].spec
        spec = {**first, "input": {**first["input"], **inputs}}
    limits = [manifest.max_failed_fraction for manifest in manifests]
    return build_manifest(
        folder,
        folder.snapshot(),
        spec=spec,
        max_failed_fraction=min(limits, default=RunSpec().max_failed_fraction),
        relabel_version=version("relabel-ir"),
        canaries=canaries,
        allow_mixed=allow_mixed,
    )
