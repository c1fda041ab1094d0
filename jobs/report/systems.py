"""The report's section on searches: which system is better, by the labels of the page's run."""

from __future__ import annotations

from collections.abc import Sequence

from relabel.jobs.compared_systems import ComparedSystems, figure_title, systems_blocks
from relabel.jobs.evaluate import JudgingOptions
from relabel.jobs.report.artifacts import RunArtifact
from relabel.jobs.sections import Block, Paragraph, Plot, Section, Series, Table
from relabel.jobs.systems import SystemsOptions, TooFewGoldError, compare_systems
from relabel.manifests.errors import UsageError
from relabel.manifests.files import Storage


def systems_section(
    runs: Sequence[RunArtifact], systems: Sequence[str], gold: JudgingOptions, storage: Storage
) -> tuple[Section, list[str]]:
    """Each two systems by the labels of the first run that is no student's, and by gold where there is some; why not
    where gold has too few of their queries; without blocks where no system is named.

    Returns:
        The section, and a sentence for each two systems.
    Raises:
        UsageError: systems without a run, or one system alone.
        InputError: see `compare_systems`.
    """
    if not systems:
        return Section("systems", "Systems", []), []
    judges = [run.path for run in runs if run.kind != "scores"]
    if not judges:
        raise UsageError("--system: systems are compared by a run's labels, and no PATH is a run.")
    options = SystemsOptions(
        labels=judges[0],
        gold=gold.qrels,
        grade=gold.grade,
        by=gold.by,
        doc=gold.doc,
        grade_map=gold.grade_map,
        duplicates=gold.duplicates,
        allow_partial=True,
    )
    try:
        compared = compare_systems(systems, options, storage)
    except TooFewGoldError as exc:
        return Section("systems", "Systems", [Paragraph(f"The systems are not compared. {exc}", "warn")]), []
    whose = f"By the labels of {judges[0]}, the first of {len(judges)} runs." if len(judges) > 1 else ""
    blocks = with_plot(compared)
    if whose:
        blocks.insert(0, Paragraph(whose))
    return Section("systems", "Systems", blocks), [f"{pair.sentence} {whose}".rstrip() for pair in compared.pairs]


def with_plot(compared: ComparedSystems) -> list[Block]:
    """What the terminal shows, with a plot before the first table."""
    blocks = systems_blocks(compared)
    first = next(place for place, block in enumerate(blocks) if isinstance(block, Table))
    return [*blocks[:first], differences_plot(compared), *blocks[first:]]


def differences_plot(compared: ComparedSystems) -> Plot:
    """The differences of all pairs with their intervals on one axis, a colour for each figure."""
    series = []
    for name in compared.pairs[0].figures:
        found = [pair.figures[name].difference for pair in compared.pairs]
        series.append(
            Series(
                name=figure_title(name),
                x=[f"{pair.b} - {pair.a}" for pair in compared.pairs],
                y=[one.value for one in found],
                low=[one.low for one in found],
                high=[one.high for one in found],
            )
        )
    return Plot("differences of systems", "intervals", series, "difference, with its 95 % interval")
