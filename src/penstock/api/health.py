"""`/healthz`, `/readyz`, `/status` and `/metrics` of `penstock run`, served from a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from penstock.state import State


class ListenError(Exception):
    """The address can't be listened on."""


def application(state: State, healthy: Callable[[], bool], ready: Callable[[], bool]) -> FastAPI:
    """Return the app; `healthy` and `ready` are asked at each request."""
    app = FastAPI(title="Penstock", docs_url=None, redoc_url=None)
    registry = CollectorRegistry()
    registry.register(state)

    @app.get("/healthz")
    def healthz() -> JSONResponse:
        ok = healthy()
        return JSONResponse({"status": "ok" if ok else "failing"}, 200 if ok else 503)

    @app.get("/readyz")
    def readyz() -> JSONResponse:
        ok = ready()
        return JSONResponse({"status": "ready" if ok else "not ready"}, 200 if ok else 503)

    @app.get("/status")
    def status() -> JSONResponse:
        return JSONResponse(state.as_json())

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


class Server:
    """Serves an app in a thread until `close`."""

    def __init__(self, app: FastAPI, listen: str) -> None:
        self._socket = _bind(listen)
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="http", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """The address that is listened on, `host:port`."""
        host, port = self._socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """Answer what is under way, then stop."""
        self._server.should_exit = True
        self._thread.join(timeout=5)


def _bind(listen: str) -> socket.socket:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ListenError(f"--listen {listen!r} is not host:port (as in 127.0.0.1:7380).")
    host = host.strip("[]") or "0.0.0.0"  # noqa: S104 - `:7380` asks for every address
    try:
        family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, int(port)))
        bound.listen(128)
    except OSError as error:
        raise ListenError(
            f"Can't listen on {listen}: {error.strerror or error}. Is another penstock running?"
            " Choose another address with --listen."
        ) from None
    return bound
