"""Tokens: who may use the API, and making and revoking them."""

from __future__ import annotations

from starlette.responses import Response

from penstock.api.console.forms import Form
from penstock.api.console.lists import Column, Listing
from penstock.api.console.page import ConsolePage, Visit

PAGE = ConsolePage(
    "tokens",
    "Tokens",
    notices={
        "revoked": "The token is revoked: it is refused from now on, and its logins have ended."
    },
)
_COLUMNS = (
    Column("name", "Name"),
    Column("role", "Role"),
    Column("consumers", "Consumers", sortable=False),
    Column("created_at", "Created"),
    Column("revoked_at", "State"),
)


@PAGE.get()
async def listed(visit: Visit) -> Response:
    """List the tokens, and show the form of a new one."""
    return await _page(visit)


@PAGE.post()
async def create(visit: Visit) -> Response:
    """Make a token and show its secret, this once."""
    form = visit.form
    consumers = form["consumers"].replace(",", " ").split()
    body = {"name": form["name"], "role": form["role"], "consumers": consumers or None}
    answer = await visit.api("POST", "/v1/tokens", body=body)
    if not answer.ok:
        form.refuse(answer, "name", "role", "consumers")
        return await _page(visit, 409 if answer.status == 409 else 422)
    visit.form = Form()
    return await _page(visit, made=answer.body)


@PAGE.get("/{name}/revoke")
async def ask(visit: Visit) -> Response:
    """Show what revoking a token means."""
    return visit.render("tokens/revoke.html", token=await _token(visit))


@PAGE.post("/{name}/revoke")
async def revoke(visit: Visit) -> Response:
    """Revoke a token whose name was typed."""
    name = visit.part("name")
    if not visit.form.confirms(name):
        return visit.render("tokens/revoke.html", 422, token=await _token(visit))
    answer = await visit.api("DELETE", f"/v1/tokens/{name}")
    if not answer.ok:
        visit.form.refuse(answer)
        return visit.render("tokens/revoke.html", answer.status, token=await _token(visit))
    return visit.redirect(done="revoked")


async def _page(visit: Visit, status: int = 200, made: dict[str, object] | None = None) -> Response:
    rows = await visit.all("/v1/tokens")
    found = Listing(visit, rows, _COLUMNS, search=("name", "role"))
    return visit.render("tokens/list.html", status, list=found, made=made)


async def _token(visit: Visit) -> dict[str, object]:
    name = visit.part("name")
    known = {each["name"]: each for each in await visit.all("/v1/tokens")}
    return known.get(name) or visit.missing(f"There is no token {name!r}.")
