"""How often the first estimates of `relabel plan` hold, and how wide they are.

    python -m benchmarks.estimates_hold --pairs pairs.parquet --model smollm2=/models/smollm2-135m:24 \
        --model qwen=/models/qwen-1.5b:8

Two jobs for each labeler and model, over rows of their own, on the engine `transformers`: one planned with `--probe`,
one planned after the first has run, from its rates. Each is then run to its end, with a fresh cache for each model, all
in one process, so that libraries are loaded once; what was said is held against what came (`plan_against_actual` of
`relabel status`).
Behind a model's folder stands how many rows each job has. Prints for each figure how many of its intervals hold what
came, and the median of upper over lower, of those with a lower end above zero.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.jobs.cli import main as main_of_relabel

LABELERS = (
    "direct", "pointwise", "complexity", "umbrela", "r1", "r3a", "graph-grpo", "review", "route", "variants",
    "evidence-set",
)  # fmt: skip
DOCUMENTS, MOST_CHARS = 4, 500
"""Documents of a query, and their characters at most."""


class Said(NamedTuple):
    """One figure of a plan, what it was said by, and what came."""

    job: str
    basis: str
    figure: str
    low: float
    high: float
    actual: float

    @property
    def holds(self) -> bool:
        return self.low <= self.actual <= self.high


def relabel(*arguments: str | Path, cache: Path) -> Any:
    """The JSON of a command."""
    os.environ["RELABEL_CACHE"] = str(cache)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):  # what failed has printed no result
        main_of_relabel([*map(str, arguments), "--output", "json"])
    return json.loads(out.getvalue())


def write_pairs(source: Path, folder: Path, rows: int, cache: Path) -> dict[str, Path]:
    """Rows for the probed job and others for the one after it, with chunks and trees."""
    by_query: dict[str, list[dict[str, str]]] = {}
    for row in pq.read_table(source, columns=["query_id", "query", "doc_id", "title", "body"]).to_pylist():
        text = f"{row['title'] or ''}\n\n{row['body'] or ''}".strip()[:MOST_CHARS]
        pair = {name: str(row[name]) for name in ("query_id", "query", "doc_id")} | {"document": text}
        if text:
            by_query.setdefault(pair["query_id"], []).append(pair)
    queries = [pairs[:DOCUMENTS] for pairs in by_query.values() if len(pairs) >= DOCUMENTS]
    found = {}
    for number, basis in enumerate(("probe", "last run")):
        some = queries[number :: max(2, len(queries) * DOCUMENTS // (rows * 2))][: max(1, rows // DOCUMENTS)]
        plain, chunked, treed = (folder / f"{number}-{name}.parquet" for name in ("plain", "chunked", "treed"))
        pq.write_table(pa.Table.from_pylist([pair for query in some for pair in query]), plain)
        relabel("pairs", "chunk", plain, "--to", chunked, "--format", "text", "--max-tokens", "40", cache=cache)
        relabel("pairs", "tree", chunked, "--to", treed, "--format", "text", cache=cache)
        found[basis] = treed
    return found


def estimate_and_run(folder: Path, pairs: Path, labeler: str, model: str, basis: str, cache: Path) -> Iterator[Said]:
    """Plan a job, run it, and hold the one against the other."""
    name = f"{labeler}-{Path(model).name}-{basis.replace(' ', '-')}"
    job = {
        "name": "estimates",
        "input": {"path": str(pairs)},
        "labeler": {"name": labeler, "max_think_tokens": 16, "max_text_tokens": 16},
        "engine": {"name": "transformers", "model": model},
        "output": str(folder / name),
        "run": {"max_failed_fraction": 1.0},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(job))  # JSON is YAML
    planned = relabel("plan", path, *(["--probe"] if basis == "probe" else []), cache=cache)
    assert planned["estimate"]["basis"]["seconds"].startswith(("a probe", "this model's last run")), planned
    relabel("run", path, cache=cache)
    for line in relabel("status", job["output"], cache=cache)["plan_against_actual"]:  # type: ignore[arg-type]
        low, _, high = line["planned"]
        figure = line["figure"].rpartition(".")[2]
        yield Said(f"{labeler}, {Path(model).name}", basis, figure, low, high, line["actual"])


def table(found: list[Said]) -> Iterator[str]:
    """A row for each kind of figure and basis, and one for both."""
    yield "| figure | by | intervals | hold | median upper / lower |\n|---|---|---|---|---|"
    for figure in dict.fromkeys(one.figure for one in found):
        for basis in ("probe", "last run", ""):
            some = [one for one in found if one.figure == figure and one.basis.startswith(basis)]
            widths = [one.high / one.low for one in some if one.low > 0]
            width = f"{statistics.median(widths):.2f}" if widths else "none above 0"
            holds = sum(one.holds for one in some)
            yield f"| {figure} | {basis or 'both'} | {len(some)} | {holds} | {width} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True, help="query_id, query, doc_id, title, body")
    parser.add_argument("--model", action="append", required=True, metavar="NAME=FOLDER:ROWS")
    parser.add_argument("--labelers", nargs="+", default=LABELERS)
    args = parser.parse_args()
    found: list[Said] = []
    with tempfile.TemporaryDirectory(prefix="relabel-estimates-") as scratch:
        for one in args.model:
            name, _, place = one.partition("=")
            model, _, rows = place.rpartition(":")
            folder = Path(scratch, name)
            folder.mkdir()
            pairs = write_pairs(args.pairs.resolve(), folder, int(rows), folder / "cache")
            for labeler in args.labelers:
                for basis, path in pairs.items():
                    said = list(estimate_and_run(folder, path, labeler, model, basis, folder / "cache"))
                    for line in said:
                        verdict = "holds" if line.holds else "MISSED"
                        figures = f"{line.low:,.3f} to {line.high:,.3f}, came {line.actual:,.3f}"
                        print(f"{line.job}, {basis}: {line.figure} {figures}, {verdict}", file=sys.stderr, flush=True)
                    found += said
    print(f"{len({(one.job, one.basis) for one in found})} jobs\n")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
