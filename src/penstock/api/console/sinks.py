"""Sinks: how each is, what it takes and where it goes; pause, and its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response

from penstock.api.console import entity_forms
from penstock.api.console.lists import Column, Listing
from penstock.api.console.page import ConsolePage, Visit

PAGE = ConsolePage(
    "sinks",
    "Sinks",
    notices={
        "created": "The sink is made: a run that has its source takes it up.",
        "saved": "The sink is changed: a run that has its source takes it up.",
        "paused": "It is paused: its messages wait in the store. The run does so within seconds.",
        "resumed": "It goes on, with what waits in the store first.",
        "deleted": "The sink is deleted.",
    },
)
_COLUMNS: Final = (
    Column("name", "Name"),
    Column("level", "State"),
    Column("type", "Where to"),
    Column("source", "Source"),
    Column("lag", "Lag", figure=True),
    Column("per_second", "A second", figure=True),
    Column("delivered", "Delivered", figure=True),
    Column("filtered", "Filtered", figure=True),
    Column("retries", "Retries", figure=True),
    Column("dead_lettered", "Dead letters", figure=True),
)
_READERS: Final = (
    Column("name", "Name"),
    Column("level", "State"),
    Column("type", "Type"),
    Column("lag_messages", "Lag", figure=True),
    Column("in_flight", "In flight", figure=True),
)
Row = dict[str, Any]


@PAGE.get()
async def listed(visit: Visit) -> Response:
    """List the sinks."""
    status = await visit.get("/v1/status")
    entities = {each["name"]: each for each in await visit.all("/v1/sinks")}
    names = sorted({*entities, *status["sinks"]})
    rows = [_row(name, entities.get(name), status) for name in names]
    found = Listing(visit, rows, _COLUMNS, search=("name", "source", "type", "error"))
    return visit.render("sinks/list.html", list=found)


@PAGE.get("/{name}")
async def show(visit: Visit) -> Response:
    """Show a sink: its state, its last errors, its settings and its consumers."""
    name = visit.part("name")
    status = await visit.get("/v1/status")
    entity = await entity_of(visit, name)
    if entity is None and name not in status["sinks"]:
        visit.missing(f"There is no sink {name!r}.")
    row = _row(name, entity, status)
    readers = [
        {"name": key, "level": status["parts"].get(f"consumer {name}/{key}", "ready"), **each}
        for kind in ("consumers", "nats_consumers")
        for key, each in status[kind].items()
        if each["stream"] == name
    ]
    problems = [each for each in status["problems"] if each["subject"] == f"sink {name}"]
    spec = {} if entity is None else entity["spec"]
    return visit.render(
        "sinks/show.html", sink=row, entity=entity, spec=spec, problems=problems,
        list=Listing(visit, readers, _READERS, search=("name", "level", "type")),
        requests=requests(visit, f"/v1/streams/{name}", own=True),
    )  # fmt: skip


@PAGE.post("/{name}/pause")
async def pause(visit: Visit) -> Response:
    """Have nothing delivered to a sink."""
    return await _act(visit, "pause", "paused")


@PAGE.post("/{name}/resume")
async def resume(visit: Visit) -> Response:
    """Let a sink go on."""
    return await _act(visit, "resume", "resumed")


async def _act(visit: Visit, action: str, done: str) -> Response:
    name = visit.part("name")
    answer = await visit.api("POST", f"/v1/sinks/{name}/{action}")
    return visit.redirect(f"sinks/{name}", done=done) if answer.ok else visit.fail(answer)


async def entity_of(visit: Visit, name: str, section: str = "sinks") -> Row | None:
    """Return an entity of the desired state, None where there is none of this name."""
    answer = await visit.api("GET", f"/v1/{section}/{name}")
    if answer.status == 404:
        return None
    found: Row = answer.body if answer.ok else visit.fail(answer)
    return found


def requests(visit: Visit, path: str, *, own: bool) -> dict[str, str]:
    """Return the commands that receive messages by hand, and ack or give back what was received.

    `own` is whether `path` is that of a stream, whose own group it is.
    """
    scheme = visit.request.headers.get("x-forwarded-proto", visit.request.url.scheme)
    base = f"{'https' if scheme == 'https' else 'http'}://{visit.request.url.netloc}{path}"
    bearer = '-H "Authorization: Bearer $PENSTOCK_TOKEN"'
    receive, key = ("receive", "ack_ids") if own else ("next", "ack_tokens")
    done = f'{{"{key}": ["…"]}}'
    return {
        "Receive": f'curl -s {bearer} "{base}/{receive}?batch_size=10&wait_for_ms=5000"',
        "Ack": f"curl -s {bearer} -d '{done}' \"{base}/ack\"",
        "Give back": f"curl -s {bearer} -d '{done}' \"{base}/nack\"",
    }


async def _deletion(visit: Visit, code: int = 200) -> Response:
    name = visit.part("name")
    answer = await visit.api("DELETE", f"/v1/sinks/{name}", {"dry_run": True})
    if answer.status == 404:
        visit.fail(answer)
    lost = answer.body["consequences"] if answer.ok else []
    refused = "" if answer.ok else answer.detail
    return visit.render("sinks/delete.html", code, name=name, lost=lost, refused=refused)


def _row(name: str, entity: Row | None, status: Mapping[str, Any]) -> Row:
    """Return what a list shows of a sink: as it runs here, else as it is configured."""
    spec = {} if entity is None else entity["spec"]
    row: Row = {
        "name": name, "level": "not seen here", "type": spec.get("type"),
        "source": spec.get("source"), "kind": spec.get("kind", "changes"), "error": None,
        "code": None, "since": None, "state": None, "lag": None, "backlog_bytes": None,
        **dict.fromkeys(("per_second", "delivered", "filtered", "retries", "dead_lettered")),
    }  # fmt: skip
    running = status["sinks"].get(name)
    if running is not None:
        row |= running
        row |= {
            "level": status["parts"].get(f"sink {name}", "ready"),
            "lag": running.get("backlog"),
        }
    elif entity is not None and entity["refusal"] is not None:
        level = status["parts"].get(f"sink {name}", "degraded")
        row |= {"level": level, "error": entity["refusal"]["reason"]}
        row["since"] = entity["refusal"]["at"]
    return row


entity_forms.add_deletion(PAGE, _deletion)
