"""What an evaluation reads: its options, the grade scale, texts of a run's input, and the train or test side of a
student's split."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.distill.students.examples import SIDES, folded, split_queries
from relabel.distill.students.labels import read_pairs
from relabel.distill.students.manifest import SplitFacts
from relabel.jobs.sections import Badge, Block, Cell, Facts, Paragraph, Plot, Remarks, Series, Table, confusion_table
from relabel.manifests.errors import InputError, ManifestError, UsageError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.gold import Duplicates, GradeMap, grades_seen
from relabel.manifests.label_sets import LabelPart, LabelSet, map_labels, open_run
from relabel.manifests.labels import QUERY_AND_DOCUMENT, Pair, Reads
from relabel.manifests.manifest import load_manifest
from relabel.manifests.metrics.comparison import AGAINST_TEACHER, StudentComparison
from relabel.manifests.metrics.evaluation import MOST_LEXICAL, Baselines, Difference, Evaluation, GateVerdict, bm25
from relabel.manifests.metrics.measures import DEPTH
from relabel.manifests.metrics.metric import MetricValue
from relabel.manifests.metrics.registry import METRICS, title_of
from relabel.manifests.plan import Plan
from relabel.manifests.records import checked, sha256_bytes
from relabel.manifests.rows import open_run_input
from relabel.manifests.schemas import codes_of, ids_of, texts_of
from relabel.manifests.store import open_run_store

# ------------------------------------------------------------------------------
# The train, dev and test sides of a student's split: by default a student is judged by its test side alone, since rows
# that it learned from flatter its figures. A manifest says how queries were split, by a hash of the query
# (`distill/students/examples.py`), so the side of any row follows, also of a query that the student's labels never had.


Side: TypeAlias = Literal["train", "dev", "test", "all"]
UNKNOWN = len(SIDES)
"""Side of a query whose text is not known, where the split is by text."""
_NAMES = (*SIDES, "unknown")


class EmptySideError(InputError):
    """No row is on the side that is judged."""


@dataclass
class SideCut:
    """Which rows are judged.

    Args:
        side: of the split of the students among the sets; of several students, a row is on `train` if it trained any.
        students: whose split is known, by path.
        rows: of each set by path, its rows by side, before the cut; empty where no split is known.
        unknown: by path of a set, why nobody knows whether its rows trained what labelled them.
    """

    side: Side
    students: list[str]
    rows: dict[str, dict[str, int]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The same in words, to be shown before any figure."""
        shown = []
        for why in dict.fromkeys(self.unknown.values()):
            paths = ", ".join(path for path, text in self.unknown.items() if text == why)
            shown.append(f"{paths}: {why}, so figures may flatter")
        for path, count in self.rows.items():
            parts = [f"{number:,} {name}" for name, number in count.items() if number]
            total = sum(count.values())
            if self.side == "all":
                flattered = f"; the {count['train']:,} train rows taught the student, whose figures flatter"
                shown.append(f"all {total:,} rows of {path}: {', '.join(parts)}{flattered}")
            else:
                left = [part for part in parts if not part.endswith(f" {self.side}")]
                kept = f"{count[self.side]:,} of {total:,} rows of {path}, the student's {self.side} side"
                shown.append(f"{kept}; left out: {', '.join(left) or 'none'} (--side all: every row)")
        return shown


