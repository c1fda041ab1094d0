"""B3: a base model improves with the number of tries and stays below a trained one (R3A, Figure 3a: pass@k).

    RELABEL_DATA=FOLDER python -m benchmarks.claims.several_tries --to FOLDER

pass@k is the chance that one of k answers has the human's grade.

The rule of the tries that reason, set before their first run. Of `jobs/demo/shop.jsonl`, 60 queries and one pair of
each are drawn by a seed, 20 of each grade. Base is SmolLM2-135M. Trained is the same with the adapter that relabel
ships, which learned grades without reasoning from other searches (`teach.jsonl`), and then with adapters that learned
to reason: it answers 240 pairs of `teach.jsonl` once, and its answers whose grade is the human's are learned, half of
their reasoning's tokens masked (`relabel train`, `sft`: rejection sampling). Every model answers each pair eight times
(`r1`, temperature 1, 24 tokens of reasoning, one attempt); pass@k is the mean over all sets of k of the eight answers,
and an unreadable one is wrong. The claim's figure is pass@8, trained less base, and the line is 0; the interval is over
queries, which are the pairs. Sixty pairs show no difference below .15 or so.

The rule of the tries that do not reason, set before the first run of all: the same difference over the 800 pairs. Base
is SmolLM2-135M, trained is the same with the shipped adapter; both are asked by `direct` with the adapter's prompts. A
try is a draw from the distribution over grades, so that pass@k = 1 - (1 - p)^k is exact.

Next to each is a guesser, who draws from the model's mean distribution and does not read the pair: what is above it is
knowledge of the pair, and not variety.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb
from pathlib import Path
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
    SEED,
    Labelled,
    Work,
    base_and_trained,
    by_query,
    command_of,
    label,
    products,
    shipped,
    trained,
    with_adapter,
    work_of,
)

# N pairs, G grades, K numbers of tries, A answers, R resamples

TRIES = (1, 2, 4, 8)
LINE = 0.0
NUM_GRADES = 3
NUM_ASKED = 60
NUM_LEARNED = 240
TRAINING = {
    "epochs": 2,
    "batch_size": 8,
    "learning_rate": 5.0e-4,
    "schedule": "cosine",
    "warmup": 0.03,
    "max_tokens": 192,
    "mask": 0.5,
    "seed": SEED,
}
SYSTEM = """\
Grade the fit, 0 to 2. Think first, then answer, as <think>reasoning</think> <score>grade</score>.
"""


@dataclass(frozen=True)
class Model:
    """pass@k of a model and of its guesser, float64 [N, K]."""

    name: str
    passed: np.ndarray
    guessed: np.ndarray


@dataclass(frozen=True)
class Less:
    """pass@k of a trained model less that of a base model: by k, and the resamples of the last, [R]."""

    by_tries: list[Figure]
    last: np.ndarray

    @property
    def smallest(self) -> float:
        """What n could show of the last."""
        return smallest(self.last)


def main() -> None:
    """Label by all models and write the page."""
    work = work_of(__doc__)
    write_page(claim(work), work.pages)


def claim(work: Work) -> Claim:
    """pass@k of the base model and the trained one."""
    pairs = products("shop.jsonl")
    base, trained_one = (exact(name, run, pairs) for name, run in base_and_trained(work, pairs).items())
    less = difference("", pairs, base, trained_one, "shop")
    asked = asked_of(pairs)
    thinking = reasoning(work, asked)
    thought = difference("reasoning ", asked, thinking["base"], thinking["trained"], "reasoning tries")
    mean = {name: model.passed.mean(0) for name, model in thinking.items()}
    return Claim(
        name="several-tries",
        title="A base model stays below a trained one, however often it tries",
        source="R3A, Figure 3a",
        answer=f"With one try that reasons the trained model is right in {mean['trained'][0]:.0%} of pairs and the "
        f"base model in {mean['base'][0]:.0%}; with eight tries in {mean['trained'][-1]:.0%} and "
        f"{mean['base'][-1]:.0%}, and {len(asked)} pairs show no difference below {thought.smallest:.2f}.",
        here=verdict(thought.by_tries[-1], LINE),
        there=NO_N,
        n=Row(
            "n",
            f"{len(asked)} composed pairs, as many queries, eight answers each; without reasoning {len(pairs)} pairs, "
            f"{pairs['query_id'].n_unique()} queries",
            "a figure",
        ),
        headline=Row(
            "pass@8 of tries that reason, trained less base",
            thought.by_tries[-1],
            "above 0 at all k; pass@1 of 1.5B distilled less base: over .10",
        ),
        smallest=Row(
            "smallest difference at 8 that n could show", Figure("reasoning smallest", thought.smallest), NO_EFFECT
        ),
        rows=[
            *(
                Row(f"pass@{tries} of tries that reason, trained less base", one)
                for tries, one in zip(TRIES[:-1], thought.by_tries[:-1], strict=True)
            ),
            *(line for model in thinking.values() for line in lines(model)),
            *(
                Row(f"pass@{tries} without reasoning, trained less base", one)
                for tries, one in zip(TRIES, less.by_tries, strict=True)
            ),
            Row("smallest difference at 8 without reasoning", Figure("smallest", less.smallest)),
            *(line for model in (base, trained_one) for line in lines(model)),
        ],
        how=command_of("several_tries") + "The line is 0. All models are SmolLM2-135M, one training each; pairs are "
        "the composed searches of `jobs/demo/shop.jsonl`, easier than real ones, which no model saw. The trained one "
        "has the adapter that relabel ships, which learned grades alone, and then learned from its own right answers "
        f"to {NUM_LEARNED} other searches, half of their reasoning masked; the paper's was trained by GRPO. "
        "Reasoning has 24 tokens at most, temperature 1; an unreadable answer is wrong. Tries without reasoning draw from the "
        "grades' distribution (`direct`), base against adapter. A guesser draws from the model's mean distribution and "
        "does not read the pair.",
        gpu="the paper's models, reasoning at length: `r3a`, `--set engine.model=…`",
        draw=lambda axes: draw(axes, list(thinking.values())),
    )


def difference(name: str, pairs: pl.DataFrame, base: Model, better: Model, resamples: str) -> Less:
    """By number of tries, over resamples of queries."""
    query_N = pairs["query_id"].rank("dense").to_numpy().astype(int) - 1
    weight_RQ = resampled(resamples, int(query_N.max()) + 1)
    less_NK = better.passed - base.passed
    less_RK = np.array([by_query(less_N, query_N, weight_RQ) for less_N in less_NK.T]).T
    by_tries = [
        figure(f"{name}difference {tries}", less_NK[:, place].mean(), less_RK[:, place], "+.3f")
        for place, tries in enumerate(TRIES)
    ]
    return Less(by_tries, less_RK[:, -1])


# ------------------------------------------------------------------------------
# Tries that reason.


def asked_of(pairs: pl.DataFrame) -> pl.DataFrame:
    """One pair of each of so many queries, as many of each grade."""
    random = np.random.default_rng(SEED)
    queries = random.permutation(pairs["query_id"].unique().sort().to_numpy())[:NUM_ASKED]
    drawn = []
    for place, query in enumerate(queries):
        own = pairs.filter((pl.col("query_id") == query) & (pl.col("gold") == place % NUM_GRADES))
        drawn.append(own[[int(random.integers(len(own)))]])
    return pl.concat(drawn)


def reasoning(work: Work, asked: pl.DataFrame) -> dict[str, Model]:
    """Of eight answers each: the base model, and the one that learned to reason."""
    labeler = {
        "name": "r1",
        "grades": NUM_GRADES,
        "templates": str(templates(work.folder / "templates-r1")),
        "temperature": 1.0,
        "attempts": 1,
        "max_think_tokens": 24,
    }
    adapted = replace(work, model=str(with_adapter(work)))
    name = "reasoning"
    lessons = lessons_of(adapted, labeler)
    trained(adapted, name, lessons, labeler, **TRAINING)
    models = {"base": work, "trained": replace(work, model=str(work.folder / name))}
    sampled = labeler | {"samples": max(TRIES)}
    return {
        who: tried(f"{who}, reasoning", label(one, f"{name}-{who}", asked, sampled).rows, asked)
        for who, one in models.items()
    }


def templates(folder: Path) -> Path:
    """The shipped prompts, with an answer that reasons."""
    folder.mkdir(exist_ok=True)
    (folder / "user.j2").write_bytes((Path(shipped("templates")) / "user.j2").read_bytes())
    (folder / "system.j2").write_text(SYSTEM, encoding="utf-8")
    return folder


def lessons_of(work: Work, labeler: dict[str, Any]) -> dict[str, Any]:
    """Answers to pairs of other searches, and the grades that they have to have."""
    pairs = products("teach.jsonl")
    drawn = np.sort(np.random.default_rng(SEED).choice(len(pairs), NUM_LEARNED, replace=False))
    label(work, "lessons-r1", pairs[drawn], labeler)
    gold = {"path": str(work.folder / "lessons-r1.parquet"), "grade": "gold"}
    return {"runs": [str(work.folder / "lessons-r1")], "gold": gold}


def tried(name: str, labels: pl.DataFrame, pairs: pl.DataFrame) -> Model:
    """From eight answers."""
    columns = labels.select("query_id", "doc_id", "samples")
    both = pairs.join(columns, on=["query_id", "doc_id"], how="left", maintain_order="left")
    gold_N = both["gold"].to_numpy()
    grade_NA = np.full((len(pairs), max(TRIES)), -1)
    for row, samples in enumerate(both["samples"].to_list()):
        for place, sample in enumerate(samples or ()):
            if sample["grade"] is not None:
                grade_NA[row, place] = sample["grade"]
    num_right_N = (grade_NA == gold_N[:, None]).sum(1)
    passed_NK = np.array([[chance(int(right), tries) for tries in TRIES] for right in num_right_N])
    share_G = np.array([(grade_NA == grade).mean() for grade in range(NUM_GRADES)])
    guessed_NK = 1 - (1 - share_G[gold_N][:, None]) ** np.array(TRIES)
    return Model(name, passed_NK, guessed_NK)


def chance(num_right: int, tries: int) -> float:
    """That a set of so many of the eight answers has a right one."""
    return 1 - comb(max(TRIES) - num_right, tries) / comb(max(TRIES), tries)


# ------------------------------------------------------------------------------
# Tries that do not.


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
