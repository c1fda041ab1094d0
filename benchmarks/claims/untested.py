"""Tier C: claims that no run here can test, and what each would take."""

from dataclasses import dataclass
from math import ceil
from pathlib import Path

from benchmarks.claims.page import DIFFERING, NOT_SHOWN_THERE, POWER, SHOWN


@dataclass(frozen=True)
class Untested:
    """A difference that a paper prints.

    Args:
        points: the difference, in points of a share or of F1.
        rows: of the paper's test set.
        besides: what it takes besides rows.
    """

    what: str
    source: str
    points: float
    rows: int
    besides: str


CLAIMS = (
    Untested("R3A over R1, 7B", "R3A, Table 2", 2.0, 900, "both trained, a GPU"),
    Untested("distilled 1.5B over fine-tuned 7B", "R3A, Table 2", 1.7, 900, "both trained, a GPU"),
    Untested("two stages over one", "R3A, Table 4", 4.6, 900, "both trained, a GPU"),
    Untested("masking", "Graph-GRPO, Table 2", 0.78, 92_419, "five seeds of each, a GPU"),
    Untested("graph over plain GRPO", "Graph-GRPO, Table 2", 0.35, 92_419, "five seeds of each, a GPU"),
    Untested("learned over fixed coefficients", "Graph-GRPO, Table 2", 0.04, 92_419, "nobody has such a set"),
    Untested("ASQA: 19 right answers over 14", "RES-RAG, Table 1", 1.25, 400, "an 8B model, trained by GRPO"),
)
SEED_SD = 0.057
"""Of the difference between heads and label over six seeds: benchmarks/heads_vs_label_cpu_2026-11-23.md."""
HEADS = (0.04, 0.03)
PAGE = Path(__file__).with_name("untested.txt")


def write(folder: Path) -> None:
    """`untested.md`."""
    rows = "\n".join(row(one) for one in CLAIMS)
    seeds = ", ".join(f"{ceil((POWER * SEED_SD / effect) ** 2)} for a difference of {effect}" for effect in HEADS)
    text = PAGE.read_text(encoding="utf-8").format(rows=rows, seeds=seeds, seed_sd=SEED_SD)
    (folder / "untested.md").write_text(text, encoding="utf-8")


def row(claim: Untested) -> str:
    """A line of the table."""
    least, most = (100 * POWER * (share / claim.rows) ** 0.5 for share in DIFFERING)
    fewest, needed = (ceil(share * (100 * POWER / claim.points) ** 2) for share in DIFFERING)
    there = "borderline"
    if claim.points < least:
        there = NOT_SHOWN_THERE
    if claim.points > most:
        there = SHOWN
    shows = f"{least:.1f} to {most:.1f}"
    return (
        f"| {claim.what} | {claim.source} | {claim.points:g} | {shows} ({claim.rows:,} rows) "
        f"| {fewest:,} to {needed:,} | {there} | {claim.besides} |"
    )
