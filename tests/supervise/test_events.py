"""What a worker reports is golden, line by line: a supervisor reads just these keys, in just these types."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from relabel.jobs.job import load_job, open_run
from relabel.jobs.pool.messages import Assignment, assign
from relabel.jobs.pool.workers import Reporter, _ended
from relabel.jobs.run.chunks import ChunkCase
from relabel.jobs.run.counts import Progress
from relabel.jobs.run.session import Session
from relabel.jobs.run.stop import Stop
from relabel.manifests.receipts import ChunkId
from tests.supervise.pool_jobs import write_job

WHEN = re.compile(r'("engine_start_s":)[0-9.e-]+')


@pytest.fixture
def assignment(tmp_path: Path) -> Assignment:
    job = write_job(tmp_path, rows=12, run={"chunk_rows": 12})
    opened = open_run(load_job(str(job)))
    return assign(Session(opened, [0], is_retry=False, stop=Stop(), progress=Progress())).named("w0")


def reported(assignment: Assignment) -> tuple[int, list[str]]:
    """A worker's exit code and all lines that it reported."""
    read, write = os.pipe()
    progress = Progress()
    reporter = Reporter(write, progress)
    reporter.cases = {ChunkId(0, 0, 1): ChunkCase([[0, 1]], {2: "its process was killed by signal 9"})}
    code = _ended(assignment, reporter, Stop(), progress)
    reporter._pipe.close()
    with os.fdopen(read, encoding="utf-8") as lines:
        return code, [WHEN.sub(r"\g<1>0.25", line) for line in lines]


def test_every_event_is_golden(assignment: Assignment, golden: Callable[[str, str], None]) -> None:
    """One line of each: how often rows and counts are reported is a matter of time."""
    code, lines = reported(assignment)
    assert code == 0
    first = {json.loads(line)["event"]: line for line in reversed(lines) if '"event":"counts"' not in line}
    last_counts = [line for line in lines if '"event":"counts"' in line][-1]
    golden("events/worker.jsonl", "".join([*(first[name] for name in sorted(first)), last_counts]))


def test_the_event_of_an_error_is_golden(
    assignment: Assignment, golden: Callable[[str, str], None], tmp_path: Path
) -> None:
    (tmp_path / "out/plan.json").unlink()
    code, lines = reported(assignment)
    assert code == 1
    golden("events/fails.jsonl", lines[-1].replace(str(tmp_path), "…"))
