"""Making and changing a consumer, step by step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response

from penstock.api.console import entity_forms
from penstock.api.console.consumers import PAGE
from penstock.api.console.forms import Form
from penstock.api.console.page import Visit
from penstock.api.console.sinks import Row, entity_of
from penstock.config.reserved import KINDS

__all__ = ["PAGE"]

_TYPES: Final = ("pull", "webhook", "nats")
_ACTIONS: Final = ("insert", "update", "delete", "read")
_NUMBERS: Final = {
    "pull": ("ack_wait_ms", "max_deliver", "max_ack_pending"),
    "webhook": (
        "ack_wait_ms", "max_deliver", "max_ack_pending", "timeout_ms", "concurrency", "batch_size",
    ),
    "nats": (),
}  # fmt: skip
_TEXTS: Final = {
    "pull": (), "webhook": ("url", "target", "path"), "nats": ("url", "target", "subject"),
}  # fmt: skip
_FLAGS: Final = {
    "pull": ("deletes",), "webhook": ("deletes", "batch", "allow_private"),
    "nats": ("deletes", "create_stream"),
}  # fmt: skip
_FIELDS: Final = (
    "name", "stream", "tables", "actions", "sql", "start", "secret", "filters",
    *_NUMBERS["webhook"], "url", "target", "path", "subject", "deletes", "batch", "allow_private",
    "create_stream",
)  # fmt: skip
_WHOLE: Final = re.compile(r"-?[0-9]{1,18}")
_AS_KEYS: Final = {"secrets": "secret", "deliver_policy": "start", "start_at": "start"}


@PAGE.get("/form/new")
async def begin(visit: Visit) -> Response:
    """Ask for stream and type, then for all the rest."""
    query = visit.query
    if query.get("type") not in _TYPES or not query.get("stream"):
        names = [each["name"] for each in await _streams(visit)]
        visit.form = Form({"stream": [query.get("stream", "")]})
        return visit.render("consumers/begin.html", streams=[(each, each) for each in names])
    if not visit.admin:
        visit.missing("Making a consumer needs an admin's token.")
    visit.form = Form({"stream": [query["stream"]], "type": [query["type"]]})
    return await _page(visit)


@PAGE.post("/form/new")
async def create(visit: Visit) -> Response:
    """Make a consumer, or show what making it does."""
    form, name = visit.form, visit.form["name"]
    if not name:
        form.errors["name"] = "A consumer has a name: letters, digits, _ and -."
        return await _page(visit)
    spec = {"type": form["type"], "stream": form["stream"], **_keys(form, form["type"])}
    start = form["start"]
    if form["type"] == "nats" and start not in ("", "all", "new"):
        spec["start_at"] = start
    elif start not in ("", "all"):
        spec["deliver_policy"] = start
    if not await _save(visit, name, spec, {"If-None-Match": "*"}):
        return await _page(visit)
    return visit.redirect(f"consumers/{name}", done="created")


@PAGE.get("/{name}/edit")
async def edit(visit: Visit) -> Response:
    """Show a consumer's form."""
    if not visit.admin:
        visit.missing("Changing a consumer needs an admin's token.")
    entity = await _entity(visit)
    visit.form = _filled(entity)
    return await _page(visit, entity)


@PAGE.post("/{name}/edit")
async def save(visit: Visit) -> Response:
    """Change a consumer, or show what changing it does."""
    name, form = visit.part("name"), visit.form
    entity = await _entity(visit)
    old = entity["spec"]
    type_ = old.get("type", "pull")
    managed = {*_NUMBERS[type_], *_TEXTS[type_], *_FLAGS[type_], "filters"}
    spec = {key: value for key, value in old.items() if key not in managed} | _keys(form, type_)
    others = {
        k: v for k, v in (old.get("filters") or {}).items() if k in ("provider", "resource_id")
    }
    if others:
        spec["filters"] = {**others, **spec.get("filters", {})}
    if not await _save(visit, name, spec, {"If-Match": form["version"]}):
        return await _page(visit, entity)
    return visit.redirect(f"consumers/{name}", done="saved")


async def _save(visit: Visit, name: str, spec: Row, headers: Mapping[str, str]) -> bool:
    return await entity_forms.save(
        visit, "consumer", name, spec, headers, fields=_FIELDS, field_of=_field
    )


