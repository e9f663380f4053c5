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
    if grant.role != "viewer":
        raise Problem(
            403, f"The token {grant.name!r} may only consume: this request needs an admin's."
        )
    if request.method != "GET" and request.url.path not in _READS:
        raise Problem(
            403, f"The token {grant.name!r} may only read: this request needs an admin's."
        )


def grant_of(request: Request) -> Grant:
    """Return what the request's token grants."""
    grant: Grant = request.scope["grant"]
    return grant


def door_of(request: Request) -> Door:
    """Return how a request came, which no header can claim: the console names itself."""
    door: Door = request.scope.get("door", "api")
    return door
