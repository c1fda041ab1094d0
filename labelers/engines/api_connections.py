"""Connections to one server, one for each request in flight; the only place that sends the key.

httpx looks through its whole pool at every request: one client with 64 connections took 6 ms of CPU a request, 64 clients with one each
take 1 ms (2026-11-20). So a request takes a client of its own, and puts it back.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from labelers.engines.api_options import OpenAiArgs
from manifests.extras import require

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0
"""Longest wait for a connection."""


class Connections:
    """Clients, made as they are needed.

    trust_env is off: the environment (proxies, .netrc with other credentials) is not this folder's to read. Redirects stay off, as httpx
    has them: they would carry the key elsewhere.

    Args:
        key: sent as a bearer token; None sends none.
    """

    def __init__(self, args: OpenAiArgs, key: str | None) -> None:
        self._library = library = require("httpx", extra="openai", purpose="The openai engine")
        self._base = args.base_url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._timeout = library.Timeout(args.timeout_s, connect=min(CONNECT_S, args.timeout_s))
        self._certificates: ssl.SSLContext | None = None
        if self._base.startswith("https:"):  # 0.1 s to read them, so only where there is a connection to prove
            self._certificates = library.create_ssl_context(trust_env=False)
            self._certificates.load_default_certs()  # the machine's own beside the library's
        self._free: list[httpx.AsyncClient] = []
        self._all: list[httpx.AsyncClient] = []

    async def send(self, method: str, path: str, content: bytes | None = None) -> httpx.Response:
        """One request and its whole reply.

        Raises:
            httpx.TransportError, httpx.DecodingError: as they come. They hold the request, and that the key: not to be chained.
        """
        client = self._free.pop() if self._free else self._open()
        try:
            headers = {"content-type": "application/json"} if content is not None else {}
            return await client.request(method, self._base + path, content=content, headers=headers)
        finally:
            self._free.append(client)

    async def close(self) -> None:
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
