"""What a bench measures and finds: timed calls, open loops, its file of figures, a table, a plot."""

from __future__ import annotations

import io
import math
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from relabel.export.bundles import MANIFEST_NAME
from relabel.export.puller import VERSIONS
from relabel.manifests.errors import ManifestError, UsageError
from relabel.manifests.files import translate_errors
from relabel.manifests.metrics.metric import LEVEL, bootstrap
from relabel.manifests.process import require
from relabel.manifests.records import plain, read_record, readable_json
from relabel.manifests.store import LocalRunStore

# ------------------------------------------------------------------------------
# How latency is sampled and summed up: the closed loop, the open loop, quantiles with intervals, and the highest
# rate under a bound. Closed loop: one caller asks, waits for the answer, asks again. Open loop: requests arrive by a
# Poisson process, whether or not the last one is answered, and a latency counts from the scheduled arrival. So a
# server that stalls once makes all wait that arrive meanwhile, and each of them is counted; a closed loop would ask
# fewer questions while answers are slow ("coordinated omission"). A quantile is a latency that was observed (numpy's
# `inverted_cdf`), and is stated only where a distribution-free 95 % interval for it exists: from 368 latencies for
# p99, from 3,688 for p99.9. Latencies that follow one another are alike (a queue, a clock that drops), so the
# bootstrap draws blocks of neighbours.


# N requests or latencies, R resamples, G blocks of neighbours

