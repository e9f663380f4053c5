"""`penstock demo`: servers, shop, fake API, pipeline and readers put together, compared, taken down."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psycopg
from rich.console import Console

from penstock.core.errors import EmbeddedError
from penstock.demo.background import Background
from penstock.demo.config import CONFIG, PipelineCommand, penstock_command, sync_of
from penstock.demo.consumer import Consumer
from penstock.demo.customers import FIRST, CustomerWriter
from penstock.demo.errors import DemoError
from penstock.demo.fake_stripe import COLLECTION, FakeStripe, FakeStripeServer
from penstock.demo.ledger import Change, Ledger, Result
from penstock.demo.shop import TABLES, Writer, create_tables, open_shop, write_first
from penstock.demo.signals import signals
from penstock.demo.view import View
from penstock.demo.workers import COUNT, RECORDS, STREAM, Worker, add_entities, is_ready
from penstock.embedded.handles import JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.embedded.process import GuardedProcess, free_port
from penstock.streams.store import Store

_READY_TIMEOUT = 240.0
_QUIET = 15.0  # seconds without a delivery after which what is outstanding counts as lost
_STOP_PATIENCE = 30.0
_REFRESH = 0.25
_LATE = 3.0  # seconds that the API's customers change at least
_LOG_TAIL = 2000

JETSTREAM = "JetStream"
WORKERS = f"{COUNT} workers"
API_EVENTS = "API events"
API_RECORDS = "API records"


def run(
    duration: float,
    rate: int,
    as_json: bool,
    *,
    pipeline: PipelineCommand = penstock_command,
    quiet: float = _QUIET,
) -> int:
    """Run the demo for `duration` seconds at `rate` row changes a second; return the exit code.

    An infinite `duration` ends with a signal alone. The code is 1 if anything was lost, out of order or
    never committed, or if a part failed. SIGINT and SIGTERM end the writing early; the comparison still
    takes place. With `as_json` all else goes to standard error, and standard output has the one JSON
    object. `quiet` is how long nothing may arrive before what is outstanding counts as lost.
    """
    view = View(Console(stderr=as_json))
    stop = threading.Event()
    try:
        with signals(stop), contextlib.ExitStack() as stack:
            # Entered first, so left last: everything of the demo stands in this folder.
            folder = Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="penstock-demo-", ignore_cleanup_errors=True)
                )
            )
            stack.callback(view.close)
            demo = _Demo(folder, view, stop, stack, rate)
            if not demo.start(pipeline):
                view.step("stopped before anything was written")
                return 130
            demo.write(duration)
            demo.finish(quiet)
            results = demo.results()
    except (DemoError, EmbeddedError, psycopg.Error, httpx.HTTPError) as error:
        view.fail(str(error))
        return 1
    view.summary(results)
    if as_json:
        named = {"stream": WORKERS, "events": API_EVENTS, "records": API_RECORDS}
        ways = {name: results[way].as_dict() for name, way in named.items() if way in results}
        body = {**results[JETSTREAM].as_dict(), **ways}
        print(json.dumps(body), flush=True)  # noqa: T201 - the command's output
    return 0 if all(result.good for result in results.values()) else 1


class _Demo:
    """The parts of one demo; `stack` takes down what was started, last first."""

    def __init__(
        self,
        folder: Path,
        view: View,
        stop: threading.Event,
        stack: contextlib.ExitStack,
        rate: int,
    ) -> None:
        self.ledgers = {
            JETSTREAM: Ledger(TABLES),
            WORKERS: Ledger(TABLES),
            API_EVENTS: Ledger([COLLECTION]),
            API_RECORDS: Ledger([COLLECTION], newest_only=True),
        }
        self._ways = list(self.ledgers)
        self._folder = folder
        self._view = view
        self._stop = stop
        self._stack = stack
        self._rate = rate
        self._servers: dict[str, EmbeddedPostgres | EmbeddedNats] = {}
        self._writers: list[Writer] = []
        self._workers: list[Worker] = []  # of the tables' stream
        self._readers: list[Worker] = []  # these, and the one of the API's records

    def _committed(self, changes: list[Change], at: float) -> None:
        self.ledgers[JETSTREAM].committed(changes, at)
        self.ledgers[WORKERS].committed(changes, at)

    def _changed(self, changes: list[Change], at: float) -> None:
        self.ledgers[API_EVENTS].committed(changes, at)
        self.ledgers[API_RECORDS].committed(changes, at)

    def _outstanding(self) -> int:
        return sum(self.ledgers[way].outstanding() for way in self._ways)

    def results(self) -> dict[str, Result]:
        """Return the outcome of each way."""
        return {way: self.ledgers[way].result() for way in self._ways}

    def start(self, command: PipelineCommand) -> bool:
        """Start everything but the writers; False if the user ends the demo."""
        self._view.step("starting Postgres…")
        postgres = self._stack.enter_context(EmbeddedPostgres(self._folder / "postgres"))
        self._servers["Postgres"] = postgres
        self._url = postgres.create_database("shop")
        create_tables(self._url)
        store = postgres.create_database("store")
        with Store.open(store) as opened:
            token = opened.tokens.create("demo", "worker", None)
            admin = opened.tokens.create("demo-admin", "admin")
        self._view.step("starting nats-server…")
        nats = self._stack.enter_context(EmbeddedNats(self._folder / "nats"))
        self._servers["nats-server"] = nats
        client = self._stack.enter_context(JetStream(nats.url))
        self._consumer = Consumer(client, self.ledgers[JETSTREAM], self.ledgers[API_EVENTS])
        self._consumer.start()
        self._view.step("starting a fake of a Stripe-like API…")
        api = FakeStripe()
        served = self._stack.enter_context(FakeStripeServer(api))
        self._customers = CustomerWriter(api, self._changed)
        self._customers.write_first()
        if self._stop.is_set():
            return False
        self._view.step("starting Spark…")
        config = self._folder / "penstock.yaml"
        config.write_text(
            CONFIG.format(
                postgres=self._url, nats=nats.url, store=store, stream=STREAM, folder=self._folder
            )
        )
        listen = f"127.0.0.1:{free_port()}"
        self._pipeline = GuardedProcess(
            command(config, listen),
            log=self._folder / "pipeline.log",
            cwd=self._folder,  # what it writes beside its configuration goes with the folder
            env={**os.environ, "SPARK_LOCAL_DIRS": str(self._folder / "spark")},
            patience=3.0,  # where the demo is gone, so are the servers: nothing is left to finish
        )
        self._stack.callback(self._pipeline.stop, signal.SIGTERM, patience=_STOP_PATIENCE)
        if not self._await_pipeline(f"http://{listen}/readyz"):
            return False
        url = f"http://{listen}"
        self._workers = [
            Worker(f"worker-{number}", STREAM, url, token, self.ledgers[WORKERS])
            for number in range(1, COUNT + 1)
        ]
        self._readers = [
            *self._workers,
            Worker("records", RECORDS, url, token, self.ledgers[API_RECORDS]),
        ]
        for worker in self._readers:
            worker.start()
        if not self._await_first():
            return False
        # Added to the run, not there from its start: so the first row waits for no query but its own.
        self._view.step("adding a sync of the API…")
        add_entities(url, admin, sync_of(served, nats.url))
        self._view.step(f"its console: {url}/console, with the token {admin}")
        return True

    def _await_pipeline(self, url: str) -> bool:
        deadline = time.monotonic() + _READY_TIMEOUT
        while not is_ready(url):
            self._check_pipeline()
            if time.monotonic() > deadline:
                raise DemoError(
                    f"the pipeline was not ready within {_READY_TIMEOUT:.0f} s; its log ends "
                    f"with:\n{self._pipeline.log_tail()}"
                )
            if self._stop.wait(0.1):
                return False
        return True

    def _await_first(self) -> bool:
        """Send one row through, so that what follows is measured on a pipeline that flows."""
        self._view.step("pipeline ready; waiting for the first message…")
        started = time.monotonic()
        write_first(self._url, self._committed)
        rows = [self.ledgers[JETSTREAM], self.ledgers[WORKERS]]
        while any(ledger.outstanding() for ledger in rows):
            self._check_pipeline()
            if time.monotonic() - started > _READY_TIMEOUT:
                raise DemoError(
                    f"the first row had not arrived {_READY_TIMEOUT:.0f} s after its commit; the"
                    f" pipeline's log ends with:\n{self._pipeline.log_tail()}"
                )
            if self._stop.wait(0.01):
                return False
        seconds = time.monotonic() - started
        for ledger in rows:
            ledger.restart_clock()
        self._view.step(f"first message received, {seconds:.1f} s after its commit")
        return True

    def _change_customers(self) -> None:
        """Let the API's customers change once the sync has copied those that were there before."""
        ledgers = [self.ledgers[API_EVENTS], self.ledgers[API_RECORDS]]
        if self._customers.is_started or any(ledger.outstanding() for ledger in ledgers):
            return
        for ledger in ledgers:
            ledger.restart_clock()
        self._view.step(f"the API's {FIRST} customers are copied; from now on they change")
        self._customers.start()

    def _check_pipeline(self) -> None:
        if self._pipeline.returncode is not None:
            raise DemoError(
                f"the pipeline ended with exit code {self._pipeline.returncode}; its log ends "
                f"with:\n{self._pipeline.log_tail()}"
            )
        for name, server in self._servers.items():
            if server.pid is None:
                tail = server.log_path.read_text(errors="replace")[-_LOG_TAIL:].strip()
                raise DemoError(f"{name} ended unexpectedly; its log ends with:\n{tail}")
        for worker in self._readers:
            if worker.error is not None:
                raise DemoError(f"{worker.name} could not go on: {worker.error}")

    def _update(self, note: str) -> None:
        taken = [worker.received for worker in self._workers]
        counts = {way: ledger.counts() for way, ledger in self.ledgers.items()}
        (events,), (records,) = counts[API_EVENTS], counts[API_RECORDS]
        events = events._replace(table="API events")
        self._view.update(counts[JETSTREAM], events, counts[WORKERS], taken, records, note)

    def write(self, duration: float) -> None:
        """Let the shop write for `duration` seconds, or until a signal."""
        how_long = f"for {duration:g} s (Ctrl-C ends it)"
        if math.isinf(duration):
            how_long = "until Ctrl-C"
        self._view.step(f"writing {self._rate} rows/s {how_long}")
        self._writers = open_shop(self._url, self._committed, self._rate)
        deadline = time.monotonic() + duration
        for writer in self._writers:
            writer.start()
        try:
            while (left := deadline - time.monotonic()) > 0:
                if self._stop.wait(min(_REFRESH, left)):
                    break
                if left > _LATE:  # else they change behind the shop's writing
                    self._change_customers()
                self._update("writing")
                self._check_pipeline()
                if any(writer.error for writer in self._writers):
                    break
        finally:
            writing: list[Background] = [*self._writers]
            writing += [self._customers] if self._customers.is_started else []
            for each in writing:
                each.stop()
            for each in writing:
                each.join(_STOP_PATIENCE)
        if late := {each.name for each in writing if each.is_alive()}:
            names = " and ".join(sorted(late))
            raise DemoError(f"{names} did not stop writing within {_STOP_PATIENCE:g} s")
        for writer in self._writers:
            if writer.error is not None:
                raise DemoError(f"the shop could not write: {writer.error}") from writer.error

    def finish(self, quiet: float) -> None:
        """Wait for what is on its way, end the pipeline, and read what it published at the end."""
        if not self._customers.is_started:
            self._finish_late()
        self._drain(quiet, lambda: self._outstanding() == 0, "waiting for the last rows")
        self._view.close()
        self._view.step("stopping the workers and the pipeline…")
        for worker in self._readers:
            worker.stop()
        for worker in self._readers:
            worker.join(_STOP_PATIENCE)
        code = self._pipeline.stop(signal.SIGTERM, patience=_STOP_PATIENCE)
        if code != 0:
            self._view.step(
                f"the pipeline ended with exit code {code}; its log ends "
                f"with:\n{self._pipeline.log_tail()}"
            )
        # It may have published something twice, or too late; that is for the ledger too.
        self._drain(quiet, self._consumer.caught_up, "reading the rest")
        self._view.close()

    def _finish_late(self) -> None:
        """Let the API's customers change after all, where the writing was over before the sync began."""
        ledgers = [self.ledgers[API_EVENTS], self.ledgers[API_RECORDS]]

        def is_copied() -> bool:
            return self._stop.is_set() or not any(ledger.outstanding() for ledger in ledgers)

        self._drain(_READY_TIMEOUT, is_copied, "waiting for the API's customers")
        self._change_customers()
        if self._customers.is_started:
            self._stop.wait(_LATE)
            self._customers.stop()
            self._customers.join()
        elif self._stop.is_set():
            self._view.step("stopped before the API's customers were copied: they are not counted")
            self._ways = [JETSTREAM, WORKERS]

    def _drain(self, quiet: float, done: Callable[[], bool], note: str) -> None:
        last, since = self._arrived(), time.monotonic()
        while not done() and time.monotonic() - since < quiet:
            threading.Event().wait(0.1)
            self._update(note)
            if (arrived := self._arrived()) != last:
                last, since = arrived, time.monotonic()

    def _arrived(self) -> int:
        return self._consumer.last_seq + sum(worker.received for worker in self._readers)
