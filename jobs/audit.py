"""`relabel audit`: how a judge can be fooled. Pairs are changed by probes (`jobs/probes.py`), the judge labels them in
runs of their own, and the grades of changed pairs are compared with those of the pairs that they were made of.

The folder of an audit holds two runs with their inputs, `labels/` of `pairs.parquet` and `again/` of `again.parquet`,
and `audit.json`, written last. A killed audit goes on where its runs are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relabel.export.bench import measurements_folder
from relabel.export.bundles import Bundle
from relabel.jobs.job import Job
from relabel.jobs.labeling import RunOptions, run_job
from relabel.jobs.output import Exit
from relabel.jobs.probes import AGAIN, Direction, Judge, Probe, judge_of, probes_of
from relabel.jobs.run.report import RunReport
from relabel.jobs.sections import (
    Block,
    Cell,
    Paragraph,
    Remarks,
    Table,
    as_text,
    closing_blocks,
    interval_text,
    signed,
)
from relabel.jobs.tables import written
from relabel.manifests.errors import ConfigError, InputError, StaleRunError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import Dataset
from relabel.manifests.labels import Pair
from relabel.manifests.metrics.evaluation import FEWEST_QUERIES, Gate, GateVerdict, judge_gate
from relabel.manifests.metrics.metric import (
    Difference,
    Formula,
    Measured,
    Metric,
    MetricSet,
    MetricValue,
    bootstrap,
    mean,
    mean_of_rows,
    places_in_query,
    share,
)
from relabel.manifests.records import as_object, read_record, sealed_json
from relabel.manifests.rows import pairs_by_number, rows_of_queries, scanned_queries
from relabel.manifests.run_labels import open_run_labels, read_labels
from relabel.manifests.secrets import counted
from relabel.manifests.specs import Columns, InputSpec
from relabel.manifests.tables import STRUCT_KINDS

# N audited pairs, G queries

AUDIT_NAME = "audit.json"
LABELS = "labels"
"""The run of all pairs, changed and unchanged."""
STEP = 0.1
"""Part of the scale by which a grade has to move to count: .3 of a grade where there are four."""
SCORE_RANGE = (0.05, 0.95)
"""Quantiles of a reranker's scores, whose distance is its scale: a score has none of its own."""
RESAMPLES = 1000
WORST = 3
"""Examples a probe."""
SHOWN_CHARACTERS = 160
"""Of an example's document."""
ORIGINAL = "original"
VALUES = ("expected_grade", "grade", "score")
"""Columns of labels; the first that a label has is its grade."""
PAGE = "docs/audit.md"


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Options of `relabel audit`.

    Args:
        to: folder of the audit.
        rows: pairs that are changed.
        gates: on the shares of pairs whose grade moves the wrong way, by probe.
        probes: names of those to try; empty for all.
        own: a probe to try in place of all others but the noise.
        seed: of the choice of pairs, and of resamples.
    """

    to: str
    rows: int = 300
    gates: Sequence[Gate] = ()
    probes: Sequence[str] = ()
    own: Probe | None = None
    seed: int = 7


@dataclass(frozen=True)
class Example:
    """A pair whose grade moved the wrong way; `document` is its beginning as the judge was given it."""

    row_id: int
    query_id: str
    doc_id: str
    query: str
    document: str
    before: float
    after: float


@dataclass(frozen=True)
class ProbeResult:
    """How a judge's grades moved under one probe.

    Args:
        moves: mean of (grade of the changed pair - grade of what it is compared with), with its 95 % interval over
            queries.
        moved: share of pairs whose grade moved by `step` or more in the direction in which it must not, likewise.
        again: share of pairs that move so without any change, when they are asked again with another seed.
        rows: pairs that both have a readable grade.
        unreadable: changed pairs, or those that they are compared with, without one.
        worst: those that moved the furthest, the furthest first.
    """

    probe: str
    about: str
    direction: Direction
    is_noise: bool
    moves: Difference
    moved: Difference
    again: float | None
    rows: int
    unreadable: int
    worst: list[Example]


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """How a judge can be fooled.

    Args:
        judge: the job, folder or address that was audited.
        model, model_digest: of the engine that answered.
        manifest_sha256: of a student's or bundle's manifest; None for others.
        rows, queries: audited pairs, and their queries.
        scale: from the lowest to the highest grade; of scores, the range of nine in ten.
        step: what a grade has to move to count.
    """

    judge: str
    model: str
    model_digest: str
    manifest_sha256: str | None
    rows: int
    queries: int
    seed: int
    scale: float
    step: float
    probes: list[ProbeResult]
    gates: list[GateVerdict]
    exit_code: int

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        return as_object(self)

    def lines(self) -> list[str]:
        """The result for people."""
        return [as_text(audit_blocks(self))]

    @property
    def refused(self) -> list[GateVerdict]:
        """The gates that did not hold."""
        return [verdict for verdict in self.gates if not verdict.has_passed]


def audit(
    job: Job, options: AuditOptions, report_progress: Callable[[str], None] = lambda _: None
) -> AuditResult | RunReport:
    """Change pairs of a job's input, have them labelled, and compare.

    Args:
        job: of `relabel run` or `relabel score`; its output is not touched.
        report_progress: called with what is going to be asked.
    Returns:
        The result; the report of a run that was stopped before its end.
    Raises:
        ConfigError: no such probe; or the labeler grades no document, or reads it from more than its text.
        InputError: the input has no row that can be asked.
        StaleRunError: the folder holds the audit of other pairs.
        RelabelError: as `run_job`.
    """
    check_labeler(job)
    probes = chosen_probes(job, options)
    targets = draw_targets(job.open_dataset(), options)
    judge = judge_of(job.labeler, job.spec.labeler.grades)
    folder = Path(options.to).absolute()
    everything = AskedPairs(job, asked_rows(targets, probes, judge), folder / LABELS)
    originals = [row for row in everything.rows if row.variant == ORIGINAL]
    once_more = AskedPairs(job.changed("engine", seed=job.spec.engine.seed + 1), originals, folder / AGAIN.name)
    report_progress(
        f"{counted(len(targets), 'pair')} as they are and changed, {counted(len(everything.rows), 'row')} in all, and "
        f"{len(originals):,} once more for the judge's noise"
    )
    for asked in (everything, once_more):
        asked.write()
        report = run_job(asked.job(), RunOptions())
        if report.exit_code not in (Exit.DONE, Exit.NOTHING_TO_DO):
            return report
    audited = Audited(job, targets, probes, everything, once_more)
    result = audited.result(options)
    with written(str(folder / AUDIT_NAME), Storage()) as path:
        path.write_bytes(sealed_json(asdict(result)))
    return result


def check_labeler(job: Job) -> None:
    """Refuse a labeler whose grades say nothing of a document's text.

    Raises:
        ConfigError: it does not grade, does not read the document, or reads a column that is made of it.
    """
    reads = job.reads
    name = job.spec.labeler.name
    grades_nothing = not job.spec.labeler.grades and not any(column.name == "score" for column in job.labeler.columns)
    if grades_nothing or not reads.document:
        raise ConfigError(f"{job.where}: labeler {name} grades no document, so there is nothing to audit.")
    made = [column.name for column in reads.columns if column.kind in STRUCT_KINDS]
    if made:
        raise ConfigError(
            f"{job.where}: labeler {name} reads `{made[0]}`, which was made of the document: a probe changes texts."
        )


def chosen_probes(job: Job, options: AuditOptions) -> list[Probe]:
    """The probes that are wanted and fit the labeler.

    Raises:
        ConfigError: there is none of a name, or a gate is on one that is not tried.
    """
    fitting = {probe.name: probe for probe in probes_of(job.labeler)}
    for name in options.probes:
        if name not in fitting:
            raise ConfigError(f"no probe `{name}` for {job.spec.labeler.name}: known are {', '.join(fitting)}.")
    if options.own is not None:
        tried = [options.own, *(probe for probe in fitting.values() if probe.is_noise)]
    else:
        is_all = not options.probes
        tried = [probe for name, probe in fitting.items() if is_all or name in options.probes or probe.is_noise]
    nothing = {probe.name: 0.0 for probe in tried}
    for gate in options.gates:
        judge_gate(gate, nothing, None)
    return tried


# ------------------------------------------------------------------------------
# Which pairs.


@dataclass(frozen=True)
class Target:
    """A pair that is changed, with all pairs of its query, in order, where the labeler sees them."""

    pair: Pair
    siblings: Sequence[Pair] = ()


def draw_targets(dataset: Dataset, options: AuditOptions) -> list[Target]:
    """Pairs by a seed, of as many queries as there are: one of each query, then a second; one of each where the labeler
    sees whole queries.

    Raises:
        InputError: there is none.
    """
    rows = draw_rows(dataset, options)
    pairs = list(pairs_by_number(dataset, rows))
    if not dataset.reads.whole_query:
        targets = [Target(pair) for pair in pairs if not pair.broken_text]
    else:
        targets = []
        chosen = dict(zip((pair.query_id for pair in pairs), rows, strict=True))
        for query_id, numbers in rows_of_queries(dataset, list(chosen)).items():
            siblings = list(pairs_by_number(dataset, numbers))
            pair = next(sibling for sibling in siblings if sibling.row_id == chosen[query_id])
            if not any(sibling.broken_text for sibling in siblings):
                targets.append(Target(pair, siblings))
    if not targets:
        raise InputError("the input has no row that can be audited.")
    return targets


def draw_rows(dataset: Dataset, options: AuditOptions) -> list[int]:
    """Row numbers of the pairs that are changed, ascending."""
    if not dataset.rows:
        raise InputError("the input has no row.")
    with scanned_queries(dataset) as queries:
        size_G = queries.sizes_Q
        query_N = np.empty(queries.rows, dtype=np.int64)
        query_N[np.concatenate([*queries.rows_by_query()])] = np.repeat(np.arange(len(size_G)), size_G)
    random = np.random.default_rng(options.seed)
    row_N = random.permutation(len(query_N))
    rank_G = random.permutation(len(size_G))
    row_N = row_N[np.argsort(query_N[row_N], kind="stable")]
    turn_N = places_in_query(query_N[row_N], len(size_G))
    order_N = np.lexsort((rank_G[query_N[row_N]], turn_N))
    if dataset.reads.whole_query:
        order_N = order_N[turn_N[order_N] == 0]
    return sorted(row_N[order_N[: options.rows]].tolist())


# ------------------------------------------------------------------------------
# What is asked: each pair as it is, changed by each probe, and as each probe's base.


@dataclass(frozen=True)
class AskedRow:
    """A pair that is asked.

    Args:
        place: of the audited pair, among all.
        variant: as what it is asked: a probe's name, that of its base, or `original`.
        counts: it is the audited pair itself, and not another of its query.
    """

    place: int
    variant: str
    counts: bool
    pair: Pair


def base_of(probe: Probe) -> str:
    """The variant that a probe's pairs are compared with."""
    return ORIGINAL if probe.base is None else f"{probe.name}.base"


