"""What all claims share: figures, intervals over queries, the smallest effect that n could show, and the page.

Letters: R resamples, Q queries.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure as Canvas

RESAMPLES = 1000
POWER = 2.8
"""1.96 + 0.84 standard errors: an effect of so many is found by a two-sided test at 5 % in 80 % of cases."""
DIFFERING = (0.2, 0.3)
"""Assumed shares of rows on which two systems of a paper differ; no paper gives its own."""

HOLDS = "holds"
FAILS = "fails"
NOT_SHOWN = "cannot be shown here"
SHOWN = "shown there"
NOT_SHOWN_THERE = "could not be shown there"
BORDERLINE = "borderline there"
NO_N = "no n to judge by"
"""The paper has no such figure, or its n is not in what we have of it."""
NO_EFFECT = "not derivable: no n in what we have of it"
"""In the place of the smallest effect that the paper's n could show."""

PAGES = {
    "hardest-grade": "the hardest grade",
    "two-areas": "two areas",
    "overrating": "overrating",
    "system-order": "the order of systems",
    "few-humans": "a few humans",
    "prompt-noise": "prompts and models",
    "stuffing": "keyword stuffing",
    "equal-budget": "evidence at equal tokens",
    "sections": "sections and windows",
    "prompted-or-trained": "a prompted model against the same model trained (Graph-GRPO, Table 2)",
    "number-of-documents": "the student's advantage in time by number of documents (R3A, Table 3)",
    "several-tries": "pass@k of a base model and a trained one (R3A, Figure 3a)",
    "reasoning-tries": "pass@k of tries that reason (R3A, Figure 3a)",
    "one-stage-or-two": "one stage against two (R3A, Table 4)",
    "distilled-student": "a distilled student against a larger model trained on grades (R3A, Table 2)",
    "complexity": "a logistic regression that finds complex queries (R2RAG)",
    "enough": "a review knows when it has enough (R2RAG)",
}
"""In the order of the index, and what the index calls a page that is open: first what published labels answer, then
what a small model answers on a CPU.
"""
MEASURED = {
    "hardest-grade": "share of judges whose F1 is lowest at grade 1: above 0.5",
    "two-areas": "AUC of irrelevant against relevant, less AUC of good against best: above 0.039, the paper's least",
    "overrating": "share of judges that call more passages relevant than humans do: above 0.5",
    "system-order": "share of pairs of lexical systems that a judge has in the humans' order: above 0.95",
    "few-humans": "share of 95 % intervals, with ten queries judged by humans, that hold the truth: above 0.94",
    "prompt-noise": "AUC of the mean of three random prompts, less that of the best one: above 0",
    "stuffing": "share called relevant with all of the query's words, less that with under a quarter of them: above 0",
    "equal-budget": "share of gold kept by evidence of a fitting size, less that of a fixed size: above 0",
    "sections": "share of answers in the section, less that in the window: above 0",
    "prompted-or-trained": "macro F1, trained less prompted: above 0",
    "number-of-documents": "teacher's time over student's, at 30 documents as a multiple of that at one: above 1",
    "several-tries": "pass@8, trained less base: above 0",
    "reasoning-tries": "pass@8 of answers that reason, trained less base: above 0",
    "one-stage-or-two": "accuracy, two stages less one: above 0",
    "distilled-student": "accuracy, student less larger model: above 0",
    "complexity": "AUC, student less teacher: above -0.05, for a teacher that knows complex queries",
    "enough": "AUC of P(yes) of a review, a gold paragraph missing against none: above 0.5",
}
"""What is measured of a claim, and where its interval has to lie for the claim to hold."""
INDEX = Path(__file__).with_name("index.txt")
COLOURS = ("#1f5fa8", "#c0392b", "#2e8b57", "#888888")


