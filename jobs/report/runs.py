"""The sections about label runs: one pass over the labels of each, whose memory does not grow with the run; then its
facts, whether every row is there, and the labels themselves.
"""

# Letters: N rows of a file, M of a sample, K grades.

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.jobs.evaluate import run_pairs
from relabel.jobs.report.artifacts import DIGITS, RunArtifact, base_name
from relabel.jobs.run.notices import OutsideMass, load_stop, load_warnings
from relabel.jobs.sections import (
    Badge,
    Block,
    Cell,
    Facts,
    Fold,
    Paragraph,
    Plot,
    Section,
    Series,
    Shade,
    Table,
)
from relabel.manifests.cascade import audit_of
from relabel.manifests.labels import (
    LABELS,
    QUARANTINE,
    QUERY_AND_DOCUMENT,
    LabelRow,
    Pair,
    QuarantineRow,
    Reads,
    label_rows,
)
from relabel.manifests.plan import Plan
from relabel.manifests.run_labels import conformed, file_schema
from relabel.manifests.secrets import shortened

BINS = 20
SEED = 7


@dataclass
class Histogram:
    """Counts in equal bins from 0 to `top`, and the sum for a mean."""

    top: float
    counts: np.ndarray = field(default_factory=lambda: np.zeros(BINS, dtype=np.int64))
    total: float = 0.0

    def add(self, values_N: np.ndarray) -> None:
        """Count values; those beyond the top fall into the last bin."""
        place_N = np.clip((values_N / self.top * BINS).astype(np.int64), 0, BINS - 1)
        self.counts += np.bincount(place_N, minlength=BINS)
        self.total += float(values_N.sum())

    @property
    def rows(self) -> int:
        """How many values were counted."""
        return int(self.counts.sum())


@dataclass
class RunTally:
    """A run, and counts over all its labels."""

    run: RunArtifact
    by_grade: np.ndarray
    entropy: Histogram
    outside: Histogram
    by_status: Counter[str]
    flags: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=dict)
    """By status, the reasons of quarantined rows; the rarest are dropped where there are many."""
    chosen: list[LabelRow | QuarantineRow] = field(default_factory=list)
    """Rows for the label browser: labels, then the quarantine."""


FILES_COUNTED = 256
"""Label files that are counted together: of one of some hundred rows nearly all of the time goes into the calls."""
_COUNTED = ["grade", "probs", "outside_mass", "flags"]
_NOT_SHOWN = frozenset({"expected_grade", "key", "origin"})
"""Columns that the label browser does without."""


def tally_labels(run: RunArtifact, *, most: int) -> RunTally:
    """Read every committed file once, and those with rows for the browser with all that it shows.

    Args:
        most: rows to choose for the browser, at random but the same ones each time; 0 for none.
    Raises:
        ManifestError: a file is missing or not the one committed.
    """
    grades = run.plan.facts.labeler.grades
    top_nats = math.log(max(grades, 1))  # without grades there is no distribution to be counted
    rows = run.snapshot.tally
    by_status = +Counter({"ok": rows.labelled + rows.reused, **rows.quarantined})
    tally = RunTally(
        run=run,
        by_grade=np.zeros(grades, dtype=np.int64),
        entropy=Histogram(top_nats),
        outside=Histogram(1.0),
        by_status=by_status,
    )
    draw = DrawnRows(by_status, most)
    schema = file_schema(run.plan.parts)
    shown = [name for name in schema.names if name not in _NOT_SHOWN]
    chosen_labels: list[pa.Table] = []
    waiting: list[pa.Table] = []
    for file in run.snapshot.labels:
        rows_M = draw.of_file("ok", np.arange(file.rows))
        if len(rows_M):
            table = run.folder.table(file, schema, shown)
            chosen_labels.append(table.take(pa.array(rows_M)))
        else:
            table = run.folder.table(file, LABELS, _COUNTED)
        waiting.append(table.select(_COUNTED))
        if len(waiting) == FILES_COUNTED:
            _add_labels(tally, pa.concat_tables(waiting))
            waiting = []
    if waiting:
        _add_labels(tally, pa.concat_tables(waiting))
    if chosen_labels:
        tally.chosen += label_rows(conformed(pa.concat_tables(chosen_labels), schema))
    for file in run.snapshot.quarantine:
        table = run.folder.table(file, QUARANTINE, ["status", "reason"])
        _add_reasons(tally, table)
        status_N = np.array(table["status"].to_pylist(), dtype=object)
        drawn = [draw.of_file(status, np.flatnonzero(status_N == status)) for status in dict.fromkeys(status_N)]
        if any(map(len, drawn)):
            quarantine = run.folder.table(file, QUARANTINE, check_bytes=False)
            chosen = quarantine.take(pa.array(np.concatenate(drawn)))
            tally.chosen += [QuarantineRow(**row) for row in chosen.to_pylist()]
    return tally


