"""How `benchmarks.foreign_answers` reads answers to other tools' prompts: the tables of
benchmarks/foreign_answers.md.

    python -m benchmarks.read_foreign_answers [--data ../shared/data] [--samples 3]

Prints counts alone; with `--samples`, also some answers of each cell, on the screen and nowhere else.
"""

import argparse
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.foreign_answers import ForeignReading, read_foreign_answer

GRADES = 4
KEYS = ("dataset", "model", "prompt_mode", "query_id", "doc_id", "raw_output")
PARSERS = (
    "parsed_label",
    "final_score_tag",
    "first_single_digit",
    "last_single_digit",
    "first_number",
    "castorini_label",
)


def rows_of(data: Path, file: str) -> list[dict[str, Any]]:
    return pq.read_table(data / "llm_raw_outputs" / f"{file}.parquet").to_pylist()


def outcome(text: str, reading: ForeignReading) -> str:
    """Read, or why refused; where there is no verdict, whether any digit 0 to 3 is there that a laxer parser would
    have taken.
    """
    if reading.why != "no verdict":
        return reading.why
    return (
        "no verdict, though a lone digit of the scale"
        if re.search(r"(?<![0-9])[0-3](?![0-9])", text)
        else "no verdict and no such digit"
    )


def table(title: str, rows: list[dict[str, Any]], samples: int) -> list[ForeignReading]:
    started = time.perf_counter()
    readings = [read_foreign_answer(row["raw_output"] or "", grades=GRADES) for row in rows]
    seconds = time.perf_counter() - started
    counts = Counter(outcome(row["raw_output"] or "", reading) for row, reading in zip(rows, readings, strict=True))
    print(f"\n{title}: {len(rows):,} answers, {seconds:.1f} s\n\n| outcome | answers | share |\n|---|---|---|")
    for why, count in counts.most_common():
        print(f"| {why} | {count:,} | {count / len(rows):.1%} |")
    if samples:
        seen: Counter[str] = Counter()
        for row, reading in zip(rows[::7], readings[::7], strict=True):
            seen[reading.why] += 1
            if seen[reading.why] <= samples:
                print("   ", reading, repr((row["raw_output"] or "")[-200:]))
    return readings


def against(title: str, rows: list[dict[str, Any]], readings: list[ForeignReading], columns: tuple[str, ...]) -> None:
    print(
        f"\n{title}\n\n| other reading | ours equal | ours another | ours refused | it has none "
        "|\n|---|---|---|---|---|"
    )
    for column in columns:
        cells: Counter[str] = Counter()
        for row, reading in zip(rows, readings, strict=True):
            said = row[column] if not (column == "castorini_label" and row["castorini_valid"] == 0) else None
            if said is None:
                cells["none"] += 1
            elif reading.grade is None:
                cells["refused"] += 1
            else:
                cells["equal" if str(reading.grade) == str(said) else "another"] += 1
        print(f"| {column} | {cells['equal']:,} | {cells['another']:,} | {cells['refused']:,} | {cells['none']:,} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("RELABEL_TEST_DATA", "../shared/data")))
    parser.add_argument("--samples", type=int, default=0)
    options = parser.parse_args()
    disputed = rows_of(options.data, "parser_disputes")
    disputed_keys = {tuple(row[key] for key in KEYS) for row in disputed}
    raw = rows_of(options.data, "raw_outputs")
    agreed = [row for row in raw if tuple(row[key] for key in KEYS) not in disputed_keys]
    readings = table("Rows where all known parsers agree", agreed, options.samples)
    against("Against the authors' label", agreed, readings, ("parsed_label",))
    readings = table("Disputed", disputed, options.samples)
    against("Disputed, against each known parser", disputed, readings, PARSERS)
    degenerate = rows_of(options.data, "degenerate_outputs")
    readings = table("Degenerate", degenerate, options.samples)
    print(
        "\nGrades read:",
        dict(sorted(Counter(reading.grade for reading in readings if reading.grade is not None).items())),
    )


if __name__ == "__main__":
    main()