def _field(key: str) -> str:
    """Return the form's field of a key of the spec."""
    first, _, rest = key.partition(".")
    if first == "filters" and rest:
        name = rest.partition("[")[0]
        return {"table": "tables", "action": "actions", "collection_id": "collections"}.get(
            name, name
        )
    return _AS_KEYS.get(entity_forms.top(key), entity_forms.top(key))


async def _page(visit: Visit, entity: Row | None = None) -> Response:
    form = visit.form
    spec = {} if entity is None else entity["spec"]
    stream, type_ = spec.get("stream") or form["stream"], spec.get("type") or form["type"] or "pull"
    sink = await entity_of(visit, stream)
    of = {} if sink is None else sink["spec"]
    kind = {"webhook": "http", "nats": "nats"}.get(type_)
    targets = await entity_forms.targets(visit, kind) if kind else []
    collections = [
        (each["id"], f"{each['id']} ({sync['name']})")
        for sync in (await visit.all("/v1/syncs") if sink is None else ())
        for each in sync["collections"]
    ]
    return visit.render(
        "consumers/form.html", form.status, entity=entity, stream=stream, type=type_, targets=targets,
        collections=list(dict(collections).items()), actions=[(each, each) for each in _ACTIONS],
        source=of.get("source", ""), tables=" ".join(of.get("tables") or ()),
        rows=of.get("kind", KINDS.get(stream)) == "rows", numbers=_NUMBERS[type_],
    )  # fmt: skip


async def _streams(visit: Visit) -> list[Row]:
    """Return the streams that there are, and those that a run makes as soon as it can."""
    found = {each["name"]: each for each in await visit.all("/v1/streams")}
    for sink in await visit.all("/v1/sinks"):
        if sink["spec"].get("type") == "stream":
            found.setdefault(sink["name"], sink)
    if await visit.all("/v1/syncs"):
        found = {kind: {"name": kind} for kind in KINDS} | found
    return [found[name] for name in sorted(found)]


async def _entity(visit: Visit) -> Row:
    name = visit.part("name")
    found = await entity_of(visit, name, "consumers")
    return found or visit.missing(
        f"There is no consumer {name!r} that can be changed; a stream's own group has the settings of"
        " its sink."
    )


def _keys(form: Form, type_: str) -> Row:
    """Return the keys that a filled form stands for; those at their defaults are left out."""
    spec: Row = {}
    if filters := filters_of(form):
        spec["filters"] = filters
    for key in _NUMBERS[type_]:
        text = form[key]
        if text:
            # What is no number is refused by the API, in its own words.
            spec[key] = int(text) if _WHOLE.fullmatch(text) else text
    spec |= {key: form[key] for key in _TEXTS[type_] if form[key]}
    spec |= {key: True for key in _FLAGS[type_] if form[key]}
    if type_ == "webhook" and form["secret"]:
        spec["secrets"] = [form["secret"]]
    return spec


def filters_of(form: Form) -> Row:
    """Return the filters that a filled form stands for."""
    filters: Row = {}
    lists = {"table": form["tables"].replace(",", " ").split(), "action": form.many("action"),
             "collection_id": form.many("collection")}  # fmt: skip
    for key, names in lists.items():
        if names and set(names) != set(_ACTIONS):
            filters[key] = names
    if form["sql"]:
        filters["sql"] = form["sql"]
    return filters


def _filled(entity: Row) -> Form:
    spec = entity["spec"]
    type_ = spec.get("type", "pull")
    filters: Mapping[str, Any] = spec.get("filters") or {}
    texts = {
        k: [str(spec[k])] for k in (*_NUMBERS[type_], *_TEXTS[type_]) if spec.get(k) is not None
    }
    return Form(
        {
            **texts,
            **{key: ["on"] for key in _FLAGS[type_] if spec.get(key)},
            "version": [f'"{entity["version"]}"'],
            "tables": [" ".join(_named(filters, "table"))],
            "action": _named(filters, "action"),
            "collection": _named(filters, "collection_id"),
            "sql": [filters.get("sql") or ""],
        }
    )


def _named(filters: Mapping[str, Any], key: str) -> list[str]:
    value = filters.get(key) or []
    names = [value] if isinstance(value, str) else list(value)
    return [each for each in names if each != "*"]
