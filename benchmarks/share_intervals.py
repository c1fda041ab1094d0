"""How often 95 % intervals of a share hold it, over queries whose rows are alike: those of `share_bounds`, and the
percentile bootstrap over queries.

    python benchmarks/share_intervals.py [--draws N]

Queries have 1, 10 or (geometric) 1 to many rows, 10 in the mean. Rows of a query share a chance from a beta
distribution, which gives them the intra-query correlation. Printed are the least and the median coverage over all
shares, sizes and correlations at each number of queries.

Found on 2026-11-25 (2,000 draws; 300 for the bootstrap):

    queries  share_bounds: least  median   bootstrap: least  median   narrowest share_bounds
         20                0.956   0.986              0.070   0.840                    0.0210
         50                0.957   0.978              0.197   0.910                    0.0152
        100                0.951   0.975              0.317   0.923                    0.0090
        200                0.947   0.970              0.563   0.930                    0.0057
        500                0.942   0.963              0.747   0.940                    0.0027
"""

import argparse
import itertools

import numpy as np

from relabel.manifests.metrics.metric import draw_weights, share_bounds

SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.98, 0.99, 0.995)
CORRELATIONS = (0.0, 0.05, 0.2, 0.5, 0.9)
RESAMPLES = 400


def draws(random: np.random.Generator, share: float, alike: float, rows: str, shape: tuple[int, int]) -> np.ndarray:
    """Right rows and rows, [2, draws, queries]."""
    sizes = {"1": np.ones(shape, int), "10": np.full(shape, 10), "geometric": random.geometric(0.1, shape)}[rows]
    odds = 1 / alike - 1 if alike else 0.0
    chance = random.beta(share * odds, (1 - share) * odds, shape) if alike else share
    return np.stack([random.binomial(sizes, chance), sizes])


def bootstrapped(right_RG: np.ndarray, rows_RG: np.ndarray, queries: int) -> np.ndarray:
    """Percentile bounds of each draw."""
    weight_SG = np.concatenate(list(draw_weights(queries, RESAMPLES, seed=7)))
    return np.asarray(np.quantile((weight_SG @ right_RG.T) / (weight_SG @ rows_RG.T), [0.025, 0.975], axis=0))


def covers(bounds: np.ndarray, share: float) -> float:
    return float(np.mean((bounds[0] <= share) & (share <= bounds[1])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    options = parser.parse_args()
    random = np.random.default_rng(1)
    print("queries  share_bounds: least  median   bootstrap: least  median   narrowest share_bounds")
    for queries in (20, 50, 100, 200, 500):
        found = []
        for share, alike, rows in itertools.product(SHARES, CORRELATIONS, ("1", "10", "geometric")):
            if rows == "1" and alike:
                continue
            right_RG, rows_RG = draws(random, share, alike, rows, (options.draws, queries))
            ours = np.asarray(share_bounds(right_RG, rows_RG))
            theirs = bootstrapped(right_RG[:300], rows_RG[:300], queries)
            found.append((covers(ours, share), covers(theirs, share), (ours[1] - ours[0]).min()))
        ours_N, theirs_N, width_N = map(np.array, zip(*found, strict=True))
        print(
            f"{queries:7}  {ours_N.min():19.3f}  {np.median(ours_N):6.3f}  {theirs_N.min():17.3f}  "
            f"{np.median(theirs_N):6.3f}  {width_N.min():24.4f}"
        )


if __name__ == "__main__":
    main()
