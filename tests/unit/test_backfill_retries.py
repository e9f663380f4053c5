"""What a backfiller does with failures, and what it is asked for in the meantime."""

from __future__ import annotations

import queue
import time

import pytest

from penstock.backfill.chunks import retries
from penstock.backfill.chunks.commands import Commands, Interrupted, Start
from penstock.backfill.chunks.retries import Retries
from penstock.backfill.events import Delayed, Event
from penstock.core.errors import BackfillError
from penstock.postgres.reads import BackfillSpec

SPEC = BackfillSpec(3, "events", "public", "orders")
START = Start(SPEC, None, 1)


def failure(code: str, *, transient: bool) -> BackfillError:
    return BackfillError(code, "It failed.", transient=transient)


def test_a_failure_that_may_pass_is_tried_again_later_and_later() -> None:
    sent: list[Event] = []
    found = Retries(sent.append)
    waits = []
    for _ in range(4):
        now = time.monotonic()
        assert found.failed(START, failure("connection_lost", transient=True))
        waits.append(found.retry_at - now)
    assert waits == sorted(waits)
    assert sent == [Delayed(3, 1, "connection_lost", "It failed.")] * 4
    found.planned(START)
    found.planned(START)
    assert sent[4:] == [Delayed(3, 1, None, None)], "reported once"
    now = time.monotonic()
    assert found.failed(START, failure("connection_lost", transient=True))
    assert found.retry_at - now <= retries._BACKOFF_SECONDS[0] + 0.1, "from the start again"


def test_a_failure_ends_the_backfill_after_its_number_of_tries() -> None:
    sent: list[Event] = []
    found = Retries(sent.append)
    assert not found.failed(START, failure("no_primary_key", transient=False))
    for _ in range(2):
        assert [found.failed(START, failure("timeout", transient=False)) for _ in range(3)] == [
            True
        ] * 3
        found.delivered()
    assert [found.failed(START, failure("timeout", transient=False)) for _ in range(4)] == [
        True, True, True, False
    ]  # fmt: skip
    found.start()
    assert found.retry_at == 0.0
    assert found.failed(START, failure("timeout", transient=False))


def test_a_wait_is_reported_once_and_takes_back_no_failure() -> None:
    sent: list[Event] = []
    found = Retries(sent.append)
    for _ in range(2):
        found.waits(START, "behind", "Live changes wait, and go first.")
    assert sent == [Delayed(3, 1, "behind", "Live changes wait, and go first.")]
    found.planned(START)
    assert sent[1:] == [Delayed(3, 1, None, None)]


def test_the_newest_start_counts() -> None:
    interrupts: list[int] = []
    commands = Commands(lambda: interrupts.append(1))
    commands.pause()
    first, second = commands.start(SPEC, None), commands.start(SPEC, ("7",))
    assert (first, second, commands.newest(), commands.paused) == (1, 2, 2, False)
    assert [commands.get(0.0), commands.get(0.0)] == [Start(SPEC, None, 1), Start(SPEC, ("7",), 2)]
    assert len(interrupts) == 2
    commands.raise_if_changed()
    assert commands.next_attempt(first) is None, "another start was asked for"
    assert commands.next_attempt(second) == 3
    commands.cancel()
    assert commands.changed
    with pytest.raises(Interrupted):
        commands.raise_if_changed()
    assert commands.newest() == 4
    assert commands.get(0.0) is None
    with pytest.raises(queue.Empty):
        commands.get(0.01)
    assert not commands.closing
    commands.cancel(close=True)
    assert commands.closing
