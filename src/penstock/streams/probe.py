"""Asks the store every few seconds whether it is there: an idle run has no other reason to ask."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import psycopg
from psycopg import pq

from penstock.core.connect import Connection, connect
from penstock.core.errors import StoreError
from penstock.streams.errors import store_error

_PAUSE_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = 1.0
_ANSWER_SECONDS: Final = 3
_STOP_SECONDS: Final = 2.0

Report = dict[str, Any]


class Probe:
    """Asks the store at `url` in a thread, over a connection of its own; a context manager.

    `on_report` gets a report of the store when it fails, again after each try, and when it is back.
    """

    def __init__(self, url: str, on_report: Callable[[Report], object]) -> None:
        self._url = url
        self._on_report = on_report
        self._connection: Connection | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store probe", daemon=True)

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        failing_since: float | None = None
        while not self._stopped.is_set():
            asked_at = time.time()
            try:
                self._ask()
            except StoreError as error:
                failing_since = failing_since or asked_at
                # Repeated on purpose: a task that has an answer meanwhile reports the store as well.
                self._on_report(
                    {
                        "store": str(error), "code": error.code, "remedy": error.remedy,
                        "since": failing_since,
                    }
                )  # fmt: skip
                self._stopped.wait(_RETRY_SECONDS)
            else:
                if failing_since is not None:
                    failing_since = None
                    self._on_report({"store": None})
                self._stopped.wait(_PAUSE_SECONDS)
        if self._connection is not None:
            self._connection.close()

    def _ask(self) -> None:
        """Ask once, over the connection there is or a new one; raises `StoreError`."""
        try:
            if self._connection is None:
                self._connection = connect(
                    self._url, application_name="penstock probe", connect_timeout=_ANSWER_SECONDS
                )
            _exchange(self._connection.pgconn)
        except (psycopg.Error, TimeoutError) as error:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if isinstance(error, TimeoutError | psycopg.errors.ConnectionTimeout):
                raise _no_answer() from None
            raise store_error(error, self._url) from None


def _exchange(pgconn: pq.abc.PGconn) -> None:
    """Ask the least there is to ask; psycopg itself would wait for ever for the answer."""
    until = time.monotonic() + _ANSWER_SECONDS
    poll = select.poll()  # `select` takes no descriptor above 1,023, which a process may have
    poll.register(pgconn.socket, select.POLLIN)
    pgconn.send_query(b"")
    while True:
        if pgconn.is_busy():
            if not poll.poll(max(0.0, 1000 * (until - time.monotonic()))):
                raise TimeoutError
            pgconn.consume_input()
            continue
        result = pgconn.get_result()
        if result is None:
            return
        if result.status == pq.ExecStatus.FATAL_ERROR:
            raise psycopg.errors.error_from_result(result)


def _no_answer() -> StoreError:
    return StoreError(
        "no_answer",
        f"The store has not answered for {_ANSWER_SECONDS} s.",
        remedy="See whether its server is stopped or overloaded, and whether the network is there.",
        transient=True,
    )
