"""What is asked and answered as lines on stdout; where one reads along, an answer appears while it is written."""

from __future__ import annotations

import sys

import click

from relabel.jobs.asking import ask_text
from relabel.jobs.asking.asking import AskedRows
from relabel.jobs.asking.listening import HeardAsk
from relabel.jobs.output import shown
from relabel.manifests.labels import Pair
from relabel.manifests.secrets.redaction import redacted


class AskScreen:
    """Shows exchanges in the order in which they come. One answer at a time is shown while it is written: what comes
    meanwhile waits for its end.

    Args:
        stage: the only one that is shown; None shows all.
    """

    def __init__(self, stage: str | None) -> None:
        self._stage = stage
        self._is_first = True
        self._front: HeardAsk | None = None
        """Whose answer is being written on the screen."""
        self._said = ""
        self._above = ""
        """The prompt that was shown last, of the same rows."""
        self._later: list[tuple[HeardAsk, bool]] = []
        """What came meanwhile, and whether that was an answer."""

    def begins(self, pairs: list[Pair]) -> None:
        """Rows are asked from here on."""
        if self._is_first:
            click.echo(ask_text.LEGEND)
        self._is_first = False
        self._above = ""
        for pair in pairs:
            click.echo(ask_text.head_of(pair))

    def heard(self, exchange: HeardAsk) -> None:
        """Something was asked, or answered, or more of an answer is there."""
        if self._stage not in (None, exchange.ask.stage):
            return
        is_answered = exchange.answer is not None
        if exchange.written and not is_answered:
            self._read_on(exchange)
        elif self._front is None:
            self._show(exchange, is_answered=is_answered)
        elif exchange is self._front:
            self._finish(exchange)
        else:
            self._later.append((exchange, is_answered))

    def ends(self, asked: AskedRows) -> None:
        """All is answered."""
        for row in asked.rows:
            if row is not None:
                click.echo(ask_text.outcome_text(row) + "\n")

    def _read_on(self, exchange: HeardAsk) -> None:
        if self._front is None:
            self._front, self._said = exchange, ""
            click.echo(ask_text.ruler(f"{exchange.ask.stage}: answers"))
        if exchange is self._front:
            # a word that is not whole waits: half a secret has no form to be known by
            end = max(exchange.written.rfind(" "), exchange.written.rfind("\n")) + 1
            self._say(redacted(shown(exchange.written[:end])))

    def _say(self, text: str, *, is_whole: bool = False) -> None:
        """Put what is new of an answer on the screen."""
        if text.startswith(self._said):
            click.echo(text[len(self._said) :], nl=False)
        elif is_whole or not self._said.startswith(text):  # a connection broke, and another answer came of it
            click.echo(f"\n{ask_text.ruler('answers anew')}\n{text}", nl=False)
        else:
            return  # begun anew, and not yet where it was
        self._said = text
        sys.stdout.flush()

    def _finish(self, exchange: HeardAsk) -> None:
        assert exchange.answer is not None
        self._say(redacted(shown(exchange.answer.text)), is_whole=True)
        click.echo("\n" + ask_text.answer_text(exchange, is_text_shown=True))
        self._front, later, self._later = None, self._later, []
        for one, is_answered in later:
            self._show(one, is_answered=is_answered)

    def _show(self, exchange: HeardAsk, *, is_answered: bool) -> None:
        if is_answered:
            click.echo(ask_text.answer_text(exchange))
            return
        click.echo(ask_text.ask_text(exchange, self._above))
        self._above = ask_text.prompt_text(exchange)
