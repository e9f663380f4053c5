"""Sources: connect a database step by step, pick its tables, see its slots and what they hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.responses import Response

from penstock.api.console import entity_forms
from penstock.api.console.entity_forms import Spec
from penstock.api.console.lists import Column, Listing
from penstock.api.console.page import ConsolePage, Visit
from penstock.core.tables import TablePattern

PAGE = ConsolePage(
    "sources",
    "Sources",
    notices={
        "added": "The source is added. Nothing is captured before a sink takes from it.",
        "changed": "The connection is changed.",
        "picked": "The tables are changed. See what they need below.",
        "deleted": "The source is deleted.",
        "trusted": "The host key is trusted.",
    },
)
_COLUMNS: Final = (
    Column("name", "Name"),
    Column("level", "State"),
    Column("address", "Database"),
    Column("tables", "Tables"),
    Column("sinks", "Sinks", figure=True),
    Column("captured", "Captured", figure=True),
    Column("waiting", "To be delivered", figure=True),
    Column("oldest_waiting_seconds", "Oldest of these", figure=True),
)
_KEYS: Final = ("url", "slot", "publication")
_DEFAULT_TABLES: Final = ("public.*",)
_TABLE_COLUMNS: Final = (
    Column("name", "Table"),
    Column("rows", "Rows, about", figure=True),
    Column("has_key", "Primary key"),
    Column("replica_identity", "Old values in changes"),
    Column("published", "Published"),
)
_SLOT_COLUMNS: Final = (
    # This source's own comes first.
    Column("name", "Slot", value=lambda row: f"{0 if row['own'] else 1} {row['name']}"),
    Column("state", "State"),
    Column("retained_bytes", "WAL held", figure=True),
    Column("lag_bytes", "Not confirmed", figure=True),
    Column("lag_seconds", "Lag", figure=True),
    Column("confirmed_flush_lsn", "Confirmed to", sortable=False),
    Column("database", "Database"),
    Column("plugin", "Plugin"),
)
_STATEMENT: Final = re.compile(r"\b(?:ALTER|CREATE|DROP|GRANT|SELECT) [^;]*;")
# Not the run itself, which a remedy has one start or stop where it is started.
_COMMAND: Final = re.compile(r"Run: (penstock .+)$|`(penstock (?!run`)[^`]+)`")
_RANK: Final = {"error": 0, "warning": 1}


@PAGE.get()
async def listed(visit: Visit) -> Response:
    """List the sources, and show the form of a new one."""
    return await _page(visit)


@PAGE.post()
async def create(visit: Visit) -> Response:
    """Add a source, and go on to what it needs."""
    form = visit.form
    name, status = form["name"], 422
    if entity_forms.is_named(form):
        spec = entity_forms.given(form, _KEYS, {"type": "postgres"})
        answer = await visit.api(
            "PUT", f"/v1/sources/{name}", body=spec, headers=entity_forms.tag(form)
        )
        if answer.ok:
            step = "" if "bastion" in spec else "/check"
            return visit.redirect(f"sources/{name}{step}", done="added")
        status = entity_forms.refuse(form, answer, _KEYS)
    visit.form = entity_forms.shown_again(form, _KEYS, {})
    return await _page(visit, status)


@PAGE.get("/{name}")
async def show(visit: Visit) -> Response:
    """Show a source: its state, its connection, and the slots of its server."""
    return await _source(visit)


@PAGE.get("/{name}/edit")
async def edit(visit: Visit) -> Response:
    """Show the form of a source's connection."""
    entity = await _entity(visit)
    values = entity_forms.filled(entity["spec"], _KEYS)
    visit.form = visit.form.filled(**values, version=str(entity["version"]))
    return visit.render("sources/edit.html", source=entity, follows=[])


