"""A10: reading by a page's structure finds more than reading by place (RDR2, Table 2: 57.3 answers in 100, 49.8 without
structure). Here nobody is trained: the section of the best passage, against a window around it.
"""

import json
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.claims.page import COLOURS, NO_EFFECT, NO_N, Claim, Figure, Row, figure, resampled, smallest, verdict
from benchmarks.real_runs import relabel

QUESTIONS = Path(__file__).parents[1] / "routing_questions.jsonl"
PASSAGE_WORDS = 100
TOP = 5
SECTION = "the best passage's section"
WINDOW = "a window around it, as long"


@dataclass(frozen=True)
class Page:
    """A page's cleaned text.

    Args:
        words: start and end of each word, in code points.
        sections: where each section starts, in words, the first at 0.
    """

    text: str
    words: list[tuple[int, int]]
    sections: list[int]

    def read(self, first: int, stop: int) -> str:
        """Words `first` to `stop`."""
        if first >= stop:
            return ""
        return self.text[self.words[first][0] : self.words[stop - 1][1]]


@dataclass(frozen=True)
class Passage:
    """Words `first` to `stop` of a page."""

    page: str
    first: int
    stop: int


@dataclass(frozen=True)
class Reading:
    """Whether the answer is in what is read, and its words."""

    is_there: bool
    words: int


def claim(folder: Path) -> Claim:
    """Answers found by section and by window."""
    sources = {row["page_id"]: row["wikitext"] for row in wikitext(folder)}
    with tempfile.TemporaryDirectory() as made:
        pages = pages_of(sources, Path(made))
    questions = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").split("\n") if line]
    best = retrieved(pages, [one["question"] for one in questions])
    found: dict[str, list[Reading]] = {}
    for question, passages in zip(questions, best, strict=True):
        answer = sources[question["page"]][question["start"] : question["end"]].casefold()
        for way, text in texts_read(pages, passages).items():
            found.setdefault(way, []).append(Reading(answer in text.casefold(), len(text.split())))
    weight_RQ = resampled("routing questions", len(questions)) / len(questions)
    there = {way: np.array([one.is_there for one in held], dtype=float) for way, held in found.items()}
    words = {way: float(np.mean([one.words for one in held])) for way, held in found.items()}
    shares = [figure(f"found by {way}", held.mean(), weight_RQ @ held) for way, held in there.items()]
    lengths = [Figure(f"words of {way}", mean, form=",.0f") for way, mean in words.items()]
    difference_Q = there[SECTION] - there[WINDOW]
    difference = figure("difference", difference_Q.mean(), weight_RQ @ difference_Q, "+.3f")
    return Claim(
        name="sections",
        title="A page's section holds more than a window as long",
        source="after RDR2, Table 2",
        answer=f"The section around the best passage holds {there[SECTION].mean():.0%} of the answers, a window of as "
        f"many words {there[WINDOW].mean():.0%}.",
        here=verdict(difference, 0),
        there=NO_N,
        n=Row("n", f"{len(questions)} questions, {len(pages)} pages", "ASQA, n not printed"),
        headline=Row("answers found, section less window", difference, "EM of passages: 57.3, without structure 49.8"),
        smallest=Row(
            "smallest difference that n could show", Figure("smallest", smallest(weight_RQ @ difference_Q)), NO_EFFECT
        ),
        rows=[
            *(
                Row(f"answer in it · words: {way}", (share, length))
                for way, share, length in zip(there, shares, lengths, strict=True)
            ),
        ],
        how="Passages have 100 words, the best are by BM25 over all pages; an answer counts word for word. RDR2 "
        "trains a model to choose nodes of the page's tree, which is not tested here: an untrained one lost "
        "to windows (`benchmarks/routing_pages_cpu_2026-11-23.md` in a clone). The line is 0.",
        gpu="the trained router: `relabel train` of `route`, `--set init=…`",
        draw=lambda axes: draw(axes, shares, words),
    )


def wikitext(folder: Path) -> list[dict[str, Any]]:
    """Rows of the pages."""
    return pq.read_table(folder / "wikitext_structured" / "pages.parquet").to_pylist()


def pages_of(sources: dict[str, str], made: Path) -> dict[str, Page]:
    """Cleaned text, words and sections, by `relabel pairs tree`."""
    rows = [{"query_id": page, "query": page, "doc_id": page, "wikitext": text} for page, text in sources.items()]
    pq.write_table(pa.Table.from_pylist(rows), made / "pages.parquet")
    arguments = ("--to", made / "trees.parquet", "--format", "wikitext", "--column", "wikitext")
    relabel("pairs", "tree", made / "pages.parquet", *arguments)
    pages = {}
    for row in pq.read_table(made / "trees.parquet", columns=["doc_id", "document", "tree"]).to_pylist():
        words = [match.span() for match in re.finditer(r"\S+", row["document"])]
        starts = [node["start"] for node in row["tree"] if node["type"] == "structure"]
        sections = sorted({sum(start < at for start, _ in words) for at in starts} | {0})
        pages[row["doc_id"]] = Page(row["document"], words, sections)
    return pages


def retrieved(pages: dict[str, Page], questions: list[str]) -> list[list[Passage]]:
    """The best passages of each question, best first."""
    passages = []
    for name, page in pages.items():
        for first in range(0, len(page.words), PASSAGE_WORDS):
            passages.append(Passage(name, first, min(first + PASSAGE_WORDS, len(page.words))))
    index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    texts = [pages[one.page].read(one.first, one.stop) for one in passages]
    index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    places, _ = index.retrieve(bm25s.tokenize(questions, show_progress=False), k=TOP, show_progress=False)
    return [[passages[place] for place in row] for row in places]


def texts_read(pages: dict[str, Page], passages: list[Passage]) -> dict[str, str]:
    """What each way gives to read for one question."""
    best = passages[0]
    page = pages[best.page]
    section = section_of(page, best)
    return {
        "the best passage": page.read(best.first, best.stop),
        SECTION: page.read(*section),
        WINDOW: page.read(*window_of(page, best, section[1] - section[0])),
        "five passages": "\n".join(pages[one.page].read(one.first, one.stop) for one in passages),
        "the page of the best passage": page.text,
        "whole pages": "\n".join(pages[name].text for name in in_order(one.page for one in passages)),
    }


def section_of(page: Page, passage: Passage) -> tuple[int, int]:
    """First word and stop of the section that the passage's middle is in."""
    middle = (passage.first + passage.stop) // 2
    first = max(start for start in page.sections if start <= middle)
    stop = min((start for start in page.sections if start > middle), default=len(page.words))
    return first, stop


def window_of(page: Page, passage: Passage, length: int) -> tuple[int, int]:
    """So many words around the passage's middle, moved where the page ends."""
    middle = (passage.first + passage.stop) // 2
    first = min(max(0, middle - length // 2), max(0, len(page.words) - length))
    return first, min(first + length, len(page.words))


def in_order(names: Iterable[str]) -> list[str]:
    """Each once."""
    return list(dict.fromkeys(names))


def draw(axes: Any, shares: list[Figure], words: dict[str, float]) -> None:
    """Answers found by words read."""
    for place, (share, way) in enumerate(zip(shares, words, strict=True)):
        axes.plot([words[way]] * 2, [share.low, share.high], color=COLOURS[3], linewidth=1)
        axes.plot(words[way], share.value, "os^vDP"[place], color=COLOURS[place % len(COLOURS)], label=way)
    axes.set(xlabel="words read", ylabel="answer in it", xscale="log", ylim=(0, 1.05))
    axes.legend(frameon=False, loc="lower right", fontsize=7)
