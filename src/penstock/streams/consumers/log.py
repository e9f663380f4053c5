"""A consumer's log in the store: read, written to, and replaced when it has grown long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from functools import cached_property
from typing import Final

import psycopg
import structlog
from psycopg import sql

from penstock.streams.connection import Also
from penstock.streams.consumers.entry import Entry, StreamPosition
from penstock.streams.consumers.line import Call, Statement, Value
from penstock.streams.consumers.sessions import SQL, Connection, Sessions, composed, execute_all
from penstock.streams.consumers.state import Held, State, is_state, replay
from penstock.streams.consumers.types import StoreUnavailable, UnknownConsumer
from penstock.streams.consumers.view import SegmentView
from penstock.streams.names import consumer_table, segment_table

_ENTRIES: Final = 2_000
_BYTES: Final = 4 << 20
_log: Final = structlog.get_logger("penstock.streams")


class ConsumerLog:
    """The log of one consumer, and the state that it comes to. Used by one task.

    Raises `StoreUnavailable`, and `UnknownConsumer` where the consumer was deleted.
    """

    def __init__(self, sessions: Sessions, consumer: int, name: str) -> None:
        self._sessions = sessions
        self._consumer = consumer
        self._name = name
        self.state: State | None = None
        """None while it has to be read."""
        self._seq = 0
        self._entries = 0  # behind the last whole state
        self._bytes = 0
        self._doubtful: tuple[int, str, range] | None = None
        self.lost: range | None = None
        """Deliveries of a step that was taken although its requests were answered with a failure."""
        self._table = consumer_table(consumer)

    @cached_property
    def _append(self) -> sql.Composed:
        return composed("append", log=self._table)

    @cached_property
    def _append_alone(self) -> Statement:
        return Statement(self._append)

    @cached_property
    def _since(self) -> sql.Composed:
        return composed("entries", log=self._table)

    @property
    def newest(self) -> tuple[int, State] | None:
        """The number of the last entry that was read, and the state; None while there is none."""
        return None if self.state is None or self._seq == 0 else (self._seq, self.state)

    def forget(self) -> None:
        """Read the log anew before it is used again."""
        self.state = None

    async def load(self, start: Callable[[], Awaitable[StreamPosition]]) -> State:
        """Return the state; an empty log gets its first entry, with the cursor from `start`."""
        if self.state is None:
            self._seq = 0
            await self.sync()
        if self._seq == 0:
            state = State(await start())
            await self._rows(
                composed("first_entry", log=self._table), (state.encode().decode(),), fetch=False
            )
            await self.sync()
        assert self.state is not None  # noqa: S101 - read above
        return self.state

    async def sync(self) -> bool:
        """Take the steps of other processes; return whether there were any."""
        rows = await self._rows(self._since, (self._seq,))
        if not rows:
            return False
        doubtful = self._doubtful
        if doubtful is not None:
            self._doubtful = None
            if any(seq == doubtful[0] and entry == doubtful[1] for seq, entry in rows):
                self.lost = doubtful[2]
        self.state = replay(self.state or State(), (entry for _seq, entry in rows))
        self._seq = rows[-1][0]
        for _seq, entry in rows:
            if is_state(entry):
                self._entries = self._bytes = 0
            else:
                self._entries += 1
                self._bytes += len(entry)
        return True

    async def append(
        self,
        entry: Entry,
        dead: Collection[tuple[Held, str]] = (),
        segments: Collection[SegmentView] = (),
        also: Also = (),
    ) -> bool:
        """Take a step; its `dead`, each with its cause, become dead letters.

        Returns False if another process was faster.

        Then its steps have been read, and this one has to be decided again. `also` joins the step's
        transaction. Raises `UndefinedTable` where one of `segments` has gone.
        """
        state = self.state
        assert state is not None  # noqa: S101 - a step is decided on it
        text = entry.encode().decode()
        values: dict[str, Value] = {"seq": self._seq + 1, "entry": text}
        handed_out = range(state.next, state.next + len(entry.redelivered) + len(entry.new))
        try:
            if dead or also:
                taken = await self._insert_with(values, dead, segments, also)
            else:
                taken = await self._insert_alone(values)
        except (psycopg.errors.UndefinedTable, UnknownConsumer):
            raise
        except BaseException:
            self._doubtful = (self._seq + 1, text, handed_out)
            raise
        if not taken:
            await self.sync()
            return False
        state.apply(entry)
        self._seq += 1
        self._entries += 1
        self._bytes += len(text)
        return True

    async def _insert_alone(self, values: dict[str, Value]) -> bool:
        try:
            (result,) = await self._sessions.run(Call(self._append_alone, values))
        except psycopg.errors.UndefinedTable:
            raise self._unknown() from None
        return result.command_tuples == 1

    async def _insert_with(
        self,
        values: dict[str, Value],
        dead: Collection[tuple[Held, str]],
        segments: Collection[SegmentView],
        also: Also,
    ) -> bool:
        async with self._sessions.session() as connection, connection.transaction():
            if not await self._insert(connection, values):
                return False
            buried = await self._bury(connection, dead, segments) if dead else 0
            await execute_all(connection, also)
        if buried:
            _log.warning("messages became dead letters", consumer=self._name, messages=buried)
        if buried < len(dead):
            _log.warning(
                "messages left their stream before they could become dead letters",
                consumer=self._name, messages=len(dead) - buried,
            )  # fmt: skip
        return True

    async def _insert(self, connection: Connection, values: dict[str, Value]) -> bool:
        try:
            return (await connection.execute(self._append, values)).rowcount == 1
        except psycopg.errors.UndefinedTable:
            raise self._unknown() from None

    async def _bury(
        self,
        connection: Connection,
        dead: Collection[tuple[Held, str]],
        segments: Collection[SegmentView],
    ) -> int:
        """Make dead letters of messages; return of how many, as some may have left their stream."""
        columns = {
            "consumer": self._consumer,
            "lsns": [message[0] for message, _cause in dead],
            "idxs": [message[1] for message, _cause in dead],
            "counts": [message[4] for message, _cause in dead],
            "reasons": [dead_letter_reason(message[4], cause) for message, cause in dead],
        }
        queries: list[str | sql.Composed] = [SQL["dead_again"]]
        for segment in segments:
            if any(segment.after < message[:2] <= segment.through for message, _ in dead):
                table = segment_table(segment.id)
                queries.append(composed("add_dead_letters", segment=table))
        buried: set[StreamPosition] = set()
        for query in queries:
            buried.update(await (await connection.execute(query, columns)).fetchall())
        return len(buried)

    @property
    def long(self) -> bool:
        """Whether the log should be replaced."""
        return self._entries >= _ENTRIES or self._bytes >= _BYTES

    async def replace(self) -> None:
        """Put the state in the place of all entries; where the table is locked, another time."""
        state = self.state
        assert state is not None  # noqa: S101 - it is read before it is replaced
        self._entries = self._bytes = 0
        whole = sql.Literal(state.encode().decode())
        query = composed("replace_log", log=self._table, seq=sql.Literal(self._seq), state=whole)
        try:
            async with self._sessions.session() as connection:
                await connection.execute(query, prepare=False)
        except psycopg.errors.UndefinedTable:
            raise self._unknown() from None
        except StoreUnavailable as error:
            if not isinstance(error.__context__, psycopg.errors.LockNotAvailable):
                raise
        await self.sync()

    async def _rows(
        self, query: object, params: tuple[object, ...], *, fetch: bool = True
    ) -> list[tuple[int, str]]:
        try:
            if not fetch:
                await self._sessions.execute(query, params)
                return []
            return await self._sessions.rows(query, params)
        except psycopg.errors.UndefinedTable:
            raise self._unknown() from None

    def _unknown(self) -> UnknownConsumer:
        return UnknownConsumer(f"There is no consumer {self._name!r} any more.")


def dead_letter_reason(count: int, cause: str) -> str:
    """Return the reason of a dead letter: how often it was delivered, and why the last one failed."""
    which = "The only delivery" if count == 1 else f"The last of {count} deliveries"
    return f"{which} failed: {cause}".replace("\0", "\N{REPLACEMENT CHARACTER}")