def asked_rows(targets: Sequence[Target], probes: Sequence[Probe], judge: Judge) -> list[AskedRow]:
    """All that is asked of the first run, in order."""
    rows: list[AskedRow] = []
    for place, target in enumerate(targets):
        rows += _variant_rows(place, target, ORIGINAL, target.pair)
        for probe in probes:
            changed = probe.change(target.pair, judge)
            if probe is AGAIN or changed is None:
                continue
            rows += _variant_rows(place, target, probe.name, changed, reverses=probe.reverses)
            base = None if probe.base is None else probe.base(target.pair, judge)
            if base is not None:
                rows += _variant_rows(place, target, base_of(probe), base)
    return rows


def _variant_rows(
    place: int, target: Target, variant: str, changed: Pair, *, reverses: bool = False
) -> Iterator[AskedRow]:
    siblings = list(target.siblings) or [target.pair]
    if reverses:
        siblings.reverse()
    for sibling in siblings:
        is_target = sibling.row_id == target.pair.row_id
        pair = changed if is_target else sibling._replace(query=changed.query)
        yield AskedRow(place, variant, is_target, pair)


@dataclass(frozen=True)
class AskedPairs:
    """A run of an audit, and its input.

    Args:
        audited: the job whose judge is asked.
        rows: what is asked; the place of each is its row id.
        output: the run's folder; its input lies next to it.
    """

    audited: Job
    rows: Sequence[AskedRow]
    output: Path

    @property
    def path(self) -> Path:
        """The input."""
        return self.output.with_name("pairs.parquet" if self.output.name == LABELS else f"{self.output.name}.parquet")

    def table(self) -> pa.Table:
        """The pairs. Each variant is a query of its own, so that none sees another."""
        columns: dict[str, list[Any]] = {
            "query_id": [f"{row.place}.{row.variant}" for row in self.rows],
            "query": [row.pair.query for row in self.rows],
            "doc_id": [row.pair.doc_id for row in self.rows],
            "document": [row.pair.document for row in self.rows],
        }
        kinds: dict[str, pa.DataType] = dict.fromkeys(columns, pa.string())
        reads = self.audited.reads
        if reads.context:
            columns["context"] = [list(row.pair.context) for row in self.rows]
            kinds["context"] = pa.list_(pa.string())
        for column in reads.columns:
            values = [row.pair.columns.get(column.name) for row in self.rows]
            if any(value is not None for value in values):
                is_list = column.kind == "list<string>"
                columns[column.name] = [list(value or ()) for value in values] if is_list else values
                kinds[column.name] = pa.list_(pa.string()) if is_list else pa.string()
        return pa.table(columns, schema=pa.schema(list(kinds.items())))

    def write(self) -> None:
        """Write the input if it is not there.

        Raises:
            StaleRunError: another is.
        """
        sink = pa.BufferOutputStream()
        pq.write_table(self.table(), sink)
        data = sink.getvalue().to_pybytes()
        if not self.path.is_file():
            with written(str(self.path), Storage()) as temporary:
                temporary.write_bytes(data)
        elif self.path.read_bytes() != data:
            raise StaleRunError(
                f"{self.path}: holds the pairs of another audit: of other rows, probes or prompts. Give another --to, "
                "or remove the folder."
            )

    def job(self) -> Job:
        """The job that asks them."""
        spec = self.audited.spec
        columns = Columns(document=("document",), context="context" if self.audited.reads.context else None)
        own = {
            "name": f"{spec.name[:90]}-audit",
            "input": InputSpec(path=(str(self.path),), columns=columns, overlong=spec.input.overlong),
            "output": str(self.output),
            "shards": None,
            "run": spec.run.model_copy(update={"max_failed_fraction": 1.0}),  # unreadable answers are a finding
            "reuse": (),
            "canary": 0,
            "cascade": None,
        }
        return replace(self.audited, spec=spec.model_copy(update=own))

    def grades(self, num_pairs: int) -> dict[str, np.ndarray]:
        """By variant the expected grade of each audited pair, float64 [N]: where there is none the written one, or the
        score; NaN where there is none of these, or nothing was asked.
        """
        grades = {row.variant: np.full(num_pairs, np.nan) for row in self.rows}
        run = open_run_labels(str(self.output), self.audited.storage, allow_partial=False)
        for file in run.found.labels:
            for label in read_labels(run.folder, file, ["row_id", *VALUES]).to_pylist():
                row = self.rows[label["row_id"]]
                values = [label[name] for name in VALUES if label.get(name) is not None]
                if row.counts and values:
                    grades[row.variant][row.place] = values[0]
        return grades

    def engine(self) -> dict[str, Any]:
        """Facts of the engine that answered."""
        run = open_run_labels(str(self.output), self.audited.storage, allow_partial=False)
        return dict(run.found.engines[0]) if run.found.engines else {}


