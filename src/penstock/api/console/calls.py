"""Calls of the management API from within its process: the console's only way to the product.

A call goes through the app's routing, its check of roles and its errors as a request from outside does,
with the grant of the session in place of a token. So a script can do what the console can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote, urlencode

import orjson
from starlette.types import ASGIApp, Message

from penstock.api.auth import Grant
from penstock.api.client import Client
from penstock.api.console import exact

MAX_PAGE: Final = 1000
"""The greatest `limit` of a list."""
_STATUS: Final = "/v1/status"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API answered; `body` is its JSON."""

    status: int
    body: Any
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether it is no problem."""
        return self.status < 400

    @property
    def detail(self) -> str:
        """The sentence of a problem."""
        return str(self.body.get("detail", "")) if isinstance(self.body, dict) else ""

    @property
    def errors(self) -> dict[str, str]:
        """A problem's errors, by field."""
        found = self.body.get("errors") if isinstance(self.body, dict) else None
        return {each["field"]: each["message"] for each in found or ()}


class CallError(Exception):
    """A call that a page can't do without was answered with a problem."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.detail)
        self.answer = answer


class Management:
    """The management API of `app`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._status: tuple[bytes, Any] = b"", None

    async def call(
        self,
        grant: Grant,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Return the answer to a request.

        A query's members that are None are left out; a body is JSON, or bytes as they are.
        """
        content = (
            b"" if body is None else body if isinstance(body, bytes) else exact.dumps(body).encode()
        )
        given = [(k, _text(v)) for k, v in (query or {}).items() if v is not None]
        sent = {"content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": quote(path, safe="/%").encode(),
            "root_path": "", "query_string": urlencode(given).encode(),
            "headers": [(k.lower().encode(), v.encode()) for k, v in sent.items()],
            "client": None, "server": ("penstock", 80), "state": {"client": Client()}, "grant": grant,
            "door": "console",
        }  # fmt: skip
        heads: list[Message] = []
        parts: list[bytes] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                heads.append(message)
            else:
                parts.append(message.get("body", b""))

        try:
            await self._app(scope, receive, send)
        except Exception:
            if not heads:  # else the app has answered and logged it, and raises it for a server
                raise
        answered = b"".join(parts)
        found = {k.decode("latin-1"): v.decode("latin-1") for k, v in heads[0]["headers"]}
        is_json = "json" in found.get("content-type", "")
        if path == _STATUS and is_json:
            return Answer(heads[0]["status"], self._status_of(answered), found)
        text = answered.decode()
        return Answer(heads[0]["status"], exact.loads(text) if is_json else text, found)

    def _status_of(self, text: bytes) -> Any:
        """Return the status, which no caller changes: with thousands of consumers it is megabytes.

        Most pages show something of it, and it is the same for a while. Its numbers are Penstock's own:
        they need not keep their digits.
        """
        if text != self._status[0]:
            self._status = text, orjson.loads(text)
        return self._status[1]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
