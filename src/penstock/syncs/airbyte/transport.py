"""Has Penstock make the requests of airbyte-cdk: a part of `worker`.

So that its budget, time-outs and rules about addresses hold for them; no connection is made here.
"""

import base64
import io
import socket
import types
from collections.abc import Callable
from email.message import Message
from typing import Any, Final, NoReturn

import requests
from airbyte_cdk.sources.streams.call_rate import LimiterSession
from airbyte_cdk.sources.streams.http import HttpClient
from urllib3.response import HTTPResponse

from penstock.syncs.airbyte import async_jobs, logins
from penstock.syncs.airbyte.channel import CHANNEL, is_main

_DECODED: Final = ("content-encoding", "content-length", "transfer-encoding")
_UNAUTHORIZED: Final = 401


def _nothing() -> None:
    pass


_before: Callable[[], None] = _nothing


def install() -> None:
    """Have all requests of the process be made so."""
    requests.adapters.HTTPAdapter.send = _transmit  # type: ignore[method-assign,assignment]  # for all of the process
    socket.socket.connect = _no_connection  # type: ignore[method-assign]  # as above
    socket.socket.connect_ex = _no_connection  # type: ignore[method-assign]  # as above
    HttpClient._request_session = _uncached
    logins.install(_ask)
    async_jobs.install()


def before_requests(do: Callable[[], None] | None) -> None:
    """Have something be done before each request from now on; None: nothing."""
    global _before
    _before = do or _nothing


def _ask(do: str, **fields: Any) -> dict[str, Any]:
    _before()
    return CHANNEL.ask(do, **fields)


def _transmit(_self: Any, request: requests.PreparedRequest, **_kwargs: Any) -> requests.Response:
    """Have Penstock make a request: in the place of `HTTPAdapter.send`."""
    if not is_main():
        raise requests.exceptions.ConnectionError("requests of other threads are not made")
    _before()
    body = request.body
    if body is not None and not isinstance(body, str | bytes):
        body = body.read() if hasattr(body, "read") else b"".join(body)
    sent = None if body is None else _b64(body.encode() if isinstance(body, str) else body)
    answer = _answer(request, sent)
    if answer.get("status") == _UNAUTHORIZED and (
        login := logins.another(request.headers.get("Authorization", ""))
    ):
        request.headers["Authorization"] = login
        answer = _answer(request, sent)
    if async_jobs.is_ending() and answer.get("status", 400) >= 400:
        raise OSError("a job can't be aborted")  # one try is enough
    if "failed" in answer:
        raise requests.exceptions.ConnectionError(answer["failed"], request=request)
    headers = Message()
    for name, value in answer["headers"]:
        if name.lower() not in _DECODED:
            headers[name] = value
    raw = HTTPResponse(
        body=io.BytesIO(base64.b64decode(answer["body"])),
        headers=dict(headers.items()),
        status=answer["status"],
        reason=answer["reason"],
        preload_content=False,
    )
    # Cookies are read from here.
    cookies: Any = raw
    cookies._original_response = types.SimpleNamespace(
        msg=headers, isclosed=lambda: True, close=lambda: None
    )
    return requests.adapters.HTTPAdapter.build_response(_self, request, raw)


def _answer(request: requests.PreparedRequest, body: str | None) -> dict[str, Any]:
    return CHANNEL.ask(
        "send", method=request.method, url=request.url, headers=dict(request.headers), body=body,
        ending=async_jobs.is_ending(),
    )  # fmt: skip


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _no_connection(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise OSError("this process makes no connection: requests go through the library requests")


def _uncached(self: Any) -> Any:
    # Its cache lives for an hour, as long as the process: a parent that is new would not be seen.
    return LimiterSession(api_budget=self._api_budget)
