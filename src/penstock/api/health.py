"""`/healthz`, `/readyz`, `/status` and `/metrics` of `penstock run`, and its server, in a thread."""

from __future__ import annotations

import threading

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from penstock.api.server import Uvicorn, address, bind
from penstock.runtime.process_state import ProcessState
from penstock.runtime.state import RunState


def application(state: RunState | ProcessState, app: FastAPI | None = None) -> FastAPI:
    """Return `app`, or a new one, with the endpoints; all but the counts derive from its health."""
    app = app or FastAPI(title="Penstock", docs_url=None, redoc_url=None, openapi_url=None)
    registry = CollectorRegistry()
    registry.register(state)

    @app.get("/healthz", include_in_schema=False)
    def healthz() -> JSONResponse:
        ok = state.health().goes_on
        return JSONResponse({"status": "ok" if ok else "failing"}, 200 if ok else 503)

    @app.get("/readyz", include_in_schema=False)
    def readyz() -> JSONResponse:
        level = state.health().level
        return JSONResponse({"status": state.readiness}, 200 if level.serves else 503)

    @app.get("/status", include_in_schema=False)
    def status() -> JSONResponse:
        return JSONResponse(state.as_json())

    @app.get("/metrics", include_in_schema=False)
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


class Server:
    """Serves an app in a thread until `close`."""

    def __init__(self, app: FastAPI, listen: str) -> None:
        self._socket = bind(listen)
        self._server = Uvicorn(app)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="http", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """The address that is listened on, `host:port`."""
        return address(self._socket)

    def close(self) -> None:
        """Answer what is under way, then stop."""
        self._server.should_exit = True
        self._thread.join(timeout=5)
