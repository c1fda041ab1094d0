"""An engine that remembers what it was asked and what it said."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relabel.manifests.asks import Answer, Ask, Engine, EngineFacts, Request, ShowsPrompts, WritesInSight


@dataclass(slots=True)
class HeardAsk:
    """An ask, and what came of it.

    Args:
        answer: None while there is none.
        seconds: from the ask to the answer, waiting included.
        written: the answer so far, while there is none and the engine tells.
        prompt: as the model reads it, template text and data by turns; None where that is not known here.
    """

    ask: Ask
    answer: Answer | None = None
    seconds: float | None = None
    written: str = ""
    prompt: list[str] | None = None


class Listening:
    """Passes everything on to an engine, and tells of every ask and every answer.

    Args:
        heard: called with each exchange, when it is asked and when it is answered.
        is_read_along: it is also called while an answer is written, where the engine can tell.
    """

    def __init__(self, engine: Engine, heard: Callable[[HeardAsk], None], *, is_read_along: bool = False) -> None:
        self._engine = engine
        self._heard = heard
        self._open: dict[int, tuple[HeardAsk, float]] = {}
        self.is_read_along = is_read_along and isinstance(engine, WritesInSight) and engine.show_writing(self._read)

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

    def _read(self, request_id: int, written: str) -> None:
        exchange, _ = self._open[request_id]
        if written != exchange.written:
            exchange.written = written
            self._heard(exchange)