# ------------------------------------------------------------------------------
# How the grades moved.


@dataclass(frozen=True)
class Moves:
    """Grades of the same pairs before and after a change, float64 [N] each; NaN where a pair has no readable grade."""

    before: np.ndarray
    after: np.ndarray

    @property
    def steps(self) -> np.ndarray:
        """How far they moved."""
        return np.asarray(self.after - self.before)

    def wrong(self, direction: Direction) -> np.ndarray:
        """How far they moved in the direction in which they must not; below 0 where the other way."""
        match direction:
            case "up":
                return self.steps
            case "down":
                return -self.steps
        return np.asarray(np.abs(self.steps))

    def has_moved(self, direction: Direction, step: float) -> np.ndarray:
        """1 where they moved so by a step, 0 where they did not."""
        return np.where(np.isnan(self.steps), np.nan, self.wrong(direction) >= step)


@dataclass(frozen=True)
class Audited:
    """The two runs of an audit, finished."""

    job: Job
    targets: Sequence[Target]
    probes: Sequence[Probe]
    everything: AskedPairs
    once_more: AskedPairs

    def result(self, options: AuditOptions) -> AuditResult:
        """What their labels say."""
        grades = self.everything.grades(len(self.targets))
        grades[AGAIN.name] = self.once_more.grades(len(self.targets))[ORIGINAL]
        nothing = np.full(len(self.targets), np.nan)
        moves = {}
        for probe in self.probes:
            before_N = grades.get(base_of(probe), nothing)
            moves[probe.name] = Moves(before_N, grades.get(probe.name, nothing))
        query_ids = [target.pair.query_id for target in self.targets]
        scale = self._scale(grades[ORIGINAL])
        directions = {probe.name: probe.direction for probe in self.probes}
        figures = move_figures(moves, directions, query_ids, step=STEP * scale, seed=options.seed)
        probes = [self._probe_result(probe, moves, figures, STEP * scale) for probe in self.probes]
        shares = {result.probe: result.moved.value for result in probes}
        gates = [with_interval(judge_gate(gate, shares, None), probes) for gate in options.gates]
        engine = self.everything.engine()
        has_passed = all(verdict.has_passed for verdict in gates)
        return AuditResult(
            judge=self.job.where.removeprefix("relabel score "),
            model=str(engine.get("model", "")),
            model_digest=str(engine.get("model_digest", "")),
            manifest_sha256=(engine.get("details") or {}).get("manifest_sha256"),
            rows=len(self.targets),
            queries=len(set(query_ids)),
            seed=options.seed,
            scale=scale,
            step=STEP * scale,
            probes=probes,
            gates=gates,
            exit_code=int(Exit.DONE if has_passed else Exit.GATE),
        )

    def _scale(self, original_N: np.ndarray) -> float:
        if self.job.spec.labeler.grades:
            return float(self.job.spec.labeler.grades - 1)
        if np.isnan(original_N).all():
            return 1.0
        low, high = np.nanquantile(original_N, SCORE_RANGE)
        return float(high - low) or 1.0

    def _probe_result(
        self, probe: Probe, moves: Mapping[str, Moves], figures: Mapping[str, MetricValue], step: float
    ) -> ProbeResult:
        own = moves[probe.name]
        rows = int((~np.isnan(own.steps)).sum())
        num_asked = sum(row.counts and row.variant == probe.name for row in self.everything.rows)
        if probe is AGAIN:
            num_asked = len(self.targets)
        by_chance_N = moves[AGAIN.name].has_moved(probe.direction, step)
        return ProbeResult(
            probe=probe.name,
            about=probe.about,
            direction=probe.direction,
            is_noise=probe.is_noise,
            moves=difference_of(figures[f"{probe.name}.moves"]),
            moved=difference_of(figures[f"{probe.name}.moved"]),
            again=None if np.isnan(by_chance_N).all() else float(np.nanmean(by_chance_N)),
            rows=rows,
            unreadable=num_asked - rows,
            worst=self._worst(probe, own, step),
        )

    def _worst(self, probe: Probe, moves: Moves, step: float) -> list[Example]:
        """The pairs that moved the furthest of those that count as moved."""
        changed = {row.place: row.pair for row in self.everything.rows if row.counts and row.variant == probe.name}
        examples = []
        wrong_N = np.nan_to_num(moves.wrong(probe.direction), nan=-np.inf)
        for target_index in np.argsort(-wrong_N, kind="stable")[:WORST].tolist():
            if wrong_N[target_index] < step:
                break
            target = self.targets[target_index].pair
            pair = changed.get(target_index, target)
            example = Example(
                row_id=target.row_id,
                query_id=target.query_id,
                doc_id=target.doc_id,
                query=pair.query,
                document=pair.document[:SHOWN_CHARACTERS],
                before=float(moves.before[target_index]),
                after=float(moves.after[target_index]),
            )
            examples.append(example)
        return examples


