"""B7: a review knows when it has enough (R2RAG, section 3.3: the search ends when the model says that the documents
suffice).

    RELABEL_DATA=FOLDER python -m benchmarks.claims.enough --to FOLDER --model FOLDER_OF_QWEN

The rule, set before the first run. Labeler `review` judges questions of HotpotQA, MuSiQue, 2WikiMultihopQA and IIRC
that have two gold paragraphs: 48 of 58, drawn by a seed. Each is asked twice, with as many paragraphs: once a gold one
is left out, once one of the others, both drawn. Paragraphs that both versions have come first, in the file's order, and
the one in which they differ comes last. The claim's figure is the AUC of P(yes) between the two; it holds if its
interval over questions is above .5. Next to it is what a search would do: how often it stops, by P(yes) above .5.

P(yes) is read before any text is written, so it does not depend on how long texts may be: they have 8 tokens at most.
Answers are greedy. A question counts if both answers are read.
"""

from dataclasses import dataclass
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
from benchmarks.claims.small_models import QWEN, Work, command_of, label, work_of

# Q questions, R resamples

NUM_QUESTIONS = 48
"""Of 58: what a CPU core answers in 20 minutes."""
SEED = 13
LINE = 0.5
LABELER = {"name": "review", "temperature": 0, "max_text_tokens": 8}
VERSIONS = {"enough": "both gold paragraphs there", "missing": "one of them left out"}


@dataclass(frozen=True)
class Answers:
    """P(yes) by question, float64 [Q] each.

    Args:
        probs: by version.
        refused: answers that say yes and could not be read, by version.
        num_asked: questions, whether read or not.
    """

    probs: dict[str, np.ndarray]
    refused: dict[str, int]
    num_asked: int

    @property
    def num_read(self) -> int:
        """Questions of which both versions were read."""
        return len(self.probs["enough"])


def main() -> None:
    """Ask and write the page."""
    work = work_of(__doc__)
    write_page(claim(work), work.pages)


def claim(work: Work) -> Claim:
    """Whether P(yes) shows that a gold paragraph is missing."""
    asked = versions(work)
    answers = read(asked, label(work, "review", asked, LABELER).rows, refusals(work.folder / "review"))
    weight_RQ = resampled("enough", answers.num_read)
    enough_Q, missing_Q = answers.probs["enough"], answers.probs["missing"]
    area_R = areas(enough_Q, missing_Q, weight_RQ)
    area = figure("area", higher(enough_Q[:, None], missing_Q[None, :]).mean(), area_R)
    higher_Q = higher(enough_Q, missing_Q)
    stops = {name: (probs_Q > 0.5).astype(float) for name, probs_Q in answers.probs.items()}
    share = {
        name: figure(f"stops {name}", stops_Q.mean(), mean_of(stops_Q, weight_RQ)) for name, stops_Q in stops.items()
    }
    less_Q = stops["enough"] - stops["missing"]
    return Claim(
        name="enough",
        title="A review separates enough evidence from too little",
        source="R2RAG, section 3.3",
        answer="Better than chance, and not by much: the AUC of a small model's P(yes), between questions with both "
        f"gold paragraphs and the same ones without one of them, is {area}, where chance has {LINE}. A search that "
        f"stops above {LINE} would stop in {share['enough'].value:.0%} of the former and {share['missing'].value:.0%} "
        "of the latter.",
        here=verdict(area, LINE),
        there=NO_N,
        n=Row("n", f"{answers.num_read} questions in two versions, of {answers.num_asked} asked", "not judged alone"),
        headline=Row("AUC of P(yes): a gold paragraph missing, or none", area, "none printed"),
        smallest=Row("smallest distance from .5 that n could show", Figure("smallest", smallest(area_R)), NO_EFFECT),
        rows=[
            Row(
                "P(yes) of a question is higher with both gold paragraphs (equal: half)",
                figure("higher", higher_Q.mean(), mean_of(higher_Q, weight_RQ)),
            ),
            *(Row(f"the search stops: {title}", share[name]) for name, title in VERSIONS.items()),
            Row(
                "the search stops: the difference",
                figure("stops difference", less_Q.mean(), mean_of(less_Q, weight_RQ), "+.3f"),
            ),
            Row(
                "answers refused in all attempts that say yes, both there · one left out",
                [Figure(f"refused {name}", answers.refused[name], form=".0f") for name in VERSIONS],
            ),
        ],
        how=command_of("enough", " --model MODEL") + f"The line is .5. The model is {QWEN}. Both versions hold as many "
        "paragraphs and the same ones but for the last, so that more text gains nothing; a model that saw in the last "
        "one alone whether it fits would gain. “Stops” is P(yes) above .5. Its interval is the bootstrap's; if none of "
        f"{answers.num_read} stops, up to {none_of(answers.num_read):.1%} may (Wilson). The rule that was set asks for "
        "the AUC, not for stops, and so does the verdict. A question with a refused answer is not counted: a yes next "
        "to a new query is refused, and its row says how often that hid a stop. In the paper a model of 4B that "
        "reasons reviews several rounds; here is one round, and no reasoning. An earlier run of 65 questions, against "
        "all paragraphs, had an AUC of .624 (.566 to .685) (`benchmarks/evidence_multihop_cpu_2026-11-22.md`).",
        gpu="models that one would search with: `review`, `--set engine.model=…`",
        draw=lambda axes: draw(axes, answers),
    )


