"""Outputs that are merged: opened, held against each other, and the one plan over all of their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from relabel.manifests.digests import digest_of
from relabel.manifests.errors import ConfigError, InputError, ManifestError
from relabel.manifests.runs.engine_identity import engines_differ
from relabel.manifests.runs.label_files import joined_form
from relabel.manifests.runs.plans import (
    PLAN_NAME,
    Plan,
    ShardPlan,
    row_id_file,
    shard_row_ids,
)
from relabel.manifests.runs.recipes import recipe_differences, recipe_parts
from relabel.manifests.runs.run_folder import RunFolder, open_planned
from relabel.manifests.runs.run_manifest import (
    MergedSource,
    RunManifest,
    load_manifest,
    manifest_sha256_of,
)
from relabel.manifests.runs.snapshots import Snapshot
from relabel.manifests.runs.spills import SpilledFiles
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import place_of


class MergeSource(NamedTuple):
    """An output that is merged, as it was found."""

    path: str
    folder: RunFolder
    found: Snapshot
    manifest: RunManifest | None
    manifest_sha256: str | None


@dataclass(frozen=True, slots=True)
class MergedRun:
    """Outputs of one fingerprint, and where in the merged output their rows and shards begin."""

    sources: list[MergeSource]
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
                source.path, self.plan.fingerprint, source.manifest_sha256, source.found.digest, self.first_row
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
    grouped: dict[str, list[MergeSource]] = {}
    for path in paths:
        no_run = f"merge: {path} holds no {PLAN_NAME}, so it is not the output of a run."
        folder = open_planned(path, storage, ManifestError(no_run))
        manifest_sha256 = manifest_sha256_of(folder.store)
        source = MergeSource(path, folder, folder.snapshot(), load_manifest(folder.store), manifest_sha256)
        grouped.setdefault(folder.plan.fingerprint, []).append(source)
    runs: list[MergedRun] = []
    first_row = first_shard = 0
    for sources in grouped.values():
        run = MergedRun(sources, first_row, first_shard)
        for shard, chunks in sources[0].folder.open_chunks(*(source.found for source in sources)).items():
            raise ManifestError(
                f"merge: {', '.join(source.path for source in sources)}: not finished: shard {shard} lacks "
                f"{len(chunks)} chunks. Run the "
                "job to its end, or name the output that has them."
            )
        runs.append(run)
        first_row += sum(file.rows for file in run.plan.files)
        first_shard += len(run.plan.shards)
    _check_inputs(runs)
    return runs


def _check_inputs(runs: list[MergedRun]) -> None:
    first = runs[0]
    for run in runs[1:]:
        for part in ("columns", "input_columns"):
            ours, theirs = run.plan.parts.get(part), first.plan.parts.get(part)
            if ours != theirs:
                raise ManifestError(
                    f"merge: {run.path} has other columns than {first.path}: {ours} and {theirs}. "
                    "One manifest can't describe both; label one of them again."
                )
        grades = [one.plan.facts.labeler.grades for one in (first, run)]
        if grades[0] != grades[1]:
            raise ManifestError(
                f"merge: {first.path} has {grades[0]} grades, {run.path} has {grades[1]}. Labels on two scales don't "
                "merge."
            )
    seen: dict[tuple[int, str], tuple[str, str]] = {}
    for run in runs:
        for file in run.plan.files:
            path, output = seen.setdefault(file.identity, (file.path, run.path))
            if (path, output) != (file.path, run.path):
                raise InputError(
                    f"merge: {file.path} of {run.path} is the same file as {path} of {output}, so its rows would be "
                    "counted twice. Drop one of the outputs."
                )


def differences_of(runs: list[MergedRun]) -> list[str]:
    """What keeps these outputs from being one teacher's work, a phrase each."""
    found = []
    for run in runs[1:]:
        for part, names in recipe_differences(runs[0].plan.parts, run.plan.parts).items():
            found.append(f"{part} of {run.path} ({', '.join(names)})")
    engines = [facts for run in runs for source in run.sources for facts in source.found.all_engines]
    return found + [f"engine {remark}" for remark in engines_differ(engines)]


def merged_plan(runs: list[MergedRun], *, name: str, is_mixed: bool) -> tuple[Plan, SpilledFiles]:
    """One plan over all inputs: the runs' shards and chunks as they were cut, rows counted on through the list of
    files.
    """
    shards: list[ShardPlan] = []
    beside = SpilledFiles()
    for run in runs:
        for number, shard in enumerate(run.plan.shards):
            if shard.row_ids is not None:
                rows = shard_row_ids(run.sources[0].folder.store, shard) + run.first_row
                row_ids, data = row_id_file(run.first_shard + number, rows)
                moved = shard._replace(row_ids=row_ids)
                beside.add(data)
            else:
                moved = shard._replace(first_row=(shard.first_row or 0) + run.first_row)
            shards.append(moved)
    files = [file for run in runs for file in run.plan.files]
    plans = [run.plan for run in runs]
    parts = {
        **plans[0].parts,
        **joined_form([(run.path, run.plan.parts) for run in runs]),
        "inputs": digest_of([list(file.identity) for file in files]),
        "limit": None,
        "cut": {"shards": len(shards), "chunk_rows": max(plan.chunk_rows for plan in plans)},
        "merged": [plan.fingerprint for plan in plans],
    }
    if len(plans) > 1:  # whose tables the plans of its sources say
        parts.pop("table", None)
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
