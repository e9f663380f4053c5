"""Credentials: their health, what uses them, and what was used of their budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.responses import Response

from penstock.api.console.lists import Column, Listing
from penstock.api.console.page import ConsolePage, Visit

PAGE = ConsolePage("credentials", "Credentials")
Row = dict[str, Any]
_COLUMNS: Final = (
    Column("name", "Name"),
    Column("word", "Health"),
    Column("provider", "Provider"),
    Column("used_by", "Used by"),
    Column("share", "Budget used"),
    Column("refused", "Refused (429)", figure=True),
    Column("actions", "", sortable=False),
)
_OF_CREDENTIAL: Final = frozenset({"unauthorized", "forbidden", "credential", "rate_limited"})
"""Codes of what is wrong with the credential, and not with the API or with what it sends."""


@PAGE.get()
async def listed(visit: Visit) -> Response:
    """List the credentials."""
    syncs = await visit.all("/v1/syncs")
    budgets = (await visit.get("/v1/status")).get("budgets", {})
    rows = [_row(each, syncs, budgets) for each in await visit.all("/v1/credentials")]
    found = Listing(visit, rows, _COLUMNS, search=("name", "word", "provider", "used_by"))
    return visit.render("credentials/list.html", list=found)


@PAGE.post("/{name}/check")
async def check(visit: Visit) -> Response:
    """Try a credential with one harmless request."""
    name = visit.part("name")
    answer = await visit.api("POST", f"/v1/credentials/{name}/check")
    # What was checked is the outcome: the check itself has succeeded.
    return visit.render("credentials/checked.html", name=name, answer=answer)


def _row(entity: Row, syncs: Sequence[Row], budgets: Mapping[str, Row]) -> Row:
    """Return a credential with its health, which is that of what is read with it, and its budget."""
    name = entity["name"]
    users = [sync for sync in syncs if sync["spec"].get("credential") == name]
    healths = [c["health"] for sync in users for c in sync["collections"] if c["health"]]
    known = any(c["last_run"] for sync in users for c in sync["collections"])
    health = next((each for each in healths if each["code"] in _OF_CREDENTIAL), None)
    level = "ready" if known else "other"
    if entity["refusal"] is not None or health is not None:
        level = "degraded"
    names = [sync["name"] for sync in users]
    budget = budgets.get(name)
    return {
        "name": name,
        "provider": entity["spec"].get("provider", ""),
        "users": names,
        "used_by": ", ".join(names),
        "level": level,
        "word": "not used yet" if level == "other" else level,
        "why": entity["refusal"]["reason"] if entity["refusal"] else "",
        "health": health,
        "budget": budget,
        "share": budget["used"] / budget["allowed_requests"] if budget else None,
        "refused": budget["refused"] if budget else None,
    }
