"""Forms of entities: the spec that one gives, what it shows again, and an entity's bastion.

A secret that was typed is never sent back into a page: it is asked for again, or a mask stands there.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from starlette.responses import Response

from penstock.api.console.calls import Answer
from penstock.api.console.forms import Form
from penstock.api.console.page import ConsolePage, Visit
from penstock.config.strict import NAME_RULE, is_name
from penstock.core.redact import redact_url

BASTION: Final = ("bastion.host", "bastion.port", "bastion.user", "bastion.host_key")
_URL: Final = "url"
_NESTED: Final = re.compile(r"[.\[]")

Spec = dict[str, Any]


def filled(spec: Mapping[str, Any], keys: Sequence[str]) -> dict[str, str]:
    """Return an entity's values as the fields of a form have them: `keys`, and its bastion's."""
    found = {key: str(spec[key]) for key in keys if spec.get(key) is not None}
    for key, value in (spec.get("bastion") or {}).items():
        if f"bastion.{key}" in BASTION and value is not None:
            found[f"bastion.{key}"] = str(value)
    return found


def given(form: Form, keys: Sequence[str], old: Mapping[str, Any]) -> Spec:
    """Return the spec that a form gives: what it has no field for stays as it was."""
    spec = {**old, **{key: form[key] or None for key in keys}}
    spec["bastion"] = _bastion(form, old.get("bastion") or {})
    return {key: value for key, value in spec.items() if value is not None}


def _bastion(form: Form, old: Mapping[str, Any]) -> Spec | None:
    values: Spec = {field.partition(".")[2]: form[field] or None for field in BASTION}
    if not any(values.values()):
        return None
    port = values["port"]
    if port is not None and port.isascii() and port.isdigit():
        values["port"] = int(port)
    return {key: value for key, value in {**old, **values}.items() if value is not None}


def shown_again(form: Form, keys: Sequence[str], masks: Mapping[str, str]) -> Form:
    """Return a refused form without the secrets in it; `masks` stand in their fields."""
    known = (*keys, *BASTION, "name", "type", "version")
    values = {key: [form.raw(key)] for key in known if key in form}
    if _URL in values:
        shown = redact_url(form[_URL])
        # The query of a web address is often a key, whatever its name.
        values[_URL] = [shown.partition("?")[0] if shown.startswith("http") else shown]
    again = Form(values | {key: [text] for key, text in masks.items()})
    again.errors, again.problem, again.lost = form.errors, form.problem, form.lost
    return again


def is_named(form: Form) -> bool:
    """Return whether the name is one; if not, show that beside it."""
    if not is_name(form["name"]):
        form.errors["name"] = f"{form['name']!r} is not a name: expected {NAME_RULE}."
    return not form.errors


def tag(form: Form) -> dict[str, str]:
    """Return the header by which a change is refused where another has changed the entity since."""
    return {"If-Match": f'"{form["version"]}"'} if form["version"] else {"If-None-Match": "*"}


def refuse(form: Form, answer: Answer, keys: Sequence[str]) -> int:
    """Put a problem beside its fields, and return the status of the page that shows it."""
    form.refuse(answer, *keys, *BASTION)
    if answer.status == 412:
        form.problem = (
            "It was changed since this form was shown. Read the page again, and change that."
            if form["version"]
            else f"There is one with the name {form['name']!r} already."
        )
    return answer.status if answer.status in (409, 412) else 422


async def save(
    visit: Visit,
    kind: str,
    name: str,
    spec: Spec,
    headers: Mapping[str, str],
    *,
    fields: Sequence[str],
    field_of: Callable[[str], str],
) -> bool:
    """Write an entity; False where it was refused or is only reviewed, which its form has then.

    A change that loses something is reviewed until the entity's name was typed below what is lost.
    `field_of` returns the form's field, of `fields`, that a key of the spec comes from.
    """
    form, review, path = visit.form, visit.form["do"] != "save", f"/v1/{kind}s/{name}"
    dry = review or "If-Match" in headers  # what is new loses nothing
    answer = await visit.api("PUT", path, {"dry_run": dry}, spec, headers)
    if answer.ok and dry:
        form.review = answer.body
        if review:
            form.lost = answer.body["losses"]
        if review or not form.agrees(name, answer.body["losses"]):
            return False
        answer = await visit.api("PUT", path, None, spec, headers)
    if answer.ok:
        return True
    if answer.status == 412:
        form.problem = (
            f"There is a {kind} {name!r} already: take another name."
            if "If-None-Match" in headers
            else "Somebody else has changed it meanwhile: open it anew. Nothing was saved."
        )
        return False
    errors = [{"field": field_of(key), "message": text} for key, text in answer.errors.items()]
    form.refuse(Answer(answer.status, {"detail": answer.detail, "errors": errors}), *fields)
    return False


def top(key: str) -> str:
    """Return the first part of a key of a spec, as of `tables[0]` or `transform.sql`."""
    return _NESTED.split(key, maxsplit=1)[0]


async def targets(visit: Visit, kind: str) -> list[tuple[str, str]]:
    """Return the targets of a type, as the options of a field."""
    return [
        (each["name"], each["name"])
        for each in await visit.all("/v1/targets")
        if each["spec"]["type"] == kind
    ]


Show = Callable[..., Awaitable[Response]]


def add_deletion(page: ConsolePage, show: Show) -> None:
    """Add the page that shows what deleting an entity means, and the form that deletes it.

    `show(visit, status)` renders the page; the form has the entity's name, typed.
    """

    async def ask(visit: Visit) -> Response:
        return await show(visit, 200)

    async def delete(visit: Visit) -> Response:
        name = visit.part("name")
        if not visit.form.confirms(name):
            return await show(visit, 422)
        answer = await visit.api("DELETE", f"/v1/{page.name}/{name}")
        if not answer.ok:
            visit.form.refuse(answer)
            return await show(visit, answer.status)
        return visit.redirect(done="deleted")

    page.get("/{name}/delete")(ask)
    page.post("/{name}/delete")(delete)


def add_connection(page: ConsolePage, show: Show) -> None:
    """Add the form that tests an entity's connection, and those of its bastion's host key.

    Of these one asks the bastion for it, the other trusts what it has shown.

    `show(visit, status, tested=..., shown=...)` renders the page of the entity.
    """

    async def test(visit: Visit) -> Response:
        tested = await visit.api("POST", f"/v1/{page.name}/{visit.part('name')}/test")
        return await show(visit, 200, tested=tested)

    async def host_key(visit: Visit) -> Response:
        path = f"/v1/{page.name}/{visit.part('name')}/bastion/host-key"
        form = visit.form
        if form["host_key"]:
            body = {"host_key": form["host_key"], "replace": "replace" in form}
            answer = await visit.api("PUT", path, body=body)
            if answer.ok:
                return visit.redirect(f"{page.name}/{visit.part('name')}", done="trusted")
        else:
            answer = await visit.api("POST", path)
            if answer.ok:
                return await show(visit, 200, shown=answer.body)
        form.problem = answer.detail
        return await show(visit, answer.status)

    async def again(visit: Visit) -> Response:
        return await show(visit)

    # What was posted there is shown there: the page's live parts and links read it again.
    page.get("/{name}/test")(again)
    page.post("/{name}/test")(test)
    page.get("/{name}/host-key")(again)
    page.post("/{name}/host-key")(host_key)


async def bastion_of(visit: Visit, kind: str, entity: Mapping[str, Any]) -> Spec | None:
    """Return an entity's bastion as the API shows it, or its `problem`; None where it has none."""
    if not entity["spec"].get("bastion"):
        return None
    answer = await visit.api("GET", f"/v1/{kind}s/{entity['name']}/bastion")
    return dict(answer.body) if answer.ok else {"problem": answer.detail}
