"""B7: a review knows when it has enough (R2RAG, section 3.3: the search ends when the model says that the documents
suffice).

    RELABEL_DATA=FOLDER python -m benchmarks.claims.enough --to FOLDER --model FOLDER_OF_QWEN

The rule, set before the first run. Labeler `review` judges questions of HotpotQA, MuSiQue, 2WikiMultihopQA and IIRC
whose gold paragraphs are known. Each is asked in three versions: with all its paragraphs, with one gold paragraph left
out, and with one of the others left out; both are drawn by a seed. The claim's figure is the AUC of P(yes), the second
version against the third: they have the same number of paragraphs, so that a model which says yes to much text gains
nothing. It holds if its interval over questions is above .5. Next to it is the AUC against all paragraphs, which was
.624 (.566 to .685) in an earlier run, and what a search would do: how often it stops, by P(yes) above .5.

P(yes) is read before any text is written, so it does not depend on how long texts may be: they have 16 tokens at most.
Answers are greedy. A question counts if all three answers are read.
"""

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
from benchmarks.claims.small_models import QWEN, Work, command_of, label, work_of

# Q questions, R resamples

NUM_QUESTIONS = 71
"""Of 71 in the file."""
SEED = 13
LINE = 0.5
LABELER = {"name": "review", "temperature": 0, "max_text_tokens": 16}
VERSIONS = {"all": "all paragraphs", "other": "another paragraph left out", "gold": "a gold paragraph left out"}


@dataclass(frozen=True)
class Answers:
    """P(yes) by question, float64 [Q] each.

    Args:
        probs: by version.
        num_asked: questions, whether read or not.
    """

    probs: dict[str, np.ndarray]
    num_asked: int

    @property
    def num_read(self) -> int:
        """Questions of which all versions were read."""
        return len(self.probs["all"])


def main() -> None:
    """Ask and write the page."""
    work = work_of(__doc__)
    write_page(claim(work), work.pages)


def claim(work: Work) -> Claim:
    """Whether P(yes) tells that a gold paragraph is missing."""
    asked = versions(work)
    answers = read(asked, label(work, "review", asked, LABELER).rows)
    weight_RQ = resampled("enough", answers.num_read)
    areas = {name: area_of(answers, name, weight_RQ) for name in ("other", "all")}
    area_R = areas_of(answers.probs["other"], answers.probs["gold"], weight_RQ)
    stops = {name: (probs_Q > 0.5).astype(float) for name, probs_Q in answers.probs.items()}
    share = {
        name: figure(f"stops {name}", stops_Q.mean(), mean_of(stops_Q, weight_RQ)) for name, stops_Q in stops.items()
    }
    less_Q = stops["other"] - stops["gold"]
    higher_Q = higher(answers.probs["other"], answers.probs["gold"])
    return Claim(
        name="enough",
        title="A review knows when it has enough",
        source="R2RAG, section 3.3",
        answer=f"With all it needs but one paragraph, a small model says “enough” in {share['gold'].value:.0%} of "
        f"questions; with nothing needed missing, in {share['other'].value:.0%}.",
        here=verdict(areas["other"], LINE),
        there=NO_N,
        n=Row(
            "n",
            f"{answers.num_read} questions in three versions, of {answers.num_asked} asked",
            "the loop is not judged alone",
        ),
        headline=Row(
            "AUC of P(yes): a gold paragraph left out, against another left out", areas["other"], "none printed"
        ),
        smallest=Row("smallest distance from .5 that n could show", Figure("smallest", smallest(area_R)), NO_EFFECT),
        rows=[
            Row("AUC of P(yes): a gold paragraph left out, against all there", areas["all"]),
            Row(
                "P(yes) is higher with another left out",
                figure("higher", higher_Q.mean(), mean_of(higher_Q, weight_RQ)),
            ),
            *(Row(f"the search stops: {title}", share[name]) for name, title in VERSIONS.items()),
            Row(
                "stops, another left out less a gold one left out",
                figure("stops difference", less_Q.mean(), mean_of(less_Q, weight_RQ), "+.3f"),
            ),
        ],
        how=command_of("enough", " --model MODEL") + f"The line is .5. The model is {QWEN}. Both versions with a "
        "paragraph left out hold as many paragraphs, so that more text gains nothing; paragraphs keep the file's "
        "order, in which gold ones come early. “Enough” is P(yes) above .5. In the paper a model of 4B that reasons "
        "reviews several rounds; here is one round, and no reasoning. An earlier run, against all paragraphs alone, "
        "had an AUC of .624 (.566 to .685) (`benchmarks/evidence_multihop_cpu_2026-11-22.md`).",
        gpu="models that one would search with: `review`, `--set engine.model=…`",
        draw=lambda axes: draw(axes, answers),
    )


