"""Builds a report: checks the target path, opens the artifacts, reads each run once, and collects the sections that
apply. Also adds a report to a bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from relabel.export.bundle_facts import REPORT_NAME
from relabel.export.bundles import (
    MANIFEST_NAME,
    PART,
    Bundle,
    check_unchanged,
    hidden_name,
    linked_copy,
    locked,
    open_bundle,
    seal_bundle,
    switch,
)
from relabel.jobs.files import check_free
from relabel.jobs.report.artifacts import (
    Artifact,
    BundleArtifact,
    RunArtifact,
    StudentArtifact,
    TeacherArtifact,
    TrainingArtifact,
    open_artifacts,
)
from relabel.jobs.report.gold_sections import (
    GoldChoice,
    RunGold,
    compared_sections,
    gold_section,
    judge_runs,
    ranking_section,
)
from relabel.jobs.report.lineage import lineage_section, trace
from relabel.jobs.report.model_sections import (
    latency_section,
    parity_section,
    rollouts_section,
    student_section,
    teacher_facts,
    teacher_notes,
    training_facts,
    training_notes,
    training_section,
)
from relabel.jobs.report.page import (
    Badge,
    Block,
    BrowserData,
    Cell,
    Code,
    Facts,
    Fold,
    Page,
    Paragraph,
    Section,
    ShownRow,
    Side,
    label_view,
    opening,
    quarantine_view,
    render_page,
)
from relabel.jobs.report.run_sections import (
    DIGITS,
    TalliedRun,
    conservation_section,
    cost_section,
    labels_section,
    noise_section,
    routes_section,
    throughput_section,
)
from relabel.jobs.report.tallies import LabelTally, read_labelled, read_quarantined, tally_labels, texts_of
from relabel.manifests.errors import InputError, MissingExtraError, RelabelError
from relabel.manifests.files import Storage, is_url, place_of, scheme_of, translate_errors
from relabel.manifests.store import UrlFile

# ------------------------------------------------------------------------------
# Where a report may be written: a free place, or over an earlier report.


def check_target(to: str, inputs: Sequence[str], storage: Storage, *, force: bool) -> None:
    """Raise where a report can't be written, before any work is done.

    Args:
        inputs: what is reported on and gold grades; nothing in them is written to, whatever `force` says.
        force: replace a file that is not a report, too.
    Raises:
        UsageError: it is a folder, lies in an input, or is there already and no report.
    """
    check_free(to, inputs, storage, force=True)
    if not force and not _is_report(to, storage):
        check_free(to, inputs, storage, force=False)


def _is_report(to: str, storage: Storage) -> bool:
    """Whether `relabel report` wrote what is there; a file that can't be read is none."""
    mark = opening("report").encode()
    try:
        if is_url(to) and scheme_of(to) not in ("file", "local"):
            with UrlFile(to, storage) as page:
                return page.read(len(mark)) == mark
        path = Path(place_of(to))
        if not path.is_file():  # a device or a pipe may wait for ever
            return False
        with path.open("rb") as file:
            return file.read(len(mark)) == mark
    except OSError:
        return False


# ------------------------------------------------------------------------------
# The section that says what ran: each run, training, model and bundle with its origin.


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


# ------------------------------------------------------------------------------
# From paths to a page: opens what is there, reads each run once, and puts the sections together that have something to
# say.


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
) -> BuiltPage:
    """Report on label runs, trainings, teachers, students and bundles.

    Args:
        paths: folders or URLs, in any mix.
        gold: gold grades.
        max_rows: most rows of the labels browser; 0 leaves it out.
        is_inside_bundle: the page will be one of the bundle's own files, so that it says neither where things lie nor
            which version the bundle is, nor what it does not hold yet.
    Raises:
        TransientError: a training has written no checkpoint yet.
        UsageError, InputError, ManifestError, StoreError: a path holds nothing to report on, or something damaged.
        MissingExtraError: gold grades were named, and the packages that judge by them are not here.
    """
    artifacts = open_artifacts(list(paths), storage)
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


# ------------------------------------------------------------------------------
# A bundle's own report: the page without any document's text, put among its files, and the bundle sealed anew.
#
# The bundle is made ready beside itself, with its files linked and not copied, and then takes its own place
# (`export/bundles.py`), so that an export that is killed leaves a whole bundle. The page holds no time and no
# place, so the same export gives the same version.


def put_report(bundle: Bundle, student: Path) -> Bundle:
    """Write `REPORT_NAME` into a bundle that has none.

    Args:
        student: what it was exported from; its curves and figures are in the page.
    Returns:
        The bundle as it is now; unchanged where it has a report.
    Raises:
        ManifestError, StoreError, MissingExtraError: the page can't be made, or the folder can't be written.
    """
    if any(file.path == REPORT_NAME for file in bundle.files):
        return bundle
    folder = bundle.folder
    page = render_report([str(student), str(folder)], Storage(), max_rows=0, is_inside_bundle=True)
    with locked(folder, waits=True), translate_errors("write", hidden_name(folder, PART)):
        part = linked_copy(folder, leaves_out=frozenset({MANIFEST_NAME}))
        (part / REPORT_NAME).write_text(page, encoding="utf-8", errors="replace")
        sealed = seal_bundle(part, bundle.own_facts)
        check_unchanged(bundle, sealed, written=(REPORT_NAME,))
        switch(part, folder)
    return open_bundle(folder, check_bytes=False)
