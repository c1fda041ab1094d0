"""A2: irrelevant documents are far easier to separate from the rest than the best ones are. In R3A's Table 2, AUC 0/12
(grade 0 against 1 and 2) is above AUC 01/2 in each trained row of NoteRel, by .039 or more.
"""

from pathlib import Path

import numpy as np

from benchmarks.claims.judges import NEWER_JUDGES, four_grades, num_queries, of_runs
from benchmarks.claims.page import SHOWN, Claim, Figure, Row, draw_intervals, smallest, smallest_of, verdict

PAPER = 0.039
"""The least difference of the 13 trained rows on NoteRel (.039 to .114)."""


def claim(folder: Path) -> Claim:
    """The mean difference over judge-years, and the share of those whose AUC 0/12 is above AUC 01/2."""
    years = four_grades(folder)
    differences = of_runs("difference", years, lambda _, count_XHJ: difference_of(count_XHJ))
    mean = differences.mean("mean", "+.3f")
    apart = f"{differences.num_above(0)}, {differences.num_below(0)} of {len(years)}"
    return Claim(
        name="two-areas",
        title="Judges separate irrelevant from relevant far better than good from best",
        source="R3A, Table 2, trained rows of NoteRel",
        answer="Prompted LLM judges find it no easier to tell irrelevant passages from all others than to tell the "
        f"best from all others: the first AUC less the second is {mean} in the mean of {len(years)} published runs, "
        f"and above 0 in {(differences.values > 0).sum()} of them, where the paper's trained models have {PAPER:+.3f} "
        "or more.",
        here=verdict(mean, PAPER),
        there=SHOWN,
        n=Row("n", f"{len(years)} runs of judges, {num_queries(years)} queries", "13 trained rows, 900 pairs"),
        headline=Row("AUC 0/12 less AUC 01/2, mean of runs", mean, "+.039 to +.114; prompted -.012 to +.032"),
        smallest=Row(
            "smallest difference that n could show",
            Figure("smallest", smallest(differences.resamples.mean(0))),
            smallest_of(900),
        ),
        rows=[
            Row(
                "runs whose difference is above 0",
                differences.share_above("share", 0),
                "trained 13 of 13, prompted 3 of 5",
            ),
            Row("the same on T²Ranking", "–", "trained 6 of 13, prompted 1 of 5"),
            Row("runs whose interval is above 0, below 0", apart, "no intervals"),
        ],
        how=f"The line is the least difference of the paper's trained rows, {PAPER}. **It was chosen after the figures "
        "of this page were seen.** Against a line of 0 nothing can be shown here (the interval holds 0). So read "
        "“fails” as “the paper's difference is outside the interval”, not as a test that was fixed beforehand. The "
        "paper prints these rows and does not comment on them. Human grades 2 and 3 are one. The paper ranks by "
        "probabilities of grades, these runs by grades alone, whose ties count one half. These judges are prompted, "
        "most of them; so are the paper's five rows that show no such difference.",
        gpu=f"{NEWER_JUDGES}, with distributions instead of grades alone",
        draw=lambda axes: draw_intervals(axes, differences.figures, PAPER, "AUC 0/12 less AUC 01/2, by run"),
        drawn=differences.figures,
    )


def difference_of(count_XHJ: np.ndarray) -> np.ndarray:
    """AUC of grade 0 against more, less that of grades 0 and 1 against more."""
    return area(count_XHJ, 1) - area(count_XHJ, 2)


def area(count_XHJ: np.ndarray, split: int) -> np.ndarray:
    """How often a pair that humans grade `split` or more has the higher judge's grade; ties are one half."""
    below_XJ = count_XHJ[..., :split, :].sum(-2)
    above_XJ = count_XHJ[..., split:, :].sum(-2)
    lower_XJ = below_XJ.cumsum(-1) - below_XJ
    wins_X = (above_XJ * (lower_XJ + below_XJ / 2)).sum(-1)
    return wins_X / (below_XJ.sum(-1) * above_XJ.sum(-1))
