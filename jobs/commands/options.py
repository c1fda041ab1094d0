"""Options that commands share, and handling of SIGTERM for commands without a drain phase."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from relabel.jobs import logs
from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.process import check_interrupted, forget_interruptions, on_signal

if TYPE_CHECKING:
    from relabel.manifests.metrics.evaluation import GateVerdict

# ------------------------------------------------------------------------------
# Options that every command shares, and how a command says its result.


Command = TypeVar("Command", bound=Callable[..., Any])

FORCE_HELP = "Replace the file if it is there."


class Number(click.FloatRange):
    """A number within bounds, and finite: every comparison with NaN is false, so click lets it through any bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Exit 2 with the option's name otherwise."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return float(found)


def given_parameters() -> dict[str, click.Parameter]:
    """Options and arguments that the command under way was given, by name; not those left at their defaults."""
    context = click.get_current_context()
    sources = {one: context.get_parameter_source(str(one.name)) for one in context.command.params}
    return {str(one.name): one for one, source in sources.items() if source is not ParameterSource.DEFAULT}


def refuse_given(given: Collection[str], names: Sequence[str], reason: str) -> None:
    """Refuse options that are not meant here.

    Args:
        given: see `given_parameters`.
    Raises:
        UsageError: one of `names` is given.
    """
    parameters = given_parameters()
    for name in names:
        if name in given:
            raise UsageError(f"{parameters[name].opts[0]}: {reason}")


ROLES = ("query_id", "query", "doc_id", "document")


def columns_by_role(_context: click.Context, _option: click.Parameter, text: str | None) -> dict[str, Any]:
    """`query=text,document=title+body` as columns by role."""
    columns: dict[str, Any] = {}
    for item in text.split(",") if text else ():
        role, _, column = (part.strip() for part in item.partition("="))
        if not column or role not in ROLES or role in columns:
            raise click.UsageError(
                f"--columns {text}: `{item.strip()}` is not ROLE=COLUMN, or names a role twice. Write for instance "
                f"query=text,document=title+body; roles are {', '.join(ROLES)}."
            )
        columns[role] = column.split("+") if role == "document" else column
    return columns


def columns_option(text: str) -> Callable[[Command], Command]:
    """`--columns`, with its help."""
    return click.option("--columns", metavar="ROLE=COLUMN,...", callback=columns_by_role, help=text)


@contextlib.contextmanager
def names_column_options(*, are_options: bool = True) -> Iterator[None]:
    """Readers name the keys of a job, or the options of `relabel evaluate`, where `--columns` is what is meant.

    Args:
        are_options: False where they are of a job, or of a student's own pairs.
    """
    try:
        yield
    except InputError as exc:
        if not are_options:
            raise
        text = str(exc).replace("Name them in input.columns.document.", "Name them by --columns document=NAME+NAME.")
        text = text.replace("input.columns.gold", "--gold")
        text = text.replace("--by", "--columns query_id=…").replace("--doc", "--columns doc_id=…")
        exc.args = (re.sub(r"input\.columns\.(\w+)", r"--columns \1=", text),)
        raise


