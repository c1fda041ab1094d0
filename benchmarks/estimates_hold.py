"""How often the first estimates of `relabel plan` hold, and how wide they are.

    python -m benchmarks.estimates_hold --pairs pairs.parquet --model smollm2=/models/smollm2-135m --rows 24

One job for each labeler and engine (the fake one, and `transformers` with each model named): planned with no receipts
to learn from, then run to its end, each command a process of its own; what was said is held against what came
(`plan_against_actual` of `relabel status`). Prints for each figure how many of its intervals hold what came, and the
median of upper over lower, of those with a lower end above zero.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LABELERS = ("direct", "umbrela", "r1", "r3a", "graph-grpo", "pointwise", "complexity")


class Said(NamedTuple):
    """One figure of a plan, and what came."""

    job: str
    figure: str
    low: float
    high: float
    actual: float

    @property
    def holds(self) -> bool:
        return self.low <= self.actual <= self.high


def relabel(*arguments: str | Path, codes: tuple[int, ...] = (0,)) -> Any:
    """The JSON of a command."""
    command = [sys.executable, "-P", "-m", "jobs", *map(str, arguments), "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in codes, (arguments, done.returncode, done.stderr[-2000:])
    return json.loads(done.stdout)


def estimate_and_run(
    folder: Path, pairs: Path, rows: int, labeler: str, name: str, engine: dict[str, Any]
) -> Iterator[Said]:
    """Plan a job, run it, and hold the one against the other."""
    job = {
        "name": "estimates",
        "input": {"path": str(pairs), "limit": rows},
        "labeler": {"name": labeler},
        "engine": engine,
        "output": str(folder / f"{labeler}-{name}"),
        "run": {"max_failed_fraction": 1.0},
    }
    path = folder / f"{labeler}-{name}.yaml"
    path.write_text(json.dumps(job))  # JSON is YAML
    relabel("plan", path)
    relabel("run", path)
    for line in relabel("status", job["output"])["plan_against_actual"]:  # type: ignore[arg-type]
        low, _, high = line["planned"]
        yield Said(f"{labeler}, {name}", line["figure"].rpartition(".")[2], low, high, line["actual"])


def table(found: list[Said]) -> Iterator[str]:
    """A row for each kind of figure."""
    yield "| figure | intervals | hold | median upper / lower |\n|---|---|---|---|"
    for figure in dict.fromkeys(one.figure for one in found):
        some = [one for one in found if one.figure == figure]
        widths = [one.high / one.low for one in some if one.low > 0]
        width = f"{statistics.median(widths):.2f}" if widths else "none above 0"
        yield f"| {figure} | {len(some)} | {sum(one.holds for one in some)} | {width} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--labelers", nargs="+", default=LABELERS)
    parser.add_argument("--rows", type=int, default=24)
    args = parser.parse_args()
    engines: dict[str, dict[str, Any]] = {"fake": {"name": "fake"}}
    for one in args.model:
        name, _, folder = one.partition("=")
        engines[name] = {"name": "transformers", "model": folder}
    found: list[Said] = []
    with tempfile.TemporaryDirectory(prefix="relabel-estimates-") as scratch:
        for name, engine in engines.items():
            for labeler in args.labelers:
                rows = args.rows * (20 if name == "fake" else 1)
                found += estimate_and_run(Path(scratch), args.pairs.resolve(), rows, labeler, name, engine)
                missed = [
                    f"{one.figure} {one.actual:,.0f}"
                    for one in found
                    if one.job == f"{labeler}, {name}" and not one.holds
                ]
                print(f"{labeler}, {name}: missed {', '.join(missed) or 'none'}", file=sys.stderr, flush=True)
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
