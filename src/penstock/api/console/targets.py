"""Targets: NATS clusters and HTTP endpoints, whether they answer, and what uses them."""

from __future__ import annotations

from typing import Any, Final

from starlette.responses import Response

from penstock.api.console import entity_forms
from penstock.api.console.entity_forms import Spec
from penstock.api.console.lists import Column, Listing
from penstock.api.console.page import ConsolePage, Visit

PAGE = ConsolePage(
    "targets",
    "Targets",
    notices={
        "added": "The target is added. Test its connection.",
        "changed": "The target is changed: what uses it connects anew.",
        "deleted": "The target is deleted.",
        "trusted": "The host key is trusted. Test the connection.",
    },
)
_COLUMNS: Final = (
    Column("name", "Name"),
    Column("type", "Type"),
    Column("url", "Address"),
    Column("bastion", "Bastion"),
    Column("uses", "Used by", figure=True),
)
_USES: Final = (Column("name", "Name"), Column("kind", "Kind"), Column("type", "Type"))
_SECRETS: Final[dict[str, tuple[str, ...]]] = {
    "nats": ("password", "token", "nkey_seed"),
    "http": ("headers", "secrets"),
}
_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "nats": ("url", "user", "password", "token", "nkey_seed", "credentials_file", "tls_ca_cert",
             "tls_cert", "tls_key"),
    "http": ("url", "tls_ca_cert", "tls_cert", "tls_key"),
}  # fmt: skip
"""The keys that a form has as fields of one line; an HTTP target's headers and secrets have lines."""


@PAGE.get()
async def listed(visit: Visit) -> Response:
    """List the targets, and show the form of a new one."""
    return await _page(visit)


@PAGE.post()
async def create(visit: Visit) -> Response:
    """Add a target."""
    form = visit.form
    name, kind = form["name"], _type(form["type"])
    status = 422
    if entity_forms.is_named(form):
        answer = await visit.api(
            "PUT",
            f"/v1/targets/{name}",
            body=_spec(visit, kind, {}),
            headers=entity_forms.tag(form),
        )
        if answer.ok:
            return visit.redirect(f"targets/{name}", done="added")
        status = entity_forms.refuse(form, answer, (*_KEYS[kind], *_SECRETS[kind]))
    visit.form = entity_forms.shown_again(form, _KEYS[kind], _masks(kind, {}))
    return await _page(visit, status, kind)


@PAGE.get("/{name}")
async def show(visit: Visit) -> Response:
    """Show a target."""
    return await _target(visit)


@PAGE.get("/{name}/edit")
async def edit(visit: Visit) -> Response:
    """Show a target's form."""
    entity = await _entity(visit)
    spec = entity["spec"]
    kind = _type(spec["type"])
    masks = _masks(kind, spec)
    values = entity_forms.filled(spec, _KEYS[kind]) | masks
    visit.form = visit.form.filled(**values, version=str(entity["version"]))
    return visit.render("targets/edit.html", target=entity, type=kind, masks=masks)


@PAGE.post("/{name}/edit")
async def change(visit: Visit) -> Response:
    """Change a target."""
    form, entity = visit.form, await _entity(visit)
    spec = entity["spec"]
    kind = _type(spec["type"])
    answer = await visit.api(
        "PUT", f"/v1/targets/{entity['name']}", body=_spec(visit, kind, spec),
        headers=entity_forms.tag(form),
    )  # fmt: skip
    if answer.ok:
        return visit.redirect(f"targets/{entity['name']}", done="changed")
    status = entity_forms.refuse(form, answer, (*_KEYS[kind], *_SECRETS[kind]))
    masks = _masks(kind, spec)
    visit.form = entity_forms.shown_again(form, _KEYS[kind], masks)
    return visit.render("targets/edit.html", status, target=entity, type=kind, masks=masks)


async def _page(visit: Visit, status: int = 200, kind: str = "") -> Response:
    targets = [
        {**each, "type": each["spec"].get("type"), "url": each["spec"].get("url"),
         "bastion": _address(each["spec"].get("bastion")), "uses": each["sinks"] + each["consumers"]}
        for each in await visit.all("/v1/targets")
    ]  # fmt: skip
    found = Listing(visit, targets, _COLUMNS, search=("name", "type", "url", "bastion"))
    kind = kind or _type(visit.query.get("new", ""))
    return visit.render("targets/list.html", status, list=found, type=kind)


async def _target(visit: Visit, status: int = 200, **values: Any) -> Response:
    entity = await _entity(visit)
    values = {"tested": None, "shown": None, **values}
    uses = [
        {**each, "id": f"{each['name']} {each['kind']}"}
        for each in await visit.all(f"/v1/targets/{entity['name']}/uses")
    ]
    return visit.render(
        "targets/show.html",
        status,
        target=entity,
        list=Listing(visit, uses, _USES, search=("name", "kind", "type"), key="id"),
        bastion=await entity_forms.bastion_of(visit, "target", entity),
        **values,
    )


async def _deletion(visit: Visit, status: int = 200) -> Response:
    entity = await _entity(visit)
    uses = await visit.all(f"/v1/targets/{entity['name']}/uses")
    bastion = _address(entity["spec"].get("bastion"))
    return visit.render("targets/delete.html", status, target=entity, uses=uses, bastion=bastion)


async def _entity(visit: Visit) -> Any:
    return await visit.get(f"/v1/targets/{visit.part('name')}")


def _type(text: str) -> str:
    return "http" if text == "http" else "nats"


def _address(bastion: Spec | None) -> str | None:
    return None if not bastion else f"{bastion.get('user')}@{bastion.get('host')}"


def _masks(kind: str, spec: Spec) -> dict[str, str]:
    """Return the secret fields of a target as the API shows them, which is masked."""
    if kind == "nats":
        return {key: str(spec.get(key) or "") for key in _SECRETS[kind]}
    headers = spec.get("headers") or {}
    return {
        "headers": "\n".join(f"{name}: {value}" for name, value in headers.items()),
        "secrets": "\n".join(spec.get("secrets") or ()),
    }


def _spec(visit: Visit, kind: str, old: Spec) -> Spec:
    form = visit.form
    spec = entity_forms.given(form, _KEYS[kind], {**old, "type": kind})
    if kind == "http":
        lines = [line.strip() for line in form.raw("headers").splitlines()]
        pairs = [line.partition(":") for line in lines if line]
        spec["headers"] = {name.strip(): value.strip() for name, _, value in pairs}
        spec["secrets"] = form.raw("secrets").split()
        spec = {key: value for key, value in spec.items() if value not in ({}, [])}
    return spec


entity_forms.add_deletion(PAGE, _deletion)
entity_forms.add_connection(PAGE, _target)
