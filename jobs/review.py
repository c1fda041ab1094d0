"""Writes the pairs of a run that people should look at first, and makes gold of what they judged.

How often each order meets a wrong label was measured before one became the default: `benchmarks/review_order.py`. None
met three times as many as a random order, so that is the default.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.jobs.evaluate import named_path
from relabel.jobs.output import grid
from relabel.jobs.tables import check_free, written
from relabel.labelers.prompts import EXAMPLES_NAME, PersonsExample
from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.files import Storage
from relabel.manifests.forms import (
    CSV,
    FORMS,
    JSONL,
    LABEL_STUDIO,
    OPENSEARCH,
    PARQUET,
    QRELS,
    QUEPID,
    SHEETS,
    TSV,
    Form,
    form_by_suffix,
    form_of,
    load_columns,
    read_text,
)
from relabel.manifests.gold import IN_PROMPT, REVIEW_ORDER, SELECTION
from relabel.manifests.judgments import Heading, sheet_row, write_label_studio
from relabel.manifests.label_sets import gather, join_texts, label_set, open_labels
from relabel.manifests.labels import ids_of, pair_codes, texts_of
from relabel.manifests.metrics.comparison import Labelled
from relabel.manifests.metrics.metric import finite, kappa
from relabel.manifests.records import as_object, checked
from relabel.manifests.run_labels import RunLabels, open_run_labels
from relabel.manifests.secrets import counted, one_line, shortened
from relabel.manifests.tables import Column, NeededColumn, as_ids, read_grades, require_columns

TARGETS = (LABEL_STUDIO, QUEPID, OPENSEARCH, PARQUET, JSONL, CSV, TSV)
"""What pairs for people are written as."""
GOLD_TARGETS = (PARQUET, JSONL, CSV, TSV)
PEOPLE = ("who", "when", "why")
MOST_EXAMPLES = 6
"""Pairs that a prompt gets."""
EXAMPLE_CHARACTERS = 600
"""Of such a pair's document."""
SHOWN = 5
SHOWN_CHARACTERS = 60

_PAIR = pa.schema(
    [
        ("place", pa.int64()),
        ("row_id", pa.int64()),
        ("query_id", pa.string()),
        ("query", pa.string()),
        ("doc_id", pa.string()),
        ("document", pa.string()),
        ("judge_grade", pa.int64()),
        (REVIEW_ORDER, pa.string()),
    ]
)
"""A pair for people: `place` counts from 1, the most valuable."""
_TO_FILL = pa.schema(
    [
        ("grade", pa.int64()),
        ("who", pa.string()),
        ("when", pa.string()),
        ("why", pa.string()),
    ]
)
"""What people add in a table."""
_GOLD = pa.schema(
    [
        ("query_id", pa.string()),
        ("doc_id", pa.string()),
        *_TO_FILL,
        ("judge_grade", pa.int64()),
        ("is_conflict", pa.bool_()),
        (REVIEW_ORDER, pa.string()),
        (IN_PROMPT, pa.bool_()),
    ]
)


@dataclass(frozen=True)
class ReviewOptions:
    """What `relabel review` was given.

    Args:
        order: `random`, `doubt` or `second`; None for `second` with a second opinion, else `random`.
        second: a second opinion: a run or a label file.
        pairs: that are written at most.
        queries: a file with a plan of `relabel systems`, whose documents are written, all of them.
        blind: leave out the run's label, so that it sways nobody.
        seed: of the random order, and of pairs that are worth the same.
        examples: folder of prompt templates that gets judged pairs with their reasons.
    """

    order: str | None = None
    second: str | None = None
    pairs: int = 200
    queries: str | None = None
    blind: bool = False
    seed: int = 7
    examples: str | None = None
    allow_partial: bool = False
    force: bool = False


# ------------------------------------------------------------------------------
# Out: the pairs that are worth most.


