"""How long `relabel report` takes over runs of growing size, how much memory, and how fast its page filters 5,000 rows.

    python -m benchmarks.report_page [--rows 10000,100000] [--chromium /usr/bin/chromium]

The runs are made here: documents of 600 characters, graph-grpo's labels of the fake engine, one row in fifty spoiled.
Each report is a process of its own, whose peak of resident memory the kernel reports. The page is opened in headless
Chromium; a filter's time is that of the page's own `performance.measure`, from the event to the list that is shown.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

WORDS = "the light red shoe of a runner who wants to go far and home again in any weather that there is".split()  # noqa: SIM905
SEARCHES = ("runner", "weather light", "d4217", "nothing has this", "", "red", "shoe runner far", "")
MEASURED = """
import json, resource, sys, time
from relabel.jobs.cli import main
start = time.perf_counter()
try:
    main(sys.argv[1:])
except SystemExit as end:
    code = end.code
seconds = time.perf_counter() - start
used = resource.getrusage(resource.RUSAGE_SELF)
cpu_s, peak_mb = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
print(json.dumps({"code": code, "seconds": seconds, "cpu_s": cpu_s, "peak_mb": peak_mb}))
"""


def make_run(folder: Path, rows: int) -> Path:
    """A finished run over so many made-up rows."""
    pairs = folder / "pairs.parquet"
    text = " ".join(WORDS[number % len(WORDS)] for number in range(110))
    table = {
        "query_id": [f"q{row // 20}" for row in range(rows)],
        "query": [f"red shoe {row // 20}" for row in range(rows)],
        "doc_id": [f"d{row}" for row in range(rows)],
        "document": [f"shoe {row} {text}" for row in range(rows)],
        "grade": [row % 3 for row in range(rows)],
    }
    pq.write_table(pa.table(table), pairs)
    job = {
        "name": f"made-{rows}",
        "input": {"path": str(pairs), "columns": {"gold": "grade"}},
        "labeler": {"name": "graph-grpo", "attempts": 1},
        "engine": {"name": "fake", "seed": 7, "args": {"p_garbage": 0.02}},
        "output": str(folder / "out"),
        "shards": 4,
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    subprocess.run(
        [sys.executable, "-P", "-m", "relabel", "run", str(folder / "job.yaml")], check=True, capture_output=True
    )
    return folder / "out"


def measure(run: Path, page: Path, *flags: str) -> dict[str, float]:
    """One report in a process of its own."""
    call = [sys.executable, "-P", "-c", MEASURED, "report", str(run), "--to", str(page), *flags]
    done = subprocess.run(call, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert found["code"] == 0, done.stderr
    return found


def filter_times(page: Path, chromium: str) -> tuple[float, list[float]]:
    """Milliseconds until the page is ready, and of each filter."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--no-first-run"]
        )
        tab = browser.new_page(viewport={"width": 1400, "height": 900})
        start = time.perf_counter()
        tab.goto(page.absolute().as_uri())
        ready_ms = (time.perf_counter() - start) * 1000
        tab.evaluate("performance.clearMeasures()")
        for words in SEARCHES:
            tab.locator("#find").fill(words)
            tab.wait_for_timeout(300)
        for name, value in (("by-status", "format"), ("by-status", ""), ("by-gold", "differs"), ("order", "entropy")):
            tab.locator(f"#{name}").select_option(value)
        times = tab.evaluate("performance.getEntriesByName('filter').map(one => one.duration)")
        browser.close()
    return ready_ms, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="10000,100000")
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    options = parser.parse_args()
    for rows in map(int, options.rows.split(",")):
        with tempfile.TemporaryDirectory() as work:
            run, page = make_run(Path(work), rows), Path(work) / "report.html"
            for flags in ((), ("--max-rows", "0")):
                found = measure(run, page, *flags)
                size = page.stat().st_size / 1e6
                name = " ".join(flags) or "as it is"
                taken = f"{found['seconds']:.1f} s ({found['cpu_s']:.1f} s of a core)"
                print(f"{rows:>9,} rows, {name}: {taken}, peak {found['peak_mb']:.0f} MB, page {size:.2f} MB")
            if options.chromium:
                measure(run, page)
                ready_ms, times = filter_times(page, options.chromium)
                said = ", ".join(f"{one:.1f}" for one in times)
                print(
                    f"{rows:>9,} rows: page ready in {ready_ms:.0f} ms; filters {said} ms, slowest {max(times):.1f} ms"
                )


if __name__ == "__main__":
    main()
