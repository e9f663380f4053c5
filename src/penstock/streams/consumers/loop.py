"""The task that takes a consumer's steps.

Each is one row in the consumer's log and one commit, however many receives, acks and nacks it serves;
what comes meanwhile goes into the next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import structlog

from penstock.streams.consumers.ack_tokens import Ref, read_tokens
from penstock.streams.consumers.claims import ReceiveClaims
from penstock.streams.consumers.receive_limit import Permits
from penstock.streams.consumers.reports import Kind, Refused, Request
from penstock.streams.consumers.sessions import stopped
from penstock.streams.consumers.steps import StepWriter
from penstock.streams.consumers.types import (
    ConsumerError,
    Delivery,
    Outcome,
    Received,
    StoreUnavailable,
    UnknownConsumer,
)
from penstock.streams.consumers.waiting import Waiter, Waiters

_POLL: Final = 1.0
_PATIENCE: Final = 1.0  # for giving back what no receive has taken, at the end
_log: Final = structlog.get_logger("penstock.streams")

T = TypeVar("T")


class _Asked(NamedTuple):
    request: Request
    done: asyncio.Future[Refused]
    followed: bool = False  # a receive may follow


class Loop:
    """Serves the requests to one consumer, in steps, while there is something to do.

    Args:
        steps: The consumer's.
        freed: Called when other processes may have something to hand out.
        permits: Those of its receives.
    """

    def __init__(self, steps: StepWriter, freed: Callable[[int], None], permits: Permits) -> None:
        self._steps = steps
        self._permits = permits
        self._freed = freed
        self._asked: list[_Asked] = []
        self._waiters = Waiters()
        self._claims = ReceiveClaims(self._give_back)
        self._calls: deque[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._gone: ConsumerError | None = None

    def wake(self) -> None:
        """Look for something to do."""
        self._wake.set()

    async def close(self, error: ConsumerError | None = None) -> None:
        """Stop; what waits is answered with nothing, or with `error`."""
        self._gone = error or _ending()
        if error is None and (given := self._give_back(self._claims.end())) is not None:
            await asyncio.wait([given], timeout=_PATIENCE)
        await stopped(self._task)
        if error is None:
            for waiter in self._waiters.end():
                _resolve(waiter.done, Received([], 0, 0))
        self._fail(self._gone)

    async def receive(self, limit: int, wait: float) -> Received:
        """Hand out up to `limit` messages, as soon as there is one; none after `wait` seconds.

        Cancelling takes nothing. Raises `TooManyWaiting` where too many receives are served already.
        """
        self._start()
        self._claims.received(limit)
        if (received := self._claimed(limit)) is not None:
            return received
        info = self._steps.info
        await self._permits.enter(info.name, info.settings.max_waiting)
        try:
            return await self._receive(limit, wait)
        finally:
            self._permits.leave()

    async def _receive(self, limit: int, wait: float) -> Received:
        self._start()
        done = self._waiters.add(limit, wait).done
        try:
            return await done
        except asyncio.CancelledError:
            if done.done() and not done.cancelled() and done.exception() is None:
                self._give_back(done.result().deliveries)
            raise

    def _claimed(self, limit: int) -> Received | None:
        """Return what an ack's step has handed out already for such a receive."""
        state = self._steps.log.state
        if state is None or self._steps.stale or self._waiters or self._steps.info.paused:
            return None
        return self._claims.receive(limit, state)

    async def ask(
        self,
        kind: Kind,
        tokens: Sequence[str],
        value: int = 0,
        failure: tuple[int | None, str | None] = (None, None),
        *,
        followed: bool = False,
    ) -> Outcome:
        """Serve a request about deliveries in the next step; `followed` where a receive may follow."""
        refs = read_tokens(self._steps.info.id, tokens)
        self._start()
        refused = await self._add(Request(kind, refs, value, failure), followed=followed)
        return Outcome(len(tokens) - len(refused), [(tokens[at], why) for at, why in refused])

    async def alone(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` between two steps."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._start()
        self._calls.append((work, done))
        return await done

    def _start(self) -> None:
        if self._gone is not None:
            raise self._gone
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        self._wake.set()

    def _add(self, request: Request, *, followed: bool = False) -> asyncio.Future[Refused]:
        done: asyncio.Future[Refused] = asyncio.get_running_loop().create_future()
        self._asked.append(_Asked(request, done, followed))
        return done

    async def _serve(self) -> None:
        more = False
        while True:
            if not (more or self._asked or self._calls or self._waiters.some_new):
                await self._wait()
            self._wake.clear()
            asked, self._asked = self._asked, []
            more = False
            try:
                if self._calls:
                    await self._call()
                await self._steps.load()
                self._release(self._steps.lost())
                more = await self._step(asked, self._waiters.open())
            except ConsumerError as error:
                self._fail(error, asked)
            except Exception as error:
                _log.exception("a consumer's step failed", consumer=self._steps.info.name)
                self._fail(StoreUnavailable(f"The step failed: {type(error).__name__}."), asked)
            except BaseException:
                for one in asked:  # `close` answers what waits in the lists
                    _reject(one.done, self._gone or _ending())
                raise

    async def _wait(self) -> None:
        """Wait for a request, new messages, a message that comes back, or a receive's end."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        waiting = self._waiters.open()
        if not waiting:
            await self._wake.wait()
            return
        steps = self._steps
        until = min(now + _POLL, *(waiter.deadline for waiter in waiting))
        state = steps.log.state
        if state is not None and (back := state.next_time()) is not None:
            until = min(until, now + (back - steps.sessions.clock.now()) / 1e6)
        timer = loop.call_at(until, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()
        if loop.time() >= now + _POLL:
            steps.stale = steps.reader.view.head_stale = True

    async def _call(self) -> None:
        work, done = self._calls.popleft()
        try:
            result = await work()
        except ConsumerError as error:
            _reject(done, error)
        except Exception as error:
            _log.exception("a consumer's request failed", consumer=self._steps.info.name)
            self._steps.log.forget()
            _reject(done, StoreUnavailable(f"The request failed: {type(error).__name__}."))
        except BaseException:
            _reject(done, self._gone or _ending())
            raise
        else:
            _resolve(done, result)

    async def expire(self) -> None:
        """Take a step without requests, within a work for `alone`: it makes the dead letters due."""
        await self._step([], [])

    async def _step(self, asked: Sequence[_Asked], waiting: Sequence[Waiter]) -> bool:
        """Take one step; return whether another may find more."""
        steps = self._steps
        claims = self._claims
        paused = steps.info.paused
        if paused and claims:
            self._give_back(claims.end())
        limit = 0 if paused else sum(waiter.limit for waiter in waiting)
        followed = 0 if paused else sum(one.followed for one in asked)
        expected = claims.expected(followed) if followed and steps.may_claim else 0
        ready = 0
        if claims and steps.log.state is not None:
            claims.check(steps.log.state)
            ready = min(len(claims), limit)
        taken = await steps.take([one.request for one in asked], limit - ready + expected)
        claims.acked(followed)
        for one, refused in zip(asked, taken.refused, strict=True):
            _resolve(one.done, refused)
        now = asyncio.get_running_loop().time()
        mine = limit - ready
        deliveries = taken.deliveries[:mine]
        if ready:
            deliveries = claims.take(ready) + deliveries
        numbers = (0, 0)
        if deliveries or expected or any(waiter.deadline <= now for waiter in waiting):
            numbers = await steps.pending.number(taken.state), len(taken.state.held)
        if len(taken.deliveries) > mine:
            claims.add(taken.first + mine, taken.deliveries[mine:], numbers)
        unclaimed = self._waiters.answer(waiting, deliveries, numbers, now)
        self._give_back(unclaimed)
        if taken.moved and (asked or taken.dead):
            self._freed(steps.info.id)
        if steps.log.long:
            await steps.log.replace()
        return taken.moved and bool(self._waiters)

    def _give_back(self, deliveries: Sequence[Delivery]) -> asyncio.Future[Refused] | None:
        tokens = [delivery.token for delivery in deliveries]
        return self._release(read_tokens(self._steps.info.id, tokens)) if tokens else None

    def _release(self, refs: Sequence[Ref | None]) -> asyncio.Future[Refused] | None:
        if not refs:
            return None
        done = self._add(Request("release", refs))
        done.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._wake.set()
        return done

    def _fail(self, error: ConsumerError, asked: Sequence[_Asked] = ()) -> None:
        """Answer all with an error; the log is read anew."""
        self._steps.log.forget()
        calls, self._calls = self._calls, deque()
        pending, self._asked = [*asked, *self._asked], []
        futures: list[asyncio.Future[Any]] = [waiter.done for waiter in self._waiters.end()]
        futures += [one.done for one in pending] + [done for _work, done in calls]
        for future in futures:
            _reject(future, error)
        if isinstance(error, UnknownConsumer):
            self._gone = error


def _ending() -> ConsumerError:
    return StoreUnavailable("This process is stopping: send the request to another one.")


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _reject(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