@dataclass(frozen=True)
class Figure:
    """A number of a page, with its 95 % interval where it has one.

    Args:
        name: of the figure in `figures.json`, unique within its claim.
        form: how the page shows it, as in `format`.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    form: str = ".3f"

    def __str__(self) -> str:
        value = format(self.value, self.form)
        if self.low is None or self.high is None:
            return value
        return f"{value} ({format(self.low, self.form)} to {format(self.high, self.form)})"


Cell = str | Figure


@dataclass(frozen=True)
class Row:
    """A line of a page's table."""

    what: str
    here: Cell | Sequence[Cell]
    paper: str = "–"

    @property
    def figures(self) -> Iterable[Figure]:
        """Its numbers."""
        parts = [self.here] if isinstance(self.here, str | Figure) else self.here
        return [part for part in parts if isinstance(part, Figure)]

    def __str__(self) -> str:
        parts = [self.here] if isinstance(self.here, str | Figure) else self.here
        return f"| {self.what} | {' · '.join(map(str, parts))} | {self.paper} |"


@dataclass(frozen=True)
class Claim:
    """A claim and what became of it.

    Args:
        name: of the page and the picture.
        title: the claim, as the paper means it.
        source: the paper and its table.
        answer: one sentence for somebody who reads no other.
        here: `HOLDS`, `FAILS` or `NOT_SHOWN`.
        there: whether the paper's own n could show it.
        n: what was counted, here and in the paper.
        headline: the figure that decides, and the paper's own.
        smallest: the smallest effect that this n could show, and that of the paper.
        rows: the other lines of the table.
        how: how it was counted, and what is not the same as in the paper.
        gpu: what a GPU would add.
        draw: draws the picture into matplotlib's axes.
        drawn: what the picture shows and the table does not.
    """

    name: str
    title: str
    source: str
    answer: str
    here: str
    there: str
    n: Row
    headline: Row
    smallest: Row
    rows: list[Row]
    how: str
    gpu: str
    draw: Callable[[Any], None]
    drawn: Sequence[Figure] = ()


# ------------------------------------------------------------------------------
# Statistics.


def resampled(name: str, num_queries: int) -> np.ndarray:
    """How often each query of a collection is in each resample, float64 [R, Q]; the same for the same name."""
    random = np.random.default_rng(list(name.encode()))
    drawn_RQ = random.integers(0, num_queries, (RESAMPLES, num_queries))
    return np.array([np.bincount(drawn_Q, minlength=num_queries) for drawn_Q in drawn_RQ], dtype=np.float64)


def figure(name: str, value: float, value_R: np.ndarray, form: str = ".3f") -> Figure:
    """A value with the percentiles of its resamples."""
    low, high = np.nanpercentile(value_R, (2.5, 97.5))
    return Figure(name, float(value), float(low), float(high), form)


def figure_by_deviation(name: str, value: float, value_R: np.ndarray, form: str = ".3f") -> Figure:
    """A value with 1.96 standard deviations of its resamples to both sides, 1 at most. For figures of an order: a
    resample has some queries twice and others not at all, so its order is worse than that of the queries themselves,
    and percentiles would lie below the value.
    """
    half = 1.96 * float(np.nanstd(value_R, ddof=1))
    return Figure(name, float(value), float(value) - half, min(float(value) + half, 1.0), form)


def smallest(value_R: np.ndarray) -> float:
    """The smallest effect that these queries could show with 80 % power."""
    return float(POWER * np.nanstd(value_R, ddof=1))


def smallest_of(num_rows: int) -> str:
    """The smallest difference of two shares over a paper's rows, at the assumed shares of differing rows."""
    least, most = (100 * POWER * np.sqrt(share / num_rows) for share in DIFFERING)
    return f"{least:.1f} to {most:.1f} points ({num_rows:,} rows, d 0.2 to 0.3)"


def verdict(found: Figure, line: float) -> str:
    """`HOLDS` where the interval is above the line, `FAILS` where it is below."""
    assert found.low is not None
    assert found.high is not None
    if found.low > line:
        return HOLDS
    if found.high < line:
        return FAILS
    return NOT_SHOWN


# ------------------------------------------------------------------------------
# Pages.