class Sides:
    """The sides of queries, by all students among some sets.

    Args:
        sets: those that are judged together.
        side: as the user named it; None for `test` where a split is known, else all rows.
    Raises:
        UsageError: a side was named, and no set's split is known.
    """

    def __init__(self, sets: Sequence[LabelSet], side: Side | None, storage: Storage) -> None:
        self._splits: list[SplitFacts] = []
        self._by_text: list[tuple[SplitFacts, pa.Array, np.ndarray]] = []
        self.cut = SideCut(side or "all", [])
        for one in sets:
            if one.kind == "run":
                continue
            found = _splits_of(one, storage)
            if isinstance(found, str):
                self.cut.unknown[one.where] = found
                continue
            self.cut.students.append(one.where)
            for split in found:
                if split.by == "query":
                    self._by_text.append((split, *_sides_by_text(one, split, storage)))
                else:
                    self._splits.append(split)
        if self.cut.students and side is None:
            self.cut.side = "test"
        if side not in (None, "all") and not self.cut.students:
            why = "; ".join(f"{path}: {text}" for path, text in self.cut.unknown.items()) or "none is a student's"
            raise UsageError(f"--side {side}: the split of no set is known ({why}). Leave it out to judge all rows.")

    def of(self, query_ids: pa.Array) -> np.ndarray:
        """int8 [N]: 0 train, 1 dev, 2 test, 3 unknown; a query of several students' is where it taught most."""
        code_N, names = codes_of(query_ids.cast(pa.large_binary()))
        side_Q = np.full(len(names), UNKNOWN, dtype=np.int8)
        texts = texts_of(names)
        for split in self._splits:
            side_Q = np.minimum(side_Q, _split(split, texts))
        for _, ids, side_P in self._by_text:
            place_Q = pa.compute.index_in(names, value_set=ids).fill_null(len(ids)).to_numpy()
            side_Q = np.minimum(side_Q, np.append(side_P, np.int8(UNKNOWN))[place_Q])
        return np.asarray(side_Q[code_N])

    def kept(self, where: str, query_ids: pa.Array) -> np.ndarray:
        """bool [N], rows of a set that are on the side; all are counted."""
        side_N = self.of(query_ids)
        count = self.cut.rows.setdefault(where, dict.fromkeys(_NAMES, 0))
        for name, number in zip(_NAMES, np.bincount(side_N, minlength=len(_NAMES)).tolist(), strict=True):
            count[name] += number
        return np.full(len(side_N), fill_value=True) if self.cut.side == "all" else side_N == SIDES.index(self.cut.side)

    def taken(self, where: str, rows: pa.Table) -> pa.Table:
        """The rows of a table with `query_id` that are on the side."""
        if not self.cut.students:
            return rows
        return rows.filter(pa.array(self.kept(where, rows["query_id"].combine_chunks())))

    def apply(self, labels: LabelSet) -> None:
        """Let a set give the rows of the side alone."""
        whole = labels.parts
        if not self.cut.students:
            return

        def parts() -> Iterator[LabelPart]:
            self.cut.rows.pop(labels.where, None)  # a set is read several times
            for part in whole():
                if part.query_ids is None:
                    raise UsageError(
                        f"{labels.where}: has no query ids, so the side of its rows is not known. See --by."
                    )
                yield part.taken(pa.array(np.flatnonzero(self.kept(labels.where, part.query_ids))))

        labels.parts = parts

    def check(self) -> None:
        """
        Raises:
            EmptySideError: a set was read, and none of its rows is on the side.
        """
        for path, count in self.cut.rows.items():
            if self.cut.side != "all" and not count[self.cut.side]:
                raise EmptySideError(
                    f"{path}: none of its {sum(count.values()):,} rows is on the {self.cut.side} side of the student. "
                    "Score rows that it did not learn from, or judge all of them with --side all: the figures flatter."
                )


def cut_sets(sets: Sequence[LabelSet], side: Side | None, storage: Storage, *, students: Sequence[str] = ()) -> Sides:
    """Cut sets to one side, see `Sides`; `students` are outputs whose split counts too."""
    known = {one.where for one in sets}
    others = [open_run(path, storage, allow_partial=True) for path in students if path not in known]
    sides = Sides([*sets, *others], side, storage)
    for one in sets:
        sides.apply(one)
    return sides


def _split(split: SplitFacts, keys: Sequence[str]) -> np.ndarray:
    return split_queries(keys, dev=split.shares["dev"], test=split.shares["test"], seed=split.seed)