def with_interval(verdict: GateVerdict, probes: Sequence[ProbeResult]) -> GateVerdict:
    """A gate's verdict with the interval of its share, if that has one."""
    moved = next(probe.moved for probe in probes if probe.probe == verdict.figure)
    if moved.low is None or moved.high is None:
        return verdict
    return replace(verdict, interval=[moved.low, moved.high])


def difference_of(figure: MetricValue) -> Difference:
    """The value with its interval alone."""
    return Difference(figure.value, figure.low, figure.high)


def move_figures(
    moves: Mapping[str, Moves],
    directions: Mapping[str, Direction],
    query_ids: Sequence[str],
    *,
    step: float,
    seed: int,
) -> dict[str, MetricValue]:
    """Of each probe `NAME.moves`, the mean move, and `NAME.moved`, the share of pairs that moved the wrong way by at
    least a step, with 95 % intervals over queries.

    Args:
        moves, directions: by probe.
        query_ids: of each pair.
    """
    numbers = {query_id: number for number, query_id in enumerate(dict.fromkeys(query_ids))}
    group_N = np.array([numbers[query_id] for query_id in query_ids])

    def measure(values: Mapping[str, np.ndarray], formula: Formula) -> dict[str, Measured]:
        return {
            name: Measured(mean_of_rows(value_N, group_N, len(numbers)), formula) for name, value_N in values.items()
        }

    steps = {name: one.steps for name, one in moves.items()}
    has_moved = {name: one.has_moved(directions[name], step) for name, one in moves.items()}
    metrics = [
        Metric("{}.moves", "move of the grade", "neither", "rows", lambda _: measure(steps, mean), ""),
        Metric("{}.moved", "moved the wrong way", "lower", "rows", lambda _: measure(has_moved, share), ""),
    ]
    metric_set = MetricSet(metrics, None, num_groups=len(numbers))
    intervals = bootstrap(metric_set.resampled, num_groups=len(numbers), resamples=RESAMPLES, seed=seed)
    return metric_set.with_intervals(intervals)


