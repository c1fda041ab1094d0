"""What is asked and answered as lines on stdout."""

from __future__ import annotations

import click

from relabel.jobs.asking import ask_text
from relabel.jobs.asking.asking import AskedRows
from relabel.jobs.asking.listening import HeardAsk
from relabel.manifests.labels import Pair


class AskScreen:
    """Shows exchanges in the order in which they come.

    Args:
        stage: the only one that is shown; None shows all.
    """

    def __init__(self, stage: str | None) -> None:
        self._stage = stage
        self._is_first = True
        self._above = ""
        """The prompt that was shown last, of the same rows."""

    def begins(self, pairs: list[Pair]) -> None:
        """Rows are asked from here on."""
        if self._is_first:
            click.echo(ask_text.LEGEND)
        self._is_first = False
        self._above = ""
        for pair in pairs:
            click.echo(ask_text.head_of(pair))

    def heard(self, exchange: HeardAsk) -> None:
        """Something was asked, or answered."""
        if self._stage not in (None, exchange.ask.stage):
            return
        if exchange.answer is not None:
            click.echo(ask_text.answer_text(exchange))
            return
        click.echo(ask_text.ask_text(exchange, self._above))
        self._above = ask_text.prompt_text(exchange)

    def ends(self, asked: AskedRows) -> None:
        """All is answered."""
        for row in asked.rows:
            if row is not None:
                click.echo(ask_text.outcome_text(row) + "\n")
