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
    document, prune = _document(visit)
    answer = await visit.api("POST", "/v1/plan", {"prune": prune}, document.encode(), _YAML)
    if not answer.ok:
        return visit.render("changes/refused.html", answer.status, refused=answer)
    tag = answer.headers["etag"]
    return _planned(visit, answer.body, tag, _seal(visit, tag))


@PAGE.post("/apply")
async def apply(visit: Visit) -> Response:
    """Apply the plan that was shown: the same document, to the same state."""
    form = visit.form
    document, prune = _document(visit)
    if not hmac.compare_digest(form["seal"].encode(), _seal(visit, form["etag"]).encode()):
        return visit.render("changes/refused.html", 409, refused=None)
    headers = {**_YAML, "If-Match": form["etag"]}
    if prune:
        made = await visit.api("POST", "/v1/plan", {"prune": True}, document.encode(), _YAML)
        deletes = _deletes(made.body) if made.ok else 0
        # The apply reports a state that has moved.
        if deletes and made.headers["etag"] == form["etag"] and not form.confirms(deletes):
            return _planned(visit, made.body, form["etag"], form["seal"], 422)
    answer = await visit.api("POST", "/v1/apply", {"prune": prune}, document.encode(), headers)
    if not answer.ok:
        return visit.render("changes/refused.html", answer.status, refused=answer)
    return visit.render("changes/applied.html", applied=answer.body["applied"])


def _planned(
    visit: Visit, planned: Mapping[str, Any], tag: str, seal: str, status: int = 200
) -> Response:
    return visit.render(
        "changes/plan.html",
        status,
        lines=list(lines(planned)),
        changes=len(planned["changes"]),
        deletes=_deletes(planned),
        tag=tag,
        seal=seal,
    )


def _document(visit: Visit) -> tuple[str, bool]:
    """Return the posted document, and whether what it no longer names is deleted."""
    return visit.form.raw("document").replace("\r\n", "\n"), "prune" in visit.form


def _seal(visit: Visit, tag: str) -> str:
    """Return what only this session can have for the posted document, and for the state of `tag`."""
    document, prune = _document(visit)
    text = f"{tag} {prune} {document}".encode()
    return hmac.digest(visit.session.id.encode(), text, hashlib.sha256).hex()


def _deletes(planned: Mapping[str, Any]) -> int:
    return sum(each["action"] == "delete" for each in planned["changes"])


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