@PAGE.post("/{name}/edit")
async def change(visit: Visit) -> Response:
    """Change a source's connection; what follows from that is shown first."""
    form, entity = visit.form, await _entity(visit)
    name = entity["name"]
    spec = entity_forms.given(form, _KEYS, entity["spec"])
    path, tag = f"/v1/sources/{name}", entity_forms.tag(form)
    answer = await visit.api("PUT", path, {"dry_run": True}, spec, tag)
    follows: list[str] = []
    if answer.ok:
        losses = answer.body["losses"]
        follows = [each for each in answer.body["consequences"] if each not in losses]
        if form.agrees(name, losses) and (losses or "agreed" in form or not follows):
            answer = await visit.api("PUT", path, None, spec, tag)
    if answer.ok and not answer.body["dry_run"]:
        return visit.redirect(f"sources/{name}", done="changed")
    status = form.status if answer.ok else entity_forms.refuse(form, answer, _KEYS)
    visit.form = entity_forms.shown_again(form, _KEYS, {})
    return visit.render("sources/edit.html", status, source=entity, follows=follows)


@PAGE.get("/{name}/check")
async def check(visit: Visit) -> Response:
    """Show what a source lacks, with what mends it."""
    entity = await _entity(visit)
    answer = await visit.api("GET", f"/v1/sources/{entity['name']}/check")
    findings = [_mendable(each) for each in answer.body["findings"]] if answer.ok else []
    findings.sort(key=lambda each: _RANK.get(each["level"], 2))
    return visit.render("sources/check.html", source=entity, answer=answer, findings=findings)


@PAGE.get("/{name}/tables")
async def tables(visit: Visit) -> Response:
    """Show a database's tables, to pick of them, and their replica identities."""
    return await _tables(visit)


@PAGE.post("/{name}/tables")
async def pick(visit: Visit) -> Response:
    """Change a source's tables; what follows from that is shown first."""
    form, entity = visit.form, await _entity(visit)
    name = entity["name"]
    picked = form.many("tables")
    if not picked:
        old, seen = _patterns(entity["spec"]), set(form.many("seen"))
        chosen = [each for each in form.many("table") if each in seen]
        picked = [each for each in old if each not in seen or each in chosen]
        picked += [each for each in chosen if each not in picked]
        if twice := _twice(chosen):
            form.problem = f"{twice[1]} is one of {twice[0]}: uncheck one of the two."
            return await _tables(visit, 422, picked)
    if not picked:
        form.problem = "Pick one table at least."
        return await _tables(visit, 422)
    sent = {"tables": picked}, entity_forms.tag(form)
    answer = await visit.api("PATCH", f"/v1/sources/{name}", {"dry_run": True}, *sent)
    if answer.ok and answer.body["action"] != "nothing":
        plan = answer.body
        if not form.agrees(name, plan["losses"]) or not form.many("tables"):
            follows = [each for each in plan["consequences"] if each not in plan["losses"]]
            return visit.render(
                "sources/picked.html", form.status, source=entity, picked=picked, follows=follows,
                warnings=plan["warnings"],
            )  # fmt: skip
        answer = await visit.api("PATCH", f"/v1/sources/{name}", None, *sent)
    if not answer.ok:
        form.problem = "; ".join(answer.errors.values()) or answer.detail
        return await _tables(visit, answer.status)
    return visit.redirect(f"sources/{name}/check", done="picked")


async def _page(visit: Visit, status: int = 200) -> Response:
    state = await visit.get("/v1/status")
    sinks = await visit.all("/v1/sinks")
    counts: dict[Any, int] = {}
    for sink in sinks:
        counts[sink["spec"].get("source")] = counts.get(sink["spec"].get("source"), 0) + 1
    rows = [
        {**_running(state, entity), "address": entity["spec"].get("url"), "name": entity["name"],
         "tables": ", ".join(_patterns(entity["spec"])), "sinks": counts.get(entity["name"], 0)}
        for entity in await visit.all("/v1/sources")
    ]  # fmt: skip
    found = Listing(visit, rows, _COLUMNS, search=("name", "address", "tables", "level"))
    return visit.render("sources/list.html", status, list=found)


