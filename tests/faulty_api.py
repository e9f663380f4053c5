"""An API of three collections that change while they are read, and whose answers fail as APIs' do.

It runs in memory, or is `Served`: a `Turn` is what happens before, and instead of, one answer. Its clock
is the caller's time and `skew`, in seconds, so that many objects have one time.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import requests
from requests.adapters import BaseAdapter

from .loopback_api import Answer, Asked

PAGE: Final = 2
OVERLAP: Final = 5
"""Seconds; a late object comes up to 3 behind its time."""
_LIST: Final[dict[str, Any]] = {
    "data_selector": "data",
    "params": {"since": "{cursor}"},
    "incremental": {"cursor_path": "changed", "format": "unix", "order": "ascending", "overlap": "5s"},
}  # fmt: skip
PROVIDER: Final[dict[str, Any]] = {
    "type": "rest",
    "base_url": "http://127.0.0.1:1",
    "allow_private": True,
    "paginator": {"type": "offset", "limit": PAGE},
    "collections": {
        "swept": {**_LIST, "path": "swept", "deletes": {"type": "sweep"}},
        "flagged": {**_LIST, "path": "flagged", "deletes": {"type": "flag", "path": "gone"}},
        "fed": {
            **_LIST,
            "path": "fed",
            "deletes": {
                "type": "events", "path": "fed/deleted", "data_selector": "data", "key_path": "id",
                "params": {"since": "{cursor}"},
                "incremental": {**_LIST["incremental"], "cursor_path": "at"},
            },
        },
    },
}  # fmt: skip
COLLECTIONS: Final = tuple(PROVIDER["collections"])
FAULTS: Final = (
    "429", "429 later", "429 much later", "500", "400", "time-out", "cut", "hang-up", "twice",
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """An object is made, changed or brought back, or deleted; `late` seconds after its time."""

    collection: str
    id: int
    gone: bool = False
    late: int = 0


@dataclass(frozen=True)
class Turn:
    """What happens at a request: changes before it, then the fault, and the kill of who asks."""

    changes: tuple[Change, ...] = ()
    fault: str | None = None
    kill: str | None = None


class KilledError(BaseException):
    """The process that asks is killed: nothing of it goes on."""


@dataclass
class FaultyApi:
    """The API; `time` is the caller's, in Unix time."""

    time: Callable[[], float]
    skew: float = 0.0
    turns: list[Turn] = field(default_factory=list)
    objects: dict[str, dict[int, dict[str, Any]]] = field(
        default_factory=lambda: {name: {} for name in COLLECTIONS}
    )
    deleted: list[tuple[int, int]] = field(default_factory=list)
    """What the feed of `fed` has: times and ids."""
    deletes: Counter[tuple[str, int]] = field(default_factory=Counter)
    kill: str | None = None
    """Where the next kill is, if it is not at the request."""
    faults: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    frozen_at: int | None = None
    """What the header `Date` says for ever."""
    _version: int = 0

    @property
    def clock(self) -> int:
        return int(self.time() + self.skew)

    def alive(self, collection: str) -> dict[str, dict[str, Any]]:
        objects = self.objects[collection].values()
        return {str(each["id"]): each for each in objects if not each.get("gone")}

    def change(self, change: Change) -> None:
        of, id_ = self.objects[change.collection], change.id
        there = of.get(id_)
        is_alive = there is not None and not there.get("gone")
        if change.gone and not is_alive:
            return
        self._version += 1
        at = self.clock - change.late
        if there is not None:
            at = max(at, there["changed"])
        if change.gone:
            self.deletes[change.collection, id_] += 1
        if not change.gone or change.collection == "flagged":
            # One that comes back is of a later second than its delete: else nobody could tell.
            last = max((when for when, of_id in self.deleted if of_id == id_), default=-1)
            at = max(at, last + 1) if change.collection == "fed" else at
            of[id_] = {"id": id_, "changed": at, "v": self._version}
            if change.gone:
                of[id_]["gone"] = True
            return
        del of[id_]
        if change.collection == "fed":
            self.deleted.append((at, id_))

    def answer(self, path: str, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body; raises what a connection that fails does."""
        self.requests += 1
        turn = self.turns.pop(0) if self.turns else Turn()
        for change in turn.changes:
            self.change(change)
        if turn.kill == "request":
            raise KilledError
        self.kill = turn.kill or self.kill
        if turn.fault is not None:
            self.faults[turn.fault] += 1
        now = self.clock if self.frozen_at is None else self.frozen_at
        headers = {
            "Content-Type": "application/json",
            "Date": format_datetime(datetime.fromtimestamp(now, UTC), usegmt=True),
        }
        match turn.fault:
            case "429":
                return 429, headers, b"{}"
            case "429 later" | "429 much later":
                after = "3" if turn.fault == "429 later" else "120"
                return 429, headers | {"Retry-After": after}, b"{}"
            case "500" | "400":
                return int(turn.fault), headers, b'{"message": "no"}'
            case "time-out":
                raise requests.exceptions.ReadTimeout
            case "hang-up":
                raise requests.exceptions.ConnectionError
        rows = self._rows(path.strip("/"), int(query.get("since", 0)))
        at = int(query.get("offset", 0))
        page = rows[at : at + int(query.get("limit", PAGE))]
        if turn.fault == "twice" and page:
            page = [page[0], *page]
        body = json.dumps({"data": page}).encode()
        return 200, headers, body[: len(body) // 2] if turn.fault == "cut" else body

    def _rows(self, path: str, since: int) -> list[dict[str, Any]]:
        if path == "fed/deleted":
            return [{"id": i, "at": at} for at, i in sorted(self.deleted) if at >= since]
        found = [each for each in self.objects[path].values() if each["changed"] >= since]
        return sorted(found, key=lambda each: (each["changed"], each["id"]))


class Adapter(BaseAdapter):
    """Has a session's requests answered by the API, each after a while."""

    def __init__(self, api: FaultyApi, sleep: Callable[[float], None]) -> None:
        super().__init__()
        self._api: Final = api
        self._sleep: Final = sleep

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        self._sleep(0.3)
        parts = urlsplit(request.url or "")
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        status, headers, body = self._api.answer(parts.path, query)
        response = requests.Response()
        response.status_code = status
        response.headers.update(headers)
        response._content = body
        response.url = request.url or ""
        response.request = request
        return response

    def close(self) -> None:
        """Do nothing."""


class Served:
    """Answers requests over HTTP by the API, which several threads may change meanwhile."""

    def __init__(self, api: FaultyApi) -> None:
        self.api = api
        self.lock = threading.Lock()

    def answer(self, asked: Asked) -> Answer:
        """Return the answer; where a connection is to fail, one that ends before its body does."""
        with self.lock:
            try:
                status, headers, body = self.api.answer(asked.path, asked.query)
            except requests.exceptions.RequestException:
                return Answer(b"{}", cut=0)
        return Answer(body, status, headers)


def made(api: FaultyApi, changes: Iterable[Change]) -> FaultyApi:
    """Return the API after these changes."""
    for change in changes:
        api.change(change)
    return api
