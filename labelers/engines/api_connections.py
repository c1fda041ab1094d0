"""Connections to one server, one for each request in flight; the only place that sends the key.

httpx looks through its whole pool at every request: one client with 64 connections took 6 ms of CPU a request, 64
clients with one each take 1 ms (2026-11-20). So a request takes a client of its own, and puts it back.
"""

from __future__ import annotations

import importlib
import ssl
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from relabel.labelers.engines.api_complaints import shown
from relabel.labelers.engines.api_options import OpenAiArgs
from relabel.labelers.engines.api_replies import ReplyError
from relabel.manifests.extras import require

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0
"""Longest wait for a connection."""


class HttpReply(NamedTuple):
    """A whole reply: its body is unpacked."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Connections:
    """Clients, made as they are needed.

    trust_env is off: the environment (proxies, .netrc with other credentials) is not this folder's to read. Redirects
    stay off, as httpx has them: they would carry the key elsewhere.

    Args:
        key: sent as a bearer token; None sends none.
    """

    def __init__(self, args: OpenAiArgs, key: str | None) -> None:
        self._library = library = require("httpx", extra="openai", purpose="The openai engine")
        # which would import it at the first request, in the thread of the loop: see `records.read_in_threads`
        importlib.import_module("anyio.abc")
        self._base = args.base_url.rstrip("/")
        self._headers = {"accept-encoding": "gzip", **({"authorization": f"Bearer {key}"} if key else {})}
        self._timeout = library.Timeout(args.timeout_s, connect=min(CONNECT_S, args.timeout_s))
        self._certificates: ssl.SSLContext | None = None
        if self._base.startswith("https:"):  # 0.1 s to read them, so only where there is a connection to prove
            self._certificates = library.create_ssl_context(trust_env=False)
            self._certificates.load_default_certs()  # the machine's own beside the library's
        self._free: list[httpx.AsyncClient] = []
        self._all: list[httpx.AsyncClient] = []

    async def send(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        *,
        limit_bytes: int,
        kind: str = "application/json",
    ) -> HttpReply:
        """One request and its whole reply.

        Args:
            kind: of the content.
            limit_bytes: most that the reply's body may hold once it is unpacked; more is not read.
        Raises:
            ReplyError: the body is longer, or its compression can't be read.
            httpx.TransportError: as it comes. It holds the request, and that the key: not to be chained.
        """
        client = self._free.pop() if self._free else self._open()
        try:
            headers = {"content-type": kind} if content is not None else {}
            request = client.build_request(method, self._base + path, content=content, headers=headers)
            response = await client.send(request, stream=True)
            try:
                body = await _body(response, limit_bytes)
                return HttpReply(response.status_code, response.headers, body)
            finally:
                await response.aclose()
        finally:
            self._free.append(client)

    async def close(self) -> None:
        """Close every client."""
        for client in self._all:
            await client.aclose()

    def _open(self) -> httpx.AsyncClient:
        limits = self._library.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=20.0)
        verify = self._certificates if self._certificates is not None else False
        client: httpx.AsyncClient = self._library.AsyncClient(
            headers=self._headers, timeout=self._timeout, limits=limits, trust_env=False, verify=verify
        )
        self._all.append(client)
        return client


async def _body(response: httpx.Response, limit_bytes: int) -> bytes:
    """The body, unpacked here and not by the library, which would unpack whatever comes: 64 KiB of gzip may hold 64
    MiB.

    Raises:
        ReplyError: it is longer than the limit, or its compression can't be read.
    """
    coding = response.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", "gzip", "deflate"):
        raise ReplyError(f"the reply came in a compression that was not asked for ({shown(coding)})")
    unpacker = None if coding == "identity" else zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip or zlib, by its header
    body = bytearray()
    try:
        async for block in response.aiter_raw():
            plain = block if unpacker is None else unpacker.decompress(block, limit_bytes + 1 - len(body))
            body += plain
            if len(body) > limit_bytes:
                raise ReplyError(f"the reply is longer than {limit_bytes:,} bytes, more than a valid reply can hold")
    except zlib.error:
        raise ReplyError("the reply's compression is damaged") from None
    if unpacker is not None and not unpacker.eof:
        raise ReplyError("the reply's compression is damaged")
    return bytes(body)
