"""An API on the loopback address: a function answers each request."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from .waits import await_end


@dataclass(frozen=True)
class Asked:
    """A request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    port: int = 0
    """The client's."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Answer:
    """What is sent; `cut`: the connection ends after so many bytes of the body."""

    body: Any = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None

    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # of a client that was killed
            super().handle_error(request, client_address)


class LoopbackApi:
    """Serves while it is entered; `asked` has all requests."""

    def __init__(self, answer: Callable[[Asked], Answer]) -> None:
        self.asked: list[Asked] = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                parts = urlsplit(self.path)
                query = {
                    name: values[-1]
                    for name, values in parse_qs(parts.query, keep_blank_values=True).items()
                }
                headers = {name.lower(): value for name, value in self.headers.items()}
                asked = Asked(
                    self.command, parts.path, query, headers, self.rfile.read(length),
                    self.client_address[1],
                )  # fmt: skip
                api.asked.append(asked)
                found = answer(asked)
                content = found.content()
                self.send_response(found.status)
                given = {name.lower() for name in found.headers}
                if "content-type" not in given:
                    self.send_header("Content-Type", "application/json")
                for name, value in found.headers.items():
                    self.send_header(name, value)
                if "content-length" not in given:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: found.cut])
                if found.cut is not None:
                    self.close_connection = True

            do_GET = do_POST = do_DELETE = do  # noqa: N815 - the names of others

            def log_message(self, *args: Any) -> None:
                pass

            def date_time_string(self, timestamp: float | None = None) -> str:
                return api.date or super().date_time_string(timestamp)

        self.date = ""
        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        await_end(self._thread)
        self._server.server_close()
