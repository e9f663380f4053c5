"""The task that takes a consumer's steps.

Each is one row in the consumer's log and one commit, however many receives, acks and nacks it serves;
what comes meanwhile goes into the next. The store is read ahead beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Literal, TypeVar

import structlog

from penstock.core.message import Position
from penstock.streams.consumers.ack_tokens import Ref, make_tokens, read_tokens
from penstock.streams.consumers.log import ConsumerLog
from penstock.streams.consumers.pending import Pending
from penstock.streams.consumers.reader import Reader, StreamRef
from penstock.streams.consumers.sessions import Sessions, stopped
from penstock.streams.consumers.state import START, Entry, State
from penstock.streams.consumers.step import Step
from penstock.streams.consumers.types import (
    ConsumerError,
    ConsumerInfo,
    Delivery,
    Outcome,
    Received,
    StoreUnavailable,
    TooManyWaiting,
    UnknownConsumer,
)
from penstock.streams.records import stream_end

_POLL: Final = 1.0
_log: Final = structlog.get_logger("penstock.streams")

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Request:
    """A client's request about deliveries; `value` is a time in µs, `failure` of a nack alone."""

    kind: Literal["ack", "nack", "extend", "release"]
    refs: Sequence[Ref | None]
    value: int
    done: asyncio.Future[list[tuple[int, str]]]
    failure: tuple[int | None, str | None] = (None, None)  # HTTP status, reason


@dataclass(slots=True, eq=False)
class Waiter:
    """A receive; it waits until `deadline` of the event loop's time."""

    limit: int
    deadline: float
    done: asyncio.Future[Received]
    seen: bool = False  # a step had nothing for it


