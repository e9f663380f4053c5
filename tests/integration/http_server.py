"""The HTTP server as a process of its own, with an app that needs no store: for what attacks it.

`python -m tests.integration.http_server '{"head_s": 1}'` prints its address; the seconds are
`Protocol`'s. `files` bounds the process's open files, `grace` the seconds that requests have when it
ends.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from penstock.api.protocol import Protocol
from penstock.api.server import Uvicorn, address, bind

from ..pipeline import NO_TLS, PATIENCE
from ..waits import await_end, await_true

TIMEOUT = 120.0
LARGE = 32 << 20


def app() -> FastAPI:
    """Return an app with a health check, and what an attack may ask for."""
    made = FastAPI()
    release = asyncio.Event()
    waiting = 0

    @made.get("/healthz")
    async def healthz() -> JSONResponse:
        return JSONResponse({"waiting": waiting})

    @made.get("/wait")
    async def wait() -> JSONResponse:
        nonlocal waiting
        waiting += 1
        await release.wait()
        return JSONResponse({})

    @made.post("/release")
    async def set_release() -> JSONResponse:
        release.set()
        return JSONResponse({})

    @made.post("/echo")
    async def echo(request: Request) -> Response:
        try:
            return Response(await request.body())
        except ClientDisconnect:
            return Response()

    @made.get("/large")
    async def large() -> Response:
        return Response(bytes(LARGE))

    return made


def main() -> None:
    """Serve until a signal comes."""
    options = json.loads(sys.argv[1])
    if files := options.pop("files", None):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    server = Uvicorn(app())
    server.config.timeout_graceful_shutdown = options.pop(
        "grace", server.config.timeout_graceful_shutdown
    )
    for name, value in options.items():
        setattr(Protocol, name, value)
    bound = bind("127.0.0.1:0")
    print(address(bound), flush=True)
    server.run([bound])


class Served:
    """The server, and a client of it."""

    def __init__(self, **options: float) -> None:
        command = [sys.executable, "-m", "tests.integration.http_server", json.dumps(options)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        url = f"http://{self.address}"
        self.client = httpx.Client(base_url=url, timeout=TIMEOUT, trust_env=False, verify=NO_TLS)
        self.client.get("/healthz")

    def connect(self) -> socket.socket:
        """Return a new connection."""
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=TIMEOUT)

    def send(self, data: bytes) -> socket.socket:
        """Send `data` over a new connection, and return that."""
        connection = self.connect()
        connection.sendall(data)
        return connection

    def until_waiting(self, count: int) -> None:
        """Wait until so many requests of `/wait` are under way."""
        await_true(
            lambda: self.client.get("/healthz").json()["waiting"] >= count,
            what=f"{count} requests wait",
        )

    @property
    def memory(self) -> int:
        """How many bytes the process has, at the most so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    @property
    def files(self) -> int:
        """How many files the process has open."""
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Onlooker:
    """A client that asks for `/healthz` again and again; `worst` is its longest wait so far.

    It has a new connection each time, or `keeps` one.
    """

    def __init__(self, served: Served, *, keeps: bool = False) -> None:
        self._served = served
        self._keeps = keeps
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self.worst = 0.0

    def _ask(self) -> None:
        url = f"http://{self._served.address}/healthz"
        headers = {} if self._keeps else {"Connection": "close"}
        try:
            with httpx.Client(
                headers=headers, timeout=TIMEOUT, trust_env=False, verify=NO_TLS
            ) as client:
                client.get(url)
                while not self._stop.wait(0.005):
                    began = time.monotonic()
                    client.get(url).raise_for_status()
                    self.worst = max(self.worst, time.monotonic() - began)
        except Exception as error:
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stop.set()
        await_end(self._thread)
        if self._error is not None:
            raise self._error


if __name__ == "__main__":
    main()
