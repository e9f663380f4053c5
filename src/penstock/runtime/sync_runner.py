"""Runs the query of all syncs while the process has the source `syncs`, whose table they write."""

from __future__ import annotations

import base64
import contextlib
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import structlog
from prometheus_client.core import Metric
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock.config.settings import Config
from penstock.core.backoff import Backoff
from penstock.core.errors import PenstockError
from penstock.core.health import Failure, Part, graced
from penstock.core.monitor import Monitor, Report
from penstock.embedded.store import FOLDER
from penstock.runtime.handover import monitor_for
from penstock.runtime.runner_context import SparkSoon
from penstock.runtime.sync_state import SyncState
from penstock.spark import sync_source
from penstock.spark.reasons import query_failure
from penstock.spark.session import last_errors
from penstock.spark.settings import batch_seconds, lanes
from penstock.syncs.credentials import SecretKey, secret_key
from penstock.syncs.errors import SyncError
from penstock.syncs.setup import setup_of

_TICK_SECONDS: Final = 0.5
_DRAIN_SECONDS: Final = 20.0
_BACKOFF_SECONDS: Final = (1.0, 30.0)
_FOLDER: Final = "syncs.lanes"

log = structlog.get_logger("penstock")


class SyncRunner:
    """Runs the syncs of a configuration, which may change, in a thread.

    Nothing is started without an active sync, or while `may_run` returns False: another process has them
    then.
    """

    def __init__(self, store_url: str, spark: SparkSoon, may_run: Callable[[], bool]) -> None:
        self._store_url = store_url
        self._spark = spark
        self._may_run = may_run
        self._config: Config | None = None
        self._state = SyncState()
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._configured: Config | None = None
        self._lanes = 0
        self._number = 0
        self._acknowledged = -1
        self._was_configured = False
        self._drained = threading.Event()
        self._failure: Failure | None = None
        self._backoff = Backoff(*_BACKOFF_SECONDS)
        self._monitor: Monitor | None = None
        self._query: StreamingQuery | None = None
        self._thread = threading.Thread(target=self._main, name="syncs", daemon=True)

    # -- what others see

    def parts(self) -> list[Part]:
        """Return how the syncs are; nothing where there are none, or another process has them."""
        if self._query is None and self._failure is None:
            return []
        found = self._state.parts()
        if not self._was_configured:
            found.append(Part.of("syncs", (), starting=True))
        if (failure := self._failure) is not None:
            found.append(Part.failing("syncs", graced(failure, time.time()), failure))
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the syncs as `/status` has them."""
        return {} if self._thread.ident is None else self._state.as_json()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the syncs."""
        return iter(()) if self._thread.ident is None else self._state.collect()

    # -- what is asked of it

    def set_desired(self, config: Config) -> None:
        """Run the syncs of a configuration from now on."""
        self._config = config
        self._wake.set()
        if _has_work(config) and self._thread.ident is None and not self._stopping.is_set():
            self._thread.start()

    def stop(self) -> None:
        """Ask for an orderly end, from any thread: jobs end their page."""
        self._stopping.set()
        self._wake.set()

    def join(self) -> None:
        """Wait for the end."""
        if self._thread.ident is not None:
            self._thread.join()

    # -- its thread

    def _main(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(_TICK_SECONDS)
            self._wake.clear()
            try:
                self._turn()
            except Exception as error:
                log.exception("the syncs can't be run now; trying again")
                self._fail(error)
        self._end()

    def _turn(self) -> None:
        config = self._config
        wanted = config is not None and _has_work(config) and self._may_run()
        if self._query is not None and not wanted:
            self._end()
        elif self._query is not None:
            self._look(self._query)
            self._configure(self._spark.get())
        elif wanted and config is not None and self._spark.is_set:
            spark = self._spark.get()
            if spark is not None and not self._stopping.is_set():
                self._begin(spark, config)

    def _begin(self, spark: SparkSession, config: Config) -> None:
        self._drained.clear()
        self._configured = None
        self._monitor = monitor_for(spark, config, self._handle)
        conf = spark.sparkContext.getConf()
        records = config.records.store
        self._lanes = lanes(spark, config.spark.master, config.sharing)
        options = {
            "url": self._store_url,
            "records": self._store_url if records is None else records.get_secret_value(),
            "host": conf.get("spark.driver.host") or "127.0.0.1",
            "lanes": str(self._lanes),
            "batchseconds": str(batch_seconds(config.spark.master)),
            "monitor": self._monitor.address,
        }
        name = f"{_FOLDER} {time.time_ns()}"
        self._query = sync_source.start(spark, options, _checkpoint(config), name)
        log.info("syncs run", syncs=len(config.syncs), lanes=self._lanes)

    def _configure(self, spark: SparkSession | None) -> None:
        """Send the configuration that the query is to have, and the lanes, until it has them.

        The executors of a cluster come and go while the query runs.
        """
        config, monitor = self._config, self._monitor
        if config is None or monitor is None or spark is None:
            return
        count = lanes(spark, config.spark.master, config.sharing)
        if config is not self._configured or count != self._lanes:
            self._configured, self._lanes, self._number = config, count, self._number + 1
            self._state.set_syncs(
                {
                    str(config.sync_id(n)): (n, sync.collection_ids)
                    for n, sync in config.syncs.items()
                }
            )
        if self._acknowledged == self._number:
            return
        setup = setup_of(config, _key(config), frozenset())
        data = base64.b64encode(pickle.dumps(setup)).decode()
        command = {
            "command": "configure", "number": self._number, "setup": data, "lanes": count,
        }  # fmt: skip
        monitor.command(sync_source.NAME, command)

    def _look(self, query: StreamingQuery) -> None:
        """Note the end of a query, and begin anew after a while."""
        if query.isActive:
            return
        error = query.exception()
        self._take_down()
        self._fail(error or RuntimeError("the query of the syncs ended"))

    def _fail(self, error: Exception) -> None:
        failure = (
            Failure.by(error)
            if isinstance(error, PenstockError)
            else query_failure(error, last_errors(), retried=True)
        )
        if self._failure is None or self._failure.cause != failure.cause:
            log.error("the query of the syncs ended", code=failure.code, error=failure.text)
        self._failure = failure.lasting(self._failure, time.time())
        self._stopping.wait(self._backoff.after_failure())

    def _end(self) -> None:
        """Let jobs end their page, and end the query."""
        if self._monitor is not None and self._query is not None:
            deadline = time.monotonic() + _DRAIN_SECONDS
            while not self._drained.wait(0.1) and time.monotonic() < deadline:
                self._monitor.command(sync_source.NAME, {"command": "drain"})
                if not self._query.isActive:
                    break
        self._take_down()

    def _take_down(self) -> None:
        query, self._query = self._query, None
        monitor, self._monitor = self._monitor, None
        if query is not None:
            with contextlib.suppress(Exception):  # the JVM may be gone
                query.stop()
        if monitor is not None:
            monitor.close()
        self._acknowledged = -1

    def _handle(self, report: Report) -> Report | None:
        if "configured" in report:
            self._acknowledged = report["configured"]
            self._was_configured = True
            self._failure = None
            self._backoff.reset()
        elif "error" in report:
            failure = Failure.of(report["code"], report["error"], report["remedy"])
            self._failure = failure.lasting(self._failure, time.time())
        elif "shown" in report:
            self._state.update(report["shown"])
        elif "budgets" in report:
            self._state.budgets = report["budgets"]
            if report["drained"]:
                self._drained.set()
            elif self._acknowledged != self._number:
                self._wake.set()
        return None


def _has_work(config: Config) -> bool:
    return any(sync.status == "active" for sync in config.syncs.values())


def _key(config: Config) -> SecretKey | SyncError:
    """Return the key of the tokens that are kept, or why there is none."""
    try:
        return secret_key(FOLDER.absolute() if config.store is None else None)
    except SyncError as error:
        return error


def _checkpoint(config: Config) -> str:
    """Return a folder of this query's own: what it has done is in the store."""
    base, number = config.spark.checkpoint, str(time.time_ns())
    if "://" in base:
        return f"{base.rstrip('/')}/{_FOLDER}/{number}"
    folder = Path(base).absolute() / _FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / number)
