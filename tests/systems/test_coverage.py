"""Coverage of the intervals in small, by the benchmark's own simulation: judges that are kinder than humans and err,
and one that made a system's ranking itself.
"""

import os
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.systems_coverage import Outcome, load_collections, outcomes, simulate
from relabel.manifests.metrics.top import NDCG

DATA = Path(os.environ.get("RELABEL_TEST_DATA", Path(__file__).parents[2] / "../shared/data")).resolve()


def simulated(*, favour: float, seed: int = 4) -> Outcome:
    """Twelve pairs of systems over 60 queries; the judge adds `favour` to the difference of each."""
    random = np.random.default_rng(seed)
    human_PG = random.normal(random.normal(0, 0.05, (12, 1)), 0.2, (12, 60))
    judge_PG = human_PG + favour + random.normal(0, 0.1, (12, 60))
    draw_RG = random.integers(0, 60, (600, 60))
    return simulate(human_PG, judge_PG, draw_RG, gold=10, is_fitted=False)


@pytest.mark.parametrize("favour", [0.0, 0.1])
def test_ten_gold_queries_keep_the_promise_whatever_the_judge_favours(favour: float) -> None:
    found = simulated(favour=favour)
    assert 0.935 <= found.covered <= 0.965
    assert found.width < 0.85
    assert found.wrong[0] < 0.01


def test_a_judge_that_favours_a_system_is_wrong_alone() -> None:
    fair, unfair = simulated(favour=0.0), simulated(favour=0.1)
    assert fair.wrong[2] < 0.02
    assert unfair.wrong[2] > 0.1
    assert unfair.wrong[0] < 0.01


@pytest.mark.skipif(
    not (DATA / "llm_labels").is_dir(),
    reason=f"no llm_labels in {DATA}: RELABEL_TEST_DATA names the folder of real data",
)
def test_published_judges_in_small() -> None:
    """Some draws and pairs of the benchmark: the mean over judges within .95 ± .02, and wrong in 1 % at most."""
    collections = load_collections(DATA)
    options = Namespace(draws=100, pairs=10, seed=7)
    for kind in ("lexical", "own"):
        found = list(outcomes(collections, kind, NDCG, 10, options))
        assert len(found) == 29
        assert np.nanmean([one.wrong[0] for one in found]) <= 0.01
        if kind == "lexical":
            assert 0.93 <= np.mean([one.covered for one in found]) <= 0.97
