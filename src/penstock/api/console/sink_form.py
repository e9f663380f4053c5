"""Making and changing a sink, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response

from penstock.api.console import entity_forms
from penstock.api.console.forms import Form
from penstock.api.console.page import Visit
from penstock.api.console.sinks import PAGE, Row, entity_of

_ACTIONS: Final = ("insert", "update", "delete")
_MOST_TABLES: Final = 300
"""How many tables are offered; others are typed."""
_MANAGED: Final = frozenset(
    {"tables", "actions", "kind", "deletes", "filter", "transform", "group_by", "initial_backfill",
     "retention", "target", "url", "subject", "create_stream"}
)  # fmt: skip
"""The keys that the form has; others stay as they are."""
_FIELDS: Final = (
    "name", "source", "tables", "actions", "kind", "filter", "transform", "group_by", "retention",
    "target", "url", "subject", "deletes",
)  # fmt: skip
_PLACES: Final = {"stream": "stream", "webhook": "stream", "nats": "nats"}
_SOURCES: Final = ("postgres",)


@PAGE.get("/form/new")
async def begin(visit: Visit) -> Response:
    """Ask for source and place, then for all the rest."""
    query = visit.query
    if query.get("to") not in _PLACES or not query.get("source"):
        sources = [(each["name"], each["name"]) for each in await _sources(visit)]
        return visit.render("sinks/begin.html", sources=sources)
    if not visit.admin:
        visit.missing("Making a sink needs an admin's token.")
    visit.form = Form(
        {"source": [query["source"]], "to": [query["to"]], "action": list(_ACTIONS),
         "table": [each for each in query.get("table", "").split(",") if each]}
    )  # fmt: skip
    return await _page(visit)


@PAGE.post("/form/new")
async def create(visit: Visit) -> Response:
    """Make a sink, or show what making it does."""
    form = visit.form
    name = form["name"]
    if not name:
        form.errors["name"] = "A sink has a name: letters, digits, _ and -."
        return await _page(visit)
    if not await _save(visit, name, spec_of(form), {"If-None-Match": "*"}):
        return await _page(visit)
    if form["to"] == "webhook":
        return visit.redirect(f"consumers/form/new?stream={name}&type=webhook")
    return visit.redirect(f"sinks/{name}", done="created")


@PAGE.get("/{name}/edit")
async def edit(visit: Visit) -> Response:
    """Show a sink's form."""
    if not visit.admin:
        visit.missing("Changing a sink needs an admin's token.")
    entity = await _entity(visit)
    visit.form = _filled(entity)
    return await _page(visit, entity)


@PAGE.post("/{name}/edit")
async def save(visit: Visit) -> Response:
    """Change a sink, or show what changing it does."""
    name, form = visit.part("name"), visit.form
    entity = await _entity(visit)
    kept = {key: value for key, value in entity["spec"].items() if key not in _MANAGED}
    spec = kept | spec_of(form, entity["spec"])
    if not await _save(visit, name, spec, {"If-Match": form["version"]}):
        return await _page(visit, entity)
    return visit.redirect(f"sinks/{name}", done="saved")


async def _save(visit: Visit, name: str, spec: Row, headers: Mapping[str, str]) -> bool:
    return await entity_forms.save(
        visit, "sink", name, spec, headers, fields=_FIELDS, field_of=entity_forms.top
    )


async def _page(visit: Visit, entity: Row | None = None) -> Response:
    form, code = visit.form, visit.form.status
    source = form["source"] if entity is None else entity["spec"]["source"]
    tables, away = await tables_of(visit, source)
    known = {each["name"] for each in tables}
    chosen = form.many("table")
    if "tables" not in form:
        others = " ".join(each for each in chosen if each not in known)
        visit.form = form = form.filled(tables=others)
    streams = [
        (each["name"], f"recent ones of the stream {each['name']}")
        for each in await visit.all("/v1/sinks")
        if _has_messages_as_captured(each["spec"], source)
    ]
    return visit.render(
        "sinks/form.html", code, entity=entity, source=source, tables=tables, away=away,
        names=[(each["name"], each["name"]) for each in tables], chosen=chosen, streams=streams,
        targets=await entity_forms.targets(visit, "nats"),
        actions=[(each, each) for each in _ACTIONS],
        to=form["to"] if entity is None else entity["spec"]["type"],
    )  # fmt: skip


