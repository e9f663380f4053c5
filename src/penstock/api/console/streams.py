"""Streams: their messages by position, time, key, action, table and condition; one message, whole."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

from starlette.responses import Response

from penstock.api.console import exact
from penstock.api.console.calls import Answer
from penstock.api.console.lists import SIZE, Column, Listing, ListUrl, position_order
from penstock.api.console.page import ConsolePage, Visit
from penstock.api.console.render import NONE

PAGE = ConsolePage("streams", "Streams")
_SHOWN: Final = 160
"""Characters of a message that a line of the list has."""
_AROUND: Final = 60
"""Characters of an expression on each side of what is wrong in it."""
_COLUMNS: Final = (
    Column("name", "Name"),
    Column("kind", "Kind"),
    Column("source", "Source"),
    Column("retention_ms", "Kept for", figure=True),
    Column("segments", "Segments", figure=True),
    Column("head", "Newest message at", value=lambda row: position_order(row["head"])),
)
_ACTIONS: Final = ("insert", "update", "delete", "read")
_FIELDS: Final = ("filter", "table", "key", "columns", "action", "after", "since")
_STATES: Final = {
    "waiting": ("other", "waits for its delivery"),
    "in_flight": ("starting", "in flight"),
    "retry": ("degraded", "waits for its retry"),
    "replay": ("starting", "is to be replayed"),
    "filtered": ("other", "left out by the filter"),
    "dead": ("failed", "dead letter"),
    "done": ("ready", "done"),
}
Row = dict[str, Any]


@PAGE.get()
async def listed(visit: Visit) -> Response:
    """List the streams."""
    rows = [{**each, "place": _place(each["head"])} for each in await visit.all("/v1/streams")]
    found = Listing(visit, rows, _COLUMNS, search=("name", "source", "kind"))
    return visit.render("streams/list.html", list=found)


@PAGE.get("/{stream}")
async def messages(visit: Visit) -> Response:
    """Show messages of a stream, the newest first unless the URL asks for others."""
    name, query = visit.part("stream"), visit.query
    stream = await visit.get(f"/v1/streams/{name}")
    asked = {field: query.get(field, "").strip() for field in _FIELDS}
    tail = query.get("tail") == "1"
    order = "newest" if tail else query.get("order") or _order(asked)
    search = {**asked, "since": _time(asked["since"]), "order": order, "limit": SIZE}
    cursor = None if tail else query.get("cursor")
    if cursor is not None and order == "oldest":
        search |= {"after": "", "since": ""}  # the cursor lies behind them
    sent = {key: value for key, value in search.items() if value}
    path = f"/v1/streams/{name}/messages"
    answer = await visit.api("GET", path, {**sent, "cursor": cursor})
    if not answer.ok and answer.status not in (409, 422):
        visit.fail(answer)
    here = ListUrl(visit)
    following = answer.body["next"] if answer.ok else None
    return visit.render(
        "streams/messages.html",
        stream=stream,
        asked=asked,
        order=order,
        tail=tail,
        actions=_ACTIONS,
        rows=[_line(each) for each in answer.body["data"]] if answer.ok else [],
        answer=answer.body if answer.ok else None,
        fault=None if answer.ok else _fault(answer, asked["filter"]),
        sought=any(asked.values()),
        curl=_curl(path, {**sent, "limit": 100}),
        start=here.url(cursor=None) if cursor else "",
        next=here.url(cursor=following) if following else "",
        tail_url=here.url(cursor=None, tail=None if tail else "1"),
        plain=visit.request.url.path,
    )


@PAGE.get("/{stream}/messages/{position}")
async def message(visit: Visit) -> Response:
    """Show one message: its columns before and after, its history, and all of it."""
    name, position = visit.part("stream"), visit.part("position")
    path = f"/v1/streams/{name}/messages/{position}"
    consumer = visit.query.get("consumer", "").strip()
    found = (await visit.get(path, consumer=consumer or None))["messages"]
    part = next((i for i, each in enumerate(found) if str(i) == visit.query.get("part")), 0)
    chosen = found[part]
    history = [
        {**each, "level": _STATES[each["state"]][0], "words": _STATES[each["state"]][1]}
        for each in chosen.pop("history")
    ]
    more = chosen.pop("more_consumers")
    shown = {key: value for key, value in chosen.items() if key != "position"}
    key = shown.get("metadata", {}).get("idempotency_key")
    letters = await visit.all("/v1/dead-letters", idempotency_key=key) if key else []
    # Those with a count of deliveries are in the history.
    letters = [each for each in letters if each["deliver_count"] is None]
    nats = [
        {
            **each,
            "done": _passed(each, chosen["position"]),
            "dead_letter": next((x for x in letters if x["consumer"] == each["name"]), None),
        }
        for each in await visit.all("/v1/nats-consumers")
        if each["stream"] == name
    ]
    body = exact.dumps(shown)
    return visit.render(
        "streams/message.html",
        name=name,
        position=position,
        part=part,
        parts=len(found),
        line=_line(chosen),
        shown=shown,
        cells=_cells(shown),
        history=history,
        more=more,
        consumer=consumer,
        letters=[x for x in letters if x["consumer"] not in {each["name"] for each in nats}],
        nats=nats,
        curl=_curl(path, {}),
        post=f'curl -X POST -H "Content-Type: application/json" --data-raw {shlex.quote(body)}'
        ' "$WEBHOOK_URL"',
    )


def _order(asked: Mapping[str, str]) -> str:
    """Return the order where the URL names none: from a place on, and else from the end."""
    return "oldest" if asked["after"] or asked["since"] else "newest"


def _time(text: str) -> str:
    """Return a time as the API takes it: one without an offset is in UTC, as times are shown."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return text
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).isoformat()