def write_page(claim: Claim, folder: Path) -> None:
    """`<name>.md` and `images/<name>.svg`, and what the index and `figures.json` have of it."""
    draw_picture(claim, folder / "images" / f"{claim.name}.svg")
    table = "\n".join(map(str, (claim.n, claim.headline, claim.smallest, *claim.rows)))
    text = f"""# {claim.title}

**{claim.here.capitalize()}; {claim.there}.** {claim.answer}

![{claim.title}](images/{claim.name}.svg)

| {claim.source} | Here | The paper |
|---|---|---|
{table}

{claim.how}
"""
    (folder / f"{claim.name}.md").write_text(text, encoding="utf-8")
    write_index(claim, folder)


def figures(claim: Claim) -> Iterable[Figure]:
    """Every number of the page."""
    for row in (claim.headline, claim.smallest, *claim.rows):
        yield from row.figures
    yield from claim.drawn


def draw_picture(claim: Claim, path: Path) -> None:
    """The same figures give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": "relabel", "svg.fonttype": "none", "font.size": 9}):
        canvas = Canvas(figsize=(6.0, 3.0), layout="constrained")
        axes = canvas.subplots()
        claim.draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        canvas.savefig(path, format="svg", metadata={"Date": None})


def draw_intervals(axes: Any, found: Sequence[Figure], line: float, label: str) -> None:
    """Figures from the least to the largest with their intervals, and the line that the claim is about."""
    ordered = sorted(found, key=lambda one: one.value)
    for place, one in enumerate(ordered):
        axes.plot([one.low, one.high], [place, place], color=COLOURS[3], linewidth=1)
    axes.plot([one.value for one in ordered], range(len(ordered)), "o", color=COLOURS[0], markersize=3)
    axes.axvline(line, color=COLOURS[1], linewidth=1)
    axes.set(xlabel=label, yticks=[])


def write_index(claim: Claim, folder: Path) -> None:
    """A claim's line among those of all claims, and its figures in full precision.

    `figures.json` has both, so that a command which writes one page leaves the lines of the others.
    """
    file = folder / "figures.json"
    held: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    headline = next(iter(claim.headline.figures))
    effect = " · ".join(map(str, claim.smallest.figures))
    cells = (
        f"[{claim.title}]({claim.name}.md)",
        claim.source,
        f"{headline}; {effect}",
        f"{claim.headline.paper}; {claim.smallest.paper}",
        claim.here,
        claim.there,
        claim.gpu,
    )
    held[claim.name] = {
        "line": " | ".join(cells),
        "figures": {one.name: [one.value, one.low, one.high] for one in figures(claim)},
    }
    held = {name: held[name] for name in PAGES if name in held}
    file.write_text(json.dumps(held, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    render_index(folder)


def render_index(folder: Path) -> None:
    """`index.md`, of what `figures.json` and the pages hold."""
    held = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    rows = "\n".join(_index_row(name, one["line"]) for name, one in held.items())
    answers = "\n".join(_answer(folder, name, one["line"]) for name, one in held.items())
    missing = "; ".join(what for name, what in PAGES.items() if name not in held) or "none"
    text = INDEX.read_text(encoding="utf-8").format(answers=answers, rows=rows, missing=missing)
    (folder / "index.md").write_text(text, encoding="utf-8")


def _answer(folder: Path, name: str, line: str) -> str:
    """A claim, its verdict and what its page says first."""
    title, _, _, _, verdict_here, _, _ = line.split(" | ")
    first = (folder / f"{name}.md").read_text(encoding="utf-8").split("\n\n")[1]
    answer = first.partition(".** ")[2]
    return f"- {title}: **{verdict_here}.** {answer}"


def _index_row(name: str, line: str) -> str:
    """A line of `figures.json` with what was measured, the verdict next to the claim."""
    title, source, here, paper, verdict_here, verdict_there, gpu = line.split(" | ")
    cells = (title, verdict_here, MEASURED[name], here, paper, verdict_there, source, gpu)
    return f"| {' | '.join(cells)} |"
