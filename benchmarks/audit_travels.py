"""Does a judge's weakness travel through distillation? A teacher, a student of its labels and a student of gold are
audited on the same held-out pairs.

    RELABEL_DATA=FOLDER python -m benchmarks.audit_travels --to FOLDER [--rows 100]

FOLDER may be that of `benchmarks.claims.distilled_student`, whose teacher's labels and student are taken up again.

The rule, set before the first run. The teacher is SmolLM2-135M with the adapter that relabel ships (`direct`). Both
students are MiniLM-L6 with the settings of `relabel demo`; one learns the teacher's labels of 70 queries of composed
product searches (`jobs/demo/shop.jsonl`), the other the trusted grades of the same pairs. Pairs of the next 30 queries
are audited by every probe, seed 7. The figure is the share of pairs that move the wrong way by a tenth of the scale.
The teacher *is weak* to a probe if the low end of its interval is above the share that moves so when it is asked again.
Such a weakness *travelled* if the low end of the labels' student is above the high end of gold's student, and *did not*
if its high end is below the low end of the teacher; else it *cannot be shown*. A weakness that gold's student shows as
well is of the architecture or of the data, whatever the teacher does.
"""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks.claims.distilled_student import ENCODER, NUM_LEARNED, student_of
from benchmarks.claims.small_models import SMALL, Work, label, relabel_once, searches, shipped, taught_labeler


@dataclass(frozen=True)
class Moved:
    """The share of pairs that one judge moves the wrong way under a probe, with its 95 % interval; `again` is the share
    that moves so without a change.
    """

    share: float
    low: float
    high: float
    again: float

    def __str__(self) -> str:
        return f"{self.share:.2f} ({self.low:.2f} to {self.high:.2f})"


def main() -> None:
    """Label, distil, audit, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="Folder of the runs; the same call again goes on there.")
    parser.add_argument("--rows", type=int, default=100, help="Pairs to audit.")
    options = parser.parse_args()
    folder = options.to.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    work = Work(Path(os.environ["RELABEL_DATA"]).absolute(), folder, folder, SMALL, {"dtype": "bfloat16"})
    pairs = searches()
    is_learned = pl.col("query_id").is_in(pairs["query_id"].unique().sort()[:NUM_LEARNED].to_list())
    label(work, "lessons", pairs.filter(is_learned), taught_labeler(), reuse="trained", lora=shipped("adapter"))
    held_out = folder / "judged.parquet"
    pairs.filter(~is_learned).write_parquet(held_out)
    judges = {
        "teacher": folder / "lessons.yaml",
        "student of its labels": student_of(work),
        "student of gold": student_of_gold(work),
    }
    audits = {}
    for name, judge in judges.items():
        to = folder / f"audit-{name.replace(' ', '-')}"
        words = ["--pairs", held_out, "--rows", options.rows, "--to", to]
        if judge.is_dir():
            words += ["--columns", "document=document"]
        audits[name] = moved_of(relabel_once(folder, to.name, "audit", judge, *words).facts)
    print(page_of(audits, options.rows))


def student_of_gold(work: Work) -> Path:
    """As `student_of`, of trusted grades alone."""
    values = json.loads((work.folder / "student.yaml").read_text(encoding="utf-8"))
    values |= {
        "name": "student-of-gold",
        "labels": [],
        "gold": {"path": str(work.folder / "lessons.parquet"), "grade": "gold"},
        "loss": {"gold_weight": 1},
        "output": str(work.folder / "student-of-gold"),
    }
    assert values["student"]["model"] == ENCODER
    spec = work.folder / "student-of-gold.yaml"
    spec.write_text(json.dumps(values), encoding="utf-8")
    relabel_once(work.folder, "student-of-gold-distill", "distill", spec)
    return work.folder / "student-of-gold"


def moved_of(facts: dict[str, Any]) -> dict[str, Moved]:
    """By probe, from an audit's JSON."""
    found = {}
    for probe in facts["probes"]:
        moved = probe["moved"]
        if moved["low"] is not None and probe["probe"] != "again":
            found[probe["probe"]] = Moved(moved["value"], moved["low"], moved["high"], probe["again"] or 0.0)
    return found


def verdict(teacher: Moved, of_labels: Moved, of_gold: Moved) -> str:
    """By the rule."""
    if teacher.low <= teacher.again:
        return "the teacher is not weak"
    if of_labels.low > of_gold.high:
        return "travelled"
    if of_labels.high < teacher.low:
        return "did not travel"
    return "cannot be shown"


def page_of(audits: dict[str, dict[str, Moved]], rows: int) -> str:
    """Tables of Markdown."""
    lines = [
        f"{rows} pairs; the share that moves the wrong way by a tenth of the scale, 95 % intervals over queries.",
        "",
        f"| probe | {' | '.join(audits)} | teacher asked again | the weakness |",
        f"|{'---|' * (len(audits) + 3)}",
    ]
    teacher, of_labels, of_gold = audits.values()
    for probe in teacher:
        judged = [teacher[probe], of_labels[probe], of_gold[probe]]
        cells = [*map(str, judged), f"{teacher[probe].again:.2f}", verdict(*judged)]
        lines.append(f"| `{probe}` | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
