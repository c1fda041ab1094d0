"""What a demo says: some labels and how good they are, what each step took, and where to go on."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import PurePath

from relabel.jobs.demo.demo_data import DemoLabel, DemoPair, agreement, most_frequent_share
from relabel.jobs.demo.demo_quality import Quality
from relabel.jobs.demo.demo_specs import DemoChoices
from relabel.jobs.demo.demo_steps import Ended
from relabel.jobs.output import table
from relabel.manifests.metrics.registry import title_of

ROWS_SHOWN = 8


def labels_text(pairs: list[DemoPair], labels: dict[int, DemoLabel], engine: str) -> str:
    """Some labels, and how good they are."""
    lines = ["", f"{len(labels)} labels, for instance:"]
    every = max(1, len(pairs) // ROWS_SHOWN)
    for row_id in range(0, len(pairs), every):
        label = labels.get(row_id)
        if label is None:
            continue
        pair = pairs[row_id]
        spread = " ".join(f"{p:.2f}" for p in label.probs)
        quote = label.quotes[0] if label.quotes else "none"
        lines.append(f"  {pair.query} | {pair.title}")
        lines.append(
            f"    grade {label.grade} (author: {pair.grade})  p = [{spread}]  outside {label.outside_mass:.3f}"
        )
        lines.append(f"    evidence: {textwrap.shorten(quote, 90)}")
    judge = "A model of 135 million parameters" if engine == "transformers" else "An engine that makes its answers up"
    return "\n".join(
        [
            *lines,
            "",
            (
                f"{judge} agrees with the set's author on {agreement(pairs, labels):.0%} of the pairs; the one grade "
                "that occurs"
            ),
            (
                f"most often in the set, said of all pairs, agrees on {most_frequent_share():.0%}. It is here to "
                "show the way. A 7B teacher"
            ),
            "goes the same way, with its name as engine.model in the job file.",
        ]
    )


def times_text(done: Sequence[Ended]) -> str:
    """What each step took."""
    rows = [(PurePath(ended.step.words[1]).name, f"{ended.seconds:4.0f} s  {ended.step.title}") for ended in done]
    return f"What each step took:\n{table(rows)}"


def quality_text(found: Sequence[Quality]) -> str:
    """Figures of each model, with intervals."""
    pairs, queries = found[0].pairs, found[0].queries
    rows = []
    for one in found:
        figures = [
            f"{title_of(name)} {_number(figure.value)} [{_number(figure.low)}, {_number(figure.high)}]"
            for name, figure in one.figures.items()
        ]
        rows.append((one.labels, ", ".join(figures)))
    head = f"By the author's grades of {pairs} pairs of {queries} queries that nothing was trained on, 95 % intervals:"
    return f"{head}\n{table(rows)}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def next_text(folder: str, seconds: float, choices: DemoChoices, *, is_whole_way: bool) -> str:
    """Where the files lie, and what to do with them."""
    lies = [
        (f"{folder}/job.yaml", "the job: change it and run it again into another output"),
        (f"{folder}/run/", "the labels, one Parquet file a chunk, and manifest.json: what ran, on what"),
    ]
    then = [(f"relabel verify {folder}/run", "prove that no row was lost")]
    if is_whole_way:
        lies += [
            (f"{folder}/student/", "the student, with its model card and curves"),
            (f"{folder}/bundle/", "what serves: models, tokenizer, loader, parity"),
            (f"{folder}/measurements/", "how fast it answers on this machine"),
            (f"{folder}/models/", "where it is published; an s3:// URL goes as well"),
            (f"{folder}/served/current/", "what a server opens"),
        ]
        if choices.has_training:
            lies.insert(1, (f"{folder}/teacher/", "the teacher: a model directory that engine.model takes"))
            lies.append((f"{folder}/report.html", "all of it on one page"))
        else:
            everything = f"{folder}/run {folder}/student {folder}/bundle {folder}/scores"
            then.append((f"relabel report {everything} --gold {folder}/pairs.parquet", "all of it on one page"))
        then += [
            (f"relabel pull --rollback {folder}/served", "serve again what served before, once there are two"),
        ]
    then.append(("relabel init job.yaml", "start a job of your own"))
    after = [f"  {line}\n      {what}" for line, what in then]
    return "\n".join(["", f"Done in {seconds:.0f} s. The files:", table(lies), "Next:", *after])
