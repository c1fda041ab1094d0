"""Where a bench's figures go: files in a folder, or into the bundle itself, which is sealed anew.

The bundle is made ready beside itself, with its files linked and not copied, and takes its own place in one step, so that a bench that is
killed leaves the bundle as it was.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export.bench.benching import Bench
from export.bench.latency_cards import latency_lines, put_section
from export.bench.latency_plots import CLOSED_NAME, OPEN_NAME, write_plots
from export.bench.latency_tables import TABLE_NAME, latency_table_bytes
from export.bundle_cards import CARD_NAME
from export.bundles import MANIFEST_NAME, OWN_KEYS, Bundle, open_bundle, seal_bundle
from export.destinations import VERSIONS
from manifests.digests import readable_json
from manifests.disk_errors import told
from manifests.errors import UsageError

FACTS_NAME, TEXT_NAME = "latency.json", "latency.md"
NAMES = (FACTS_NAME, TABLE_NAME, CLOSED_NAME, OPEN_NAME)
"""Every file of an earlier bench goes when a new one comes."""
PART, OLD = ".bench", ".old"
CELL_KEYS = ("samples", "p50_ms", "p99_ms", "p999_ms", "mean_ms", "pairs_per_s")


def check_place(folder: Path) -> None:
    """Refuse a bundle that can't be written into before anything is measured; put one back that a killed bench left beside its place.

    Raises:
        UsageError: it was pulled: what stands under a published version's name must stay that version.
    """
    if folder.resolve().parent.name == VERSIONS:
        raise UsageError(f"{folder}: was pulled, and stays the version that it is. Name a folder for the results with --to.")
    old = folder.with_name(folder.name + OLD)
    if not folder.exists() and old.is_dir():
        old.rename(folder)


def put_into_bundle(bundle: Bundle, bench: Bench) -> Bundle:
    """Write figures, plots and the card's section into a bundle, and a summary into its manifest.

    Returns:
        The bundle sealed anew, another version.
    Raises:
        StoreError, DiskFullError: the folder can't be written.
    """
    folder = bundle.folder
    part, old = folder.with_name(folder.name + PART), folder.with_name(folder.name + OLD)
    with told("write", part):
        for leftover in (part, old):
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.copytree(folder, part, copy_function=_link, ignore=lambda at, _: [MANIFEST_NAME, *NAMES] if Path(at) == folder else [])
        files = write_files(part, bench)
        card = part / CARD_NAME
        text = card.read_text(encoding="utf-8") if card.is_file() else f"# {bundle.name}\n"
        card.unlink(missing_ok=True)  # it is a link to the old bundle's
        card.write_text(put_section(text, latency_lines(bench.facts)), encoding="utf-8")
        facts = {key: value for key, value in bundle.facts.items() if key not in OWN_KEYS}
        seal_bundle(part, {**facts, "latency": summary(bench.facts, files)})
        folder.rename(old)
        part.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    return open_bundle(folder, check_bytes=False)


def write_to(folder: Path, bench: Bench) -> list[str]:
    """Write figures, plots and the card's section as a text of its own into a folder; their names.

    Raises:
        StoreError, DiskFullError: the folder can't be written.
    """
    with told("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            (folder / name).unlink(missing_ok=True)
        files = write_files(folder, bench)
        (folder / TEXT_NAME).write_text(put_section(f"# {bench.facts['name']}\n", latency_lines(bench.facts)), encoding="utf-8")
    return [*files, TEXT_NAME]


def write_files(folder: Path, bench: Bench) -> list[str]:
    """Write `latency.json`, `latency.parquet` and the plots; their names."""
    (folder / FACTS_NAME).write_bytes(readable_json(bench.facts))
    (folder / TABLE_NAME).write_bytes(latency_table_bytes(bench.rows))
    return [FACTS_NAME, TABLE_NAME, *write_plots(folder, bench.facts)]


def summary(facts: Mapping[str, Any], files: list[str]) -> dict[str, Any]:
    """`latency` in a bundle's manifest: what one asks first. No times in it, as in all of the manifest."""
    machine = facts["machine"]
    return {
        "format": facts["format"],
        "files": files,
        "machine": {
            **{key: machine[key] for key in ("cpu", "cores", "threads")},
            "gpu": machine["gpu"] and machine["gpu"]["name"],
            "onnxruntime": machine["versions"].get("onnxruntime") or machine["versions"].get("onnxruntime-gpu"),
        },
        "workload": {key: facts["workload"][key] for key in ("from", "rows", "p50", "p90", "p99", "max")},
        "models": [
            {
                "provider": model["provider"],
                "precision": model["precision"],
                "closed": {row["cell"]: {key: row[key] for key in CELL_KEYS} for row in model["closed"]},
                "capacity_per_s": model["capacity_per_s"],
                "slo": model["slo"],
            }
            for model in facts["models"]
        ],
        "comparisons": [{key: value for key, value in one.items() if key != "ratios"} for one in facts["comparisons"]],
        "findings": facts["findings"],
    }


def gate_figures(facts: Mapping[str, Any]) -> dict[str, float | None]:
    """Every figure that `--require` may name: `cpu.int8.1x128.p99_ms`, `cpu.int8.highest_rate`, `cpu.int8/fp32.1x128.ratio_high`."""
    found: dict[str, float | None] = {}
    for model in facts["models"]:
        name = f"{model['provider']}.{model['precision']}"
        for row in model["closed"]:
            found |= {f"{name}.{row['cell']}.{key}": row[key] for key in CELL_KEYS if key != "samples"}
        for slo in model["slo"]:
            found[f"{name}.{slo['preset']}.highest_rate"] = slo["highest_rate"]
    for one in facts["comparisons"]:
        name = f"{one['provider']}.{one['ours']}/{one['theirs']}.{one['cell']}"
        found |= {f"{name}.ratio": one["ratio"], f"{name}.ratio_high": one["high"], f"{name}.cpu_ratio": one["cpu_ratio"]}
    return found


def _link(source: str, target: str) -> str:
    """A second name for a file, or a copy where the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
