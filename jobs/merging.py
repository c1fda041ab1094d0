"""Several outputs become one: of other inputs, or of one plan whose shards were done in different places.

Outputs with one fingerprint are parts of one run: their chunks are put together. Outputs with different fingerprints but one recipe follow
each other: their inputs become one list of files, and a row's id becomes its position in that list, as everywhere. What is written is an
output like any other (plan, receipts, manifest), so that `status`, `verify`, `evaluate` and training read it without knowing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any, NamedTuple

import pyarrow as pa

from jobs.running.canary import load_results
from manifests.digests import digest_of, readable_json, sha256_bytes
from manifests.errors import ConfigError, GateError, InputError, ManifestError, StaleRunError
from manifests.filesystems import place_of
from manifests.label_keys import recipe_differences, recipe_parts
from manifests.mixing import engines_differ
from manifests.plans import PLAN_NAME, Plan, ShardPlan, load_plan, shard_row_id_file, shard_row_ids, write_plan
from manifests.receipts import ChunkId, FileRef, Receipt, put_data
from manifests.runs import MANIFEST_NAME, RunFolder, build_manifest, load_manifest, write_manifest
from manifests.schemas import ANSWERS, LABELS, QUARANTINE, table_bytes
from manifests.specs import RunSpec
from manifests.store import Store, open_store


class Merged(NamedTuple):
    """What a merge came to: the manifest, and whether it was written now."""

    manifest: dict[str, Any]
    was_written_now: bool


@dataclass(frozen=True, slots=True)
class _Run:
    """Outputs of one fingerprint, and where in the merged output their rows and shards begin."""

    paths: list[str]
    folders: list[RunFolder]
    first_row: int
    first_shard: int

    @property
    def plan(self) -> Plan:
        return self.folders[0].plan

    @property
    def stores(self) -> list[Store]:
        return [folder.store for folder in self.folders]


def merge_outputs(paths: Sequence[str], to: str, *, name: str | None = None, allow_mixed: bool = False) -> Merged:
    """Join finished outputs (or the parts of one run) into a new one. The same call again goes on where it was stopped.

    Args:
        name: of the merged output; that of the first by default.
        allow_mixed: let labels of different engines, models or templates stand together; the manifest says so.
    Raises:
        GateError: engines, models, templates or options differ, and `allow_mixed` is off.
        InputError: one file would stand in the merged input twice.
        ConfigError: an output is named twice, or is to be merged into itself.
        ManifestError: an output is no run or not finished, columns or scales differ, a row is lost, or `to` holds something else.
    """
    if place_of(to) in map(place_of, paths):
        raise ConfigError(f"merge: --to {to} is one of the outputs that are merged. Give a folder of its own for the merged one.")
    runs = _open_runs(paths)
    differences = _differences(runs)
    if differences and not allow_mixed:
        raise GateError(
            f"merge: these outputs were not made in one way: {'; '.join(differences)}. Merged, they would be several teachers under one "
            "name. Merge those that agree, label the others again, or allow it with --allow-mixed."
        )
    plan, beside = _merged_plan(runs, name=name or runs[0].plan.name, is_mixed=bool(differences))
    store = open_store(to)
    store.prove()
    lock = store.lock("merge", f"the merge into {to}")
    lock.acquire()
    try:
        write_plan(store, plan, beside)
        held = load_plan(store)
        if held is None or held.fingerprint != plan.fingerprint:
            raise StaleRunError(f"{to}: holds another run's output. Give a folder of its own for the merged one.")
        folder = RunFolder(store, held)
        for run in runs:
            _copy_run(run, folder)
        return _finish(runs, folder, differences, allow_mixed=allow_mixed)
    finally:
        lock.release()


def _open_runs(paths: Sequence[str]) -> list[_Run]:
    if len({place_of(path) for path in paths}) != len(paths):
        raise ConfigError("merge: an output is named twice. Name each once.")
    grouped: dict[str, list[tuple[str, RunFolder]]] = {}
    for path in paths:
        store = open_store(path)
        plan = load_plan(store)
        if plan is None:
            raise ManifestError(f"merge: {path} holds no {PLAN_NAME}, so it is no output of a run.")
        grouped.setdefault(plan.fingerprint, []).append((path, RunFolder(store, plan)))
    runs: list[_Run] = []
    first_row = first_shard = 0
    for members in grouped.values():
        run = _Run([path for path, _ in members], [folder for _, folder in members], first_row, first_shard)
        runs.append(run)
        first_row += sum(file.rows for file in run.plan.files)
        first_shard += len(run.plan.shards)
    _check_inputs(runs)
    return runs


def _check_inputs(runs: list[_Run]) -> None:
    first = runs[0]
    for run in runs[1:]:
        for part, what in (("columns", "columns"), ("schema", "label schema")):
            if run.plan.parts[part] != first.plan.parts[part]:
                raise ManifestError(
                    f"merge: {run.paths[0]} has another {what} than {first.paths[0]}: {run.plan.parts[part]} and {first.plan.parts[part]}. "
                    "One manifest can't describe both; label one of them again."
                )
        grades = [one.plan.parts["labeler"]["grades"] for one in (first, run)]
        if grades[0] != grades[1]:
            raise ManifestError(
                f"merge: {first.paths[0]} has {grades[0]} grades, {run.paths[0]} has {grades[1]}. Labels on two scales don't merge."
            )
    seen: dict[tuple[int, str], str] = {}
    for run in runs:
        for file in run.plan.files:
            if file.identity in seen:
                raise InputError(
                    f"merge: {file.path} is the same file as {seen[file.identity]}, so its rows would stand there twice. Drop one."
                )
            seen[file.identity] = file.path


def _differences(runs: list[_Run]) -> list[str]:
    """What keeps these outputs from being one teacher's work, a phrase each."""
    found = []
    for run in runs[1:]:
        for part, names in recipe_differences(runs[0].plan.parts, run.plan.parts).items():
            found.append(f"{part} of {run.paths[0]} ({', '.join(names)})")
    engines = [facts for run in runs for folder in run.folders for facts in folder.snapshot().all_engines]
    return found + [f"engine {remark}" for remark in engines_differ(engines)]