LatencyRow: TypeAlias = dict[str, Any]
"""A closed-loop cell or an open-loop rate, with `ROW_KEYS`; None where a figure does not apply, or is not known."""
ROW_KEYS = (
    "cell",  # the shape, or `open`
    *("rows", "tokens"),  # pairs of a request, and tokens of each where they are not replayed
    *("offered_rate", "answered_rate"),
    "mean_batch",  # requests of a micro-batch
    "unanswered",  # requests that still waited when the open loop was stopped
    *("samples", "seconds", "pairs_per_s", "mean_ms"),
    *("p50_ms", "p50_low", "p50_high", "p99_ms", "p99_low", "p99_high", "p999_ms"),  # with the ends of 95 % intervals
)
Clock = Callable[[], float]
"""Seconds from some fixed point, never going back."""
WARM_UP_SHARE = 0.15
"""Of a closed loop's time; first calls allocate, choose kernels and wake a sleeping clock."""
MAX_SAMPLES = 20_000
QUANTILES: Mapping[str, float] = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
FEWEST_SAMPLES = 20
"""A closed-loop cell, or an open-loop rate, with fewer states no figure."""
MAX_BLOCKS, RESAMPLES = 50, 400
MS = 1000.0
LOADS = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Of the rate that full micro-batches reach with no queue."""
HALVINGS = 3
"""Rates tried between the highest that keeps a bound and the lowest that does not: a step of 10 % becomes about 1 %."""


def time_calls(
    call: Callable[[int], object],
    seconds: float,
    *,
    max_samples: int = MAX_SAMPLES,
    clock: Clock = time.perf_counter,
) -> np.ndarray:
    """Call again and again for a while.

    Args:
        call: receives its number, from 0 on; warm-up calls count too. It returns when the answer lies in host memory.
        seconds: for all of it, warm-up included; one call is measured however long it takes.
    Returns:
        [N] seconds of each measured call, in their order.
    """
    start = clock()
    warm_up = 0
    while warm_up == 0 or clock() - start < seconds * WARM_UP_SHARE:
        call(warm_up)
        warm_up += 1
    latencies: list[float] = []
    before = clock()
    while not latencies or (before - start < seconds and len(latencies) < max_samples):
        call(warm_up + len(latencies))
        after = clock()
        latencies.append(after - before)
        before = after
    return np.array(latencies)


def poisson_arrivals(rate: float, seconds: float, *, seed: int) -> np.ndarray:
    """Arrival times of a Poisson process within `seconds`, float64 [N], rising: given how many arrive, each is equally
    likely at any time. The same seed gives the same times.
    """
    random = np.random.default_rng(seed)
    return np.sort(random.uniform(0.0, seconds, size=random.poisson(rate * seconds)))


class OpenLoopTimes(NamedTuple):
    """What an open loop measured.

    Args:
        latency_s: [N] seconds from scheduled arrival to answer; infinite where none came before the server was stopped.
        batches: how many batches the answers came in.
        seconds: from the first moment to the last answer.
    """

    latency_s: np.ndarray
    batches: int
    seconds: float

    @property
    def unanswered(self) -> int:
        """Requests that were still waiting at the end."""
        return int(np.isinf(self.latency_s).sum())


def serve(
    arrival_s: np.ndarray,
    answer: Callable[[int, int], object],
    *,
    max_requests: int = 1,
    max_wait_s: float = 0.0,
    stop_s: float,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> OpenLoopTimes:
    """Answer requests in the order of their arrival, by one server with micro-batching. Arrivals are drawn before the
    first is served, so the server itself finds what has arrived by now, and no second thread takes part.

    Args:
        arrival_s: [N] scheduled times from the start, rising.
        answer: answers requests from the first number up to the second, and returns when it is done.
        max_requests: of one batch.
        max_wait_s: how long the oldest waits for company.
        stop_s: when to stop, answered or not: a queue that only grows would never end.
    """
    done_s = np.full(len(arrival_s), np.inf)
    batches, place, now = 0, 0, 0.0
    start = clock()
    while place < len(arrival_s) and now <= stop_s:
        ready = int(np.searchsorted(arrival_s, now, side="right"))
        full = place + max_requests
        closes = arrival_s[place] + max_wait_s
        fills = arrival_s[full - 1] if full <= len(arrival_s) else closes
        if ready >= full or now >= closes:
            end = min(ready, full)
            answer(place, end)
            done_s[place:end] = clock() - start
            batches, place = batches + 1, end
        else:
            sleep(float(min(closes, fills)) - now)
        now = clock() - start
    return OpenLoopTimes(done_s - arrival_s, batches, now)


def samples_needed(share: float) -> int:
    """Fewest latencies for which a quantile may be stated.

    The largest of N values exceeds the quantile with a chance of 1 - share^N; the interval's upper end can be one of
    them only when that is at least 97.5 %. The lower end asks the same of the smallest.
    """
    return math.ceil(math.log((1 - LEVEL) / 2) / math.log(max(share, 1 - share)))


def summarize(latency_s: np.ndarray, *, seed: int = 0) -> dict[str, float | None]:
    """Figures of latencies in the order in which they were measured.

    Args:
        latency_s: [N] seconds, one at least; infinite for a request that was never answered.
    Returns:
        `mean_ms`, `p50_ms`, `p99_ms`, `p999_ms`, and the ends of a 95 % interval: `p50_low` to `p99_high`. None where
        there are too few latencies, or one never came.
    """
    count = len(latency_s)
    known = {name: share for name, share in QUANTILES.items() if count >= samples_needed(share)}
    order = np.argsort(latency_s, kind="stable")
    groups = min(count, MAX_BLOCKS)
    group_of_sorted_N = (np.arange(count) * groups // count)[order]
    sorted_N = latency_s[order]

    def statistic(weight_RG: np.ndarray) -> dict[str, np.ndarray]:
        upto_RN = weight_RG[:, group_of_sorted_N].cumsum(1)
        return {name: sorted_N[(upto_RN >= share * upto_RN[:, -1:] - 1e-9).argmax(1)] for name, share in known.items()}

    drawn = bootstrap(statistic, num_groups=groups, resamples=RESAMPLES, seed=seed, width=count)
    found = {"mean_ms": float(latency_s.mean())} | dict.fromkeys(f"{name}_ms" for name in QUANTILES)
    found |= dict.fromkeys(("p50_low", "p50_high", "p99_low", "p99_high"))
    for name, share in known.items():
        found[f"{name}_ms"] = float(np.quantile(latency_s, share, method="inverted_cdf"))
        if name != "p999" and name in drawn:
            found[f"{name}_low"], found[f"{name}_high"] = drawn[name].low, drawn[name].high
    return {name: value * MS if value is not None and math.isfinite(value) else None for name, value in found.items()}


class Bound(NamedTuple):
    """What a latency must not exceed: the mean, as papers and dashboards state it, or p99, which nearly every request
    keeps to.
    """

    figure: Literal["mean", "p99"]
    ms: float

    def around(self, points: Sequence[LatencyRow]) -> tuple[LatencyRow | None, LatencyRow | None]:
        """The highest rate that keeps it below the first that breaks it, and that first one. A rate breaks it by its
        latency, or by a queue that only grew; one with too few requests to know neither keeps nor breaks it.
        """
        best = None
        for point in sorted(points, key=_offered):
            value = point[f"{self.figure}_ms"]
            if point["unanswered"] or (value is not None and value > self.ms):
                return best, point
            best = best if value is None else point
        return best, None


def requests_each(rates: Sequence[float], seconds: float, *, more: int) -> float:
    """How many requests each rate may get: as many at a low rate, which takes longer, as at a high one, so that p99 is
    known alike.

    Args:
        seconds: for all rates together.
        more: further rates that may be tried between them.
    """
    return seconds / (sum(1 / rate for rate in rates) + more * len(rates) / sum(rates))


def sweep(
    measure: Callable[[float], LatencyRow | None], rates: Sequence[float], bounds: Sequence[Bound]
) -> list[LatencyRow]:
    """Measure rate after rate, and closer around each bound.

    Args:
        measure: one rate; None where the time is too short for it.
        rates: rising. The sweep ends after the first whose queue only grew.
    Returns:
        By offered rate.
    """
    points: list[LatencyRow] = []
    for rate in rates:
        point = measure(rate)
        points += [point] if point else []
        if point and point["unanswered"]:
            break
    for bound in bounds:
        for _ in range(HALVINGS):
            best, broken = bound.around(points)
            between = broken and measure((_offered(broken) + (_offered(best) if best else 0.0)) / 2)
            if not between:
                break
            points.append(between)
    return sorted(points, key=_offered)


def highest_rate(points: Sequence[LatencyRow], bound: Bound) -> dict[str, Any]:
    """The highest offered requests/s that keeps a bound: `highest_rate` with the latencies there, None where no rate
    that was tried keeps it. `is_at_least`: none broke it, so the true one may be higher.
    """
    best, broken = bound.around(points)
    at_best = best or dict.fromkeys(ROW_KEYS)
    return {
        "figure": bound.figure,
        "slo_ms": bound.ms,
        "highest_rate": at_best["offered_rate"],
        "mean_ms": at_best["mean_ms"],
        "p99_ms": at_best["p99_ms"],
        "is_at_least": best is not None and broken is None,
    }


def _offered(point: LatencyRow) -> float:
    return float(point["offered_rate"])


# ------------------------------------------------------------------------------
# What a bench found: its file of figures near the bundle, one table, one plot.


LATENCY_FORMAT = 2
MEASUREMENTS = "measurements"


@dataclass
class ModelLatency:
    """A model, where it runs, and what was measured of it.

    Args:
        path: of the graph, relative to the bundle.
        open: by the offered rate.
        capacity_per_s: requests/s of full micro-batches with no queue; None without an open loop.
        slo: of each bound, what `highest_rate` says.
        not_run: cells and rates left out, each with the reason.
    """

    provider: str
    precision: str
    path: str
    closed: list[LatencyRow] = field(default_factory=list)
    open: list[LatencyRow] = field(default_factory=list)
    capacity_per_s: float | None = None
    slo: list[dict[str, Any]] = field(default_factory=list)
    not_run: list[tuple[str, str]] = field(default_factory=list)

    @property
    def side(self) -> str:
        """As messages, tables and pages call it."""
        return f"{self.provider} {self.precision}"


@dataclass(frozen=True)
class BenchFacts:
    """The whole file of figures.

    Args:
        bundle: `version` and `manifest_sha256`.
        spec: the options of the bench.
        machine: `cpu`, `gpu` (of the first one, None without one), `usable_cores`, `threads` (of the CPU, that the
            models used), `python`, and `versions` of libraries.
        workload: the lengths that were replayed, in tokens; they are `from` the bundle's own `lengths`, or `pairs`.
    """

    format: int
    name: str
    bundle: dict[str, str]
    measured_at: str
    spec: dict[str, Any]
    machine: dict[str, Any]
    workload: dict[str, Any]
    models: list[ModelLatency]


# ------------------------------------------------------------------------------
# Where figures lie.


def measurements_folder(folder: Path) -> Path:
    """Where figures of a bundle lie: `measurements/NAME` next to it, of a pulled version in the folder pulled to."""
    place = folder.resolve()
    top = place.parent.parent if place.parent.name == VERSIONS else place.parent
    return top / MEASUREMENTS / place.name


def measurements_of(folder: Path, manifest_sha256: str) -> list[BenchFacts]:
    """What benches of the bundle in a folder found, newest first. A file names its bundle's manifest, so figures of an
    earlier bundle at the same place are not taken for those of the present one.

    Raises:
        ManifestError: a file of them is damaged, or of another format.
    """
    own = []
    for path in sorted(measurements_folder(folder).glob("*.json")):
        what, advice = "not latencies as this relabel writes them", "Measure them again: relabel bench."
        facts = read_record(BenchFacts, path.read_bytes(), str(path), what, advice)
        if facts.format != LATENCY_FORMAT:
            raise ManifestError(
                f"{path}: latencies of format {facts.format}; this relabel reads {LATENCY_FORMAT}. {advice}"
            )
        own += [facts] if facts.bundle.get("manifest_sha256") == manifest_sha256 else []
    return sorted(own, key=lambda facts: facts.measured_at, reverse=True)


def machine_name(machine: dict[str, Any]) -> str:
    """A file's name for machines of one kind, `amd-epyc-9b45-2-cores`: by what they compute with, not by host name."""
    parts = [machine["cpu"], f"{machine['usable_cores']} cores", machine["gpu"] or ""]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")[:100]


