"""How the processes of one run communicate: captures and sinks report, and captures take commands.

The run's own process listens; the capture (a process that Spark starts beside the driver) and the
sinks (in Spark's executors, perhaps on other machines) connect to it. Messages are JSON objects over
`multiprocessing.connection`; a client without the run's key is kept out (`acceptor`). A source or
sink that is used without `penstock run` has no monitor, and reports nothing.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import orjson

from penstock.core import log as logging
from penstock.core.acceptor import Acceptor, authenticate, connect

Report = dict[str, Any]
_RETRY_SECONDS: Final = 1.0
_FLUSH_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 0.02
_BROKEN: Final = (EOFError, OSError, AuthenticationError)

Handler = Callable[[Report], Report | None]


class Monitor:
    """The run's end: hands each report to `handler`, and returns its answer where one is requested."""

    def __init__(self, handler: Handler, host: str = "127.0.0.1") -> None:
        self._handler = handler
        self._key = secrets.token_hex(16)
        self._captures: dict[Connection[Any, Any], str] = {}
        self._connections: set[Connection[Any, Any]] = set()
        self._commanding = threading.Lock()
        self._acceptor = Acceptor(host, self._serve, "monitor")
        self.address = f"{host}:{self._acceptor.port}:{self._key}"
        """Where to report: `host:port:key`, given to Spark's processes in their options."""

    def drain(self, *, leave: bool = False) -> None:
        """Command every capture to hand out nothing more and to confirm what was delivered.

        With `leave` other queries are to have their slots.
        """
        for connection in list(self._captures):
            self._send(connection, {"command": "drain", "leave": leave})

    def command(self, source: str, command: Report) -> None:
        """Send a command to a source's capture; there is no answer."""
        for connection, name in list(self._captures.items()):
            if name == source:
                self._send(connection, command)

    def _send(self, connection: Connection[Any, Any], command: Report) -> None:
        # TypeError: closed in the middle of it.
        with self._commanding, contextlib.suppress(OSError, TypeError):
            connection.send_bytes(orjson.dumps(command))

    def flush(self) -> None:
        """Wait until what has arrived is handled, for a moment at most: counts may be behind it."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        quiet = 0
        while quiet < 2 and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
            with contextlib.suppress(OSError, ValueError):  # closed in the middle of it
                quiet = 0 if wait(list(self._connections), 0) else quiet + 1

    def close(self) -> None:
        """Stop listening."""
        self._acceptor.close()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        try:
            authenticate(connection, self._key)
            self._connections.add(connection)
            while True:
                report = orjson.loads(connection.recv_bytes())
                if report.get("capture"):
                    self._captures[connection] = report["capture"]
                answer = self._handler(report)
                if report.get("answer"):
                    connection.send_bytes(orjson.dumps(answer or {}))
        except (EOFError, OSError, AuthenticationError, TypeError):
            pass  # gone, or a stranger; TypeError: closed in the middle of a read
        finally:
            self._captures.pop(connection, None)
            self._connections.discard(connection)


class Reporter:
    """A capture's or a sink's end; with no address it does nothing. A lost connection is made again."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._connection: Connection[Any, Any] | None = None
        self._lock = threading.Lock()
        self._not_before = 0.0
        if address:
            logging.configure()  # a process of a run, so it logs as the run does
            self._connection = connect(address)

    def send(self, report: Report) -> None:
        """Send a report; a run that is gone is no reason to fail."""
        if self._connection is not None:
            with contextlib.suppress(*_BROKEN):
                self._exchange(report, answered=False)

    def request(self, report: Report) -> Report:
        """Send a report and return the answer; raises `OSError` or `EOFError` if the run is gone.

        Where the connection broke meanwhile, the run may get the report twice.
        """
        if self._connection is None:
            raise EOFError("no monitor")
        return self._exchange({**report, "answer": True}, answered=True)

    def listen(self, handler: Callable[[Report], None]) -> None:
        """Call `handler` with each command from the run, in a thread of its own."""
        if self._connection is not None:
            threading.Thread(
                target=self._listen, args=(handler,), name="commands", daemon=True
            ).start()

    def _listen(self, handler: Callable[[Report], None]) -> None:
        while (connection := self._connection) is not None:
            try:
                handler(orjson.loads(connection.recv_bytes()))
            except _BROKEN:
                try:
                    with self._lock:
                        self._replace(connection)
                except _BROKEN:
                    time.sleep(_RETRY_SECONDS)

    def _exchange(self, report: Report, *, answered: bool) -> Report:
        data = orjson.dumps(report)
        with self._lock:
            connection = self._connection
            assert connection is not None  # noqa: S101 - the callers have checked
            try:
                return _exchange(connection, data, answered)
            except _BROKEN:
                return _exchange(self._replace(connection), data, answered)

    def _replace(self, broken: Connection[Any, Any]) -> Connection[Any, Any]:
        """Return a new connection in the place of `broken`; the lock is held."""
        assert self._address is not None  # noqa: S101 - there was a connection
        if self._connection is broken:
            if time.monotonic() < self._not_before:
                raise EOFError("the run does not answer")
            self._not_before = time.monotonic() + _RETRY_SECONDS
            # The old one is closed when no thread reads from it any more.
            self._connection = connect(self._address)
        assert self._connection is not None  # noqa: S101 - it is never taken away
        return self._connection


def _exchange(connection: Connection[Any, Any], data: bytes, answered: bool) -> Report:
    connection.send_bytes(data)
    answer: Report = orjson.loads(connection.recv_bytes()) if answered else {}
    return answer