def _splits_of(labels: LabelSet, storage: Storage) -> list[SplitFacts] | str:
    """The splits of the student that made the scores, or why they are not known."""
    if labels.kind == "file":
        return "a label file does not say whether what made it learned from these rows"
    manifest = load_manifest(open_run_store(labels.where, storage))
    if manifest is None:
        return "it is not finished, and only a manifest says which student it is of, so its split is not known"
    path = Path(str(manifest.spec.get("engine", {}).get("model")))
    try:
        data = (path / "manifest.json").read_bytes()
    except OSError:
        return f"its student is not at {path} any more, so nobody knows which rows trained it"
    made_by = (one.get("details", {}).get("manifest_sha256") for one in manifest.engines)
    if sha256_bytes(data) not in made_by:
        return f"the student at {path} is another one by now, so nobody knows which rows trained it"
    return _lineage(json.loads(data), seen={path.resolve()}) or f"the manifest of {path} does not say how it was split"


def _lineage(held: dict[str, Any], *, seen: set[Path]) -> list[SplitFacts]:
    """The split of a student or bundle, and those of the students that it starts from; empty where it has none."""
    of_bundle = held.get("lineage")
    split = (of_bundle or held).get("split")
    if not isinstance(split, dict):
        return []
    model = (of_bundle["student"] if of_bundle else held).get("model") or {}
    base = Path(str(model.get("reference"))).resolve()
    found = [checked(SplitFacts, split)]
    if base not in seen and (base / "student.json").is_file():
        found += _lineage(json.loads((base / "manifest.json").read_bytes()), seen={*seen, base})
    return found


def _sides_by_text(labels: LabelSet, split: SplitFacts, storage: Storage) -> tuple[pa.Array, np.ndarray]:
    """Query ids of a run's input, and their sides by the queries' text; one of several texts is where any is first."""
    assert labels.plan is not None
    pairs = run_pairs(labels.where, labels.plan, storage, np.arange(labels.plan.rows))
    side_N = _split(split, [folded(pair.query) for pair in pairs])
    code_N, ids = codes_of(ids_of(pair.query_id for pair in pairs))
    side_P = np.full(len(ids), UNKNOWN, dtype=np.int8)
    np.minimum.at(side_P, code_N, side_N)
    return ids, side_P


# ------------------------------------------------------------------------------
# Options, gold as it was read, and the scale.


@dataclass(frozen=True)
class JudgingOptions:
    """Options of `relabel evaluate`. `grade` and `by` are None where the user named no column, `qrels` without gold;
    `pass_at` is empty where the k of pass@k were left open; `side` None takes the test side of a student: one of the
    sets, or one of `students`, outputs that are on the same page.
    """

    qrels: str | None = None
    label: str = "grade"
    grade: str | None = None
    by: str | None = None
    doc: str = "doc_id"
    grades: int | None = None
    grade_map: GradeMap | None = None
    label_map: GradeMap | None = None
    duplicates: Duplicates = "error"
    where: Mapping[str, str] = field(default_factory=dict)
    allow_partial: bool = False
    pass_at: tuple[int, ...] = ()
    side: Side | None = None
    students: tuple[str, ...] = ()


@dataclass
class Gold:
    """Gold grades and further columns for one label set: by row of its own input or file, or, where that is not what
    the qrels are, by pair.
    """

    by_row: pa.Int64Array | None
    how: str
    columns: Mapping[str, pa.Array] = field(default_factory=dict)


def gold_files(path: str | None) -> list[str]:
    """What must not be written over where these are the gold grades: the path as given, and the local files that a
    pattern matches.
    """
    if path is None:
        return []
    return [path] if is_url(path) else [path, *glob.glob(path, recursive=True)]  # noqa: PTH207 (an absolute pattern is beyond Path.glob)


MOST_GRADES = 10
"""As many as a labeler may have."""


