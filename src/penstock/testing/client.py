"""HTTP without a network: Penstock's API over consumers in memory, for clients of httpx."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterable
from typing import Final

import httpx
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api import consume, problems
from penstock.api.auth import Gate, Grant, KnownTokens, Role
from penstock.api.client import Client
from penstock.api.manage import http_consumers, streams
from penstock.testing.consumers import InMemoryConsumers

BASE_URL: Final = "http://penstock.test"


class InMemoryTokens(KnownTokens):
    """Tokens that no store keeps."""

    def __init__(self) -> None:
        super().__init__("")
        self._read_at = float("inf")

    async def _read_once(self) -> None:
        """Read nothing: all are known here."""

    def create(self, role: Role, consumers: Iterable[str] | None) -> str:
        """Return a new token; a worker's is for these consumers alone, None stands for all."""
        token = f"pst_{secrets.token_hex(16)}"
        names = None if consumers is None else frozenset(consumers)
        self._grants[hashlib.sha256(token.encode()).digest()] = Grant("test", role, names)
        return token


class _InMemoryApi(FastAPI):
    """What the endpoints take from their app."""

    def __init__(self, consumers: InMemoryConsumers) -> None:
        super().__init__(redirect_slashes=False)
        self.consumers = consumers
        self.receives = consume.Receives()
        for api in consume.api, streams.api, http_consumers.api:
            self.router.routes.extend(api.routes)


def make_app(consumers: InMemoryConsumers, tokens: KnownTokens) -> ASGIApp:
    """Return the Consume and the Management API over consumers in memory."""
    app = _InMemoryApi(consumers)
    app.add_middleware(Gate, tokens=tokens)
    problems.handle(app)

    async def connected(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = {"client": Client()}
        await app(scope, receive, send)

    return connected


class Transport(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Answers the requests of an `httpx.Client` or `httpx.AsyncClient` in process.

    A receive with `wait_for_ms` of an async client waits for a message, or until the test advances
    the clock. One of a blocking client advances the clock itself.

    Args:
        app: The ASGI application that answers (`InMemoryPenstock.app`).
        consumers: The consumers that it serves.
    """

    def __init__(self, app: ASGIApp, consumers: InMemoryConsumers) -> None:
        self._asgi = httpx.ASGITransport(app=app)
        self._clock = consumers.clock

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request of an async client."""
        return await self._asgi.handle_async_request(request)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request of a blocking client.

        Raises:
            RuntimeError: An event loop runs in this thread, which the request would block.
        """
        if _in_event_loop():
            raise RuntimeError(
                "a blocking client in an event loop blocks all of it: use an async client"
            )
        content = request.read()

        async def answered() -> httpx.Response:
            again = httpx.Request(
                request.method, request.url, headers=request.headers, content=content
            )
            response = await self._asgi.handle_async_request(again)
            body = await response.aread()
            return httpx.Response(response.status_code, headers=response.headers, content=body)

        with self._clock.skipping():
            return asyncio.run(answered())


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
