"""The steps of one consumer: decided on its state, then appended to its log."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final, NamedTuple

import structlog

from penstock.config.durations import parse
from penstock.core.message import Position
from penstock.streams.consumers.ack_tokens import Ref, make_tokens
from penstock.streams.consumers.decide import Step
from penstock.streams.consumers.entry import Entry
from penstock.streams.consumers.log import ConsumerLog
from penstock.streams.consumers.pending import Pending
from penstock.streams.consumers.reader import ConsumerReader
from penstock.streams.consumers.reports import Refused, Request
from penstock.streams.consumers.sessions import Sessions
from penstock.streams.consumers.state import START, State
from penstock.streams.consumers.types import ConsumerInfo, Delivery
from penstock.streams.consumers.view import StreamRef
from penstock.streams.records import stream_end

_LEAST_ACK_WAIT: Final = 1_000
_log: Final = structlog.get_logger("penstock.streams")


class Taken(NamedTuple):
    """What came of a step: what it refused of each request, and its deliveries, numbered from `first`.

    `moved` reports whether it changed anything, `dead` whether messages became dead letters.
    """

    state: State
    refused: list[Refused]
    first: int
    deliveries: list[Delivery]
    moved: bool
    dead: bool


class StepWriter:
    """Takes the steps of one consumer. Used by one task.

    Args:
        sessions: Connections to the store.
        info: The consumer.
        stream: What it reads.
    """

    def __init__(self, sessions: Sessions, info: ConsumerInfo, stream: StreamRef) -> None:
        self.info = info
        self.stream = stream
        self.sessions = sessions
        self.log = ConsumerLog(sessions, info.id, info.name)
        self.stale = False
        """Whether other processes may have taken steps."""
        self.crowded = False
        """Whether another process takes steps too."""
        self._set_up()

    def _set_up(self) -> None:
        info = self.info
        self.reader = ConsumerReader(self.sessions, self.stream, info.id, info.settings)
        self.pending = Pending(self.reader)
        name = info.name.replace("\\", "\\\\").replace('"', '\\"')
        self._suffix = f',"consumer":{{"id":"{info.uuid}","name":"{name}"}}}}}}'.encode()

    @property
    def ack_wait(self) -> int:
        """How long a delivery is out, in µs."""
        return self.info.settings.ack_wait_ms * 1_000

    @property
    def may_claim(self) -> bool:
        """Whether messages may be handed out before their receive has come.

        Not where another process may have a receive that waits for them, where the moment counts
        against a short `ack_wait_ms`, or where one delivery that a crash loses would be the only one.
        """
        settings = self.info.settings
        return (
            not self.crowded
            and settings.ack_wait_ms >= _LEAST_ACK_WAIT
            and settings.max_deliver != 1
        )

    def change(self, info: ConsumerInfo) -> None:
        """Take over changed settings."""
        old, new = self.info.settings, info.settings
        filtered = (old.filters, old.deletes) != (new.filters, new.deletes)
        self.info = info
        if filtered:
            self.pending.close()
            self._set_up()

    async def close(self) -> None:
        """Stop what runs beside the steps."""
        await self.reader.ahead.close()
        self.pending.close()

    async def load(self) -> State:
        """Return the state, with the steps of other processes."""
        if self.stale or self.crowded or self.log.state is None:
            await self.log.load(self._first_cursor)
            self.stale = False
            self.crowded = await self.log.sync()
        return await self.log.load(self._first_cursor)

    async def load_newest(self) -> State:
        """Return the newest state; the reader knows the stream up to its cursor."""
        self.stale = True
        state = await self.load()
        await self.reader.view.refresh(state.cursor)
        return state

    def lost(self) -> list[Ref | None]:
        """Return, once, the deliveries of a step whose requests failed although it was taken."""
        lost, self.log.lost = self.log.lost, None
        state = self.log.state
        if lost is None or state is None:
            return []
        return [(*state.held[number][:2], number) for number in lost if number in state.held]

    async def cursor_of(self, to: Position | datetime | str) -> tuple[int, int]:
        """Return the cursor before a message, a commit time, all messages ("all") or new ones."""
        view = self.reader.view
        view.head_stale = True
        await view.refresh()
        if isinstance(to, Position):
            return min((to.lsn, stream_end(to.idx - 1)), view.head)
        if isinstance(to, datetime):
            at = to.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds")
            return min(await self.reader.at_time(at), view.head)
        return START if to == "all" else view.head

    async def _first_cursor(self) -> tuple[int, int]:
        policy = self.info.settings.deliver_policy
        if policy in ("all", "new"):
            return await self.cursor_of(policy)
        view = self.reader.view
        view.head_stale = True
        await view.refresh()
        if policy == "last":
            return await self.reader.before_last()
        since = datetime.fromtimestamp(self.sessions.clock.now() / 1_000_000, UTC) - parse(policy)
        return await self.cursor_of(since)

    async def take(self, requests: Sequence[Request], limit: int) -> Taken:
        """Take one step: serve `requests`, hand out up to `limit` messages. The state is loaded."""
        settings, reader = self.info.settings, self.reader
        sure = False
        while True:
            state = self.log.state
            assert state is not None  # noqa: S101 - loaded before
            await reader.view.refresh(state.cursor)
            now = self.sessions.clock.now()
            state.advance(now)
            reader.seek(state.cursor)
            step = Step(state, now, settings.max_deliver, settings.max_ack_pending)
            step.expire()
            reports = step.reports
            refused = [reports.take(request) for request in requests]
            if reports.unsure and not sure:
                sure = True
                if await self.log.sync():
                    self.crowded = True
                    continue
            texts: list[bytes] = []
            passed = 0
            if limit:
                texts, passed = await self._choose(reader, step, state, limit)
            entry = step.entry(self.ack_wait)
            first = state.next
            if entry is None:
                break
            if reader is self.reader:
                reader.ahead.fill_beside(passed)
            counts = [state.held[number][4] + 1 for number in step.redelivered]
            append = partial(self._append, reader, entry, step)
            if await (reader.view.whole(append) if reports.dead else append()):
                if passed:
                    reader.ahead.passed(passed, state.cursor)
                break
            self.crowded = True
        deliveries = self._deliveries(state, first, counts, texts) if entry and texts else []
        return Taken(state, refused, first, deliveries, entry is not None, bool(reports.dead))

    async def _append(self, reader: ConsumerReader, entry: Entry, step: Step) -> bool:
        reports = step.reports
        dead = [(message, reports.cause(number)) for number, message in reports.dead.items()]
        return await self.log.append(entry, dead, reader.view.segments)

    async def _choose(
        self, reader: ConsumerReader, step: Step, state: State, limit: int
    ) -> tuple[list[bytes], int]:
        """Choose what is handed out; return its JSON, and how many read rows the cursor passes."""
        ahead = reader.ahead
        if (beginning := reader.expired(state.cursor)) is not None:
            name = self.info.name
            _log.warning("messages expired before they were handed out", consumer=name)
            step.skip_to(beginning)
            reader.seek(beginning)
        texts: list[bytes] = []
        if redelivered := step.take_redeliveries(limit):
            found = await reader.texts([state.held[number][:2] for number in redelivered])
            step.drop([number for number in redelivered if state.held[number][:2] not in found])
            texts = [found[state.held[number][:2]] for number in step.redelivered]
        if state.replays and (free := step.free_replays(limit)):
            step.take_replays(free, await reader.texts(free))
        reader.groups.trim()
        while missing := step.take_parked(limit, reader.groups):
            await reader.groups.look_up(missing)
        passed = step.take_new(limit, ahead.rows)
        if step.taken < limit and not step.full and not ahead.at_head:
            await ahead.filled()
            if len(ahead.rows) == passed:
                await ahead.fill()
            passed = step.take_new(limit, ahead.rows, passed)
        return texts + [row[4] or b"" for row in step.new], passed

    def _deliveries(
        self, state: State, first: int, counts: list[int], texts: list[bytes]
    ) -> list[Delivery]:
        held, suffix = state.held, self._suffix
        positions = [Position._make(held[n][:2]) for n in range(first, first + len(texts))]
        counts += [1] * (len(texts) - len(counts))
        tokens = make_tokens(self.info.id, first, positions)
        messages = [text[:-2] + suffix for text in texts]
        return list(map(Delivery, tokens, counts, messages, positions))