def scale_of(sets: list[LabelSet], seen: set[int], options: JudgingOptions) -> tuple[int, list[str]]:
    """K: of the runs, of distributions, as given, or one more than the highest grade."""
    found: dict[str, int] = {}
    highest = 0
    for one in sets:
        if one.grades is not None:
            found[one.where] = one.grades if options.label_map is None else max(options.label_map.values()) + 1
            continue
        for part in one.parts():
            labels = map_labels(part, options.label_map, where=one.where)
            if labels.probs is not None:
                found[one.where] = pc.list_value_length(labels.probs.drop_null()[:1])[0].as_py()
            highest = max(highest, *grades_seen(labels.grades), 0)
    if len(set(found.values())) > 1:
        raise InputError(
            f"labels are on different scales ({_listed(found)}). Judge them apart, or bring them to one "
            "scale first (`evaluate` takes --map-labels)."
        )
    if found:
        grades = next(iter(found.values()))
        if options.grades not in (None, grades):
            raise UsageError(f"--grades {options.grades}: {_listed(found)}.")
        return grades, []
    if options.grades is not None:
        return options.grades, []
    highest_gold = max(seen, default=0)
    grades = max(2, highest + 1, highest_gold + 1)
    if grades > MOST_GRADES:
        raise InputError(
            f"labels go up to {highest} and gold grades up to {highest_gold}: more than {MOST_GRADES} grades are no "
            "scale. Are --label and --grade the right columns? Else bring both to one scale with --map and "
            "--map-labels."
        )
    remark = f"the scale is taken to be 0 to {grades - 1}, after the highest grade there is; --grades sets it"
    if highest != highest_gold:
        remark += (
            f". Labels go up to {highest}, gold grades to {highest_gold}: if these are two scales, see --map and "
            "--map-labels"
        )
    return grades, [remark]


def _listed(scales: dict[str, int]) -> str:
    return ", ".join(f"{where} has {grades} grades" for where, grades in scales.items())


# ------------------------------------------------------------------------------
# Texts of a run's input.


def run_pairs(
    where: str, plan: Plan, storage: Storage, row_ids: np.ndarray, *, reads: Reads = QUERY_AND_DOCUMENT
) -> list[Pair]:
    """Pairs of the input that a run labelled, in the order of the row ids.

    Raises:
        InputError, ManifestError: the input is gone, or is not any more what was labelled.
    """
    return read_pairs(open_run_input(where, plan, storage, reads=reads), row_ids)


def lexical_scores(
    labels: LabelSet | None, row_ids: np.ndarray, storage: Storage, notes: list[str]
) -> np.ndarray | None:
    """BM25 of some rows of a run, float64 [N]; None where it can't be had, and why not among the notes.

    Args:
        labels: whose rows they are; None or a label file has no texts.
    """
    if labels is None or labels.plan is None:
        notes.append("no lexical baseline: the texts of these labels are not known")
        return None
    if len(row_ids) > MOST_LEXICAL:
        notes.append(f"no lexical baseline: of more than {MOST_LEXICAL:,} rows it would take long")
        return None
    try:
        pairs = run_pairs(labels.where, labels.plan, storage, row_ids)
    except (InputError, ManifestError) as exc:
        notes.append(f"no lexical baseline: {exc}")
        return None
    return bm25([(pair.query, pair.document) for pair in pairs])


# ------------------------------------------------------------------------------
# Results of `relabel evaluate`: the records of its JSON, and the sentences, facts and tables that show them.


@dataclass(frozen=True, kw_only=True)
class JudgedLabels(Evaluation):
    """One set of labels, or several as one, by gold.

    Args:
        labels: path, kind, grades and origin of each set.
        counts: labels by what gold says of them, and queries of the judged: `without_label` rows hold none that can be
            read, `relabelled` are judged labels beyond the first of their pair; the `qrels` are pairs, absent where
            labels and gold are joined by row.
    """

    labels: list[dict[str, Any]]
    qrels: str | None
    joined_by: list[str]
    side: SideCut
    counts: dict[str, int]
    resamples: int
    seed: int
    gates: list[GateVerdict]
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class ComparedStudent(StudentComparison):
    """One student compared with the teacher.

    Args:
        joined_by: how rows were joined with gold; None without gold.
        gates: verdicts on this student.
    """

    teacher: str
    student: str
    joined_by: str | None
    gates: list[GateVerdict]


