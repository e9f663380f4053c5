"""What a browser does at the console: logs in, asks for pages, and leaves the overview open."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import quote, urlencode, urlsplit

from benchmarks import usage
from benchmarks.configuration.bed import Bed
from benchmarks.console.bed import Scale
from benchmarks.contenders import ContenderError, Running
from benchmarks.rig import say
from benchmarks.streams.bed import position

_CSRF = re.compile(rb'name="csrf" value="([^"]+)"')
_OVERVIEW = "/console/overview"
_LIVE_LOOK = {"HX-Request": "true", "HX-Request-Type": "partial"}


@dataclass(slots=True)
class Asked:
    """How long a page took each time, in ms, and how large it was at last."""

    first_ms: float
    times: list[float] = field(default_factory=list)
    size: int = 0

    @property
    def p50_ms(self) -> float:
        """The median."""
        return statistics.median(self.times)

    @property
    def p95_ms(self) -> float:
        """The time that 95 % of them did not exceed."""
        return sorted(self.times)[max(-(-95 * len(self.times) // 100) - 1, 0)]

    @property
    def max_ms(self) -> float:
        """The longest."""
        return max(self.times)


@dataclass(frozen=True, slots=True)
class Open:
    """What is used in % of a core without an open overview, and with one, and what that was sent."""

    idle: tuple[float, float]
    """Of the API's process, and of the store's Postgres."""
    live: tuple[float, float]
    parts: int
    figures: int


class Browser:
    """One connection with a cookie; a context manager. Every call raises `ContenderError`."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        self._cookie = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def log_in(self, token: str) -> None:
        """Log in with a token, by the form."""
        found = _CSRF.search(self.get("/console/login"))
        if found is None:
            raise ContenderError("the form of the login has no CSRF token")
        form = {"csrf": found[1].decode(), "token": token, "next": _OVERVIEW}
        self._ask("POST", "/console/login", urlencode(form).encode(), {
            "Content-Type": "application/x-www-form-urlencoded",
        }, 303)  # fmt: skip

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> bytes:
        """Return the body of an answer 200."""
        return self._ask("GET", path, None, headers or {}, 200)

    @contextmanager
    def stream(self, path: str) -> Iterator[Counter[bytes]]:
        """Count the events of a live page by their kind, until the end of the block."""
        counted: Counter[bytes] = Counter()
        headers = {"Cookie": self._cookie, "Accept": "text/event-stream"}
        self._connection.request("GET", path, None, headers)
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise ContenderError(f"{path}: status {answer.status}: {answer.read()[-500:]!r}")
        connected = self._connection.sock

        def count() -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                for line in answer:
                    if line.startswith(b"event: "):
                        counted[line.removeprefix(b"event: ").strip()] += 1

        reader = threading.Thread(target=count, daemon=True)
        reader.start()
        try:
            yield counted
        finally:
            alive = reader.is_alive()
            connected.shutdown(socket.SHUT_RDWR)
            reader.join()
            self._connection.close()
        if not alive:
            raise ContenderError(f"{path}: the stream has ended")

    def _ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], status: int
    ) -> bytes:
        try:
            self._connection.request(method, path, body, {"Cookie": self._cookie, **headers})
            answer = self._connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ContenderError(f"{path}: no answer: {error}") from None
        if answer.status != status:
            said = re.sub(r"<[^>]+>|\s+", " ", text.decode(errors="replace"))[-500:]
            raise ContenderError(f"{path}: status {answer.status}: {said}")
        if cookie := answer.headers["Set-Cookie"]:
            self._cookie = cookie.partition(";")[0]
        return text


@contextmanager
def browser(of: Bed, running: Running) -> Iterator[Browser]:
    """Give a browser that has logged in."""
    with Browser(running.url) as found:
        found.log_in(of.token)
        yield found


