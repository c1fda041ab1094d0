"""What was measured of a bundle lies beside it, one file a machine; the bundle stays as it is.

    PLACE/bundle                              what was measured
    PLACE/measurements/bundle/MACHINE.json    what a bench on such a machine found; the newest stays

Of a pulled version, PLACE is the folder that it was pulled to. A file says which manifest it is of, so that figures of
an earlier bundle at the same place are not taken for those of the present one.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from relabel.export.bench.latency_facts import FACTS_NAME, BenchFacts, read_latency
from relabel.export.bench.measured_machine import MeasuredMachine
from relabel.export.bundles import Bundle
from relabel.export.destinations import VERSIONS
from relabel.manifests.digests import readable_json
from relabel.manifests.errors import StoreError
from relabel.manifests.records import plain
from relabel.manifests.storage.disk_errors import translate_errors
from relabel.manifests.storage.local_run_store import LocalRunStore

MEASUREMENTS = "measurements"


def measurements_of(bundle: Bundle) -> list[BenchFacts]:
    """What benches of this very bundle found, newest first: those beside it, and one inside it, as benches wrote it
    before.

    Raises:
        ManifestError: a file of them is damaged.
    """
    found = measured_beside(bundle.folder, bundle.manifest.sha256)
    if any(file.path == FACTS_NAME for file in bundle.files):
        path = bundle.folder / FACTS_NAME
        found.append(read_latency(path.read_bytes(), str(path)))
    return found


def measured_beside(folder: Path, manifest_sha256: str) -> list[BenchFacts]:
    """What lies beside a bundle's folder of the bundle that has this manifest, newest first.

    Raises:
        ManifestError: a file of them is damaged.
    """
    files = measurements_folder(folder).glob("*.json")
    found = [read_latency(path.read_bytes(), str(path)) for path in sorted(files)]
    held = [facts for facts in found if facts.bundle.manifest_sha256 == manifest_sha256]
    return sorted(held, key=lambda facts: facts.measured_at, reverse=True)


def measurements_folder(folder: Path) -> Path:
    """Where figures of the bundle in a folder lie."""
    place = folder.resolve()
    top = place.parent.parent if place.parent.name == VERSIONS else place.parent
    return top / MEASUREMENTS / place.name


def write_measurements(bundle: Bundle, facts: BenchFacts) -> Path:
    """Write figures beside their bundle, in the place of earlier ones of such a machine; the file.

    Raises:
        StoreError, DiskFullError: the folder can't be written.
    """
    folder, name = measurements_folder(bundle.folder), f"{machine_name(facts.machine)}.json"
    LocalRunStore(folder).put(name, readable_json(plain(facts)))
    return folder / name


def check_place(folder: Path) -> None:
    """Refuse a place for figures that can't be written, before anything is measured for it; leaves nothing there.

    Raises:
        StoreError, DiskFullError: it can't, and what to do.
    """
    there = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with translate_errors("write the figures in", there), tempfile.TemporaryFile(dir=there):
            pass
    except StoreError as exc:
        raise StoreError(f"{exc} Or name another folder for them: --to DIR") from exc


def machine_name(machine: MeasuredMachine) -> str:
    """A file's name for machines of one kind, `amd-epyc-9b45-2-cores`: by what they compute with, and not by the name
    that somebody gave one.
    """
    parts = [machine.cpu, f"{machine.usable_cores} cores", *([machine.gpu.name] if machine.gpu else [])]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")[:100]
