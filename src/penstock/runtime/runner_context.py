"""What the runners of a process share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import SparkSession

from penstock.config.document import Key
from penstock.config.settings import Config
from penstock.core.errors import PenstockError, StoreError
from penstock.runtime.run_log import RunLog
from penstock.spark.warm import warm


class SparkSoon:
    """The session, which starts while sources are prepared."""

    def __init__(self) -> None:
        self._there = threading.Event()
        self._warming = threading.Lock()
        self._is_warm = False
        self._session: SparkSession | None = None

    def set(self, session: SparkSession | None) -> None:
        """Give the session to all that wait for it; None: there will be none."""
        self._session = session
        self._there.set()

    def warm(self) -> None:
        """Run a first query, once, so that the next one starts fast; raises Spark's errors."""
        with self._warming:
            if not self._is_warm and (session := self.get()) is not None:
                warm(session)
            self._is_warm = True

    @property
    def is_set(self) -> bool:
        """Whether it is there, or none comes."""
        return self._there.is_set()

    def get(self) -> SparkSession | None:
        """Wait for the session and return it; None where none comes."""
        self._there.wait()
        return self._session


@dataclass(frozen=True)
class RunnerContext:
    """What the runners of a process share.

    `noticed` is called when a runner's state has changed. `refused(source, error)` is called
    where a changed configuration can't be run, and `accepted(source)` where the newest one runs.
    `remove(source, config)` drops what is left of removed entities, before a run of that, or returns why
    the run must wait; `left` returns the entities of it of which something is to be removed first.
    """

    store_url: str
    once: bool
    spark: SparkSoon
    log: RunLog
    noticed: Callable[[], object]
    refused: Callable[[str, PenstockError], object]
    accepted: Callable[[str], object]
    remove: Callable[[str, Config], StoreError | None]
    left: Callable[[str, Config], frozenset[Key]]