def _merged_plan(runs: list[_Run], *, name: str, is_mixed: bool) -> tuple[Plan, dict[str, bytes]]:
    """One plan over all inputs: the runs' shards and chunks as they were cut, rows counted on through the list of files."""
    shards: list[ShardPlan] = []
    beside: dict[str, bytes] = {}
    for run in runs:
        for number, shard in enumerate(run.plan.shards):
            if shard.row_ids is not None:
                rows = shard_row_ids(run.stores[0], shard) + run.first_row
                moved, data = shard_row_id_file(shard, run.first_shard + number, rows)
                beside |= data
            else:
                moved = shard._replace(first_row=(shard.first_row or 0) + run.first_row)
            shards.append(moved)
    files = [file for run in runs for file in run.plan.files]
    plans = [run.plan for run in runs]
    parts = {
        **plans[0].parts,
        "inputs": digest_of([list(file.identity) for file in files]),
        "limit": None,
        "cut": {"shards": len(shards), "chunk_rows": max(plan.parts["cut"]["chunk_rows"] for plan in plans)},
        "merged": [plan.fingerprint for plan in plans],
    }
    if is_mixed:
        parts["merged_recipes"] = [recipe_parts(plan.parts) for plan in plans]
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
        beside,
    )


def _copy_run(run: _Run, merged: RunFolder) -> None:
    """Bring every chunk of a run over, unless it is there."""
    for shard in range(len(run.plan.shards)):
        done = merged.attempts(run.first_shard + shard)
        best: dict[int, tuple[RunFolder, list[Receipt]]] = {}
        for folder in run.folders:
            for receipts in folder.chunk_receipts(shard):
                chunk = receipts[0].chunk
                if chunk not in best or len(best[chunk][1]) < len(receipts):
                    best[chunk] = folder, receipts
        missing = len(run.plan.shards[shard].chunks) - len(best)
        if missing:
            raise ManifestError(
                f"merge: {', '.join(run.paths)}: not finished: shard {shard} lacks {missing} chunks. Run the job to its end, or name the "
                "output that has them."
            )
        for chunk, (folder, receipts) in sorted(best.items()):
            for receipt in receipts[len(done.get(chunk, [])) :]:
                _copy_chunk(run, folder, receipt, merged)


