"""What can be done about a problem at once: a button, a command or a statement to copy, a page."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any, Final
from urllib.parse import quote

from penstock.core.record_forms import SYNCS

# In backquotes, at the end behind `Run:`, or bare up to the end of its sentence; not the run itself,
# which is started and stopped where it runs.
_COMMAND: Final = re.compile(
    r"Run: (?P<last>penstock .+)$"
    r"|`(?P<quoted>penstock (?!run`)[^`]+)`"
    r"|\b(?P<bare>penstock (?!run\b)[a-z][\w-]*(?: [\w./:=…-]*[\w/=…-])+)"
    r"|\((?P<other>ps -[^)]+)\)"
)
# SQL up to a semicolon, the end of its sentence, or the word that goes on with another remedy. Texts,
# names and brackets are passed over as a whole.
_PIECE: Final = (
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|\((?:[^()]|\([^()]*\))*\)|[.:](?!\s|$)|[^;:.()'"]"""
)
_GOES_ON: Final = r",? (?:or|and|then)\b|,? \(or\b"
_BEGINS: Final = (
    r"(?:ALTER|CREATE|DROP) [A-Z]+ (?=\S)", r"SELECT (?=\w+\(|[^;]* FROM )", r"GRANT (?=[^;]* TO )",
)  # fmt: skip
_STATEMENT: Final = re.compile(rf"\b(?:{'|'.join(_BEGINS)})(?:(?!{_GOES_ON})(?:{_PIECE}))+;?")
_REQUEST: Final = re.compile(r"\b(GET|POST|PUT|DELETE) (/v1/[\w/.-]*\w)")
_PAGES: Final = {"source": "sources", "sink": "sinks", "consumer": "consumers", "sync": "syncs"}
_STOPPED: Final = ("paused", "disabled")
_ASKS: Final = "mass_delete"
_REFUSED: Final = "refused"


def actionable(problem: Mapping[str, Any], known: Mapping[str, Container[str]]) -> dict[str, Any]:
    """Return a problem with `commands` to copy, the `action` of a button, and the `link` to a page.

    `known` are the names that have a page of their own, by kind. The action and the link are None where
    there is none.
    """
    subject, code = problem["subject"], problem["code"]
    kind, name = _parts(subject)
    return {
        **problem,
        "commands": commands_in(problem["remedy"]),
        "action": _action(kind, name, code),
        "link": _link(kind, name, code, known),
    }


def commands_in(remedy: str) -> list[str]:
    """Return the commands, statements and requests of a remedy, in their order."""
    found: dict[int, str] = {}
    for each in _COMMAND.finditer(remedy):
        found[each.start()] = next(text for text in each.groups() if text is not None)
    for each in _STATEMENT.finditer(remedy):
        found[each.start()] = each[0].strip()
    for each in _REQUEST.finditer(remedy):
        bearer = '-H "Authorization: Bearer $PENSTOCK_TOKEN"'
        found[each.start()] = f'curl -X {each[1]} {bearer} "$PENSTOCK_URL{each[2]}"'
    return list(dict.fromkeys(found[at] for at in sorted(found)))


def _parts(subject: str) -> tuple[str, str]:
    """Return the kind and the name of a subject: `consumer orders/mail` is the consumer mail."""
    kind, _, name = subject.partition(" ")
    if kind == "consumer":
        name = name.rpartition("/")[2]
    return kind, name


def _action(kind: str, name: str, code: str) -> dict[str, str] | None:
    at = quote(name, safe="")
    path = ""
    if kind == "consumer" and code in _STOPPED:
        path = f"overview/resume/{at}"
    elif kind == "sink" and code == "paused":
        path = f"sinks/{at}/resume"
    elif kind == "backfill":
        path = f"backfills/{at}/resume"
    elif kind == "sync" and name and code not in (_ASKS, _REFUSED):
        path = f"syncs/{at}/resume"
    what = f"backfill {name}" if kind == "backfill" else name
    return {"path": path, "text": f"Resume {what}"} if path else None


def _link(
    kind: str, name: str, code: str, known: Mapping[str, Container[str]]
) -> dict[str, str] | None:
    page = _PAGES.get(kind)
    if page is not None and name in known.get(kind, ()):
        path = f"{page}/{quote(name, safe='')}"
        if kind == "sync" and code == _ASKS:
            return {"path": f"{path}/resume", "text": "Agree or not…"}
        return {"path": path, "text": f"Open {kind} {name}"}
    if kind == "syncs" or (kind, name) == ("source", SYNCS):
        return {"path": "syncs", "text": "Open syncs"}
    if kind == "backfill":
        return {"path": "backfills", "text": "Open backfills"}
    return None
