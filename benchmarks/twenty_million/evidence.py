"""What is left, read by polars over the Parquet files that the manifest lists, with nothing of relabel: eight lines,
each with a file of evidence.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.shown_jobs import Place
from benchmarks.twenty_million.server import is_bad

ATTEMPTS = 2
"""Asks of a row whose answers do not read."""
MOST_TWICE = 0.005
ID = ("query_id", "doc_id")
SETTLED = ("row_id",)
"""Columns that differ between two runs over other inputs, though the labels are the same."""


@dataclass(frozen=True)
class Line:
    """One promise: whether it holds, what shows it, and all the figures of its file of evidence."""

    name: str
    holds: bool
    shown: str
    facts: dict[str, Any]


def committed(
    place: Place, output: str, kind: str, *, columns: Sequence[str] | None = None, of: pl.DataFrame | None = None
) -> pl.DataFrame:
    """Rows of an output's labels or quarantine.

    Args:
        columns: those that are read; None for all.
        of: the rows wanted, by their ids; None for all.
    """
    filesystem, root = place.filesystem()
    with filesystem.open_input_stream(f"{root}/{output}/manifest.json") as stream:
        manifest = json.loads(stream.read())
    tables = []
    for file in manifest[kind]:
        with filesystem.open_input_file(f"{root}/{output}/{file['path']}") as stream:
            table = pl.read_parquet(stream.read(), columns=columns)
            tables.append(table if of is None else table.join(of, on=ID, how="semi"))
    return pl.concat(tables) if tables else pl.DataFrame({name: [] for name in ID}, schema=dict.fromkeys(ID, pl.String))


def lines(folder: Path, place: Place, rows: int, events: list[dict[str, Any]]) -> list[Line]:
    """All promises, looked at one by one.

    Args:
        rows: of the input, which has the ids `q<row // 10>` and `d<row>`.
    """
    quarantine = committed(place, "out", "quarantine")
    found = pl.concat([committed(place, "out", "labels", columns=ID), quarantine.select(ID)])
    sample = committed(place, "sample", "labels")
    among = committed(place, "out", "labels", of=sample.select(ID))
    asked_R = np.load(folder / "asked.npy")
    return [
        each_row_is_there(found, rows),
        none_is_there_twice(found),
        labels_are_those_of_an_undisturbed_run(among, sample),
        asks_are_paid_once(asked_R, events),
        no_innocent_row_is_in_quarantine(quarantine),
        memory_is_flat(folder, rows),
        stops_are_short(folder, events),
        starters_were_killed(events),
    ]


def each_row_is_there(found: pl.DataFrame, rows: int) -> Line:
    """Rows in = labels + quarantine, as sets of ids."""
    numbers = pl.int_range(rows, eager=True)
    wanted = pl.DataFrame({"query_id": "q" + (numbers // 10).cast(pl.String), "doc_id": "d" + numbers.cast(pl.String)})
    missing = wanted.join(found, on=ID, how="anti").height
    foreign = found.join(wanted, on=ID, how="anti").height
    facts = {"rows": rows, "missing": missing, "foreign": foreign}
    return Line("rows in = labels + quarantine", missing == foreign == 0, f"{rows:,} ids, {missing} missing", facts)


def none_is_there_twice(found: pl.DataFrame) -> Line:
    twice = found.height - found.unique().height
    return Line("none twice", twice == 0, f"{twice} twice", {"rows": found.height, "twice": twice})


def labels_are_those_of_an_undisturbed_run(among: pl.DataFrame, sample: pl.DataFrame) -> Line:
    """The first hundredth of the rows, labelled alone: equal in every column but the row's number."""
    columns = [name for name in sample.columns if name not in SETTLED]
    wanted = sample.select(columns).sort(ID)
    is_equal = wanted.equals(among.select(columns).sort(ID))
    return Line(
        "labels equal to an undisturbed run",
        is_equal,
        f"{sample.height:,} rows in {len(columns)} columns",
        {"rows": sample.height, "columns": columns, "equal": is_equal},
    )