def _copy_chunk(run: _Run, source: RunFolder, receipt: Receipt, merged: RunFolder) -> None:
    target = ChunkId(run.first_shard + receipt.shard, receipt.chunk, receipt.attempt)

    def copied(kind: str, file: FileRef | None, schema: pa.Schema) -> FileRef | None:
        if file is None:
            return None
        table = _rebased(source.table(file, schema), run.first_row, run.plan.fingerprint)
        return put_data(merged.store, kind, target, table_bytes(table), file.rows)

    moved = replace(
        receipt,
        fingerprint=merged.plan.fingerprint,
        shard=target.shard,
        labels=copied("labels", receipt.labels, LABELS),
        quarantine=copied("quarantine", receipt.quarantine, QUARANTINE),
        answers=copied("answers", receipt.answers, ANSWERS),
    )
    merged.store.create(target.receipt_name, readable_json(asdict(moved)))


def _rebased(table: pa.Table, first_row: int, fingerprint: str) -> pa.Table:
    """Row ids counted on, and the run that asked a row named where that went without saying."""
    if "row_id" in table.column_names:
        rows = pa.array(table["row_id"].to_numpy() + first_row, pa.int64())
        table = table.set_column(0, table.schema.field("row_id"), rows)
    if "origin" in table.column_names:
        at = table.column_names.index("origin")
        table = table.set_column(at, table.schema.field("origin"), table["origin"].fill_null(fingerprint))
    return table


def _finish(runs: list[_Run], folder: RunFolder, differences: list[str], *, allow_mixed: bool) -> Merged:
    found = folder.snapshot()
    held = load_manifest(folder.store)
    if held is not None and held["receipts_sha256"] == found.digest:
        return Merged(held, False)
    manifests = {path: load_manifest(store) for run in runs for path, store in zip(run.paths, run.stores, strict=True)}
    known = [manifest for manifest in manifests.values() if manifest is not None]
    limits = [manifest["max_failed_fraction"] for manifest in known] or [RunSpec().max_failed_fraction]
    _check_sums(runs, found.tally, manifests)
    manifest = build_manifest(
        folder,
        found,
        spec=_merged_spec(known, folder.plan),
        max_failed_fraction=min(limits),
        relabel_version=version("relabel"),
        canaries=[asdict(result) for run in runs for store in run.stores for result in load_results(store)],
        allow_mixed=allow_mixed,
    )
    manifest["mixed"]["differences"] = differences
    manifest["merged_from"] = [
        {"output": path, "fingerprint": run.plan.fingerprint, "manifest_sha256": _manifest_sha256(store), "first_row_id": run.first_row}
        for run in runs
        for path, store in zip(run.paths, run.stores, strict=True)
    ]
    write_manifest(folder.store, manifest)
    return Merged(manifest, True)


def _check_sums(runs: list[_Run], merged: Any, manifests: dict[str, dict[str, Any] | None]) -> None:
    """What came out is what went in: rows by fate, over all runs whose manifests say."""
    into: Counter[str] = Counter()
    for run in runs:
        one = manifests[run.paths[0]]
        if len(run.paths) > 1 or one is None:
            return  # parts of one run: only together are they whole, and the proof by row ids is theirs
        into.update(labelled=one["rows"]["labelled"], reused=one["rows"]["reused"], quarantined=one["rows"]["quarantined"])
    out = {"labelled": merged.labelled, "reused": merged.reused, "quarantined": merged.num_quarantined}
    if {key: into[key] for key in out} != out:
        raise ManifestError(
            f"merge: {dict(into)} rows went in and {out} came out. The outputs changed under the merge; run it again elsewhere."
        )


def _merged_spec(known: list[dict[str, Any]], plan: Plan) -> dict[str, Any]:
    if not known:
        return {}
    spec: dict[str, Any] = dict(known[0]["spec"])
    spec["input"] = {**spec["input"], "path": [file.path for file in plan.files], "limit": None}
    return spec


def _manifest_sha256(store: Store) -> str | None:
    try:
        return sha256_bytes(store.read(MANIFEST_NAME))
    except FileNotFoundError:
        return None