@dataclass(frozen=True)
class Picked:
    """Pairs for people.

    Args:
        is_planned: the pairs are those of a plan's queries (`ReviewOptions.queries`).
        labelled: rows of the run that have a label.
        pairs: that were written, of so many `queries`.
        without_second: rows of the run that the second opinion lacks; they come last.
        without_label: pairs of the plan that the run has no label of; they are left out.
        grades: of the run's scale.
    """

    run: str
    target: str
    form: str
    order: str
    is_blind: bool
    is_planned: bool
    labelled: int
    pairs: int
    queries: int
    without_second: int
    without_label: int
    grades: int

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        return as_object(self)

    def lines(self) -> list[str]:
        """For people: what was chosen, and what comes next."""
        rows = [
            ("chosen of", f"{self.labelled:,} labelled pairs"),
            ("order", "that of the plan's queries" if self.is_planned else self.order),
            ("queries", f"{self.queries:,}"),
        ]
        if self.without_second:
            rows.append(("last", f"{counted(self.without_second, 'pair')} that the second opinion lacks"))
        scale = f"0 to {self.grades - 1}"
        if self.form == LABEL_STUDIO.name:
            rows.append(("to do", f"import it, have people judge, grades {scale}, and export JSON"))
            back = "EXPORT.json"
        else:
            column = "rating" if self.form in (QUEPID.name, OPENSEARCH.name) else "grade"
            rows.append(("to do", f"have `{column}` filled in, {scale}"))
            back = f"NAME={shlex.quote(self.target)}"
        rows.append(("then", f"relabel review {shlex.quote(self.run)} --from {back} --to gold.parquet"))
        lines = [one_line(f"Wrote {counted(self.pairs, 'pair')} to {self.target} ({self.form})"), grid(rows)]
        if self.without_label:
            lines.append(
                f"{self.without_label:,} documents of the plan have no label in {self.run} and are left out. Have them "
                "labelled first (`relabel pairs unjudged`): a query of which less than 80 % is graded does not count."
            )
        return lines


def pick_pairs(root: str, target: str, options: ReviewOptions, storage: Storage) -> Picked:
    """Write the pairs of a finished run that are worth most, the first first.

    Raises:
        UsageError: the target's form is unclear, it is there already, or options do not go together.
        InputError: the input is gone or another, the second opinion can't be read, or the form can't hold a text.
        ManifestError: the run is unfinished, over its limit or damaged.
    """
    form = _target_form(target, TARGETS)
    if options.blind and form is OPENSEARCH:
        raise UsageError(
            f"--blind: {target} holds a rating of every pair, which is the run's label. Choose another form."
        )
    order = options.order or ("random" if options.second is None else "second")
    if (order == "second") != (options.second is not None):
        raise UsageError("--order second and --second LABELS go together: the pairs where two judges differ most.")
    inputs = [path for path in (root, options.second, options.queries) if path is not None]
    check_free(target, inputs, storage, force=options.force)
    run = open_run_labels(root, storage, allow_partial=options.allow_partial)
    labels = _labels_of(run)
    without_second = 0
    without_label = 0
    pairs = options.pairs
    if options.queries is not None:
        value_N, without_label = _places_in_plan(labels, options.queries, storage)
        pairs = int((value_N > -np.inf).sum())
    elif options.second is None:
        value_N = _values(order, labels, run.grades)
    else:
        value_N = _distances(labels, options.second, run.grades, options, storage)
        without_second = int((value_N < 0).sum())
    tie_N = np.random.default_rng(options.seed).random(len(value_N))
    first = np.lexsort((tie_N, -value_N))[:pairs]
    table = _pairs_table(run, labels.row_ids[first], order, storage)
    if options.blind:
        table = table.drop_columns(["judge_grade"])
    _check_writable(table, form, root)
    with written(target, storage) as file:
        if form is LABEL_STUDIO:
            write_label_studio(file, [table], run.plan.name)
        else:
            assert form.write is not None
            rows = _rows_of_form(table, form)
            form.write(file, rows.schema, iter([rows]), Heading(name=run.plan.name))
    return Picked(
        run=root,
        target=target,
        form=form.name,
        order=order,
        is_blind=options.blind,
        is_planned=options.queries is not None,
        labelled=len(value_N),
        pairs=table.num_rows,
        queries=len(set(table["query_id"].to_pylist())),
        without_second=without_second,
        without_label=without_label,
        grades=run.grades,
    )


def _target_form(target: str, forms: Sequence[Form]) -> Form:
    form = form_by_suffix(target, forms)
    if form is None:
        suffixes = ", ".join(f"{suffix} ({one.name})" for one in forms for suffix in one.suffixes)
        raise UsageError(f"{target}: its form is not clear from its name. Known suffixes are {suffixes}.")
    return form