class Stepper:
    """Serves the requests to one consumer.

    Args:
        sessions: Connections to the store.
        info: The consumer.
        stream: What it reads.
        save: Stores a change of `disabled`.
        freed: Called when other processes may have something to hand out.
    """

    def __init__(
        self,
        sessions: Sessions,
        info: ConsumerInfo,
        stream: StreamRef,
        save: Callable[[ConsumerInfo, str | None], Awaitable[None]],
        freed: Callable[[int], None],
    ) -> None:
        self.info = info
        self.stream = stream
        self._sessions = sessions
        self._save = save
        self._freed = freed
        self._log = ConsumerLog(sessions, info.id, info.name)
        self._requests: list[Request] = []
        self._waiters: deque[Waiter] = deque()
        self._calls: deque[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = deque()
        self._wake = asyncio.Event()
        self._sync = False
        self._crowded = False  # another process steps too
        self._task: asyncio.Task[None] | None = None
        self._refill: asyncio.Task[None] | None = None
        self._gone: ConsumerError | None = None
        self._set_up()

    def _set_up(self) -> None:
        info = self.info
        self._reader = Reader(self._sessions, self.stream, info.id, info.settings.filters)
        self._pending = Pending(self._reader)
        name = info.name.replace("\\", "\\\\").replace('"', '\\"')
        self._suffix = f',"consumer":{{"id":"{info.id}","name":"{name}"}}}}}}'.encode()

    # What the process says

    def change(self, info: ConsumerInfo) -> None:
        """Take over settings that were changed."""
        filtered = info.settings.filters != self.info.settings.filters
        self.info = info
        if filtered:
            self._pending.close()
            self._refill = None
            self._set_up()
        self._wake.set()

    async def begin(self) -> None:
        """Settle where a new consumer starts, before anybody receives."""
        if self._log.state is None:
            await self._alone(self._load)

    def head_moved(self) -> None:
        """Look for new messages."""
        self._reader.head_stale = True
        self._wake.set()

    def log_moved(self) -> None:
        """Look at what other processes did."""
        self._sync = True
        self._wake.set()

    async def close(self, error: ConsumerError | None = None) -> None:
        """Stop; what waits is answered with nothing, or with `error`."""
        self._gone = error or StoreUnavailable("This process is ending: ask another one.")
        await stopped(self._task)
        await stopped(self._refill)
        self._pending.close()
        if error is None:
            while self._waiters:
                _resolve(self._waiters.popleft().done, Received([], 0, 0))
        self._fail(self._gone)

    # The task

    def _need_step(self) -> None:
        if self._gone is not None:
            raise self._gone
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        self._wake.set()

    async def _ask(
        self,
        kind: Literal["ack", "nack", "extend", "release"],
        tokens: Sequence[str],
        value: int = 0,
        failure: tuple[int | None, str | None] = (None, None),
    ) -> Outcome:
        done = asyncio.get_running_loop().create_future()
        refs = read_tokens(self.info.id, tokens)
        self._need_step()
        self._requests.append(Request(kind, refs, value, done, failure))
        refused = await done
        return Outcome(len(tokens) - len(refused), [(tokens[at], why) for at, why in refused])

    async def _alone(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` between two steps."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._need_step()
        self._calls.append((work, done))
        return await done

    async def _serve(self) -> None:
        again = False
        while True:
            if not (
                again or self._requests or self._calls or any(not w.seen for w in self._waiters)
            ):
                await self._wait()
            self._wake.clear()
            requests, self._requests = self._requests, []
            try:
                if self._calls:
                    await self._call()
                await self._load()
                again = await self._step(requests, self._waiting())
            except ConsumerError as error:
                again = False
                self._fail(error, requests)
            except Exception as error:
                again = False
                _log.exception("a consumer's step failed", consumer=self.info.name)
                self._fail(StoreUnavailable(f"The step failed: {type(error).__name__}."), requests)
            except BaseException:
                for request in requests:  # what waits in the lists `close` answers
                    _reject(request.done, self._ending)
                raise

    async def _wait(self) -> None:
        """Wait for something to do: a request, news, a message that comes back, a waiter's end."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        waiting = self._waiting()
        if not waiting:
            await self._wake.wait()
            return
        until = min(now + _POLL, *(waiter.deadline for waiter in waiting))
        state = self._log.state
        if state is not None and (back := state.next_time()) is not None:
            until = min(until, now + (back - self._sessions.clock.now()) / 1e6)
        timer = loop.call_at(until, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()
        if loop.time() >= now + _POLL:
            self._sync = self._reader.head_stale = True

    async def _call(self) -> None:
        work, done = self._calls.popleft()
        try:
            result = await work()
        except ConsumerError as error:
            if not done.done():
                done.set_exception(error)
        except Exception as error:
            _log.exception("a consumer's request failed", consumer=self.info.name)
            self._log.forget()
            _reject(done, StoreUnavailable(f"The request failed: {type(error).__name__}."))
        except BaseException:
            _reject(done, self._ending)
            raise
        else:
            _resolve(done, result)

    async def _load(self) -> State:
        """Return the state, with what other processes did."""
        if self._sync or self._crowded or self._log.state is None:
            await self._log.load(self._first_cursor)
            self._sync = False
            self._crowded = await self._log.sync()
        state = await self._log.load(self._first_cursor)
        if self._log.lost is not None:
            lost, self._log.lost = self._log.lost, None
            refs = [(*state.held[n][:2], n) for n in lost if n in state.held]
            self._release(refs)
        return state

    async def _load_newest(self) -> State:
        """Return the newest state, with the reader knowing all that it speaks of."""
        self._sync = True
        state = await self._load()
        await self._reader.refresh(state.cursor)
        return state

    async def _target(self, to: Position | datetime | str) -> tuple[int, int]:
        reader = self._reader
        reader.head_stale = True
        await reader.refresh()
        if isinstance(to, Position):
            return min((to.lsn, stream_end(to.idx - 1)), reader.head)
        if isinstance(to, datetime):
            at = to.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds")
            return min(await reader.at_time(at), reader.head)
        return START if to == "all" else reader.head

    async def _first_cursor(self) -> tuple[int, int]:
        return await self._target(self.info.settings.deliver_policy)

    async def _step(self, requests: list[Request], waiters: list[Waiter]) -> bool:
        """Take one step; return whether another may find more."""
        settings, reader = self.info.settings, self._reader
        wanted = sum(waiter.limit for waiter in waiters)
        sure = False
        while True:
            state = self._log.state
            assert state is not None  # noqa: S101 - loaded before
            await reader.refresh(state.cursor)
            now = self._sessions.clock.now()
            state.advance(now)
            reader.seek(state.cursor)
            step = Step(state, now, settings.max_deliver, settings.max_ack_pending)
            step.expire()
            refused = [_put(step, request) for request in requests]
            if step.unsure and not sure:
                sure = True
                if await self._log.sync():
                    self._crowded = True
                    continue
            texts, passed = await self._take(step, state, wanted) if wanted else ([], 0)
            entry = step.entry(self._ack_wait)
            if entry is None:
                break
            if reader is self._reader and len(reader.rows) - passed < 2_000:
                self._read_ahead()
            counts = [state.held[number][4] + 1 for number in step.again]
            first = state.next
            append = partial(self._append, entry, step)
            if await (reader.whole(append) if step.dead else append()):
                if passed:
                    reader.passed(passed, state.cursor)
                break
            self._crowded = True
        for request, reasons in zip(requests, refused, strict=True):
            _resolve(request.done, reasons)
        deliveries: list[Delivery] = []
        if texts:
            deliveries = self._deliveries(state, first, counts, texts)
        await self._answer(state, waiters, deliveries)
        if entry is not None and (requests or step.dead):
            self._freed(self.info.id)
        if self._log.long:
            await self._log.replace()
        return entry is not None and bool(self._waiters)

    async def _append(self, entry: Entry, step: Step) -> bool:
        dead = [(message, step.cause(number)) for number, message in step.dead.items()]
        return await self._log.append(entry, dead, self._reader.segments)

    async def _take(self, step: Step, state: State, wanted: int) -> tuple[list[bytes], int]:
        """Choose what is handed out; return its JSON, and how many read rows the cursor passes."""
        reader = self._reader
        if (beginning := reader.expired(state.cursor)) is not None:
            name = self.info.name
            _log.warning("messages expired before they were handed out", consumer=name)
            step.skip_to(beginning)
            reader.seek(beginning)
        texts: list[bytes] = []
        if again := step.take_again(wanted):
            found = await reader.texts([state.held[number][:2] for number in again])
            step.drop([number for number in again if state.held[number][:2] not in found])
            texts = [found[state.held[number][:2]] for number in step.again]
        if state.replays and (free := step.free_replays(wanted)):
            step.take_replays(free, await reader.texts(free))
        reader.trim()
        while missing := step.take_parked(wanted, reader):
            await reader.look_up(missing)
        passed = step.take_new(wanted, reader.rows)
        if step.taken < wanted and not step.full and not reader.at_head:
            if self._refill is not None:
                await self._refill
            if len(reader.rows) == passed:
                await reader.fill()
            passed = step.take_new(wanted, reader.rows, passed)
        return texts + [row[4] or b"" for row in step.new], passed

    def _read_ahead(self) -> None:
        if self._reader.low and (self._refill is None or self._refill.done()):
            self._refill = asyncio.create_task(self._filled(self._reader))

    @staticmethod
    async def _filled(reader: Reader) -> None:
        with contextlib.suppress(StoreUnavailable):  # the next step sees for itself
            await reader.fill()

    def _deliveries(
        self, state: State, first: int, counts: list[int], texts: list[bytes]
    ) -> list[Delivery]:
        held, suffix = state.held, self._suffix
        positions = [Position._make(held[n][:2]) for n in range(first, first + len(texts))]
        counts += [1] * (len(texts) - len(counts))
        tokens = make_tokens(self.info.id, first, positions)
        messages = [text[:-2] + suffix for text in texts]
        return list(map(Delivery, tokens, counts, messages, positions))

    async def _answer(
        self, state: State, waiters: list[Waiter], deliveries: list[Delivery]
    ) -> None:
        """Give deliveries to those that wait, the first one first; end those whose time is up."""
        now = asyncio.get_running_loop().time()
        number: int | None = None
        at = 0
        for waiter in waiters:
            mine = deliveries[at : at + waiter.limit]
            if not mine and waiter.deadline > now and not waiter.done.done():
                if not waiter.seen and self._seen() >= self.info.settings.max_waiting:
                    _reject(waiter.done, self._too_many())
                waiter.seen = True
                continue
            at += len(mine)
            if number is None:
                number = await self._pending.number(state)
            if waiter.done.done():  # the client went away meanwhile
                self._release(_refs(self.info.id, mine))
            else:
                waiter.done.set_result(Received(mine, number, len(state.held)))
        self._waiters = deque(w for w in self._waiters if not w.done.done())

    def _waiting(self) -> list[Waiter]:
        return [waiter for waiter in self._waiters if not waiter.done.done()]

    def _seen(self) -> int:
        return sum(w.seen and not w.done.done() for w in self._waiters)

    def _give_back(self, done: asyncio.Future[Received]) -> None:
        if done.exception() is None:
            self._release(_refs(self.info.id, done.result().deliveries))

    def _release(self, refs: Sequence[Ref | None]) -> None:
        if refs:
            done = asyncio.get_running_loop().create_future()
            done.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._requests.append(Request("release", refs, 0, done))
            self._wake.set()

    def _fail(self, error: ConsumerError, requests: Sequence[Request] = ()) -> None:
        """Answer all with an error; the log is read anew."""
        self._log.forget()
        waiters, self._waiters = self._waiters, deque()
        calls, self._calls = self._calls, deque()
        pending, self._requests = [*requests, *self._requests], []
        futures: list[asyncio.Future[Any]] = [waiter.done for waiter in waiters]
        futures += [request.done for request in pending] + [done for _work, done in calls]
        for future in futures:
            _reject(future, error)
        if isinstance(error, UnknownConsumer):
            self._gone = error

    @property
    def _ending(self) -> ConsumerError:
        return self._gone or StoreUnavailable("This process is ending: ask another one.")

    @property
    def _ack_wait(self) -> int:
        return self.info.settings.ack_wait_ms * 1_000

    def _too_many(self) -> TooManyWaiting:
        most = self.info.settings.max_waiting
        return TooManyWaiting(
            f"{most} receives wait for {self.info.name!r} already: wait with fewer workers, or raise "
            "the consumer's max_waiting."
        )


def _put(step: Step, request: Request) -> list[tuple[int, str]]:
    match request.kind:
        case "ack":
            return step.ack(request.refs)
        case "nack":
            return step.nack(request.refs, request.value, *request.failure)
        case "extend":
            return step.extend(request.refs, request.value)
        case "release":
            return step.release(request.refs)


def _refs(consumer: int, deliveries: Sequence[Delivery]) -> list[Ref | None]:
    return read_tokens(consumer, [delivery.token for delivery in deliveries])


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _reject(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