@dataclass(frozen=True)
class ComparedSets:
    """All students compared with one teacher; `sets` are name, role, path, kind, quarantined and origin of each."""

    sets: list[dict[str, Any]]
    side: SideCut
    qrels: str | None
    grades: int
    resamples: int
    seed: int
    comparisons: list[ComparedStudent]
    notes: list[str]
    exit_code: int


# ------------------------------------------------------------------------------
# Verdicts in a sentence. A difference counts as shown where its 95 % interval lies wholly on one side of zero; a
# baseline counts as a fixed number.

HEADLINES = ("accuracy", f"ndcg@{DEPTH}")


def level_text(found: Evaluation, *, who: str = "") -> str:
    """Whether each headline figure is above its best baseline; empty where it has none.

    Args:
        who: begins the sentence, where there are several sets.
    """
    kinds = {
        "constant": f"the constant grade {found.baselines.grade}",
        "random": "a random order",
        "lexical": "shared words alone",
    }
    parts = []
    for name in HEADLINES:
        figure, bounds = found.figures.get(name), found.baselines.of(name)
        if figure is None or figure.value is None or not bounds:
            continue
        kind, bound = max(bounds.items(), key=lambda item: item[1])
        if figure.low is None or figure.high is None:
            interval, place = "no interval", "next to"
        else:
            interval = f"{figure.low:.3f} to {figure.high:.3f}"
            place = "above" if figure.low > bound else "below" if figure.high < bound else "not shown to beat"
        value = f"{title_of(name)} {figure.value:.3f} ({interval}, {figure.over:,} {figure.unit})"
        parts.append(f"{value} is {place} {kinds[kind]} with {bound:.3f}")
    return f"{who}{'; '.join(parts)}" if parts else ""


def difference_text(who: str, steps: Mapping[str, Difference]) -> str:
    """Whether two sets differ in the headline figures; empty where they have none. `who` begins the sentence."""
    verdicts: dict[str, list[str]] = {}
    for name in HEADLINES:
        step = steps.get(name)
        if step is None or step.value is None:
            continue
        text, verdict = f"{title_of(name)} {step.value:+.3f}", "no interval, so no difference is shown"
        if step.low is not None and step.high is not None:
            text += f", {step.low:+.3f} to {step.high:+.3f}"
            verdict = "better" if step.low > 0 else "worse" if step.high < 0 else "no difference is shown"
        verdicts.setdefault(verdict, []).append(text)
    shown = "; ".join(f"{verdict}: {' and '.join(parts)}" for verdict, parts in verdicts.items())
    return f"{who}: {shown}" if shown else ""


def verdicts_of(one: ComparedStudent) -> list[str]:
    """Whether a student differs from its teacher by gold, and beats the baselines; empty without gold."""
    found = one.against_gold
    if found is None:
        return []
    difference = difference_text(f"{one.student} against {one.teacher}, by gold", found.difference)
    return [difference, level_text(found.student, who=f"{one.student}: ")]


# ------------------------------------------------------------------------------
# Tables and plots of figures.


def figure_title(figure: str, sides: Mapping[str, Mapping[str, MetricValue]]) -> str:
    """A figure's name, with a word where it ranks by the written grade for want of distributions.

    Args:
        sides: figures of each set, by the set's name.
    """
    there = [side for side, figures in sides.items() if figure in figures]
    by_grade = [side for side in there if sides[side][figure].is_by_grade]
    whose = "" if len(by_grade) == len(there) else f" of {' and '.join(by_grade)}"
    return title_of(figure) + (f" by written grade{whose}" if by_grade else "")


