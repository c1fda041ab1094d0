"""Training conversations for a teacher: rows answered in verified runs or by gold, rebuilt turn by turn with the
labeler's own prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from relabel.distill.students.examples import (
    GoldGrades,
    ProvenRun,
    load_gold,
    open_proven_run,
    read_pairs,
    refuse_twice,
    rejoin,
)
from relabel.distill.students.manifest import LearnedGold, LearnedLabels
from relabel.distill.teachers.evidence import chosen_in, load_evidence_queries
from relabel.distill.teachers.spec import SftData, SftGold, TeacherSpec
from relabel.labelers.base import rendered_sets
from relabel.labelers.evidence import EVIDENCE_SET
from relabel.labelers.registry import Labeler, labeler_class, options_of_run
from relabel.labelers.verdicts import Reader
from relabel.manifests.asks import Answer, Ask, Choice, Distribution, JsonIndices, Sampling, closing_of, opening_of
from relabel.manifests.errors import ConfigError, InputError, RelabelError, VerdictError
from relabel.manifests.files import Storage
from relabel.manifests.gold import check_scale
from relabel.manifests.labels import Label, Pair
from relabel.manifests.plan import shard_row_ids
from relabel.manifests.reuse import AnswerKeys, stage_digests
from relabel.manifests.rows import open_run_input
from relabel.manifests.run import read_labels
from relabel.manifests.schemas import ANSWERS, LabelRow, label_rows
from relabel.manifests.specs import LabelerOptions

# ------------------------------------------------------------------------------
# What a teacher learns from: rows that a labeler has answered, of proven runs, with the labeler that asked them; or
# rows with trusted grades alone.


class AnsweredRow(NamedTuple):
    """One row.

    Args:
        label: what the labeler made of it; None where there is a grade alone.
        grade: of the label, or the trusted one.
        source: number of its run.
        sets: of a whole question, the chunks chosen of each document; it is one for all rows of its query.
    """

    pair: Pair
    grade: int
    label: LabelRow | None = None
    source: int = 0
    sets: tuple[tuple[int, ...], ...] | None = None


@dataclass
class AnsweredRows:
    """All rows that are learned from.

    Args:
        names: of each row, `(source, row_id)`.
        parts: of the runs' plans.
        answers: texts that rows of a query shared, by run and key.
        dropped: rows left out so far, by reason.
    """

    labeler: Labeler
    options: LabelerOptions
    rows: list[AnsweredRow] = field(default_factory=list)
    names: list[tuple[str, int]] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Mapping[bytes, str]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    runs: list[LearnedLabels] = field(default_factory=list)
    gold: LearnedGold | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_of_sets(self) -> bool:
        """Whether its rows are whole questions with the chunks chosen of their documents."""
        return self.options.name == EVIDENCE_SET


def load_answered_rows(spec: TeacherSpec, data: SftData, storage: Storage) -> AnsweredRows:
    """Read runs and gold.

    Raises:
        ConfigError: runs of several labelers, or of another than the spec's.
        InputError: a source is off, or nothing is left.
        ManifestError: a run is unfinished, over its limit, damaged, or its inputs changed.
    """
    gold = None if data.gold is None else load_gold(data.gold, storage, is_learned=not data.runs, key="data.gold")
    if not data.runs:
        assert gold is not None
        assert spec.labeler is not None
        return _gold_alone(spec.labeler, gold)
    for source in data.runs:
        if Path(source.path).is_file():
            raise InputError(
                f"data.runs: {source.path} is a file, which does not say what its labeler asked. Name outputs of "
                "finished runs."
            )
    opened = [open_proven_run(source.path, storage, allow_over_limit=source.allow_over_limit) for source in data.runs]
    options = _options(spec, opened)
    found = AnsweredRows(labeler_class(options.name)(options), options)
    _note_other_prompts(found, opened)
    if found.is_of_sets and gold is not None:
        raise ConfigError(
            f"data.gold: grades say nothing of the chunks that {options.name} chose. Leave it out, or name the chunks "
            "wanted as data.gold.sets, without runs."
        )
    for run in opened:
        _add_run(found, run, gold, storage)
    refuse_twice(found.runs, key="data.runs")
    found.gold = None if gold is None else replace(gold.about, graded_rows=len(found.rows))
    if not found.rows:
        why = ", ".join(f"{count:,} rows {reason}" for reason, count in found.dropped.items())
        raise InputError(f"{', '.join(run.root for run in opened)}: no answer to learn from{': ' * bool(why)}{why}.")
    return found


def _gold_alone(options: LabelerOptions, gold: GoldGrades) -> AnsweredRows:
    found = AnsweredRows(labeler_class(options.name)(options), options)
    graded = [(pair, grade) for pair, grade in zip(gold.pairs, gold.grades, strict=True) if grade is not None]
    if not graded:
        raise InputError(
            f"{gold.source.path}: no row with a grade in `{gold.source.grade}`. There is nothing to learn from."
        )
    check_scale({grade for _, grade in graded}, options.grades, where=gold.source.path, option="data.gold.map")
    found.rows = [AnsweredRow(pair, grade) for pair, grade in graded]
    found.names = [(gold.source.path, pair.row_id) for pair, _ in graded]
    if missing := len(gold.pairs) - len(graded):
        found.dropped["without a trusted grade"] = missing
    found.gold = replace(gold.about, graded_rows=len(graded))
    return found


def _options(spec: TeacherSpec, runs: Sequence[ProvenRun]) -> LabelerOptions:
    """The options of the labeler that asked all runs, or those of the spec's.

    Raises:
        ConfigError: they are not of one labeler.
    """
    first = runs[0]
    held = {run.plan.facts.labeler.name: run.root for run in runs}
    if len(held) > 1:
        listed = ", ".join(f"{root} is of {name}" for name, root in held.items())
        raise ConfigError(f"data.runs: one teacher learns the answers of one labeler, and {listed}.")
    (name,) = held
    if spec.labeler is not None and spec.labeler.name != name:
        raise ConfigError(
            f"`labeler` is {spec.labeler.name}, and {first.root} was labelled by {name}. Leave `labeler` out, or name "
            "runs of it."
        )
    found = spec.labeler or options_of_run(first.plan.parts, first.manifest.spec, where=first.root)
    for run in runs:
        grades = run.plan.facts.labeler.grades
        if grades != found.grades:
            raise ConfigError(f"{run.root}: has {grades} grades, and the labeler here has {found.grades}.")
    return found


def _note_other_prompts(found: AnsweredRows, runs: Sequence[ProvenRun]) -> None:
    """Say which runs were asked with other prompts than those that are learned."""
    ours = stage_digests(found.labeler.probe())
    for run in runs:
        if run.plan.parts.get("stages", ours) != ours:
            found.notes.append(
                f"{run.root}: was asked with other prompts than the labeler's own here; its answers are learned under "
                "these. Set labeler.templates and options as its job had them, if that is not meant."
            )


def _add_run(found: AnsweredRows, run: ProvenRun, gold: GoldGrades | None, storage: Storage) -> None:
    reads = found.labeler.reads
    tables = [read_labels(run.folder, file) for file in run.manifest.labels]
    held = [row for table in tables for row in label_rows(table) if row.status == "ok" and row.grade is not None]
    dataset = open_run_input(run.root, run.plan, storage, reads=reads)
    columns = {name: [getattr(row, name) for row in held] for name in ("row_id", "query_id", "doc_id")}
    if found.is_of_sets:
        rejoin(columns, dataset, run.root)  # the labels are of these rows
        chosen = {row.row_id: row.columns["selected"] for row in held}
        for shard in run.plan.shards:  # holds whole queries, as they were asked: a limit may have cut one
            pairs = read_pairs(dataset, shard_row_ids(run.folder.store, shard))
            for query in chosen_in(chosen, pairs):
                assert query.sets is not None
                found.rows.append(
                    AnsweredRow(query.pair, int(any(query.sets)), source=len(found.runs), sets=query.sets)
                )
                found.names.append((run.root, query.pair.row_id))
        found.runs.append(run.about(weight=1.0, labels=len(held)))
        return
    pairs = rejoin(columns, dataset, run.root)
    trusted = None if gold is None else gold.of(run.root, run.plan, pairs)
    for number, (row, pair) in enumerate(zip(held, pairs, strict=True)):
        assert row.grade is not None
        if trusted is not None and trusted[number] != row.grade:
            is_known = trusted[number] is not None
            found.dropped["with another grade than the trusted one" if is_known else "without a trusted grade"] += 1
            continue
        found.rows.append(AnsweredRow(pair, row.grade, row, len(found.runs)))
        found.names.append((run.root, row.row_id))
    found.parts.append(run.plan.parts)
    found.answers.append(_shared_answers(run))
    found.runs.append(run.about(weight=1.0, labels=len(held)))


def _shared_answers(run: ProvenRun) -> dict[bytes, str]:
    """Texts of answers that rows of a query shared, by key."""
    found: dict[bytes, str] = {}
    for file in run.manifest.answers or ():
        table = run.folder.table(file, ANSWERS, ["key", "text"])
        found.update(zip(table["key"].to_pylist(), table["text"].to_pylist(), strict=True))
    return found


# ------------------------------------------------------------------------------
# What rows of a query shared as the answer to an ask.


MOST_ROUNDS = 3
"""Rounds of `relabel retry` whose shared answers are searched."""


def shared_texts(answered: AnsweredRows, row: AnsweredRow, ask: Ask) -> Iterator[str]:
    """What rows of the query shared as the answer to an ask: in which sample and at which attempt, no file says."""
    if row.label is None:
        return
    keys = AnswerKeys(answered.parts[row.source])
    kept = answered.answers[row.source]
    options = answered.options
    drawn = Sampling(max(ask.sampling.temperature, options.retry_temperature), ask.sampling.top_p)
    for attempt in range(options.attempts):
        put = replace(ask, sampling=drawn) if attempt else ask
        for sample in range(options.samples):
            for retries in range(MOST_ROUNDS + 1):
                text = kept.get(keys.key(put, retries, sample, attempt))
                if text is not None:
                    yield text


# ------------------------------------------------------------------------------
# What a labeler asked about a row and what it was answered, rebuilt from the label: the labeler's own generator
# asks, and its own reader reads what is put together here. A row whose label does not come out of that again is no
# example.


GRADES = ("preliminary", "score")
"""Sections that are decisions on the grade: always learned."""

Span = tuple[int, int]


class AnsweredTurn(NamedTuple):
    """One ask with its answer.

    Args:
        parts: the answer, template text (tags) and data by turns; for an ask without a format its label alone.
        reasoning: characters [start, end) of it that are no grade.
        label: number of the decision's label, for an ask without a format.
    """

    ask: Ask
    parts: tuple[str, ...]
    reasoning: tuple[Span, ...] = ()
    label: int | None = None


class UnlearnableError(RelabelError):
    """A row that gives no example; `args[0]` is why, a phrase to follow a count of rows."""


def check_learnable(options: LabelerOptions, labeler: Labeler, *, has_answers: bool, is_preliminary: bool) -> None:
    """
    Args:
        has_answers: of runs; else there are grades alone.
        is_preliminary: the first grade alone is learned.
    Raises:
        ConfigError: the labeler's answers can't be rebuilt from what there is.
    """
    name, asks = options.name, labeler.probe()
    tags = [section.tag for ask in asks if ask.format is not None for section in ask.format.sections]
    if name == EVIDENCE_SET:
        raise ConfigError(f"labeler {name}: grades name no chunks. Name the column that does, as data.gold.sets.")
    is_lost = "" in tags and not labeler.recalls
    if labeler.reads.siblings or is_lost or not options.grades:
        raise ConfigError(
            f"labeler {name}: its answers can't be put together again from label files, so no teacher learns them."
        )
    first = asks[0].format
    has_first_grade = first is not None and isinstance(first.sections[0], Choice) and len(asks) == 1
    if is_preliminary and not has_first_grade:
        raise ConfigError(f"data.answer: preliminary, and the answers of {name} do not begin with a grade.")
    if not has_answers and tags and not is_preliminary:
        way = "Set data.answer: preliminary, or name" if has_first_grade else "Name"
        raise ConfigError(
            f"data.gold: holds grades, and an answer of {name} has {', '.join(tags) or 'lines'} as well. "
            f"{way} data.runs with such answers, or a labeler that answers with the grade alone (direct)."
        )


def turns_of(answered: AnsweredRows, row: AnsweredRow, *, is_preliminary: bool) -> list[AnsweredTurn]:
    """All asks about a row with their answers.

    Raises:
        UnlearnableError: an answer is not there, can't be read, or reads as another label.
    """
    generator = answered.labeler.label(row.pair)
    ask = next(generator)
    if is_preliminary:
        return [_preliminary(ask, row)]
    turns: list[AnsweredTurn] = []
    num_answered = 0
    try:
        while True:
            if answered.labeler.recalls:
                turn, answer = _recalled(answered.labeler, row, ask, num_answered)
            else:
                turn = _turn(answered, row, ask)
                answer = _answer(turn)
            turns += [turn] if turn is not None else []
            num_answered += answer.finish != "overlong"
            ask = generator.send(answer)
    except VerdictError as exc:
        raise UnlearnableError("whose answer can't be read") from exc
    except StopIteration as end:
        if row.label is not None and not _is_same(end.value, row.label):
            raise UnlearnableError("whose answer reads as another label") from None
    return turns


def _preliminary(ask: Ask, row: AnsweredRow) -> AnsweredTurn:
    assert ask.format is not None
    first = ask.format.sections[0]
    said = row.grade if row.label is None else row.label.columns.get(first.tag)
    if said is None:
        raise UnlearnableError("without a first grade")
    return AnsweredTurn(ask, (opening_of(first), str(said), closing_of(first)))


def _recalled(labeler: Labeler, row: AnsweredRow, ask: Ask, number: int) -> tuple[AnsweredTurn | None, Answer]:
    """What a labeler's own columns hold; nothing is learned of an answer without a legal line."""
    assert row.label is not None
    answer, completion = labeler.recall({"grade": row.grade, **row.label.columns}, ask, number)
    is_learned = completion and answer.finish != "overlong"
    return AnsweredTurn(ask, ("", completion, "")) if is_learned else None, answer


