"""A bench's figures as files in a folder that is named: JSON, table, plots, and a text for people."""

from __future__ import annotations

from pathlib import Path

from relabel.export.bench.benching import Bench
from relabel.export.bench.latency_cards import latency_lines
from relabel.export.bench.latency_facts import FACTS_NAME
from relabel.export.bench.latency_plots import CLOSED_NAME, OPEN_NAME, write_plots
from relabel.export.bench.latency_tables import TABLE_NAME, latency_table_bytes
from relabel.export.bundles import MANIFEST_NAME
from relabel.manifests.digests import readable_json
from relabel.manifests.errors import UsageError
from relabel.manifests.records import plain
from relabel.manifests.storage.disk_errors import translate_errors

TEXT_NAME = "latency.md"
NAMES = (FACTS_NAME, TABLE_NAME, CLOSED_NAME, OPEN_NAME)
"""Every file of an earlier bench goes when a new one comes."""


def check_results_folder(folder: Path, bundle: Path) -> None:
    """Refuse a folder for results that would make a bundle unreadable: one with files that its manifest does not name.

    Raises:
        UsageError: it is the bundle, lies inside it, or is another one.
    """
    place = folder.resolve()
    if bundle.resolve() in (place, *place.parents):
        raise UsageError(f"--to {folder}: is the bundle or inside it. Without --to the results go beside it.")
    if (place / MANIFEST_NAME).is_file():
        raise UsageError(
            f"--to {folder}: holds a {MANIFEST_NAME}, which says what may lie there. Name a folder for the results "
            "alone."
        )


def write_to(folder: Path, bench: Bench) -> list[str]:
    """Write figures, plots and a text for people into a folder; their names.

    Raises:
        StoreError, DiskFullError: the folder can't be written.
    """
    with translate_errors("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            (folder / name).unlink(missing_ok=True)
        (folder / FACTS_NAME).write_bytes(readable_json(plain(bench.facts)))
        (folder / TABLE_NAME).write_bytes(latency_table_bytes(bench.facts.rows))
        plots = write_plots(folder, bench.facts)
        lines = [f"# {bench.facts.name}", "", "## Latency", "", *latency_lines(bench.facts)]
        (folder / TEXT_NAME).write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return [FACTS_NAME, TABLE_NAME, *plots, TEXT_NAME]
