"""Changes: the audit log, the plan of a pasted document, its apply, and the export.

A document may hold secrets, so that no page has it: it stays in the browser's own form, and the plan is
put beside it. The plan carries the state's version, which the API checks, and a seal of the document
that it was made of: what is applied is that very plan, or nothing.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response

from penstock.api.console.lists import ApiListing, Column
from penstock.api.console.page import ConsolePage, Visit
from penstock.desired.plan import field_changes
from penstock.desired.plan_text import action_lines, change_lines, lines

PAGE = ConsolePage("changes", "Changes")
_COLUMNS: Final = (
    Column("at", "When, UTC"),
    Column("who", "Who", sortable=False),
    Column("door", "By", sortable=False),
    Column("what", "What", sortable=False),
    Column("version", "Version", figure=True, sortable=False),
)
_YAML: Final = {"Content-Type": "application/yaml"}


@PAGE.get()
async def show(visit: Visit) -> Response:
    """Show the audit log, and the form of a document."""
    log = ApiListing(visit, _COLUMNS, "-at")
    await log.read(visit, "/v1/audit", q=log.q or None)
    log.rows = [{**entry, "lines": list(_lines(entry))} for entry in log.rows]
    return visit.render("changes/page.html", list=log)


@PAGE.get("/export")
async def export(visit: Visit) -> Response:
    """Download the desired state as a document."""
    answer = await visit.api("GET", "/v1/export")
    if not answer.ok:
        visit.fail(answer)
    headers = {"Content-Disposition": 'attachment; filename="penstock.yaml"'}
    return Response(answer.body, headers=headers, media_type="application/yaml")


@PAGE.post("/plan", for_viewers=True)
async def plan(visit: Visit) -> Response:
    """Show what a document would change."""
    return await _planned(visit)


@PAGE.post("/apply")
async def apply(visit: Visit) -> Response:
    """Apply the plan that was shown: the same document, to the same state."""
    form = visit.form
    seal = _seal(visit, form["etag"], form["named"])
    if not hmac.compare_digest(form["seal"].encode(), seal.encode()):
        return visit.render("changes/refused.html", 409, refused=None)
    if form["named"] and not form.confirms(form["named"]):
        return await _planned(visit)
    document, prune = _document(visit)
    headers = {**_YAML, "If-Match": form["etag"]}
    answer = await visit.api("POST", "/v1/apply", {"prune": prune}, document.encode(), headers)
    if not answer.ok:
        return visit.render("changes/refused.html", answer.status, refused=answer)
    return visit.render("changes/applied.html", applied=answer.body["applied"])


async def _planned(visit: Visit) -> Response:
    """Show the plan of the posted document, and the name to be typed where it loses something."""
    document, prune = _document(visit)
    answer = await visit.api("POST", "/v1/plan", {"prune": prune}, document.encode(), _YAML)
    if not answer.ok:
        return visit.render("changes/refused.html", answer.status, refused=answer)
    planned, tag = answer.body, answer.headers["etag"]
    losing = [each for each in planned["changes"] if each["action"] == "delete" or each["losses"]]
    named = losing[0]["name"] if losing else ""
    return visit.render(
        "changes/plan.html",
        visit.form.status,
        lines=list(lines(planned)),
        changes=len(planned["changes"]),
        named=named,
        lost=[_loss(each) for each in losing],
        tag=tag,
        seal=_seal(visit, tag, named),
    )


def _loss(change: Mapping[str, Any]) -> str:
    gone = " is deleted" if change["action"] == "delete" else ""
    losses = f": {'; '.join(change['losses'])}" if change["losses"] else ""
    return f"{change['kind']} {change['name']}{gone}{losses}"


def _document(visit: Visit) -> tuple[str, bool]:
    """Return the posted document, and whether what it no longer names is deleted."""
    return visit.form.raw("document").replace("\r\n", "\n"), "prune" in visit.form


def _seal(visit: Visit, tag: str, named: str) -> str:
    """Return what only this session can have for the posted document, in the state of `tag`.

    `named` is the name that has to be typed, empty where the plan loses nothing.
    """
    document, prune = _document(visit)
    text = f"{tag} {prune} {named} {document}".encode()
    return hmac.digest(visit.session.id.encode(), text, hashlib.sha256).hex()


def _lines(entry: Mapping[str, Any]) -> Any:
    """Return the lines of a plan that would have made a change; of an action how it was done."""
    before, after = entry["before"], entry["after"]
    if entry["version"] is None:
        return action_lines(entry["action"], entry["kind"], entry["name"], after or {})
    fields: list[dict[str, Any]] = []
    if before is not None and after is not None:
        fields = [
            {"path": f.path, "before": f.before, "after": f.after, "secret": f.secret}
            for f in field_changes(entry["kind"], before, after)
        ]
    spec = after if before is None else before
    return change_lines({**entry, "spec": spec, "fields": fields, "consequences": []})
