"""Live pages: the address of a page, asked for `text/event-stream`, sends what changes of it.

A stream looks at its page as a browser does that loads it again, with the same session: one that has
ended, or has lost rights, has none in its streams. A look takes at most a sixtieth of the time. What has
changed is sent: the page's parts `data-live="SECONDS"`, and the figures of its charts. A look that fails
ends the stream, as the end of the server does, and the browser asks for it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import re
import time
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import orjson
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api.client import Client
from penstock.api.console.guard import secured

MOST: Final = 50
"""Streams of a process; one more looks once, and its browser asks again after `_LONGEST`."""
_SHARE: Final = 60  # a look takes at most a sixtieth of the time,
_LONGEST: Final = 15.0  # unless the next one were further away than so many seconds
_AGAIN: Final = 5.0  # seconds after which a browser asks again for a stream that has ended
_HEARTBEAT: Final = 15.0  # seconds of silence: a proxy ends what is silent for long
_TYPE: Final = "text/event-stream"
_LOOK: Final = [(b"hx-request", b"true"), (b"hx-request-type", b"partial")]
_OK: Final = 200
_ELSEWHERE: Final = 204  # as to the login

# Whatever is not of a template has its `<`, `>` and `"` escaped.
_LIVE: Final = re.compile(r'<(\w+)(?=[^>]*\sid="([^"]+)")([^>]*\sdata-live="([\d.]+)"[^>]*)>')
_CHART: Final = re.compile(r'\sdata-charts="([^"]+)" data-every="([\d.]+)"')


class Part(NamedTuple):
    """A live part of a page: what is in it, and after how many seconds it is looked at again."""

    id: str
    text: str
    every: float
    waits: bool
    """Whether it says what is waited for, which comes soon."""


def parts_of(page: str) -> list[Part]:
    """Return the live parts of a page."""
    found = []
    for begin in _LIVE.finditer(page):
        tag, name, attributes, every = begin.groups()
        text = page[begin.end() : _end(page, tag, begin.end())]
        found.append(Part(name, text, float(every), " data-reloads" in attributes))
    return found


def _end(page: str, tag: str, at: int) -> int:
    """Return where the element `tag` ends whose content begins at `at`."""
    depth = 1
    for each in re.compile(rf"<(/?){tag}\b").finditer(page, at):
        depth += -1 if each[1] else 1
        if depth == 0:
            return each.start()
    return len(page)


class Live:
    """The streams of the pages of `console`, its app."""

    def __init__(self, console: ASGIApp) -> None:
        self._console = console
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ending = False

    @property
    def count(self) -> int:
        """How many are open now."""
        return len(self._tasks)

    def end(self) -> None:
        """End all of them, and from now on don't let any last."""
        self._ending = True
        for task in self._tasks:
            task.cancel()

    @staticmethod
    def is_asked(scope: Scope) -> bool:
        """Return whether a request is for a stream."""
        asked = dict(scope["headers"]).get(b"accept", b"")
        return scope["method"] == "GET" and _TYPE.encode() in asked

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - of an app
        """Stream what changes of the page until its client hangs up."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - an event loop runs this
        client: Client = scope["state"]["client"]
        gone = asyncio.Event()
        client.watch(gone.set)
        lasts = not self._ending and self.count < MOST
        stream = StreamingResponse(self._events(scope, gone, lasts=lasts), media_type=_TYPE)
        stream.headers["X-Accel-Buffering"] = "no"  # nginx would send it in pieces
        secured(stream)
        self._tasks.add(task)
        try:
            await stream.stream_response(send)
        except asyncio.CancelledError:
            if not self._ending:
                raise
            task.uncancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._tasks.discard(task)
            client.watch(None)

    async def _events(
        self, scope: Scope, gone: asyncio.Event, *, lasts: bool
    ) -> AsyncIterator[bytes]:
        written = time.monotonic()
        yield b"retry: %d\n\n" % (1000 * (_AGAIN if lasts else _LONGEST))
        ids: list[str] | None = None
        sent: dict[str, int] = {}
        due: dict[str, float] = {}
        while not gone.is_set():
            began = time.monotonic()
            status, kind, page = await self._look(scope)
            if status == _ELSEWHERE:
                yield _event("reload", None)
            if status != _OK:
                return
            events = []
            parts = parts_of(page) if b"html" in kind else []
            changed = {each.id: each.text for each in parts if _differs(sent, each.id, each.text)}
            if changed or ids != [each.id for each in parts]:
                ids = [each.id for each in parts]
                events.append(_event("parts", {"ids": ids, "changed": changed}))
            for address, every in _CHART.findall(page):
                if due.get(address, began) > began:
                    continue
                due[address] = began + float(every)
                of = html.unescape(address)
                status, _, figures = await self._look({**scope, **_place(of)})
                if status != _OK:
                    return
                if _differs(sent, address, figures):
                    given = {"of": of, "figures": orjson.Fragment(figures)}
                    events.append(_event("figures", given))
            if not events and began - written >= _HEARTBEAT:
                events.append(b":\n\n")
            if events:
                written = time.monotonic()
                yield b"".join(events)
            if not (lasts and parts):
                return
            every = min(each.every for each in parts)
            longest = every if any(each.waits for each in parts) else _LONGEST
            share = _SHARE * (time.monotonic() - began)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(every, min(share, longest))):
                    await gone.wait()

    async def _look(self, scope: Scope) -> tuple[int, bytes, str]:
        """Return status, type and body of what the console answers to the stream's session."""
        headers = [each for each in scope["headers"] if each[0] != b"accept"] + _LOOK
        status, kind, body = 0, b"", b""

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, kind, body
            if message["type"] == "http.response.start":
                status = message["status"]
                kind = dict(message["headers"]).get(b"content-type", b"")
            body += message.get("body", b"")

        await self._console({**scope, "headers": headers}, receive, send)
        return status, kind, body.decode()


def _differs(sent: dict[str, int], name: str, text: str) -> bool:
    """Return whether a text is another one than was sent by this name, and note it."""
    before, sent[name] = sent.get(name), hash(text)
    return before != sent[name]


def _place(address: str) -> dict[str, Any]:
    """Return the members of a scope that have a request's address."""
    _, _, path, query, _ = urlsplit(address)
    return {"path": unquote(path), "raw_path": path.encode(), "query_string": query.encode()}


def _event(kind: str, data: Any) -> bytes:
    """Return an event; JSON has no line break."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(data))
