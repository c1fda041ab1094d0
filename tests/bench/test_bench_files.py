"""A bench that is kept as a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

QUICK = {"seconds": 2, "providers": ["cpu"], "batches": [1], "threads": 1, "precisions": ["fp32"]}


def write(path: Path, **keys: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**QUICK, **keys}))
    return str(path)


def test_paths_count_from_the_file_s_folder_and_flags_win_over_its_keys(
    relabel: Callable[..., Any], folder: Path, bundle: Path
) -> None:
    before = (bundle / "manifest.json").read_bytes()
    gates = ["cpu.fp32.1x16.mean_ms<=0"]
    spec = write(folder / "specs/bench.yaml", bundle="../bundle", to="../results", require=gates)
    line = ("--batches", "2", "--preset", "table3", "--to", "elsewhere", "--require", "cpu.fp32.table3-1.mean_ms>=0")
    done = relabel("bench", spec, *line)
    assert done.code == 0, done
    assert not (folder / "results").exists()
    held = json.loads((folder / "elsewhere/latency.json").read_text())
    assert (held["spec"]["batches"], held["spec"]["seconds"], held["machine"]["threads"]) == ([2], 2, 1)
    assert (bundle / "manifest.json").read_bytes() == before


def test_a_bench_file_with_a_fault_is_refused_by_its_key(
    relabel: Callable[..., Any], folder: Path, bundle: Path
) -> None:
    relabel("bench", write(folder / "a.yaml", bundle="bundle", secnds=3)).refused(3, "a.yaml", "`secnds`", "seconds")
    relabel("bench", write(folder / "c.yaml")).refused(3, "c.yaml", "bundle")
    relabel("bench", write(folder / "e.yaml", bundle="s3://bucket/bundle")).refused(
        2, "BUNDLE is a folder on this machine"
    )


def test_a_fresh_bench_file_is_read_by_its_command(relabel: Callable[..., Any], folder: Path, bundle: Path) -> None:
    relabel("init", "--kind", "bench")
    text = Path("bench.yaml").read_text()
    assert "out/my-bundle" in text
    Path("bench.yaml").write_text(text.replace("out/my-bundle", "bundle"))
    flags = ("--seconds", "0.5", "--batches", "1", "--providers", "cpu", "--precisions", "fp32")
    assert relabel("bench", "bench.yaml", *flags).code == 0
    assert len(list(Path("measurements/bundle").glob("*.json"))) == 1


def test_a_place_that_can_t_be_written_is_refused_before_anything_is_measured(
    relabel: Callable[..., Any],
    folder: Path,
    bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(*_: Any, **__: Any) -> None:
        raise AssertionError("measured, for figures that can't be kept")

    monkeypatch.setattr("relabel.jobs.commands.bench.bench_bundle", measure)
    (folder / "measurements").write_text("a file where a folder belongs")
    relabel("bench", str(bundle)).refused(3, "Not a directory", "--to DIR")