# ------------------------------------------------------------------------------
# Questions.


def versions(work: Work) -> pl.DataFrame:
    """Rows of all questions in both versions, which follow each other."""
    rows = pl.read_parquet(work.data / "multihop_qa" / "pairs.parquet").filter("gold_certain")
    questions = rows["query_id"].unique(maintain_order=True)
    random = np.random.default_rng(SEED)
    drawn = np.sort(random.choice(len(questions), NUM_QUESTIONS, replace=False))
    made = []
    for question in questions[drawn]:
        own = rows.filter(pl.col("query_id") == question)
        gold, other = (random.choice(own.filter(pl.col("grade") == grade)["doc_id"].to_numpy()) for grade in (1, 0))
        shared = own.filter(~pl.col("doc_id").is_in([gold, other]))
        for version, last in (("enough", gold), ("missing", other)):
            asked = pl.concat([shared, own.filter(pl.col("doc_id") == last)])
            made.append(asked.with_columns(query_id=pl.col("query_id") + f"-{version}"))
    document = pl.col("title") + "\n" + pl.col("body")
    return pl.concat(made).select("query_id", "query", "doc_id", document=document)


def refusals(run: Path) -> pl.DataFrame:
    """Queries of which no answer could be read, and whether their last one says yes."""
    files = sorted(run.glob("quarantine/**/*.parquet"))
    if not files:
        return pl.DataFrame(schema={"query_id": pl.String, "says_yes": pl.Boolean})
    rows = pl.concat([pl.read_parquet(path) for path in files]).unique("query_id")
    text = pl.col("tries").list.last().struct.field("text")
    return rows.select("query_id", says_yes=text.str.contains("<is-sufficient>yes", literal=True))


def read(asked: pl.DataFrame, labels: pl.DataFrame, refused: pl.DataFrame) -> Answers:
    """P(yes) of the questions of which both versions have a label."""
    probs = {row["query_id"]: row["sufficient_probs"][1] for row in labels.to_dicts()}
    questions = asked["query_id"].str.replace(r"-\w+$", "").unique(maintain_order=True)
    complete = [one for one in questions if all(f"{one}-{version}" in probs for version in VERSIONS)]
    by_version = {
        version: np.array([probs[f"{one}-{version}"] for one in complete], dtype=float) for version in VERSIONS
    }
    says_yes = refused.filter("says_yes")["query_id"]
    num_refused = {version: int(says_yes.str.ends_with(f"-{version}").sum()) for version in VERSIONS}
    return Answers(by_version, num_refused, len(questions))


# ------------------------------------------------------------------------------
# Figures.


def higher(one_X: np.ndarray, other_X: np.ndarray) -> np.ndarray:
    """1 where the first is higher, .5 where both are equal, [X]."""
    return (one_X > other_X) + 0.5 * (one_X == other_X)


def areas(enough_Q: np.ndarray, missing_Q: np.ndarray, weight_RQ: np.ndarray) -> np.ndarray:
    """The AUC in each resample of questions, whose versions are drawn together, [R]."""
    higher_QQ = higher(enough_Q[:, None], missing_Q[None, :])
    return np.einsum("rq,qp,rp->r", weight_RQ, higher_QQ, weight_RQ) / weight_RQ.sum(1) ** 2


def mean_of(value_Q: np.ndarray, weight_RQ: np.ndarray) -> np.ndarray:
    """[R]."""
    return weight_RQ @ value_Q / weight_RQ.sum(1)


def none_of(num: int) -> float:
    """The upper end of Wilson's interval for a share, where none of `num` was found."""
    return 1.96**2 / (num + 1.96**2)


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
