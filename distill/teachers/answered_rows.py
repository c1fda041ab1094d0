"""What a teacher learns from: rows that a labeler has answered, of proven runs, with the labeler that asked them; or
rows with trusted grades alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from relabel.distill.students.data_facts import LearnedGold, LearnedLabels, SourceRows
from relabel.distill.students.gold import GoldGrades, load_gold
from relabel.distill.students.pair_texts import read_pairs, rejoin
from relabel.distill.teachers.evidence_queries import EvidenceQuery, chosen_in
from relabel.distill.teachers.specs import RunData, TeacherSpec
from relabel.distill.training.proven_runs import ProvenRun, open_proven_run
from relabel.labelers.evidence_set import EVIDENCE_SET
from relabel.labelers.registry import Labeler, declared_reads, labeler_class, options_of_run
from relabel.manifests.errors import ConfigError, InputError, ManifestError
from relabel.manifests.judging.qrels import check_scale
from relabel.manifests.labels import Pair
from relabel.manifests.runs.label_files import read_labels
from relabel.manifests.runs.label_keys import stage_digests
from relabel.manifests.runs.plans import Plan, shard_row_ids
from relabel.manifests.runs.run_inputs import open_run_input
from relabel.manifests.schemas import ANSWERS, LABELS, LabelRow, label_rows
from relabel.manifests.specs import LabelerOptions
from relabel.manifests.storage.context import Storage


class AnsweredRow(NamedTuple):
    """One row.

    Args:
        label: what the labeler made of it; None where there is a grade alone.
        grade: of the label, or the trusted one.
        source: number of its run.
        sets: of a whole question, the chunks chosen of each document; it stands for all rows of its query.
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


@dataclass(frozen=True)
class _Joined:
    where: str
    plan: Plan | None
    pairs: list[Pair]


def load_answered_rows(spec: TeacherSpec, data: RunData, storage: Storage) -> AnsweredRows:
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
    opened = [
        open_proven_run(source.path, storage, allow_over_limit=source.allow_over_limit, then="train")
        for source in data.runs
    ]
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
    _refuse_twice(found.runs)
    found.gold = None if gold is None else replace(gold.about, graded_rows=len(found.rows))
    if not found.rows:
        raise InputError(f"{', '.join(run.root for run in opened)}: no answer to learn from{_counted(found.dropped)}.")
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
    reads = declared_reads(found.labeler, name=found.options.name)
    tables = [read_labels(run.folder, file) for file in run.manifest.labels]
    held = [
        row for table in tables for row in label_rows(_whole(table)) if row.status == "ok" and row.grade is not None
    ]
    dataset, readings = open_run_input(run.root, run.store, run.plan, storage, reads=reads)
    columns = {name: [getattr(row, name) for row in held] for name in ("row_id", "query_id", "doc_id")}
    if found.is_of_sets:
        rejoin(columns, dataset, readings, run.root)  # the labels are of these rows
        chosen = {row.row_id: row.columns["selected"] for row in held}
        for shard in run.plan.shards:  # holds whole queries, as they were asked: a limit may have cut one
            pairs = read_pairs(dataset, shard_row_ids(run.store, shard), readings=readings)
            _add_sets(found, chosen_in(chosen, pairs), run)
        found.runs.append(_about(run, len(held)))
        return
    pairs = rejoin(columns, dataset, readings, run.root)
    trusted = None if gold is None else gold.of(_Joined(run.root, run.plan, pairs))
    for number, (row, pair) in enumerate(zip(held, pairs, strict=True)):
        assert row.grade is not None
        if trusted is not None and (reason := _distrust(row.grade, trusted[number])):
            found.dropped[reason] += 1
            continue
        found.rows.append(AnsweredRow(pair, row.grade, row, len(found.runs)))
        found.names.append((run.root, row.row_id))
    found.parts.append(run.plan.parts)
    found.answers.append(_shared_answers(run))
    found.runs.append(_about(run, len(held)))


def _add_sets(found: AnsweredRows, queries: Sequence[EvidenceQuery], run: ProvenRun) -> None:
    for query in queries:
        assert query.sets is not None
        found.rows.append(AnsweredRow(query.pair, int(any(query.sets)), source=len(found.runs), sets=query.sets))
        found.names.append((run.root, query.pair.row_id))


def _distrust(grade: int, trusted: int | None) -> str | None:
    if trusted is None:
        return "without a trusted grade"
    return None if grade == trusted else "with another grade than the trusted one"


def _whole(table: pa.Table) -> pa.Table:
    """A label table with all columns of the schema: files of earlier versions lack the last ones."""
    for name in LABELS.names:
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(table.num_rows, LABELS.field(name).type))
    return table


def _shared_answers(run: ProvenRun) -> dict[bytes, str]:
    """Texts of answers that rows of a query shared, by key."""
    found: dict[bytes, str] = {}
    for file in run.manifest.answers or ():
        table = run.folder.table(file, ANSWERS, ["key", "text"])
        found.update(zip(table["key"].to_pylist(), table["text"].to_pylist(), strict=True))
    return found


def _about(run: ProvenRun, labels: int) -> LearnedLabels:
    facts, manifest = run.plan.facts, run.manifest
    return LearnedLabels(
        path=run.root,
        kind="run",
        name=run.plan.name,
        labeler=facts.labeler.name,
        model=facts.model,
        fingerprint=run.plan.fingerprint,
        manifest_sha256=run.manifest_sha256,
        rows=SourceRows(**vars(manifest.rows)),
        quarantined_by_status=manifest.quarantined_by_status,
        over_limit=manifest.over_limit,
        weight=1.0,
        labels=labels,
    )


def _refuse_twice(runs: Sequence[LearnedLabels]) -> None:
    seen: dict[str | None, str] = {}
    for run in runs:
        if run.manifest_sha256 in seen:
            raise ManifestError(f"data.runs: {seen[run.manifest_sha256]} and {run.path} are the same labels.")
        seen[run.manifest_sha256] = run.path


def _counted(dropped: Counter[str]) -> str:
    return ": " + ", ".join(f"{count:,} rows {reason}" for reason, count in dropped.items()) if dropped else ""