def _turn(answered: AnsweredRows, row: AnsweredRow, ask: Ask) -> AnsweredTurn:
    if ask.format is None:
        (decision,) = ask.decisions
        if not 0 <= row.grade < len(decision.labels):
            raise UnlearnableError("whose grade is off the scale")
        return AnsweredTurn(ask, (decision.labels[row.grade],), label=row.grade)
    if ask.shared_by is None:
        assert row.label is not None
        said = said_in(row.label)
        text = "\n".join(f"{opening_of(s)}{said.get(s.tag, '')}{closing_of(s)}" for s in ask.format.sections)
        return _read_turn(ask, text)
    for text in shared_texts(answered, row, ask):
        turn = _read_turn(ask, text)
        if row.label is None or row.label.intent in (None, Reader(ask.format).read(_answer(turn)).get("intent")):
            return turn
    raise UnlearnableError("whose query's first answer was not kept")


def _read_turn(ask: Ask, text: str) -> AnsweredTurn:
    """
    Raises:
        VerdictError: the text is not in the ask's format.
    """
    assert ask.format is not None
    reader = Reader(ask.format)
    reader.read(Answer(0, text, "stop"))
    spans = []
    at = 0
    for section in ask.format.sections:  # what is between two sections goes with the later one
        end = text.index(closing_of(section)) + len(closing_of(section))
        if section.tag not in GRADES:
            spans.append((at, end))
        at = end
    return AnsweredTurn(ask, reader.turn_parts(text), tuple(spans))