def figures_table(
    caption: str,
    figures: Mapping[str, MetricValue],
    *,
    title: Callable[[str], str] | None = None,
    baselines: Baselines | None = None,
) -> Table:
    """Figures with their intervals; `title` names them, where they are not those of `evaluate`."""
    head = ["figure", "value", "95 % interval", "over", *(["baseline"] if baselines else [])]
    rows: list[list[Cell]] = [
        [
            title(name) if title else figure_title(name, {"": figures}),
            "undefined" if one.value is None else one.value,
            "" if one.low is None else f"{one.low:.4f} to {one.high:.4f}",
            f"{one.over:,} {one.unit}",
            *([baselines.text(name)] if baselines else []),
        ]
        for name, one in figures.items()
    ]
    return Table(caption, head, rows)


def both_table(
    caption: str, names: tuple[str, str], first: Evaluation, second: Evaluation, difference: Mapping[str, Difference]
) -> Table:
    """Figures of two sets, and the second minus the first with its interval."""
    sides = {names[0]: first.figures, names[1]: second.figures}
    rows: list[list[Cell]] = []
    for figure in {**first.figures, **second.figures}:
        held = [figures[figure] for figures in sides.values() if figure in figures]
        step = difference.get(figure)
        has_interval = step is not None and step.low is not None
        over = " and ".join(dict.fromkeys(f"{one.over:,}" for one in held))
        rows.append(
            [
                figure_title(figure, sides),
                *(figures[figure].value if figure in figures else None for figures in sides.values()),
                "" if step is None or step.value is None else f"{step.value:+.4f}",
                f"{step.low:+.4f} to {step.high:+.4f}" if step and has_interval else "",
                f"{over} {held[0].unit}",
                second.baselines.text(figure),
            ]
        )
    head = ("figure", *names, f"{names[1]} - {names[0]}", "95 % interval", "over", "baseline")
    return Table(caption, head, rows)


def figures_plot(title: str, sides: Mapping[str, Mapping[str, MetricValue]]) -> Plot:
    """The main figures of some sets, by their names, with intervals."""
    names = [metric.name for metric in METRICS if metric.is_drawn]
    series = []
    for side, figures in sides.items():
        shown = {name: one for name in names if (one := figures.get(name)) is not None and one.value is not None}
        titles = [figure_title(name, {"": figures}) for name in shown]
        values = [one.value for one in shown.values() if one.value is not None]
        bounds = [one.low for one in shown.values()], [one.high for one in shown.values()]
        series.append(Series(side, titles, values, *bounds))
    return Plot(title, "intervals", series, "value, with its 95 % interval")


# ------------------------------------------------------------------------------
# The whole of a result as blocks.


def evaluation_blocks(result: JudgedLabels, *, name: str = "") -> list[Block]:
    """One evaluation.

    Args:
        name: of the set, where several are on a page.
    """
    counts = result.counts
    of, drawn = f" of {name}" if name else "", f"{result.num_groups:,} {result.resampled}"
    facts: list[tuple[str, Cell]] = [
        ("labels", f"{counts['labels']:,}, {result.grades} grades"),
        ("judged", f"{counts['judged']:,}, joined by {' and '.join(result.joined_by)}"),
        ("unjudged", unjudged_text(counts)),
        ("quarantined", f"{counts['quarantined']:,}; {counts['without_label']:,} rows without a readable label"),
        ("resampled", resampled_text(drawn, result.num_groups, result.resamples, result.seed)),
    ]
    if "qrels" in counts:
        without = f"{counts['qrels_without_label']:,} of them graded and not labelled"
        facts.append(("qrels", f"{counts['qrels']:,} pairs, {without}"))
    paths = ", ".join(str(source["path"]) for source in result.labels)
    blocks: list[Block] = [
        *top_texts([level_text(result, who=f"{name}: " if name else "")], result.side),
        Facts(f"Labels of {paths} judged by {result.qrels}", facts),
        figures_table(f"figures{of}", result.figures, baselines=result.baselines),
        confusion_table(result.confusion, "gold", "label", caption=f"gold grades by labels{of}"),
    ]
    if result.reliability:
        bins: list[list[Cell]] = [
            [f"{one.from_:.2f} to {one.to:.2f}", one.rows, one.confidence, one.accuracy] for one in result.reliability
        ]
        blocks.append(Table(f"reliability{of}", ("confidence", "rows", "mean", "accuracy"), bins))
    return [*blocks, *closing_blocks(result.notes, result.gates)]


