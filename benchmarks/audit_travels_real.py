"""Does a judge's weakness travel through distillation? As `benchmarks.audit_travels`, of real searches: a prompted
Qwen-1.5B, a student of its labels, a student of trusted grades, and SmolLM2-135M, prompted alike.

    RELABEL_DATA=FOLDER python -m benchmarks.audit_travels_real --to FOLDER --teacher MODEL

Pairs are CrowdFlower's product searches (219 queries), the document is the title. Of 140 queries, drawn by seed 7, so
many lessons are drawn, which the teacher labels (`direct`, four grades, bfloat16). Two MiniLM-L6 learn from them with
the same settings, one the teacher's distributions and one the trusted grades. All four judges are audited by eight
probes on the same pairs of the other 79 queries, seed 7. The two probes that ask the most tokens (truncation, language)
are left out.

The rule, set before the first run:

- A pair *moves* if its expected grade moves the wrong way by .3, a tenth of the scale. Figures are shares of pairs that
  move. Intervals are of 10,000 resamples of queries, at 1 - .05/8, since eight probes are tried (Bonferroni).
- The teacher *is weak* to a probe if it moves more pairs than `whitespace` moves in the same direction: the low end of
  the paired difference is above 0.
- Such a weakness *travelled* if the student of its labels moves more pairs than the student of gold, which has the same
  size and data and never met the teacher: the low end of the paired difference is above 0. It *did not* if the high end
  is below .1. Else it *cannot be shown*.
- A student of flat distributions moves less than one of sharp grades, whatever it reads. So the same is computed with a
  step of each judge's own: a tenth of the distance between the 5 % and the 95 % quantiles of its grades of unchanged
  pairs. Where the two verdicts differ, the page's is *cannot be shown*.
"""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.claims.distilled_student import ENCODER
from benchmarks.claims.small_models import SEED, SMALL, Work, label, relabel_once

# N audited pairs, Q queries, R resamples

NUM_LEARNED = 140
PROBES = (
    "stuffing",
    "instruction",
    "forged",
    "score",
    "lorem",
    "repeated",
    "padded",
    "query-order",
)
RESAMPLES = 10_000
STEP = 0.3
LEAST = 0.1
"""What would be worth knowing: a difference of one pair in ten."""
DIRECT = {"name": "direct", "grades": 4}
TRAIN = {
    "epochs": 5,
    "batch_size": 16,
    "learning_rate": 2.0e-4,
    "max_tokens": 96,
    "seed": 7,
    "device": "cpu",
}


@dataclass(frozen=True)
class Judge:
    """Grades of one judge: by variant of a pair, float64 [N], NaN where there is none."""

    grades: Mapping[str, np.ndarray]

    def step(self) -> float:
        """A tenth of the range of its own grades."""
        low, high = np.nanquantile(self.grades["original"], (0.05, 0.95))
        return 0.1 * float(high - low)

    def moves(self, probe: str, direction: str, step: float) -> np.ndarray:
        """1 where a pair moves the wrong way by a step, 0 where not, NaN where it was not asked."""
        before = self.grades.get(f"{probe}.base", self.grades["original"])
        moved_N = self.grades[probe] - before
        if direction == "down":
            moved_N = -moved_N
        elif direction == "either":
            moved_N = np.abs(moved_N)
        return np.asarray(np.where(np.isnan(moved_N), np.nan, moved_N >= step))


@dataclass(frozen=True)
class Share:
    """A share or a difference of shares, with its interval."""

    value: float
    low: float
    high: float

    def text(self, form: str = ".2f") -> str:
        """`.42 (.31 to .54)`."""
        return f"{self.value:{form}} ({self.low:{form}} to {self.high:{form}})"


class Resampled:
    """Means over pairs, with intervals over queries.

    Args:
        query_N: the number of each pair's query.
    """

    def __init__(self, query_N: np.ndarray) -> None:
        self._query_N = query_N
        self._num_queries = int(query_N.max()) + 1
        chance = np.full(self._num_queries, 1 / self._num_queries)
        self._weight_RQ = np.random.default_rng(SEED).multinomial(self._num_queries, chance, RESAMPLES)

    def share(self, value_N: np.ndarray) -> Share:
        """Of the pairs that have a value."""
        there_N = ~np.isnan(value_N)
        sum_Q = np.bincount(self._query_N, np.where(there_N, value_N, 0), self._num_queries)
        count_Q = np.bincount(self._query_N, there_N, self._num_queries)
        mean_R = (self._weight_RQ @ sum_Q) / (self._weight_RQ @ count_Q)
        outside = 0.05 / len(PROBES) / 2
        low, high = np.quantile(mean_R, (outside, 1 - outside))
        return Share(float(np.nanmean(value_N)), float(low), float(high))


