"""Bearer tokens, and the gate that every request of the API comes through.

All tokens of the store are held here by their hash, and read again as soon as one changes, and
every few seconds in any case, so that no request reads the store for its token. One that is unknown may
just have been made: the tokens are read once more before it is refused, once a second at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from dataclasses import dataclass
from typing import Final, Literal

import psycopg
import structlog
from psycopg import sql
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.problems import Problem
from penstock.core.connect import AsyncConnection, connect_async
from penstock.core.errors import StoreError
from penstock.core.queries import load
from penstock.streams.errors import store_error
from penstock.streams.names import CHANNEL

_SECONDS: Final = 5.0  # between two readings of the tokens
_RETRY_SECONDS: Final = 1.0
_STALE: Final = 15.0  # tokens that were read longer ago grant nothing
_UNKNOWN_SECONDS: Final = 1.0  # between two readings for tokens that are unknown

log = structlog.get_logger("penstock.api")


Role = Literal["worker", "viewer", "admin"]


@dataclass(frozen=True, slots=True)
class Grant:
    """What a token's bearer may do; `consumers` None stands for all."""

    name: str
    role: Role
    consumers: frozenset[str] | None

    def may_consume(self, consumer: str) -> bool:
        """Whether messages of this consumer may be received and acked."""
        if self.role != "worker":
            return self.role == "admin"
        return self.consumers is None or consumer in self.consumers


class KnownTokens:
    """The tokens of the store at `url`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._grants: dict[bytes, Grant] = {}
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()  # an older reading replaces no newer one
        self._looked_at = float("-inf")
        self._look: asyncio.Task[None] | None = None
        self._answered = asyncio.Event()
        self.error: StoreError | None = None
        """Why they can't be read now."""
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Read them, and go on reading in the background; a store that is away is tried again."""
        self._task = asyncio.create_task(self._follow())
        await self._answered.wait()

    async def close(self) -> None:
        """Stop reading."""
        tasks = [task for task in (self._task, self._look) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def fresh(self) -> bool:
        """Whether the tokens were read lately."""
        return time.monotonic() - self._read_at < _STALE

    async def grant(self, authorization: bytes | None) -> Grant:
        """Return what a request with this Authorization header may do; raises `Problem`."""
        scheme, _, token = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            raise _unauthorized("Give a token as the header `Authorization: Bearer pst_…`")
        if not self.fresh:
            raise Problem(503, "The store does not answer.", headers={"Retry-After": "1"})
        hashed = hashlib.sha256(token.strip()).digest()
        grant = self._grants.get(hashed)
        if grant is None:
            await self._look_again()
            grant = self._grants.get(hashed)
        if grant is None:
            raise _unauthorized(
                "This token is unknown or revoked; `penstock token create` makes one"
            )
        return grant

    async def _look_again(self) -> None:
        """Read the tokens, for all requests that wait for it, unless that was done lately."""
        under_way = self._look is not None and not self._look.done()
        if not under_way:
            if time.monotonic() - self._looked_at < _UNKNOWN_SECONDS:
                return
            self._looked_at = time.monotonic()
            self._look = asyncio.create_task(self._read_once())
        assert self._look is not None  # noqa: S101 - made above
        await asyncio.shield(self._look)

    async def _read_once(self) -> None:
        with contextlib.suppress(psycopg.Error, TimeoutError):  # the other reading reports it
            async with (
                asyncio.timeout(_SECONDS),
                await connect_async(self._url, application_name="penstock token") as connection,
            ):
                await self._read(connection)

    async def _follow(self) -> None:
        while True:
            try:
                async with await connect_async(
                    self._url, application_name="penstock tokens"
                ) as connection:
                    await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(CHANNEL)))
                    while True:
                        await self._read(connection)
                        async for notify in connection.notifies(timeout=_SECONDS):
                            if notify.payload == "t":
                                break
            except psycopg.Error as error:
                self._fail(store_error(error, self._url))
            self._answered.set()
            await asyncio.sleep(_RETRY_SECONDS)

    def _fail(self, error: StoreError) -> None:
        """Log why the tokens can't be read: once, until they can or there is another reason."""
        if self.error is None or self.error.code != error.code:
            log.warning("the API's tokens can't be read; trying again", code=error.code,
                        error=str(error))  # fmt: skip
        self.error = error

    async def _read(self, connection: AsyncConnection) -> None:
        async with self._reading:
            cursor = await connection.execute(load("penstock.api", "auth.sql")["tokens"])
            self._grants = {
                hashed: Grant(name, role, None if consumers is None else frozenset(consumers))
                async for hashed, name, role, consumers in cursor
            }
            self._read_at = time.monotonic()
        self._answered.set()
        if self.error is not None:
            self.error = None
            log.info("the API's tokens are read again")


class Gate:
    """ASGI middleware: every request below `/v1` needs a token."""

    def __init__(self, app: ASGIApp, tokens: KnownTokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; `scope["grant"]` is what its token grants.

        One that has it already is a call from within the process: no server makes such a scope.
        """
        if scope["type"] != "http" or "grant" in scope or not scope["path"].startswith("/v1"):
            await self._app(scope, receive, send)
            return
        try:
            scope["grant"] = await self._tokens.grant(authorization(scope))
        except Problem as problem:
            await problem.response()(scope, receive, send)
            return
        with contextlib.suppress(ClientDisconnect):
            await self._app(scope, receive, send)


def authorization(scope: Scope) -> bytes | None:
    """Return the last Authorization header of a request, None if it has none."""
    found = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            found = value
    return found


def _unauthorized(detail: str) -> Problem:
    return Problem(401, f"{detail}.", headers={"WWW-Authenticate": 'Bearer realm="penstock"'})
