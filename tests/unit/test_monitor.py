"""Reports to a run, over connections that may break."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import pytest

from penstock.core.monitor import Monitor, Report, Reporter


class Run:
    """The run's end: it knows its reports, and can lose its connections."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gone = False
        self.reports: SimpleQueue[Report] = SimpleQueue()
        self._open: list[Connection[Any, Any]] = []
        serve = Monitor._serve

        def noted(monitor: Monitor, connection: Connection[Any, Any]) -> None:
            self._open.append(connection)
            if self.gone:
                connection.close()
                return
            serve(monitor, connection)

        monkeypatch.setattr(Monitor, "_serve", noted)
        self.monitor = Monitor(self._handle)

    def _handle(self, report: Report) -> Report:
        self.reports.put(report)
        return {"had": report.get("number")}

    def breaks(self) -> None:
        """Break all connections, as a network does."""
        while self._open:
            # The other end may have left already.
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(self._open.pop().fileno())) as s,
            ):
                s.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    run = Run(monkeypatch)
    yield run
    run.breaks()
    run.monitor.close()


def test_a_question_over_a_broken_connection(run: Run) -> None:
    reporter = Reporter(run.monitor.address)
    assert reporter.request({"number": 1}) == {"had": 1}
    run.breaks()
    assert reporter.request({"number": 2}) == {"had": 2}
    assert reporter.request({"number": 3}) == {"had": 3}


def test_a_run_that_is_gone(run: Run) -> None:
    reporter = Reporter(run.monitor.address)
    run.gone = True
    run.breaks()
    reporter.send({"number": 1})
    for _ in range(2):
        with pytest.raises((OSError, EOFError)):
            reporter.request({"number": 2})


def test_commands_come_over_the_new_connection_too(run: Run) -> None:
    reporter, drained = Reporter(run.monitor.address), threading.Event()
    reporter.listen(lambda command: drained.set() if command["command"] == "drain" else None)
    reporter.send({"capture": "shop", "number": 1})
    assert run.reports.get(timeout=60)["number"] == 1
    run.breaks()
    # What is sent before the break is noticed may be gone; a capture reports again and again.
    for number in range(100):
        reporter.send({"capture": "shop", "number": number})
        run.monitor.drain()
        if drained.wait(0.1):
            return
    pytest.fail("no command came")


def test_a_command_goes_to_the_capture_of_one_source(run: Run) -> None:
    got: dict[str, SimpleQueue[Report]] = {"shop": SimpleQueue(), "warehouse": SimpleQueue()}
    reporters = [Reporter(run.monitor.address) for _ in got]
    for reporter, (name, queue) in zip(reporters, got.items(), strict=True):
        reporter.listen(queue.put)
        reporter.send({"capture": name})
        assert run.reports.get(timeout=60)["capture"] == name
    run.monitor.command("warehouse", {"command": "backfill", "run": None})
    run.monitor.command("nobody", {"command": "backfill"})
    run.monitor.drain()
    assert got["warehouse"].get(timeout=60) == {"command": "backfill", "run": None}
    drain = {"command": "drain", "leave": False}
    assert [queue.get(timeout=60) for queue in got.values()] == [drain, drain]


def test_no_run() -> None:
    reporter = Reporter(None)
    reporter.send({"number": 1})
    with pytest.raises(EOFError):
        reporter.request({"number": 1})


def test_what_has_arrived_is_handled_before_the_end() -> None:
    handled: list[Report] = []
    slowly = threading.Event()

    def handle(report: Report) -> None:
        slowly.wait(0.005)  # as where the machine is busy
        handled.append(report)

    monitor = Monitor(handle)
    reporter = Reporter(monitor.address)
    for number in range(50):
        reporter.send({"number": number})
    monitor.flush()
    assert len(handled) == 50
    monitor.close()
