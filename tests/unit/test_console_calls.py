"""The console's calls of the management API."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.api.auth import Grant
from penstock.api.console import exact
from penstock.api.console.calls import Management


def test_a_status_is_read_once_and_other_answers_each_time() -> None:
    bodies: dict[str, bytes] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        answer = Response(bodies[scope["path"]], media_type="application/json")
        await answer(scope, receive, send)

    management = Management(app)

    def get(path: str) -> Any:
        return asyncio.run(management.call(Grant("ann", "viewer", None), "GET", path)).body

    bodies["/v1/status"] = bodies["/v1/streams"] = b'{"lag": 1.10}'
    first = get("/v1/status")
    assert first == {"lag": 1.1}
    assert get("/v1/status") is first
    assert get("/v1/streams") is not get("/v1/streams")
    assert exact.dumps(get("/v1/streams")) == '{"lag":1.10}'
    bodies["/v1/status"] = b'{"lag": 2}'
    assert get("/v1/status") == {"lag": 2}
