"""The API of a run that is a process, as a client with an admin's token uses it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from ..pipeline import Penstock
from ..waits import await_true


class Api:
    """Calls it; raises `urllib.error.HTTPError` for what is refused.

    The token may be new: the API knows it some milliseconds after it was made, and is waited for.
    """

    def __init__(self, pipeline: Penstock, token: str) -> None:
        self._pipeline = pipeline
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        self._is_known = False

    def __call__(self, method: str, path: str, body: Any = None) -> Any:
        if not self._is_known:
            await_true(self._knows_the_token, what="the API knows the token")
            self._is_known = True
        return self._call(method, path, body)

    def _knows_the_token(self) -> bool:
        try:
            self._call("GET", "/v1/streams")
        except urllib.error.HTTPError as error:
            return error.code != 401
        return True

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        url = f"http://{self._pipeline.listen}{path}"
        request = urllib.request.Request(url, data, self._headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def receive(self, consumer: str) -> list[dict[str, Any]]:
        """Receive and ack; return the messages."""
        path = f"/v1/consumers/{consumer}"
        found = self("GET", f"{path}/receive?batch_size=10&wait_for_ms=500")["data"]
        if found:
            tokens = [message["ack_token"] for message in found]
            self("POST", f"{path}/ack", {"ack_tokens": tokens})
        return list(found)
