"""Consumers: how far each one is, what it holds, what failed; pause, rewind and end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from starlette.responses import Response

from penstock.api.console import entity_forms, exact
from penstock.api.console.calls import MAX_PAGE
from penstock.api.console.lists import Column, Listing, position_order
from penstock.api.console.page import ConsolePage, Visit
from penstock.api.console.render import NONE
from penstock.api.console.sinks import Row, entity_of, requests

PAGE = ConsolePage(
    "consumers",
    "Consumers",
    notices={
        "created": "The consumer is made.",
        "saved": "The consumer is changed.",
        "paused": "It is paused: its messages wait in the stream, and what is in flight can be acked.",
        "resumed": "It goes on, with what waits in its stream first.",
        "rewound": "It goes on from there.",
        "deleted": "The consumer is deleted.",
    },
)
_COLUMNS: Final = (
    Column("name", "Name"),
    Column("level", "State"),
    Column("type", "Type"),
    Column("stream", "Stream"),
    Column("lag_messages", "Lag", figure=True),
    Column("lag_seconds", "Lag, time", figure=True),
    Column("in_flight", "In flight", figure=True),
    Column("redeliveries", "Redeliveries", figure=True),
    Column("dead_letters", "Dead letters", figure=True),
)
_LOOK: Final = 10
"""How many messages in flight and dead letters stand on a consumer's page."""
_HELD: Final = (
    Column("place", "Position", value=lambda row: position_order(row["position"])),
    Column("table", "Table"),
    Column("text", "Message", sortable=False),
    Column("deliver_count", "Delivered", figure=True),
    Column("held_until", "Held until"),
)
_NONE: Final[Row] = dict.fromkeys(
    (
        "lag_messages", "lag_seconds", "in_flight", "waiting_for_retry", "redeliveries", "failures",
        "dead_letters", "delivered", "per_second", "retries", "dropped", "last_error",
    )
)  # fmt: skip
"""What a consumer of either kind may not have."""


@PAGE.get()
async def listed(visit: Visit) -> Response:
    """List the consumers of every type."""
    status = await visit.get("/v1/status")
    rows = [_http(name, each, status) for name, each in status["consumers"].items()]
    rows += [_nats(each, status) for each in await visit.all("/v1/nats-consumers")]
    found = Listing(visit, rows, _COLUMNS, search=("name", "stream", "type", "error"))
    return visit.render("consumers/list.html", list=found)


@PAGE.get("/{name}")
@PAGE.get("/{name}/rewind")
async def show(visit: Visit) -> Response:
    """Show a consumer."""
    return await _page(visit)


@PAGE.get("/{name}/in-flight")
async def in_flight(visit: Visit) -> Response:
    """List what a consumer holds."""
    body = await _body(visit)
    if body["type"] == "nats":
        visit.missing(f"Consumer {body['name']!r} publishes to NATS: it holds nothing.")
    rows = await _held(visit, body, MAX_PAGE)
    found = Listing(visit, rows, _HELD, search=("place", "table", "text"))
    return visit.render(
        "consumers/in_flight.html", consumer=body, list=found, count=_holds(body["status"], rows)
    )


@PAGE.post("/{name}/pause")
async def pause(visit: Visit) -> Response:
    """Have nothing delivered by a consumer."""
    return await _act(visit, "pause", "paused")


@PAGE.post("/{name}/resume")
async def resume(visit: Visit) -> Response:
    """Let a consumer go on."""
    return await _act(visit, "resume", "resumed")


@PAGE.post("/{name}/rewind")
async def rewind(visit: Visit) -> Response:
    """Go on from another position."""
    form = visit.form
    place = _place(form["to"], form["at"])
    if place is None:
        form.errors["at"] = (
            f"{form['at']!r} is neither a position nor a time: expected 23876608:0, 0/16C5E80, or"
            " 2026-01-31T12:00:00Z."
        )
        return await _page(visit, 422)
    path, name = f"{_path(await _body(visit))}/rewind", visit.part("name")
    answer = await visit.api("POST", path, {"dry_run": True}, {"to": place})
    if answer.ok:
        lost = answer.body["losses"]
        # Not `agrees`: how many wait changes all the time.
        if lost and not ("confirm" in form and form.confirms(name)):
            fields = {"to": form["to"], "at": form["at"]}
            return visit.render(
                "consumers/rewind.html", form.status, name=name, lost=lost, fields=fields
            )
        answer = await visit.api("POST", path, body={"to": place})
    if not answer.ok:
        form.refuse(answer)
        return await _page(visit, answer.status)
    return visit.redirect(f"consumers/{name}", done="rewound")


async def _page(visit: Visit, code: int = 200) -> Response:
    name = visit.part("name")
    body, entity = await served(visit, name), await entity_of(visit, name, "consumers")
    if body is None and entity is not None and entity["refusal"] is None:
        return visit.render("consumers/waiting.html", name=name, stream=entity["spec"]["stream"])
    body = body or _not_served(visit, entity)
    status = await visit.get("/v1/status")
    held: list[Row] = []
    letters: list[Row] = []
    counts = {"held": 0, "letters": 0}
    path = _path(body)
    if body["type"] == "nats":
        row = _nats(body, status)
    else:
        facts = body["status"] or {}
        row = _http(name, {**body, **facts}, status)
        held = await _held(visit, body, _LOOK)
        page = await visit.get(f"{path}/dead-letters", limit=_LOOK)
        letters = page["data"]
        counts = {"held": _holds(facts, held), "letters": len(letters)}
        if page["next"]:
            causes = await visit.all("/v1/dead-letter-causes", consumer=name)
            counts["letters"] = sum(each["waiting"] + each["replayed"] for each in causes)
    spec = body["settings"] if body["type"] == "nats" else _settings(body)
    problems = [
        each for each in status["problems"]
        if each["subject"] == f"consumer {body['stream']}/{name}"
    ]  # fmt: skip
    own = bool(body.get("own"))
    commands = requests(visit, f"/v1/streams/{name}" if own else path, own=own)
    return visit.render(
        "consumers/show.html", code, consumer=row, spec=spec, entity=entity, held=held,
        letters=letters, counts=counts, problems=problems,
        requests=commands if body["type"] == "pull" else {},
    )  # fmt: skip


