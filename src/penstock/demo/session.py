"""`penstock demo`: servers, shop, pipeline, consumer and workers put together, compared, taken down."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console

from penstock.core.errors import EmbeddedError
from penstock.demo.consumer import Consumer
from penstock.demo.ledger import Change, Ledger
from penstock.demo.shop import TABLES, Writer, create_tables, open_shop, write_first
from penstock.demo.view import View
from penstock.demo.workers import COUNT, STREAM, Worker
from penstock.embedded.handles import JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.embedded.process import GuardedProcess, free_port
from penstock.streams.store import Store

PipelineCommand = Callable[[Path, str], list[str]]
"""Takes the configuration file and the address to listen on, gives the command to run."""

_READY_TIMEOUT = 90.0
_QUIET = 15.0  # seconds without a delivery after which what is outstanding counts as lost
_STOP_PATIENCE = 30.0
_REFRESH = 0.25
_LOG_TAIL = 2000

JETSTREAM = "JetStream"
WORKERS = f"stream, {COUNT} workers"

CONFIG = """\
sources:
  shop:
    type: postgres
    url: {postgres}
    tables: ["public.*"]
    slot: penstock_demo
    publication: penstock_demo
sinks:
  jetstream:
    type: nats
    source: shop
    url: {nats}
    subject: "shop.{{schema}}.{{table}}.{{action}}"
  {stream}:
    type: stream
    source: shop
store: {store}
spark:
  master: local[*]
  checkpoint: {folder}/checkpoints
"""


class DemoError(Exception):
    """The demo cannot go on: what happened, and the last log lines of the failing part."""


def penstock_command(config: Path, listen: str) -> list[str]:
    """Return the command of the real pipeline."""
    return [sys.executable, "-m", "penstock", "run", "-c", str(config), "--listen", listen]


def run(
    duration: float,
    rate: int,
    as_json: bool,
    *,
    pipeline: PipelineCommand = penstock_command,
    quiet: float = _QUIET,
) -> int:
    """Run the demo for `duration` seconds at `rate` row changes a second; return the exit code.

    1 if anything was lost, out of order or never committed, or if a part failed. SIGINT and SIGTERM
    end the writing early; the comparison still takes place. With `as_json` all else goes to
    standard error, and standard output has the one JSON object. `quiet` is how long nothing may
    arrive before what is outstanding counts as lost.
    """
    view = View(Console(stderr=as_json))
    stop = threading.Event()
    try:
        with _signals(stop), contextlib.ExitStack() as stack:
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
            results = {JETSTREAM: demo.ledger.result(), WORKERS: demo.stream_ledger.result()}
    except (DemoError, EmbeddedError, psycopg.Error) as error:
        view.fail(str(error))
        return 1
    view.summary(results)
    if as_json:
        body = {**results[JETSTREAM].as_dict(), "stream": results[WORKERS].as_dict()}
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
        self.ledger = Ledger(TABLES)
        self.stream_ledger = Ledger(TABLES)
        self._folder = folder
        self._view = view
        self._stop = stop
        self._stack = stack
        self._rate = rate
        self._servers: dict[str, EmbeddedPostgres | EmbeddedNats] = {}
        self._writers: list[Writer] = []
        self._workers: list[Worker] = []

    def _committed(self, changes: list[Change], at: float) -> None:
        self.ledger.committed(changes, at)
        self.stream_ledger.committed(changes, at)

    def _outstanding(self) -> int:
        return self.ledger.outstanding() + self.stream_ledger.outstanding()

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
        self._view.step("starting nats-server…")
        nats = self._stack.enter_context(EmbeddedNats(self._folder / "nats"))
        self._servers["nats-server"] = nats
        self._consumer = Consumer(self._stack.enter_context(JetStream(nats.url)), self.ledger)
        self._consumer.start()
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
        self._workers = [
            Worker(number, f"http://{listen}", token, self.stream_ledger)
            for number in range(1, COUNT + 1)
        ]
        for worker in self._workers:
            worker.start()
        return self._await_first()

    def _await_pipeline(self, url: str) -> bool:
        deadline = time.monotonic() + _READY_TIMEOUT
        while not _answers(url):
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
        while self._outstanding():
            self._check_pipeline()
            if time.monotonic() - started > _READY_TIMEOUT:
                raise DemoError(
                    f"the first row had not arrived {_READY_TIMEOUT:.0f} s after its commit; the"
                    f" pipeline's log ends with:\n{self._pipeline.log_tail()}"
                )
            if self._stop.wait(0.01):
                return False
        seconds = time.monotonic() - started
        self.ledger.restart_clock()
        self.stream_ledger.restart_clock()
        self._view.step(f"first message received, {seconds:.1f} s after its commit")
        return True

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
        for worker in self._workers:
            if worker.error is not None:
                raise DemoError(f"{worker.name} could not go on: {worker.error}")

    def _update(self, note: str) -> None:
        taken = [worker.received for worker in self._workers]
        self._view.update(self.ledger.counts(), self.stream_ledger.counts(), taken, note)

    def write(self, duration: float) -> None:
        """Let the shop write for `duration` seconds, or until a signal."""
        self._view.step(f"writing {self._rate} rows/s for {duration:g} s (Ctrl-C ends it)")
        self._writers = open_shop(self._url, self._committed, self._rate)
        deadline = time.monotonic() + duration
        for writer in self._writers:
            writer.start()
        try:
            while (left := deadline - time.monotonic()) > 0:
                if self._stop.wait(min(_REFRESH, left)):
                    break
                self._update("writing")
                self._check_pipeline()
                if any(writer.error for writer in self._writers):
                    break
        finally:
            for writer in self._writers:
                writer.stop()
            for writer in self._writers:
                writer.join()
        for writer in self._writers:
            if writer.error is not None:
                raise DemoError(f"the shop could not write: {writer.error}") from writer.error

    def finish(self, quiet: float) -> None:
        """Wait for what is on its way, end the pipeline, and read what it published at the end."""
        self._drain(quiet, lambda: self._outstanding() == 0, "waiting for the last rows")
        self._view.close()
        self._view.step("stopping the workers and the pipeline…")
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
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

    def _drain(self, quiet: float, done: Callable[[], bool], note: str) -> None:
        last, since = self._arrived(), time.monotonic()
        while not done() and time.monotonic() - since < quiet:
            threading.Event().wait(0.1)
            self._update(note)
            if (arrived := self._arrived()) != last:
                last, since = arrived, time.monotonic()

    def _arrived(self) -> int:
        return self._consumer.last_seq + sum(worker.received for worker in self._workers)


@contextlib.contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP request the end; a second SIGINT interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request(number: int, _frame: Any) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, request) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:  # noqa: S310 - our own address
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False