def check_place(folder: Path) -> None:
    """Refuse a place for figures before anything is measured for it: a bundle, which they would make unreadable, or a
    folder that can't be written.

    Raises:
        UsageError: it is a bundle, or lies in one.
        StoreError, DiskFullError: it can't be written.
    """
    if any((one / MANIFEST_NAME).is_file() for one in (folder.resolve(), *folder.resolve().parents)):
        raise UsageError(f"--to {folder}: holds a {MANIFEST_NAME}, or is inside such a folder. Name another folder.")
    with translate_errors("write the figures (or name another folder: --to DIR)", folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


# ------------------------------------------------------------------------------
# For people: a table, warnings of a line each, a plot.

HEAD = ("model", "measured", "samples", "mean ms", "p50 ms (95 %)", "p99 ms (95 %)", "p99.9 ms", "pairs/s")


def write_results(folder: Path, facts: BenchFacts) -> Path:
    """Write figures, the table and the plot into a folder, in place of earlier ones of such a machine; the file of
    figures.

    Raises:
        StoreError, DiskFullError: the folder can't be written.
    """
    head, *rows = latency_rows(facts)
    table = [head, ["---"] * len(head), *rows]
    lines = [f"# {facts.name}", "", machine_line(facts), "", *(f"| {' | '.join(row)} |" for row in table)]
    lines += ["", "–: too few latencies were measured to state it. All figures: the file `.json`."]
    lines += [f"\n{warning}" for warning in warnings_of(facts)]
    store, name = LocalRunStore(folder), machine_name(facts.machine)
    store.put(f"{name}.svg", plot(facts))
    store.put(f"{name}.md", ("\n".join(lines) + "\n").encode())
    store.put(f"{name}.json", readable_json(plain(facts)))
    return folder / f"{name}.json"


def machine_line(facts: BenchFacts) -> str:
    """What it was measured on, and with what."""
    machine, workload = facts.machine, facts.workload
    source = "its own record of lengths" if workload["from"] == "lengths" else "pairs of a file"
    versions = machine["versions"].items()
    runtimes = [f"{name} {version}" for name, version in versions if name.startswith(("onnxruntime", "openvino"))]
    used = filter(None, [machine["cpu"], machine["gpu"], f"threads: {machine['threads']}", *runtimes])
    return (
        f"Measured {facts.measured_at[:10]} on {', '.join(used)}. "
        f"Replayed lengths are of {source} (p50 {workload['p50']}, p99 {workload['p99']} tokens)."
    )


def latency_rows(facts: BenchFacts) -> list[list[str]]:
    """A row a closed-loop cell or a rate; the first row is the head."""
    found = [list(HEAD)]
    for model in facts.models:
        for row in (*model.closed, *model.open):
            measured = row["cell"]
            if row["offered_rate"] is not None:
                measured += f", {row['offered_rate']:,.1f}/s offered"
                measured += f", {row['unanswered']:,} never answered" if row["unanswered"] else ""
                for slo in model.slo:
                    if slo["highest_rate"] == row["offered_rate"]:
                        measured += f" (highest with {slo['figure']} ≤ {slo['slo_ms']:g} ms)"
            figures = [_number(row["mean_ms"]), _between(row, "p50"), _between(row, "p99"), _number(row["p999_ms"])]
            found.append([model.side, measured, f"{row['samples']:,}", *figures, _number(row["pairs_per_s"], 0)])
    return found


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _between(row: LatencyRow, name: str) -> str:
    value, low, high = (row[f"{name}_{end}"] for end in ("ms", "low", "high"))
    return _number(value) if low is None or high is None else f"{_number(value)} ({low:,.2f} to {high:,.2f})"


def warnings_of(facts: BenchFacts) -> list[str]:
    """What a reader of the figures has to know, a line each: what was left out, a bound that was missed."""
    found = []
    for model in facts.models:
        if model.not_run:
            name, reason = model.not_run[0]
            found.append(f"{model.side}: {len(model.not_run)} not measured, {name} first: {reason}")
        for slo in model.slo:
            if slo["highest_rate"] is None:
                found.append(f"{model.side}: no rate that was tried keeps {slo['figure']} ≤ {slo['slo_ms']:g} ms.")
    return found


def plot(facts: BenchFacts) -> bytes:
    """p50 and p99 against the offered rate, by model, as SVG. The same figures give the same bytes."""
    matplotlib: Any = require("matplotlib", extra="cpu", purpose="The plot of a bench")
    figure_class = require("matplotlib.figure", extra="cpu", purpose="The plot of a bench").Figure
    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "relabel", "svg.fonttype": "none"}):
        figure = figure_class(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for model in facts.models:
            for name, style in (("p50", ":"), ("p99", "-")):
                rows = [row for row in model.open if row[f"{name}_ms"] is not None]
                if rows:
                    rates, latencies_ms = ([row[key] for row in rows] for key in ("offered_rate", f"{name}_ms"))
                    label = f"{model.side}: {name}"
                    axes.plot(rates, latencies_ms, style, marker="o", markersize=3, linewidth=1, label=label)
        for bound in {slo["slo_ms"] for model in facts.models for slo in model.slo}:
            axes.axhline(bound, color="black", linewidth=0.8, linestyle="--")
        axes.set(xlabel="requests/s offered", ylabel="ms from scheduled arrival", yscale="log", title=facts.name)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()
