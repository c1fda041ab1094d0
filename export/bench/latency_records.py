"""Where a bench's figures go: files in a folder, or into the bundle itself, which is sealed anew.

The bundle is made ready beside itself, with its files linked and not copied, and then takes its own place by two
renames. A bench that is killed leaves the bundle as it was; between the renames, beside its place, from where the next
bench or export brings it back (`export/bundle_places.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from export.bench.benching import Bench
from export.bench.figure_names import CELL_KEYS
from export.bench.latency_cards import latency_lines, put_section
from export.bench.latency_facts import FACTS_NAME, BenchFacts
from export.bench.latency_plots import CLOSED_NAME, OPEN_NAME, write_plots
from export.bench.latency_tables import TABLE_NAME, latency_table_bytes
from export.bundle_cards import CARD_NAME, REPORT_NAME
from export.bundle_places import PART, beside, check_unchanged, linked_copy, put_back, switch
from export.bundles import MANIFEST_NAME, Bundle, open_bundle, seal_bundle
from export.destinations import VERSIONS
from manifests.digests import readable_json, sha256_bytes
from manifests.errors import ManifestError, UsageError
from manifests.records import plain
from manifests.storage.disk_errors import translate_errors

TEXT_NAME = "latency.md"
NAMES = (FACTS_NAME, TABLE_NAME, CLOSED_NAME, OPEN_NAME)
"""Every file of an earlier bench goes when a new one comes."""
Redraw = Callable[[str, Path], str]
"""The bundle's page as it is, and a folder with the new figures → the page with them. Pages are drawn on a floor above
this one.
"""


def check_place(folder: Path) -> None:
    """Refuse a bundle that can't be written into before anything is measured.

    Raises:
        UsageError: it was pulled: what is under a published version's name must stay that version.
        ManifestError: it is no bundle.
    """
    if folder.resolve().parent.name == VERSIONS:
        raise UsageError(
            f"{folder}: was pulled, and stays the version that it is. Name a folder for the results with --to."
        )
    put_back(folder)
    open_bundle(folder, check_bytes=False)


def check_results_folder(folder: Path, bundle: Path) -> None:
    """Refuse a folder for results that would make a bundle unreadable: one with files that its manifest does not name.

    Raises:
        UsageError: it is the bundle, lies inside it, or is another one.
    """
    place = folder.resolve()
    if bundle.resolve() in (place, *place.parents):
        raise UsageError(
            f"--to {folder}: is the bundle or inside it. Without --to the results go into the bundle, sealed anew."
        )
    if (place / MANIFEST_NAME).is_file():
        raise UsageError(
            f"--to {folder}: holds a {MANIFEST_NAME}, which says what may lie there. Name a folder for the results "
            "alone."
        )


def put_into_bundle(bundle: Bundle, bench: Bench, *, redraw: Redraw) -> Bundle:
    """Write figures and plots into a bundle, tell of them in its card and its page, and sum them up in its manifest.

    To be called with its place locked. A bundle without a page gets none: it was exported where none can be drawn.

    Args:
        redraw: see `Redraw`.
    Returns:
        The bundle sealed anew, another version.
    Raises:
        ManifestError: a file is not the one that was opened and measured; the bundle is left as it is.
        StoreError, DiskFullError: the folder can't be written.
    """
    folder, part = bundle.folder, beside(bundle.folder, PART)
    try:
        with translate_errors("write", part):
            linked_copy(folder, leaves_out=frozenset({MANIFEST_NAME, *NAMES}))
            files = write_files(part, bench)
            card = _held_text(part, CARD_NAME, bundle)
            _replace(
                part / CARD_NAME,
                put_section(f"# {bundle.name}\n" if card is None else card, latency_lines(bench.facts)),
            )
            page = _held_text(part, REPORT_NAME, bundle)
            if page is not None:
                _replace(part / REPORT_NAME, redraw(page, part))
            sealed = seal_bundle(part, {**bundle.own_facts, "latency": summary(bench.facts, files)})
            check_unchanged(bundle, sealed, written={CARD_NAME, REPORT_NAME, *NAMES})
            switch(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return open_bundle(folder, check_bytes=False)


def _held_text(part: Path, name: str, bundle: Bundle) -> str | None:
    """A text of a linked copy; None where the bundle has none of that name.

    Raises:
        ManifestError: it is not the one that was opened.
    """
    was = next((file.sha256 for file in bundle.files if file.path == name), None)
    path = part / name
    data = path.read_bytes() if path.is_file() else None
    if was != (data and sha256_bytes(data)):
        raise ManifestError(
            f"{bundle.folder}: {name} changed since the bundle was opened; nothing was written into it. Put it back, "
            "or export again."
        )
    return None if data is None else data.decode("utf-8")


def _replace(path: Path, text: str) -> None:
    """Write a text under a name of a linked copy."""
    path.unlink(missing_ok=True)  # it is a link to the old bundle's
    path.write_text(text, encoding="utf-8", errors="replace", newline="\n")


def write_to(folder: Path, bench: Bench) -> list[str]:
    """Write figures, plots and the card's section as a text of its own into a folder; their names.

    Raises:
        StoreError, DiskFullError: the folder can't be written.
    """
    with translate_errors("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            (folder / name).unlink(missing_ok=True)
        files = write_files(folder, bench)
        (folder / TEXT_NAME).write_text(
            put_section(f"# {bench.facts.name}\n", latency_lines(bench.facts)), encoding="utf-8"
        )
    return [*files, TEXT_NAME]


def write_files(folder: Path, bench: Bench) -> list[str]:
    """Write `latency.json`, `latency.parquet` and the plots; their names."""
    (folder / FACTS_NAME).write_bytes(readable_json(plain(bench.facts)))
    (folder / TABLE_NAME).write_bytes(latency_table_bytes(bench.facts.rows))
    return [FACTS_NAME, TABLE_NAME, *write_plots(folder, bench.facts)]


def summary(facts: BenchFacts, files: list[str]) -> dict[str, Any]:
    """`latency` in a bundle's manifest: what one asks first. No times in it, as in all of the manifest."""
    machine = facts.machine
    return {
        "format": facts.format,
        "files": files,
        "machine": {
            **{key: getattr(machine, key) for key in ("cpu", "cores", "usable_cores", "cpu_quota", "threads")},
            "gpu": machine.gpu and machine.gpu.name,
            "onnxruntime": machine.onnxruntime,
        },
        "workload": {key: value for key, value in plain(facts.workload).items() if key != "histogram"},
        "models": [
            {
                "provider": model.provider,
                "precision": model.precision,
                "closed": {row.cell: {key: getattr(row, key) for key in CELL_KEYS} for row in model.closed},
                "capacity_per_s": model.capacity_per_s,
                "slo": plain(model.slo),
            }
            for model in facts.models
        ],
        "comparisons": [
            {key: value for key, value in plain(one).items() if key != "ratios"} for one in facts.comparisons
        ],
        "findings": plain(facts.findings),
    }
