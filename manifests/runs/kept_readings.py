"""Readings that outputs keep: listed, checked against each other, copied."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict

from relabel.manifests.digests import digest_of
from relabel.manifests.errors import InputError, ManifestError
from relabel.manifests.runs.plans import Plan
from relabel.manifests.runs.reading_files import FOLDER, Reading, load_reading, parsed_name, reading_bytes, reading_name
from relabel.manifests.runs.run_manifest import RunManifest
from relabel.manifests.storage.concurrency import map_concurrent
from relabel.manifests.storage.run_store_ports import RunStore


def listed_readings(store: RunStore) -> dict[str, str]:
    """Every reading by name, with the sha256 of what it says: what a manifest keeps of them.

    Raises:
        ManifestError: one is damaged.
    """
    return {name: digest_of(asdict(held)) for name, held in _all(store)}


def check_readings(store: RunStore, plan: Plan, manifest: RunManifest | None) -> None:
    """Hold the readings of an output against its plan, and against its manifest where that names them.

    Raises:
        ManifestError: names one that is damaged, missing, not the one that was kept, or of no row group of its own.
    """
    found, stops = {}, {}
    for name, held in _all(store):
        found[name], stops[name] = digest_of(asdict(held)), held.first + len(held.groups)
    said = found if manifest is None or manifest.readings is None else manifest.readings
    for name in sorted(found.keys() | said.keys()):
        if name not in found:
            raise ManifestError(f"{store.root}/{name}: what was read of the input is missing. Restore it from a copy.")
        if found[name] != said.get(name):
            raise ManifestError(
                f"{store.root}/{name}: not what was read of the input when the run finished. Restore it from a copy."
            )
    before = -1, 0
    for (file, first), name in sorted((parsed_name(name), name) for name in found):
        if file >= len(plan.files):
            raise ManifestError(f"{store.root}/{name}: the plan has no file {file}. Move it away.")
        if (file, first) < before:
            raise ManifestError(
                f"{store.root}/{name}: row group {first} is in another reading too. Restore both from a copy."
            )
        before = file, stops[name]


def differing_readings(first: RunStore, second: RunStore) -> tuple[int, int] | None:
    """The first file and row group, by number, that two outputs of one list of input files read differently; None if
    there is none.

    Chunks of another size make other blocks, so it is row groups that are compared.

    Raises:
        ManifestError: what was kept is damaged.
    """
    ours = dict(_groups(first))
    for place, other in sorted(_groups(second)):
        one = ours.get(place, {})
        if any(one[column] != other[column] for column in one.keys() & other.keys()):
            return place
    return None


def _groups(store: RunStore) -> Iterator[tuple[tuple[int, int], dict[str, str]]]:
    """What each row group held, by the numbers of file and row group."""
    for name, held in _all(store):
        for group, digests in enumerate(held.groups, start=held.first):
            yield (parsed_name(name)[0], group), digests


def _all(store: RunStore) -> Iterator[tuple[str, Reading]]:
    names = sorted(store.names(FOLDER))
    return zip(names, map_concurrent(store, functools.partial(load_reading, store), names), strict=True)


def refuse_differing(first: RunStore, second: RunStore, plan: Plan) -> None:
    """Refuse to put the labels of two outputs of one plan together if they are of other texts.

    Raises:
        InputError: names the file and the row group.
        ManifestError: what was kept is damaged.
    """
    other = differing_readings(first, second)
    if other is not None:
        raise InputError(
            f"{plan.files[other[0]].path}: row group {other[1]} held other texts when {first.root} read it than when "
            f"{second.root} did, so "
            "their labels don't go together. Label it again into one of them."
        )


def copy_readings(source: RunStore, target: RunStore, first_file: int) -> None:
    """Bring an output's readings into one that holds its labels, and whose list of files has its own from `first_file`
    on.

    Raises:
        ManifestError: one of them is damaged, or the target holds another.
    """
    for name in source.names(FOLDER):
        held = load_reading(source, name)
        copy = reading_name(first_file + parsed_name(name)[0], held.first)
        if not target.create(copy, reading_bytes(held)) and load_reading(target, copy) != held:
            raise ManifestError(
                f"{target.root}/{copy}: {source.root}/{name} says otherwise. Merge into a folder of its own."
            )
