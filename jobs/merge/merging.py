"""Several outputs become one: of other inputs, or of one plan whose shards were done in different places.

Outputs with one fingerprint are parts of one run: of each chunk the part that has the fewest rows in quarantine is
taken. Outputs with different fingerprints but one recipe follow each other: their inputs become one list of files, and
a row's id becomes its position in that list, as everywhere. What is written is an output like any other (plan,
receipts, manifest), so that `status`, `verify`, `evaluate` and training read it without knowing.

Each receipt says what it repeats (`MergedFrom`). So the same merge again goes on where it was stopped, and follows
sources that changed since: a retry there is an attempt more here, and a chunk that was done again replaces what was
here. Nothing is committed before it is proven, and where the target was whole before, nothing before all of it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any, NamedTuple

from relabel.jobs.merge.merge_steps import steps_of
from relabel.jobs.merge.sources import MergedRun, differences_of, merged_plan, open_runs
from relabel.jobs.running.canary import load_results
from relabel.manifests import failpoints
from relabel.manifests.errors import ConfigError, GateError, LockHeldError, ManifestError, StaleRunError
from relabel.manifests.records import sealed_json
from relabel.manifests.runs.kept_readings import check_readings, copy_readings, refuse_differing
from relabel.manifests.runs.plans import (
    Plan,
    load_plan,
    write_plan,
)
from relabel.manifests.runs.receipts import Receipt
from relabel.manifests.runs.run_folder import RunFolder, build_manifest
from relabel.manifests.runs.run_manifest import (
    EngineMix,
    MergedSource,
    RunManifest,
    load_manifest,
    write_manifest,
)
from relabel.manifests.specs import RunSpec
from relabel.manifests.storage.concurrency import map_concurrent
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import place_of
from relabel.manifests.storage.run_store_ports import RunStore
from relabel.manifests.storage.run_stores import open_run_store


class Merged(NamedTuple):
    """What a merge came to: the manifest, and whether it was written now."""

    manifest: RunManifest
    was_written_now: bool


def merge_outputs(
    paths: Sequence[str], to: str, storage: Storage, *, name: str | None = None, allow_mixed: bool = False
) -> Merged:
    """Join finished outputs (or the parts of one run) into a new one, or bring one that was made of them up to date.

    Args:
        name: of the merged output; that of the first by default.
        allow_mixed: let labels of different engines, models or templates into one output; the manifest says so.
    Raises:
        GateError: engines, models, templates or options differ, and `allow_mixed` is off.
        InputError: one file would be in the merged input twice.
        ConfigError: an output is named twice, or is to be merged into itself or a folder of its own.
        ManifestError: an output is not a run or not finished, columns or scales differ, a row is lost, or `to` holds
            something else.
        LockHeldError: another merge into `to` is under way.
    """
    if place_of(to) in map(place_of, paths):
        raise ConfigError(
            f"merge: --to {to} is one of the outputs that are merged. Give a folder of its own for the merged one."
        )
    for path in paths:
        if place_of(to).startswith(f"{place_of(path)}/"):
            raise ConfigError(f"merge: --to {to} lies inside {path}, which is merged. Give a folder outside of it.")
    runs = open_runs(paths, storage)
    differences = differences_of(runs)
    if differences and not allow_mixed:
        raise GateError(
            f"merge: these outputs were not made in one way: {'; '.join(differences)}. Merged, they would be several "
            "teachers under one name. Merge those that agree, label the others again, or allow it with --allow-mixed."
        )
    plan, beside = merged_plan(runs, name=name or runs[0].plan.name, is_mixed=bool(differences))
    store = open_run_store(to, storage)
    if not _holds(store, plan):
        store.check_conditional_writes()
        write_plan(store, plan, beside)
        _holds(store, plan)
    lock = store.lock("merge", f"the merge into {to}")
    lock.acquire()
    try:
        return _merge(runs, store, differences, allow_mixed=allow_mixed)
    finally:
        lock.release()


def _holds(store: RunStore, plan: Plan) -> bool:
    """Whether a folder holds this plan.

    Raises:
        StaleRunError: it holds another one.
    """
    held = load_plan(store)
    if held is not None and held.fingerprint != plan.fingerprint:
        raise StaleRunError(f"{store.root}: holds another run's output. Give a folder of its own for the merged one.")
    return held is not None


def _merge(runs: list[MergedRun], store: RunStore, differences: list[str], *, allow_mixed: bool) -> Merged:
    plan = load_plan(store)
    assert plan is not None
    folder = RunFolder(store, plan)
    held = load_manifest(store)
    if held is not None and _is_current(held, folder, runs):
        return Merged(held, False)
    if held is not None:
        _refuse_fewer(held, runs, store.root)
    staged: Iterator[list[Receipt]] | list[list[Receipt]] = (
        receipts for run in runs for receipts in map_concurrent(store, lambda one: one.stage(), steps_of(run, folder))
    )
    if held is not None:  # what is there was whole: it is left alone until all that is to come has been proven
        staged = list(staged)
    _bring_readings(runs, store)
    for receipts in staged:
        for receipt in receipts:
            _commit(store, receipt)
    return _finish(runs, folder, differences, allow_mixed=allow_mixed)


def _bring_readings(runs: list[MergedRun], store: RunStore) -> None:
    """What the sources read of their inputs, for whoever reads them again by the merged output.

    Raises:
        InputError: two of them read other texts of one file.
        ManifestError: one of them is not what its source's manifest says.
    """
    first_file = 0
    for run in runs:
        for source in run.sources:
            check_readings(source.folder.store, run.plan, source.manifest)
        stores = [source.folder.store for source in run.sources]
        for first, second in itertools.combinations([*stores, store] if len(runs) == 1 else stores, 2):
            refuse_differing(first, second, run.plan)
        for one in stores:
            copy_readings(one, store, first_file)
        first_file += len(run.plan.files)


def _is_current(held: RunManifest, folder: RunFolder, runs: list[MergedRun]) -> bool:
    """Whether a manifest was made of just these sources as they are, and the receipts are still those."""

    def states(facts: list[MergedSource]) -> list[MergedSource]:
        return [replace(one, output="") for one in facts]

    now = [fact for run in runs for fact in run.facts()]
    return states(held.merged_from or []) == states(now) and held.receipts_sha256 == folder.snapshot().digest


def _refuse_fewer(held: RunManifest, runs: list[MergedRun], root: str) -> None:
    """Raise if parts of a run are not named now that a merged output was made of: labels that they
    alone have would go.
    """
    was: dict[str, list[str]] = {}
    for fact in held.merged_from or ():
        was.setdefault(fact.fingerprint, []).append(fact.output)
    for run in runs:
        before = was.get(run.plan.fingerprint, [])
        if len(run.sources) < len(before):
            raise ManifestError(
                f"merge: {root} was made of {', '.join(before)}, and now of these only "
                f"{', '.join(source.path for source in run.sources)} "
                "would be left. Name all of them, or merge into another folder."
            )


def _commit(store: RunStore, receipt: Receipt) -> None:
    name, data = receipt.id.receipt_name, sealed_json(asdict(receipt))
    failpoints.hit("before_receipt")
    if not store.create(name, data) and store.read(name) != data:
        raise LockHeldError(f"{store.root}/{name}: another merge has just written it. Run the same command again.")
    failpoints.hit("after_receipt")


def _finish(runs: list[MergedRun], folder: RunFolder, differences: list[str], *, allow_mixed: bool) -> Merged:
    sources = [source for run in runs for source in run.sources]
    known = [source.manifest for source in sources if source.manifest is not None]
    limits = [manifest.max_failed_fraction for manifest in known] or [RunSpec().max_failed_fraction]
    manifest = build_manifest(
        folder,
        folder.snapshot(),
        spec=_merged_spec(known, folder.plan),
        max_failed_fraction=min(limits),
        relabel_version=version("relabel-ir"),
        canaries=[asdict(result) for source in sources for result in load_results(source.folder.store)],
        allow_mixed=allow_mixed,
    )
    facts = [fact for run in runs for fact in run.facts()]
    manifest = replace(manifest, mixed=EngineMix(allow_mixed, differences), merged_from=facts)
    write_manifest(folder.store, manifest)
    return Merged(manifest, True)


def _merged_spec(known: list[RunManifest], plan: Plan) -> dict[str, Any]:
    if not known:
        return {}
    spec = known[0].spec
    return {**spec, "input": {**spec["input"], "path": [file.path for file in plan.files], "limit": None}}
