"""What `relabel systems` finds, as records, sentences and tables: for the terminal, for programs and for the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relabel.jobs.output import Exit, Printed
from relabel.jobs.sections import Block, Cell, Paragraph, Remarks, Table, as_text
from relabel.manifests.metrics.prediction_powered import FEWEST_FOR_LEVELS
from relabel.manifests.records import LEFT_OUT, plain


@dataclass(frozen=True)
class Estimate:
    """A mean over queries with its 95 % interval; `judge_weight` is that of the judge's figures, 0 to 1."""

    value: float
    low: float
    high: float
    judge_weight: float


@dataclass(frozen=True)
class SystemFigures:
    """One system.

    Args:
        queries: of those that are compared, it returns something for so many.
        without_documents: the others, which count as 0.
        documents: in the top k of all compared queries; of these `unlabelled` have no label of the judge.
        gold_documents: in the top k of the gold queries; of these `ungraded` have no grade of a human.
        made_by: the judge, or its student, where the scores are known to come from there.
        levels: its own figures; None without enough gold queries.
    """

    name: str
    path: str
    form: str
    queries: int
    without_documents: list[str]
    documents: int
    unlabelled: int
    gold_documents: int
    ungraded: int
    made_by: str | None
    levels: dict[str, Estimate] | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class FigureDifference:
    """B minus A in one figure.

    Args:
        difference: by judge and humans together; without gold by the judge alone.
        humans: by the gold queries alone; None without gold.
        judge: by the judge alone.
        lowest, highest: the difference if all unjudged documents of the top k were irrelevant for the one system and of
            the highest grade for the other: without gold those without a label; with gold those of the gold queries
            without a grade, since humans correct for what the judge leaves out.
        is_decided: the interval lies on one side of zero.
        better: which of the two is, where that is decided.
    """

    difference: Estimate
    humans: Estimate | None
    judge: Estimate
    lowest: float
    highest: float
    is_decided: bool
    better: str | None


@dataclass(frozen=True)
class ComparedPair:
    """Two systems.

    Args:
        sentence: what nDCG says of them.
        figures: the difference in each figure, by name.
        more_queries: so many more gold queries would make half of nDCG's interval as wide as was asked for; None
            without gold, or if no number would.
    """

    a: str
    b: str
    sentence: str
    figures: dict[str, FigureDifference]
    more_queries: int | None


@dataclass(frozen=True)
class JudgingPlan:
    """Queries that humans should judge next, in this order: drawn at random, so that the gold queries stay a fair
    sample.

    Args:
        queries: their ids.
        documents: of each of them, those of the systems' top k, by id; `pairs` in all.
        reason: why so many, in words.
    """

    queries: list[str]
    documents: dict[str, list[str]]
    pairs: int
    width: float
    seed: int
    reason: str


@dataclass(frozen=True)
class ComparedSystems(Printed):
    """All of what `compare_systems` finds.

    Args:
        queries: that are compared: the judge labelled a document of it, and a system returns something.
        gold_queries: of these, with a human's grade.
        is_opinion: there is no gold, so that all figures are the judge's opinion.
        relevant: the least grade that counts as relevant.
        warnings: what to read before any figure.
    """

    labels: str
    gold: str | None
    k: int
    relevant: int
    grades: int
    queries: int
    gold_queries: int
    is_opinion: bool
    systems: list[SystemFigures]
    pairs: list[ComparedPair]
    warnings: list[str]
    notes: list[str]
    plan: JudgingPlan | None
    exit_code: int = int(Exit.DONE)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        found: dict[str, Any] = plain(self)
        return found

    def lines(self) -> list[str]:
        """For people: a sentence for each pair first."""
        return [as_text(systems_blocks(self))]


# ------------------------------------------------------------------------------
# The result in words and tables.


