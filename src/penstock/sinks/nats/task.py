"""How far the publishing of one batch is: which rows may go, fly, back off, are in doubt or done.

At most one message of a group is in flight, see `penstock.sinks.nats.sink`. No I/O and no clock.
A `Task` moves rows between its parts: `RowTable` (the state of each row), `EncodedRows` (its frame),
`GroupOrder` (which rows wait for which), `Chains` (which go at once), `Retries` and `Deadlines` (what
is sent again, and when), `Doubts` (which message the stream has in a row's place).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import orjson
import pyarrow as pa

from penstock.config.nats import OutboxForm
from penstock.core.delivery import DeadLetter, OnRetry, Written, as_captured
from penstock.core.errors import SinkError
from penstock.sinks.nats.chains import Chains
from penstock.sinks.nats.duplicates import Doubts, Stored, stored
from penstock.sinks.nats.encoded import EncodedRows
from penstock.sinks.nats.frames import Encoder, FrameBlock
from penstock.sinks.nats.order import GroupOrder, row_groups
from penstock.sinks.nats.retries import Deadlines, Retries
from penstock.sinks.nats.rows import BACKOFF, DONE, DOUBTED, SENT, WAITING, RowTable

WINDOW_BYTES: Final = 16 * 1024 * 1024
WAVE_BYTES: Final = 256 * 1024
WAVE_ROWS: Final = 512


class Task:
    """How far the publishing of `batch` is.

    Args:
        batch: The messages.
        encoder: Makes their frames.
        base: The number of the first row, in acks.
        group_by: The sink's own group columns.
        form: The outbox's form, where the messages are an outbox's.
        batch_size: How many rows of a group may go at once, linked or as an atomic batch.
    """

    def __init__(
        self,
        batch: pa.RecordBatch,
        encoder: Encoder,
        base: int,
        group_by: Sequence[str] | None,
        form: OutboxForm | None = None,
        batch_size: int = 1,
    ):
        self.written = Written()
        self.base = base
        self.doubts = Doubts()
        self._batch = batch
        self._form = form
        self.rows = RowTable(batch.num_rows)
        self._frames = EncodedRows(batch, encoder, base, self.rows, self.written)
        self._order = GroupOrder(row_groups(batch, group_by, form))
        self.retries = Retries(self._frames.subject)
        self.chains = Chains(
            batch_size, self._order, self._frames, self.rows, self.retries.attempts
        )
        self._deadlines = Deadlines()
        self._ready = deque(self._order.first_rows())
        # From here on no row was looked at yet, and all of them may go.
        self._next = batch.num_rows if self._order.waits else 0

    @property
    def ready(self) -> bool:
        """Whether a row may go."""
        return bool(self._ready) or self._next < self.rows.count

    # -- sending

    def room(self, window: int) -> int:
        """Return how many more rows may be in flight."""
        return min(window, max(1, int(WINDOW_BYTES / self._frames.mean_size))) - self.rows.flying

    def wave(self, room: int, max_payload: int, now: float) -> bytes | memoryview:
        """Return the frames of at most `room` rows that may go, and count them as sent at `now`."""
        if not self._ready:
            block = self._frames.block(self._next)
            if not block.refused and block.largest <= max_payload:
                return self._neighbours(block, room, now)
            self._ready.extend(range(self._next, block.first + block.rows))
            self._next = block.first + block.rows
        state, attempts, resent = self.rows.state, self.retries.attempts, self._deadlines.resent
        rows: list[int] = []
        frames: list[bytes | memoryview] = []
        size = 0
        while self._ready and len(rows) < min(room, WAVE_ROWS) and size < WAVE_BYTES:
            row = self._ready.popleft()
            if state[row] != WAITING:
                continue  # its ack came after all
            block = self._frames.block(row)
            at = row - block.first
            if row in block.refused:
                self.bury(row, *block.refused[row])
                continue
            if block.payload[at] > max_payload:
                reason = f"{block.payload[at]} bytes; the server takes {max_payload} (max_payload)"
                self.bury(row, "message_too_large", reason)
                continue
            chain, frame = self.chains.take(row, room - len(rows), max_payload)
            for row in chain:
                if row in attempts or row in resent:
                    resent[row] = now
                state[row] = SENT
            rows += chain
            frames.append(frame)
            size += len(frame)
        self.rows.flying += len(rows)
        self._deadlines.sent(rows, now)
        return b"".join(frames)

    def _neighbours(self, block: FrameBlock, room: int, now: float) -> memoryview:
        """Return the frames of the next rows, which lie one behind the other in `block`."""
        at = self._next - block.first
        start = block.offsets[at]
        end = bisect_right(block.offsets, start + WAVE_BYTES, at + 1) - 1
        end = min(max(end, at + 1), block.rows, at + room)
        rows = range(self._next, block.first + end)
        self.rows.send_range(rows)
        self._next = rows.stop
        self._deadlines.sent(rows, now)
        return block.data[start : block.offsets[end]]

    # -- what is asked about a row

    def is_early(self, row: int) -> bool:
        """Return whether a row of its group before this one is not done yet."""
        return self._order.is_early(row)

    def flies(self, number: int) -> int | None:
        """Return the row of a reply's number if it is in flight."""
        row = number - self.base
        return row if 0 <= row < self.rows.count and self.rows.state[row] == SENT else None

    def key(self, row: int) -> str:
        """Return the id that a row is sent with."""
        return self._frames.key(row)

    def subject(self, row: int) -> str:
        """Return the subject that a row goes to."""
        return self._frames.subject(row)

    def flying_to(self, subjects: set[str]) -> list[int]:
        """Return the rows in flight to any of these subjects."""
        return [row for row in self.rows.sent() if self.subject(row) in subjects]

    # -- acks

    def acked(self, numbers: Iterable[bytes], copies: dict[bytes, bytes] | None = None) -> None:
        """Handle positive acks by the rows' numbers; rows that waited for these may go.

        `copies` has the acks, by number, of messages that the stream had before; they are removed.
        """
        state, base, rows = self.rows.state, self.base, self.rows.count
        waits, batches, denied = self._order.waits, self.chains.batches, self.retries.denied
        has_waiting = bool(self._order.followers or denied)
        release, ready = self._order.release, self._ready
        done = landed = 0
        newest = None
        for number in numbers:
            row = int(number) - base
            copy = copies.pop(number, None) if copies else None
            if not 0 <= row < rows or (before := state[row]) == DONE:
                continue  # of an earlier batch, or sent twice
            if row in batches:
                self.dissolve(row)  # by a server that knows nothing of atomic batches
                continue
            if has_waiting and waits and waits[row]:
                if before != SENT:
                    continue
                if copy is not None:
                    self._doubt(row, stored(copy))  # what is there already keeps its place
                elif self._order.is_in_place(row):
                    self._order.note_in_stream(row)
                    state[row] = DONE
                    newest = row
                    done += 1
                    landed += 1
                else:
                    self.take_back(row)
                continue
            if copy is not None:
                if before != DOUBTED:
                    self._doubt(row, stored(copy))
                continue
            if before == DOUBTED:
                self.doubts.drop(row)
            state[row] = DONE
            newest = row
            done += 1
            landed += before == SENT
            if has_waiting:
                if denied:
                    self._release(row)
                else:
                    release(row, state, ready)
        self.rows.left -= done
        self.rows.flying -= landed
        self.written.delivered += done
        if newest is not None:
            self.chains.note_stored(newest)

    def note_newest(self, number: bytes, ack: bytes) -> None:
        """Note the newest positive ack: what a stream has stored as new, others are linked to."""
        row = int(number) - self.base
        if 0 <= row < self.rows.count and self.rows.state[row] == DONE:
            fields = orjson.loads(ack)
            if not fields.get("duplicate"):
                self.chains.note_stream(str(fields["stream"]))

    def committed(self, row: int, count: object) -> bool:
        """Handle the ack of an atomic batch by its last row; False if it is not that of the whole."""
        chain = self.chains.batches[row]
        if row != chain[-1] or count != len(chain):
            return False
        self.chains.remove(chain)
        self.acked([str(row + self.base).encode() for row in chain])
        return True

    def dissolve(self, row: int) -> None:
        """Let the rows of a refused batch go one by one: the reply to each names its own error."""
        self._take_back_batch(self.chains.batches[row], refused=True)

    def _take_back_batch(self, chain: Sequence[int], *, refused: bool = False) -> None:
        self.chains.remove(chain, refused=refused)
        for row in chain:  # of which only the first waits for none
            self.take_back(row)

    def _doubt(self, row: int, where: Stored) -> None:
        """Note that the stream had a row before; rows behind it wait until it is clear whose."""
        self.rows.put(row, DOUBTED)
        self.chains.note_copy()
        if self._order.is_in_place(row):
            self._order.note_in_stream(row)
        self.doubts.add(row, where)
        if self._form is not None and self._form.shares(self.key(row)):
            self.believe(row)

    def believe(self, row: int) -> None:
        """Count a row in doubt as delivered; those that waited for it may go."""
        self.doubts.drop(row)
        if self.rows.state[row] == DOUBTED:
            self.rows.put(row, DONE)
            self.written.delivered += 1
            self.written.duplicates += 1
            self._release(row)

    def bury(self, row: int, code: str, reason: str) -> None:
        """Make a dead letter of a row; those that waited for it may go."""
        body = self._frames.body(row)
        if self._form is not None:  # a body alone is not the message: headers and id are of the row
            letter = as_captured(self._batch, row, code, reason)
        else:
            key = self._batch.column("idempotency_key")[row].as_py() or ""
            text = body.decode(errors="replace")
            letter = DeadLetter(key, self.subject(row), code, reason, text)
        self.written.dead.append(letter)
        self.written.bytes -= len(body)
        self.doubts.drop(row)
        self.rows.put(row, DONE)
        self._release(row)

    def _release(self, row: int) -> None:
        """Let those rows go that waited for `row`, which is done."""
        if self.retries.denied:
            waiting = self.retries.permitted(row)
            self._send_again(other for other in waiting if self.rows.state[other] == BACKOFF)
        self._order.release(row, self.rows.state, self._ready)

    # -- sending again

    def take_back(self, row: int) -> None:
        """Send a row again that is in flight, once those are done that it waits for."""
        self.rows.put(row, WAITING)
        self._deadlines.resent[row] = 0.0  # its first time does not count any more
        if not self.is_early(row):
            self._ready.appendleft(row)

    def fail(self, rows: Iterable[int], error: SinkError, now: float, on_retry: OnRetry) -> None:
        """Let rows in flight back off; they are `ready` again when their time has come."""
        for row in rows:
            if self.rows.state[row] != SENT:
                continue
            if row in self.chains.batches:
                self.dissolve(row)
            elif self.is_early(row):
                self.take_back(row)
            else:
                self.rows.put(row, BACKOFF)
                self.retries.add(row, error, now, on_retry)

    def release_due(self, now: float) -> None:
        """Make rows ready whose backoff has ended."""
        self._send_again(self.retries.take_due(now, self.rows.state))

    def late(self, now: float, timeout: float, last_ack: float) -> list[int]:
        """Return the rows whose ack is overdue; a server that acks others gets more patience."""
        return self._deadlines.overdue(now, timeout, last_ack, self.rows.state)

    def disconnected(self) -> None:
        """Send again what was in flight."""
        self._deadlines.clear()
        self.doubts.disconnected()
        while self.chains.batches:
            self._take_back_batch(next(iter(self.chains.batches.values())))
        waiting = list(self._ready)
        self._ready.clear()
        self._send_again(self.rows.sent())
        self._ready.extend(waiting)

    def _send_again(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.rows.put(row, WAITING)
            if not self.is_early(row):
                self._ready.append(row)

    # -- what became of the batch

    def rest(self) -> pa.RecordBatch:
        """Return the messages that are neither acked nor dead letters, in their order."""
        return self._batch.filter(self.rows.rest_mask())

    def partly_written(self) -> Written:
        """Return what was written, where not all was; bytes are those of an average message."""
        written = self.written
        written.bytes = written.bytes * written.delivered // max(self._frames.count, 1)
        return written
