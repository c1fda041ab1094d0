"""A6: which prompt matters less than which model (arXiv:2504.12408: 72 prompts, three models), and the mean of three
prompts drawn at random is as good as the best prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.claims.page import COLOURS, NO_N, Claim, Figure, Row, figure, resampled, smallest, verdict
from benchmarks.claims.two_areas import area

# M prompts or sets of prompts, D pairs, Q queries, H is relevant for humans, V value of the judge, R resamples

MODELS = ("gpt-4o", "llama3.2", "mistral")
YEARS = ("dl20", "dl21")
TASKS = ("binary", "graded")
AUC = "AUC"
KAPPA = "kappa"
INVERTED = (10, 14)
"""Binary prompts whose text makes 0 the answer for a relevant passage."""
RELEVANT = 2
SIZES = (3, 5, 9)
NUM_SETS = 50
"""Sets of prompts that are drawn of each size."""
SEED = 7
LINE = 0.0


@dataclass(frozen=True)
class Cell:
    """The labels of one model, year and task.

    Args:
        labels: by prompt and pair, [M, D], 0 or 1 for the binary task, else 0 to 3.
        is_relevant: for humans, 0 or 1, [D].
        query: of each pair, 0..Q-1, [D].
    """

    model: str
    year: str
    task: str
    labels: np.ndarray
    is_relevant: np.ndarray
    query: np.ndarray


@dataclass(frozen=True)
class Agreement:
    """AUC or Cohen's kappa with the humans.

    Args:
        prompts: of each prompt alone, [M]; resampled [R, M].
        sets: of prompts together, mean over sets, by size; resampled [R].
    """

    cell: Cell
    prompts: np.ndarray
    prompts_resampled: np.ndarray
    sets: dict[int, float]
    sets_resampled: dict[int, np.ndarray]


def claim(folder: Path) -> Claim:
    """Spread over prompts and over models, and the mean label of several prompts."""
    held = list(cells(folder))
    found = [agreement(cell, AUC) for cell in held]
    found_kappa = [agreement(cell, KAPPA) for cell in held]
    gains = {size: gain(size, found, AUC) for size in SIZES}
    ratio = {task: spread_ratio(task, found) for task in TASKS}
    effect = Figure("smallest", smallest(gain_of_resamples(3, found)))
    return Claim(
        name="prompt-noise",
        title="The mean of three random prompts is as good as the best prompt",
        source="arXiv:2504.12408, its labels",
        answer=f"Three random prompts, averaged, rank as well as the best of 26 (AUC {gains[3].value:+.3f}), which "
        "nobody knows beforehand; their vote, yes or no, agrees with humans less than the best one does.",
        here=verdict(gains[3], LINE),
        there=NO_N,
        n=Row("n", size_of(found), "72 prompts, the same labels"),
        headline=Row(
            "AUC of the mean of 3 random prompts less the best one's", gains[3], "none: asked here of its labels"
        ),
        smallest=Row("smallest difference in AUC that n could show, 3 prompts", effect, f"{effect}: the same labels"),
        rows=[
            *(Row(f"the same of {size} prompts", gains[size]) for size in SIZES[1:]),
            *(
                Row(f"kappa of the vote of {size}, less the best one's", gain(size, found_kappa, KAPPA))
                for size in SIZES
            ),
            Row("AUC of the mean of 3 random prompts less a random one's", over_random(3, found)),
            Row("graded: deviation over prompts, that over models = 1", ratio["graded"]),
            Row("binary: the same", ratio["binary"]),
        ],
        how="Humans' grades of 2 and more are relevant; means are over three models, two years and two tasks. A "
        "mean of labels has more values than one label, which helps its AUC and no kappa. Pairs are those "
        "that all prompts of all models labelled on the scale. The best prompt is chosen by these humans' own "
        "grades. Two binary prompts that ask for 0 where a passage is relevant are turned round. The line is "
        "0. Deviations are of AUC over the prompts of a model, and over the models' means; below 1, the model "
        "matters more than the prompt.",
        gpu="larger models with the same prompts: `ensemble`, `--set engine.model=…`",
        draw=lambda axes: draw(axes, found),
        drawn=[of_cell(one) for one in found],
    )


def cells(folder: Path) -> Iterator[Cell]:
    """Of each year and task the three models, with the pairs that all their prompts labelled on the scale."""
    label = pl.col("llm_label").cast(pl.Int64, strict=False)
    is_inverted = (pl.col("method") == "binary") & pl.col("prompt_id").is_in(INVERTED)
    rows = pl.read_parquet(folder / "prompt_sensitivity" / "labels.parquet")
    rows = rows.with_columns(grade=pl.when(is_inverted).then(1 - label).otherwise(label))
    for year in YEARS:
        for task in TASKS:
            highest = 1 if task == "binary" else 3
            on_scale = pl.col("grade").is_between(0, highest)
            held = rows.filter(pl.col("dataset") == year, pl.col("method") == task, on_scale)
            num_prompts = held.select("model", "prompt_id").unique().height
            pairs = held.group_by("query_id", "doc_id").agg(pl.len(), pl.col("human_grade").first())
            pairs = pairs.filter(pl.col("len") == num_prompts).sort("query_id", "doc_id")
            for model in MODELS:
                own = held.filter(pl.col("model") == model).join(pairs, on=["query_id", "doc_id"], how="semi")
                own = own.sort("prompt_id", "query_id", "doc_id")
                yield Cell(
                    model=model,
                    year=year,
                    task=task,
                    labels=own["grade"].to_numpy().reshape(-1, pairs.height),
                    is_relevant=(pairs["human_grade"].to_numpy() >= RELEVANT).astype(int),
                    query=pairs["query_id"].rank("dense").to_numpy().astype(int) - 1,
                )


def agreement(cell: Cell, measure: str) -> Agreement:
    """Of each prompt, and of sets of prompts."""
    random = np.random.default_rng(SEED)
    alone = np.array([joined(cell, [row], measure) for row in range(len(cell.labels))])
    prompts_M, prompts_RM = measured(cell, alone, measure)
    sets = {}
    sets_resampled = {}
    for size in SIZES:
        chosen = [random.choice(len(cell.labels), size, replace=False) for _ in range(NUM_SETS)]
        set_M, set_RM = measured(cell, np.array([joined(cell, rows, measure) for rows in chosen]), measure)
        sets[size] = float(set_M.mean())
        sets_resampled[size] = set_RM.mean(1)
    return Agreement(cell, prompts_M, prompts_RM, sets, sets_resampled)


def joined(cell: Cell, rows: Sequence[int], measure: str) -> np.ndarray:
    """What some prompts say of each pair together: their sum, which ranks, or whether most say yes, [D]."""
    if measure == AUC:
        return cell.labels[rows].sum(0)
    yes = 1 if cell.task == "binary" else RELEVANT
    return (np.median(cell.labels[rows], axis=0) >= yes).astype(int)


def measured(cell: Cell, value_MD: np.ndarray, measure: str) -> tuple[np.ndarray, np.ndarray]:
    """Of each row, [M]; of each resample of queries, [R, M]."""
    shape = (int(cell.query.max()) + 1, 2, int(value_MD.max()) + 1)
    count_MQHV = np.array([counts(cell, value_D, shape) for value_D in value_MD])
    weight_RQ = resampled(f"{cell.year} prompts", shape[0])
    count_RMHV = np.einsum("rq,mqhv->rmhv", weight_RQ, count_MQHV, optimize=True)
    if measure == AUC:
        return area(count_MQHV.sum(1), 1), area(count_RMHV, 1)
    return kappa(count_MQHV.sum(1)), kappa(count_RMHV)


def kappa(count_XHV: np.ndarray) -> np.ndarray:
    """Cohen's, [X]."""
    share_XHV = count_XHV / count_XHV.sum((-1, -2), keepdims=True)
    agreed_X = np.trace(share_XHV, axis1=-2, axis2=-1)
    chance_X = (share_XHV.sum(-1) * share_XHV.sum(-2)).sum(-1)
    return (agreed_X - chance_X) / (1 - chance_X)


