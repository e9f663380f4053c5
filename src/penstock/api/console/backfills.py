"""Backfills: how far each is, how fast it goes and when it ends; start, pause, resume and cancel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response

from penstock.api.console.forms import Form
from penstock.api.console.lists import Column, Listing
from penstock.api.console.paces import Paces
from penstock.api.console.page import ConsolePage, Visit

PAGE = ConsolePage(
    "backfills",
    "Backfills",
    notices={
        "pause": "It is paused: the rows under way are still delivered.",
        "resume": "It goes on where it was.",
        "cancel": "It is cancelled. What was delivered stays delivered.",
    },
)
Row = dict[str, Any]
_STATES: Final = {
    "running": "starting", "waiting": "other", "paused": "degraded", "failed": "failed",
    "done": "ready", "cancelled": "other",
}  # fmt: skip
_ORDER: Final = {state: i for i, state in enumerate(_STATES)}
_OPEN: Final = ("running", "waiting", "paused")
_ACTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "running": ("pause",), "waiting": ("pause",), "paused": ("resume",), "failed": ("resume",),
}  # fmt: skip
_PACES: Final = Paces()
_MANY: Final = 10**12  # more than there are backfills


def _state(row: Row) -> int:
    """Sort by the state, the newest first."""
    return _ORDER[row["state"]] * _MANY - int(row["id"])


_COLUMNS: Final = (
    Column("table", "Table"),
    Column("sink", "Sink"),
    Column("state", "State", value=_state),
    Column("rows_done", "Rows", value=lambda row: row["share"]),
    Column("rate", "Rows a second", figure=True, value=lambda row: row["rate"] or 0),
    Column("left", "Left", figure=True),
    Column("id", "Since"),
    Column("actions", "", sortable=False),
)


@PAGE.get()
async def listed(visit: Visit) -> Response:
    """List the backfills, and show the form of a new one."""
    return await _page(visit)


@PAGE.post()
async def create(visit: Visit) -> Response:
    """Ask for a backfill."""
    form = visit.form
    keys = ("sink", "table", "where", "from")
    body = {key: form[key] for key in keys if form[key]}
    answer = await visit.api("POST", "/v1/backfills", body=body)
    if not answer.ok:
        form.refuse(answer, *keys)
        return await _page(visit, answer.status if answer.status in (409, 422) else 200)
    visit.form = Form()
    return await _page(visit, made=answer.body)


@PAGE.post("/{id}/pause")
async def pause(visit: Visit) -> Response:
    """Pause a backfill."""
    return await _act(visit, "pause")


@PAGE.post("/{id}/resume")
async def resume(visit: Visit) -> Response:
    """Let a backfill go on."""
    return await _act(visit, "resume")


@PAGE.get("/{id}/cancel")
async def ask(visit: Visit) -> Response:
    """Show what cancelling a backfill means."""
    return visit.render("backfills/cancel.html", backfill=await _backfill(visit))


@PAGE.post("/{id}/cancel")
async def cancel(visit: Visit) -> Response:
    """Cancel a backfill whose table's name was typed."""
    backfill = await _backfill(visit)
    if not visit.form.confirms(backfill["table"]):
        return visit.render("backfills/cancel.html", 422, backfill=backfill)
    answer = await visit.api("POST", f"/v1/backfills/{backfill['id']}/cancel")
    if not answer.ok:
        visit.form.refuse(answer)
        return visit.render("backfills/cancel.html", answer.status, backfill=backfill)
    return visit.redirect(done="cancel")


async def _act(visit: Visit, command: str) -> Response:
    answer = await visit.api("POST", f"/v1/backfills/{visit.part('id')}/{command}")
    return visit.redirect(done=command) if answer.ok else visit.fail(answer)


async def _page(visit: Visit, status: int = 200, made: Mapping[str, Any] | None = None) -> Response:
    rows = [_row(each) for each in await visit.all("/v1/backfills")]
    found = Listing(
        visit, rows, _COLUMNS, search=("table", "sink", "source", "state"), sort="state", key="id"
    )
    sinks = [each["name"] for each in await visit.all("/v1/sinks")] if visit.admin else []
    due = [row for row in rows if row["state"] in ("running", "waiting")]
    idle = sorted({row["source"] for row in due if not row["is_run"]})
    return visit.render(
        "backfills/list.html", status, list=found, made=made, sinks=sinks, idle=idle
    )


async def _backfill(visit: Visit) -> Row:
    found: Row = await visit.get(f"/v1/backfills/{visit.part('id')}")
    return _row(found)


def _row(backfill: Row) -> Row:
    done, total, state = backfill["rows_done"], backfill["rows_total"], backfill["state"]
    rate = left = None
    if state == "running":
        pace = _PACES.look(f"{backfill['id']} {backfill['created_at']}", done)
        rate, left = pace.rate or None, pace.left(done, total)
    share = 1.0 if state == "done" else min(done / total, 1.0) if total else 0.0
    since = backfill["ended_at"] or backfill["started_at"] or backfill["created_at"]
    return {
        **backfill, "rate": rate, "left": left, "share": share, "since": since,
        "level": _STATES[state], "open": state in _OPEN, "actions": _ACTIONS.get(state, ()),
    }  # fmt: skip
