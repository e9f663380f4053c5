"""How the processes of one run talk: the capture and the sinks report, the run may ask to drain.

The run's own process listens; the capture (a process that Spark starts beside the driver) and the
sinks (in Spark's executors, perhaps on other machines) connect to it. Messages are JSON objects over
`multiprocessing.connection`, whose challenge keeps out whoever has not the run's secret. A source or
sink that is used without `penstock run` has no monitor, and says nothing.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any, Final

import orjson

from penstock import log as logging

Report = dict[str, Any]
_HANDSHAKE_SECONDS: Final = 10.0

Handler = Callable[[Report], Report | None]


class Monitor:
    """The run's end: hands each report to `handler`, and its answer back to who asked for one."""

    def __init__(self, handler: Handler, host: str = "127.0.0.1") -> None:
        self._handler = handler
        self._key = secrets.token_hex(16)
        # The challenge is made in each connection's own thread: a stranger that says nothing must
        # not keep the others waiting.
        self._listener = Listener((host, 0), backlog=128)
        self._captures: list[Connection[Any, Any]] = []
        self._closed = False
        threading.Thread(target=self._accept, name="monitor", daemon=True).start()

    @property
    def address(self) -> str:
        """Where to report: `host:port:secret`, given to Spark's processes in their options."""
        host, port = self._listener.address
        return f"{host}:{port}:{self._key}"

    def drain(self) -> None:
        """Ask every capture to hand out nothing more and to confirm what was delivered."""
        for connection in list(self._captures):
            with contextlib.suppress(OSError):
                connection.send_bytes(b'{"command":"drain"}')

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except Exception:
                if self._closed:
                    return
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        stranger = threading.Timer(_HANDSHAKE_SECONDS, connection.close)
        stranger.start()
        try:
            key = self._key.encode()
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            stranger.cancel()
            while True:
                report = orjson.loads(connection.recv_bytes())
                if report.get("capture") and connection not in self._captures:
                    self._captures.append(connection)
                answer = self._handler(report)
                if report.get("answer"):
                    connection.send_bytes(orjson.dumps(answer or {}))
        except (EOFError, OSError, AuthenticationError, TypeError):
            pass  # gone, or a stranger; TypeError: closed in the middle of a read
        finally:
            stranger.cancel()
            if connection in self._captures:
                self._captures.remove(connection)
            connection.close()


class Reporter:
    """A capture's or a sink's end; with no address it does nothing."""

    def __init__(self, address: str | None) -> None:
        self._connection: Connection[Any, Any] | None = None
        self._lock = threading.Lock()
        if address:
            logging.configure()  # a process of a run, so it logs as the run does
            host, port, key = address.rsplit(":", 2)
            self._connection = Client((host, int(port)), authkey=key.encode())

    def send(self, report: Report) -> None:
        """Send a report; a run that is gone is no reason to fail."""
        if self._connection is not None:
            with contextlib.suppress(OSError), self._lock:
                self._connection.send_bytes(orjson.dumps(report))

    def ask(self, report: Report) -> Report:
        """Send a report and return the answer; raises `OSError` or `EOFError` if the run is gone."""
        if self._connection is None:
            raise EOFError("no monitor")
        with self._lock:
            self._connection.send_bytes(orjson.dumps({**report, "answer": True}))
            answer: Report = orjson.loads(self._connection.recv_bytes())
            return answer

    def listen(self, handler: Callable[[Report], None]) -> None:
        """Call `handler` with each command from the run, in a thread of its own."""
        connection = self._connection
        if connection is None:
            return

        def loop() -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    handler(orjson.loads(connection.recv_bytes()))

        threading.Thread(target=loop, name="commands", daemon=True).start()