def together(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Several options as one, from the last that a help shows to the first."""

    def decorate(command: Command) -> Command:
        for option in options:
            command = option(command)
        return command

    return decorate


output_option = click.option(
    "--output",
    "output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Form of the result on stdout.",
)
"""`--output text|json`: the result on stdout; everything else goes to stderr."""

set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a key of the job file, for instance engine.seed=3. Repeatable.",
)
"""`--set`: settings that win over the job file."""

job_options = together(
    set_option,
    click.argument("job_file", metavar="JOB.YAML"),
)
"""The job file, and settings that win over it."""

date_option = click.option(
    "--date",
    "day",
    metavar="YYYY-MM-DD",
    help="The day that ${date} in the job file means; today in UTC by default.",
)
"""`--date`: the day that `${date}` in the job file means."""

scored_model_options = together(
    click.option("--api-key-env", metavar="NAME", help="Of a server: the variable that holds its key."),
    click.option("--served-model", default="", metavar="NAME", help="Of a server: the model's name there."),
    click.option(
        "--api",
        type=click.Choice(["auto", "cohere", "tei", "vllm-score", "openai-score"]),
        default="auto",
        show_default=True,
        help="Of a server: by which API it is asked.",
    ),
    click.option("--precision", metavar="NAME", help="Of a bundle: fp32, int8, …  [default: the bundle's own, fp32]"),
)
"""Of a bundle, or of a server, whose scores are asked for."""

log_option = click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    envvar=logs.VARIABLE,
    expose_value=False,
    help="Form of the lines on stderr: for people, or one JSON object each.",
)
"""`--log-format text|json`: the form of stderr. Already in force when the command begins (see `jobs.cli`)."""

grade_option = click.option(
    "--grade", metavar="COL", help="Column of gold grades.  [default: grade, or the run's input.columns.gold]"
)
"""`--grade`: the column of gold grades."""

grade_map_option = click.option(
    "--map",
    "grade_map",
    metavar="OLD=NEW,...",
    help="Bring gold grades to the labels' scale, say 0=0,1=1,2=2,3=2.",
)
"""`--map`: gold grades on another scale."""

label_map_option = click.option(
    "--map-labels", "label_map", metavar="OLD=NEW,...", help="Bring labels, samples and distributions to another scale."
)
"""`--map-labels`: labels on another scale."""


grades_option = click.option(
    "--grades",
    type=click.IntRange(2, 10),
    metavar="K",
    help="Grades on the scale, where neither a run nor distributions give them.",
)
"""`--grades`: how many there are."""

resamples_options = together(
    click.option(
        "--seed",
        type=click.IntRange(0),
        default=7,
        show_default=True,
        help="Of resamples.",
    ),
    click.option(
        "--resamples",
        type=click.IntRange(0, 100_000),
        default=1000,
        show_default=True,
        help="Bootstrap resamples; 0 for no intervals.",
    ),
)
"""`--resamples` and `--seed` of intervals."""


def duplicates_option(grades: str) -> Callable[[Command], Command]:
    """`--duplicates`: what becomes of a pair with several grades; `grades` says in the help whose."""
    return click.option(
        "--duplicates",
        type=click.Choice(["error", "mean", "first"]),
        default="error",
        show_default=True,
        help=f"A pair whose {grades} differ.",
    )


side_option = click.option(
    "--side",
    type=click.Choice(["test", "dev", "train", "all"]),
    help="Judge rows of this side of the student's split.  [default: test where a student is among the sets]",
)


def check_grade_options(
    gold: str | None,
    option: str,
    *,
    grade: str | None,
    by: str | None,
    doc: str,
    grade_map: str | None,
    duplicates: str,
) -> None:
    """Options that say how gold grades are read, where none are named, are a slip.

    Args:
        gold: what `option` names.
    Raises:
        UsageError: there are such options and no grades.
    """
    if gold is None and (grade or by or grade_map or doc != "doc_id" or duplicates != "error"):
        raise UsageError(f"--grade, --by, --doc, --map and --duplicates belong to {option}, which is not given.")


def report_refused(verdicts: Iterable[GateVerdict]) -> None:
    """Say on stderr which gates refused."""
    from relabel.manifests.records import as_object  # brings pydantic, which `--help` does without

    for verdict in verdicts:
        if not verdict.has_passed:
            logs.write(f"gate {verdict}.", level="error", event="gate", **as_object(verdict))


def local_folder(text: str, what: str) -> Path:
    """A folder on this machine.

    Raises:
        UsageError: it is a URL, or empty.
    """
    if not text or "://" in text:
        raise UsageError(f"{what} is {text!r}: want a folder on this machine.")
    return Path(text)


sign_key_option = click.option(
    "--sign-key",
    metavar="FILE",
    envvar="RELABEL_SIGN_KEY",
    help="Private ed25519 key (PEM) to sign with; RELABEL_SIGN_KEY may hold the path or the PEM text.",
)


# ------------------------------------------------------------------------------
# SIGTERM for commands that have nothing to drain: as Ctrl-C, so that what they were making is tidied away.


@contextlib.contextmanager
def sigterm_ends(*, has_launcher: bool = False) -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt while the block runs, as Ctrl-C does; without it Python ends at once and
    tidies nothing. An error that a library makes of it leaves the block as KeyboardInterrupt; where one swallows it,
    `check_interrupted` raises it again before anything is put in its place.

    Args:
        has_launcher: see `forget_interruptions`.
    """
    if threading.current_thread() is not threading.main_thread():  # no other may set a handler
        yield
        return
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a shell says to what it starts in the background
        numbers.append(signal.SIGINT)
    forget_interruptions(has_launcher=has_launcher)
    earlier = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    except Exception:
        check_interrupted()
        if has_launcher:  # it ends the others where one has ended, perhaps before this one has said what it met
            earlier = dict.fromkeys(earlier, signal.SIG_IGN)
        raise
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        forget_interruptions()