# ------------------------------------------------------------------------------
# The result as blocks, and as a gate of `publish`.

FOOLED = 0.05
"""A probe is named in the verdict where more pairs than one in twenty move the wrong way: the low end of the interval,
and more than move so when they are asked again.
"""
NOT = {"up": "rise", "down": "fall", "either": "move"}


def audit_blocks(result: AuditResult) -> list[Block]:
    """The verdict, figures, what each probe changes, the worst examples, and the gates."""
    blocks: list[Block] = [
        verdict_of(result.judge, result),
        moves_table(result, "how the grade moves"),
        about_probes(result),
    ]
    furthest = furthest_table(result)
    if furthest.rows:
        blocks.append(furthest)
    return [*blocks, *closing_blocks([], result.gates)]


def verdict_of(name: str, result: AuditResult) -> Paragraph:
    """By which probes a judge is fooled, or that none was shown to."""
    gates = "".join(f" A gate refuses it: {verdict}." for verdict in result.refused)
    fooled = "; ".join(f"{probe.probe} {moved_text(probe)}" for probe in result.probes if is_fooled_by(probe))
    over = f"{counted(result.rows, 'pair')} of {result.queries:,} queries"
    if result.queries < FEWEST_QUERIES:
        return Paragraph(f"Whether {name} can be fooled is not known: {over} are too few.{gates}", "warn")
    if fooled:
        return Paragraph(
            f"{name} can be fooled. Pairs that a probe moves the wrong way: {fooled}; {over}.{gates}", "bad"
        )
    text = f"No probe is shown to move more than one pair in twenty of {name} the wrong way; {over}.{gates}"
    return Paragraph(text, "bad" if gates else "good")


