"""A consumer as one process serves it: the requests that clients may make."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Literal, Protocol

from penstock.core.message import Position
from penstock.streams.connection import Also
from penstock.streams.consumers.entry import Entry, Parked, StreamPosition
from penstock.streams.consumers.facts import ConsumerFacts, facts_of, oldest_position
from penstock.streams.consumers.loop import Loop
from penstock.streams.consumers.reader import ConsumerReader
from penstock.streams.consumers.receive_limit import Permits
from penstock.streams.consumers.sessions import SQL, Sessions, execute_all
from penstock.streams.consumers.standing import Standing, standing_of
from penstock.streams.consumers.state import State
from penstock.streams.consumers.steps import StepWriter
from penstock.streams.consumers.types import (
    ConsumerError,
    ConsumerInfo,
    ConsumerLetter,
    ConsumerMessage,
    Outcome,
    Received,
    RewindEffect,
    UnknownDeadLetter,
)
from penstock.streams.consumers.view import StreamRef
from penstock.streams.read import COUNTED
from penstock.streams.records import commit_position


class _Save(Protocol):
    """Stores why a consumer is disabled, and whether it is paused."""

    def __call__(
        self, info: ConsumerInfo, disabled: str | None, /, *, paused: bool, also: Also
    ) -> Awaitable[None]: ...


class Consumer:
    """A consumer of a stream. Every call raises `StoreUnavailable` where the store does not answer.

    What calls do `also` is done in one transaction with the rest, as is a line of the audit log.

    Args:
        sessions: Connections to the store.
        info: The consumer.
        stream: What it reads.
        save: Stores a change of `disabled`.
        freed: Called when other processes may have something to hand out.
        permits: Those of its receives.
    """

    def __init__(
        self,
        sessions: Sessions,
        info: ConsumerInfo,
        stream: StreamRef,
        save: _Save,
        freed: Callable[[int], None],
        permits: Permits,
    ) -> None:
        self.stream = stream
        self._sessions = sessions
        self._save = save
        self._freed = freed
        self._steps = StepWriter(sessions, info, stream)
        self._loop = Loop(self._steps, freed, permits)

    @property
    def info(self) -> ConsumerInfo:
        """The consumer's settings."""
        return self._steps.info

    @property
    def newest(self) -> tuple[int, State] | None:
        """The state as this process has it, and its number in the log; None while it has none."""
        return self._steps.log.newest

    def change(self, info: ConsumerInfo) -> None:
        """Take over changed settings."""
        self._steps.change(info)
        self._loop.wake()

    async def begin(self) -> None:
        """Choose where a new consumer starts, before the first receive."""
        if self._steps.log.state is None:
            await self._loop.alone(self._steps.load)

    def head_moved(self) -> None:
        """Look for new messages."""
        self._steps.reader.view.head_stale = True
        self._loop.wake()

    def log_moved(self) -> None:
        """Look at the steps of other processes."""
        self._steps.stale = True
        self._loop.wake()

    async def close(self, error: ConsumerError | None = None) -> None:
        """Stop; what waits is answered with nothing, or with `error`."""
        await self._loop.close(error)
        await self._steps.close()

    async def receive(self, limit: int, wait: float) -> Received:
        """Hand out up to `limit` messages, as soon as there is one; none after `wait` seconds.

        Cancelling takes nothing. Raises `TooManyWaiting` where this would be one too many to wait.
        """
        return await self._loop.receive(limit, wait)

    async def ack(self, tokens: Sequence[str], *, followed: bool = False) -> Outcome:
        """Take messages as done, for ever; those that are done already count as taken.

        `followed` is for a worker that may receive next: where receives have followed acks before,
        this takes what the next one is answered with, at no further cost.
        """
        return await self._loop.ask("ack", tokens, followed=followed)

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
        return await self._loop.ask("nack", tokens, int(delay * 1_000_000), (status, reason))

    async def extend(self, tokens: Sequence[str], seconds: float | None = None) -> Outcome:
        """Give deliveries `seconds` from now, or ack_wait_ms; those that are done are refused."""
        wait = self._steps.ack_wait if seconds is None else int(seconds * 1_000_000)
        return await self._loop.ask("extend", tokens, wait)

    async def release(self, tokens: Sequence[str]) -> Outcome:
        """Give back what a client never got: available at once, and not counted as delivered."""
        return await self._loop.ask("release", tokens)

    async def rewind(
        self, to: Position | datetime | Literal["all", "new"], also: Also = ()
    ) -> Position:
        """Go on from a message, a commit time, the first or the next one; return the cursor.

        What is out is forgotten, and its tokens are refused as unknown from now on.
        """

        async def work() -> Position:
            cursor = await self._steps.cursor_of(to)
            while True:
                await self._steps.load_newest()
                if await self._steps.log.append(Entry(cursor=cursor, rewound=True), also=also):
                    self._steps.reader.seek(cursor)
                    self._steps.reader.forget()
                    self._freed(self.info.id)
                    return commit_position(*cursor)

        return await self._loop.alone(work)

    async def effect_of_rewind(
        self, to: Position | datetime | Literal["all", "new"]
    ) -> RewindEffect:
        """Return what a rewind to there would do; it is not done."""

        async def work() -> tuple[StreamPosition, StreamPosition, int, dict[int, Parked]]:
            cursor = await self._steps.cursor_of(to)
            state = await self._steps.load_newest()
            skipped = sum(message[:2] <= cursor for message in state.held.values())
            skipped += sum(at <= cursor for at in state.replays)
            skipped += sum(of[0] for of in state.parked.values() if of[3:] <= cursor)
            partly = {
                group: (*of[:3], *cursor)
                for group, of in state.parked.items()
                if of[1:3] <= cursor < of[3:]
            }
            return cursor, state.cursor, skipped, partly

        cursor, now, skipped, partly = await self._loop.alone(work)
        # Not the loop's own: the consumer works on meanwhile.
        reader = ConsumerReader(self._sessions, self.stream, self.info.id, self.info.settings)
        await reader.view.refresh()
        first, last = sorted((cursor, now))
        between, end = await reader.count(first, COUNTED, last)
        exact = end >= min(last, reader.view.head)
        if cursor > now:
            return RewindEffect(skipped + between, 0, exact)
        parked = await reader.behind(reader.view.head, partly, COUNTED) if partly else []
        return RewindEffect(skipped + len(parked), between, exact)

    async def messages(
        self, state: Literal["pending", "delivered", "dead"], limit: int
    ) -> list[ConsumerMessage]:
        """Look at messages without taking them, in their order."""
        if state == "dead":
            letters = await self._dead_letters(limit, 0, replayed=False)
            return [
                ConsumerMessage(
                    letter.position, letter.deliver_count, letter.message.encode(), None
                )
                for letter in letters
            ]
        found = await self._loop.alone(self._steps.load_newest)
        if state == "delivered":
            now = self._sessions.clock.now()
            held = sorted(found.held.values())[:limit]
            texts = await self._steps.reader.texts([message[:2] for message in held])
            return [
                ConsumerMessage(
                    commit_position(*message[:2]),
                    message[4],
                    texts[message[:2]],
                    datetime.fromtimestamp(message[5] / 1e6, UTC) if message[5] > now else None,
                )
                for message in held
                if message[:2] in texts
            ]
        reader = ConsumerReader(self._sessions, self.stream, self.info.id, self.info.settings)
        await reader.view.refresh()
        rows = await reader.behind(found.cursor, found.parked, limit)
        return [ConsumerMessage(commit_position(*row[:2]), 0, row[4] or b"", None) for row in rows]

    async def standing(self, at: StreamPosition) -> Standing:
        """Return where the message at a position of the stream's own stands."""

        async def work() -> Standing:
            state = await self._steps.load_newest()
            reader = self._steps.reader
            group, _ = await reader.groups_of(at)
            taken = await reader.takes(at)
            return standing_of(state, at, group, self._sessions.clock.now(), taken=taken)

        return await self._loop.alone(work)

    async def dead_letters(self, limit: int, after: int = 0) -> list[ConsumerLetter]:
        """Return dead letters behind number `after`, replayed ones too, the oldest first."""
        return await self._dead_letters(limit, after, replayed=True)

    async def _dead_letters(
        self, limit: int, after: int, *, replayed: bool
    ) -> list[ConsumerLetter]:
        await self._loop.alone(self._expire)
        values = {"consumer": self.info.id, "after": after, "replayed": replayed, "limit": limit}
        rows = await self._sessions.rows(SQL["dead_letters"], values)
        return [ConsumerLetter(row[0], commit_position(*row[1:3]), *row[3:]) for row in rows]

    async def facts(self) -> ConsumerFacts:
        """Return how the consumer is, after the steps of all processes."""

        async def work() -> ConsumerFacts:
            state = await self._steps.load_newest()
            reader = self._steps.reader
            reader.seek(state.cursor)
            waiting = await self._steps.pending.number(state)
            first = oldest_position(state)
            if first is not None:
                oldest = await reader.oldest(first)
            else:
                oldest = await reader.oldest(state.cursor, behind=True) if waiting else None
            ((dead,),) = await self._sessions.rows(SQL["count_dead_letters"], (self.info.id,))
            now = self._sessions.clock.now()
            return facts_of(state, now, waiting=waiting, oldest=oldest, dead=dead)

        return await self._loop.alone(work)

    async def _expire(self) -> None:
        await self._steps.load_newest()
        await self._loop.expire()

    async def replay(self, number: int, also: Also = ()) -> None:
        """Put a dead letter back into the consumer; raises `UnknownDeadLetter`."""

        async def work() -> None:
            rows = await self._sessions.rows(SQL["dead_letter"], (self.info.id, number))
            if not rows:
                raise UnknownDeadLetter(f"Consumer {self.info.name!r} has no dead letter {number}.")
            position: tuple[int, int] = rows[0]
            done = ((SQL["mark_replayed"], (number,)), *also)
            while True:
                state = await self._steps.load_newest()
                held = any(message[:2] == position for message in state.held.values())
                # What lies behind the cursor comes anyway.
                if held or position > state.cursor:
                    async with self._sessions.session() as connection, connection.transaction():
                        await execute_all(connection, done)
                    return
                groups = await self._steps.reader.groups_of(position)
                entry = Entry(replays=[(*position, *groups)])
                if await self._steps.log.append(entry, also=done):
                    self._freed(self.info.id)
                    return

        await self._loop.alone(work)

    async def disable(self, reason: str) -> None:
        """Record why the webhook gets no more deliveries; its messages stay."""
        await self._save(self.info, reason, paused=False, also=())

    async def pause(self, by: str, also: Also = ()) -> None:
        """Deliver nothing and answer receives with nothing, until it is enabled; its messages stay."""
        await self._save(self.info, f"{by} paused it", paused=True, also=also)

    async def enable(self, also: Also = ()) -> None:
        """Take a `disable` or a `pause` back."""
        await self._save(self.info, None, paused=False, also=also)
