"""A1: "partly relevant" is the hardest grade. In R3A's Table 2 its F1 is the lowest of three in each prompted row."""

from pathlib import Path

import numpy as np

from benchmarks.claims.judges import NEWER_JUDGES, four_grades, num_queries, of_runs
from benchmarks.claims.page import SHOWN, Claim, Row, draw_intervals, smallest_of, verdict


def claim(folder: Path) -> Claim:
    """The share of judge-years whose F1 of grade 1 is the lowest."""
    years = four_grades(folder)
    margins = of_runs("margin", years, lambda _, count_XHJ: margin_of(count_XHJ))
    even_margins = of_runs("even", years, lambda _, count_XHJ: margin_of(evened(count_XHJ)))
    share = margins.share_above("share", 0)
    return Claim(
        name="hardest-grade",
        title="“Partly relevant” is the hardest grade",
        source="R3A, Table 2, prompted rows",
        answer=f"LLM judges are worst at “partly relevant”: in {(margins.values > 0).sum()} of {len(years)} published "
        "runs.",
        here=verdict(share, 0.5),
        there=SHOWN,
        n=Row("n", f"{len(years)} runs of judges, {num_queries(years)} queries", "10 rows, 900 and 3,000 pairs"),
        headline=Row("runs whose F1 of grade 1 is lowest", share, "10 of 10"),
        smallest=Row(
            "smallest margin that n could show, median of runs",
            margins.smallest(".3f"),
            f"{smallest_of(900)}; {smallest_of(3000)}",
        ),
        rows=[
            Row(
                "the same, if humans gave each grade equally often, as in the paper",
                even_margins.share_above("share even", 0),
                "10 of 10",
            ),
            Row("runs whose margin's interval is above 0", f"{margins.num_above(0)} of {len(years)}", "no intervals"),
            Row(
                "margin to the next lowest F1, median",
                margins.median("margin", ".3f"),
                ".015 to .191, .144 to .176",
            ),
        ],
        how="Grades 2 and 3 are one, for humans and judges, as the paper maps T²Ranking. The line is one half of "
        "the runs. The paper prints these rows and does not comment on them. One of the paper's ten margins "
        "(Qwen2.5-7B on NoteRel, .015) is below what 900 rows could show. A rule for accuracy is used for F1, "
        "as a rough guide.",
        gpu=NEWER_JUDGES,
        draw=lambda axes: draw_intervals(
            axes, margins.figures, 0, "lowest other F1 less F1 of “partly relevant”, by run"
        ),
        drawn=margins.figures,
    )


def evened(count_XHJ: np.ndarray) -> np.ndarray:
    """Counts with weights that make the human's grades 0, 1 and 2 or more equally frequent."""
    human_XH = count_XHJ.sum(-1)
    high_X = human_XH[..., 2] + human_XH[..., 3]
    total_XH = np.stack([human_XH[..., 0], human_XH[..., 1], high_X, high_X], axis=-1)
    return count_XHJ / total_XH[..., None]


def margin_of(count_XHJ: np.ndarray) -> np.ndarray:
    """The lower of the F1 of grades 0 and 2, less that of grade 1; grades of 2 and more are 2."""
    pairs_XHJ = np.stack([count_XHJ[..., 0], count_XHJ[..., 1], count_XHJ[..., 2:].sum(-1)], axis=-1)
    human_XH = pairs_XHJ.sum(-1)
    human_X3 = np.stack([human_XH[..., 0], human_XH[..., 1], human_XH[..., 2:].sum(-1)], axis=-1)
    judge_X3 = pairs_XHJ.sum(-2)
    both_2 = pairs_XHJ[..., 2:, 2].sum(-1)
    both_X3 = np.stack([pairs_XHJ[..., 0, 0], pairs_XHJ[..., 1, 1], both_2], axis=-1)
    f1_X3 = 2 * both_X3 / (human_X3 + judge_X3)
    return np.minimum(f1_X3[..., 0], f1_X3[..., 2]) - f1_X3[..., 1]
