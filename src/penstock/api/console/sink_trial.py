"""The live trial beside a sink's form: real messages, and what the sink would make of them."""

from __future__ import annotations

from typing import Any, Final

from starlette.responses import Response

from penstock.api.console import exact
from penstock.api.console.page import Visit
from penstock.api.console.sink_form import spec_of
from penstock.api.console.sinks import PAGE, Row, entity_of

__all__ = ["PAGE"]

_MESSAGES: Final = 5
_WAIT_MS: Final = 10_000
_WINDOWS: Final = (1 << 14, 1 << 20, 1 << 28)
"""How far before a stream's newest message recent ones are looked for, in bytes of WAL."""
_MEMBERS: Final = ("record", "changes", "action", "metadata")


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
        found, why = await _recent(visit, form["from"])
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


async def _recent(visit: Visit, stream: str) -> tuple[list[Row], str]:
    """Return recent messages of a stream, and why there are none."""
    shown = await visit.api("GET", f"/v1/streams/{stream}")
    head = shown.body["head"] if shown.ok else None
    if head is None:
        return [], f"The stream {stream} has no message yet."
    found: list[Row] = []
    for window in (*_WINDOWS, None):
        after = None if window is None else f"{head['lsn'] - window}:0"
        query = {"after": after, "limit": _MESSAGES}
        answer = await visit.api("GET", f"/v1/streams/{stream}/messages", query)
        if not answer.ok:
            return [], answer.detail
        found = answer.body["data"]
        if len(found) == _MESSAGES:
            break
    return [{key: each[key] for key in _MEMBERS if key in each} for each in found], ""


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
    metadata = outcome["message"]["metadata"]
    return {
        **outcome,
        "table": f"{metadata['table_schema']}.{metadata['table_name']}",
        "out": [
            {"to": each["to"], "message": {k: v for k, v in each["message"].items() if k != "metadata"}}
            for each in outcome["out"]
        ],
    }  # fmt: skip
