"""A consumer in memory: the state machine of Penstock's own, without a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import Final, Literal, TypeVar

from penstock.config.consumers import ConsumerSettings
from penstock.core.message import Position
from penstock.streams.consumers.ack_tokens import make_tokens, read_tokens
from penstock.streams.consumers.decide import Row, Step
from penstock.streams.consumers.entry import Entry
from penstock.streams.consumers.facts import ConsumerFacts, facts_of, oldest_position
from penstock.streams.consumers.state import State
from penstock.streams.consumers.types import (
    ConsumerError,
    ConsumerInfo,
    ConsumerLetter,
    ConsumerMessage,
    Delivery,
    Outcome,
    Received,
    RewindEffect,
    TooManyWaiting,
    UnknownDeadLetter,
)
from penstock.streams.records import commit_position, stream_end
from penstock.testing.clock import Clock
from penstock.testing.dead_letters import InMemoryDeadLetters
from penstock.testing.stream import InMemoryStream, View

T = TypeVar("T")

_READ: Final = 1_000  # messages at a time


class InMemoryConsumer:
    """A named reader of a stream, with the calls and the behaviour of Penstock's.

    Order of a group, visibility timeout, delays, `max_deliver`, dead letters, `max_ack_pending` and
    refused tokens are as in production. Times come from the clock.

    Args:
        info: The consumer's name and settings.
        stream: What it reads.
        clock: The time.
        cursor: The position behind which it starts.
    """

    def __init__(
        self, info: ConsumerInfo, stream: InMemoryStream, clock: Clock, cursor: tuple[int, int]
    ) -> None:
        self.info = info
        self.stream = stream
        self._clock = clock
        self._state = State(cursor)
        self._letters = InMemoryDeadLetters(stream, clock)
        self._waiting = 0
        self._gone: ConsumerError | None = None

    @property
    def settings(self) -> ConsumerSettings:
        """The consumer's settings."""
        return self.info.settings

    def change(self, info: ConsumerInfo) -> None:
        """Take over changed settings."""
        self.info = info
        self._clock.notify()

    def close(self, error: ConsumerError) -> None:
        """Answer every call with `error` from now on, receives that wait included."""
        self._gone = error
        self._clock.notify()

    # What workers call

    async def receive(self, limit: int, wait: float = 0.0) -> Received:
        """Hand out up to `limit` messages, as soon as there is one; none after `wait` seconds.

        The seconds are the clock's: a receive that waits ends when a message is there, or when the
        test advances the clock.

        Raises:
            TooManyWaiting: As many receives wait as the consumer's `max_waiting` allows.
        """
        deadline = self._clock.microseconds + int(wait * 1_000_000)
        while True:
            received = self._receive(limit)
            if received.deliveries or self._clock.microseconds >= deadline:
                return received
            if self._waiting >= self.settings.max_waiting:
                raise TooManyWaiting(
                    f"{self.settings.max_waiting} receives wait for {self.info.name!r} already."
                )
            back = self._state.next_time()
            self._waiting += 1
            try:
                await self._clock.wait(deadline if back is None else min(deadline, back))
            finally:
                self._waiting -= 1

    async def ack(self, tokens: Sequence[str], *, followed: bool = False) -> Outcome:  # noqa: ARG002 - of `Consumer`
        """Take messages as done, for ever; those that are done already count as taken."""
        refs = read_tokens(self.info.id, tokens)
        return self._outcome(tokens, self._step(lambda step: step.reports.ack(refs)))

    async def nack(
        self,
        tokens: Sequence[str],
        delay: float = 0.0,
        *,
        reason: str | None = None,
        status: int | None = None,
    ) -> Outcome:
        """Make messages available again after `delay` seconds; at `max_deliver` dead letters.

        `reason` is why they failed, `status` that of a webhook's HTTP answer.
        """
        refs, time = read_tokens(self.info.id, tokens), int(delay * 1_000_000)
        refused = self._step(lambda step: step.reports.nack(refs, time, status, reason))
        return self._outcome(tokens, refused)

    async def extend(self, tokens: Sequence[str], seconds: float | None = None) -> Outcome:
        """Give deliveries `seconds` from now, or ack_wait_ms; those that are done are refused."""
        refs = read_tokens(self.info.id, tokens)
        time = self._ack_wait if seconds is None else int(seconds * 1_000_000)
        return self._outcome(tokens, self._step(lambda step: step.reports.extend(refs, time)))

    async def release(self, tokens: Sequence[str]) -> Outcome:
        """Give back what a client never got: available at once, and not counted as delivered."""
        refs = read_tokens(self.info.id, tokens)
        return self._outcome(tokens, self._step(lambda step: step.reports.release(refs)))

    # What operators and tests call

    async def messages(
        self, state: Literal["pending", "delivered", "dead"], limit: int = 100
    ) -> list[ConsumerMessage]:
        """Return up to `limit` messages without handing them out, in their order."""
        if state == "dead":
            self._expire()
            return [
                ConsumerMessage(
                    letter.position, letter.deliver_count, letter.message.encode(), None
                )
                for letter in self._letters.waiting()[:limit]
            ]
        return (self._pending() if state == "pending" else self._held())[:limit]

    def left(self) -> list[ConsumerMessage]:
        """Return the messages that are neither acked nor dead letters, in their order."""
        return sorted(self._pending() + self._held(), key=lambda message: message.position)

    async def drained(self) -> None:
        """Wait until every message is acked or a dead letter.

        The clock stands still meanwhile: a message that waits for its retry keeps this waiting.
        """
        while any(row[4] for row in self._view.behind(self._state.cursor)) or self.left():
            await self._clock.wait()

    async def dead_letters(self, limit: int = 100, after: int = 0) -> list[ConsumerLetter]:
        """Return dead letters behind number `after`, replayed ones too, the oldest first."""
        self._expire()
        return [letter for letter in self._letters.all() if letter.id > after][:limit]

    async def replay(self, number: int, also: object = ()) -> None:  # noqa: ARG002 - of `Consumer`
        """Put a dead letter back into the consumer.

        Raises:
            UnknownDeadLetter: There is no dead letter of this number.
        """
        with self._clock.lock:
            position = self._letters.replay(number)
            if position is None:
                raise UnknownDeadLetter(f"Consumer {self.info.name!r} has no dead letter {number}.")
            held = any(message[:2] == position for message in self._state.held.values())
            if not held and position <= self._state.cursor:
                row = self.stream.stored(position)
                entry = Entry(replays=[(*position, row.group, row.old_group)])
                self._state.apply(entry)
        self._clock.notify()

    async def rewind(
        self,
        to: Position | datetime | Literal["all", "new"],
        also: object = (),  # noqa: ARG002 - of `Consumer`
    ) -> Position:
        """Go on from a message, a commit time, the first or the next one; return the cursor.

        Messages that are out are forgotten; their tokens are refused as unknown from now on.
        """
        with self._clock.lock:
            cursor = self._target(to)
            self._state.apply(Entry(cursor=cursor, rewound=True))
        self._clock.notify()
        return commit_position(*cursor)

    async def effect_of_rewind(
        self, to: Position | datetime | Literal["all", "new"]
    ) -> RewindEffect:
        """Return what a rewind to there would do; it is not done."""
        with self._clock.lock:
            cursor, state, view = self._target(to), self._state, self._view
            place = commit_position(*cursor)
            skipped = sum(message.position <= place for message in self.left())
            skipped += sum(at <= cursor for at in state.replays)
            again = max(view.number(cursor) - view.number(state.cursor), 0)
        return RewindEffect(skipped, again, exact=True)

    async def facts(self) -> ConsumerFacts:
        """Return the consumer's numbers, as its status has them."""
        self._expire()
        state = self._state
        position = oldest_position(state)
        if position is None:
            behind = (row for row in self._view.behind(state.cursor) if row[4])
            position = next((Position(row[0], row[1]) for row in behind), None)
        oldest = None if position is None else self.stream.stored(position).committed_at
        dead = len(self._letters.waiting())
        waiting, now = self._num_pending(), self._clock.microseconds
        return facts_of(state, now, waiting=waiting, oldest=oldest, dead=dead)

    async def disable(self, reason: str) -> None:
        """Note why a webhook is delivered to no more."""
        self.change(replace(self.info, disabled=reason, disabled_at=self._clock.now))

    async def pause(self, by: str, also: object = ()) -> None:  # noqa: ARG002 - of `Consumer`
        """Answer receives with nothing until it is enabled."""
        why = f"{by} paused it"
        self.change(replace(self.info, disabled=why, disabled_at=self._clock.now, paused=True))

    async def enable(self, also: object = ()) -> None:  # noqa: ARG002 - of `Consumer`
        """Take a `disable` or a `pause` back."""
        self.change(replace(self.info, disabled=None, disabled_at=None, paused=False))

    # Steps

    @property
    def _ack_wait(self) -> int:
        return self.settings.ack_wait_ms * 1_000

    @property
    def _view(self) -> View:
        return View(self.stream, self.settings)

    def _expire(self) -> None:
        self._step(lambda _: None)

    def _step(self, change: Callable[[Step], T]) -> T:
        with self._clock.lock:
            step = self._begin()
            result = change(step)
            self._end(step)
        self._clock.notify()
        return result

    def _begin(self) -> Step:
        if self._gone is not None:
            raise self._gone
        now, settings = self._clock.microseconds, self.settings
        self._state.advance(now)
        step = Step(self._state, now, settings.max_deliver, settings.max_ack_pending)
        step.expire()
        return step

    def _end(self, step: Step) -> None:
        if (entry := step.entry(self._ack_wait)) is None:
            return
        for number, (lsn, idx, _group, _old, count, _until) in step.reports.dead.items():
            self._letters.add((lsn, idx), count, step.reports.cause(number))
        self._state.apply(entry)

    def _receive(self, limit: int) -> Received:
        with self._clock.lock:
            step, state, first = self._begin(), self._state, self._state.next
            texts = [] if self.info.paused else self._take(step, limit)
            counts = [state.held[number][4] + 1 for number in step.redelivered] + [1] * len(
                step.new
            )
            dead = bool(step.reports.dead)
            self._end(step)
            positions = [
                Position._make(state.held[n][:2]) for n in range(first, first + len(texts))
            ]
            tokens = make_tokens(self.info.id, first, positions)
            messages = [self._with_consumer(text) for text in texts]
            deliveries = list(map(Delivery, tokens, counts, messages, positions))
            received = Received(deliveries, self._num_pending(), len(state.held))
        if dead:
            self._clock.notify()
        return received

    def _take(self, step: Step, limit: int) -> list[bytes]:
        """Choose what is handed out; return the messages."""
        state, view = self._state, self._view
        step.take_redeliveries(limit)
        lost = [n for n in step.redelivered if self.stream.at(state.held[n][:2]) is None]
        step.drop(lost)
        texts = [self.stream.stored(state.held[n][:2]).message for n in step.redelivered]
        free = step.free_replays(limit)
        found = {position: row.message for position in free if (row := self.stream.at(position))}
        step.take_replays(free, found)
        step.take_parked(limit, view)
        behind, rows, passed = view.behind(state.cursor), list[Row](), 0
        while step.taken < limit and not step.full and (more := list(islice(behind, _READ))):
            rows += more
            passed = step.take_new(limit, rows, passed)
        return texts + [row[4] or b"" for row in step.new]

    def _with_consumer(self, message: bytes) -> bytes:
        name = self.info.name.replace("\\", "\\\\").replace('"', '\\"')
        consumer = f',"consumer":{{"id":"{self.info.uuid}","name":"{name}"}}}}}}'
        return message[:-2] + consumer.encode()

    @staticmethod
    def _outcome(tokens: Sequence[str], refused: list[tuple[int, str]]) -> Outcome:
        return Outcome(len(tokens) - len(refused), [(tokens[at], why) for at, why in refused])

    def _target(self, to: Position | datetime | str) -> tuple[int, int]:
        head = self.stream.head
        if isinstance(to, Position):
            return min((to.lsn, stream_end(to.idx - 1)), head)
        if isinstance(to, datetime):
            return min(self.stream.before(to), head)
        return State().cursor if to == "all" else head

    def _num_pending(self) -> int:
        state = self._state
        return state.pending + len(state.replays) + self._view.number(state.cursor)

    def _pending(self) -> list[ConsumerMessage]:
        state, view = self._state, self._view
        rows = {row[:2]: row for row in view.behind(state.cursor) if row[4]}
        for group, parked in state.parked.items():
            rows |= {row[:2]: row for row in view.parked(group, parked)}
        return [
            ConsumerMessage(commit_position(*at), 0, rows[at][4] or b"", None)
            for at in sorted(rows)
        ]

    def _held(self) -> list[ConsumerMessage]:
        now = self._clock.microseconds
        return [
            ConsumerMessage(
                commit_position(lsn, idx),
                count,
                row.message,
                datetime.fromtimestamp(until / 1e6, UTC) if until > now else None,
            )
            for lsn, idx, _group, _old, count, until in sorted(self._state.held.values())
            if (row := self.stream.at((lsn, idx))) is not None
        ]
