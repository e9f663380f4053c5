"""A server that speaks Stripe, in a process of its own, and a proxy through which it is Stripe."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from .loopback_api import Answer, Asked, LoopbackApi
from .waits import await_true

KEY = "sk_test_1"


@contextmanager
def localstripe() -> Iterator[httpx.Client]:
    """Start one; give a client of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "localstripe", "--port", str(port), "--from-scratch"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "HOME": "/nonexistent"},
    )  # fmt: skip
    with httpx.Client(
        base_url=f"http://127.0.0.1:{port}", auth=(KEY, ""), timeout=60, trust_env=False
    ) as client:

        def is_up() -> bool:
            assert process.poll() is None
            try:
                return client.get("/v1/customers").status_code == 200
            except httpx.TransportError:
                return False

        try:
            await_true(is_up, what="localstripe answers")
            yield client
        finally:
            process.terminate()
            process.wait(10)


@contextmanager
def proxied(stripe: httpx.Client) -> Iterator[LoopbackApi]:
    """Serve as the proxy of a network in which any address leads to `stripe`.

    Stripe lists the events of `customer.*`, newest first. localstripe knows no such type and lists the
    oldest first: here they are filtered and reversed, in one page.
    """

    def answer(asked: Asked) -> Answer:
        query = dict(asked.query)
        kind = query.pop("type", "").removesuffix("*")
        if kind:
            query["limit"] = "10000"
        login = {"authorization": asked.headers["authorization"]}
        found = stripe.get(asked.path, params=query, headers=login)
        body = found.json()
        if kind:
            assert not body["has_more"]
            body["data"] = [e for e in reversed(body["data"]) if e["type"].startswith(kind)]
        return Answer(body, found.status_code)

    with LoopbackApi(answer) as proxy:
        yield proxy
