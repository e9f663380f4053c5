"""The process of `penstock run` and `penstock relay`: signals, Spark's session, HTTP, and what runs.

Each source has a runner, and all follow the desired state (`penstock.runtime.runners`). A source of type
outbox is a `Relay`, which has a run for each of its groups, and begins it anew when the outbox's
pipelines change.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socketserver
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import structlog
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from penstock.config.settings import Config
from penstock.core import caches, garbage, startup
from penstock.core import log as logging
from penstock.core.errors import ConfigError, SparkError
from penstock.core.health import Failure, Part, run_part, worker_part
from penstock.core.self_pipe import SelfPipe
from penstock.core.startup import Step, step
from penstock.desired.feed import Feed
from penstock.desired.from_file import apply_file
from penstock.embedded.store import FOLDER, open_store
from penstock.runtime.consumer_watch import ConsumerWatch
from penstock.runtime.following import Following
from penstock.runtime.jvm import jvm_failure
from penstock.runtime.process_state import ProcessState
from penstock.runtime.runners import Runners
from penstock.spark import session
from penstock.spark.jvm import make_cache
from penstock.spark.settings import local_master
from penstock.spark.warm import start_workers
from penstock.streams.consumers.registry import Consumers
from penstock.streams.errors import EMBEDDED_DOWN
from penstock.streams.store import Store

# Each is loaded where it is needed: `--once` has no API, most files have no outbox.
if TYPE_CHECKING:
    from fastapi import FastAPI

    from penstock.api.health import Server
    from penstock.outbox.relay.relay import Relay

_TICK_SECONDS: Final = 0.5
_RESTARTED: Final = f"Penstock starts it again; {FOLDER}/store.log has why it ended."

log = structlog.get_logger("penstock")


class Service:
    """What one process runs of `config`; `store_url` is None where only relays are in it.

    `feed` is where changes of the configuration come from, None where there are none; `of_file` are the
    sources that this process's own file names.
    """

    def __init__(
        self,
        config: Config,
        store_url: str | None,
        *,
        once: bool,
        feed: Following | None = None,
        of_file: Collection[str] = (),
    ) -> None:
        self._config = config
        self._once = once
        self._stopping = threading.Event()
        self._signals: SelfPipe  # while `main` runs
        self._failure: Failure | None = None
        self._outage: Failure | None = None
        self._store_url = store_url
        self._run: Runners | None = None
        if store_url is not None:
            self._run = Runners(config, store_url, once=once, feed=feed, of_file=of_file)
        self._relays = _relays(config)
        self._consumers = ConsumerWatch()
        self._states = ProcessState(
            lambda: [
                *([] if self._run is None else self._run.states()),
                *(state for relay in self._relays for state in relay.states()),
            ],
            lambda: {relay.name: relay.as_json() for relay in self._relays},
            self._parts,
            None if store_url is None else self._consumers,
            lambda: self._run is not None and self._run.standing_by,
            None if self._run is None else self._run.syncs,
        )

    def _parts(self) -> list[Part]:
        """Return what has a health beside the states of the runs."""
        parts = [part for relay in self._relays for part in relay.parts()]
        parts += self._consumers.parts()
        if self._run is not None:
            parts += self._run.parts()
        if self._failure is not None:
            parts.append(run_part(self._failure))
        if self._outage is not None:
            parts.append(worker_part("store", self._outage, time.time()))
        return parts

    @property
    def _healthy(self) -> bool:
        return self._failure is None and (self._run is None or self._run.healthy)

    def store_outage(self, error: str | None) -> None:
        """Take in why the embedded store is away, or with None that it is back."""
        self._outage = None if error is None else Failure(EMBEDDED_DOWN, error, _RESTARTED)
        if self._run is not None:
            self._run.store_outage(error)

    def stop(self) -> None:
        """Request an orderly end, from any thread; a signal's handler must not, as it takes locks."""
        self._stopping.set()
        for part in (self._run, *self._relays):
            if part is not None:
                part.stop()

    def main(self, listen: str) -> int:
        """Run to the end and return the exit code."""
        with contextlib.ExitStack() as stack:
            self._signals = stack.enter_context(SelfPipe(self.stop))
            self._take_signals()
            server = None if self._once else self._serve(listen)
            garbage.collect_seldom()
            if server is not None:
                stack.callback(server.close)
            if self._run is not None:
                stack.callback(self._end_runners, self._run)
                self._run.prepare()
            for relay in self._relays:
                with step("outbox", relay=relay.name):
                    relay.prepare()
            if self._has_work() and (spark := self._spark()) is not None:
                try:
                    self._work(spark, server)
                finally:
                    with contextlib.suppress(Py4JError, OSError):
                        # Where a service manager ends every process at once, the JVM is gone already.
                        spark.stop()
        if not self._healthy:
            return 1
        if make_cache():
            log.info(
                "making a cache in the background; the next start is faster",
                folder=str(caches.folder()),
            )
        self._log_stopped()
        return 0

    def _has_work(self) -> bool:
        if self._stopping.is_set():
            return False
        return bool(self._relays) or (self._run is not None and self._run.goes_on)

    @staticmethod
    def _end_runners(runners: Runners) -> None:
        runners.stop()
        runners.close()

    def _log_stopped(self) -> None:
        sinks = self._states.sinks
        delivered = {name: sink.delivered for name, sink in sinks.items()}
        behind = {name: sink.backlog for name, sink in sinks.items() if sink.behind}
        counts = {"delivered": delivered} if self._run is not None else {}
        log.info("stopped", **counts, **({"backlog": behind} if behind else {}))

    def _serve(self, listen: str) -> Server:
        from penstock.api.health import Server

        return Server(self._app(), listen)

    def _app(self) -> FastAPI:
        """Return the API with the webhooks' deliveries beside it, and the process's own endpoints."""
        from penstock.api.app import Api
        from penstock.api.health import application
        from penstock.cli.api_tools import ApiTools

        app = None
        if self._store_url is not None:
            records = self._config.records.store
            app = Api(
                self._store_url,
                beside=self._beside,
                tools=ApiTools(),
                records_url=None if records is None else records.get_secret_value(),
                state=self._states.as_json,
            )
        return application(self._states, app)

    async def _beside(self, consumers: Consumers, stop: asyncio.Event) -> None:
        from penstock.push.pusher import Pusher

        await asyncio.gather(Pusher(consumers).run(stop), self._consumers.run(consumers, stop))

    def _take_signals(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._signals.notify)

    def _spark(self) -> SparkSession | None:
        """Return the session, or None where it can't start or the end was requested meanwhile."""
        # When the JVM dies, a thread of pyspark's would print a trace without a cause.
        socketserver.BaseServer.handle_error = _print_nothing  # type: ignore[assignment, method-assign]  # for the process
        try:
            spark = session.create(
                local_master(self._config.spark.master), self._config.spark.conf, step=step
            )
            self._take_signals()  # pyspark has taken SIGINT, to cancel the jobs under way
            start_workers(spark)
            return spark
        except SparkError as error:
            # A service manager's SIGTERM may have met the JVM at its start.
            if not self._stopping.wait(0.5):
                self._fail(Failure.by(error))
            return None

    def _fail(self, failure: Failure) -> None:
        self._failure = replace(failure, since=time.time())
        log.error("run failed", code=failure.code, error=failure.text)
        self.stop()

    def _work(self, spark: SparkSession, server: Server | None) -> None:
        """Run everything until the end; the session is for the caller to stop."""
        where = {} if server is None else {"listen": server.address}

        def log_ready() -> None:
            names = [] if self._run is None else self._run.names
            sources = [*names, *self._config.outboxes]
            log.info("ready", seconds=startup.seconds(), sources=sources, **where)

        for relay in self._relays:
            relay.start(spark)
        if self._run is not None:
            self._run.run(spark, log_ready)
            if not self._once or not self._run.healthy:
                self.stop()
        else:
            self._attend(log_ready)
        for relay in self._relays:
            relay.join()

    def _attend(self, log_ready: Callable[[], None]) -> None:
        """Wait for the end of what has no thread of its own here: relays alone."""
        logged = False
        while any(relay.alive for relay in self._relays) and not self._stopping.wait(_TICK_SECONDS):
            if all(relay.ready for relay in self._relays) and not logged:
                logged = True
                log_ready()
            if (failure := jvm_failure()) is not None:
                self._fail(failure)


