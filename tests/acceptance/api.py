"""The API of a run that is a process, as a client with an admin's token uses it."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from ..pipeline import Penstock


class Api:
    """Calls it; raises `urllib.error.HTTPError` for what is refused."""

    def __init__(self, pipeline: Penstock, token: str) -> None:
        self._pipeline = pipeline
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}

    def __call__(self, method: str, path: str, body: Any = None) -> Any:
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
