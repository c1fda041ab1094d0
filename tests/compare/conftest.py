"""The forged runs and the browser of tests/report, the commands of tests/jobs, and two judges who disagree."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jobs.conftest import folder, no_scheduler, relabel, write_job  # noqa: F401
from tests.report.conftest import Judgment, chromium, forge_run, open_page, plain_pairs, write_table  # noqa: F401

GRADES = 3


def judgments(rows: int, *, seed: int, like: np.ndarray | None = None) -> list[Judgment]:
    """Random labels of so many rows, near to the grades given; some rows have no distribution, some no label."""
    random = np.random.default_rng(seed)
    found = []
    for row in range(rows):
        lean = np.zeros(GRADES) if like is None else np.eye(GRADES)[like[row]]
        probs = random.dirichlet(np.ones(GRADES)) + lean
        probs = (probs / probs.sum()).astype(np.float32).astype(float)
        grade = int(probs.argmax()) if random.random() < 0.9 else int(random.integers(GRADES))
        shown = None if random.random() < 0.1 else tuple(probs.tolist())
        is_refused = random.random() < 0.08
        found.append(Judgment(grade, shown, reasoning=f"because {row}", status="refused" if is_refused else "ok"))
    return found


@pytest.fixture
def two_runs(folder: Path) -> Callable[..., tuple[list[dict[str, Any]], list[Judgment], list[Judgment]]]:  # noqa: F811
    """`two_runs(20, 7)`: pairs of 20 queries of 7 documents in pairs.parquet, labelled in `a` and `b`; the pairs and
    what each run says.
    """

    def make(
        queries: int = 20, docs: int = 7, *, seed: int = 1
    ) -> tuple[list[dict[str, Any]], list[Judgment], list[Judgment]]:
        pairs = plain_pairs(queries, docs)
        path = write_table(folder / "pairs.parquet", pairs)
        gold = np.array([pair["grade"] for pair in pairs])
        sides = [judgments(len(pairs), seed=seed + side, like=gold) for side in (0, 1)]
        for name, said in zip("ab", sides, strict=True):
            forge_run(folder / name, path, lambda pair, said=said: said[pair.row_id], name=f"run-{name}", chunk_rows=8)
        return pairs, sides[0], sides[1]

    return make
