"""B2: the student's advantage in time grows with the number of documents (R3A, Table 3).

    RELABEL_DATA=FOLDER python -m benchmarks.claims.number_of_documents --to FOLDER

FOLDER is that of `distilled_student`, whose student is exported here as an int8 bundle.

The rule, set before the first run. Time is CPU seconds of one thread in one process, models loaded and warm. A query of
TREC DL 2019 with 1, 10 or 100 of its passages is labelled by SmolLM2-135M (`r3a`, 24 tokens of reasoning and 16 a text;
and `direct`), and scored by the bundle (MiniLM-L6 int8). Three queries, drawn by a seed; with 100 passages `r3a` labels
the first query alone. A ratio is the sum of the teacher's seconds over that of the student's, for the same queries. The
claim's figure is the ratio of `r3a` at 100 passages over that at 1, for the first query; it holds above 1 in the
interval over rounds: five for the student at all sizes, and three for `r3a` at one passage, which are drawn again.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from benchmarks.claims.distilled_student import student_of
from benchmarks.claims.page import (
    COLOURS,
    NO_EFFECT,
    NO_N,
    RESAMPLES,
    Claim,
    Figure,
    Row,
    figure,
    smallest,
    verdict,
    write_page,
)
from benchmarks.claims.small_models import SEED, Work, command_of, passages, relabel_once, work_of
from relabel.export.loader import Student
from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.loop import RunLoop
from relabel.jobs.run.progress import Progress
from relabel.jobs.run.stop import Stop
from relabel.labelers.engines.transformers import Transformers
from relabel.labelers.registry import labeler_class
from relabel.manifests.labels import Pair
from relabel.manifests.models import resolve_model
from relabel.manifests.plan import ChunkId
from relabel.manifests.specs import EngineSpec

SIZES = (1, 10, 100)
NUM_QUERIES = 3
ROUNDS = {"r3a": {1: 3, 10: 1, 100: 1}, "direct": {1: 3, 10: 3, 100: 1}, "student": {1: 5, 10: 5, 100: 5}}
"""How often each is timed for each query."""
ONE_QUERY = ("r3a", 100)
"""Timed for the first query alone."""
TEACHERS = {
    "r3a": {"name": "r3a", "context": "none", "max_think_tokens": 24, "max_text_tokens": 16, "evidence": "constrained"},
    "direct": {"name": "direct", "grades": 4},
}
PAPER = {1: 4.6, 10: 6.8, 100: 10.0}
"""R3A-7B over R3A-Distill-1.5B, Table 3."""


@dataclass(frozen=True)
class Timed:
    """CPU seconds by query and round."""

    who: str
    size: int
    seconds: list[list[float]]

    @property
    def of_first(self) -> np.ndarray:
        """The rounds of the first query."""
        return np.array(self.seconds[0])

    def total(self, num_queries: int) -> float:
        """Mean of rounds, over the first queries."""
        return float(sum(np.mean(rounds) for rounds in self.seconds[:num_queries]))


def main() -> None:
    """Time all of them and write the page."""
    work = work_of(__doc__)
    write_page(claim(work), work.pages)


def claim(work: Work) -> Claim:
    """Ratios of time by number of documents."""
    file = work.folder / "number-of-documents.json"
    if not file.exists():
        file.write_text(json.dumps(timed(work)), encoding="utf-8")
    held = json.loads(file.read_text(encoding="utf-8"))
    times = {(one["who"], one["size"]): Timed(**one) for one in held}
    ratios = {(who, size): ratio(times, who, size) for who in TEACHERS for size in SIZES}
    growth, growth_R = growth_of(times)
    grown = figure("growth", growth, growth_R, ".2f")
    return Claim(
        name="number-of-documents",
        title="The student's advantage grows with the number of documents",
        source="R3A, Table 3",
        answer=f"With one document the reasoning teacher takes {ratios['r3a', 1].value:,.0f} times the student's time, "
        f"with a hundred {ratios['r3a', 100].value:,.0f} times.",
        here=verdict(grown, 1),
        there=NO_N,
        n=Row("n", f"{NUM_QUERIES} queries, one of them with 100 passages; one CPU thread", "one run, 8 GPUs"),
        headline=Row("ratio at 100 documents over that at 1, r3a", grown, "2.2 (10.0, 4.6)"),
        smallest=Row(
            "smallest growth that n could show", Figure("smallest", smallest(growth_R), form=".2f"), NO_EFFECT
        ),
        rows=[
            *(
                Row(
                    f"time of the teacher over the student's: {size} documents: r3a · direct",
                    [ratios[who, size] for who in TEACHERS],
                    f"{PAPER[size]} (reasoning)",
                )
                for size in SIZES
            ),
            *(
                Row(
                    f"CPU seconds of one query, {size} documents: r3a · direct · student",
                    [
                        Figure(f"seconds {who} {size}", times[who, size].total(1), form=",.3f")
                        for who in (*TEACHERS, "student")
                    ],
                    "",
                )
                for size in SIZES
            ),
        ],
        how=command_of("number_of_documents") + "The line is 1. Teacher: SmolLM2-135M in bfloat16; student: MiniLM-L6, "
        "int8. The interval is over rounds of one query, not over queries. Ratios of these two models are not those of "
        "the paper's (7B and 1.5B): whether the ratio grows is the claim. Reasoning is cut at 24 tokens.",
        gpu="the paper's sizes: `--set engine.model=…`",
        draw=lambda axes: draw(axes, ratios),
    )


# ------------------------------------------------------------------------------
# Timing.


def timed(work: Work) -> list[dict[str, Any]]:
    """All of it, as it is kept."""
    pairs = passages(work, NUM_QUERIES, max(SIZES))
    queries = pairs["query_id"].unique(maintain_order=True).to_list()
    bundle = work.folder / "bundle"
    options = ("--to", bundle, "--precisions", "fp32,int8", "--set", "parity.min_pairs=50")
    relabel_once(work.folder, "bundle-export", "export", student_of(work), *options)
    student = Student(bundle, provider="cpu", precision="int8", threads=1)
    sides: dict[str, Callable[[list[Pair]], object]] = {
        "student": lambda some: student.expected_grades([(one.query, one.document) for one in some])
    }
    engine = engine_of(work)
    for name in TEACHERS:
        sides[name] = teacher(engine, name)
    held = []
    for who, label in sides.items():
        label(pairs_of(pairs, queries[0], 2))  # warm-up
        for size in SIZES:
            used = queries[:1] if (who, size) == ONE_QUERY else queries
            seconds = []
            for query in used:
                rounds = ROUNDS[who][size]
                seconds.append([seconds_of(label, pairs_of(pairs, query, size)) for _ in range(rounds)])
            print(who, size, seconds, flush=True)
            held.append({"who": who, "size": size, "seconds": seconds})
    return held


def engine_of(work: Work) -> Any:
    """The teacher's model, loaded."""
    args = Transformers.Args.model_validate({"device": "cpu", "batch_size": 16, **work.engine})
    return Transformers(EngineSpec(name="transformers", model=str(resolve_model(work.model).path), args=args))


