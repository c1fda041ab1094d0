"""What benchmarks that label with a real model share: a command of relabel, the labels it left, and an interval."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

RESAMPLES = 1000


def relabel(*arguments: object) -> None:
    """A command of relabel, which has to end well or with nothing left to do."""
    command = [sys.executable, "-P", "-m", "relabel", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode not in (0, 10):
        raise SystemExit(f"relabel {arguments[0]}: exit {done.returncode}")


def label(
    labeler: str,
    pairs: Path,
    model: Path,
    folder: Path,
    options: Sequence[str],
    *,
    chunk_rows: int,
    **settings: Any,
) -> Path:
    """One run in `folder`, which goes on where one was begun; the time that it took on stderr.

    Args:
        options: of the engine, as `args.dtype=bfloat16`.
        settings: of the labeler, None for its default.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec = {
        "name": labeler,
        "input": {"path": str(pairs)},
        "labeler": {"name": labeler, **{name: value for name, value in settings.items() if value is not None}},
        "engine": {"name": "transformers", "model": str(model)},
        "run": {"max_failed_fraction": 1.0, "stop_when_unreadable": False, "chunk_rows": chunk_rows},
        "output": str(folder / labeler),
    }
    job = folder / f"{labeler}.yaml"
    job.write_text(json.dumps(spec))
    started = time.perf_counter()
    relabel("run", job, "--done-ok", *(part for one in options for part in ("--set", f"engine.{one}")))
    print(f"{labeler}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return folder / labeler


def labels(run: Path, *columns: str) -> list[dict[str, Any]]:
    """Rows of all label files of a run."""
    tables = [pq.read_table(path, columns=list(columns)) for path in sorted(run.glob("labels/**/*.parquet"))]
    return [row for table in tables for row in table.to_pylist()]


def interval(rows: np.ndarray, statistic: Callable[[np.ndarray], float] = np.mean, digits: int = 3) -> str:
    """The statistic of all rows with 95 % percentile bootstrap bounds over rows."""
    if not len(rows):
        return "–"
    rng = np.random.default_rng(7)
    drawn = [statistic(rows[rng.integers(len(rows), size=len(rows))]) for _ in range(RESAMPLES)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return f"{statistic(rows):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
