"""Signals that come while the main thread holds the lock that what they ask for takes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from penstock.cli import service as service_module
from penstock.cli.service import Service
from penstock.config.settings import Config
from penstock.core.self_pipe import SelfPipe
from penstock.demo.signals import signals

PATIENCE = 60
# A handler that takes the lock waits for ever; the timeout's signal ends that.
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt(event: threading.Event, number: int = signal.SIGTERM) -> None:
    """Have a signal handled as where the main thread is inside `event.set()` or `event.wait()`."""
    with vars(event)["_cond"]:
        signal.raise_signal(number)


def test_a_handler_that_sets_the_event_itself_would_wait_for_ever() -> None:
    """What the others would not notice if an event had no lock any more."""
    event = threading.Event()
    taken: list[bool] = []
    signal.signal(
        signal.SIGUSR1, lambda *_: taken.append(vars(event)["_cond"].acquire(blocking=False))
    )
    interrupt(event, signal.SIGUSR1)
    assert taken == [False]


def test_a_signal_ends_the_service_that_sets_or_awaits_its_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = Service(Config(sources={}, sinks={}), None, once=True)
    monkeypatch.setattr(service_module, "make_cache", lambda: False)
    ended: list[bool] = []

    def has_work() -> bool:
        interrupt(service._stopping)
        ended.append(service._stopping.wait(PATIENCE))
        return False

    monkeypatch.setattr(service, "_has_work", has_work)
    assert service.main("") == 0
    assert ended == [True]
    signal.raise_signal(signal.SIGTERM)  # one that comes late ends nothing


def test_a_signal_ends_the_demo_and_a_second_interrupt_at_once() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        stop = threading.Event()
        with signals(stop):
            interrupt(stop, number)
            if number == signal.SIGINT:
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(number)
            assert stop.wait(PATIENCE)


def test_handlers_are_given_back_by_the_demo() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with signals(threading.Event()):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_more_signals_than_the_pipe_takes_block_nothing() -> None:
    called, go_on = threading.Semaphore(0), threading.Event()

    def on_signal() -> None:
        called.release()
        go_on.wait(PATIENCE)

    with SelfPipe(on_signal) as pipe:
        pipe.notify()
        assert called.acquire(timeout=PATIENCE)
        for _ in range(100_000):
            pipe.notify()
        go_on.set()
        assert called.acquire(timeout=PATIENCE), "those that came meanwhile are one"


FORKED = """
import os, signal
from penstock.core.self_pipe import SelfPipe
with SelfPipe(lambda: print("called", flush=True)) as pipe:
    signal.signal(signal.SIGTERM, pipe.notify)
    if (child := os.fork()) == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    os.waitpid(child, 0)
pipe._thread.join(60)  # it has read all that was written
"""


def test_a_signal_of_a_fork_is_not_its_parents() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        check=False, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