def teacher(engine: Any, name: str) -> Callable[[list[Pair]], object]:
    """Labels pairs in the run loop."""
    kind = labeler_class(name)
    options = kind.Options(**TEACHERS[name])
    labeler = kind(options)
    engine.prepare(labeler.probe())

    def label(some: list[Pair]) -> object:
        loop = RunLoop(labeler, options, engine, seed=SEED)
        chunks = iter([ChunkWork(ChunkId(0, 0, 1), some)])
        return loop.label_chunks(chunks, lambda _: True, progress=Progress(), stop=Stop())

    return label


def pairs_of(pairs: pl.DataFrame, query: str, size: int) -> list[Pair]:
    """The first passages of a query."""
    rows = pairs.filter(pl.col("query_id") == query).head(size)
    columns = ("query_id", "query", "doc_id", "document")
    return [Pair(number, *values) for number, values in enumerate(rows.select(columns).iter_rows())]


def seconds_of(label: Callable[[list[Pair]], object], some: list[Pair]) -> float:
    """CPU seconds of this process."""
    started = time.process_time()
    label(some)
    return time.process_time() - started


# ------------------------------------------------------------------------------
# Figures.


def ratio(times: dict[tuple[str, int], Timed], who: str, size: int) -> Figure:
    """The teacher's time over the student's, for the same queries."""
    num_queries = len(times[who, size].seconds)
    value = times[who, size].total(num_queries) / times["student", size].total(num_queries)
    return Figure(f"ratio {who} {size}", value, form=",.0f")


def growth_of(times: dict[tuple[str, int], Timed]) -> tuple[float, np.ndarray]:
    """The ratio of `r3a` at most passages over that at one, for the first query; and of rounds that are drawn again."""
    random = np.random.default_rng(SEED)
    most = max(SIZES)

    def drawn(who: str, size: int) -> np.ndarray:
        rounds = times[who, size].of_first
        return rounds[random.integers(0, len(rounds), (RESAMPLES, len(rounds)))].mean(1)

    parts = [(who, size) for who in ("r3a", "student") for size in (most, 1)]
    teacher_most_R, teacher_one_R, student_most_R, student_one_R = (drawn(*part) for part in parts)
    teacher_most, teacher_one, student_most, student_one = (times[part].of_first.mean() for part in parts)
    growth_R = (teacher_most_R / student_most_R) / (teacher_one_R / student_one_R)
    return float((teacher_most / student_most) / (teacher_one / student_one)), growth_R


def draw(axes: Any, ratios: dict[tuple[str, int], Figure]) -> None:
    """Ratios by number of documents."""
    for place, who in enumerate(TEACHERS):
        axes.plot(SIZES, [ratios[who, size].value for size in SIZES], "o-", color=COLOURS[place], label=who)
    axes.plot(SIZES, [PAPER[size] for size in SIZES], "s--", color=COLOURS[3], label="the paper")
    axes.set(xlabel="documents", ylabel="teacher's time, student = 1", xscale="log", yscale="log", xticks=SIZES)
    axes.legend(frameon=False)


if __name__ == "__main__":
    main()
