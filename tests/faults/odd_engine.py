"""Engines that misbehave on request, as third parties' engines and servers do; for the children of `forks`."""

import contextlib
import itertools
import os
import time
import zlib
from pathlib import Path
from typing import Any, ClassVar

from relabel.labelers.engines.fake import Fake, FakeArgs
from relabel.manifests.asks import POLL_S, Answer, Distribution, Request
from relabel.manifests.errors import EngineCrashError


class OddArgs(FakeArgs):
    """`nth` request, and what becomes of it (`how`); 0 is a good engine."""

    speed_only: ClassVar[frozenset[str]] = FakeArgs.speed_only | {"nth", "how"}
    nth: int = 0
    how: str = ""


TEXTS = {
    "garbage text": "\x00\x01<<<>>>\u202e" * 50,
    "lone surrogate": "<think>\ud800 half a letter</think>\n<extract>none</extract>\n<score>1</score>",
    "huge text": "x" * 3_000_000,
    "no text": "",
    "echo of the prompt": "<score>2</score><score>0</score>",
    "truncated": "<think>and then",
    "refusal": "I'm sorry, but I can't help with that.",
}
NUMBERS = {
    "no probabilities": (float("nan"), float("nan"), float("nan")),
    "negative probabilities": (-1.0, 1.0, 1.0),
    "too many probabilities": (0.25, 0.25, 0.25, 0.25),
    "infinite probabilities": (float("inf"), 0.0, 0.0),
}
LOST = ("unknown id", "duplicate", "silence", "hang", "crash", "memory", "exit", "raises")
"""Ways after which the engine is of no use any more."""
HARMLESS = ("late", "swapped order")
"""Ways that change no label."""
HOWS = (
    *TEXTS,
    *NUMBERS,
    "no distributions",
    "more distributions",
    "other asks answer",
    "error",
    "odd counts",
    *LOST,
    *HARMLESS,
)


class Odd(Fake):
    """The fake engine, but for one answer."""

    Args = OddArgs

    def poll(self) -> list[Answer]:
        """As the fake's, with the nth answer spoilt."""
        args = self._args
        self._seen = getattr(self, "_seen", 0)
        self._kept: list[Answer] = getattr(self, "_kept", [])
        answers, self._kept = [*self._kept, *super().poll()], []
        if args.nth and self._seen < args.nth <= self._seen + len(answers):
            answers = self._spoilt(answers, args.nth - self._seen - 1, args.how)
        elif args.how == "silence" and self._seen >= args.nth and not answers:
            time.sleep(min(POLL_S, 0.05))
        self._seen += len(answers)
        return answers

    def _spoilt(self, answers: list[Answer], at: int, how: str) -> list[Answer]:
        answer = answers[at]
        if how in TEXTS:
            answer.text, answer.finish = TEXTS[how], "length" if how == "truncated" else "stop"
        elif how in NUMBERS:
            answer.distributions = {name: Distribution(NUMBERS[how], 0.0) for name in answer.distributions}
        elif how == "no distributions":
            answer.distributions = {}
        elif how == "more distributions":
            answer.distributions = {**answer.distributions, "never asked": Distribution((1.0,), 0.0)}
        elif how == "error":
            answer.finish, answer.text, answer.detail = "error", "", "by the test"
        elif how == "odd counts":
            answer.prompt_tokens, answer.output_tokens, answer.cached_tokens = 2**40, -5, 2**62
        elif how == "other asks answer":
            other = answers[at - 1]
            answer.text, other.text = other.text, answer.text
            answer.distributions, other.distributions = other.distributions, answer.distributions
        elif how == "unknown id":
            answer.request_id = 10**9
        elif how == "duplicate":
            answers.append(answer)
        elif how == "silence":
            del answers[at]
            self._seen += 1
        elif how == "late":
            self._kept = [answers.pop(at)]
        elif how == "swapped order":
            answers.reverse()
        else:
            self._go(how)
        return answers

    def _go(self, how: str) -> None:
        if how == "hang":
            time.sleep(3600.0)
        if how == "exit":
            os._exit(66)
        if how == "memory":
            raise MemoryError("by the test")
        if how == "raises":
            raise RuntimeError("CUDA error: an illegal memory access was encountered (by the test)")
        raise EngineCrashError("the engine is gone, by the test")


class FickleArgs(FakeArgs):
    """`log`: a folder where each life of the engine keeps a file."""

    speed_only: ClassVar[frozenset[str]] = FakeArgs.speed_only | {"log"}
    log: str = ""


ANSWERS_OF_A_LIFE = 10_000


class Fickle(Fake):
    """The fake engine, but in each life it answers otherwise, as a GPU does from batch to batch. No two answers have
    the same number of output tokens, so that rows say which answers they are made of; each request is a line in the
    file of its life.
    """

    Args = FickleArgs

    def __init__(self, spec: Any, **options: Any) -> None:
        super().__init__(spec, **options)
        args = self._args
        self._answers = itertools.count(1)
        for life in itertools.count(1):
            with contextlib.suppress(FileExistsError):
                self._life, self._file = life, Path(args.log, f"life-{life}")
                self._file.touch(exist_ok=False)
                break

    def _draw(self, request: Request) -> int:
        ask = request.ask
        text = "".join(message.text for message in ask.messages).encode("utf-8", "surrogatepass")
        with self._file.open("a") as file:
            file.write(f"{ask.stage} {ask.shared_by} {zlib.crc32(text):08x} {request.seed}\n")
        return super()._draw(request._replace(seed=request.seed ^ self._life << 40))

    def _answer(self, request: Request, draw: int) -> Answer:
        answer = super()._answer(request, draw)
        answer.output_tokens = self._life * ANSWERS_OF_A_LIFE + next(self._answers)
        return answer


def register() -> None:
    """Make them known to this process as `odd` and `fickle`."""
    from relabel.labelers.registry import ENGINES

    ENGINES["odd"] = "tests.faults.odd_engine:Odd"
    ENGINES["fickle"] = "tests.faults.odd_engine:Fickle"


def register_and(function: str, *arguments: Any) -> None:
    """The same, and then another thing that a child of `forks` does to itself."""
    from tests.faults import children

    register()
    getattr(children, function)(*arguments)


__all__ = ["HARMLESS", "HOWS", "LOST", "Fickle", "Odd", "Request", "register", "register_and"]
