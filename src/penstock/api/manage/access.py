"""Who may call the Management API: an admin all of it, a viewer what changes nothing."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Depends, Request

from penstock.api.auth import Grant
from penstock.api.problems import Problem
from penstock.api.schemas import BEARER
from penstock.desired.entities import Door

_READS: Final = frozenset({"/v1/plan"})
"""What changes nothing although it is posted."""


async def permitted(request: Request, _: Annotated[Any, Depends(BEARER)]) -> None:
    """Raise `Problem` where the request's token is not enough for it."""
    grant = grant_of(request)
    if grant.role == "admin":
        return
    reads = request.method == "GET" or request.url.path in _READS
    if grant.role == "viewer" and reads:
        return
    may = "read" if grant.role == "viewer" else "consume"
    needed = "a viewer's or an admin's" if reads else "an admin's"
    raise Problem(403, f"The token {grant.name!r} may only {may}: this request needs {needed}.")


def grant_of(request: Request) -> Grant:
    """Return what the request's token grants."""
    grant: Grant = request.scope["grant"]
    return grant


def door_of(request: Request) -> Door:
    """Return how a request came, which no header can claim: the console names itself."""
    door: Door = request.scope.get("door", "api")
    return door