def pages(scale: Scale) -> dict[str, tuple[str, Mapping[str, str]]]:
    """Return what is asked for: a path and headers, by what it is called in the table."""
    middle, keyed = (position(n) for n in (scale.messages // 3, scale.keyed))
    many, last = "/console/streams/s0", f"c{scale.consumers - 1}"

    def by(**query: str) -> str:
        return f"{many}?{urlencode(query)}"

    found = {
        "overview": _OVERVIEW,
        "overview, chart": f"{_OVERVIEW}/charts",
        "sources": "/console/sources",
        "source": "/console/sources/shop",
        "source, tables": "/console/sources/shop/tables",
        "source, check": "/console/sources/shop/check",
        "sinks": "/console/sinks",
        "sinks, search": "/console/sinks?q=s1",
        "sinks, sort": "/console/sinks?sort=-delivered",
        "sink": "/console/sinks/s0",
        "sink, new": "/console/sinks/form/new",
        "sink, edit": "/console/sinks/s0/edit",
        "streams": "/console/streams",
        "streams, search": "/console/streams?q=s1",
        "streams, sort": "/console/streams?sort=-head",
        "messages, newest": many,
        "messages, behind a position": by(after=f"{middle.lsn}:{middle.idx}"),
        "messages, since a time": by(since="2026-11-21T11:00:00Z"),
        "messages, since a time after all": by(since="2026-11-21T12:00:00Z"),
        "messages, of a key": by(table="public.orders", key=str(scale.keyed)),
        "messages, of an action that none has": by(action="delete"),
        "messages, filter, 1 in 1,000 fits": by(filter="record.amount >= 9990"),
        "messages, filter, none fits": by(filter="record.amount > 99999"),
        "messages, tail": by(tail="1"),
        "message": f"{many}/messages/{quote(f'{keyed.lsn}:{keyed.idx}', safe=':')}",
        "consumers": "/console/consumers",
        "consumers, search": f"/console/consumers?q={last}",
        "consumers, sort": "/console/consumers?sort=-lag_messages",
        "consumers, a later page": f"/console/consumers?cursor=c{scale.consumers // 2}",
        "consumer, nothing waits": f"/console/consumers/{last}",
        "consumer, messages wait": "/console/consumers/c0",
        "consumer, all of the stream waits": "/console/consumers/s0",
        "consumer, in flight": "/console/consumers/c0/in-flight",
        "consumer, new": "/console/consumers/form/new",
        "consumer, edit": "/console/consumers/c0/edit",
        "dead letters": "/console/dead-letters",
        "dead letters, search": "/console/dead-letters?q=c1",
        "dead letters, sort": "/console/dead-letters?sort=of",
        "dead letters, list": "/console/dead-letters/list",
        "dead letters, list, of a consumer": "/console/dead-letters/list?consumer=c0",
        "dead letters, list, the newest first": "/console/dead-letters/list?sort=-id",
        "dead letters, list, with a text": "/console/dead-letters/list?text=pending",
        "dead letter": "/console/dead-letters/1",
        "backfills": "/console/backfills",
        "backfills, search": "/console/backfills?q=s1",
        "syncs": "/console/syncs",
        "sync": "/console/syncs/s0",
        "credentials": "/console/credentials",
        "targets": "/console/targets",
        "target": "/console/targets/t0",
        "changes": "/console/changes",
        "changes, the oldest first": "/console/changes?sort=at",
        "changes, search": f"/console/changes?q={last}",
        "changes, export": "/console/changes/export",
        "tokens": "/console/tokens",
    }
    paths: dict[str, tuple[str, Mapping[str, str]]] = {k: (v, {}) for k, v in found.items()}
    return {"overview, a live look": (_OVERVIEW, _LIVE_LOOK), **paths}


def ask(browsing: Browser, scale: Scale) -> dict[str, Asked]:
    """Ask for each page once, and then for all of them in turn, so many times."""
    found: dict[str, Asked] = {}
    for number in range(1 + scale.asks):
        for name, (path, headers) in pages(scale).items():
            began = time.monotonic()
            body = browsing.get(path, headers)
            taken = 1000 * (time.monotonic() - began)
            if number:
                found[name].times.append(taken)
                found[name].size = len(body)
            else:
                found[name] = Asked(taken)
    for name, asked in found.items():
        say(f"{name}: p95 {asked.p95_ms:.0f} ms, first {asked.first_ms:.0f} ms")
    return found


def leave_open(of: Bed, running: Running, browsing: Browser, seconds: float) -> Open:
    """Measure nothing, and then an open overview, for so many seconds each."""
    idle = _used(of, running, seconds)
    with browsing.stream(_OVERVIEW) as events:
        live = _used(of, running, seconds)
    found = Open(idle, live, events[b"parts"], events[b"figures"])
    say(f"open overview: {found}")
    return found


def _used(of: Bed, running: Running, seconds: float) -> tuple[float, float]:
    """Return the CPU in % of a core that is used in so many seconds."""
    pids = running.pid, of.postgres.pid or 0
    before, began = [usage.cpu_seconds(pid) for pid in pids], time.monotonic()
    time.sleep(seconds)
    taken = time.monotonic() - began
    api, store = (
        100 * (usage.cpu_seconds(pid) - then) / taken
        for pid, then in zip(pids, before, strict=True)
    )
    return api, store