def pair_sentence(
    names: tuple[str, str],
    found: FigureDifference,
    more: int | None,
    *,
    k: int,
    width: float,
    is_opinion: bool,
    unjudged: int,
) -> str:
    """Which of two systems is better, or that it is not decided and what would decide it.

    Args:
        more: queries that humans would have to judge, for a difference of `width` to show.
        unjudged: compared queries that humans did not judge.
    """
    first, second = names
    step = found.difference
    figure = f"nDCG@{k}"
    interval = f"{step.value:+.3f}, {step.low:+.3f} to {step.high:+.3f} in {figure}"
    if found.better is not None:
        other = first if found.better == second else second
        low, high = sorted((abs(step.low), abs(step.high)))
        size = f"{abs(step.value):.3f} ({low:.3f} to {high:.3f}) in {figure}"
        if found.lowest <= 0 <= found.highest:
            size += ", unless unjudged documents turn it"
        if is_opinion:
            return f"The judge finds {found.better} better than {other} by {size}. No human has said so."
        return f"{found.better} is better than {other} by {size}."
    if is_opinion:
        return f"The judge does not decide between {second} and {first} ({interval})."
    head = f"{second} against {first}: not decided ({interval})"
    if more is None:
        return f"{head}; no number of judged queries would show a difference of {width:g}."
    if more == 0:
        return f"{head}; a difference of {width:g} would have been shown."
    what = "more judged queries" if unjudged else "new queries (all of these are judged)"
    needed = f"{head}; about {more:,} {what} would show a difference of {width:g}"
    if not 0 < unjudged < more:
        return f"{needed}."
    return f"{needed}, and {unjudged:,} are not judged yet: about {more - unjudged:,} new queries have to be added."


def systems_blocks(result: ComparedSystems) -> list[Block]:
    """All of a comparison: a sentence for each pair, then tables."""
    return [
        *(Paragraph(pair.sentence) for pair in result.pairs),
        *(Paragraph(text, "warn") for text in result.warnings),
        differences_table(result),
        systems_table(result),
        *plan_blocks(result.plan),
        Remarks(result.notes),
    ]


def differences_table(result: ComparedSystems) -> Table:
    """Each pair in each figure: B minus A."""
    source = "judge alone" if result.is_opinion else "by both"
    head = ["B - A", "figure", source, "95 % interval", "worst to best", "humans alone", "judge alone"]
    rows: list[list[Cell]] = []
    for pair in result.pairs:
        for name, figure in pair.figures.items():
            rows.append(
                [
                    f"{pair.b} - {pair.a}",
                    figure_title(name),
                    f"{figure.difference.value:+.4f}",
                    _interval(figure.difference),
                    f"{figure.lowest:+.4f} to {figure.highest:+.4f}",
                    "" if figure.humans is None else _interval(figure.humans),
                    _interval(figure.judge),
                ]
            )
    over = f"{result.queries:,} queries, of these {result.gold_queries:,} with gold"
    if result.is_opinion:
        head = head[:5]
        rows = [row[:5] for row in rows]
        over = f"{result.queries:,} queries, none with gold"
    return Table(f"differences over {over}", head, rows)


def systems_table(result: ComparedSystems) -> Table:
    """Each system: what of its top k is judged, and its own figures where there is enough gold."""
    names = list(result.systems[0].levels or {})
    head = ["system", "queries", f"top {result.k}", "unlabelled", "ungraded", *map(figure_title, names)]
    rows: list[list[Cell]] = []
    for system in result.systems:
        levels = [f"{one.value:.4f} ({one.low:.4f} to {one.high:.4f})" for one in (system.levels or {}).values()]
        rows.append(
            [
                system.name,
                system.queries,
                system.documents,
                system.unlabelled,
                "" if result.is_opinion else f"{system.ungraded:,} of {system.gold_documents:,}",
                *levels,
            ]
        )
    caption = "systems"
    if not result.is_opinion and not names:
        caption += f"; their own figures want {FEWEST_FOR_LEVELS} gold queries, {result.gold_queries} are there"
    return Table(caption, head, rows)


def plan_blocks(plan: JudgingPlan | None) -> list[Block]:
    """Queries to judge, a line each."""
    if plan is None:
        return []
    if not plan.queries:
        return [Paragraph(f"The plan names no query: {plan.reason}.")]
    caption = (
        f"judge these {len(plan.queries):,} queries next, {plan.pairs:,} documents, seed {plan.seed}: {plan.reason}"
    )
    advice = (
        "For a file in which people judge these documents, keep this result by --output json > plan.json, then "
        "relabel review RUN --queries plan.json --to FILE."
    )
    return [Table(caption, ["query_id"], [[query] for query in plan.queries]), Paragraph(advice)]


def figure_title(name: str) -> str:
    """`ndcg@10` as people write it."""
    figure, _, depth = name.partition("@")
    titles = {"ndcg": "nDCG", "p": "P", "rr": "RR", "bad": "bad documents"}
    return f"{titles[figure]}@{depth}"


def _interval(found: Estimate) -> str:
    return f"{found.low:+.4f} to {found.high:+.4f}"