class DrawnRows:
    """Rows of each status for the browser, drawn from all of a run's, whose files are then read one by one.

    Args:
        by_status: rows that there are.
        most: to draw; 0 for none.
    """

    def __init__(self, by_status: Mapping[str, int], most: int) -> None:
        rng = np.random.default_rng(SEED)
        self._drawn: dict[str, np.ndarray] = {}
        if most:
            for status, count in shares(by_status, most).items():
                self._drawn[status] = np.sort(rng.choice(by_status[status], count, replace=False))
        self._seen = Counter[str]()

    def of_file(self, status: str, rows_N: np.ndarray) -> np.ndarray:
        """Those of the next file's rows of one status that were drawn."""
        if status not in self._drawn:
            return rows_N[:0]
        number_M = self._drawn[status] - self._seen[status]
        self._seen[status] += len(rows_N)
        is_here_M = (number_M >= 0) & (number_M < len(rows_N))
        return np.asarray(rows_N[number_M[is_here_M]])


def _add_labels(tally: RunTally, table: pa.Table) -> None:
    grades = len(tally.by_grade)
    grade_N = table["grade"].drop_null().to_numpy()
    tally.by_grade += np.bincount(grade_N.astype(np.int64), minlength=grades)[:grades]
    tally.flags.update(pc.list_flatten(table["flags"]).to_pylist())
    outside_N = table["outside_mass"].drop_null().to_numpy()
    tally.outside.add(outside_N[np.isfinite(outside_N)].astype(np.float64))
    probs = table["probs"].drop_null().combine_chunks()
    flat_M = probs.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    if len(probs) and len(flat_M) == len(probs) * grades:
        p_NK = flat_M.reshape(-1, grades)
        with np.errstate(divide="ignore", invalid="ignore"):
            tally.entropy.add(-np.where(p_NK > 0, p_NK * np.log(p_NK), 0.0).sum(1))


def _add_reasons(tally: RunTally, table: pa.Table) -> None:
    counts = table.group_by(["status", "reason"]).aggregate([([], "count_all")])
    for row in counts.to_pylist():
        reasons = tally.reasons.setdefault(row["status"], Counter())
        reasons[row["reason"]] += row["count_all"]
        if len(reasons) > 10_000:
            tally.reasons[row["status"]] = Counter(dict(reasons.most_common(1_000)))