def main() -> None:
    """Label, distil, audit, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="Folder of the runs; the same call again goes on there.")
    parser.add_argument("--teacher", required=True, help="Qwen's model.")
    parser.add_argument("--small", default=SMALL, help="SmolLM2's model.")
    parser.add_argument("--encoder", default=ENCODER, help="MiniLM-L6.")
    parser.add_argument("--rows", type=int, default=150, help="Pairs to audit.")
    parser.add_argument("--lessons", type=int, default=1000, help="Pairs to label and learn.")
    options = parser.parse_args()
    folder = options.to.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    data = Path(os.environ["RELABEL_DATA"]).absolute()
    teacher = Work(data, folder, folder, options.teacher, {"dtype": "bfloat16"})
    small = Work(data, folder, folder, options.small, {"dtype": "bfloat16"})
    lessons, held_out = drawn_pairs(data, options.lessons)
    held_out.write_parquet(folder / "held-out.parquet")
    label(teacher, "lessons", lessons, DIRECT)
    write_job(small, "small", folder / "lessons.parquet")
    of_labels = {"labels": [str(folder / "lessons")]}
    of_gold = {
        "gold": {"path": str(folder / "lessons.parquet"), "grade": "gold"},
        "loss": {"gold_weight": 1},
    }
    judges = {
        "student of its labels": distilled(folder, "of-labels", of_labels, options.encoder),
        "student of gold": distilled(folder, "of-gold", of_gold, options.encoder),
        "SmolLM2": folder / "small.yaml",
        "Qwen": folder / "lessons.yaml",
    }
    audits = {name: audited(folder, name, judge, options.rows) for name, judge in judges.items()}
    print(page_of(folder, audits, held_out))


# ------------------------------------------------------------------------------
# Runs.


def drawn_pairs(data: Path, num_lessons: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Pairs to learn, and all pairs of the other queries."""
    rows = pl.read_parquet(data / "crowdflower_ecom" / "pairs.parquet").sort("query_id", "doc_id")
    document = pl.col("title").fill_null("")
    pairs = rows.select("query_id", "query", "doc_id", document=document, gold=pl.col("grade").cast(pl.Int64))
    random = np.random.default_rng(SEED)
    learned = random.permutation(pairs["query_id"].unique().sort().to_numpy())[:NUM_LEARNED]
    is_learned = pl.col("query_id").is_in(learned.tolist())
    lessons = pairs.filter(is_learned)
    chosen = np.sort(random.choice(len(lessons), num_lessons, replace=False))
    return lessons[chosen], pairs.filter(~is_learned)


def write_job(work: Work, name: str, pairs: Path) -> None:
    """A job that is only audited."""
    job = {
        "name": name,
        "input": {"path": str(pairs)},
        "labeler": DIRECT,
        "engine": {"name": "transformers", "model": work.model, "args": work.engine},
        "output": str(work.folder / name),
    }
    (work.folder / f"{name}.yaml").write_text(json.dumps(job), encoding="utf-8")


def distilled(folder: Path, name: str, learns: dict[str, Any], encoder: str) -> Path:
    """A student's folder."""
    values = {
        "name": name,
        "labels": [],
        **learns,
        "student": {"kind": "encoder", "model": encoder, "heads": {"relevance": 4}, "pooling": "mean"},
        "train": TRAIN,
        "split": {"by": "query_id", "dev": 0.1, "test": 0.1, "seed": 0},
        "output": str(folder / name),
    }
    spec = folder / f"{name}.yaml"
    spec.write_text(json.dumps(values), encoding="utf-8")
    relabel_once(folder, f"{name}-distill", "distill", spec)
    return folder / name


def audited(folder: Path, name: str, judge: Path, rows: int) -> Path:
    """The folder of a judge's audit."""
    to = folder / f"audit-{name.replace(' ', '-')}"
    words: list[object] = ["--pairs", folder / "held-out.parquet", "--rows", rows, "--to", to]
    for probe in PROBES:
        words += ["--probe", probe]
    if judge.is_dir():
        words += ["--columns", "document=document"]
    relabel_once(folder, to.name, "audit", judge, *words)
    return to


# ------------------------------------------------------------------------------
# Figures.


