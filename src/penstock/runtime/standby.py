"""Waits for a source that another process runs, with a query that is ready to take it over."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

import structlog

from penstock.config.settings import Config
from penstock.core.errors import StoreError
from penstock.runtime.desired_config import DesiredConfig
from penstock.runtime.handover import NextQuery
from penstock.runtime.lease import Lease
from penstock.runtime.runner_context import RunnerContext
from penstock.runtime.store_session import uuids_of
from penstock.spark.reasons import query_failure
from penstock.spark.store_writer import StoreTarget
from penstock.streams.claim import PATIENCE, claimed_by_another
from penstock.streams.store import Store

_LEASE_SECONDS: Final = 0.5
"""How often a standby asks for the lease."""
_WARM_SECONDS: Final = 30.0

log = structlog.get_logger("penstock")


class Standby:
    """Waits for the lease of the source `name`, until `stopping` or a change of what is desired.

    `note` is called with who has the lease meanwhile, and with None once this process has it.
    """

    def __init__(
        self,
        name: str,
        lease: Lease,
        desired: DesiredConfig,
        context: RunnerContext,
        stopping: threading.Event,
        note: Callable[[str | None], object],
    ) -> None:
        self._name = name
        self._lease = lease
        self._desired = desired
        self._context = context
        self._stopping = stopping
        self._note = note
        self._lock = threading.Lock()
        self._holder: str | None = None
        self._query: NextQuery | None = None
        self._waits = False

    def acquire(self, config: Config) -> bool:
        """Wait for the lease; return False where the end or a change came first.

        Raises `CaptureError` and `StoreError`.
        """
        began, deadline = None, time.monotonic() + PATIENCE
        try:
            while not self._stopping.is_set() and self._desired.is_wanted(config):
                try:
                    if self._lease.acquire(config.sources[self._name]):
                        if began is not None:
                            self._end_waiting(time.monotonic() - began)
                        return True
                except StoreError as error:
                    if not error.transient or began is None:
                        raise
                else:
                    if began is None:
                        began = time.monotonic()
                        self._begin_waiting(config)
                    self._wait_for(self._lease.holder or "another process", deadline)
                self._stopping.wait(_LEASE_SECONDS)
            self.discard()
            return False
        finally:
            self._waits = False

    def take(self) -> NextQuery | None:
        """Return the query that is ready, once; the caller owns it."""
        with self._lock:
            query, self._query = self._query, None
        return query

    def discard(self) -> None:
        """Close the query that no run has taken."""
        if (query := self.take()) is not None:
            with contextlib.suppress(Exception):  # the JVM may be gone
                query.close()

    def _begin_waiting(self, config: Config) -> None:
        self._waits = True
        if self._context.once:
            log.warning("waiting for another run to end", source=self._name)
        else:
            threading.Thread(
                target=self._warm, args=(config,), name=f"warm {self._name}", daemon=True
            ).start()

    def _wait_for(self, holder: str, deadline: float) -> None:
        if self._context.once:
            if time.monotonic() > deadline:
                raise claimed_by_another(self._name, holder)
        elif holder != self._holder:
            log.info(f"standing by: {holder} runs source {self._name}", source=self._name,
                     holder=holder)  # fmt: skip
            self._holder = holder
            self._note(holder)

    def _end_waiting(self, seconds: float) -> None:
        self._holder = None
        self._note(None)
        log.info("taking the source over", source=self._name, stood_by=round(seconds, 1))

    # -- in a thread

    def _warm(self, config: Config) -> None:
        """Start the query that is to take the source over: it waits for the slot, however long."""
        query = None
        try:
            query = self._started(config)
        except Exception as error:  # it is made once the source is this process's
            log.info("no query is prepared for a take-over", source=self._name,
                     error=query_failure(error).cause)  # fmt: skip
        if query is None:
            return
        is_ready, deadline = False, time.monotonic() + _WARM_SECONDS
        while self._waits and not is_ready and time.monotonic() < deadline:
            is_ready = query.wait(_LEASE_SECONDS)  # once the source is here, it is in the way
        with self._lock:
            if self._waits and self._desired.is_wanted(config):
                self._query, query = query, self._query
                if is_ready:
                    log.info("ready to take the source over", source=self._name)
        if query is not None:
            query.close()

    def _started(self, config: Config) -> NextQuery | None:
        spark = self._context.spark.get()
        self._context.spark.warm()
        with Store(self._context.store_url) as store:
            known, ids = store.source(self._name), {s.name: s.id for s in store.streams()}
            uuids = uuids_of(store, config, self._name)
        epoch = self._lease.next_epoch
        if spark is None or known is None or not ids.keys() >= config.streams.keys():
            return None
        target = StoreTarget(self._context.store_url, known.id, known.base, epoch)
        streams = {name: ids[name] for name in config.streams}
        query = NextQuery(spark, config, target, uuids, streams, ())
        try:
            query.start()
        except BaseException:
            query.close()
            raise
        return query
