"""The console's app: finds the session of a request, and has its page answer."""

from __future__ import annotations

import asyncio
import functools
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.auth import KnownTokens
from penstock.api.console import assets, login
from penstock.api.console.calls import CallError, Management
from penstock.api.console.forms import Form, read_form
from penstock.api.console.guard import refusal, secured
from penstock.api.console.live import Live
from penstock.api.console.page import ConsolePage, Endpoint, Visit
from penstock.api.console.pages import PAGES
from penstock.api.console.render import render
from penstock.api.console.sessions import PATH, Session, Sessions, id_of
from penstock.core.errors import StoreError
from penstock.streams.store import Store

_THREADS: Final = 2

T = TypeVar("T")
log = structlog.get_logger("penstock.api")


class Console:
    """The console of the store at `url`; `management` is the app of the management API."""

    def __init__(self, url: str, tokens: KnownTokens, management: ASGIApp) -> None:
        self.tokens = tokens
        self._store = Store(url)
        self.sessions = Sessions(self._store)
        self._threads = ThreadPoolExecutor(_THREADS, "console")
        self._management = Management(management)
        routes = [
            Route("/", self._plain(_start)),
            Route(PATH, self._plain(_start)),
            Route(f"{PATH}/", self._plain(_start)),
            Route(f"{PATH}/static/{{name:path}}", self._plain(assets.serve)),
            Route(f"{PATH}/login", self._plain(functools.partial(login.show, self))),
            Route(
                f"{PATH}/login", self._plain(functools.partial(login.begin, self)), methods=["POST"]
            ),
            Route(
                f"{PATH}/logout", self._plain(functools.partial(login.end, self)), methods=["POST"]
            ),
        ]
        for page in PAGES:
            for method, path, endpoint, for_viewers in page.routes:
                visited = functools.partial(self._visit, page, endpoint, for_viewers)
                routes.append(Route(PATH + path, self._plain(visited), methods=[method]))
        self._router = Router(routes, redirect_slashes=False, default=self._unknown)
        self.live = Live(self._router)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request below `/console`."""
        serve = self.live.serve if self.live.is_asked(scope) else self._router
        await serve(scope, receive, send)

    def close(self) -> None:
        """Close the connection to the store."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Return what a call of the store gives, which does not block the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    async def session(self, request: Request) -> Session | None:
        """Return the session that a request's cookie stands for, None where it has logged in no more."""
        known = id_of(request)
        return None if known is None else await self.run(self.sessions.find, known)

    def failure(self, status: int, cause: str, session: Session | None = None) -> Response:
        """Return a page that shows what is wrong."""
        return HTMLResponse(
            render("error.html", status=status, cause=cause, session=session), status
        )

    def _plain(self, endpoint: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """Return an endpoint whose answers have the headers, whatever it raises."""

        async def answer(request: Request) -> Response:
            try:
                return secured(await endpoint(request))
            except StoreError as error:
                response = self.failure(503, str(error))
                response.headers["Retry-After"] = "1"
                return secured(response)
            except CallError as error:
                return secured(self.failure(error.answer.status, error.answer.detail))
            except ClientDisconnect:
                raise
            except Exception as error:
                # No traceback: its locals may have a token.
                frame = traceback.extract_tb(error.__traceback__)[-1]
                log.error("a page of the console failed", path=request.url.path,
                          error=f"{type(error).__name__}: {error}",
                          at=f"{frame.filename}:{frame.lineno}")  # fmt: skip
                cause = "The server failed. Its log has the cause."
                return secured(self.failure(500, cause))

        return answer

    async def _visit(
        self, page: ConsolePage, endpoint: Endpoint, for_viewers: bool, request: Request
    ) -> Response:
        session = await self.session(request)
        if session is None or session.grant is None:
            return self._to_login(request)
        form = Form()
        if request.method not in ("GET", "HEAD"):
            form = await read_form(request)
            if why := refusal(request, session, form):
                return self.failure(403, f"Nothing was changed. {why}", session)
            if session.grant.role != "admin" and not for_viewers:
                cause = (
                    f"Nothing was changed. The token {session.grant.name!r} may only read: log in"
                    " with an admin's."
                )
                return self.failure(403, cause, session)
        return await endpoint(Visit(request, session, self._management, page, PAGES, form))

    def _to_login(self, request: Request) -> Response:
        where = f"{PATH}/login"
        if "hx-request" in request.headers:
            return Response(status_code=204, headers={"HX-Redirect": where})
        if request.method in ("GET", "HEAD"):
            path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            where += f"?{urlencode({'next': path})}"
        return RedirectResponse(where, 303)

    async def _unknown(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(request: Request) -> Response:
            session = await self.session(request)
            if session is None:
                return self._to_login(request)
            return self.failure(404, f"There is no page {request.url.path}.", session)

        response = await self._plain(answer)(Request(scope, receive))
        await response(scope, receive, send)


async def _start(_: Request) -> Response:
    return RedirectResponse(f"{PATH}/{PAGES[0].name}", 303)
