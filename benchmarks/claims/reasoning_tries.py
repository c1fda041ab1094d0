"""B3, as the paper has it: tries that reason, by a base model and by one that was trained to (R3A, Figure 3a: pass@k).

    RELABEL_DATA=FOLDER python -m benchmarks.claims.reasoning_tries --to FOLDER

The rule, set before the first run. Of the first 100 queries of `jobs/demo/shop.jsonl`, 60 and one pair of each are
drawn by a seed, 20 of each grade. Base is SmolLM2-135M. Trained is the same with the adapter that relabel ships, which
learned grades without reasoning from other searches (`teach.jsonl`), and then with adapters that learned to reason: it
answers 240 pairs of `teach.jsonl` once, and its answers whose grade is the human's are learned, half of their
reasoning's tokens masked (`relabel train`, `sft`: rejection sampling). Each model answers each pair eight times (`r1`,
temperature 1, 24 tokens of reasoning, one attempt); pass@k is the mean over all sets of k of the eight answers, and an
unreadable one is wrong. The claim's figure is pass@8, trained less base, and the line is 0; the interval is over
queries, which are the pairs. Sixty pairs show no difference below .15 or so. Next to each model is a guesser, who draws
from its mean distribution and does not read the pair.
"""

from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.claims.page import (
    NO_EFFECT,
    NO_N,
    Claim,
    Figure,
    Row,
    verdict,
    write_page,
)
from benchmarks.claims.several_tries import TRIES, Model, above, draw, lines
from benchmarks.claims.small_models import (
    SEED,
    Work,
    command_of,
    label,
    products,
    searches,
    shipped,
    trained,
    with_adapter,
    work_of,
)

# N pairs, G grades, K numbers of tries, A answers, Q queries, R resamples

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


def main() -> None:
    """Answer by both models and write the page."""
    work = work_of(__doc__)
    write_page(claim(work), work.pages)


def claim(work: Work) -> Claim:
    """pass@k of the base model and the trained one."""
    asked = asked_of(searches())
    models = answered(work, asked)
    differences, least = above(models["trained"], models["base"], asked, draws="reasoning tries")
    mean = {who: model.passed.mean(0) for who, model in models.items()}
    return Claim(
        name="reasoning-tries",
        title="A base model that reasons stays below a trained one, however often it tries",
        source="R3A, Figure 3a",
        answer=f"With one try that reasons the trained model is right in {mean['trained'][0]:.0%} of pairs and the "
        f"base model in {mean['base'][0]:.0%}; with eight tries in {mean['trained'][-1]:.0%} and "
        f"{mean['base'][-1]:.0%}, and {len(asked)} pairs show no difference below {least:.2f}.",
        here=verdict(differences[-1], LINE),
        there=NO_N,
        n=Row("n", f"{len(asked)} composed pairs, as many queries, {max(TRIES)} answers each", "a figure"),
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
            *(line for model in models.values() for line in lines(model)),
        ],
        how=command_of("reasoning_tries") + "The line is 0. Both models are SmolLM2-135M, one training; pairs are the "
        "composed searches of `jobs/demo/shop.jsonl`, easier than real ones, which neither saw. The trained one has "
        "the adapter that relabel ships, which learned grades alone, and then learned from its own right answers to "
        f"{NUM_LEARNED} other searches, half of their reasoning masked; the paper's was trained by GRPO. Reasoning has "
        "24 tokens at most, temperature 1; an unreadable answer is wrong. Both answer in float32 (`--dtype float32`): "
        "in bfloat16 the engine finds the trained model's logits too far from its own. A guesser draws from the "
        "model's mean distribution and does not read the pair.",
        gpu="the paper's models, reasoning at length: `r3a`, `--set engine.model=…`",
        draw=lambda axes: draw(axes, list(models.values())),
    )


# ------------------------------------------------------------------------------
# Pairs and answers.


def asked_of(pairs: pl.DataFrame) -> pl.DataFrame:
    """One pair of each of so many queries, as many of each grade."""
    random = np.random.default_rng(SEED)
    queries = random.permutation(pairs["query_id"].unique().sort().to_numpy())[:NUM_ASKED]
    drawn = []
    for place, query in enumerate(queries):
        own = pairs.filter((pl.col("query_id") == query) & (pl.col("gold") == place % NUM_GRADES))
        drawn.append(own[[int(random.integers(len(own)))]])
    return pl.concat(drawn)


def answered(work: Work, asked: pl.DataFrame) -> dict[str, Model]:
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
    return {who: tried(who, label(one, f"{name}-{who}", asked, sampled).rows, asked) for who, one in models.items()}


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


if __name__ == "__main__":
    main()
