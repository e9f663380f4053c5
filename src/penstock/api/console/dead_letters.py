"""Dead letters: by sink, consumer and cause; look at them, deliver them again, delete them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import Response

from penstock.api.console import exact
from penstock.api.console.consumers import served
from penstock.api.console.lists import ApiListing, Column, Listing
from penstock.api.console.page import ConsolePage, Visit

PAGE = ConsolePage(
    "dead-letters",
    "Dead letters",
    notices={
        "replayed": "It is delivered again. Should it fail once more, it is a dead letter again.",
        "purged": "It is deleted.",
    },
)
AT_ONCE: Final = 20
"""How many are delivered again in a round, so that the progress is seen."""
_FAILURES: Final = 20
"""How many failures of a replay are listed."""
_SELECTION: Final = ("sink", "consumer", "code", "text")
_COLUMNS: Final = (
    Column("of", "Of"),
    Column("code", "Cause"),
    Column("waiting", "To be replayed", figure=True),
    Column("replayed", "Replayed", figure=True),
    Column("first_at", "First"),
    Column("last_at", "Last"),
    Column("reason", "Newest reason", sortable=False),
)
_LETTERS: Final = (
    Column("id", "Number"),
    Column("of", "Of", sortable=False),
    Column("code", "Cause", sortable=False),
    Column("reason", "Reason", sortable=False),
    Column("deliver_count", "Attempts", figure=True, sortable=False),
    Column("at", "At (UTC)", sortable=False),
    Column("replayed_at", "Replayed", sortable=False),
)
Row = dict[str, Any]


@PAGE.get()
async def causes(visit: Visit) -> Response:
    """Show how many there are, by sink, consumer and cause."""
    rows = [
        {
            **each,
            "of": each["sink"] or each["consumer"],
            "id": f"{each['sink']} {each['consumer']} {each['code']}",
            "url": _url("list", _chosen(each)),
            "whole": _url("list", {**_chosen(each), "code": ""}),
        }
        for each in await visit.all("/v1/dead-letter-causes")
    ]
    found = Listing(
        visit, rows, _COLUMNS, search=("of", "code", "reason"), sort="-waiting", key="id"
    )
    waiting = sum(each["waiting"] for each in rows)
    return visit.render("dead_letters/causes.html", list=found, waiting=waiting)


@PAGE.get("/list")
async def listed(visit: Visit) -> Response:
    """List those that fit."""
    chosen, query = _chosen(visit.query), visit.query
    state = query.get("state", "waiting")
    replayed = {"waiting": "false", "replayed": "true"}.get(state)
    found = ApiListing(visit, _LETTERS)
    await found.read(visit, "/v1/dead-letters", **_sent(chosen), replayed=replayed)
    counts = await _count(visit, chosen)
    return visit.render(
        "dead_letters/list.html",
        chosen=chosen,
        state=state,
        about=_about(chosen),
        list=found,
        counts=counts,
        replay=_url("replay", chosen),
        purge=_url("purge", chosen),
        states=("waiting", "replayed", "all"),
    )


@PAGE.get("/replay")
async def ask_replay(visit: Visit) -> Response:
    """Show how many would be delivered again."""
    return await _replay_page(visit)


@PAGE.post("/replay")
async def replay(visit: Visit) -> Response:
    """Deliver a round of them again, and show how far that is."""
    form, chosen = visit.form, _chosen(visit.query)
    numbers = {name: _number(form[name]) for name in ("through", "after", "total", "done")}
    body: Row = {**_sent(chosen), "after": numbers["after"], "limit": AT_ONCE}
    if numbers["through"]:
        body["through"] = numbers["through"]
    answer = await visit.api("POST", "/v1/replay-dead-letters", body=body)
    if not answer.ok:
        form.refuse(answer)
        return await _replay_page(visit, answer.status)
    found = answer.body
    failed = [each["detail"] for each in found["failed"]]
    seen = [text for text in form.many("failure") if text]
    listed = list(dict.fromkeys([*seen, *failed]))
    return visit.render(
        "dead_letters/progress.html",
        about=_about(chosen),
        action=_url("replay", chosen),
        back=_url("list", chosen),
        left=found["left"],
        fields={
            "through": numbers["through"],
            "after": found["last"] or numbers["after"],
            "total": numbers["total"],
            "done": numbers["done"] + found["replayed"],
            "failed": _number(form["failed"]) + len(failed),
            "cut": int(len(listed) > _FAILURES or _number(form["cut"]) > 0),
        },
        failures=listed[:_FAILURES],
    )


@PAGE.get("/purge")
async def ask_purge(visit: Visit) -> Response:
    """Show how many would be lost."""
    return await _purge_page(visit)


@PAGE.post("/purge")
async def purge(visit: Visit) -> Response:
    """Delete those that were counted."""
    chosen, form = _chosen(visit.query), visit.form
    if not form.confirms(_name(chosen)):
        return await _purge_page(visit, 422)
    body: Row = _sent(chosen)
    if through := _number(visit.query.get("through", "")):
        body["through"] = through
    answer = await visit.api("POST", "/v1/drop-dead-letters", body=body)
    if not answer.ok:
        form.refuse(answer)
        return await _purge_page(visit, answer.status)
    return visit.render("dead_letters/purged.html", about=_about(chosen), answer=answer.body)


@PAGE.get("/{id}")
async def show(visit: Visit) -> Response:
    """Show one, with its message."""
    return await _letter_page(visit)


@PAGE.post("/{id}/replay")
async def replay_one(visit: Visit) -> Response:
    """Deliver one again."""
    answer = await visit.api("POST", f"/v1/dead-letters/{_id(visit)}/replay")
    if not answer.ok:
        visit.form.refuse(answer)
        return await _letter_page(visit, answer.status)
    return visit.redirect(f"dead-letters/{_id(visit)}", done="replayed")


@PAGE.get("/{id}/purge")
async def ask_purge_one(visit: Visit) -> Response:
    """Show what would be lost."""
    return visit.render("dead_letters/purge_one.html", letter=await _letter(visit))


@PAGE.post("/{id}/purge")
async def purge_one(visit: Visit) -> Response:
    """Delete one whose number was typed."""
    letter = await _letter(visit)
    if not visit.form.confirms(letter["id"]):
        return visit.render("dead_letters/purge_one.html", 422, letter=letter)
    answer = await visit.api("DELETE", f"/v1/dead-letters/{_id(visit)}")
    if not answer.ok:
        visit.fail(answer)
    return visit.redirect(done="purged")


async def _letter_page(visit: Visit, status: int = 200) -> Response:
    letter = await _letter(visit)
    message: Any = letter["message"]
    place = None
    try:
        message = exact.loads(message)
    except ValueError:
        pass  # a transform may have made any text
    else:
        place = _place(message)
    stream = None
    if letter["consumer"] is not None:
        consumer = await served(visit, letter["consumer"])
        stream = None if consumer is None else consumer["stream"]
    of = {"sink": letter["sink"], "consumer": letter["consumer"], "code": letter["code"]}
    return visit.render(
        "dead_letters/letter.html", status, letter=letter, message=message, place=place,
        stream=stream, text=isinstance(message, str), like=_url("list", _chosen(of)),
    )  # fmt: skip


async def _letter(visit: Visit) -> Row:
    found: Row = await visit.get(f"/v1/dead-letters/{_id(visit)}")
    return found


def _id(visit: Visit) -> str:
    number = visit.part("id")
    if not number.isascii() or not number.isdigit() or len(number) > 18:
        visit.missing(f"There is no dead letter {number}.")
    return number


def _place(message: Any) -> str | None:
    """Return the position of a message that is stored as consumers get it."""
    metadata = message.get("metadata") if isinstance(message, dict) else None
    if not isinstance(metadata, dict):
        return None
    at = metadata.get("commit_lsn"), metadata.get("commit_idx")
    return f"{at[0]}:{at[1]}" if all(isinstance(each, int) for each in at) else None


async def _replay_page(visit: Visit, status: int = 200) -> Response:
    chosen = _chosen(visit.query)
    return visit.render(
        "dead_letters/replay.html", status, about=_about(chosen), back=_url("list", chosen),
        action=_url("replay", chosen), counts=await _count(visit, chosen),
    )  # fmt: skip


async def _purge_page(visit: Visit, status: int = 200) -> Response:
    chosen = _chosen(visit.query)
    through = _number(visit.query.get("through", ""))
    counts = await _count(visit, chosen)
    path = _url("purge", {**chosen, "through": str(through or counts["last_id"])})
    return visit.render(
        "dead_letters/purge.html", status, about=_about(chosen), name=_name(chosen),
        back=_url("list", chosen).removeprefix("/console/"), counts=counts,
        action=path.removeprefix("/console/"),
    )  # fmt: skip


async def _count(visit: Visit, chosen: Mapping[str, str]) -> Row:
    """Return how many fit: those to be replayed, those that were, and the last one's number."""
    rows = await visit.all("/v1/dead-letter-causes", **_sent(chosen))
    return {
        "waiting": sum(each["waiting"] for each in rows),
        "replayed": sum(each["replayed"] for each in rows),
        "last_id": max((each["last_id"] for each in rows), default=0),
    }


def _chosen(query: Mapping[str, Any]) -> dict[str, str]:
    """Return what dead letters shall fit, with an empty text where nothing is asked."""
    return {name: str(query.get(name) or "").strip() for name in _SELECTION}


def _sent(chosen: Mapping[str, str]) -> Row:
    return {name: value for name, value in chosen.items() if value}


def _name(chosen: Mapping[str, str]) -> str:
    """Return the name that is typed before they are deleted: the narrowest that there is."""
    return next((chosen[key] for key in ("sink", "consumer", "code", "text") if chosen[key]), "")


def _about(chosen: Mapping[str, str]) -> str:
    """Return in words which they are."""
    parts = [f"of {key} {chosen[key]}" for key in ("sink", "consumer") if chosen[key]]
    parts += [f"with the cause {chosen['code']}"] if chosen["code"] else []
    parts += [f"that have “{chosen['text']}”"] if chosen["text"] else []
    return " ".join(parts)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else 0


def _url(path: str, query: Mapping[str, str]) -> str:
    given = urlencode(_sent(query))
    return f"/console/dead-letters/{path}" + (f"?{given}" if given else "")
