"""A stand-in for a model's server, in a process of its own: it answers after a fixed time, at a fixed price, and counts
how often each row was asked. What is paid for is what this server has answered, whatever relabel says.

    python -m benchmarks.twenty_million.server PORT FOLDER ROWS LATENCY_S

It also counts what engines that answer by themselves (`metered.py`) tell its socket `FOLDER/meter`.

The number of a row is part of its document, and alone decides the answer, so that labels can be compared with those of
an undisturbed run. One row of a thousand is never answered in a form that reads.
"""

import asyncio
import json
import re
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np

BIND_AGAIN_S = 0.5
METER = "meter"
KEEP_S = 2.0
"""How often counts are written, seconds."""
ROW = re.compile(rb"Number (\d+)\.")
BAD_EVERY = 1000
PROMPT_TOKENS = 100
OUTPUT_TOKENS = 10


def is_bad(row: int) -> bool:
    """Whether no answer about this row reads."""
    return row % BAD_EVERY == 7


def answer(row: int) -> str:
    """What the model says of a row."""
    if is_bad(row):
        return "I would rather not say."
    return f"<think>Number {row}.</think><score>{row * 2654435761 % 2**32 % 4}</score>"


class Counts:
    """How often each row was asked, and how many asks were answered in each second; kept in a folder."""

    def __init__(self, folder: Path, rows: int) -> None:
        self._asked_path = folder / "asked.npy"
        self._seconds_path = folder / "answers_by_second.json"
        self.asked_R = np.zeros(rows, np.uint8)
        self.by_second: dict[str, int] = {}
        if self._asked_path.exists():
            self.asked_R = np.load(self._asked_path)
            self.by_second = json.loads(self._seconds_path.read_text())

    def add(self, row: int) -> None:
        """One more answer about a row."""
        self.asked_R[row] += 1
        second = str(int(time.time()))
        self.by_second[second] = self.by_second.get(second, 0) + 1

    def write(self) -> None:
        """Keep them, so that a show that was stopped goes on counting."""
        np.save(self._asked_path, self.asked_R)
        self._seconds_path.write_text(json.dumps(self.by_second))


class Connection(asyncio.Protocol):
    """One client's connection: HTTP/1.1, one request after the other."""

    def __init__(self, counts: Counts, latency_s: float) -> None:
        self._counts = counts
        self._latency_s = latency_s
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where answers go."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer each whole request."""
        self._data += data
        while True:
            head, end, rest = self._data.partition(b"\r\n\r\n")
            if not end:
                return
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            size = int(length[1]) if length else 0
            if len(rest) < size:
                return
            self._data = rest[size:]
            self._request(head, rest[:size])

    def _request(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET"):
            self._send({"data": [{"id": "teacher"}]})
            return
        row = ROW.search(body)
        if row is None:  # a question about the server itself
            self._send(completion("no"))
            return
        asyncio.get_running_loop().call_later(self._latency_s, self._answer, int(row[1]))

    def _answer(self, row: int) -> None:
        self._counts.add(row)
        if not self._transport.is_closing():
            self._send(completion(answer(row)))

    def _send(self, value: dict[str, object]) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


class Meter(asyncio.DatagramProtocol):
    """Rows that engines were asked, four bytes a datagram."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def datagram_received(self, data: bytes, _address: object) -> None:
        """Count a row."""
        self._counts.add(int.from_bytes(data, "little"))


def completion(text: str) -> dict[str, object]:
    """A reply in OpenAI's form."""
    message = {"role": "assistant", "content": text}
    return {
        "model": "teacher",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": OUTPUT_TOKENS},
    }


async def serve(port: int, counts: Counts, latency_s: float, meter_path: Path) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    meter_path.unlink(missing_ok=True)
    meter = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    meter.bind(str(meter_path))
    await loop.create_datagram_endpoint(lambda: Meter(counts), sock=meter)
    over = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    while True:
        try:
            server = await loop.create_server(lambda: Connection(counts, latency_s), "127.0.0.1", port, backlog=1024)
            break
        except OSError:  # somebody's connection goes out from this port; the show's jobs name it
            await asyncio.sleep(BIND_AGAIN_S)
    async with server:
        while not over.is_set():
            try:
                await asyncio.wait_for(over.wait(), KEEP_S)
            except TimeoutError:
                counts.write()
    counts.write()


def main() -> None:
    """Serve at a port of loopback."""
    port, folder, rows, latency_s = sys.argv[1:]
    counts = Counts(Path(folder), int(rows))
    asyncio.run(serve(int(port), counts, float(latency_s), Path(folder) / METER))


if __name__ == "__main__":
    main()
