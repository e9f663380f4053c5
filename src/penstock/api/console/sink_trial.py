"""The live trials beside the forms: real messages, and what a sink or a consumer would make of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, Final

from starlette.responses import Response

from penstock.api.console import consumer_form, exact
from penstock.api.console.page import Visit
from penstock.api.console.sink_form import spec_of
from penstock.api.console.sinks import PAGE, Row, entity_of

__all__ = ["PAGE"]

_MESSAGES: Final = 5
_WAIT_MS: Final = 10_000
_SEARCH_SECONDS: Final = 2.0
_PAGE: Final = 100
_MEMBERS: Final = ("record", "event", "changes", "action", "metadata")


@PAGE.get("/form/columns")
async def columns(visit: Visit) -> Response:
    """Return the columns of tables, for the builder of filters."""
    found: dict[str, str] = {}
    source = visit.query.get("source", "")
    for table in visit.query.get("tables", "").split()[:10]:
        answer = await visit.api("GET", f"/v1/sources/{source}/tables/{table}/columns")
        for each in answer.body["data"] if answer.ok else ():
            found.setdefault(each["name"], each["type"])
    return visit.json([{"name": name, "type": type_} for name, type_ in found.items()])


@PAGE.post("/form/messages")
async def messages(visit: Visit) -> Response:
    """Return real messages to try: of a stream, or the next changes of the source."""
    form = visit.form
    spec = spec_of(form)
    if form["from"]:
        found, why = await _recent(visit, form["from"], spec.get("tables") or ())
    else:
        body = {
            "tables": spec.get("tables"),
            "limit": _MESSAGES,
            "wait_for_ms": _WAIT_MS,
        }
        source = form["source"]
        answer = await visit.api("POST", f"/v1/sources/{source}/next-changes", body=body)
        found, why = (answer.body["data"], "") if answer.ok else ([], answer.detail)
        if answer.ok and not found:
            why = f"Nothing was changed in {_WAIT_MS // 1000} s."
    text = "\n".join(exact.dumps(each) for each in found)
    return visit.json({"messages": text, "why": why})


@PAGE.post("/form/trial")
async def trial(visit: Visit) -> Response:
    """Show what the sink of a form would make of the form's messages."""
    form = visit.form
    given, why = _given(form.raw("messages"))
    if why or not given:
        return visit.render("sinks/trial.html", outcomes=[], why=why, field="messages")
    old = await entity_of(visit, form["name"]) if form["version"] else None
    body: Row = {"sink": spec_of(form, old and old["spec"]), "messages": given}
    if old is not None:
        kept = {key: old["spec"][key] for key in ("route", "sort_by") if key in old["spec"]}
        body |= {"name": form["name"], "sink": {**kept, **body["sink"]}}
    answer = await visit.api("POST", "/v1/try-sink", body=body)
    if not answer.ok:
        field, text = next(iter(answer.errors.items()), ("", answer.detail))
        return visit.render("sinks/trial.html", outcomes=[], why=text, field=field)
    outcomes = [_shown(each) for each in answer.body["data"]]
    return visit.render("sinks/trial.html", outcomes=outcomes, why="", field="")


@consumer_form.PAGE.post("/form/messages")
async def consumer_messages(visit: Visit) -> Response:
    """Return recent messages of the stream of a consumer's form."""
    form = visit.form
    filters = consumer_form.filters_of(form)
    tables = [each for each in filters.get("table", ()) if "." in each and ":" not in each]
    found, why = await _recent(visit, form["stream"], tables, filters.get("collection_id", ()))
    text = "\n".join(exact.dumps(each) for each in found)
    return visit.json({"messages": text, "why": why})


@consumer_form.PAGE.post("/form/trial")
async def consumer_trial(visit: Visit) -> Response:
    """Show what the filters of a consumer's form would make of the form's messages."""
    form = visit.form
    given, why = _given(form.raw("messages"))
    if why or not given:
        return visit.render("sinks/trial.html", outcomes=[], why=why, field="messages")
    body = {"filters": consumer_form.filters_of(form), "messages": given}
    answer = await visit.api("POST", f"/v1/streams/{form['stream']}/try-filters", body=body)
    if not answer.ok:
        field, text = next(iter(answer.errors.items()), ("", answer.detail))
        return visit.render("sinks/trial.html", outcomes=[], why=text, field=field)
    outcomes = []
    for verdict, message in zip(answer.body["data"], given, strict=True):
        out = [{"to": None, "message": message}] if verdict["result"] == "sent" else []
        outcomes.append(_shown({**verdict, "code": None, "message": message, "out": out}))
    return visit.render("sinks/trial.html", outcomes=outcomes, why="", field="")


async def _recent(
    visit: Visit, stream: str, tables: Sequence[str], collections: Collection[str] = ()
) -> tuple[list[Row], str]:
    """Return the newest messages of a stream, of some tables or collections, and why there are none."""
    deadline = time.monotonic() + _SEARCH_SECONDS
    found: list[Row] = []
    for table in tables or (None,):
        cursor, left = None, _MESSAGES
        while left > 0:
            query = {"table": table, "order": "newest", "cursor": cursor,
                     "limit": _PAGE if collections else left}  # fmt: skip
            answer = await visit.api("GET", f"/v1/streams/{stream}/messages", query)
            if not answer.ok:
                return [], answer.detail
            taken = [each for each in answer.body["data"] if _is_of(each, collections)][:left]
            found, left, cursor = found + taken, left - len(taken), answer.body["next"]
            if cursor is None or time.monotonic() > deadline:
                break
    if not found:
        of = f" of {', '.join([*tables, *collections])}" if tables or collections else ""
        return [], f"The stream {stream} has no message{of} yet, or no recent one."
    found.sort(key=lambda each: (each["position"]["lsn"], each["position"]["idx"]))
    newest = found[-_MESSAGES:]
    return [{key: each[key] for key in _MEMBERS if key in each} for each in newest], ""


def _is_of(message: Row, collections: Collection[str]) -> bool:
    of = message.get("event", message.get("record"))
    return not collections or (isinstance(of, dict) and of.get("collection_id") in collections)


def _given(text: str) -> tuple[list[Any], str]:
    """Return the messages in a text, one a line or a JSON array, and what is wrong with it."""
    stripped = text.strip()
    try:
        whole = exact.loads(stripped) if stripped else []
        return (whole if isinstance(whole, list) else [whole]), ""
    except ValueError as error:
        why = f"It is no JSON: {error}."
    found = []
    lines = [line for line in stripped.splitlines() if line.strip()]
    for number, line in enumerate(lines, 1):
        try:
            found.append(exact.loads(line))
        except ValueError as error:
            return [], f"Line {number} is no JSON: {error}." if len(lines) > 1 else why
    return found, ""


def _shown(outcome: Row) -> Row:
    """Return an outcome with what the messages are about, in place of all of their metadata."""
    return {
        **outcome,
        "what": _what(outcome["message"]),
        "out": [
            {"to": each["to"], "message": {k: v for k, v in each["message"].items() if k != "metadata"}}
            for each in outcome["out"]
        ],
    }  # fmt: skip


def _what(message: Row) -> str:
    """Return what a message is about."""
    metadata = message.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    names = [metadata.get("table_schema"), metadata.get("table_name")]
    table = ".".join(str(each) for each in names if each)
    action = message.get("action") or "a message"
    return f"{action} of {table}" if table else str(action)