def counts(cell: Cell, value_D: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """Pairs by query, relevance and value, float64 of that shape."""
    place_D = np.ravel_multi_index((cell.query, cell.is_relevant, value_D), shape)
    return np.bincount(place_D, minlength=int(np.prod(shape))).reshape(shape).astype(float)


def gain(size: int, found: list[Agreement], measure: str) -> Figure:
    """So many random prompts together, less the best prompt, mean over cells."""
    value = np.mean([one.sets[size] - one.prompts.max() for one in found])
    return figure(f"{measure} gain {size}", value, gain_of_resamples(size, found), "+.3f")


def gain_of_resamples(size: int, found: list[Agreement]) -> np.ndarray:
    """The same prompt is the best in each resample, [R]."""
    gains_CR = [one.sets_resampled[size] - one.prompts_resampled[:, one.prompts.argmax()] for one in found]
    return np.mean(gains_CR, axis=0)


def over_random(size: int, found: list[Agreement]) -> Figure:
    """The same, less a prompt drawn at random."""
    value = np.mean([one.sets[size] - one.prompts.mean() for one in found])
    value_R = np.mean([one.sets_resampled[size] - one.prompts_resampled.mean(1) for one in found], axis=0)
    return figure(f"over random {size}", value, value_R, "+.3f")


def spread_ratio(task: str, found: list[Agreement]) -> Figure:
    """The mean deviation over prompts of a model, over the deviation of the models' means, mean of the years."""
    values = []
    values_R = []
    for year in YEARS:
        held = [one for one in found if one.cell.task == task and one.cell.year == year]
        prompts = np.mean([one.prompts.std(ddof=1) for one in held])
        prompts_R = np.mean([one.prompts_resampled.std(1, ddof=1) for one in held], axis=0)
        models = np.std([one.prompts.mean() for one in held], ddof=1)
        models_R = np.std([one.prompts_resampled.mean(1) for one in held], axis=0, ddof=1)
        values.append(prompts / models)
        values_R.append(prompts_R / models_R)
    return figure(f"ratio {task}", np.mean(values), np.mean(values_R, axis=0), ".2f")


def of_cell(one: Agreement) -> Figure:
    """The mean of three prompts less the best one."""
    name = f"gain 3 {one.cell.model} {one.cell.year} {one.cell.task}"
    return figure(name, one.sets[3] - one.prompts.max(), gain_of_resamples(3, [one]), "+.3f")


def size_of(found: list[Agreement]) -> str:
    """Prompts, queries and pairs."""
    one_model = [one.cell for one in found if one.cell.model == MODELS[0]]
    pairs = " to ".join(f"{edge(len(cell.query) for cell in one_model):,}" for edge in (min, max))
    queries = sum(int(cell.query.max()) + 1 for cell in one_model if cell.task == "graded")
    prompts = " to ".join(str(edge(len(cell.labels) for cell in one_model)) for edge in (min, max))
    return f"3 models, {prompts} prompts a task, {queries} queries, {pairs} pairs a year"


def draw(axes: Any, found: list[Agreement]) -> None:
    """Each prompt's AUC, the mean of three, by model and task."""
    for place, one in enumerate(found):
        axes.plot([place] * len(one.prompts), one.prompts, ".", color=COLOURS[3], markersize=3)
        axes.plot(place, one.sets[3], "D", color=COLOURS[0], markersize=5)
        axes.plot(place, one.sets[9], "D", color=COLOURS[2], markersize=5)
    names = [f"{one.cell.model}\n{one.cell.year}\n{one.cell.task}" for one in found]
    axes.set(ylabel="AUC; blue: mean of 3, green: of 9", xticks=range(len(found)))
    axes.set_xticklabels(names, fontsize=6)
