"""The shortest way to the endpoints that workers call again and again.

FastAPI's middleware and routing take several times as long as these endpoints. So their requests are
found by their path, checked for their token, and answered in one write. All else, and what looks
unusual, goes on to the app, whose answers are the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from penstock.api import problems
from penstock.api.auth import KnownTokens, authorization

_PARTS: Final = 5  # of `/v1/http-consumers/{consumer}/next`, the first one empty

_Endpoint = Callable[[Request], Awaitable[Response]]


class Shortcut:
    """Serves those of an app's `routes` whose paths are `/v1/collection/{name}/action`."""

    def __init__(self, app: FastAPI, routes: Iterable[BaseRoute], tokens: KnownTokens) -> None:
        self._app = app
        self._tokens = tokens
        self._endpoints: dict[tuple[str, str, str], tuple[str, _Endpoint]] = {}
        for route in routes:
            if isinstance(route, APIRoute):
                _, _, collection, parameter, action = route.path.split("/")
                for method in route.methods or ():
                    found = parameter.strip("{}"), route.get_route_handler()
                    self._endpoints[method, collection, action] = found

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer a request if it is for one of these endpoints; return whether it is."""
        path: str = scope["path"]
        parts = path.split("/")
        if len(parts) != _PARTS or parts[1] != "v1" or not parts[3]:
            return False
        found = self._endpoints.get((scope["method"], parts[2], parts[4]))
        if found is None:
            return False
        parameter, endpoint = found
        scope["app"] = self._app
        scope["path_params"] = {parameter: parts[3]}
        request = Request(scope, receive, send)
        try:
            scope["grant"] = await self._tokens.grant(authorization(scope))
            response = await endpoint(request)
        except ClientDisconnect:
            return True
        except Exception as error:
            response = problems.response_to(request, error)
        if not scope["state"]["client"].answer(response):
            await response(scope, receive, send)
        return True
