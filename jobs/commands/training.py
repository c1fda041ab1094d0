"""What commands that train have in common: how they begin, what they say on the way."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click

from relabel.jobs.commands.ending import sigterm_ends
from relabel.jobs.commands.options import Command, together
from relabel.jobs.planning.job_files import CACHE_VARIABLE, storage_of
from relabel.jobs.planning.settings import Settings, SpecKind, read_settings
from relabel.jobs.planning.spec_places import placed
from relabel.manifests.errors import UsageError
from relabel.manifests.models.references import default_cache_dir
from relabel.manifests.storage.context import Storage

LINE_EVERY_S = 15.0
LAUNCHER_VARIABLE = "TORCHELASTIC_RUN_ID"
"""torchrun, and accelerate by it, set it for the processes that they start."""


def training_options(product: str) -> Callable[[Command], Command]:
    """What every spec of a training takes: settings that win over it, and how to begin."""
    return together(
        click.option("--restart", is_flag=True, help=f"Delete checkpoints, or a {product}, that the output holds."),
        click.option("--resume", is_flag=True, help="Continue from the last checkpoint, or begin if there is none."),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Set a key of the spec, for instance train.epochs=3. Repeatable.",
        ),
    )


class TrainingSpec(NamedTuple):
    """A spec file that was opened.

    Args:
        where: the file and the variables beside it, for messages.
        cache_dir: where fetched models are kept; None for the default.
    """

    settings: Settings
    where: str
    cache_dir: Path | None
    storage: Storage


def open_spec(spec: str | Mapping[str, Any], overrides: Sequence[str], kind: SpecKind) -> TrainingSpec:
    """Read a training's spec: a file, or values as one would hold them.

    Raises:
        ConfigError: it can't be read, or has a key that there is not.
    """
    settings = read_settings(spec, overrides=overrides, kind=kind)
    where = settings.places.where + (f" with {', '.join(settings.beside)}" if settings.beside else "")
    cache = os.environ.get(CACHE_VARIABLE)
    cache_dir = Path(placed(cache, settings.places.here)) if cache else None
    return TrainingSpec(settings, where, cache_dir, storage_of(settings.values, where=where))


@contextlib.contextmanager
def says_how_to_continue(output: str, cache_dir: Path | None, *, is_first: bool) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the training; the first process says how it goes on.

    Args:
        output: of the spec.
        cache_dir: where models that go to a URL are trained; None for the default.
    """
    from relabel.distill.training.checkpoint_folders import how_it_goes_on
    from relabel.distill.training.output_locations import CHECKPOINTS, training_folder

    try:
        with sigterm_ends(has_launcher=LAUNCHER_VARIABLE in os.environ):
            yield
    except KeyboardInterrupt:
        if is_first:
            folder = training_folder(output, cache_dir=cache_dir or default_cache_dir())
            click.echo(how_it_goes_on(folder / CHECKPOINTS), err=True)
        raise


def start_of(*, resume: bool, restart: bool) -> Literal["new", "resume", "restart"]:
    """How a training begins, by its flags.

    Raises:
        UsageError: both were given.
    """
    if resume and restart:
        raise UsageError("--resume and --restart: one continues, the other starts over; give one of them.")
    return "resume" if resume else "restart" if restart else "new"


def is_first_process() -> bool:
    """Whether this is the process that writes and speaks, by torchrun's and accelerate's number of it."""
    return os.environ.get("RANK", "0") == "0"


def teller() -> Callable[[str], None]:
    """Says lines on stderr; of the steps one every quarter of a minute."""
    last = [float("-inf")]

    def say(line: str) -> None:
        is_step = line.startswith("step ") and ", dev:" not in line
        now = time.monotonic()
        if is_step and now - last[0] < LINE_EVERY_S:
            return
        last[0] = now if is_step else last[0]
        click.echo(line, err=True)

    return say
