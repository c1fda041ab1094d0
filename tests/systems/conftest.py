"""A small collection in a folder: what humans and a judge say of it, and two systems' rankings; the CLI in this
process (from the jobs' tests).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jobs.conftest import folder, no_scheduler, pairs, relabel, write_job, write_pairs  # noqa: F401

Grades = dict[str, dict[str, int]]


@dataclass
class Collection:
    """Grades of each query's documents, and systems' scores of them: of the good system, and of the bad one."""

    humans: Grades
    judge: Grades
    systems: dict[str, dict[str, dict[str, float]]]

    @property
    def queries(self) -> list[str]:
        return list(self.humans)

    def write_run(self, name: str, path: str | None = None, *, depth: int = 100) -> str:
        """A system as a TREC run file."""
        lines = []
        for query, scores in self.systems[name].items():
            best = sorted(scores, key=lambda doc: (scores[doc], doc), reverse=True)[:depth]
            lines += [f"{query} Q0 {doc} {rank} {scores[doc]} {name}" for rank, doc in enumerate(best, 1)]
        return write(path or f"{name}.run", lines)

    def write_qrels(self, grades: Grades, path: str, *, queries: int | None = None) -> str:
        """Grades of the first queries as TREC qrels."""
        chosen = self.queries[:queries]
        return write(path, [f"{query} 0 {doc} {grade}" for query in chosen for doc, grade in grades[query].items()])

    def write_all(self, *, gold: int) -> tuple[str, ...]:
        """Both systems, labels and gold of so many queries, as arguments of `relabel systems`."""
        runs = [self.write_run(name) for name in self.systems]
        self.write_qrels(self.judge, "judge.qrels")
        self.write_qrels(self.humans, "humans.qrels", queries=gold)
        return (*runs, "--labels", "judge.qrels", *(("--gold", "humans.qrels") if gold else ()))


def write(path: str, lines: list[str]) -> str:
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def make_collection(
    queries: int = 40, documents: int = 30, *, seed: int = 3, judge_noise: float = 0.5, gap: float = 1.5
) -> Collection:
    """Grades 0 to 3; the judge is kinder than humans, and errs.

    Args:
        gap: by how much more noise the bad system has.
    """
    random = np.random.default_rng(seed)
    found = Collection({}, {}, {"good": {}, "bad": {}})
    for number in range(queries):
        query = f"q{number:03d}"
        docs = [f"d{number}-{document}" for document in range(documents)]
        truth = random.normal(random.normal(0.4, 0.4), 1, documents)
        human = np.clip(np.floor(truth + 0.5), 0, 3)
        judge = np.clip(np.floor(truth + 0.9 + judge_noise * random.normal(size=documents)), 0, 3)
        found.humans[query] = {doc: int(grade) for doc, grade in zip(docs, human, strict=True)}
        found.judge[query] = {doc: int(grade) for doc, grade in zip(docs, judge, strict=True)}
        for name, noise in (("good", 0.8), ("bad", 0.8 + gap)):
            scores = truth + noise * random.normal(size=documents)
            found.systems[name][query] = {doc: round(float(score), 4) for doc, score in zip(docs, scores, strict=True)}
    return found


@pytest.fixture
def collection(folder: Path) -> Collection:  # noqa: F811
    """The collection; its files are written into the working folder when they are asked for."""
    return make_collection()


@pytest.fixture
def write_lines(folder: Path) -> Callable[[str, list[str]], str]:  # noqa: F811
    """`write_lines("a.run", lines)`: a text file in the folder; its name."""
    return write


@pytest.fixture
def compare(relabel: Callable[..., Any]) -> Callable[..., dict[str, Any]]:  # noqa: F811
    """`compare("a.run", …)`: the JSON of `relabel systems`."""

    def call(*arguments: str) -> dict[str, Any]:
        done = relabel("systems", *arguments, "--output", "json")
        assert done.code == 0, done
        found: dict[str, Any] = json.loads(done.out)
        return found

    return call
