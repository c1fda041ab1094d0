"""The section that says what ran: each run, training, model and bundle with its origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from relabel.jobs.report.artifacts import Artifact, BundleArtifact, StudentArtifact
from relabel.jobs.report.blocks import Badge, Block, Cell, Code, Facts, Fold, Section, Side
from relabel.jobs.report.run_artifact import RunArtifact
from relabel.jobs.report.sections_runs import DIGITS
from relabel.jobs.report.sections_teachers import teacher_facts, teacher_notes
from relabel.jobs.report.sections_trainings import training_facts, training_notes
from relabel.jobs.report.teachers import TeacherArtifact
from relabel.jobs.report.trainings import TrainingArtifact


def ran_section(artifacts: Sequence[Artifact], *, has_places: bool = True) -> Section:
    """What there is, and the spec of each.

    Args:
        has_places: say where each thing lies, and a bundle's version.
    """
    notes = teacher_notes([one for one in artifacts if isinstance(one, TeacherArtifact)])
    notes += training_notes([one for one in artifacts if isinstance(one, TrainingArtifact)])
    cards = [
        _run_facts(one)
        if isinstance(one, RunArtifact)
        else teacher_facts(one, digits=DIGITS)
        if isinstance(one, TeacherArtifact)
        else training_facts(one, digits=DIGITS)
        if isinstance(one, TrainingArtifact)
        else _student_facts(one, has_places=has_places)
        if isinstance(one, StudentArtifact)
        else _bundle_facts(one, has_places=has_places)
        for one in artifacts
    ]
    specs: list[Block] = []
    for one in artifacts:
        spec = _spec_of(one)
        if spec:
            text = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=100)
            specs.append(Fold(f"Spec of {one.name}, as it was resolved", [Code(text, f"spec of {one.name}")]))
    return Section("ran", "What ran", [Side(cards), *notes, *specs])


def _spec_of(one: Artifact) -> dict[str, Any]:
    if isinstance(one, RunArtifact):
        return one.spec
    if isinstance(one, TrainingArtifact):
        return {} if one.record is None else one.record.spec
    if isinstance(one, StudentArtifact | TeacherArtifact):
        return {} if one.manifest is None else one.manifest.spec
    held = one.facts.get("spec")
    return held if isinstance(held, dict) else {}


def _run_facts(run: RunArtifact) -> Facts:
    tally = run.found.tally
    engines = [
        (
            f"{_base(str(one.get('model')))} on {one.get('family')} {one.get('version', '')}, {one.get('device')}, "
            f"{one.get('dtype')}"
        )
        for one in run.found.engines
    ]
    rows: list[tuple[str, Cell]] = [
        ("state", _state(run)),
        ("labeler", f"{run.plan.facts.labeler.name}, grades 0 to {run.grades - 1}"),
        *(("student" if run.is_scored else "teacher", text) for text in engines),
        ("rows", f"{tally.rows:,} of {run.plan.rows:,} done, {run.plan.queries:,} queries"),
        ("shards, chunks", f"{len(run.plan.shards):,}, {run.plan.num_chunks:,}"),
    ]
    if run.manifest is not None:
        rows.append(("relabel", run.manifest.relabel))
        if run.manifest.mixed.differences:
            rows.append(("engines differ", "; ".join(run.manifest.mixed.differences)))
    rows += [("fingerprint", run.plan.fingerprint[:DIGITS]), ("path", run.path)]
    return Facts(rows, f"{'Scores' if run.is_scored else 'Label run'} {run.name}")


def _state(run: RunArtifact) -> Badge:
    if not run.is_finished:
        return Badge("not finished", "warn")
    if run.manifest is not None and run.manifest.over_limit:
        return Badge("over its quarantine limit", "bad")
    return Badge("finished, every row accounted for", "good")


def _student_facts(one: StudentArtifact, *, has_places: bool) -> Facts:
    manifest, record = one.manifest, one.record
    rows: list[tuple[str, Cell]] = [("kind", record.kind)]
    rows += _heads(record.heads, {}) if manifest is None else _heads(manifest.heads, manifest.temperature)
    rows.append(("reads at most", f"{record.max_tokens} tokens"))
    if manifest is not None:
        rows += [("starts from", manifest.model.reference), ("fingerprint", manifest.fingerprint[:DIGITS])]
        passed = Badge("passed", "good") if manifest.gate.has_passed else Badge("refused", "bad")
        rows.append(("gate", passed if manifest.gate.checks else "no gate set"))
    return Facts([*rows, *([("path", one.path)] if has_places else [])], f"Student {one.name}")


def _bundle_facts(one: BundleArtifact, *, has_places: bool) -> Facts:
    student = one.student
    models = ", ".join(f"{model.path} ({model.precision})" for model in student.models)
    rows = [("models", models), *_heads(student.heads, student.temperature or {})]
    rows += [("version", one.manifest_sha256[:DIGITS])] if has_places else []
    rows.append(("licence", student.licence.bundle or "not stated"))
    return Facts([*rows, *([("path", one.path)] if has_places else [])], f"Bundle {one.name}")


def _heads(heads: Mapping[str, int], temperature: Mapping[str, float]) -> list[tuple[str, Cell]]:
    rows: list[tuple[str, Cell]] = [("heads", ", ".join(f"{name} ({grades} grades)" for name, grades in heads.items()))]
    if temperature:
        rows.append(("temperatures", ", ".join(f"{name} {value:.3g}" for name, value in temperature.items())))
    return rows


def _base(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path
