"""A chat server's script that is slow and counts what it was asked, so that what a kill costs is known from outside."""

import hashlib
import re
import threading
import time
from collections import Counter

from relabel.jobs.run.loop import CHECK_EVERY_S

from .scripted_server import Call, Json, chat

LATENCY_S = 0.15
FEW_ASKS = 16
A_SECOND_S = 1.0


class Counting:
    """A server's script that is slow, answers every seventh ask with nonsense, and knows when it has answered what.

    An ask is known by its bytes, which hold its seed.
    """

    def __init__(self, latency_s: float = LATENCY_S) -> None:
        self.latency_s = latency_s
        self.asked: Counter[bytes] = Counter()
        self.answered: dict[bytes, float] = {}
        self._lock = threading.Lock()

    def __call__(self, call: Call) -> Json:
        draw = int.from_bytes(hashlib.sha256(call.raw).digest()[:4], "little")
        if "shoe" not in str(call.body["messages"][1]):  # the trial at the start
            return chat("<think>so</think>\n<intent>so</intent>\n<score>1</score>")
        with self._lock:
            self.asked[call.raw] += 1
        time.sleep(self.latency_s * (0.5 + draw % 100 / 100))
        with self._lock:
            self.answered.setdefault(call.raw, time.monotonic())
        return chat("I would rather not be clear." if draw % 7 == 0 else self.text(call), prompt=20 + draw % 9)

    @staticmethod
    def text(call: Call) -> str:
        """An answer to any of the stages, its grade by the document and the seed."""
        messages = call.body["messages"]
        numbers = re.findall(r"of kind (\d+)", messages[-1]["content"])
        if not numbers:
            return "<think>plain</think>\n<intent>wants shoes</intent>"
        grade = (int(numbers[-1]) + call.body.get("seed", 0)) % 3
        if len(messages) == 2:
            return f"<think>row {numbers[-1]}</think>\n<score>{grade}</score>"
        return f"<think>row {numbers[-1]}</think>\n<extract>a red shoe</extract>\n<score>{grade}</score>"

    def num_late(self, killed_s: float) -> int:
        """How many were answered in the second before a kill, or after it."""
        return sum(at_s > killed_s - A_SECOND_S - CHECK_EVERY_S for at_s in self.answered.values())

    @property
    def num_twice(self) -> int:
        """Asks that came again."""
        return sum(count - 1 for count in self.asked.values())
