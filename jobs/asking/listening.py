"""An engine that remembers what it was asked and what it said."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relabel.manifests.asks import Answer, Ask, Engine, EngineFacts, Request, ShowsPrompts


@dataclass(slots=True)
class HeardAsk:
    """An ask, and what came of it.

    Args:
        answer: None while there is none.
        seconds: from the ask to the answer, waiting included.
        prompt: as the model reads it, template text and data by turns; None where that is not known here.
    """

    ask: Ask
    answer: Answer | None = None
    seconds: float | None = None
    prompt: list[str] | None = None


class Listening:
    """Passes everything on to an engine, and tells of every ask and every answer.

    Args:
        heard: called with each exchange, when it is asked and when it is answered.
    """

    def __init__(self, engine: Engine, heard: Callable[[HeardAsk], None]) -> None:
        self._engine = engine
        self._heard = heard
        self._open: dict[int, tuple[HeardAsk, float]] = {}

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        return self._engine.prepare(asks)

    @property
    def capacity(self) -> int:
        return self._engine.capacity

    def submit(self, request: Request) -> None:
        exchange = HeardAsk(request.ask)
        if isinstance(self._engine, ShowsPrompts):
            exchange.prompt = self._engine.rendered(request.ask)
        self._open[request.id] = exchange, time.perf_counter()
        self._heard(exchange)
        self._engine.submit(request)

    def poll(self) -> list[Answer]:
        answers = self._engine.poll()
        for answer in answers:
            if (held := self._open.pop(answer.request_id, None)) is not None:
                exchange, started_s = held
                exchange.answer, exchange.seconds = answer, time.perf_counter() - started_s
                self._heard(exchange)
        return answers

    def facts(self) -> EngineFacts:
        return self._engine.facts()

    def close(self) -> None:
        self._engine.close()
