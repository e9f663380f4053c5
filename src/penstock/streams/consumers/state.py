"""A consumer's state: what was handed out, what is done, what has to wait. No I/O, no clock.

The state is what the entries of the consumer's log come to, in their order, so that every process
that reads them has the same. Times are microseconds since 1970, and stand in the entries.

All up to the cursor was passed: it is done, *held*, or *parked*. A held message was handed
out and is not done; from its time `until` on it may be handed out again. At most one message of a
group is held; the group's messages that the cursor passes meanwhile are parked: only the group's
first and last such position are kept, and its messages are found by the stream's index later.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any, Final

import orjson

from penstock.streams.consumers.entry import (
    DeliveryFailure,
    Entry,
    Message,
    Parked,
    failures_of,
)

Held = tuple[int, int, int, int | None, int, int]
"""lsn, idx, group, old group, deliver count, until."""

START: Final = (0, -1)
_STATE: Final = '{"s":'


class State:
    """What a consumer's log comes to. It changes by `apply` alone; `advance` only looks at the time.

    Args:
        cursor: Where a new consumer starts.
    """

    def __init__(self, cursor: tuple[int, int] = START) -> None:
        self.cursor = cursor
        self.next = 1
        """The number of the next delivery."""
        self.epoch = 1
        """The first delivery after the last rewind."""
        self.passed = 0
        """How many messages the cursor has passed since the consumer was made."""
        self.held: dict[int, Held] = {}
        self.busy: set[int] = set()
        """The groups of what is held."""
        self.parked: dict[int, Parked] = {}
        self.replays: dict[tuple[int, int], Message] = {}
        """Dead letters that shall be delivered again, by their positions."""
        self.due: dict[int, None] = {}
        """The groups that are parked and not busy, in the order in which they became so."""
        self.ready: dict[int, None] = {}
        """The numbers of what may be handed out again, as far as `advance` has looked."""
        self.failed: dict[int, DeliveryFailure] = {}
        """Why what is held failed last, by number; also of its deliveries before."""
        self.returned: set[int] = set()
        """The numbers of what is held and was nacked or released: its time does not run out."""
        self.redeliveries = 0
        """How many deliveries were not their message's first."""
        self.failures = 0
        """How many deliveries failed: they were nacked, or not acked in time."""
        self.last_failure: DeliveryFailure | None = None
        self.failing: tuple[int, int] | None = None
        """Since when, in µs, and how often deliveries have failed with none acked between them."""
        self._timers: list[tuple[int, int, int]] = []  # until, range of numbers; may be outdated

    @property
    def pending(self) -> int:
        """How many messages that the cursor has passed were never handed out."""
        return sum(parked[0] for parked in self.parked.values())

    def advance(self, now: int) -> None:
        """Move what may be handed out again by now to `ready`."""
        timers, held = self._timers, self.held
        while timers and timers[0][0] <= now:
            until, first, last = heapq.heappop(timers)
            for number in range(first, last + 1):
                if (message := held.get(number)) is not None and message[5] == until:
                    self.ready[number] = None

    def next_time(self) -> int | None:
        """Return when the next held message may be handed out again, if `ready` has it not yet."""
        timers, held = self._timers, self.held
        while timers:
            until, first, last = timers[0]
            for number in range(first, last + 1):
                if (message := held.get(number)) is not None and message[5] == until:
                    return until
            heapq.heappop(timers)
        return None

    def apply(self, entry: Entry) -> None:
        """Take a step that is in the log."""
        if entry.rewound:
            self._forget()
        held = self.held
        for first, last in entry.done:
            for number in range(first, last + 1):
                if (message := held.pop(number, None)) is not None:
                    self._free(message[2])
                    if message[3] is not None:
                        self._free(message[3])
                    if self.ready:
                        self.ready.pop(number, None)
        self._record(entry)
        for number in entry.released:
            lsn, idx, group, old, count, until = held[number]
            held[number] = (lsn, idx, group, old, max(count - 1, 0), until)
        for until, numbers in entry.moved:
            for number in numbers:
                held[number] = (*held[number][:5], until)
                self.ready.pop(number, None)
                self._set_timer(until, number, number)
        if entry.redelivered or entry.new:
            self._hand_out(entry)
        for group, parked in entry.parked:
            self.due.pop(group, None)
            if parked is None:
                self.parked.pop(group, None)
            else:
                self.parked[group] = parked
                if group not in self.busy:
                    self.due[group] = None
        for letter in entry.replays:
            self.replays[letter[0], letter[1]] = letter
        for position in entry.dropped:
            self.replays.pop(position, None)
        if entry.cursor is not None:
            self.cursor = entry.cursor
            self.passed += entry.passed

    def _record(self, entry: Entry) -> None:
        """Record what failed, and what did not."""
        if self.failing is not None and entry.done:
            done = sum(last - first + 1 for first, last in entry.done)
            dead = sum(n not in self.held for _failure, ns in entry.failures for n in ns)
            if done - entry.lapsed > dead:
                self.failing = None
        if self.failed or self.returned:
            for first, last in entry.done:
                for number in range(first, last + 1):
                    self.failed.pop(number, None)
                    self.returned.discard(number)
        self.returned.update(entry.released)
        for failure, numbers in entry.failures:
            self.failures += len(numbers)
            self.last_failure = failure
            since, count = self.failing or (failure.at, 0)
            self.failing = since, count + len(numbers)
            left = [number for number in numbers if number in self.held]
            self.failed.update(dict.fromkeys(left, failure))
            self.returned.update(left)

    def _free(self, group: int) -> None:
        self.busy.discard(group)
        if group in self.parked:
            self.due[group] = None

    def _hand_out(self, entry: Entry) -> None:
        held, busy, until = self.held, self.busy, entry.until
        number = first = self.next
        for old_number in entry.redelivered:
            self.ready.pop(old_number, None)
            message = held.pop(old_number)
            held[number] = (*message[:4], message[4] + 1, until)
            self.redeliveries += message[4] > 0
            self.returned.discard(old_number)
            if (failure := self.failed.pop(old_number, None)) is not None:
                self.failed[number] = failure
            number += 1
        for lsn, idx, group, old in entry.new:
            held[number] = (lsn, idx, group, old, 1, until)
            busy.add(group)
            if old is not None:
                busy.add(old)
            number += 1
        if self.due:
            for _lsn, _idx, group, old in entry.new:
                self.due.pop(group, None)
                if old is not None:
                    self.due.pop(old, None)
        if self.replays:
            for lsn, idx, _group, _old in entry.new:
                self.replays.pop((lsn, idx), None)
        self.next = number
        self._set_timer(until, first, number - 1)

    def _forget(self) -> None:
        self.epoch = self.next
        for part in (
            self.held, self.busy, self.parked, self.replays, self.due, self.ready, self.failed,
            self.returned,
        ):  # fmt: skip
            part.clear()
        self.failing = None
        self._timers.clear()

    def _set_timer(self, until: int, first: int, last: int) -> None:
        if len(self._timers) > 2 * len(self.held) + 1_000:
            self._set_timers()
        else:
            heapq.heappush(self._timers, (until, first, last))

    def _set_timers(self) -> None:
        self._timers = [
            (message[5], number, number)
            for number, message in self.held.items()
            if number not in self.ready
        ]
        heapq.heapify(self._timers)

    def encode(self) -> bytes:
        """Return the whole state as an entry, which takes the place of all before it."""
        failed: dict[DeliveryFailure, list[int]] = {}
        for number, failure in self.failed.items():
            failed.setdefault(failure, []).append(number)
        last = None if self.last_failure is None else (*self.last_failure,)
        return orjson.dumps(
            {
                "s": [*self.cursor, self.next, self.epoch, self.passed],
                "h": [(number, *message) for number, message in self.held.items()],
                "p": list(self.parked.items()),
                "y": list(self.replays.values()),
                "f": [(*failure, sorted(numbers)) for failure, numbers in failed.items()],
                "r": sorted(self.returned),
                "n": [self.redeliveries, self.failures, last, self.failing],
            }
        )

    @classmethod
    def decode(cls, body: dict[str, Any]) -> State:
        """Read what `encode` wrote, parsed."""
        lsn, idx, number, epoch, passed = body["s"]
        state = cls((lsn, idx))
        state.next, state.epoch, state.passed = number, epoch, passed
        for number, *message in body["h"]:
            state.held[number] = tuple(message)
            state.busy.update(group for group in message[2:4] if group is not None)
        state.parked = {group: tuple(parked) for group, parked in body["p"]}
        state.replays = {(m[0], m[1]): tuple(m) for m in body["y"]}
        state.due = {group: None for group in state.parked if group not in state.busy}
        for failure, numbers in failures_of(body.get("f", ())):
            state.failed.update(dict.fromkeys(numbers, failure))
        state.returned = set(body.get("r", ()))
        state.redeliveries, state.failures, last, failing = body.get("n") or (0, 0, None, None)
        state.last_failure = None if last is None else DeliveryFailure(*last)
        state.failing = None if failing is None else (failing[0], failing[1])
        state._set_timers()
        return state


def is_state(entry: str) -> bool:
    """Return whether an entry of the log is a whole state."""
    return entry.startswith(_STATE)


def replay(state: State, entries: Iterable[bytes | str]) -> State:
    """Return what `state` becomes by entries of the log; one may be a whole state."""
    for entry in entries:
        body = orjson.loads(entry)
        if "s" in body:
            state = State.decode(body)
        else:
            state.apply(Entry.decode(body))
    return state
