"""The command `review`: what people should look at, and what they said."""

from typing import Any

import click

from relabel.jobs.commands.options import (
    given_parameters,
    local_folder,
    output_option,
    refuse_given,
    sigterm_ends,
)
from relabel.jobs.output import emit
from relabel.manifests.errors import UsageError
from relabel.manifests.files import Storage

ORDERS = ("random", "doubt", "second")
_CHOICE = ("order", "second", "pairs")
"""Options that choose pairs."""
_OUT = (*_CHOICE, "queries", "blind")
"""Those of pairs for people."""


@click.command(epilog="Example: relabel review out/ecom --to look.labelstudio.json --pairs 200")
@click.argument("run", metavar="RUN")
@click.option(
    "--to",
    required=True,
    metavar="FILE",
    help="Pairs: .labelstudio.json, .quepid.csv, .opensearch.json, .parquet, .jsonl, .csv, .tsv; gold: the last four.",
)
@click.option(
    "--from",
    "sources",
    multiple=True,
    metavar="[NAME=]FILE",
    help="What people judged; NAME where the file does not say who. Repeatable.",
)
@click.option(
    "--order",
    type=click.Choice(ORDERS),
    help="What comes first; doubt: what may be on the other side of relevant.  [default: random; second with --second]",
)
@click.option("--second", metavar="LABELS", help="A second opinion: a run's output or a label file.")
@click.option(
    "--pairs",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    help="Pairs at most.",
)
@click.option(
    "--queries",
    metavar="PLAN.json",
    help="Instead: the documents that a plan of `relabel systems --plan --output json` asks people to judge.",
)
@click.option("--blind", is_flag=True, help="Leave the run's label out of FILE, so that it sways nobody.")
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=7,
    show_default=True,
    help="Of the random order, and of pairs that are worth the same.",
)
@click.option(
    "--examples",
    metavar="DIR",
    help="With --from: folder of prompt templates that gets judged pairs with their reasons, to show in the prompt.",
)
@click.option("--allow-partial", is_flag=True, help="Take a run that is not finished or is over its quarantine limit.")
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@output_option
@sigterm_ends()
def review(run: str, to: str, sources: tuple[str, ...], output: str, **values: Any) -> int:
    """Write the pairs of a run that people should look at first, or make gold of what they judged.

    RUN is a finished run's output. With --from, FILE gets every judgment with who, when and why; agreement of each two
    people is printed, and pairs whose grades differ are listed, never settled. With --examples, up to six pairs whose
    grade a person explained become DIR/examples.jsonl, which a job with `labeler.templates: DIR` shows in its prompt.
    docs/review.md says what each order is worth.
    """
    from relabel.jobs.review import ReviewOptions, gather_gold, pick_pairs

    if values["examples"] is not None:
        values["examples"] = str(local_folder(values["examples"], "--examples"))
        if not sources:
            raise UsageError("--examples takes what people said: name it by --from.")
    options = ReviewOptions(**values)
    if sources:
        refuse_given(given_parameters(), _OUT, "it chooses pairs to judge, and --from reads what was judged.")
        return emit(gather_gold(run, sources, to, options, Storage()), output)
    if options.queries is not None:
        refuse_given(given_parameters(), _CHOICE, "it chooses pairs, and --queries names them.")
    return emit(pick_pairs(run, to, options, Storage()), output)