# ------------------------------------------------------------------------------
# Questions.


def versions(work: Work) -> pl.DataFrame:
    """Rows of all questions in all versions; the versions of a question follow each other."""
    rows = pl.read_parquet(work.data / "multihop_qa" / "pairs.parquet")
    questions = rows["query_id"].unique(maintain_order=True)
    random = np.random.default_rng(SEED)
    drawn = np.sort(random.choice(len(questions), NUM_QUESTIONS, replace=False))
    made = []
    for question in questions[drawn]:
        own = rows.filter(pl.col("query_id") == question)
        for version in VERSIONS:
            made.append(left_out(own, version, random))
    return pl.concat(made)


def left_out(own: pl.DataFrame, version: str, random: np.random.Generator) -> pl.DataFrame:
    """A question without one of its paragraphs, or with all."""
    if version != "all":
        grade = 1 if version == "gold" else 0
        out = random.choice(own.filter(pl.col("grade") == grade)["doc_id"].to_numpy())
        own = own.filter(pl.col("doc_id") != out)
    return own.select(
        "query",
        "doc_id",
        query_id=pl.col("query_id") + f"-{version}",
        document=pl.col("title") + "\n" + pl.col("body"),
    )


def read(asked: pl.DataFrame, labels: pl.DataFrame) -> Answers:
    """P(yes) of the questions of which all versions have a label."""
    probs = {row["query_id"]: row["sufficient_probs"][1] for row in labels.to_dicts()}
    questions = asked["query_id"].str.replace(r"-\w+$", "").unique(maintain_order=True)
    complete = [one for one in questions if all(f"{one}-{version}" in probs for version in VERSIONS)]
    by_version = {
        version: np.array([probs[f"{one}-{version}"] for one in complete], dtype=float) for version in VERSIONS
    }
    return Answers(by_version, len(questions))


# ------------------------------------------------------------------------------
# Figures.


def higher(one_X: np.ndarray, other_X: np.ndarray) -> np.ndarray:
    """1 where the first is higher, .5 where both are equal, [X]."""
    return (one_X > other_X) + 0.5 * (one_X == other_X)


def area_of(answers: Answers, version: str, weight_RQ: np.ndarray) -> Figure:
    """The AUC of P(yes), this version against that without a gold paragraph."""
    enough_Q, missing_Q = answers.probs[version], answers.probs["gold"]
    value = higher(enough_Q[:, None], missing_Q[None, :]).mean()
    return figure(f"area {version}", value, areas_of(enough_Q, missing_Q, weight_RQ))


def areas_of(enough_Q: np.ndarray, missing_Q: np.ndarray, weight_RQ: np.ndarray) -> np.ndarray:
    """In each resample of questions, whose versions are drawn together, [R]."""
    higher_QQ = higher(enough_Q[:, None], missing_Q[None, :])
    return np.einsum("rq,qp,rp->r", weight_RQ, higher_QQ, weight_RQ) / weight_RQ.sum(1) ** 2


def mean_of(value_Q: np.ndarray, weight_RQ: np.ndarray) -> np.ndarray:
    """[R]."""
    return weight_RQ @ value_Q / weight_RQ.sum(1)


def draw(axes: Any, answers: Answers) -> None:
    """The share of questions by P(yes), a line a version."""
    for place, (name, title) in enumerate(VERSIONS.items()):
        ordered_Q = np.sort(answers.probs[name])
        share_Q = 1 - np.arange(len(ordered_Q)) / len(ordered_Q)
        axes.step(ordered_Q, share_Q, where="pre", color=COLOURS[place], label=title)
    axes.set(xlabel="P(yes)", ylabel="share of questions at or above", ylim=(0, 1.02))
    axes.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
    main()
