"""The overview: what is wrong, then every source, sink, stream, consumer and sync on one screen."""

from __future__ import annotations

import heapq
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from starlette.responses import Response

from penstock.api.console import syncs
from penstock.api.console.page import ConsolePage, Visit
from penstock.api.console.remedies import actionable
from penstock.core.record_forms import SYNCS

MOST: Final = 50
"""Rows of a kind; the worst are shown, and the kind's own page has all."""
MOST_PROBLEMS: Final = 20
_RANK: Final = {"failed": 0, "starting": 1, "degraded": 2}

PAGE = ConsolePage(
    "overview",
    "Overview",
    notices={
        "resumed": "It goes on, with what waits in its stream first.",
    },
)
Row = dict[str, Any]


@PAGE.get()
async def show(visit: Visit) -> Response:
    """Show how everything is."""
    status = await visit.get("/v1/status")
    parts: Mapping[str, str] = status["parts"]
    sources = await _entities(visit, "source", status["sources"], parts)
    sinks = await _entities(visit, "sink", status["sinks"], parts)
    nats = status["nats_consumers"]
    every = [*status["consumers"].items(), *nats.items()]
    lags = _lags(every)
    streams = [
        {
            **each,
            "level": _level_of_stream(each["name"], status, parts),
            **lags.get(each["name"], {}),
        }
        for each in await visit.all("/v1/streams")
    ]
    read = [_sync(each, parts) for each in await visit.all("/v1/syncs")]
    kinds = {
        "sources": _worst(sources), "sinks": _worst(sinks), "streams": _worst(streams),
        "consumers": _worst_consumers(every, nats, parts), "syncs": _worst(read),
    }  # fmt: skip
    found = {
        "sources": sources, "sinks": sinks, "streams": streams, "consumers": every, "syncs": read,
    }  # fmt: skip
    known = {
        "source": {each["name"] for each in sources if each["configured"]},
        "sink": {each["name"] for each in sinks},
        "consumer": ChainMap(status["consumers"], nats),
        "sync": {each["name"] for each in read},
    }
    problems = [actionable(each, known) for each in status["problems"][:MOST_PROBLEMS]]
    return visit.render(
        "overview/page.html",
        status=status,
        problems=problems,
        wrong=len(status["problems"]),
        built_in=SYNCS,
        totals={kind: len(those) for kind, those in found.items()},
        lag=sum(each["lag_messages"] for _, each in every),
        waiting=sum(each.get("waiting") or 0 for each in sources),
        rate=sum(each.get("per_second") or 0.0 for each in [*sinks, *nats.values()]),
        **kinds,
    )


@PAGE.get("/charts")
async def charts(visit: Visit) -> Response:
    """Return the last hour's figures, by chart."""
    history = await visit.get("/v1/status/history")
    found = {
        name: [{"name": label, "unit": unit, "values": history[key]} for key, label, unit in series]
        for name, series in _CHARTS.items()
    }
    return visit.json({"at": history["at"], "charts": found})


@PAGE.post("/resume/{consumer}")
async def resume(visit: Visit) -> Response:
    """Let a consumer go on that is paused, or was disabled."""
    answers = [
        await visit.api("POST", f"/v1/{kind}-consumers/{visit.part('consumer')}/resume")
        for kind in ("http", "nats")
    ]
    if any(answer.ok for answer in answers):
        return visit.redirect(done="resumed")
    return visit.fail(max(answers, key=lambda answer: answer.status != 404))


_CHARTS: Final = {
    "throughput": (
        ("captured_per_second", "captured", "messages/s"),
        ("delivered_per_second", "delivered", "messages/s"),
    ),
    "latency": (("latency_seconds", "commit to delivered, mean", "s"),),
    "age": (
        ("waiting_seconds", "not delivered", "s"),
        ("lag_seconds", "not acked", "s"),
    ),
    "lag": (("lag_messages", "lag", "messages"),),
}


async def _entities(
    visit: Visit, kind: str, running: Mapping[str, Row], parts: Mapping[str, str]
) -> list[Row]:
    """Return those that run here with their state, and those that are only configured."""
    configured = {each["name"]: each for each in await visit.all(f"/v1/{kind}s")}
    rows = []
    for name in sorted({*configured, *running}):
        entity = configured.get(name)
        row = {
            "name": name, "level": "not seen here", "type": None, **running.get(name, {}),
            "configured": entity is not None,
        }  # fmt: skip
        if entity is not None:
            row["type"] = row["type"] or entity["spec"].get("type")
        if name in running:
            row["level"] = parts.get(f"{kind} {name}", "ready")
        elif entity is not None and entity["refusal"] is not None:
            row["level"] = parts.get(f"{kind} {name}", "degraded")
        rows.append(row)
    return rows


def _level_of_stream(name: str, status: Mapping[str, Any], parts: Mapping[str, str]) -> str:
    """Return the level of what writes a stream, as a stream has none of its own."""
    if name in status["sinks"]:
        return parts.get(f"sink {name}", "ready")
    return parts.get("store", "ready")


def _lags(consumers: Iterable[tuple[str, Row]]) -> dict[str, Row]:
    """Return how far the consumer of each stream is behind that is the furthest, by the stream."""
    found: dict[str, Row] = {}
    for _, each in consumers:
        worst = found.setdefault(each["stream"], {"lag_messages": 0, "lag_seconds": 0.0})
        for key in ("lag_messages", "lag_seconds"):
            worst[key] = max(worst[key], each.get(key) or 0)
    return found


def _sync(sync: Row, parts: Mapping[str, str]) -> Row:
    collections = sync["collections"]
    lags = [each["lag_seconds"] for each in collections if each["lag_seconds"] is not None]
    return {
        "name": sync["name"],
        "level": syncs.level_of(sync, parts),
        "status": sync["status"],
        "collections": len(collections),
        "lag_seconds": max(lags, default=None),
        "records_read": sum(each["records_read"] for each in collections),
    }


def _worst(rows: Iterable[Row]) -> list[Row]:
    ordered = sorted(
        rows, key=lambda row: (_RANK.get(row["level"], 3), -(row.get("lag_messages") or 0))
    )
    return ordered[:MOST]


def _worst_consumers(
    every: Sequence[tuple[str, Row]], nats: Mapping[str, Row], parts: Mapping[str, str]
) -> list[Row]:
    """Return the rows of the worst: of thousands no others are made."""

    def level(name: str, each: Row) -> str:
        return parts.get(f"consumer {each['stream']}/{name}", "ready")

    def order(found: tuple[str, Row]) -> tuple[int, int]:
        return _RANK.get(level(*found), 3), -found[1]["lag_messages"]

    rows = []
    for name, each in heapq.nsmallest(MOST, every, key=order):
        row = {
            "lag_seconds": None,
            "in_flight": None,
            "name": name,
            "level": level(name, each),
            **each,
        }
        if name in nats:
            row |= {"type": "nats", "dead_letters": each["dead_lettered"]}
        rows.append(row)
    return rows
