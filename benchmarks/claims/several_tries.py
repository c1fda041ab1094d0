"""B3: a base model improves with the number of tries and stays below a trained one (R3A, Figure 3a: pass@k).

    RELABEL_DATA=FOLDER python -m benchmarks.claims.several_tries --to FOLDER

The rule, set before the first run. pass@k is the chance that one of k answers has the human's grade. The figure is that
of trained less base at k = 8 over the first 800 composed pairs of `jobs/demo/shop.jsonl`, and the line is 0. Base
is SmolLM2-135M, trained is the same with the adapter that relabel ships, which learned from other searches
(`teach.jsonl`); both are asked by `direct` with the adapter's prompts. A try is a draw from the distribution over
grades, so that pass@k = 1 - (1 - p)^k is exact. Next to each is a guesser, who draws from the model's mean
distribution and does not read the pair: what is above it is knowledge of the pair, and not variety. Tries that
reason, as those of the paper, are the claim `reasoning_tries`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from benchmarks.claims.page import (
    COLOURS,
    NO_EFFECT,
    NO_N,
    Claim,
    Figure,
    Row,
    figure,
    resampled,
    smallest,
    verdict,
    write_page,
)
from benchmarks.claims.small_models import (
    Labelled,
    Work,
    base_and_trained,
    by_query,
    command_of,
    searches,
    work_of,
)

# N pairs, G grades, K numbers of tries, R resamples

TRIES = (1, 2, 4, 8)
LINE = 0.0


@dataclass(frozen=True)
class Model:
    """pass@k of a model and of its guesser, float64 [N, K]."""

    name: str
    passed: np.ndarray
    guessed: np.ndarray


def main() -> None:
    """Label by both models and write the page."""
    work = work_of(__doc__)
    write_page(claim(work), work.pages)


def claim(work: Work) -> Claim:
    """pass@k of the base model and the trained one."""
    pairs = searches()
    base, trained = (exact(name, run, pairs) for name, run in base_and_trained(work, pairs).items())
    differences, least = above(trained, base, pairs, draws="shop")
    mean = trained.passed.mean(0)
    return Claim(
        name="several-tries",
        title="A base model stays below a trained one, however often it tries",
        source="R3A, Figure 3a",
        answer=f"With one try the trained model is right in {mean[0]:.0%} of pairs and the base model in "
        f"{base.passed.mean(0)[0]:.0%}; with eight tries in {mean[-1]:.0%} and {base.passed.mean(0)[-1]:.0%}, where "
        f"eight draws of a grade that do not read the pair find it in {trained.guessed.mean(0)[-1]:.0%} and "
        f"{base.guessed.mean(0)[-1]:.0%}.",
        here=verdict(differences[-1], LINE),
        there=NO_N,
        n=Row("n", f"{len(pairs)} composed pairs, {pairs['query_id'].n_unique()} queries", "a figure"),
        headline=Row(
            "pass@8, trained less base",
            differences[-1],
            "above 0 at all k; pass@1 of 1.5B distilled less base: over .10",
        ),
        smallest=Row("smallest difference at 8 that n could show", Figure("smallest", least), NO_EFFECT),
        rows=[
            *(
                Row(f"pass@{tries}, trained less base", one)
                for tries, one in zip(TRIES[:-1], differences[:-1], strict=True)
            ),
            *(line for model in (base, trained) for line in lines(model)),
        ],
        how=command_of("several_tries") + "The line is 0. Base and trained are SmolLM2-135M, without and with the "
        "adapter that relabel ships (one training); pairs are the composed searches of `jobs/demo/shop.jsonl`, easier "
        "than real ones, which the adapter never saw. A try draws from the grades' distribution (`direct`); the "
        "paper's models reason: [the index](index.md) says whether such tries were run. A guesser draws from the "
        "model's mean distribution and does not read the pair.",
        gpu="the paper's models, reasoning: `r3a`, `--set engine.model=…`",
        draw=lambda axes: draw(axes, (base, trained)),
    )


def above(trained: Model, base: Model, pairs: pl.DataFrame, *, draws: str) -> tuple[list[Figure], float]:
    """By how much pass@k of the one is above that of the other, for each k; and the smallest difference at the largest
    k that so many queries could show.

    Args:
        draws: names the resamples of queries.
    """
    query_N = pairs["query_id"].rank("dense").to_numpy().astype(int) - 1
    weight_RQ = resampled(draws, int(query_N.max()) + 1)
    less_NK = trained.passed - base.passed
    less_RK = np.array([by_query(less_N, query_N, weight_RQ) for less_N in less_NK.T]).T
    differences = [
        figure(f"difference {tries}", less_NK[:, place].mean(), less_RK[:, place], "+.3f")
        for place, tries in enumerate(TRIES)
    ]
    return differences, smallest(less_RK[:, -1])


def exact(name: str, run: Labelled, pairs: pl.DataFrame) -> Model:
    """From the distributions of `direct`."""
    both = pairs.join(run.rows.select("query_id", "doc_id", "probs"), on=["query_id", "doc_id"], maintain_order="left")
    probs_NG = np.array(both["probs"].to_list())
    return of_distributions(name, probs_NG, both["gold"].to_numpy())


def of_distributions(name: str, probs_NG: np.ndarray, gold_N: np.ndarray) -> Model:
    """A try draws a grade."""
    right_N = probs_NG[np.arange(len(gold_N)), gold_N]
    guessed_N = probs_NG.mean(0)[gold_N]
    tries_K = np.array(TRIES)
    return Model(name, 1 - (1 - right_N[:, None]) ** tries_K, 1 - (1 - guessed_N[:, None]) ** tries_K)


def lines(model: Model) -> list[Row]:
    """pass@k of the model and of its guesser."""
    found = []
    for title, passed_NK in ((model.name, model.passed), (f"{model.name}, guesser", model.guessed)):
        cells = [
            Figure(f"pass@{tries} {title}", float(passed_NK[:, place].mean()), form=".2f")
            for place, tries in enumerate(TRIES)
        ]
        found.append(Row(f"pass@1 · 2 · 4 · 8: {title}", cells))
    return found


def draw(axes: Any, models: Sequence[Model]) -> None:
    """pass@k, dashed for guessers."""
    for place, model in enumerate(models):
        axes.plot(TRIES, model.passed.mean(0), "o-", color=COLOURS[place], label=model.name)
        axes.plot(TRIES, model.guessed.mean(0), "--", color=COLOURS[place], linewidth=1)
    axes.set(
        xlabel="tries (dashed: a guesser who does not read the pair)", ylabel="pass@k", xticks=TRIES, ylim=(0, 1.02)
    )
    axes.legend(frameon=False, loc="lower right")


if __name__ == "__main__":
    main()