def _labels_of(run: RunLabels) -> Labelled:
    if run.grades == 0:
        name = run.plan.facts.labeler.name
        raise InputError(f"{run.root}: labeler {name} gives no grades, so there are none to review.")
    return gather(label_set(run).parts(), grades=run.grades, where=run.root)


def _values(order: str, labels: Labelled, grades: int) -> np.ndarray:
    """What a look at each pair is worth, the highest first: float64 [N]."""
    if order == "random":
        return np.zeros(len(labels.grades))
    if labels.probs is None:
        raise UsageError(
            f"--order {order}: {labels.where} has no distributions. Choose --order random, or give a --second opinion."
        )
    relevant_N = labels.probs[:, grades // 2 :].sum(1)
    other_side_N = np.where(labels.grades >= grades // 2, 1 - relevant_N, relevant_N)
    return np.asarray(np.nan_to_num(other_side_N, nan=1.0))


def _distances(labels: Labelled, second: str, grades: int, options: ReviewOptions, storage: Storage) -> np.ndarray:
    """The distance of each label to the second opinion's, float64 [N]; -1 where it has none."""
    opened = open_labels(second, storage, allow_partial=options.allow_partial)
    others = gather(opened.parts(), grades=grades, where=second)
    query_ids = pa.concat_arrays([labels.query_ids, others.query_ids])
    doc_ids = pa.concat_arrays([labels.doc_ids, others.doc_ids])
    codes = pair_codes(query_ids, doc_ids)
    own_N = codes[: len(labels.grades)]
    known_M, first_M = np.unique(codes[len(labels.grades) :], return_index=True)
    if not len(known_M):
        return np.full(len(own_N), -1.0)
    place_N = np.minimum(np.searchsorted(known_M, own_N), len(known_M) - 1)
    distance_N = np.abs(labels.grades - others.grades[first_M][place_N]).astype(float)
    return np.where(known_M[place_N] == own_N, distance_N, -1.0)


def _places_in_plan(labels: Labelled, path: str, storage: Storage) -> tuple[np.ndarray, int]:
    """Of each label the place of its query in a plan of `relabel systems`, from 0 downwards, -inf for a pair that the
    plan does not ask for: float64 [N]; and how many pairs of the plan have no label.

    Raises:
        InputError: the file holds no such plan, or the run has a label of none of its pairs.
    """
    text = read_text(path, storage)
    try:
        asked = checked(dict[str, list[str]], json.loads(text)["plan"]["documents"])
    except (ValueError, LookupError, TypeError) as exc:
        raise InputError(f"{path}: is not what `relabel systems … --plan --output json` prints.") from exc
    open_pairs = {(query, doc) for query, docs in asked.items() for doc in docs}
    num_asked = len(open_pairs)
    if not num_asked:
        raise InputError(f"{path}: the plan names no query; its `plan.reason` says why.")
    query_N = pc.index_in(labels.query_ids, value_set=ids_of(asked)).fill_null(-1).to_numpy()
    value_N = np.full(len(query_N), -np.inf)
    rows = np.flatnonzero(query_N >= 0)
    ids = (texts_of(column.take(pa.array(rows))) for column in (labels.query_ids, labels.doc_ids))
    for row, pair in zip(rows.tolist(), zip(*ids, strict=True), strict=True):
        if pair in open_pairs:
            open_pairs.remove(pair)
            value_N[row] = -float(query_N[row])
    if len(open_pairs) == num_asked:
        raise InputError(f"{path}: {labels.where} has a label of none of its {num_asked:,} documents. Is it the run?")
    return value_N, len(open_pairs)


def _pairs_table(run: RunLabels, row_ids: np.ndarray, order: str, storage: Storage) -> pa.Table:
    """These rows with their texts, in this order; `order` is its name."""
    _, tables = join_texts(run, storage)
    wanted = set(row_ids.tolist())
    rows: dict[int, dict[str, Any]] = {}
    for table in tables:
        is_wanted = [row in wanted for row in table["row_id"].to_pylist()]
        columns = table.select(["row_id", "query_id", "query", "doc_id", "document", "grade"])
        for row in columns.filter(pa.array(is_wanted)).to_pylist():
            row["judge_grade"] = row.pop("grade")
            rows[row["row_id"]] = row
    picked = [rows[row] | {"place": place, REVIEW_ORDER: order} for place, row in enumerate(row_ids.tolist(), start=1)]
    return pa.Table.from_pylist(picked, schema=_PAIR)


def _rows_of_form(table: pa.Table, form: Form) -> pa.Table:
    """Pairs as a form's writer wants them. Quepid gets no grade, so that a file that nobody filled in is no gold."""
    size = table.num_rows
    if not form.columns:
        for field in _TO_FILL:
            table = table.append_column(field, pa.nulls(size, field.type))
        return table
    grades = table["judge_grade"] if form is OPENSEARCH else pa.nulls(size, pa.int64())
    columns = {"query_id": table["query"], "query": table["query"], "doc_id": table["doc_id"], "grade": grades}
    return pa.table(columns)


def _check_writable(table: pa.Table, form: Form, root: str) -> None:
    """Raise where a form can't hold a text, naming the first row that has one."""
    if not form.unwritable:
        return
    for name in ("query", "doc_id"):
        is_odd = pa.compute.match_substring_regex(table[name], form.unwritable).to_pylist()
        if any(is_odd):
            row = table.slice(is_odd.index(True), 1).to_pylist()[0]
            raise InputError(
                f"{root}: row {row['row_id']}: `{name}` is {row[name][:SHOWN_CHARACTERS]!r} ({sum(is_odd):,} such "
                f"rows), which {form.name} can't hold: {form.limits}. Write .labelstudio.json, .parquet or .jsonl."
            )


# ------------------------------------------------------------------------------
# In: what people judged.


class Opinion(NamedTuple):
    """One person's grade of a pair."""

    query_id: str
    doc_id: str
    grade: int
    who: str
    when: str | None
    why: str | None

    @property
    def pair(self) -> tuple[str, str]:
        """Its query and document."""
        return self.query_id, self.doc_id


@dataclass
class Origins:
    """What files say of pairs, by query and document.

    Args:
        orders: by which `--order` each was chosen for people.
        in_prompt: those that are examples in a prompt.
    """

    orders: dict[tuple[str, str], str] = field(default_factory=dict)
    in_prompt: set[tuple[str, str]] = field(default_factory=set)


@dataclass(frozen=True)
class Agreement:
    """Of two people over the pairs of which each gave one grade.

    Args:
        kappa: Cohen's; None where chance alone would have them agree, or without a pair.
    """

    first: str
    second: str
    pairs: int
    equal: int
    kappa: float | None


@dataclass(frozen=True)
class Conflict:
    """A pair with several grades: those of each person."""

    query_id: str
    doc_id: str
    grades: dict[str, list[int]]


@dataclass(frozen=True)
class Gathered:
    """Gold of people.

    Args:
        judgments: rows written, one for each pair and person; what was given twice is one.
        not_judged: rows of the files that have no grade.
        not_of_run: judgments of pairs that the run did not label.
        as_judge: judgments that equal the run's label.
        examples: judged pairs that went into `--examples`.
    """

    run: str
    target: str
    judgments: int
    pairs: int
    people: list[str]
    not_judged: int
    not_of_run: int
    as_judge: int
    examples: int
    agreement: list[Agreement]
    conflicts: list[Conflict]

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        return as_object(self)

    def lines(self) -> list[str]:
        """The result for people."""
        head = (
            f"Wrote {counted(self.judgments, 'judgment')} of {counted(self.pairs, 'pair')} by {', '.join(self.people)} "
            f"to {self.target}"
        )
        of_run = self.judgments - self.not_of_run
        counts = [("as the run's label", f"{self.as_judge:,} of {counted(of_run, 'judgment')}")]
        if self.not_of_run:
            counts.append(("not of the run", f"{counted(self.not_of_run, 'judgment')}, of pairs without a label"))
        if self.not_judged:
            counts.append(("not judged", counted(self.not_judged, "row")))
        if self.conflicts:
            counts.append(("in conflict", counted(len(self.conflicts), "pair")))
        lines = [one_line(head), grid(counts)]
        if self.examples:
            lines.append(
                f"{self.examples} of the pairs are examples for a prompt now (`{IN_PROMPT}`): they can't test it."
            )
        if self.agreement:
            rows = [("people", "pairs", "equal", "Cohen kappa")]
            rows += [
                (f"{one.first}, {one.second}", f"{one.pairs:,}", f"{one.equal:,}", _kappa_text(one.kappa))
                for one in self.agreement
            ]
            lines.append(grid(rows, right=(1, 2, 3)))
        for conflict in self.conflicts[:SHOWN]:
            grades = "; ".join(f"{who} {', '.join(map(str, held))}" for who, held in conflict.grades.items())
            lines.append(one_line(f"conflict: query {conflict.query_id}, document {conflict.doc_id}: {grades}"))
        if len(self.conflicts) > SHOWN:
            lines.append(f"and {len(self.conflicts) - SHOWN:,} more conflicts, in --output json and by `is_conflict`")
        command = f"relabel evaluate {shlex.quote(self.run)} --qrels {shlex.quote(self.target)}"
        if self.conflicts:
            command += " --duplicates mean"
        lines.append(one_line(f"To judge the run by them: {command}"))
        return lines


def _kappa_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def gather_gold(root: str, sources: Sequence[str], target: str, options: ReviewOptions, storage: Storage) -> Gathered:
    """Write what people judged as gold: all judgments, whatever others say of the pair.

    Args:
        sources: `FILE`, or `NAME=FILE` where a file does not say who judged.
    Raises:
        UsageError: the target's form is unclear, it is there already, or nobody is named.
        InputError: a file can't be read, or a grade is off the run's scale.
        ManifestError: the run is unfinished, over its limit or damaged.
    """
    form = _target_form(target, GOLD_TARGETS)
    named = [named_path(source) for source in sources]
    check_free(target, [root, *(path for _, path in named)], storage, force=options.force)
    run = open_run_labels(root, storage, allow_partial=options.allow_partial)
    labels = _labels_of(run)
    forms = [form_of(path, FORMS, storage) or QRELS for _, path in named]
    is_by_text = any(one.is_by_text for one in forms)
    ids = _ids_by_text(run, storage) if is_by_text else {}
    opinions: list[Opinion] = []
    origins = Origins()
    not_judged = 0
    for (who, path), source in zip(named, forms, strict=True):
        read, missing = _read_opinions(path, who, source, ids, run.grades, origins, storage)
        opinions += read
        not_judged += missing
    opinions = list(dict.fromkeys(opinions))
    judge = _judge_grades(labels)
    judge_grades = [judge.get(one.pair) for one in opinions]
    conflicts = _conflicts(opinions)
    in_conflict = {(one.query_id, one.doc_id) for one in conflicts}
    examples: list[Opinion] = []
    if options.examples is not None:
        examples = _explained(opinions, in_conflict, judge)
        _write_examples(Path(options.examples) / EXAMPLES_NAME, run, examples, options, storage)
        origins.in_prompt.update(one.pair for one in examples)
    rows = [
        one._asdict()
        | {
            "judge_grade": grade,
            "is_conflict": one.pair in in_conflict,
            REVIEW_ORDER: origins.orders.get(one.pair),
            IN_PROMPT: one.pair in origins.in_prompt,
        }
        for one, grade in zip(opinions, judge_grades, strict=True)
    ]
    table = pa.Table.from_pylist(rows, schema=_GOLD)
    assert form.write is not None
    with written(target, storage) as file:
        form.write(file, table.schema, iter([table]), Heading())
    return Gathered(
        run=root,
        target=target,
        judgments=len(opinions),
        pairs=len({(one.query_id, one.doc_id) for one in opinions}),
        people=sorted({one.who for one in opinions}),
        not_judged=not_judged,
        not_of_run=judge_grades.count(None),
        as_judge=sum(one.grade == grade for one, grade in zip(opinions, judge_grades, strict=True)),
        examples=len(examples),
        agreement=_agreements(opinions, run.grades),
        conflicts=conflicts,
    )


def _ids_by_text(run: RunLabels, storage: Storage) -> dict[tuple[str, str], list[str]]:
    """The query ids of the run's pairs, by the query's text and the document's id."""
    ids: dict[tuple[str, str], dict[str, None]] = {}
    for table in join_texts(run, storage)[1]:
        texts, docs, names = (table[name].to_pylist() for name in ("query", "doc_id", "query_id"))
        for text, doc, name in zip(texts, docs, names, strict=True):
            ids.setdefault((text, doc), {})[name] = None
    return {pair: list(names) for pair, names in ids.items()}


def _judge_grades(labels: Labelled) -> dict[tuple[str, str], int]:
    """The run's grade of each pair; of a pair that it has several times, the first."""
    grades: dict[tuple[str, str], int] = {}
    pairs = zip(texts_of(labels.query_ids), texts_of(labels.doc_ids), strict=True)
    for pair, grade in zip(pairs, labels.grades.tolist(), strict=True):
        grades.setdefault(pair, grade)
    return grades


def _read_opinions(
    path: str,
    who: str | None,
    form: Form,
    ids: dict[tuple[str, str], list[str]],
    grades: int,
    origins: Origins,
    storage: Storage,
) -> tuple[list[Opinion], int]:
    """The judgments of a file, and how many of its rows have no grade.

    Args:
        who: judged them all; None where the file says it.
        ids: see `_ids_by_text`; for a form that knows a query by its text.
        origins: gets what the file says of its pairs.
    Raises:
        InputError: it lacks a column, a grade is none of the run's scale, no row has one, or nobody is named.
    """

    def choose(names: list[str]) -> list[str]:
        needed = (
            NeededColumn("query_id", "the query id"),
            NeededColumn("doc_id", "the document id"),
            NeededColumn("grade", "the grade"),
        )
        require_columns(needed, names, path=path)
        return ["query_id", "doc_id", "grade", *(name for name in (*PEOPLE, *SELECTION) if name in names)]

    columns = load_columns(path, choose, storage)
    row_text = partial(_row_text, form)
    given = read_grades(columns["grade"]).readable(path, "grade", row_text=row_text)
    if given.null_count == len(given):
        rows = f"{len(given):,} rows" if len(given) else "pairs"
        raise InputError(f"{path}: none of its {rows} has a grade. Is it the filled-in file?")
    query_ids = texts_of(as_ids(columns["query_id"], path=path, name="query_id", row_text=row_text))
    doc_ids = texts_of(as_ids(columns["doc_id"], path=path, name="doc_id", row_text=row_text))
    _check_grades(path, form, given, query_ids, doc_ids, grades)
    people = [_texts_or_none(columns.get(name), len(given)) for name in PEOPLE]
    orders = _texts_or_none(columns.get(REVIEW_ORDER), len(given))
    in_prompt = _texts_or_none(columns.get(IN_PROMPT), len(given))
    opinions = []
    for row, (query, doc, grade) in enumerate(zip(query_ids, doc_ids, given.to_pylist(), strict=True)):
        if grade is None:
            continue
        person, when, why = (column[row] for column in people)
        person = who or person
        if person is None:
            raise InputError(f"{path}: {row_text(row)} has a grade, and no `who`. Say who judged: --from NAME={path}.")
        names = ids.get((query, doc), [query]) if form.is_by_text else [query]
        opinions += [Opinion(name, doc, grade, person, when, why) for name in names]
        for name in names:
            order = orders[row]
            if order is not None:
                origins.orders.setdefault((name, doc), order)
            if in_prompt[row] == str(True):
                origins.in_prompt.add((name, doc))
    return opinions, given.null_count


def _row_text(form: Form, row: int) -> str:
    """A row of what people filled in, counted from 0, as they find it."""
    return sheet_row(row) if form in SHEETS else f"row {row + 1}"


def _check_grades(
    path: str,
    form: Form,
    given: pa.Int64Array,
    query_ids: Sequence[str],
    doc_ids: Sequence[str],
    grades: int,
) -> None:
    """
    Raises:
        InputError: a grade is off the scale; names the first row that has one.
    """
    grade_N = given.to_numpy(zero_copy_only=False)  # NaN where there is none
    rows = np.flatnonzero((grade_N < 0) | (grade_N >= grades))
    if len(rows):
        row = int(rows[0])
        further = f" (and {len(rows) - 1:,} further rows)" if len(rows) > 1 else ""
        where = f"{_row_text(form, row)}, query {query_ids[row]}, document {doc_ids[row]}"
        raise InputError(
            f"{path}: {where}: grade {given[row]} is off the scale{further}. Grades of this run are 0 to {grades - 1}."
        )


def _explained(
    opinions: Sequence[Opinion], in_conflict: set[tuple[str, str]], judge: dict[tuple[str, str], int]
) -> list[Opinion]:
    """A few judgments with a reason, one of each grade in turn, of each grade first those that the run got most wrong.

    Raises:
        InputError: there is none.
    """
    explained: dict[tuple[str, str], Opinion] = {}
    for opinion in opinions:
        if opinion.why is not None and opinion.pair in judge and opinion.pair not in in_conflict:
            explained.setdefault(opinion.pair, opinion)
    if not explained:
        raise InputError(
            "--examples: no judgment of the run's pairs has a reason (`why`) and no conflict. Nothing was written."
        )
    by_grade: dict[int, list[Opinion]] = {}
    for opinion in sorted(explained.values(), key=lambda opinion: -abs(opinion.grade - judge[opinion.pair])):
        by_grade.setdefault(opinion.grade, []).append(opinion)
    turns = zip_longest(*(by_grade[grade] for grade in sorted(by_grade)))
    return [opinion for turn in turns for opinion in turn if opinion is not None][:MOST_EXAMPLES]


def _write_examples(
    target: Path, run: RunLabels, examples: Sequence[Opinion], options: ReviewOptions, storage: Storage
) -> None:
    """Write them with their texts. The same bytes may be there, so that a command that was killed can be given again.

    Raises:
        UsageError: other examples are there.
    """
    texts: dict[tuple[str, str], tuple[str, str]] = {}
    wanted = {opinion.pair for opinion in examples}
    for table in join_texts(run, storage)[1]:
        for row in table.select(["query_id", "doc_id", "query", "document"]).to_pylist():
            pair = (row["query_id"], row["doc_id"])
            if pair in wanted:
                texts.setdefault(pair, (row["query"], row["document"]))
    lines = []
    for opinion in examples:
        query, document = texts[opinion.pair]
        assert opinion.why is not None
        example = PersonsExample(query, shortened(document, EXAMPLE_CHARACTERS), opinion.grade, opinion.why)
        lines.append(json.dumps(asdict(example), ensure_ascii=False) + "\n")
    data = "".join(lines).encode()
    if target.is_file() and target.read_bytes() == data:
        return
    check_free(str(target), [run.root], storage, force=options.force)
    with written(str(target), storage) as file:
        file.write_bytes(data)


def _texts_or_none(column: Column | None, size: int) -> list[str | None]:
    """A column as texts; what is null or empty is None."""
    if column is None:
        return [None] * size
    values = column.to_pylist() if isinstance(column, pa.ChunkedArray) else column
    return [None if value is None or value != value or value == "" else str(value) for value in values]


def _grades_by_pair(opinions: Sequence[Opinion]) -> dict[tuple[str, str], dict[str, list[int]]]:
    """The different grades that each person gave each pair."""
    grades: dict[tuple[str, str], dict[str, list[int]]] = {}
    for one in opinions:
        given = grades.setdefault((one.query_id, one.doc_id), {}).setdefault(one.who, [])
        if one.grade not in given:
            given.append(one.grade)
    return grades


def _conflicts(opinions: Sequence[Opinion]) -> list[Conflict]:
    """Pairs with several grades, of several people or of one."""
    conflicts = []
    for (query, doc), by_person in _grades_by_pair(opinions).items():
        if len({grade for given in by_person.values() for grade in given}) > 1:
            conflicts.append(Conflict(query_id=query, doc_id=doc, grades=by_person))
    return conflicts


def _agreements(opinions: Sequence[Opinion], grades: int) -> list[Agreement]:
    """Of each two people who judged a pair together."""
    by_pair = _grades_by_pair(opinions)
    people = sorted({one.who for one in opinions})
    agreements = []
    for first, second in combinations(people, 2):
        counts_KK = np.zeros((grades, grades))
        for by_person in by_pair.values():
            own = by_person.get(first, [])
            other = by_person.get(second, [])
            if len(own) == len(other) == 1:
                counts_KK[own[0], other[0]] += 1
        if counts_KK.sum():
            agreements.append(
                Agreement(
                    first=first,
                    second=second,
                    pairs=int(counts_KK.sum()),
                    equal=int(np.trace(counts_KK)),
                    kappa=finite(float(kappa(counts_KK, power=0))),
                )
            )
    return agreements
