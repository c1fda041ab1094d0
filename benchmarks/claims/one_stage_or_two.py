"""B4: two stages, the query's intent first and then the document, judge better than one prompt for both (R3A, Table 4:
accuracy 65.2 against 60.6 in one stage).

    RELABEL_DATA=FOLDER python -m benchmarks.claims.one_stage_or_two --to FOLDER [--model MODEL]

The rule, set before the first run. Labeler `r3a` with `stages: 2` and `stages: 1`, everything else alike, over 60 pairs
of TREC DL 2019: six queries and ten passages of each, drawn by a seed. Reasoning has 48 tokens, texts have 32, both by
the engine's grammar; there are no context documents. The claim's figure is the difference in accuracy over three
grades, the line is 0; an answer that can't be read counts as wrong. So few queries show nothing but a huge difference,
and SmolLM2-135M is a poor judge: the run is for the cost, which is CPU seconds and tokens a pair.
"""

from typing import Any

import numpy as np
import polars as pl

from benchmarks.claims.page import (
    BORDERLINE,
    COLOURS,
    NOT_SHOWN,
    Claim,
    Figure,
    Row,
    figure,
    resampled,
    smallest,
    smallest_of,
    write_page,
)
from benchmarks.claims.small_models import Labelled, Work, by_query, command_of, label, passages, work_of

NUM_QUERIES = 6
NUM_PASSAGES = 10
STAGES = (2, 1)
LABELER = {"name": "r3a", "context": "none", "max_think_tokens": 48, "max_text_tokens": 32, "evidence": "constrained"}


def main() -> None:
    """Label in both ways and write the page."""
    work = work_of(__doc__)
    write_page(claim(work), work.pages)


def claim(work: Work) -> Claim:
    """Accuracy and cost of one stage and two."""
    pairs = passages(work, NUM_QUERIES, NUM_PASSAGES)
    runs = {number: label(work, f"r3a-{number}", pairs, LABELER | {"stages": number}) for number in STAGES}
    query_N = pairs["query_id"].rank("dense").to_numpy().astype(int) - 1
    weight_RQ = resampled("one stage or two", NUM_QUERIES)
    right = {number: right_of(run, pairs) for number, run in runs.items()}
    accuracy = [
        figure(f"accuracy {number}", is_right.mean(), by_query(is_right, query_N, weight_RQ))
        for number, is_right in right.items()
    ]
    difference_N = right[2] - right[1]
    difference_R = by_query(difference_N, query_N, weight_RQ)
    difference = figure("difference", difference_N.mean(), difference_R, "+.3f")
    cpu_s = {number: run.done.cpu_s for number, run in runs.items()}
    return Claim(
        name="one-stage-or-two",
        title="Two stages judge better than one",
        source="R3A, Table 4",
        answer=f"Two stages take {cpu_s[2] / cpu_s[1]:.2f} times the CPU time of one prompt, where "
        f"{NUM_PASSAGES} passages "
        f"of a query share the first stage; accuracy differs by {difference.value:+.2f}, and {len(pairs)} pairs show "
        f"nothing below {smallest(difference_R):.2f}.",
        here=NOT_SHOWN,
        there=BORDERLINE,
        n=Row("n", f"{len(pairs)} pairs, {NUM_QUERIES} queries, one small model", "900 pairs, one 7B model"),
        headline=Row("accuracy, two stages less one", difference, "+4.6 points (65.2, 60.6)"),
        smallest=Row(
            "smallest difference that n could show", Figure("smallest", smallest(difference_R)), smallest_of(900)
        ),
        rows=[
            *(Row(f"accuracy, {name}", one) for name, one in zip(("two stages", "one"), accuracy, strict=True)),
            Row("pairs with a label: two stages, one", f"{len(runs[2].rows)}, {len(runs[1].rows)} of {len(pairs)}"),
            cost("CPU seconds a pair, start included", "cpu", cpu_s, len(pairs)),
            cost(
                "tokens read a pair",
                "read",
                {key: tokens(run, "prompt_tokens") for key, run in runs.items()},
                len(pairs),
            ),
            cost(
                "tokens written a pair",
                "written",
                {key: tokens(run, "output_tokens") for key, run in runs.items()},
                len(pairs),
            ),
        ],
        how=command_of("one_stage_or_two") + "The model is "
        "SmolLM2-135M, a poor judge: its accuracy is of no worth, its tokens are those of any model. The verdict was "
        "fixed before the run: an interval over six queries is too narrow to decide by. "
        "Reasoning has 48 tokens at most; the paper's has no such limit. The first stage is asked once a query.",
        gpu="the paper's size of model, all pairs: `--set engine.model=…`",
        draw=lambda axes: draw(axes, runs, len(pairs)),
    )


def right_of(run: Labelled, pairs: pl.DataFrame) -> np.ndarray:
    """1 where the label is the human's, else 0, also without a label; float64 [N]."""
    labels = run.rows.select("query_id", "doc_id", "grade")
    both = pairs.join(labels, on=["query_id", "doc_id"], how="left", maintain_order="left")
    return (both["gold"] == both["grade"]).fill_null(False).to_numpy().astype(float)


def tokens(run: Labelled, kind: str) -> float:
    """Of all stages."""
    return float(sum(stage[kind] for stage in run.done.facts["stages"].values()))


def cost(what: str, name: str, totals: dict[int, float], num_pairs: int) -> Row:
    """Of two stages, of one, and the first over the second."""
    each = [Figure(f"{name} {number}", totals[number] / num_pairs, form=",.2f") for number in STAGES]
    ratio = Figure(f"{name} ratio", totals[2] / totals[1], form=".2f")
    return Row(f"{what}: two stages · one · ratio", [*each, ratio])


def draw(axes: Any, runs: dict[int, Labelled], num_pairs: int) -> None:
    """Tokens and seconds of each way, as multiples of one stage."""
    names = ("CPU seconds", "tokens read", "tokens written")
    for place, number in enumerate(STAGES):
        values = [
            runs[number].done.cpu_s / runs[1].done.cpu_s,
            tokens(runs[number], "prompt_tokens") / tokens(runs[1], "prompt_tokens"),
            tokens(runs[number], "output_tokens") / tokens(runs[1], "output_tokens"),
        ]
        title = "two stages" if number == 2 else "one stage"
        axes.bar(np.arange(len(names)) + 0.4 * place, values, 0.38, color=COLOURS[place], label=title)
    axes.set(ylabel=f"one stage = 1, {num_pairs} pairs", xticks=np.arange(len(names)) + 0.2)
    axes.set_xticklabels(names)
    axes.legend(frameon=False)


if __name__ == "__main__":
    main()
