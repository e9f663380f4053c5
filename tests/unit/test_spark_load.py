"""Queries that start together: each has a registration of its own."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Self, cast

from tests.waits import at_once

from penstock.spark.source import PostgresChanges, load


class Session:
    """A Spark session whose `load` returns the registration that it has used.

    Threads meet between the two if they can.
    """

    def __init__(self) -> None:
        self._newest: object = None
        self._meeting = threading.Barrier(2)

    @property
    def dataSource(self) -> Self:
        return self

    readStream = dataSource  # noqa: N815 - the names of others

    def register(self, source: type[PostgresChanges]) -> None:
        assert source is PostgresChanges
        self._newest = object()
        with contextlib.suppress(threading.BrokenBarrierError):
            self._meeting.wait(0.2)

    def format(self, name: str) -> Self:
        assert name == "postgres-changes"
        return self

    def options(self, **_: str) -> Self:
        return self

    def load(self) -> object:
        return self._newest


def test_queries_that_start_together_share_no_registration() -> None:
    session = cast("Any", Session())
    one, other = at_once(*[lambda: load(session, {})] * 2)
    assert one is not other
