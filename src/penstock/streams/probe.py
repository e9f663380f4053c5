"""Asks the store every few seconds whether it is there: in a run that is idle no one else does."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import psycopg
from psycopg import pq

from penstock.streams.connect import CONNECT
from penstock.streams.errors import StoreError, store_error

_PAUSE_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = 1.0
_ANSWER_SECONDS: Final = 5
_STOP_SECONDS: Final = 2.0

Report = dict[str, Any]


class Probe:
    """Asks the store at `url` in a thread, over a connection of its own; a context manager.

    `on_report` gets a report of the store where an answer differs from the one before. `asked_at` is
    when the question was asked that has no answer yet.
    """

    def __init__(self, url: str, on_report: Callable[[Report], object]) -> None:
        self._url = url
        self._on_report = on_report
        self._connection: psycopg.Connection[Any] | None = None
        self._asked_at: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store probe", daemon=True)

    def asked_at(self) -> float | None:
        """Return since when the store owes an answer, None where it owes none."""
        return self._asked_at

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        code: str | None = None
        while not self._stopped.is_set():
            error = self._try()
            if error is not None:
                # Repeated on purpose: a task that has an answer meanwhile reports the store as well.
                self._on_report({"store": str(error), "code": error.code, "remedy": error.remedy})
            elif code is not None:
                self._on_report({"store": None})
            code = None if error is None else error.code
            self._stopped.wait(_PAUSE_SECONDS if error is None else _RETRY_SECONDS)
        if self._connection is not None:
            self._connection.close()

    def _try(self) -> StoreError | None:
        self._asked_at = time.time()
        try:
            if self._connection is None:
                self._connection = psycopg.connect(
                    self._url, autocommit=True,
                    **{
                        **CONNECT,
                        "connect_timeout": _ANSWER_SECONDS,
                        "application_name": "penstock probe",
                    },
                )  # fmt: skip
            self._ask(self._connection.pgconn)
        except psycopg.Error as error:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            return store_error(error, self._url)
        finally:
            self._asked_at = None
        return None

    def _ask(self, pgconn: pq.abc.PGconn) -> None:
        """Ask the least there is to ask; psycopg itself would wait for ever for the answer."""
        until = time.monotonic() + _ANSWER_SECONDS
        pgconn.send_query(b"")
        while True:
            if pgconn.is_busy():
                left = until - time.monotonic()
                if left <= 0 or not select.select([pgconn.socket], [], [], left)[0]:
                    raise psycopg.OperationalError(f"no answer for {_ANSWER_SECONDS} s")
                pgconn.consume_input()
                continue
            result = pgconn.get_result()
            if result is None:
                return
            if result.status == pq.ExecStatus.FATAL_ERROR:
                raise psycopg.errors.error_from_result(result)
