"""A server on loopback that speaks the OpenAI API as a script informs it to, misbehaves where that says so, and
remembers all calls.
"""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "teacher"


@dataclass
class Call:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    raw: bytes
    number: int

    @property
    def body(self) -> dict[str, Any]:
        value = json.loads(self.raw)
        assert isinstance(value, dict)
        return value


@dataclass
class Json:
    """A whole reply."""

    payload: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0


@dataclass
class Raw:
    """Bytes as they are; `missing` more are promised and never sent."""

    raw: bytes
    missing: int = 0
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class Hang:
    """No reply until the test is over."""


class Reset:
    """The connection is torn down."""


Script = Callable[[Call], "Json | Raw | Hang | Reset"]


def completion(
    text: str, *, finish: str | None = "stop", prompt: int = 10, output: int = 5, cached: int = 0, **more: Any
) -> Json:
    """A reply of `/completions`."""
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
    return Json({"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}], "usage": usage})


def chat(
    text: str | None, *, finish: str | None = "stop", prompt: int = 10, output: int = 5, cached: int = 0, **message: Any
) -> Json:
    """A reply of `/chat/completions`."""
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    return Json({"choices": [choice], "usage": usage})


def error(status: int, message: str = "no", code: str | None = None, **headers: str) -> Json:
    """An error in OpenAI's form."""
    return Json(
        {"error": {"message": message, "code": code}},
        status,
        {name.replace("_", "-"): value for name, value in headers.items()},
    )


class _Http(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 256  # an engine opens all of its connections at once


class ScriptedServer:
    """Runs in threads of its own until `close`. `script` answers every POST; `models` is what GET /models lists, None
    for no such list, with the status `no_models`. `gets` answers every other GET.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.models: list[dict[str, Any]] | None = [{"id": MODEL}]
        self.no_models = 404
        self.gets: Callable[[str], Json | Raw] | None = None
        self.calls: list[Call] = []
        self.lists = 0
        self.most_in_flight = 0
        self._in_flight = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._over = threading.Event()
        self._http = _Http(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    @property
    def in_flight(self) -> int:
        """Requests that wait for their reply."""
        return self._in_flight

    def posts(self, path: str = "") -> list[Call]:
        return [call for call in self.calls if call.path.endswith(path)]

    def close(self) -> None:
        self._over.set()
        self._http.shutdown()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._http.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 20.0
            wbufsize = -1  # head and body in one packet, or the client's delayed acknowledgement costs 40 ms

            def setup(self) -> None:
                super().setup()
                with server._lock:
                    server._open.add(self.connection)

            def do_GET(self) -> None:
                if server.gets is not None and not self.path.endswith("/models"):
                    self._send(server.gets(self.path))
                    return
                server.lists += 1
                self._send(error(server.no_models) if server.models is None else Json({"data": server.models}))

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                with server._lock:
                    call = Call(
                        self.path, {name.lower(): value for name, value in self.headers.items()}, raw, len(server.calls)
                    )
                    server.calls.append(call)
                    server._in_flight += 1
                    server.most_in_flight = max(server.most_in_flight, server._in_flight)
                try:
                    reply = server.script(call)
                    if isinstance(reply, Json) and reply.after_s:
                        server._over.wait(reply.after_s)
                    if isinstance(reply, Hang):
                        server._over.wait(30)
                        self.close_connection = True
                finally:
                    with server._lock:
                        server._in_flight -= 1
                if not isinstance(reply, Hang):
                    self._send(reply)

            def _send(self, reply: Json | Raw | Reset) -> None:
                if isinstance(reply, Reset):
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                    self.close_connection = True
                    return
                raw = reply.raw if isinstance(reply, Raw) else json.dumps(reply.payload).encode()
                missing = reply.missing if isinstance(reply, Raw) else 0
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                if "content-type" not in reply.headers:
                    self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(raw) + missing))
                self.end_headers()
                self.wfile.write(raw)
                self.close_connection = self.close_connection or missing > 0

            def handle(self) -> None:
                try:
                    super().handle()
                except OSError:  # the client hung up, or we did
                    self.close_connection = True

            def finish(self) -> None:
                try:
                    super().finish()
                except (OSError, ValueError):
                    self.rfile.close()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler
