"""What a drainer drains for a consumer of type nats: what its stream holds, and its blocks.

While it is attached, it is a sink of its source's pipeline. Where it does not take messages in time,
they go to blocks, as a sink's. It is *left in the stream* when it is paused, rewound or new, and when it
has been behind for `detach_after`: from then on nothing is kept for it.

To leave it there keeps the source's writers out for a moment, and notes what the stream holds beyond the
position where all is done: tasks publish that themselves, or put it into blocks. What comes later is
read from the stream. A task that comes again may have died before it published: what it finds in the
stream already it puts into blocks, and what is read twice is delivered once, by its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import psycopg

from penstock.config.consumers import Filters
from penstock.core.message import NO_MESSAGES, Position
from penstock.sinks.backlog import store as backlog
from penstock.sinks.backlog.sink import SinkBacklog
from penstock.sinks.backlog.store import Behind, Connection, Taken
from penstock.sinks.selected import selected
from penstock.streams import nats_consumers, read
from penstock.streams import nats_consumers_filter as sql_filter
from penstock.streams.nats_consumers import FOLLOWING, PAUSED, in_stream
from penstock.streams.read import Dead, Read, Selection
from penstock.streams.segments import lock_writers

_IS_PAUSED = (PAUSED, "It is paused.")


@dataclass(frozen=True)
class ConsumerStream:
    """A consumer's part of a stream; it is left there after it has been behind for `detach_after`.

    `function` is that of its filter in SQL.
    """

    stream_id: int
    kind: str
    filters: Filters
    detach_after: timedelta
    function: str | None = None


class ConsumerBacklog(SinkBacklog):
    """The backlog of the consumer `name`, which has `of` from a stream of a source."""

    kind = "consumer"

    def __init__(self, source_id: int, name: str, of: ConsumerStream) -> None:
        super().__init__(source_id, name)
        self._of = of
        self.rewinds = 0

    def attend(self, connection: Connection, done: Position | None) -> Behind | None:
        """Rewind, pause or resume the consumer where that is asked for; see `SinkBacklog`."""
        row = connection.execute(nats_consumers.SQL["asked"], [self.name]).fetchone()
        self.paused, *rewind = row or (False, None, None)
        behind = backlog.behind(connection, self.source_id, self.name)
        try:
            if done is not None and None not in rewind:
                self._rewind(connection, Position(*rewind), done)
            elif done is not None and self._leaves(behind):
                self._leave(connection, done)
        except psycopg.errors.LockNotAvailable:
            pass  # the writers are busy: later
        return self._explained(connection)

    def take(
        self, connection: Connection, of: Behind, until: Position | None = None
    ) -> Taken | None:
        """Return some of the first messages, of the stream and of the blocks; see `SinkBacklog`."""
        blocks = backlog.take(connection, of, until)
        if of.stream_id is None:
            return None if blocks is None else self._selected(connection, blocks, [])
        after = in_stream(max(of.drained, of.since))
        last = read.END if until is None else in_stream(until)
        found = read.read(connection, self._selection(of), after, last)
        nothing = not found.messages.num_rows and not found.dead
        if blocks is None and nothing and found.end is None:
            # What is not its own is done with, too.
            none_left = until is None or until <= of.drained
            return None if none_left or until is None else Taken(NO_MESSAGES, until)
        ends = [end for end in (blocks and blocks.end, found.end) if end is not None]
        end = min(ends) if ends else until or _last_of(found)
        dead = [each for each in found.dead if each.at <= end]
        if blocks is None:
            return Taken(
                backlog.in_order([found.messages], of.drained, end), end, [d.letter for d in dead]
            )
        blocks = self._selected(connection, blocks._replace(end=end), dead)
        batches = [blocks.messages, found.messages]
        return blocks._replace(messages=backlog.in_order(batches, of.drained, end))

    def size(self, connection: Connection) -> tuple[int, int]:
        """Return how many messages wait, and the bytes of those in blocks."""
        messages, size = super().size(connection)
        of = backlog.behind(connection, self.source_id, self.name)
        if of is not None and of.stream_id is not None:
            after = in_stream(max(of.drained, of.since))
            messages += read.count(connection, self._selection(of), after)
        return messages, size

    def _selected(self, connection: Connection, taken: Taken, others: Sequence[Dead]) -> Taken:
        """Return what the filters let through of blocks, with the dead letters of the stream's part.

        The filters may have changed since something was put into a block.
        """
        messages = selected(self._of.filters, taken.messages)
        kind, function = self._of.kind, self._of.function
        if function is None:
            return taken._replace(messages=messages)
        verdicts = sql_filter.evaluated(connection, function, kind, messages)
        passing, wrong = sql_filter.split(messages, verdicts)
        wrong = [row for row in wrong if backlog.position_of(messages, row) <= taken.end]
        letters = sql_filter.letters(messages, verdicts, wrong)
        # What was in a block may be in the stream, too.
        dead = {letter.idempotency_key: letter for letter in letters}
        dead |= {each.letter.idempotency_key: each.letter for each in others}
        return Taken(passing, taken.end, [*dead.values()])

    def _selection(self, of: Behind) -> Selection:
        own = (self.source_id, self.name) if of.has_ahead else None
        mine = self._of
        return Selection(mine.stream_id, mine.kind, mine.filters, own, mine.function)

    def _leaves(self, behind: Behind | None) -> bool:
        """Return whether the consumer is to be left in the stream."""
        if behind is None:
            return self.paused
        late = behind.seconds >= self._of.detach_after.total_seconds()
        return behind.stream_id is None and (self.paused or late)

    def _leave(self, connection: Connection, done: Position) -> None:
        with connection.transaction():
            lock_writers(connection, self.source_id)
            # Once more, now that it stays as it is: what is left there must not be taken for published.
            behind = backlog.behind(connection, self.source_id, self.name)
            if behind is None or behind.stream_id is None:
                self._leave_behind(connection, done, _IS_PAUSED)

    def _leave_behind(self, connection: Connection, done: Position, why: tuple[str, str]) -> None:
        """Leave what comes behind `done` in the stream, the writers being out."""
        ahead = read.positions(connection, self._of.stream_id, in_stream(done))
        consumer = (self.source_id, self.name, self._of.stream_id)
        # One that is behind already keeps its own reason.
        nats_consumers.leave_in_stream(connection, consumer, done, why, ahead)

    def _rewind(self, connection: Connection, to: Position, done: Position) -> None:
        """Go on at `to`, or at `done` where that lies before: what is behind it is not all there yet."""
        with connection.transaction():
            lock_writers(connection, self.source_id)
            if to < done:
                consumer = (self.source_id, self.name, self._of.stream_id)
                nats_consumers.forget_backlog(connection, self.source_id, self.name)
                nats_consumers.leave_in_stream(connection, consumer, to, FOLLOWING)
            else:
                behind = backlog.behind(connection, self.source_id, self.name)
                if behind is None or behind.stream_id is None:
                    self._leave_behind(connection, done, FOLLOWING)
                # What tasks publish, or have put into blocks, stays theirs.
                nats_consumers.skip(connection, self.source_id, self.name, done)
                backlog.drop(connection, self.source_id, self.name, done)
            connection.execute(nats_consumers.SQL["rewound"], [self.name, *to])
        self.rewinds += 1

    def _explained(self, connection: Connection) -> Behind | None:
        """Return the consumer's row, which says why it is behind now."""
        behind = backlog.behind(connection, self.source_id, self.name)
        if behind is None or (behind.code == PAUSED) == self.paused:
            return behind
        code, error = _IS_PAUSED if self.paused else FOLLOWING
        values = [code, error, self.source_id, self.name, code]
        connection.execute(nats_consumers.SQL["why"], values)
        return behind._replace(code=code, error=error, seconds=0.0)


def _last_of(found: Read) -> Position:
    """Return the position of the last message that was read."""
    ends = [each.at for each in found.dead[-1:]]
    if found.messages.num_rows:
        ends.append(backlog.last_position(found.messages))
    return max(ends)
