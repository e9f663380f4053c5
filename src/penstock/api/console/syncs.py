"""Syncs: how each one is, how each of its collections is, and what comes next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

from starlette.responses import Response

from penstock.api.console.lists import Column, Listing
from penstock.api.console.paces import Paces
from penstock.api.console.page import ConsolePage, Visit

PAGE = ConsolePage(
    "syncs",
    "Syncs",
    notices={
        "run": "It was asked to read what has changed. The run that has it does so within seconds.",
        "backfill": "It was asked to read all again. What is unchanged makes no message.",
        "pause": "It is paused: it does nothing until it is resumed.",
        "resume": "It goes on within seconds.",
    },
)
Row = dict[str, Any]
_PACES: Final = Paces()
_COLUMNS: Final = (
    Column("name", "Name"),
    Column("level", "State"),
    Column("provider", "Provider"),
    Column("credential", "Credential"),
    Column("count", "Collections", figure=True),
    Column("share", "Backfill"),
    Column("records_read", "Records read", figure=True),
    Column("last_success", "Last read"),
    Column("next_run", "Next run"),
    Column("actions", "", sortable=False),
)

_COLLECTIONS: Final = (
    Column("id", "Collection"),
    Column("phase", "Phase"),
    Column("share", "Backfill"),
    Column("last_success", "Last read"),
    Column("next_run", "Next run"),
    Column("records_read", "Read", figure=True),
    Column("inserted", "Inserted", figure=True),
    Column("changed", "Changed", figure=True),
    Column("deleted", "Deleted", figure=True),
    Column("unreadable", "Unreadable", figure=True),
    Column("requests", "Requests", figure=True),
    Column("deletes", "Deletes"),
    Column("actions", "", sortable=False),
)


@PAGE.get()
async def listed(visit: Visit) -> Response:
    """List the syncs."""
    return await _list(visit)


@PAGE.get("/{name}")
async def show(visit: Visit) -> Response:
    """Show how each collection of a sync is."""
    sync = await _sync(visit)
    found = Listing(visit, sync["collections"], _COLLECTIONS, search=("id", "phase"))
    return visit.render("syncs/sync.html", sync=sync, list=found)


def level_of(sync: Mapping[str, Any], parts: Mapping[str, str]) -> str:
    """Return how a sync is: as the status has it (`parts`), else by what the store shows of it.

    The status lacks it where no run in this process has the syncs.
    """
    known = parts.get(f"sync {sync['name']}")
    if known is not None:
        return known
    if sync["refusal"] is not None or sync["health"]:
        return "degraded"
    waits = all(each["phase"] == "waiting" for each in sync["collections"])
    return "starting" if waits and sync["status"] == "active" else "ready"


@PAGE.post("/{name}/run")
async def run(visit: Visit) -> Response:
    """Read what has changed now."""
    return await _ask(visit, "run")


@PAGE.post("/{name}/backfill")
async def backfill(visit: Visit) -> Response:
    """Read all again."""
    return await _ask(visit, "backfill")


@PAGE.post("/{name}/pause")
async def pause(visit: Visit) -> Response:
    """Have a sync do nothing until it is resumed."""
    return await _ask(visit, "pause")


@PAGE.get("/{name}/resume")
async def ask(visit: Visit) -> Response:
    """Show what resuming a sync means that asks whether it may delete."""
    return visit.render("syncs/agree.html", sync=await _sync(visit))


@PAGE.post("/{name}/resume")
async def resume(visit: Visit) -> Response:
    """Let a sync go on; where that lets it delete records, its name must be typed."""
    sync = await _sync(visit)
    if sync["asks"] and not ("confirm" in visit.form and visit.form.confirms(sync["name"])):
        return visit.render("syncs/agree.html", 422, sync=sync)
    return await _ask(visit, "resume")


async def _ask(visit: Visit, command: str) -> Response:
    name, collection = visit.part("name"), visit.form["collection"]
    body = {"collection": collection} if collection else None
    answer = await visit.api("POST", f"/v1/syncs/{name}/{command}", body=body)
    if not answer.ok:
        visit.fail(answer)
    return visit.redirect(f"syncs/{quote(name, safe='')}", done=command)


async def _list(visit: Visit) -> Response:
    status = await visit.get("/v1/status")
    syncs = [_row(each, status["parts"]) for each in await visit.all("/v1/syncs")]
    found = Listing(
        visit, syncs, _COLUMNS, search=("name", "provider", "credential", "setting", "level")
    )
    return visit.render("syncs/list.html", list=found)


async def _sync(visit: Visit) -> Row:
    found: Row = await visit.get(f"/v1/syncs/{visit.part('name')}")
    return _row(found, (await visit.get("/v1/status"))["parts"])


def _row(sync: Row, parts: Mapping[str, str]) -> Row:
    collections = [_collection(sync, each) for each in sync["collections"]]
    reading = [each["share"] for each in collections if each["share"] is not None]
    return {
        **sync,
        "collections": collections,
        "level": level_of(sync, parts),
        "provider": sync["spec"].get("provider", ""),
        "credential": sync["spec"].get("credential", ""),
        "setting": sync["status"],
        "count": len(collections),
        "share": sum(reading) / len(reading) if reading else None,
        "records_read": sum(each["records_read"] for each in collections),
        "last_success": _ends(max, collections, "last_success"),
        "next_run": _ends(min, collections, "next_run"),
        "asks": [each for each in collections if each["phase"] == "asks"],
    }


def _collection(sync: Row, shown: Row) -> Row:
    backfill = shown["backfill"]
    rate = left = None
    if backfill is not None:
        key = f"{sync['id']} {shown['id']} {backfill['started_at']}"
        rate = _PACES.look(key, backfill["read"]).rate or None
        left = _seconds_to(backfill["estimated_end"])
    return {
        **shown, "rate": rate, "left": left, "share": None if backfill is None else backfill["share"],
    }  # fmt: skip


def _seconds_to(end: str | None) -> float | None:
    if end is None:
        return None
    return max(0.0, (datetime.fromisoformat(end) - datetime.now(UTC)).total_seconds())


def _ends(which: Any, collections: Iterable[Row], key: str) -> str | None:
    found = [str(each[key]) for each in collections if each[key] is not None]
    return which(found) if found else None
