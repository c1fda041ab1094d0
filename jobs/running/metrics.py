"""A run's counts as a Prometheus text file, for node_exporter's textfile collector (`--metrics FILE`).

Written at the start, every 15 s and at the end, each time to a file beside it that is then renamed, so that a collector
never reads half of one. A file that can't be written is warned of once and ends no run.
"""

from __future__ import annotations

import logging
import re
import secrets
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from relabel.jobs.exits import Exit
from relabel.manifests.errors import InputError

if TYPE_CHECKING:
    from relabel.jobs.running.conclusions import RunReport
    from relabel.jobs.running.counts import Progress

logger = logging.getLogger(__name__)

WRITE_EVERY_S = 15.0
LAST_SUCCESS = "relabel_last_success_timestamp_seconds"
WITHOUT_COMMIT = "relabel_exits_without_commit"


class Sample(NamedTuple):
    """One value of a metric, with the labels it has beside `job` and `shard`."""

    value: float
    labels: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Gauge:
    """A metric with its samples. All are gauges: they are counted anew by each execution."""

    name: str
    help: str
    samples: list[Sample]


class MetricsFile:
    """The metrics of one execution.

    Args:
        path: the file; its ending should be `.prom`, which is what the collector reads.
        job: label; the job file's stem until the job's name is known.
        shard: label: `--shard` as given, `all` without.
    """

    def __init__(self, path: str, *, job: str, shard: str) -> None:
        self._path = Path(path)
        self.job = job
        self._shard = shard
        self._started_clock = time.time()
        self._started_s = time.perf_counter()
        self._next_s = 0.0
        self._has_failed = False
        _check_target(self._path)
        self._last_success = _written_before(self._path, LAST_SUCCESS)
        self._without_commit = _written_before(self._path, WITHOUT_COMMIT) or 0.0
        self.progress: Progress | None = None
        self.report: RunReport | None = None

    def update(self) -> None:
        """Write if it is time to. May be called as often as one likes."""
        if time.perf_counter() >= self._next_s:
            self.write()

    def write(self, code: int | None = None, reason: str = "") -> None:
        """Write the file anew.

        Args:
            code: the exit code, at the end of the run.
            reason: why it is that: the kind of the error, or nothing where there was none.
        """
        self._next_s = time.perf_counter() + WRITE_EVERY_S
        if code in (Exit.DONE, Exit.NOTHING_TO_DO):
            self._last_success = time.time()
        if code is not None:
            is_idle = code == Exit.PARTIAL and not (self.progress and self.progress.chunks_committed)
            self._without_commit = self._without_commit + 1 if is_idle else 0.0
        # a path without a name (`.`, `/`) fails at the renaming
        beside = self._path.parent / f".{self._path.name}.{secrets.token_hex(8)}.tmp"
        try:
            text = rendered(self._metrics(code, reason), {"job": self.job, "shard": self._shard})
            beside.write_text(text, encoding="utf-8", errors="replace")  # a file's name need not be text
            beside.replace(self._path)
        except OSError as exc:
            beside.unlink(missing_ok=True) if beside.parent.is_dir() else None
            if not self._has_failed:
                self._has_failed = True
                logger.warning("--metrics %s: can't be written (%s); going on without", self._path, exc.strerror)

    def _metrics(self, code: int | None, reason: str) -> list[Gauge]:
        found = [
            Gauge(
                "relabel_running", "1 while the execution goes on, 0 once it has ended.", [Sample(float(code is None))]
            ),
            Gauge("relabel_run_start_timestamp_seconds", "When the execution started.", [Sample(self._started_clock)]),
            Gauge(
                "relabel_run_seconds",
                "How long the execution has taken.",
                [Sample(time.perf_counter() - self._started_s)],
            ),
        ]
        if self.progress is not None:
            found += _of_progress(self.progress)
        if self.report is not None:
            found += _of_report(self.report)
        if code is not None:
            found.append(
                Gauge(
                    "relabel_exit_code",
                    "Exit code of the execution (see docs/something-broke.md); its reason is the kind of the error.",
                    [Sample(code, {"reason": reason or Exit(code).name.lower()})],
                )
            )
        found.append(
            Gauge(
                WITHOUT_COMMIT,
                "How many executions in a row, up to the last that ended, exited with 20 and committed nothing.",
                [Sample(self._without_commit)],
            )
        )
        if self._last_success is not None:
            found.append(
                Gauge(LAST_SUCCESS, "When an execution last ended with 0 or 10.", [Sample(self._last_success)])
            )
        return found