def said_in(label: LabelRow) -> dict[str, str]:
    """What each section of an answer says, by tag, as far as the label's columns hold it; `none` where they hold
    nothing.
    """
    own: Mapping[str, Any] = label.columns
    found = {name: "none" if value is None else str(value) for name, value in own.items()}
    found |= {f"{name}_score": str(own[name]) for name in ("subject", "attribute") if own.get(name) is not None}
    extract = "\n".join(str(span["text"]) for span in label.evidence)
    return found | {
        "think": label.reasoning or "",
        "intent": label.intent or "",
        "extract": extract or "none",
        "score": str(label.grade),
    }


def _answer(turn: AnsweredTurn) -> Answer:
    if turn.label is None:
        return Answer(0, "".join(turn.parts), "stop")
    (decision,) = turn.ask.decisions
    probs = tuple(float(number == turn.label) for number in range(len(decision.labels)))
    return Answer(0, "", "stop", {decision.name: Distribution(probs, 0.0)})


def _is_same(read: Label, held: LabelRow) -> bool:
    """Whether a label says what another one does, distributions left out."""
    own = all(
        value == held.columns.get(name)
        for name, value in read.columns.items()
        if not name.endswith(("_probs", "_outside_mass"))
    )
    evidence = [(span.start, span.end) for span in read.evidence]
    return (
        own
        and read.grade == held.grade
        and (read.intent or None) == (held.intent or None)
        and (read.reasoning or None) == (held.reasoning or None)
        and evidence == [(span["start"], span["end"]) for span in held.evidence]
    )