def asks_are_paid_once(asked_R: np.ndarray, events: list[dict[str, Any]]) -> Line:
    """Answers that the server gave beyond those that a row needs."""
    num_kills = sum(event["kind"] not in ("begin", "end") for event in events)
    needed_R = np.where(is_bad(np.arange(len(asked_R))), ATTEMPTS, 1)
    twice = int(np.maximum(asked_R.astype(np.int64) - needed_R, 0).sum())
    share = twice / int(needed_R.sum())
    facts = {"answers": int(asked_R.sum()), "needed": int(needed_R.sum()), "twice": twice, "share": share}
    facts["rows_by_answers"] = {str(count): int(n) for count, n in enumerate(np.bincount(asked_R)) if n}
    facts |= {"kills": num_kills, "twice_a_kill": twice / max(num_kills, 1)}
    shown = f"{twice:,} of {facts['needed']:,}, {share:.2%}; {facts['twice_a_kill']:.0f} a kill"
    return Line("asks paid twice ≤ 0.5 %", share <= MOST_TWICE, shown, facts)


def no_innocent_row_is_in_quarantine(quarantine: pl.DataFrame) -> Line:
    numbers = [int(doc_id.removeprefix("d")) for doc_id in quarantine["doc_id"]]
    innocent = [number for number in numbers if not is_bad(number)]
    facts: dict[str, Any] = {"rows": len(numbers), "innocent": innocent[:100], "num_innocent": len(innocent)}
    if innocent:
        facts["reasons"] = Counter(quarantine["reason"].to_list()).most_common(10)
    return Line("no innocent row in quarantine", not innocent, f"{len(innocent)} of {len(numbers):,}", facts)


MEMORY_GROWS = 1.25
"""Most that a worker at the end may have of what one had at a twentieth of the rows."""


def memory_is_flat(folder: Path, rows: int) -> Line:
    """The largest worker around a twentieth, the half and the end of the rows."""
    samples = pl.read_ndjson(folder / "memory.jsonl")
    peaks = {}
    for name, share in (("early", 0.05), ("half", 0.5), ("end", 0.95)):
        near = samples.filter((pl.col("answers") / rows - share).abs() <= 0.05)
        peaks[name] = near["rss_mb"].max()
    held = [peak for peak in peaks.values() if peak is not None]
    is_flat = len(held) == len(peaks) and peaks["end"] <= MEMORY_GROWS * peaks["early"]
    text = ", ".join(f"{name} {peak} MB" for name, peak in peaks.items())
    return Line("memory of a worker flat", is_flat, text, {"peak_mb": peaks, "samples": samples.height})


LONGEST_STOP_S = 60.0


def stops_are_short(folder: Path, events: list[dict[str, Any]]) -> Line:
    """The longest time without an answer while the show ran."""
    seconds = sorted(map(int, json.loads((folder / "answers_by_second.json").read_text())))
    begins = [event["time"] for event in events if event["kind"] == "begin"]
    stops = []
    for before, after in itertools.pairwise(seconds):
        if any(before <= begin <= after for begin in begins):
            continue  # the show itself was not running
        cause = next((event["kind"] for event in reversed(events) if event["time"] <= before + 1), "")
        stops.append((after - before - 1, cause))
    stops.sort(reverse=True)
    longest = stops[0] if stops else (0, "")
    return Line(
        f"longest stop ≤ {LONGEST_STOP_S:.0f} s",
        longest[0] <= LONGEST_STOP_S,
        f"{longest[0]} s, after {longest[1]}",
        {"ten_longest": stops[:10]},
    )


def starters_were_killed(events: list[dict[str, Any]]) -> Line:
    kills = Counter(event["kind"] for event in events)
    count = kills["starter"] + kills["head"]
    return Line("finished after its starter was killed", count > 0, f"{count} times", {"events": dict(kills)})


Write = Callable[[str], None]


def write(folder: Path, found: list[Line]) -> None:
    """A file of evidence for each line."""
    (folder / "evidence").mkdir(exist_ok=True)
    for number, line in enumerate(found, start=1):
        values = {"line": line.name, "holds": line.holds, "shown": line.shown, **line.facts}
        (folder / "evidence" / f"{number}.json").write_text(json.dumps(values, indent=1, default=str))