def _has_messages_as_captured(spec: Mapping[str, Any], source: str) -> bool:
    is_stream = spec.get("type") == "stream" and spec.get("source") == source
    return is_stream and "transform" not in spec and spec.get("kind") != "rows"


async def tables_of(visit: Visit, source: str) -> tuple[list[Row], str]:
    """Return the first tables that a source selects, and why they can't be listed, if so."""
    answer = await visit.api("GET", f"/v1/sources/{source}/tables", {"limit": 1000})
    if not answer.ok:
        return [], answer.detail
    return [each for each in answer.body["data"] if each["selected"]][:_MOST_TABLES], ""


async def _sources(visit: Visit) -> list[Row]:
    return [each for each in await visit.all("/v1/sources") if each["spec"]["type"] in _SOURCES]


async def _entity(visit: Visit) -> Row:
    name = visit.part("name")
    return await entity_of(visit, name) or visit.missing(f"There is no sink {name!r}.")


def spec_of(form: Form, old: Mapping[str, Any] | None = None) -> Row:
    """Return the keys that a filled form stands for; those at their defaults are left out."""
    spec: Row = {}
    if old is None:
        spec |= {"type": _PLACES.get(form["to"], "stream"), "source": form["source"]}
    else:
        spec |= {"type": old["type"], "source": old["source"]}
    tables = [*form.many("table"), *form["tables"].replace(",", " ").split()]
    if tables:
        spec["tables"] = list(dict.fromkeys(tables))
    actions = [each for each in form.many("action") if each]
    if set(actions) != set(_ACTIONS):
        spec["actions"] = actions
    if form["kind"] == "rows":
        spec["kind"] = "rows"
        if form["deletes"]:
            spec["deletes"] = True
    for key in ("filter", "retention", "target", "url", "subject"):
        if form[key]:
            spec[key] = form[key]
    if form["language"] in ("sql", "lua", "python") and form["transform"]:
        spec["transform"] = _transform(form, old)
    if form["group_by"]:
        spec["group_by"] = form["group_by"].replace(",", " ").split()
    for key in ("initial_backfill", "create_stream"):
        if form[key]:
            spec[key] = True
    return spec


def _transform(form: Form, old: Mapping[str, Any] | None) -> Row:
    language, code = form["language"], form.raw("transform").replace("\r\n", "\n")
    before = (old or {}).get("transform") or {}
    if language == "lua" and _code(before) == code:
        return dict(before)  # with the file that it came from, and its limits
    limits = {k: v for k, v in before.items() if k.endswith(("_ms", "_mib")) and language == "lua"}
    return {language: code if language == "lua" else code.strip(), **limits}


def _code(transform: Mapping[str, Any]) -> str:
    lua = transform.get("lua")
    found = lua.get("code", "") if isinstance(lua, Mapping) else lua
    return str(found or transform.get("sql") or transform.get("python") or "")


def _filled(entity: Row) -> Form:
    spec = entity["spec"]
    transform = spec.get("transform") or {}
    texts = {
        key: [str(spec[key])]
        for key in ("kind", "filter", "retention", "target", "url", "subject")
        if spec.get(key) is not None
    }
    flags = {
        key: ["on"] for key in ("deletes", "initial_backfill", "create_stream") if spec.get(key)
    }
    language = next((each for each in ("sql", "lua", "python") if each in transform), "")
    return Form(
        {
            **texts,
            **flags,
            "version": [f'"{entity["version"]}"'],
            "table": list(spec.get("tables") or ()),
            "action": list(spec.get("actions") or _ACTIONS),
            "language": [language],
            "transform": [_code(transform)],
            "group_by": [" ".join(spec.get("group_by") or ())],
        }
    )