# ------------------------------------------------------------------------------
# Choices of evidence to learn: whole questions with the chunks that are wanted.
#
# Source: RES-RAG (section 3.4.1, the warm-up on heuristic labels).


def load_sets(options: LabelerOptions, gold: SftGold, storage: Storage) -> AnsweredRows:
    """Questions with the sets of a column.

    Raises:
        ConfigError: the labeler chooses no chunks.
        InputError: the file can't be read, or has no set.
    """
    if options.name != EVIDENCE_SET:
        raise ConfigError(f"data.gold.sets: labeler {options.name} chooses no chunks; want {EVIDENCE_SET}.")
    assert gold.sets is not None
    found = AnsweredRows(labeler_class(options.name)(options), options)
    queries, dataset = load_evidence_queries(gold.path, gold.columns, gold.sets, found.labeler, storage)
    for query in queries:
        if query.sets is None:
            found.dropped["queries without chunks wanted"] += 1
        else:
            found.rows.append(AnsweredRow(query.pair, int(any(query.sets)), sets=query.sets))
            found.names.append((gold.path, query.pair.row_id))
    if not found.rows:
        raise InputError(f"{gold.path}: no query with chunks in `{gold.sets}`. There is nothing to learn from.")
    found.gold = LearnedGold(path=gold.path, grade=None, sets=gold.sets, rows=dataset.rows, graded_rows=len(found.rows))
    return found


def choices(answered: AnsweredRows, row: AnsweredRow) -> Iterator[AnsweredTurn]:
    """A question with its answer, with fewer and fewer chunks shown, as a run would ask it while its prompt is too
    long.
    """
    assert row.sets is not None
    walk = answered.labeler.label(row.pair)
    try:
        ask = next(walk)
        while True:
            assert ask.format is not None
            (section,) = ask.format.sections
            assert isinstance(section, JsonIndices)
            if any(section.mosts):
                yield AnsweredTurn(ask, ("", rendered_sets(section, row.sets), ""))
            ask = walk.send(Answer(0, "", "overlong"))
    except (StopIteration, VerdictError):
        return