def comparison_blocks(one: ComparedStudent, result: ComparedSets) -> list[Block]:
    """One student compared with the teacher."""
    counts, kinds = one.counts, {held["name"]: held["kind"] for held in result.sets}
    facts: list[tuple[str, Cell]] = [
        (
            "labels",
            f"{counts['teacher']:,} of the teacher, {counts['student']:,} of the student, {result.grades} grades",
        ),
        ("matched", f"{counts['matched']:,} rows of {counts['queries']:,} queries, by {one.matched_by}"),
        (
            "unmatched",
            f"{counts['only_teacher']:,} of the teacher, {counts['only_student']:,} of the student, left out",
        ),
        *(
            [("judged", f"{counts['judged']:,} of them, joined by {one.joined_by}; {unjudged_text(counts)}")]
            if one.against_gold
            else []
        ),
        ("resampled", resampled_text("queries", counts["queries"], result.resamples, result.seed)),
    ]
    teacher, student = (f"{name} ({kinds[name]})" for name in (one.teacher, one.student))
    names = one.teacher, one.student

    def title(figure: str) -> str:
        return title_of(figure, AGAINST_TEACHER).replace("teacher ‖ student", " ‖ ".join(names))

    blocks: list[Block] = [
        Facts(f"teacher {teacher}, student {student}", facts),
        figures_table(f"{one.student} against {one.teacher}", one.against_teacher, title=title),
        confusion_table(one.confusion, *names),
    ]
    if one.against_gold:
        caption = f"both against {result.qrels}"
        blocks.append(
            both_table(caption, names, one.against_gold.teacher, one.against_gold.student, one.against_gold.difference)
        )
    return [*blocks, Remarks(one.notes)]


def sets_blocks(result: ComparedSets) -> list[Block]:
    """All students: verdicts first."""
    verdicts = [line for one in result.comparisons for line in verdicts_of(one)]
    blocks = [block for one in result.comparisons for block in comparison_blocks(one, result)]
    gates = [verdict for one in result.comparisons for verdict in one.gates]
    names = [one.student for one in result.comparisons for _ in one.gates] if len(result.comparisons) > 1 else []
    return [*top_texts(verdicts, result.side), *blocks, *closing_blocks(result.notes, gates, names)]


def top_texts(verdicts: Sequence[str], side: SideCut) -> list[Paragraph]:
    """What comes first: verdicts, a sentence each, and which rows are judged."""
    return [*(Paragraph(line) for line in verdicts if line), *(Paragraph(line, "warn") for line in side.lines())]


def closing_blocks(notes: Sequence[str], gates: Sequence[GateVerdict], names: Sequence[str] = ()) -> list[Block]:
    """Remarks, then the result of each `--require`; `names` are the students that the gates judge, where several."""
    rows: list[list[Cell]] = [
        [gate.gate, Badge("passed", "good") if gate.has_passed else Badge("refused", "bad"), gate.value, gate.bound]
        for gate in gates
    ]
    head = ["gate", "verdict", "value", "bound"]
    if names:
        head, rows = ["student", *head], [[name, *row] for name, row in zip(names, rows, strict=True)]
    return [Remarks(notes), *([Table("", head, rows)] if rows else [])]


def unjudged_text(counts: Mapping[str, int]) -> str:
    return f"{counts['unjudged']:,} without a gold grade, {counts['gold_null']:,} with a null one"


def resampled_text(what: str, groups: int, resamples: int, seed: int) -> str:
    """What the intervals are drawn from."""
    if not resamples or groups < 2:
        return "nothing, so there are no intervals"
    return f"{what}, {resamples:,} times, seed {seed}"