def _relays(config: Config) -> list[Relay]:
    if not config.outboxes:
        return []
    from penstock.outbox.relay.relay import Relay

    return [Relay(name, source, config) for name, source in config.outboxes.items()]


def _print_nothing(*_: object) -> None:
    """Stand in for `socketserver`'s printing of traces."""


def _refuse_syncs(config: Config, *, once: bool) -> None:
    active = [name for name, sync in config.syncs.items() if sync.status == "active"]
    if once and active:
        raise ConfigError(
            [f"--once: sync {active[0]} is read for as long as the process runs; leave --once away, or"
             " set `status: disabled`"]
        )  # fmt: skip


def run(config: Config, *, once: bool, listen: str) -> int:
    """Run `config` until a signal, or with `once` until what is there is delivered.

    Returns the process's exit code. Raises `CaptureError`, `EmbeddedError`, `ListenError` and
    `StoreError` before anything started.
    """
    logging.configure()
    if once and config.outboxes:
        raise ConfigError(
            ["--once: an outbox is relayed for as long as the process runs; leave --once away"]
        )
    _refuse_syncs(config, once=once)
    if config.outboxes and not config.sources and (config.file is None or config.store is None):
        return Service(config, None, once=once).main(listen)  # relays alone
    if not config.sources and not config.outboxes:
        log.info("the file names no sources: running what the store has", file=config.file)
    service: Service | None = None

    def on_outage(error: str | None) -> None:
        if service is not None:
            service.store_outage(error)

    opening = Step("store", embedded=config.store is None)
    with (
        open_store(config, on_outage=on_outage) as store_url,
        contextlib.closing(Feed(store_url, config)) as feed,
    ):
        with Store.open(store_url) as store:
            if config.file is not None:
                apply_file(store, config.file)
        current = feed.current()
        _refuse_syncs(current, once=once)
        service = Service(current, store_url, once=once, feed=feed, of_file=list(config.sources))
        opening.done()
        return service.main(listen)