def is_fooled_by(probe: ProbeResult) -> bool:
    """Whether the judge is shown to be."""
    low = probe.moved.low
    return not probe.is_noise and low is not None and low > max(FOOLED, probe.again or 0.0)


def moved_text(probe: ProbeResult) -> str:
    """`83 % (66 to 92 %)`."""
    moved = probe.moved
    assert moved.value is not None
    assert moved.low is not None
    assert moved.high is not None
    return f"{moved.value:.0%} ({moved.low:.0%} to {moved.high:.0%})"


def about_probes(result: AuditResult) -> Remarks:
    """What each probe changes, and what counts as a move."""
    notes = [f"{probe.probe}: {probe.about}" for probe in result.probes]
    return Remarks([*notes, f"moved so: by {result.step:.3g} or more, a tenth of the scale"])


def moves_table(result: AuditResult, caption: str) -> Table:
    """A row for each probe."""
    head = (
        "probe",
        "must not",
        "mean move",
        "95 % interval",
        "moved so",
        "95 % interval",
        "asked again",
        "pairs",
        "unreadable",
    )
    rows: list[list[Cell]] = []
    for probe in result.probes:
        name = f"{probe.probe} (noise)" if probe.is_noise else probe.probe
        moves: list[Cell] = [signed(probe.moves.value), interval_text(probe.moves)]
        moved: list[Cell] = [probe.moved.value, interval_text(probe.moved)]
        rows.append([name, NOT[probe.direction], *moves, *moved, probe.again, probe.rows, probe.unreadable])
    return Table(caption, head, rows)