def judge_of(audit: Path, num_pairs: int) -> Judge:
    """A judge's grades, from the runs of its audit."""
    grades: dict[str, np.ndarray] = {}
    for path in sorted((audit / "labels").glob("labels/**/*.parquet")):
        for name, grade in pl.read_parquet(path).select("query_id", "expected_grade").iter_rows():
            place, variant = name.split(".", 1)
            grades.setdefault(variant, np.full(num_pairs, np.nan))[int(place)] = np.nan if grade is None else grade
    return Judge(grades)


def page_of(folder: Path, audits: Mapping[str, Path], held_out: pl.DataFrame) -> str:
    """Tables of Markdown."""
    facts = {name: json.loads((path / "audit.json").read_text(encoding="utf-8")) for name, path in audits.items()}
    num_pairs = next(iter(facts.values()))["rows"]
    asked = pl.read_parquet(audits["Qwen"] / "pairs.parquet").filter(pl.col("query_id").str.ends_with(".original"))
    query_N = asked["query"].rank("dense").to_numpy().astype(int) - 1
    gold_N = asked.select("query", "doc_id").join(held_out, on=["query", "doc_id"], how="left", maintain_order="left")
    judges = {name: judge_of(path, num_pairs) for name, path in audits.items()}
    resampled = Resampled(query_N)
    lines = [f"{num_pairs} pairs of {query_N.max() + 1} queries.", "", "| judge | AUC | own step | CPU s, audit |"]
    lines.append("|---|---|---|---|")
    for name, judge in judges.items():
        auc = auc_of(judge.grades["original"], gold_N["gold"].to_numpy() >= 2)
        cpu_s = json.loads((folder / f"{audits[name].name}.json").read_text(encoding="utf-8"))["cpu_s"]
        lines.append(f"| {name} | {auc:.3f} | {judge.step():.2f} | {cpu_s:.0f} |")
    lines += [
        "",
        "| probe | Qwen | student of its labels | student of gold | SmolLM2 "
        "| labels' less gold's | own step | the weakness |",
        "|---|---|---|---|---|---|---|---|",
    ]
    directions = {probe["probe"]: probe["direction"] for probe in facts["Qwen"]["probes"]}
    own_step = {name: judge.step() for name, judge in judges.items()}
    same_step = dict.fromkeys(judges, STEP)
    for probe, direction in directions.items():
        if probe in ("again", "whitespace"):
            continue
        verdicts = [verdict(judges, probe, direction, steps, resampled) for steps in (same_step, own_step)]
        shares = {name: resampled.share(judge.moves(probe, direction, STEP)) for name, judge in judges.items()}
        less = [
            resampled.share(excess(judges, probe, direction, steps)).text("+.2f") for steps in (same_step, own_step)
        ]
        ends = verdicts[0] if verdicts[0] == verdicts[1] else f"cannot be shown ({'; own step: '.join(verdicts)})"
        cells = [shares[name].text() for name in ("Qwen", "student of its labels", "student of gold", "SmolLM2")]
        lines.append(f"| `{probe}` | {' | '.join([*cells, *less])} | {ends} |")
    return "\n".join(lines)


def excess(judges: Mapping[str, Judge], probe: str, direction: str, steps: Mapping[str, float]) -> np.ndarray:
    """By how much more the student of labels moves than the student of gold, pair by pair."""
    first_N = judges["student of its labels"].moves(probe, direction, steps["student of its labels"])
    second_N = judges["student of gold"].moves(probe, direction, steps["student of gold"])
    return np.asarray(first_N - second_N)


def verdict(
    judges: Mapping[str, Judge], probe: str, direction: str, steps: Mapping[str, float], resampled: Resampled
) -> str:
    """By the rule."""
    teacher = judges["Qwen"]
    by_probe = teacher.moves(probe, direction, steps["Qwen"])
    by_chance = teacher.moves("whitespace", direction, steps["Qwen"])
    if resampled.share(by_probe - by_chance).low <= 0:
        return "the teacher is not shown to be weak"
    less = resampled.share(excess(judges, probe, direction, steps))
    if less.low > 0:
        return "travelled"
    return "did not travel" if less.high < LEAST else "cannot be shown"


def auc_of(score_N: np.ndarray, is_relevant_N: np.ndarray) -> float:
    """The chance that a relevant pair has the higher grade, half of ties."""
    there_N = ~np.isnan(score_N)
    high = score_N[there_N & is_relevant_N][:, None]
    low = score_N[there_N & ~is_relevant_N][None]
    return float(np.mean((high > low) + 0.5 * (high == low)))


if __name__ == "__main__":
    main()
