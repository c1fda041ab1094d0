"""What a run of the fault suite amounted to: schedules tried, failures found and seconds, by guarantee, as JSON and as
a table.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import pytest

LEAST_SHARE = 0.8
"""The part of its schedules that every sweep tries where time has no limit."""


class Figures:
    """A pytest plugin that adds up the reports of the tests of this folder.

    A test that sweeps over many schedules says how many (`schedules`, `planned`, `failures`); any other is one
    schedule.

    Args:
        path: of the JSON file, written at the end of a full run; a table lies next to it.
        level: `short`, `full`, or `long`, which must try `LEAST_SHARE` of the schedules of every sweep.
    """

    def __init__(self, path: Path, level: str) -> None:
        self.path = path
        self.level = level
        self.started_s = time.monotonic()
        self.found: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one test."""
        if "tests/faults/" not in report.nodeid or (report.when != "call" and not report.failed):
            return
        name = re.sub(r"\[.*", "", report.nodeid.partition("tests/faults/")[2])
        where = ", S3" if re.search(r"\[.*\bs3\b", report.nodeid) else ""
        held = self.found.setdefault(
            name + where, {"schedules": 0, "planned": 0, "failures": 0, "skipped": 0, "seconds": 0.0}
        )
        said = dict(report.user_properties)
        held["seconds"] = round(held["seconds"] + report.duration, 1)
        if report.skipped:
            held["skipped"] += 1
            return
        held["schedules"] += said.get("schedules", 1)
        held["planned"] += said.get("planned", 1)
        held["failures"] += max(said.get("failures", 0), int(report.failed))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the files, if all was to be tried."""
        if self.level == "short" or not self.found:
            return
        for held in self.found.values():
            held["share"] = share(held["schedules"], held["planned"])
        totals = {
            key: sum(held[key] for held in self.found.values())
            for key in ("schedules", "planned", "failures", "skipped")
        }
        figures = {
            "machine": {"cpus": os.cpu_count(), "system": platform.system(), "python": platform.python_version()},
            "load_at_end": round(os.getloadavg()[0], 1),
            "level": self.level,
            **totals,
            "share": share(totals["schedules"], totals["planned"]),
            "least_share": min(held["share"] for held in self.found.values()),
            "seconds": round(time.monotonic() - self.started_s, 1),
            "tests": dict(sorted(self.found.items())),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(figures, indent=2) + "\n")
        self.path.with_suffix(".md").write_text(table(figures))
        if self.level == "long" and figures["least_share"] < LEAST_SHARE:
            fewer = [name for name, held in self.found.items() if held["share"] < LEAST_SHARE]
            print(f"\ntried less than {LEAST_SHARE:.0%} of: {', '.join(sorted(fewer))}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def share(tried: int, planned: int) -> float:
    """The part of the planned schedules that was tried, rounded down to a percent; all of none."""
    return math.floor(100 * tried / planned) / 100 if planned else 1.0


def table(figures: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    lines = ["| guarantee | schedules | failures | seconds |", "|---|---|---|---|"]
    for name, held in figures["tests"].items():
        file, _, test = name.partition("::")
        tried = f"{held['schedules']:,}" + (f" of {held['planned']:,}" if held["planned"] != held["schedules"] else "")
        tried += f" ({held['skipped']} skipped)" if held["skipped"] else ""
        words = test.removeprefix("test_").replace("_", " ")
        lines.append(f"| {words} ({file}) | {tried} | {held['failures']} | {held['seconds']:.0f} |")
    tried = (
        f"{figures['schedules']:,} of {figures['planned']:,} ({figures['share']:.0%}; the least tried "
        f"{figures['least_share']:.0%})"
    )
    lines.append(f"| all | {tried} | {figures['failures']} | {figures['seconds']:.0f} |")
    return "\n".join(lines) + "\n"
