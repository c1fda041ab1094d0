"""What commands that train have in common: how they begin, what they say on the way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Literal

import click

from manifests.errors import UsageError

LINE_EVERY_S = 15.0
CONTINUE = "The last whole checkpoint is kept. Continue with the same command and --resume."


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