def _place(position: Mapping[str, int] | None) -> str | None:
    return None if position is None else f"{position['lsn']}:{position['idx']}"


def _passed(consumer: Row, position: Mapping[str, int]) -> bool:
    """Return whether a NATS consumer has published a message; one that is attached has all."""
    at = consumer["position"]
    if at is None:
        return bool(consumer["state"] == "attached")
    return (position["lsn"], position["idx"]) <= (at["lsn"], at["idx"])


def _line(found: Row) -> Row:
    """Return what a line of the list has of a message."""
    metadata = found.get("metadata") or {}
    record = found.get("record", found.get("event"))
    text = exact.dumps(record)
    pks = metadata.get("record_pks")
    return {
        "place": _place(found["position"]),
        "at": metadata.get("commit_timestamp"),
        "action": found.get("action") or NONE,
        "table": ".".join(str(metadata.get(k) or "") for k in ("table_schema", "table_name")).strip("."),
        "key": NONE if not pks else exact.dumps(pks[0] if len(pks) == 1 else pks),
        "text": text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…",
    }  # fmt: skip


def _cells(found: Row) -> list[Row]:
    """Return the columns of a change: what each was, what it is, whether that differs or is unknown."""
    record = found.get("record", found.get("event"))
    changes = found.get("changes")
    if not isinstance(record, dict):
        return []
    changes = changes if isinstance(changes, dict) else {}
    gone = set((found.get("metadata") or {}).get("unavailable") or ())
    return [
        {
            "name": name,
            "before": _value(changes[name]) if name in changes else "",
            "now": _value(record[name]) if name in record else "",
            "changed": name in changes,
            "unavailable": name in gone and name not in record,
        }
        for name in [*record, *sorted(({*changes} | gone) - {*record})]
    ]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else exact.dumps(value)


def _fault(answer: Answer, text: str) -> Row:
    """Return what is wrong with a search, with the part of the expression around it and a caret."""
    errors = answer.errors
    at = answer.body.get("position")
    if "filter" not in errors or at is None:
        return {"text": "", "caret": "", "why": answer.detail, "position": None}
    begin = max(0, at - 1 - _AROUND)
    part = "".join(c if c.isprintable() else " " for c in text[begin : at - 1 + _AROUND])
    head = "…" if begin else ""
    return {
        "text": head + part,
        "caret": " " * (len(head) + at - 1 - begin) + "^",
        "why": errors["filter"],
        "position": at,
    }


def _curl(path: str, query: Mapping[str, Any]) -> str:
    """Return the request as a command; what the shell would take for its own is quoted."""
    url = f'"$PENSTOCK_URL{quote(path, safe="/:")}"'
    given = "".join(
        f" --data-urlencode {shlex.quote(f'{key}={value}')}" for key, value in query.items()
    )
    get = " -G" if given else ""
    return f'curl{get} -H "Authorization: Bearer $PENSTOCK_TOKEN" {url}{given}'