def shares(counts: Mapping[str, int], most: int) -> dict[str, int]:
    """How many rows of each status to show: all where they fit, else by their share, but some of each.

    Args:
        counts: rows by status, each above 0.
        most: in all; more where there are more statuses than that.
    """
    if sum(counts.values()) <= most:
        return dict(counts)
    floor = max(1, most // (4 * len(counts)))
    least = {status: min(count, floor) for status, count in counts.items()}
    left = max(0, most - sum(least.values()))
    open_rows = sum(counts.values()) - sum(least.values())
    return {status: have + left * (counts[status] - have) // open_rows for status, have in least.items()}


def input_texts(run: RunArtifact, row_ids: list[int], *, reads: Reads = QUERY_AND_DOCUMENT) -> dict[int, Pair]:
    """Pairs by row id, read again from the run's input; `reads` is what is wanted of them.

    Raises:
        InputError, ManifestError: it is not there any more, or not what was labelled.
    """
    ids_N = np.array(sorted(row_ids), dtype=np.int64)
    pairs = run_pairs(run.path, run.plan, run.storage, ids_N, reads=reads)
    return {pair.row_id: pair for pair in pairs}


def run_warnings(tally: RunTally) -> list[str]:
    """What a reader of a run's labels should know, and why it ended early if it did; a sentence each."""
    run = tally.run
    stopped = None if run.is_finished else load_stop(run.folder.store)
    warnings = load_warnings(run.folder.store, OutsideMass(tally.outside.rows, tally.outside.total))
    if stopped is not None:
        warnings.append(f"stopped at {stopped.text}")
    return warnings


def run_facts(run: RunArtifact) -> Facts:
    """State, labeler, engines, rows, tokens and cost."""
    tally = run.snapshot.tally
    plan = run.plan
    manifest = run.manifest
    asked = "student" if run.kind == "scores" else "teacher"
    rows: list[tuple[str, Cell]] = [
        ("state", _state(run)),
        ("labeler", _labeler_text(plan)),
        *((asked, _engine_text(engine)) for engine in run.snapshot.engines),
        ("rows", f"{tally.rows:,} of {plan.rows:,} done, {plan.queries:,} queries"),
        ("shards, chunks", f"{len(plan.shards):,}, {plan.num_chunks:,}"),
        *((stage, _stage_text(counts)) for stage, counts in tally.stages.items()),
        ("worker time", f"{tally.worker_seconds:,.1f} s, engine starts left out"),
    ]
    cascade = manifest.cascade if manifest is not None else audit_of(run.folder, run.snapshot.labels)
    if cascade:
        rows.append(("cascade", Badge(cascade.text, "bad" if cascade.is_alarm else "good")))
    cost = _cost(run)
    if cost is not None:
        rows.append(("cost", cost))
    if manifest is not None:
        rows.append(("relabel", manifest.relabel))
        if manifest.mixed.differences:
            rows.append(("engines differ", "; ".join(manifest.mixed.differences)))
    rows.append(("fingerprint", plan.fingerprint[:DIGITS]))
    rows.append(("path", run.path))
    return Facts(f"{'Scores' if run.kind == 'scores' else 'Label run'} {run.name}", rows)


def _labeler_text(plan: Plan) -> str:
    name, grades = plan.facts.labeler.name, plan.facts.labeler.grades
    return f"{name}, grades 0 to {grades - 1}" if grades else f"{name}, without grades"


def _state(run: RunArtifact) -> Badge:
    if not run.is_finished:
        return Badge("not finished", "warn")
    if run.manifest is not None and run.manifest.over_limit:
        return Badge("over its quarantine limit", "bad")
    return Badge("finished, every row accounted for", "good")


def _engine_text(engine: Mapping[str, Any]) -> str:
    hardware = ", ".join(filter(None, [engine.get("device"), engine.get("dtype")]))
    model = base_name(str(engine.get("model")))
    return f"{model} on {engine.get('family')} {engine.get('version', '')}, {hardware}"


def _stage_text(counts: Mapping[str, int]) -> str:
    prompt_tokens = counts.get("prompt_tokens", 0)
    cached = counts.get("cached_tokens", 0) / max(1, prompt_tokens)
    return (
        f"{counts.get('asks', 0):,} requests, {prompt_tokens:,} tokens in ({cached:.0%} cached), "
        f"{counts.get('output_tokens', 0):,} out"
    )


def _cost(run: RunArtifact) -> float | None:
    """Of the GPUs' time, where the job says what an hour costs."""
    price = run.spec.get("cost_per_gpu_hour")
    gpus = run.spec_part("engine", "args").get("tensor_parallel_size") or 1
    if not isinstance(price, int | float) or not isinstance(gpus, int):
        return None
    return run.snapshot.tally.worker_seconds / 3600 * price * gpus


def conservation_section(runs: Sequence[RunTally], *, has_reasons: bool) -> Section:
    """Rows in = labelled + reused + quarantined; the quarantine by status and reason.

    Args:
        has_reasons: show them; they may quote what a model answered, and so what a document holds.
    """
    rows: list[list[Cell]] = []
    blocks: list[Block] = []
    for run_tally in runs:
        run = run_tally.run
        tally = run.snapshot.tally
        verdict = Badge(f"{run.plan.rows - tally.rows:,} rows open", "warn")
        if tally.rows != tally.labelled + tally.reused + tally.num_quarantined:
            verdict = Badge("does not add up", "bad")
        elif run.is_finished:
            verdict = Badge("proven by row ids", "good")
        rows.append([run.name, run.plan.rows, tally.labelled, tally.reused, tally.num_quarantined, verdict])
        blocks += _quarantine(run_tally, has_reasons=has_reasons)
    if not runs:
        return Section("conservation", "Conservation", [])
    about = Paragraph("Row ids in and out are compared when a run ends; relabel verify proves it again.")
    table = Table("Rows in and out", ("run", "rows in", "labelled", "reused", "quarantined", "verdict"), rows)
    return Section("conservation", "Conservation", [about, table, *blocks])


def _quarantine(run_tally: RunTally, *, has_reasons: bool) -> Iterator[Block]:
    run = run_tally.run
    tally = run.snapshot.tally
    total = tally.num_quarantined
    if not total:
        return
    counts = sorted(tally.quarantined.items(), key=lambda item: (-item[1], item[0]))
    title = f"Quarantine of {run.name}: {total / max(1, tally.rows):.2%} of the rows"
    if run.manifest is not None:
        title += f", limit {run.manifest.max_failed_fraction:.1%}"
    yield Table(title, ("status", "rows"), [[status, Shade(f"{count:,}", count / total)] for status, count in counts])
    if not has_reasons:
        return
    for status, count in counts:
        reasons = run_tally.reasons.get(status, Counter())
        shown = [(shortened(reason, 300), number) for reason, number in reasons.most_common(12)]
        caption = f"Why, the {len(shown)} most frequent of {len(reasons):,}"
        yield Fold(f"{status}: {count:,} rows of {run.name}", [Table(caption, ("reason", "rows"), shown)])


def labels_section(runs: Sequence[RunTally]) -> Section:
    """Grades, entropy and mass outside the grades, over all labels; flags."""
    blocks: list[Block] = []
    series = []
    for tally in runs:
        if tally.by_grade.sum():
            grades = list(map(str, range(len(tally.by_grade))))
            series.append(Series(tally.run.name, grades, tally.by_grade.tolist()))
    if series:
        blocks.append(Plot(title="Grades", form="bars", series=series, label="grade", value="rows"))
    entropy = [(tally.run.name, tally.entropy) for tally in runs]
    outside = [(tally.run.name, tally.outside) for tally in runs]
    blocks += _histograms("Entropy of the distributions", "entropy, nats", entropy)
    if any(histogram.total for _, histogram in outside):
        blocks += _histograms("Mass outside the grades", "outside mass", outside)
    elif rows := sum(histogram.rows for _, histogram in outside):
        blocks.append(Paragraph(f"No probability lies outside the grades, in any of {rows:,} labels."))
    if runs and not any(tally.entropy.rows for tally in runs):
        blocks.append(Paragraph("These labels hold no distributions, so no entropy and no outside mass can be shown."))
    flags: list[list[Cell]] = []
    for tally in runs:
        flags += [[tally.run.name, flag, count] for flag, count in tally.flags.most_common()]
    if flags:
        blocks.append(Table("Flags on labels", ("run", "flag", "rows"), flags))
    return Section("distributions", "Labels", blocks)


def _histograms(title: str, label: str, of_runs: Sequence[tuple[str, Histogram]]) -> Iterator[Plot]:
    """One plot; runs with another number of grades have another top, and a plot of their own.

    Args:
        of_runs: by the runs' names; those without rows are left out.
    """
    filled = [(name, histogram) for name, histogram in of_runs if histogram.rows]
    for top in dict.fromkeys(histogram.top for _, histogram in filled):
        chosen = [(name, histogram) for name, histogram in filled if histogram.top == top]
        grades = "" if len(chosen) == len(filled) else f", {round(math.exp(top))} grades"
        edges = np.linspace(0, top, BINS + 1).tolist()
        means = [
            f"{name}: mean {histogram.total / histogram.rows:.4f} over {histogram.rows:,} rows"
            for name, histogram in chosen
        ]
        yield Plot(
            title=f"{title}{grades}",
            form="histogram",
            series=[Series(name, edges, histogram.counts.tolist()) for name, histogram in chosen],
            label=label,
            value="rows",
            note="; ".join(means),
        )
