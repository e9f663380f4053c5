"""How many receives of a consumer are served at a time (`max_waiting`), over all processes of a store.

A process holds permits in the store, more than it needs, so that a receive costs no statement: it
takes them in blocks, half of what is free at a time, and returns what it did not use for a second.
Where none is free, the other processes are asked for those that they don't use. A process is seen
every second while it holds any; what one held that was not seen for `_EXPIRY` seconds is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from typing import Final

from penstock.core import queries
from penstock.streams.consumers.sessions import Sessions, stopped
from penstock.streams.consumers.types import StoreUnavailable, TooManyWaiting
from penstock.streams.names import LOCK_PERMITS

_SQL: Final = queries.load("penstock.streams.consumers", "receive_limit.sql")
_HEARTBEAT: Final = 1.0
_EXPIRY: Final = 4.0
_ASKED: Final = 5  # how often it looks for what the other processes return when they are asked
_PAUSE: Final = 0.2  # seconds from one look to the next, unless one of them reports it
_WANTED: Final = 3.0  # seconds for which a process that was asked returns what it does not use
_REFUSED: Final = 1.0  # seconds for which an answer that there are no more counts


class Permits:
    """The permits of one consumer that this process holds.

    Args:
        limit: This process's.
        consumer: The consumer's id.
    """

    def __init__(self, limit: ReceiveLimit, consumer: int) -> None:
        self._limit = limit
        self._consumer = consumer
        self._taking = asyncio.Lock()
        self._refused_until = self._wanted_until = 0.0
        self._freed = asyncio.Event()
        self.held = 0
        self.used = 0
        self.peak = 0
        """How many were used at a time since the last heartbeat."""

    async def enter(self, name: str, most: int) -> None:
        """Use a permit; raises `TooManyWaiting` where `most` receives are served already."""
        if self.used >= min(self.held, most):
            await self._take_more(name, most)
        self.used += 1
        self.peak = max(self.peak, self.used)

    def leave(self) -> None:
        """Give the permit back."""
        self.used -= 1
        if self._wanted_until and asyncio.get_running_loop().time() < self._wanted_until:
            self._limit.give_beside(self)

    async def _take_more(self, name: str, most: int) -> None:
        loop = asyncio.get_running_loop()
        async with self._taking:
            looked = 0
            while self.used >= min(self.held, most):
                if self.used >= most or loop.time() < self._refused_until:
                    raise too_many(name, most)
                self._freed.clear()
                self.held = await self._limit.take(self._consumer, self.used + 1, self.held, most)
                if self.used < self.held:
                    return
                if looked == _ASKED:
                    self._refused_until = loop.time() + _REFUSED
                    raise too_many(name, most)
                looked += 1
                self._limit.ask(self._consumer)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), _PAUSE)

    def wanted(self) -> None:
        """Note that another process lacks some: what is not used, now and soon, is returned."""
        self._wanted_until = asyncio.get_running_loop().time() + _WANTED
        self._limit.give_beside(self)

    def freed(self) -> None:
        """Note that another process has returned some."""
        self._refused_until = 0.0
        self._freed.set()

    async def give(self, keep: int) -> bool:
        """Return what is held beyond `keep`, and whether that was anything."""
        async with self._taking:
            keep = max(keep, self.used)
            if self.held <= keep:
                return False
            self.held, held = keep, self.held
            try:
                await self._limit.put(self._consumer, keep)
            except StoreUnavailable:
                self.held = held
                return False
            return True


class ReceiveLimit:
    """The permits that this process holds in a store.

    Args:
        sessions: Connections to the store.
        notify: Sends a notice to the other processes.
    """

    def __init__(self, sessions: Sessions, notify: Callable[[str], None]) -> None:
        self._sessions = sessions
        self._notify = notify
        self._process = str(uuid.uuid4())
        self._permits: dict[int, Permits] = {}
        self._task: asyncio.Task[None] | None = None
        self._giving: set[asyncio.Task[None]] = set()

    def of(self, consumer: int) -> Permits:
        """Return the permits of a consumer."""
        if consumer not in self._permits:
            self._permits[consumer] = Permits(self, consumer)
        return self._permits[consumer]

    def forget(self, consumer: int) -> None:
        """Forget a consumer that is gone."""
        self._permits.pop(consumer, None)

    async def take(self, consumer: int, wanted: int, held: int, most: int) -> int:
        """Hold at least `wanted` permits, if there are so many; return how many are held."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        values = {
            "lock": LOCK_PERMITS,
            "consumer": consumer,
            "process": self._process,
            "wanted": wanted,
            "held": held,
            "most": most,
            "expiry": _EXPIRY,
        }
        async with self._sessions.session() as connection, connection.transaction():
            # The lock first: a statement sees what was committed before it began.
            await connection.execute(_SQL["lock_permits"], values)
            rows = await connection.execute(_SQL["take_permits"], values)
            row = await rows.fetchone()
        return int(row[0]) if row else 0

    async def put(self, consumer: int, keep: int) -> None:
        """Hold `keep` permits alone."""
        values = {"consumer": consumer, "process": self._process, "keep": keep}
        await self._sessions.execute(_SQL["put_permits"], values)
        self._notify(f"f{consumer}")

    def ask(self, consumer: int) -> None:
        """Ask the other processes for what they don't use."""
        self._notify(f"w{consumer}")

    def asked(self, consumer: int) -> None:
        """Return what is not used, as another process has asked for it."""
        if (permits := self._permits.get(consumer)) is not None:
            permits.wanted()

    def give_beside(self, permits: Permits) -> None:
        """Return what is not used, beside everything else."""
        if permits.held > permits.used:
            task = asyncio.create_task(self._give(permits))
            self._giving.add(task)
            task.add_done_callback(self._giving.discard)

    async def _give(self, permits: Permits) -> None:
        await permits.give(0)

    def freed(self, consumer: int) -> None:
        """Note that another process has returned some."""
        if (permits := self._permits.get(consumer)) is not None:
            permits.freed()

    async def _serve(self) -> None:
        """Be seen, and return what was not used, as long as anything is held."""
        while True:
            await asyncio.sleep(_HEARTBEAT)
            with contextlib.suppress(StoreUnavailable):
                for permits in list(self._permits.values()):
                    peak, permits.peak = permits.peak, permits.used
                    await permits.give(peak)
                if not any(permits.held for permits in self._permits.values()):
                    return
                if not await self._sessions.execute(_SQL["see_receiver"], (self._process,)):
                    # It was away for so long that others have what it held.
                    for permits in self._permits.values():
                        permits.held = 0

    async def close(self) -> None:
        """Return all."""
        await stopped(self._task)
        for task in list(self._giving):
            await stopped(task)
        if self._task is not None:
            with contextlib.suppress(StoreUnavailable):
                await self._sessions.execute(_SQL["remove_receiver"], (self._process,))


def too_many(name: str, most: int) -> TooManyWaiting:
    """Return the error of a receive where `most` are served already."""
    return TooManyWaiting(
        f"{most} receives wait for {name!r} already, in all processes of the store: wait with fewer "
        "workers, or raise the consumer's max_waiting."
    )
