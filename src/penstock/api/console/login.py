"""Logging in with a token, and out."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from penstock.api.console.forms import read_form
from penstock.api.console.guard import own_path, refusal
from penstock.api.console.render import render
from penstock.api.console.sessions import PATH, Session, drop_cookie, id_of, set_cookie
from penstock.api.problems import Problem

if TYPE_CHECKING:
    from penstock.api.console.app import Console

_LOGIN = f"{PATH}/login"


async def show(console: Console, request: Request) -> Response:
    """Show the form, to who has logged in the page they wanted."""
    wanted = own_path(request.query_params.get("next", ""))
    if await console.session(request) is not None:
        return RedirectResponse(wanted, 303)
    ended = request.query_params.get("ended", "")
    return _form(request, wanted, notice="You have logged out." if ended else "")


async def begin(console: Console, request: Request) -> Response:
    """Log in: a new session, whatever the cookie was before."""
    form = await read_form(request)
    wanted = own_path(form["next"])
    before = id_of(request)
    if before is None or refusal(request, Session(before), form):
        error = "This form was open for too long, or another site sent it. Try again."
        return _form(request, wanted, error, 403)
    token = form["token"]
    if not token:
        return _form(request, wanted, "Give a token: it begins with pst_.", 422)
    try:
        grant = await console.tokens.grant(b"Bearer " + token.encode())
    except Problem as problem:
        return _form(request, wanted, problem.detail, problem.status)
    if grant.role == "worker":
        error = (
            f"The token {grant.name!r} is a worker's: it may only receive messages. The console needs"
            " one of the role viewer or admin; `penstock token create` makes one."
        )
        return _form(request, wanted, error, 403)
    session = await console.run(console.sessions.begin, token)
    if session is None:
        return _form(request, wanted, "This token is revoked.", 401)
    await console.run(console.sessions.end, before)
    response = RedirectResponse(wanted, 303)
    set_cookie(request, response, session)
    return response


async def end(console: Console, request: Request) -> Response:
    """Log out: the session is worthless from now on, wherever its cookie was copied to."""
    session = await console.session(request)
    if session is not None:
        if why := refusal(request, session, await read_form(request)):
            return console.failure(403, f"You are still logged in. {why}", session)
        await console.run(console.sessions.end, session.id)
    response = RedirectResponse(f"{_LOGIN}?{urlencode({'ended': 1})}", 303)
    drop_cookie(request, response)
    return response


def _form(
    request: Request, wanted: str, error: str = "", status: int = 200, notice: str = ""
) -> Response:
    # The id only vouches for such forms, in several tabs too; a login makes another one.
    session = Session(id_of(request) or Session.new().id)
    page = render("login.html", csrf=session.csrf, wanted=wanted, error=error, notice=notice)
    response = HTMLResponse(page, status)
    set_cookie(request, response, session)
    return response
