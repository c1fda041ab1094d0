"""The folder and commands of tests/jobs, label files with qrels next to them, and tables of random grades."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jobs.conftest import committed, folder, no_scheduler, pairs, relabel, write_job, write_pairs  # noqa: F401


@pytest.fixture
def write_rows(folder: Path) -> Callable[..., str]:  # noqa: F811
    """`write_rows(rows, "labels.jsonl")`: one JSON object a line; its path."""

    def write(rows: list[dict[str, Any]], path: str = "labels.jsonl") -> str:
        (folder / path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def run(
    relabel: Callable[..., Any],  # noqa: F811
    write_pairs: Callable[..., Path],  # noqa: F811
    write_job: Callable[..., str],  # noqa: F811
) -> Callable[..., None]:
    """`run({"engine": …})`: a finished run of the folder's pairs, in out/ecom."""

    def finish(changes: dict[str, Any] | None = None, code: int = 0) -> None:
        write_pairs()
        assert relabel("run", write_job(changes)).code == code

    return finish


@pytest.fixture
def random_rows() -> Callable[..., list[dict[str, Any]]]:
    """`random_rows(60)`: labels of six queries that often agree with their gold grade, with distributions; seeded."""

    def make(count: int = 60, *, grades: int = 3, queries: int = 6, seed: int = 1) -> list[dict[str, Any]]:
        random = np.random.default_rng(seed)
        gold = random.integers(0, grades, count)
        probs = random.dirichlet(np.ones(grades), count) + 0.5 * np.eye(grades)[gold]
        probs /= probs.sum(1, keepdims=True)
        return [
            {
                "query_id": f"q{row % queries}",
                "doc_id": f"d{row}",
                "label": int(probs[row].argmax()),
                "grade": int(gold[row]),
                "probs": [float(value) for value in probs[row]],
            }
            for row in range(count)
        ]

    return make