def _running(state: Mapping[str, Any], entity: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run in this process reports of a source, and its level."""
    name = entity["name"]
    found = dict(state["sources"].get(name, {}))
    if name in state["sources"]:
        found["level"] = state["parts"].get(f"source {name}", "ready")
    elif entity["refusal"] is not None:
        found["level"] = state["parts"].get(f"source {name}", "degraded")
    else:
        found["level"] = "not seen here"
    return found


async def _source(visit: Visit, status: int = 200, **values: Any) -> Response:
    entity = await _entity(visit)
    name = entity["name"]
    state = await visit.get("/v1/status")
    problems = [
        each
        for each in state["problems"]
        if each["subject"] == f"source {name}" or each["subject"].startswith(f"source {name}:")
    ]
    slots = await visit.whole(f"/v1/sources/{name}/slots")
    rows = [_slot(each) for each in slots.body["data"]] if slots.ok else []
    values = {"tested": None, "shown": None, **values}
    return visit.render(
        "sources/show.html",
        status,
        source=entity,
        running=_running(state, entity),
        problems=problems,
        slots=slots,
        own=next((each for each in rows if each["own"]), None),
        list=Listing(visit, rows, _SLOT_COLUMNS, search=("name", "state", "database", "plugin")),
        tables=_patterns(entity["spec"]),
        sinks=[s for s in await visit.all("/v1/sinks") if s["spec"].get("source") == name],
        bastion=await entity_forms.bastion_of(visit, "source", entity),
        **values,
    )


def _slot(slot: dict[str, Any]) -> dict[str, Any]:
    """Return a slot with its state in words, and the level of that."""
    level, state = "other", "nothing reads it"
    if slot["invalidation_reason"] or slot["wal_status"] == "lost":
        level, state = "failed", "lost"
    elif slot["wal_status"] == "unreserved":
        level, state = "degraded", "about to be lost"
    elif slot["active"]:
        level, state = "ready", "read"
    return {**slot, "level": level, "state": state, "plugin": slot["plugin"] or slot["slot_type"]}


async def _tables(visit: Visit, status: int = 200, picked: Sequence[str] | None = None) -> Response:
    """Show the tables; those are checked that the source has, or that are picked in a form."""
    entity = await _entity(visit)
    answer = await visit.whole(f"/v1/sources/{entity['name']}/tables")
    found = answer.body["data"] if answer.ok else []
    patterns = _patterns(entity["spec"]) if picked is None else picked
    for table in found:
        table["schema"] = str(TablePattern(table["table_schema"], None))
    schemas = {table["schema"] for table in found}
    known = {*schemas, *(table["name"] for table in found)}
    return visit.render(
        "sources/tables.html",
        status,
        source=entity,
        answer=answer,
        list=Listing(visit, found, _TABLE_COLUMNS),
        patterns=patterns,
        schemas=sorted(schemas),
        absent=[each for each in patterns if each not in known],
    )


async def _deletion(visit: Visit, status: int = 200) -> Response:
    entity = await _entity(visit)
    plan = await visit.api("DELETE", f"/v1/sources/{entity['name']}", {"dry_run": True})
    return visit.render("sources/delete.html", status, source=entity, plan=plan)


async def _entity(visit: Visit) -> Any:
    return await visit.get(f"/v1/sources/{visit.part('name')}")


def _twice(picked: Sequence[str]) -> tuple[str, str] | None:
    """Return a schema's pattern, and a table of it, where both are picked."""
    schemas = [each for each in picked if each.endswith(".*")]
    return next(
        (
            (schema, each)
            for each in picked
            for schema in schemas
            if each != schema and each.startswith(schema[:-1])
        ),
        None,
    )


def _patterns(spec: Spec) -> list[str]:
    """Return a source's tables, each written as the API writes it."""
    return [_canonical(each) for each in spec.get("tables") or _DEFAULT_TABLES]


def _canonical(pattern: str) -> str:
    try:
        return str(TablePattern.parse(pattern))
    except ValueError:  # it names a variable
        return pattern


def _mendable(finding: dict[str, Any]) -> dict[str, Any]:
    """Return a finding with the statements and commands in its fix, and the text around them."""
    fix = finding["fix"]
    commands = [bare or quoted for bare, quoted in _COMMAND.findall(fix)]
    if not _STATEMENT.sub("", fix).strip():  # statements alone, to be pasted as one
        return {**finding, "text": "", "copies": [fix] if fix else []}
    return {**finding, "text": fix, "copies": [*_STATEMENT.findall(fix), *commands]}


entity_forms.add_deletion(PAGE, _deletion)
entity_forms.add_connection(PAGE, _source)
