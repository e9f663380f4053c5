"""What endpoints of the Management API have in common: their router, and what they get of the app.

They are made once a process, and serve every app, whose parts they take from the request.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from penstock.api.manage.access import permitted
from penstock.api.manage.context import Context, Tools
from penstock.api.problems import documented
from penstock.api.status import Status
from penstock.streams.consumers.registry import Consumers


def new_router() -> APIRouter:
    """Return a router for endpoints that admins may call, and viewers where nothing is changed."""
    return APIRouter(dependencies=[Depends(permitted)], responses=documented(), tags=["manage"])


# A function that is not async would run in a thread, at each request.


async def _consumers(request: Request) -> Consumers:
    found: Consumers = request.app.consumers
    return found


async def _context(request: Request) -> Context:
    found: Context = request.app.context
    return found


async def _status(request: Request) -> Status:
    found: Status = request.app.status
    return found


async def _tools(request: Request) -> Tools:
    found: Tools = request.app.context.tools
    return found


AppConsumers = Annotated[Consumers, Depends(_consumers)]
AppContext = Annotated[Context, Depends(_context)]
AppStatus = Annotated[Status, Depends(_status)]
AppTools = Annotated[Tools, Depends(_tools)]
"""Of an app that has tools: without them it has none of the endpoints that ask for them."""
