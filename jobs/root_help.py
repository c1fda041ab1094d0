"""The table of commands, and the help of `relabel` without click, whose import takes four times as long as Python's
start.
"""

import textwrap
from shutil import get_terminal_size
from typing import NamedTuple

MAX_WIDTH = 110


class Command(NamedTuple):
    """A command of `relabel`.

    Args:
        place: `MODULE:FUNCTION`.
        help: its line in the help of `relabel`.
        only_prints: it leaves nothing but what it prints, so that it fails where that is lost.
    """

    place: str
    help: str
    only_prints: bool = False


COMMANDS = {
    "init": Command(
        "relabel.jobs.commands.setup:init",
        "Write a job, student or teacher file to start from.",
    ),
    "templates": Command(
        "relabel.jobs.commands.setup:templates",
        "Write the built-in prompt templates, to edit them.",
    ),
    "ask": Command(
        "relabel.jobs.ask:ask",
        "Put a row to the model, and show all that is asked and answered.",
    ),
    "plan": Command(
        "relabel.jobs.commands.label:plan",
        "Cut the input into shards and chunks; say what a run would do.",
    ),
    "run": Command(
        "relabel.jobs.commands.label:run",
        "Label what is not labelled yet.",
    ),
    "rounds": Command(
        "relabel.jobs.commands.label:rounds",
        "Search a corpus for each question in several rounds, each a run.",
    ),
    "status": Command(
        "relabel.jobs.commands.status:status",
        "Show what is done, open and quarantined.",
        only_prints=True,
    ),
    "retry": Command(
        "relabel.jobs.commands.label:retry",
        "Ask the quarantined rows again.",
    ),
    "verify": Command(
        "relabel.jobs.commands.status:verify",
        "Prove that no row is lost or doubled and no file changed.",
    ),
    "score": Command(
        "relabel.jobs.commands.label:score",
        "Label pairs with a trained student.",
    ),
    "merge": Command(
        "relabel.jobs.commands.label_sets:merge",
        "Join outputs made in one way into one.",
    ),
    "combine": Command(
        "relabel.jobs.commands.label_sets:combine",
        "Make one set of labels from several judges'.",
    ),
    "evaluate": Command(
        "relabel.jobs.commands.label_sets:evaluate",
        "Measure labels against gold; compare a student with its teacher.",
        only_prints=True,
    ),
    "compare": Command(
        "relabel.jobs.commands.label_sets:compare",
        "Compare two label runs over the same pairs: two prompts, two teachers.",
        only_prints=True,
    ),
    "systems": Command(
        "relabel.jobs.commands.systems:systems",
        "Say which search is better, by labels and the grades of a few humans.",
        only_prints=True,
    ),
    "audit": Command(
        "relabel.jobs.commands.audit:audit",
        "Say how a judge can be fooled: change pairs, and see whether its grades move.",
    ),
    "review": Command(
        "relabel.jobs.commands.review:review",
        "Write the pairs that people should look at; make gold of what they say.",
    ),
    "convert": Command(
        "relabel.jobs.commands.label_sets:convert",
        "Turn labels into TREC qrels, run files, JSONL or Parquet, and back.",
    ),
    "report": Command(
        "relabel.jobs.commands.label_sets:report",
        "Write one HTML page about runs, teachers, students and bundles.",
    ),
    "distill": Command(
        "relabel.jobs.commands.train:distill",
        "Train a student on finished label runs.",
    ),
    "train": Command(
        "relabel.jobs.commands.train:train",
        "Train a teacher: a model that answers a labeler's prompts.",
    ),
    "export": Command(
        "relabel.jobs.commands.bundles:export",
        "Export a student to a bundle: ONNX, checked against it on real pairs.",
    ),
    "build-engine": Command(
        "relabel.jobs.commands.bundles:build_engine",
        "Build a TensorRT engine of a bundle, for this machine.",
    ),
    "bench": Command(
        "relabel.jobs.commands.bundles:bench",
        "Measure a bundle's latency and throughput on this machine.",
    ),
    "conform": Command(
        "relabel.jobs.commands.bundles:conform",
        "Compare a running rerank server's scores with a bundle's.",
    ),
    "pairs": Command(
        "relabel.jobs.commands.pairs:pairs",
        "Build pairs: from citations; context by BM25; documents cut into chunks.",
    ),
    "publish": Command(
        "relabel.jobs.commands.bundles:publish",
        "Publish a bundle to a store, and point a channel at it.",
    ),
    "pull": Command(
        "relabel.jobs.commands.pull:pull",
        "Fetch what a channel points to, check it, switch to it; or roll back.",
    ),
    "channel": Command(
        "relabel.jobs.commands.bundles:channel",
        "Point a channel at a published version.",
    ),
    "rollback": Command(
        "relabel.jobs.commands.bundles:rollback",
        "Point a channel at the version before.",
    ),
    "list": Command(
        "relabel.jobs.commands.bundles:list_bundles",
        "List the bundles at a place.",
        only_prints=True,
    ),
    "show": Command(
        "relabel.jobs.commands.bundles:show",
        "Show a bundle's versions and channels, one version, or the active version of a folder.",
        only_prints=True,
    ),
    "gc": Command(
        "relabel.jobs.commands.bundles:gc",
        "Remove versions and files that nothing points to.",
    ),
    "schema": Command(
        "relabel.jobs.commands.setup:schema",
        "Print a JSON Schema: of the job file, or of the label files.",
        only_prints=True,
    ),
    "doctor": Command(
        "relabel.jobs.commands.setup:doctor",
        "Show what this machine has: extras, devices, folders.",
        only_prints=True,
    ),
    "demo": Command(
        "relabel.jobs.commands.demo:demo",
        "Go the whole way with a small set: label, distill, export, publish, pull, score.",
    ),
}
ABOUT = "Turn a reasoning LLM's relevance judgments into labels that a small model can learn from."
EXITS = (
    "Every command takes --output json. Exit codes: 0 done, 1 a bug in relabel, 2 usage, 3 bad input, 4 something "
    "missing, 5 gate refused, 10 nothing to do, 20 partial (run again), 30 too many quarantined, 75 locked, 130 "
    "interrupted."
)
PAGES = "Pages that a help or a message names, such as docs/jobs.md, are in the source and not in the wheel."


def root_help() -> str:
    """The help of `relabel`, as wide as the terminal, 110 columns at most."""
    width = max(min(get_terminal_size().columns, MAX_WIDTH) - 2, 50)

    def table(rows: dict[str, str]) -> str:
        start = max(map(len, rows)) + 4
        return "\n".join(
            textwrap.fill(text, width, initial_indent=f"  {name}".ljust(start), subsequent_indent=" " * start)
            for name, text in rows.items()
        )

    return "\n\n".join(
        [
            "Usage: relabel [OPTIONS] COMMAND [ARGS]...",
            *(
                textwrap.fill(text, width, initial_indent="  ", subsequent_indent="  ")
                for text in (ABOUT, EXITS, PAGES)
            ),
            "Options:\n"
            + table({"--version": "Show the version and exit.", "-h, --help": "Show this message and exit."}),
            f"Commands:\n{table({name: command.help for name, command in COMMANDS.items()})}",
            "  Example: relabel run job.yaml --shard 3/64",
        ]
    )