async def _held(visit: Visit, body: Row, limit: int) -> list[Row]:
    """Return the first messages that a consumer holds."""
    page = await visit.get(f"{_path(body)}/messages", state="delivered", limit=limit)
    return [_held_row(each) for each in page["data"]]


def _held_row(message: Row) -> Row:
    at, metadata = message["position"], message["metadata"]
    return {
        **message,
        "place": f"{at['lsn']}:{at['idx']}",
        "table": metadata.get("table_name", metadata.get("collection_id", NONE)),
        "text": exact.dumps(message.get("record") or message.get("event")),
    }


def _holds(facts: Mapping[str, Any] | None, held: Sequence[Row]) -> int:
    """Return how many messages a consumer holds, of which `held` are the first."""
    counted = facts["in_flight"] + facts["waiting_for_retry"] if facts else 0
    return max(len(held), counted)


async def _body(visit: Visit) -> Row:
    """Return a consumer of either kind as the API has it."""
    name = visit.part("name")
    found = await served(visit, name)
    return found or _not_served(visit, await entity_of(visit, name, "consumers"))


async def served(visit: Visit, name: str) -> Row | None:
    """Return what the API has of a consumer of any type, None if there is none of that name."""
    for section in ("http-consumers", "nats-consumers"):
        answer = await visit.api("GET", f"/v1/{section}/{name}")
        if answer.ok:
            found: Row = answer.body
            return found
        if answer.status != 404:
            visit.fail(answer)
    return None


def _not_served(visit: Visit, entity: Row | None) -> NoReturn:
    name = visit.part("name")
    if entity is not None:
        why = entity["refusal"]
        visit.missing(
            f"Consumer {name!r} is not served yet"
            + (": a run makes it." if why is None else f": {why['reason']}")
        )
    visit.missing(f"There is no consumer {name!r}.")


def _path(body: Row) -> str:
    section = "nats-consumers" if body["type"] == "nats" else "http-consumers"
    return f"/v1/{section}/{body['name']}"


async def _act(visit: Visit, verb: str, done: str) -> Response:
    answer = await visit.api("POST", f"{_path(await _body(visit))}/{verb}")
    if not answer.ok:
        visit.fail(answer)
    return visit.redirect(f"consumers/{visit.part('name')}", done=done)


async def _deletion(visit: Visit, code: int = 200) -> Response:
    name = visit.part("name")
    answer = await visit.api("DELETE", f"/v1/consumers/{name}", {"dry_run": True})
    lost = answer.body["consequences"] if answer.ok else []
    refused = "" if answer.ok else answer.detail
    if answer.status == 404 and (await _body(visit)).get("own"):
        refused = f"{name} is the group of the stream {name} itself: it goes with its sink."
    return visit.render("consumers/delete.html", code, name=name, lost=lost, refused=refused)


def _place(to: str, at: str) -> Any:
    """Return where a rewind leads as the API takes it, None for what is no place."""
    if to in ("all", "new"):
        return to
    lsn, colon, idx = at.partition(":")
    high, slash, low = lsn.partition("/")
    try:
        if slash:
            return {"lsn": (int(high, 16) << 32) + int(low, 16), "idx": int(idx or 0)}
        if colon and lsn.lstrip("-").isdecimal():
            return {"lsn": int(lsn), "idx": int(idx)}
        return at if datetime.fromisoformat(at).tzinfo is not None else None
    except ValueError:
        return None


def _http(name: str, body: Mapping[str, Any], status: Mapping[str, Any]) -> Row:
    stopped = body["disabled"] is not None
    error = body.get("last_error")
    # One dictionary each: a list makes thousands of them.
    return {
        **_NONE, **body, "name": name,
        "level": "degraded" if stopped else _level(status, body["stream"], name),
        "stopped": stopped,
        "state": _words(body.get("state")),
        "error": body["disabled"] or (error and error["reason"]),
    }  # fmt: skip


def _level(status: Mapping[str, Any], stream: str, name: str) -> str:
    level: str = status["parts"].get(f"consumer {stream}/{name}", "ready")
    return level


def _nats(body: Mapping[str, Any], status: Mapping[str, Any]) -> Row:
    name = body["name"]
    running = status["nats_consumers"].get(name, {})
    stopped = body["state"] == "paused"
    why = body["why"]
    return {
        **_NONE, **running, "last_error": None, **body,
        "type": "nats",
        "level": "degraded" if stopped else _level(status, body["stream"], name),
        "stopped": stopped,
        "state": body["state"],
        "dead_letters": running.get("dead_lettered"),
        "error": running.get("error") or (why and why["reason"]),
        "own": False,
    }  # fmt: skip


def _words(state: str | None) -> str:
    return "" if state in (None, "ok") else str(state).replace("_", " ")


def _settings(body: Row) -> Row:
    """Return a consumer's settings alone."""
    facts = ("id", "name", "status", "created_at", "disabled", "own")
    return {key: value for key, value in body.items() if key not in facts}


entity_forms.add_deletion(PAGE, _deletion)