def rendered(metrics: list[Gauge], labels: Mapping[str, str]) -> str:
    """Metrics in Prometheus's text format.

    Args:
        labels: on every sample.
    """
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} gauge"]
        for sample in metric.samples:
            inner = ",".join(f'{name}="{_escaped(text)}"' for name, text in {**labels, **sample.labels}.items())
            lines.append(f"{metric.name}{{{inner}}} {float(sample.value)!r}")
    return "\n".join(lines) + "\n"


def _of_progress(progress: Progress) -> list[Gauge]:
    statuses, pairs = dict(progress.kept_statuses), progress.kept("pairs")
    quarantined = sum(count for status, count in statuses.items() if status != "ok")
    tokens = {kind: progress.kept(f"{kind}_tokens") for kind in ("prompt", "cached", "output")}
    lost_tokens = {kind: progress.lost[f"{kind}_tokens"] for kind in tokens}
    chunks = {"committed": progress.chunks_committed, "lost": progress.chunks_lost}
    fraction = quarantined / pairs if pairs else 0.0
    return [
        Gauge(
            "relabel_run_rows", "Rows that the execution has finished, by status.", _by("status", {"ok": 0, **statuses})
        ),
        Gauge("relabel_run_quarantine_fraction", "Share of those rows that are quarantined.", [Sample(fraction)]),
        Gauge("relabel_run_chunks", "Chunks: committed, or lost to a worker that was first.", _by("outcome", chunks)),
        Gauge("relabel_run_tokens", "Tokens; cached ones are part of the prompt.", _by("kind", tokens)),
        Gauge("relabel_run_requests", "Requests that the engine answered.", [Sample(progress.kept("requests"))]),
        Gauge(
            "relabel_run_in_vain_rows",
            "Rows asked in vain: another was first, or the end came.",
            [Sample(progress.lost["pairs"])],
        ),
        Gauge("relabel_run_in_vain_requests", "Requests asked in vain.", [Sample(progress.lost["requests"])]),
        Gauge("relabel_run_in_vain_tokens", "Tokens asked in vain.", _by("kind", lost_tokens)),
        Gauge("relabel_run_engine_starts", "How often an engine was started.", [Sample(progress.engine_starts)]),
    ]


def _of_report(report: RunReport) -> list[Gauge]:
    tally = report.tally
    rows = {"ok": tally.labelled, **tally.quarantined, "open": report.rows - tally.rows}
    fraction = tally.num_quarantined / tally.rows if tally.rows else 0.0
    return [
        Gauge("relabel_rows", "Rows of the whole output, by status; open ones have none yet.", _by("status", rows)),
        Gauge(
            "relabel_quarantine_fraction",
            "Share of the output's finished rows that are quarantined.",
            [Sample(fraction)],
        ),
        Gauge("relabel_chunks_done", "Chunks of the whole output that are committed.", [Sample(tally.chunks_done)]),
        Gauge("relabel_engine_start_seconds", "How long the engine took to start.", [Sample(report.engine_start_s)]),
    ]


def _by(label: str, counts: Mapping[str, float]) -> list[Sample]:
    return [Sample(count, {label: name}) for name, count in counts.items()]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _check_target(path: Path) -> None:
    """Refuse what is not a file and would be replaced by one; a folder is refused when it is written.

    Raises:
        InputError: it is a device, a pipe or a socket.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError(f"--metrics {path}: is not a regular file. Name a file.")


def _written_before(path: Path, name: str) -> float | None:
    """What an earlier execution wrote, so that one that fails does not forget it."""
    try:
        found = re.search(rf"^{name}\{{.*\}} (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        return float(found[1]) if found else None
    except (OSError, ValueError):
        return None
