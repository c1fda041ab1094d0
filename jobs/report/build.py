"""Builds a report: checks the target path, opens the artifacts, reads each run once, and collects the sections that
apply. Also adds a report to a bundle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
from relabel.jobs.evaluate.sides import JudgingOptions
from relabel.jobs.files import check_free
from relabel.jobs.report.artifacts import (
    Artifact,
    BundleArtifact,
    RunArtifact,
    StudentArtifact,
    TeacherArtifact,
    lineage_section,
    open_artifacts,
    trace,
)
from relabel.jobs.report.gold_sections import (
    compared_sections,
    gold_options,
    gold_section,
    row_golds,
)
from relabel.jobs.report.model_sections import (
    bundle_facts,
    latency_section,
    parity_section,
    student_facts,
    student_section,
    teacher_facts,
    training_section,
)
from relabel.jobs.report.page import Browser, opening, render_page, shown_row
from relabel.jobs.report.run_sections import (
    RunTally,
    chosen_rows,
    conservation_section,
    labels_section,
    noise_section,
    routes_section,
    run_facts,
    tally_labels,
    texts_of,
)
from relabel.jobs.sections import Block, Code, Facts, Fold, Paragraph, Section
from relabel.manifests.errors import InputError, MissingExtraError, RelabelError
from relabel.manifests.files import Storage, is_url, place_of, scheme_of, translate_errors
from relabel.manifests.labels import Pair
from relabel.manifests.store import UrlFile

MAX_ROWS = 5000


@dataclass(frozen=True)
class BuiltPage:
    """A report.

    Args:
        sections: names of those that it has, in order; `labels` is the browser.
        rows_shown, rows: that the browser shows, and that there are.
    """

    html: str
    sections: list[str]
    rows_shown: int
    rows: int


def build_report(
    paths: Sequence[str],
    storage: Storage,
    *,
    gold: JudgingOptions | None = None,
    max_rows: int = MAX_ROWS,
    is_inside_bundle: bool = False,
) -> BuiltPage:
    """Report on label runs, trainings, teachers, students and bundles.

    Args:
        paths: folders or URLs, in any mix.
        gold: gold grades; without `qrels` the gold column that a run's own job names.
        max_rows: most rows of the label browser; 0 leaves it out.
        is_inside_bundle: the page will be one of the bundle's own files, so it holds neither paths nor its version.
    Raises:
        UsageError, InputError, ManifestError, StoreError: a path holds nothing to report on, or something damaged.
        MissingExtraError: gold grades were named, and the packages that judge by them are not here.
    """
    artifacts = open_artifacts(list(paths), storage)
    runs = [one for one in artifacts if isinstance(one, RunArtifact)]
    students = [one for one in artifacts if isinstance(one, StudentArtifact)]
    bundles = [one for one in artifacts if isinstance(one, BundleArtifact)]
    trained = [one for one in artifacts if isinstance(one, TeacherArtifact)]
    scored = tuple(run.path for run in runs if run.is_scored)
    choice = replace(gold or JudgingOptions(), students=scored, allow_partial=True)
    tallies = [tally_labels(run, most=max_rows // len(runs)) for run in runs]
    browser = _browser(tallies, choice) if max_rows and any(tally.num_chosen for tally in tallies) else None
    sections = [
        ran_section(artifacts, has_places=not is_inside_bundle),
        lineage_section(trace(artifacts)),
        conservation_section(tallies, quotes=max_rows > 0),
        labels_section(tallies),
        routes_section(tallies),
        gold_section(runs, choice),
        *compared_sections(runs, choice),
        noise_section(tallies),
        training_section([*trained, *students]),
        student_section(students),
        parity_section(bundles),
        latency_section(bundles),
    ]
    names = list(dict.fromkeys(one.name for one in artifacts))
    title = ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"
    html = render_page(title, _subtitle(artifacts), sections, browser=browser)
    shown = [section.name for section in sections if section.blocks] + (["labels"] if browser is not None else [])
    return BuiltPage(html, shown, len(browser.rows) if browser else 0, sum(one.by_status.total() for one in tallies))


def _subtitle(artifacts: Sequence[Artifact]) -> str:
    counts = Counter("student's scores" if one.kind == "scores" else one.kind for one in artifacts)
    parts = [f"{count} {kind}{'s' if count > 1 and not kind.endswith('s') else ''}" for kind, count in counts.items()]
    rows = sum(one.found.tally.rows for one in artifacts if isinstance(one, RunArtifact))
    return ", ".join(parts) + (f" · {rows:,} rows" if rows else "")


def ran_section(artifacts: Sequence[Artifact], *, has_places: bool = True) -> Section:
    """Each artifact with its origin, and the spec of each.

    Args:
        has_places: show paths, and a bundle's version.
    """
    cards: list[Facts] = []
    notes: list[Paragraph] = []
    specs: list[Block] = []
    for one in artifacts:
        spec: Any = None
        if isinstance(one, RunArtifact):
            cards.append(run_facts(one))
            spec = one.spec
        elif isinstance(one, TeacherArtifact):
            cards.append(teacher_facts(one))
            notes += [Paragraph(f"{one.name}: {note}", "warn") for note in one.manifest.notes]
            spec = one.manifest.spec
        elif isinstance(one, StudentArtifact):
            cards.append(student_facts(one, has_places=has_places))
            spec = one.manifest and one.manifest.spec
        else:
            cards.append(bundle_facts(one, has_places=has_places))
            spec = one.facts.get("spec")
        if spec and isinstance(spec, dict):
            text = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=100)
            specs.append(Fold(f"Spec of {one.name}, as it was resolved", [Code(f"spec of {one.name}", text)]))
    return Section("ran", "What ran", [*notes, *cards, *specs])


def _browser(tallies: Sequence[RunTally], choice: JudgingOptions) -> Browser:
    """The rows that were chosen, with their texts and gold grades; those without a label become a tally's examples."""
    notes: list[Paragraph] = []
    rows: list[dict[str, Any]] = []
    for number, tally in enumerate(tallies):
        run, num_rows = tally.run, tally.by_status.total()
        if tally.num_chosen < num_rows:
            sample = "a seeded sample that keeps every status (the same rows each time)"
            counts = f"{tally.num_chosen:,} of {num_rows:,} rows"
            notes.append(Paragraph(f"{run.name}: {counts}, {sample}. All other sections are over all rows.", "warn"))
        found = chosen_rows(tally)
        texts: dict[int, Pair] = {}
        golds: list[int | None] = [None] * len(found)
        try:
            texts = texts_of(run, [row.row_id for row in found])
        except (RelabelError, OSError) as exc:
            text = f"{run.name}: its rows are shown without their texts, which can't be read again: {exc}"
            notes.append(Paragraph(text, "warn"))
        options = gold_options(choice, run)
        if isinstance(options, JudgingOptions):
            try:
                golds = row_golds(run, options, found)
            except (InputError, MissingExtraError):
                if choice.qrels is not None:
                    raise  # else the section on gold grades says why
        shown = [shown_row(number, row, texts.get(row.row_id), gold) for row, gold in zip(found, golds, strict=True)]
        shown.sort(key=lambda row: int(row["row"]))
        tally.examples = [row for row in shown if row["status"] != "ok"]
        rows += shown
    return Browser([one.run.name for one in tallies], rows, notes)


# ------------------------------------------------------------------------------
# Where a report may be written: a free path, or over an earlier report.


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
# A bundle's own report: the page without any document's text, as one of its files.
#
# The bundle is prepared in a folder next to it, with its files linked and not copied, and then switched
# (`export/bundles.py`), so that an export that is killed leaves a whole bundle. The page holds no time and no
# path, so the same export gives the same version.


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
    page = build_report([str(student), str(folder)], Storage(), max_rows=0, is_inside_bundle=True).html
    with locked(folder, waits=True), translate_errors("write", hidden_name(folder, PART)):
        part = linked_copy(folder, leaves_out=frozenset({MANIFEST_NAME}))
        (part / REPORT_NAME).write_text(page, encoding="utf-8", errors="replace")
        sealed = seal_bundle(part, bundle.own_facts)
        check_unchanged(bundle, sealed, written=(REPORT_NAME,))
        switch(part, folder)
    return open_bundle(folder, check_bytes=False)
