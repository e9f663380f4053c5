"""The app: the Consume and the Management API over a store, with `/docs` and `/openapi.json`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from penstock import __version__
from penstock.api import consume, problems
from penstock.api.auth import Gate, KnownTokens
from penstock.api.console.app import Console
from penstock.api.console.sessions import PATH
from penstock.api.manage import routes
from penstock.api.manage.context import Context, Tools
from penstock.api.requests import inline
from penstock.api.shortcut import Shortcut
from penstock.api.status import Status, alone
from penstock.streams.consumers.registry import Consumers

log = structlog.get_logger("penstock.api")

Beside = Callable[[Consumers, asyncio.Event], Awaitable[None]]
"""What runs in the server's event loop until the event is set."""


class Api(FastAPI):
    """The API over the store at `url`, which is open while the app runs; `beside` runs with it.

    Without `tools` it has no `/v1/check`, and dead letters of sinks and NATS consumers can't be
    replayed. `records_url` is where the records table is, None where it is in the store.
    """

    def __init__(
        self,
        url: str,
        *,
        beside: Beside | None = None,
        tools: Tools | None = None,
        records_url: str | None = None,
        state: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(
            title="Penstock",
            version=__version__,
            description="Messages from Postgres for workers, and the configuration behind them.",
            redoc_url=None,
            redirect_slashes=False,
            lifespan=_lifespan,
        )
        self.consumers = Consumers(url)
        self.tokens = KnownTokens(url)
        self.receives = consume.Receives()
        self.beside = beside
        self.context = Context(url, self.consumers, tools, records_url)
        self.status = Status(
            alone(self.consumers) if state is None else _in_thread(state), always=state is not None
        )
        # The routes themselves, which all apps share: `include_router` looks a path up twice.
        of_tools = () if tools is None else routes.OF_TOOLS
        self.router.routes += [
            *consume.api.routes, *routes.OF_CONSUMERS, *routes.OF_STORE, *of_tools,
        ]  # fmt: skip
        self._shortcut = Shortcut(self, consume.api.routes, self.tokens)
        self.console = Console(url, self.tokens, super().__call__)
        self.add_middleware(Gate, tokens=self.tokens)
        problems.handle(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; those of workers take the shortcut, the console's its own way."""
        if scope["type"] == "http" and _is_console(scope["path"]):
            await self.console(scope, receive, send)
        elif scope["type"] != "http" or not await self._shortcut.serve(scope, receive, send):
            await super().__call__(scope, receive, send)

    def end(self) -> None:
        """Answer the receives that wait, and end the console's streams.

        Call it in the event loop when the server begins to stop.
        """
        self.receives.end()
        self.console.live.end()

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, with the answers of what is wrong."""
        if not self.openapi_schema:
            schema = get_openapi(
                title=self.title,
                version=self.version,
                description=self.description,
                routes=self.routes,
            )
            schema["components"]["schemas"]["ProblemBody"] = inline(problems.ProblemBody)
            self.openapi_schema = schema
        return self.openapi_schema


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    assert isinstance(app, Api)  # noqa: S101 - for the type checker
    stop = asyncio.Event()
    await app.consumers.open()
    try:
        await app.tokens.open()
        tasks = []
        if app.beside is not None:
            tasks.append(asyncio.ensure_future(app.beside(app.consumers, stop)))
            tasks[0].add_done_callback(_log_failure)
        sampling = asyncio.create_task(app.status.run())
        yield
        sampling.cancel()
        stop.set()
        await asyncio.gather(*tasks, sampling, return_exceptions=True)
        await app.status.close()
    finally:
        app.console.close()
        app.context.close()
        await app.tokens.close()
        await app.consumers.close()


def _in_thread(state: Callable[[], dict[str, Any]]) -> Callable[[], Awaitable[dict[str, Any]]]:
    async def look() -> dict[str, Any]:
        return {"runs": True, **await asyncio.to_thread(state)}

    return look


def _is_console(path: str) -> bool:
    return path == "/" or (path.startswith(PATH) and path[len(PATH) : len(PATH) + 1] in ("", "/"))


def _log_failure(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("what runs beside the API ended", error=f"{type(error).__name__}: {error}")


def add_health(app: Api) -> None:
    """Add `/healthz` and `/readyz`, for an API that runs alone."""

    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @app.get("/readyz", include_in_schema=False)
    async def readyz() -> JSONResponse:
        error = app.tokens.error
        if error is None and app.tokens.fresh:
            return JSONResponse({"status": "ready"})
        cause = "The tokens were not read for a while." if error is None else str(error)
        return JSONResponse({"status": "failed", "cause": cause}, 503)
