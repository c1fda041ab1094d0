"""An engine whose model is made up, in the worker's own process: it answers after a fixed time, and reports each
row to the meter of `server.py` as it is asked. What is begun is paid for, whatever becomes of the answer.
"""

import hashlib
import re
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from benchmarks.twenty_million.server import OUTPUT_TOKENS, PROMPT_TOKENS, answer
from relabel.manifests.asks import POLL_S, Answer, Ask, Engine, EngineFacts, Request
from relabel.manifests.specs import EngineArgs, EngineSpec

ROW = re.compile(r"Number (\d+)\.")
ENTRY_POINTS = "[relabel.engines]\nmetered = benchmarks.twenty_million.metered:Metered\n"


class MeteredArgs(EngineArgs):
    """Options; none of them changes an answer."""

    speed_only: ClassVar[frozenset[str]] = frozenset({"meter", "latency_s", "concurrency"})

    meter: str
    """Unix socket of the meter."""
    latency_s: float = Field(ge=0.0)
    """Seconds from a request to its answer."""
    concurrency: int = Field(ge=1)
    """Most requests in flight."""


class Metered(Engine):
    """The engine."""

    Args = MeteredArgs

    def __init__(self, spec: EngineSpec, *, overlong: str = "truncate") -> None:
        self._args = MeteredArgs.model_validate(spec.args.model_dump())
        self._due = deque[tuple[float, Answer]]()
        self._meter = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._meter.connect(self._args.meter)

    @staticmethod
    def model_digest(spec: EngineSpec) -> str:  # noqa: ARG004
        return hashlib.sha256(b"metered").hexdigest()

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        return []

    @property
    def capacity(self) -> int:
        return self._args.concurrency - len(self._due)

    def submit(self, request: Request) -> None:
        text = "no"  # to a question about the engine itself
        numbers = [number for message in request.ask.messages for number in ROW.findall(message.text)]
        if numbers:
            row = int(numbers[-1])
            text = answer(row)
            self._meter.send(row.to_bytes(4, "little"))
        reply = Answer(request.id, text, "stop", {}, PROMPT_TOKENS, OUTPUT_TOKENS)
        self._due.append((time.monotonic() + self._args.latency_s, reply))

    def poll(self) -> list[Answer]:
        if self._due:
            time.sleep(min(max(0.0, self._due[0][0] - time.monotonic()), POLL_S))
        ready = []
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            ready.append(self._due.popleft()[1])
        return ready

    def facts(self) -> EngineFacts:
        return EngineFacts("metered", "1", "teacher", hashlib.sha256(b"metered").hexdigest())

    def close(self) -> None:
        self._due.clear()


def install(folder: Path) -> Path:
    """Register the engine as a package would. Returns the folder that PYTHONPATH needs."""
    package = folder / "plugin" / "relabel_metered-0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: relabel-metered\nVersion: 0\n")
    (package / "entry_points.txt").write_text(ENTRY_POINTS)
    return package.parent
