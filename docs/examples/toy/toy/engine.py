"""`toy`: a teacher at a server that answers POST /generate."""

import hashlib
import json
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import ClassVar
from urllib.error import HTTPError
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

from pydantic import Field

from relabel.manifests.asks import Answer, Ask, Engine, EngineFacts, Request
from relabel.manifests.errors import ModelError, ServerGoneError
from relabel.manifests.specs import EngineArgs, EngineSpec

CHARS_PER_TOKEN = 4


class ToyArgs(EngineArgs):
    speed_only: ClassVar[frozenset[str]] = frozenset({"url", "concurrency", "max_tries", "timeout_s"})

    url: str = "http://127.0.0.1:8917"
    """Address of the server."""
    served_model: str = "toy-1"
    """Part of the label's key."""
    concurrency: int = Field(8, ge=1)
    """Most requests in flight."""
    max_tries: int = Field(4, ge=1)
    """Tries of one request."""
    timeout_s: float = Field(300.0, gt=0)
    """Longest wait for an answer, seconds."""


class Toy(Engine):
    Args = ToyArgs

    def __init__(self, spec: EngineSpec, *, overlong: str = "truncate") -> None:
        self._args = ToyArgs.model_validate(spec.args.model_dump())
        self._digest = self.model_digest(spec)
        self._max_chars = spec.max_prompt_tokens * CHARS_PER_TOKEN
        self._pool = ThreadPoolExecutor(self._args.concurrency)
        self._in_flight: set[Future[Answer]] = set()

    @staticmethod
    def model_digest(spec: EngineSpec) -> str:
        served_model = ToyArgs.model_validate(spec.args.model_dump()).served_model
        return hashlib.sha256(served_model.encode()).hexdigest()

    def prepare(self, asks: list[Ask]) -> list[str]:
        for ask in asks:
            if ask.format is None:
                raise ModelError(f"stage {ask.stage!r} needs a distribution: toy returns text alone.")
            if (answer := self._answer(Request(0, ask, 0))).finish in ("error", "overlong"):
                raise ModelError(f"stage {ask.stage!r}: {answer.detail}")
        return ["toy returns no distributions."]

    @property
    def capacity(self) -> int:
        return 2 * self._args.concurrency - len(self._in_flight)

    def submit(self, request: Request) -> None:
        self._in_flight.add(self._pool.submit(self._answer, request))

    def poll(self) -> list[Answer]:
        done, self._in_flight = wait(self._in_flight, timeout=0.2, return_when=FIRST_COMPLETED)
        return [future.result() for future in done]  # raises ServerGoneError of the thread

    def facts(self) -> EngineFacts:
        return EngineFacts("toy", "1", self._args.served_model, self._digest, device="remote")

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _answer(self, request: Request) -> Answer:
        ask = request.ask
        prompt = "".join(f"{message.role}: {message.text}\n\n" for message in ask.messages) + ask.prefill
        if len(prompt) > self._max_chars:
            return Answer(request.id, "", "overlong", detail="the prompt is longer than engine.max_prompt_tokens")
        body = {"prompt": prompt, "max_tokens": ask.max_tokens, "temperature": ask.sampling.temperature}
        content = json.dumps({**body, "seed": request.seed}).encode()
        for attempt in range(self._args.max_tries):
            try:
                with urlopen(HttpRequest(f"{self._args.url}/generate", content), timeout=self._args.timeout_s) as reply:
                    text = json.load(reply)["text"]
                tokens = len(prompt) // CHARS_PER_TOKEN, len(text) // CHARS_PER_TOKEN
                finish = "length" if tokens[1] >= ask.max_tokens else "stop"
                return Answer(request.id, text, finish, {}, *tokens)
            except HTTPError as exc:
                if exc.code not in (429, 500, 502, 503):  # this request is refused; others may pass
                    return Answer(request.id, "", "error", detail=f"HTTP {exc.code}")
            except OSError:
                pass
            time.sleep(2**attempt / 10)
        raise ServerGoneError(f"no server answers at {self._args.url}; the same command continues later.")
