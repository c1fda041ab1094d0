"""A cron day in fast motion: eight ticks of one job file over partitions that are new, changed and unchanged.

    python -m benchmarks.show_day [--rows 1000]

Every tick is the line that a crontab would hold, `relabel run job.yaml --shard 0/1 --date … --metrics …`, in a process
of its own. The input is the folder of the day, the output that of the day, and `reuse` is the day before. Figures of a
tick come from its metrics file and its result. Afterwards each day's output is verified, and read by pyarrow alone.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.run_loop import WORDS
from benchmarks.shown_jobs import Place, call, is_each_row_there_once, read_committed, relabel

DAYS = ("2026-11-16", "2026-11-17", "2026-11-18", "2026-11-19", "2026-11-20")
PARTITIONS = 10
DOCS_PER_QUERY = 10


class Tick(NamedTuple):
    """The result of one scheduled call: its command line, exit code and counts of its own."""

    line: str
    what: str
    code: int
    asked: int
    reused: int
    quarantined: int
    engine_starts: int
    seconds: float

    def row(self) -> str:
        """As a row of a Markdown table."""
        counts = f"{self.asked:,} | {self.reused:,} | {self.quarantined:,} | {self.engine_starts}"
        return f"| {self.what} | `{self.line}` | {self.code} | {counts} | {self.seconds:.1f} |"


class Day:
    """The folder, the job file, and how a tick is called."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.folder = folder
        self.rows = rows
        self.place = Place(str(folder), {})
        self.ticks: list[Tick] = []

    def write_partition(
        self, day: str, name: str, *, seed: int, changed_every: int = 0, overlong_every: int = 0
    ) -> None:
        """A partition of made-up pairs: the same text for the same seed, but for every so many documents that are
        changed or too long.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        rng = random.Random(seed)
        queries = [" ".join(rng.choices(WORDS, k=4)) for _ in range(-(-self.rows // DOCS_PER_QUERY))]
        documents = [" ".join(rng.choices(WORDS, k=60)) for _ in range(self.rows)]
        if changed_every:
            documents[::changed_every] = [f"{text} again" for text in documents[::changed_every]]
        if overlong_every:
            documents[::overlong_every] = [text * 60 for text in documents[::overlong_every]]
        table = {
            "query_id": [f"{seed}-{row // DOCS_PER_QUERY}" for row in range(self.rows)],
            "query": [queries[row // DOCS_PER_QUERY] for row in range(self.rows)],
            "doc_id": [f"{seed}-{row}" for row in range(self.rows)],
            "document": documents,
        }
        (self.folder / "pairs" / day).mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(table), self.folder / "pairs" / day / f"{name}.parquet")

    def copy_day(self, day: str, before: str) -> None:
        """The partitions of the day before, unchanged."""
        shutil.copytree(self.folder / "pairs" / before, self.folder / "pairs" / day)

    def write_job(self, **engine: Any) -> None:
        """The one job file of the day; the engine's speed is no part of what makes a label."""
        job = {
            "name": "day",
            "input": {"path": str(self.folder / "pairs" / "${date}"), "overlong": "quarantine"},
            "labeler": {"name": "r3a", "attempts": 4},
            "engine": {"name": "fake", "seed": 5, "max_prompt_tokens": 4096, "args": {"p_garbage": 0.03, **engine}},
            "output": str(self.folder / "out" / "${date}"),
            "shards": 1,
            "run": {"chunk_rows": 128},
        }
        (self.folder / "job.yaml").write_text(json.dumps(job))

    def line(self, number: int, day: str, *more: str) -> list[str]:
        """The tick's arguments: the folder's path and the metrics file are in each."""
        before = DAYS.index(day) - 1
        reuse = [f'--set=reuse=["{self.folder}/out/{DAYS[before]}"]'] if before >= 0 else []
        metrics = str(self.folder / f"tick-{number}.prom")
        return [
            "run",
            str(self.folder / "job.yaml"),
            "--shard",
            "0/1",
            "--date",
            day,
            *reuse,
            *more,
            "--metrics",
            metrics,
        ]

    def tick(self, what: str, day: str, *more: str) -> None:
        """One tick, to its end."""
        number = len(self.ticks) + 1
        line = self.line(number, day, *more)
        ended = call(*line, place=self.place, codes=(0, 10, 20, 30, 75))
        self.note(number, what, line, ended.code, ended.said, ended.seconds)

    def overlapped_tick(self, what: str, overlapping: str, day: str) -> None:
        """A tick, and another of the same line while it runs."""
        number = len(self.ticks) + 1
        line = self.line(number, day)
        started = time.perf_counter()
        with subprocess.Popen(
            relabel(*line), env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            self._wait_for_commit(day)
            second = self.line(number + 1, day)
            ended = call(*second, place=self.place, codes=(75,))
            assert process.poll() is None, "the first tick was done before the second came; give it more rows"
            out, _ = process.communicate()
        seconds = time.perf_counter() - started
        self.note(number, what, line, process.returncode, json.loads(out), seconds)
        self.note(number + 1, overlapping, second, ended.code, ended.said, ended.seconds)

    def note(self, number: int, what: str, line: list[str], code: int, said: dict[str, Any], seconds: float) -> None:
        """Keep the result of a scheduled call, and print it."""
        did = said["this_run"]
        quarantined = sum(count for status, count in did["statuses"].items() if status != "ok")
        shown = " ".join(line[: line.index("--metrics")]).replace(f"{self.folder}/", "")
        starts = self._metric(number, "relabel_run_engine_starts")
        self.ticks.append(
            Tick(f"relabel {shown}", what, code, did["pairs"], did["reused"], quarantined, int(starts), seconds)
        )
        print(f"{number} {self.ticks[-1].row()}", flush=True)

    def _wait_for_commit(self, day: str) -> None:
        """Until there is a receipt more than now."""
        folder = self.folder / "out" / day / "receipts"
        before, until = len(list(folder.rglob("*.json"))), time.perf_counter() + 60
        while len(list(folder.rglob("*.json"))) == before:
            if time.perf_counter() > until:
                raise RuntimeError("the first tick committed nothing within a minute")
            time.sleep(0.1)

    def _metric(self, number: int, name: str) -> float:
        found = re.search(rf"^{name}\{{.*\}} (\S+)$", (self.folder / f"tick-{number}.prom").read_text(), re.MULTILINE)
        return float(found[1]) if found else 0.0


def live(day: Day) -> None:
    """The eight ticks."""
    day.write_job()
    for number in range(PARTITIONS):
        day.write_partition(DAYS[0], f"part-{number:02d}", seed=number)
    day.tick("all new", DAYS[0])
    day.tick("the same again", DAYS[0])
    day.copy_day(DAYS[1], DAYS[0])
    day.write_partition(DAYS[1], f"part-{PARTITIONS:02d}", seed=PARTITIONS)
    day.tick("one partition new", DAYS[1])
    day.copy_day(DAYS[2], DAYS[1])
    day.write_partition(DAYS[2], "part-03", seed=3, changed_every=10)
    day.tick("one partition changed in every tenth document", DAYS[2])
    day.copy_day(DAYS[3], DAYS[2])
    day.tick("a new day, nothing changed", DAYS[3])
    day.copy_day(DAYS[4], DAYS[3])
    for number in range(PARTITIONS + 1, PARTITIONS + 4):
        day.write_partition(DAYS[4], f"part-{number:02d}", seed=number, overlong_every=50)
    day.write_job(latency_s=0.4, batch=32, capacity=128)  # from here on the engine is slow
    day.tick("three partitions new, and a deadline", DAYS[4], "--for", "35s")
    day.overlapped_tick("goes on after it", "comes while that one works", DAYS[4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000, help="of each partition")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relabel-show-") as scratch:
        day = Day(Path(scratch), args.rows)
        live(day)
        for number, date in enumerate(DAYS):
            verify = call("verify", Path(scratch) / "out" / date, place=day.place)
            rows = args.rows * (PARTITIONS + (0, 1, 1, 1, 4)[number])
            found = read_committed(day.place, f"out/{date}")
            print(
                f"{date}: verify {verify.code}, {rows:,} rows each once: {is_each_row_there_once(found, rows)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