def furthest_table(result: AuditResult) -> Table:
    """The worst examples of each probe."""
    rows: list[list[Cell]] = []
    for probe in result.probes:
        for example in probe.worst:
            ends = f"{example.before:.2f} → {example.after:.2f}"
            rows.append([probe.probe, ends, example.row_id, example.query, example.document])
    return Table("the furthest", ("probe", "grade", "row", "query", "document begins"), rows)


def audit_folder(output: Path, name: str = "audit") -> Path:
    """Where an audit lies by default: `measurements/NAME/audit`, next to what was audited."""
    return measurements_folder(output) / name


def read_audit(path: Path) -> AuditResult:
    """An `audit.json`.

    Raises:
        ManifestError: it is damaged, or another relabel wrote it.
    """
    return read_record(
        AuditResult,
        path.read_bytes(),
        str(path),
        "not an audit as this relabel writes it",
        "Audit it again, or remove the file.",
    )


def failed_audits(bundle: Bundle) -> dict[Path, list[str]]:
    """The gates that a bundle or its student failed, by audit. Audits are looked for next to the bundle.

    Raises:
        ManifestError: an audit is damaged.
    """
    lineage = bundle.facts.get("lineage")
    student = lineage.get("student") if isinstance(lineage, dict) else None
    digest = student.get("digest") if isinstance(student, dict) else None
    failed = {}
    for path in sorted(measurements_folder(bundle.folder).parent.glob(f"*/audit/{AUDIT_NAME}")):
        result = read_audit(path)
        is_of_bundle = result.manifest_sha256 == bundle.manifest.sha256 or result.model_digest == digest
        if is_of_bundle and result.refused:
            failed[path] = [str(verdict) for verdict in result.refused]
    return failed
