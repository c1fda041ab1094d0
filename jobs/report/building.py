"""From paths to a page: opens what is there, reads each run once, and puts the sections together that have something to
say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from relabel.jobs.report.artifacts import Artifact, BundleArtifact, StudentArtifact, open_artifacts
from relabel.jobs.report.blocks import Paragraph, Section
from relabel.jobs.report.browser import BrowserData, ShownRow, label_view, quarantine_view
from relabel.jobs.report.gold import GoldChoice, RunGold
from relabel.jobs.report.lineage import trace
from relabel.jobs.report.page import Page, render_page
from relabel.jobs.report.run_artifact import RunArtifact
from relabel.jobs.report.sections_bundles import latency_section, parity_section
from relabel.jobs.report.sections_compared import compared_sections
from relabel.jobs.report.sections_judged import gold_section, judge_runs
from relabel.jobs.report.sections_labels import labels_section, noise_section
from relabel.jobs.report.sections_lineage import lineage_section
from relabel.jobs.report.sections_ran import ran_section
from relabel.jobs.report.sections_ranking import ranking_section
from relabel.jobs.report.sections_routes import routes_section
from relabel.jobs.report.sections_runs import TalliedRun, conservation_section
from relabel.jobs.report.sections_students import student_section, training_section
from relabel.jobs.report.sections_teachers import rollouts_section
from relabel.jobs.report.sections_work import cost_section, plan_section, throughput_section
from relabel.jobs.report.tallies import LabelTally, read_labelled, read_quarantined, tally_labels, texts_of
from relabel.jobs.report.teachers import TeacherArtifact
from relabel.jobs.report.trainings import TrainingArtifact
from relabel.manifests.errors import InputError, MissingExtraError, RelabelError
from relabel.manifests.storage.context import Storage

MAX_ROWS = 5000


@dataclass(frozen=True)
class BuiltPage:
    """A report.

    Args:
        sections: names of those that it has, in order; `labels` is the browser.
        rows_shown, rows: that the browser shows, and that there are.
        unfinished: trainings that are shown as far as they went.
    """

    html: str
    sections: list[str]
    rows_shown: int
    rows: int
    unfinished: list[TrainingArtifact]


def build_report(
    paths: Sequence[str],
    storage: Storage,
    *,
    gold: GoldChoice | None = None,
    max_rows: int = MAX_ROWS,
    is_inside_bundle: bool = False,
    cache_dir: Path | None = None,
) -> BuiltPage:
    """Report on label runs, trainings, teachers, students and bundles.

    Args:
        paths: folders or URLs, in any mix.
        gold: gold grades.
        max_rows: most rows of the labels browser; 0 leaves it out.
        is_inside_bundle: the page will be one of the bundle's own files, so that it says neither where things lie nor
            which version the bundle is, nor what it does not hold yet.
        cache_dir: where models that go to a URL are trained; None for the default.
    Raises:
        TransientError: a training has written no checkpoint yet.
        UsageError, InputError, ManifestError, StoreError: a path holds nothing to report on, or something damaged.
        MissingExtraError: gold grades were named, and the packages that judge by them are not here.
    """
    artifacts = open_artifacts(list(paths), storage, cache_dir=cache_dir)
    runs = [one for one in artifacts if isinstance(one, RunArtifact)]
    choice = replace(gold or GoldChoice(), students=tuple(run.path for run in runs if run.is_scored))
    students = [one for one in artifacts if isinstance(one, StudentArtifact)]
    bundles = [one for one in artifacts if isinstance(one, BundleArtifact)]
    teachers = [one for one in artifacts if isinstance(one, TeacherArtifact)]
    trainings = [one for one in artifacts if isinstance(one, TrainingArtifact)]
    tallies = [tally_labels(run, most=max_rows // len(runs)) for run in runs]
    browser = _browser(runs, tallies, choice) if max_rows and any(tally.num_chosen for tally in tallies) else None
    rows = browser.rows if browser is not None else []
    tallied = [
        TalliedRun(run, tally, [row for row in rows if row.run == number and row.status != "ok"])
        for number, (run, tally) in enumerate(zip(runs, tallies, strict=True))
    ]
    judged, notes = judge_runs(runs, choice)
    unused = [why for run in runs if (why := choice.why_not(run)) is not None]
    if judged or notes:
        notes = [*notes, *unused]
    compared = compared_sections(runs, choice)
    has_comparison = any(section.name == "student-against-teacher" and section.blocks for section in compared)
    sections = [
        ran_section(artifacts, has_places=not is_inside_bundle),
        lineage_section(trace(artifacts)),
        conservation_section(tallied, quotes=max_rows > 0),
        labels_section(tallied),
        routes_section(tallied),
        gold_section(judged, notes),
        ranking_section(judged),
        *compared,
        noise_section(tallied),
        throughput_section(tallied),
        plan_section(tallied),
        cost_section(tallied),
        training_section([*teachers, *students, *trainings]),
        rollouts_section([*teachers, *trainings], has_texts=max_rows > 0),
        student_section(students, has_comparison=has_comparison),
        parity_section(bundles),
        latency_section(bundles),
    ]
    if not is_inside_bundle:
        sections.append(_absent_section({section.name for section in sections if section.blocks}, artifacts, unused))
    page = Page(_title(artifacts), _subtitle(artifacts), sections, browser)
    names = [section.name for section in sections if section.blocks] + (["labels"] if browser is not None else [])
    return BuiltPage(render_page(page), names, len(rows), sum(tally.num_rows for tally in tallies), trainings)


def render_report(
    paths: Sequence[str],
    storage: Storage,
    *,
    gold: GoldChoice | None = None,
    max_rows: int = MAX_ROWS,
    is_inside_bundle: bool = False,
) -> str:
    """The HTML of a report; arguments and errors are those of `build_report`."""
    return build_report(paths, storage, gold=gold, max_rows=max_rows, is_inside_bundle=is_inside_bundle).html


def _browser(runs: Sequence[RunArtifact], tallies: Sequence[LabelTally], choice: GoldChoice) -> BrowserData:
    """The rows that were chosen, with their texts and gold grades."""
    notes: list[Paragraph] = []
    rows: list[ShownRow] = []
    for number, (run, tally) in enumerate(zip(runs, tallies, strict=True)):
        if tally.num_chosen < tally.num_rows:
            notes.append(
                Paragraph(
                    f"{run.name}: {tally.num_chosen:,} of {tally.num_rows:,} rows, a seeded sample that keeps every "
                    "status (the same rows each time). All other sections are over all rows.",
                    "warn",
                )
            )
        labels, quarantine = list(read_labelled(run, tally)), list(read_quarantined(run, tally))
        texts, note = _texts(run, [*(row.row_id for row in labels), *(row.row_id for row in quarantine)])
        notes += [Paragraph(note, "warn")] if note else []
        run_gold = _gold(run, choice)
        golds = run_gold.of(labels) if run_gold else [None] * len(labels)
        rows += [label_view(number, row, texts.get(row.row_id), gold) for row, gold in zip(labels, golds, strict=True)]
        golds = run_gold.of(quarantine) if run_gold else [None] * len(quarantine)
        rows += [
            quarantine_view(number, row, texts.get(row.row_id), gold)
            for row, gold in zip(quarantine, golds, strict=True)
        ]
    rows.sort(key=lambda row: (row.run, row.row))
    return BrowserData([run.name for run in runs], rows, notes)


def _texts(run: RunArtifact, row_ids: list[int]) -> tuple[dict[int, Any], str]:
    try:
        return texts_of(run, row_ids), ""
    except (RelabelError, OSError) as exc:
        return {}, f"{run.name}: its rows are shown without their texts, which can't be read again: {exc}"


def _gold(run: RunArtifact, choice: GoldChoice) -> RunGold | None:
    options = choice.options(run)
    if options is None:
        return None
    try:
        return RunGold(run, options)
    except (InputError, MissingExtraError):
        if choice.path is not None:
            raise
        return None  # the section on gold grades says why


def _absent_section(names: set[str], artifacts: Sequence[Artifact], unused: Sequence[str]) -> Section:
    """What this page does not hold, and what would bring it.

    Args:
        unused: why gold columns that jobs name are not used.
    """
    runs = [one for one in artifacts if isinstance(one, RunArtifact)]
    bundles = [one for one in artifacts if isinstance(one, BundleArtifact)]
    missing = []
    if runs and "gold" not in names:
        brings = "brings figures, confusion, reliability and nDCG."
        missing += [f"Gold: {why} --gold FILE {brings}" for why in unused]
        if not unused:
            missing.append(f"Gold: none was given. --gold FILE, or input.columns.gold in the job, {brings}")
    if runs and "noise" not in names:
        missing.append(
            "Noise floor: no canary was asked. A line like canary: 200 in a job that reuses labels measures how many "
            "grades flip."
        )
    if any(not run.is_finished for run in runs):
        missing.append("Plan against actual, and the proof by row ids: they come when a run is finished.")
    if bundles and "latency" not in names:
        missing.append("Latency: no bench of it was found. relabel bench measures it.")
    if not any(isinstance(one, StudentArtifact) for one in artifacts) and bundles:
        missing.append("Training curves: they are in the student's folder; give its path too.")
    return Section("absent", "What is not here", [Paragraph(sentence) for sentence in missing])


def _title(artifacts: Sequence[Artifact]) -> str:
    names = list(dict.fromkeys(one.name for one in artifacts))
    return (
        names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more" if len(names) > 3 else ", ".join(names)
    )


def _subtitle(artifacts: Sequence[Artifact]) -> str:
    runs = [one for one in artifacts if isinstance(one, RunArtifact)]
    parts = [
        (sum(not run.is_scored for run in runs), "label run"),
        (sum(run.is_scored for run in runs), "student's scores"),
        *(
            (sum(isinstance(one, kind) for one in artifacts), name)
            for kind, name in (
                (TeacherArtifact, "teacher"),
                (StudentArtifact, "student"),
                (BundleArtifact, "bundle"),
                (TrainingArtifact, "unfinished training"),
            )
        ),
    ]
    said = [f"{count} {name}{'' if count == 1 or name.endswith('scores') else 's'}" for count, name in parts if count]
    rows = sum(run.found.tally.rows for run in runs)
    return ", ".join(said) + (f" · {rows:,} rows" if rows else "")
