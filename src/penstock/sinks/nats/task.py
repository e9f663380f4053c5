"""How far the publishing of one batch is: which rows may go, which fly, which back off.

At most one message of a group is in flight, see `penstock.sinks.nats.sink`. No I/O and no clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.config.nats import OutboxForm
from penstock.core.backoff import wait_after
from penstock.core.delivery import DeadLetter, OnRetry, Written, as_captured
from penstock.core.errors import SinkError
from penstock.core.json_members import members
from penstock.sinks.nats.duplicates import Doubts, Stored, stored
from penstock.sinks.nats.formats import groups_of
from penstock.sinks.nats.frames import Block, Encoder, as_batch, as_links

WINDOW_BYTES: Final = 16 * 1024 * 1024
WAVE_BYTES: Final = 256 * 1024
WAVE_ROWS: Final = 512
BATCH_BYTES: Final = 4 * 1024 * 1024
"""How large an atomic batch may be: the server keeps it aside until its last message is there."""
MAX_BATCHES: Final = 16
"""Atomic batches in flight. A stream takes 50 from all its publishers."""
BACKOFF_FIRST: Final = 0.1
BACKOFF_MAX: Final = 10.0
_SLOWER: Final = {"permission_denied": 4, "jetstream_not_enabled": 3}
"""Errors that only an operator mends start their backoff this many doublings later."""

_WAITING, _SENT, _BACKOFF, _DONE, _DOUBTED = range(5)


def backoff(attempt: int) -> float:
    """Return the seconds to wait before try number `attempt` + 1, with jitter.

    No `Backoff`: each message has a count of tries of its own, and those of one count wait together.
    """
    return wait_after(attempt, BACKOFF_FIRST, BACKOFF_MAX, jitter=0.25)


def _keys(
    batch: pa.RecordBatch, group_by: Sequence[str] | None, form: OutboxForm | None
) -> Iterable[tuple[Any, ...]] | None:
    """Return the groups of each row, or None if no two rows share one: the common case."""
    if form is not None:
        return groups_of(batch, form)
    if group_by:
        return group_keys(batch, group_by)
    new, old = batch.column("group_hash"), batch.column("old_group_hash")
    if old.null_count == len(old) and pc.count_distinct(new, mode="all").as_py() == len(new):
        return None
    return zip(new.to_pylist(), old.to_pylist(), strict=True)


def waits_of(keys: Iterable[tuple[Any, ...]]) -> tuple[list[int], dict[int, list[int]]]:
    """Return for each row how many earlier rows it waits for, and for each row who waits for it.

    A row waits for the newest earlier row of each of its groups; `None` is no group.
    """
    newest: dict[Any, int] = {}
    waits: list[int] = []
    followers: dict[int, list[int]] = {}
    for row, groups in enumerate(keys):
        before = {newest.get(group) for group in groups if group is not None}
        before.discard(None)
        for group in groups:
            if group is not None:
                newest[group] = row
        for earlier in before:
            followers.setdefault(earlier, []).append(row)  # type: ignore[arg-type]
        waits.append(len(before))
    return waits, followers


def group_keys(batch: pa.RecordBatch, columns: Sequence[str]) -> Iterable[tuple[Any, ...]]:
    """Give the groups of each row for a sink's own `group_by`: the new one, the one left behind.

    The source's groups stay among them, so that a row whose column is not in the WAL keeps its
    place too.
    """
    names = zip(
        batch.column("table_schema").to_pylist(),
        batch.column("table_name").to_pylist(),
        strict=True,
    )
    rows = zip(
        names,
        batch.column("record").to_pylist(),
        batch.column("changes").to_pylist(),
        batch.column("group_hash").to_pylist(),
        batch.column("old_group_hash").to_pylist(),
        strict=True,
    )
    read = members(*columns)
    for name, record, changes, group, old_group in rows:
        new = [value for value in read(record).values() if value is not None]
        if len(new) < len(columns):
            yield group, old_group
            continue
        key = (*name, b"[%b]" % b",".join(new))
        old = read(changes).values()
        if any(value is not None for value in old):
            before = [was if was is not None else now for was, now in zip(old, new, strict=True)]
            yield key, (*name, b"[%b]" % b",".join(before)), group, old_group
        else:
            yield key, group, old_group


@dataclass(slots=True)
class Bucket:
    """Rows that failed in the same way and are tried again together."""

    due: float
    error: SinkError
    rows: list[int] = field(default_factory=list)


class Task:
    """How far the publishing of one batch is: which rows may go, fly, back off, are done."""

    def __init__(
        self,
        batch: pa.RecordBatch,
        encoder: Encoder,
        base: int,
        group_by: Sequence[str] | None,
        form: OutboxForm | None = None,
        batch_size: int = 1,
    ):
        """`base` numbers the first row; `batch_size` bounds the rows of a group that go at once."""
        self.written = Written()
        self.left = batch.num_rows
        self.flying = 0
        self.mean_size = 512.0
        self.buckets: dict[tuple[int, str], Bucket] = {}
        self._batch = batch
        self._encoder = encoder
        self._form = form
        self.base = base
        self._rows = batch.num_rows
        self._state = bytearray(batch.num_rows)
        self._blocks: list[Block] = []
        self._firsts: list[int] = []
        self._waves: deque[tuple[float, Sequence[int]]] = deque()
        self._attempts: dict[int, int] = {}
        self._resent: dict[int, float] = {}
        self._waits: list[int] = []
        self._followers: dict[int, list[int]] = {}
        self._ready: deque[int] = deque()
        self._held: dict[str, list[int]] = {}  # subject -> rows that one of it asks for
        self._next = 0  # from here on no row was looked at yet; all of them may go
        self.linking = self.atomic = False
        """Whether rows of one group may go at once now, each naming the one before it; or else as
        an atomic batch."""
        self._batch_size = batch_size
        self._batch_of: dict[int, list[int]] = {}  # row in flight -> its atomic batch
        self._batches = 0
        self._singles: set[int] = set()  # rows whose batch was refused
        self.doubts = Doubts()
        self._placed: set[int] = set()  # rows in the stream, in order, behind some in doubt
        self._before: dict[int, list[int]] = {}  # row -> those it waits for, once that is asked
        if keys := _keys(batch, group_by, form):
            self._waits, self._followers = waits_of(keys)
            self._ready.extend(row for row, count in enumerate(self._waits) if not count)
            self._next = self._rows

    @property
    def ready(self) -> bool:
        """Whether a row may go."""
        return bool(self._ready) or self._next < self._rows

    def room(self, window: int) -> int:
        """Return how many more rows may be in flight."""
        return min(window, max(1, int(WINDOW_BYTES / self.mean_size))) - self.flying

    def wave(self, room: int, max_payload: int, now: float) -> bytes | memoryview:
        """Return the frames of some rows that may go, and count them as sent."""
        if not self._ready:
            block = self._block(self._next)
            if not block.refused and block.largest <= max_payload:
                return self._run_of(block, room, now)
            self._ready.extend(range(self._next, block.first + block.rows))
            self._next = block.first + block.rows
        rows: list[int] = []
        frames: list[memoryview] = []
        size = 0
        while self._ready and len(rows) < min(room, WAVE_ROWS) and size < WAVE_BYTES:
            row = self._ready.popleft()
            if self._state[row] != _WAITING:
                continue  # its ack came after all
            block = self._block(row)
            at = row - block.first
            if row in block.refused:
                self.bury(row, *block.refused[row])
                continue
            if block.payload[at] > max_payload:
                reason = f"{block.payload[at]} bytes; the server takes {max_payload} (max_payload)"
                self.bury(row, "message_too_large", reason)
                continue
            chain = self._chain(row, room - len(rows), max_payload)
            frame = block.frame(row) if len(chain) == 1 else self._together(chain)
            for row in chain:
                if row in self._attempts or row in self._resent:
                    self._resent[row] = now
                self._state[row] = _SENT
            rows += chain
            frames.append(frame)
            size += len(frame)
        self.flying += len(rows)
        self._waves.append((now, rows))
        return b"".join(frames)

    def _chain(self, row: int, room: int, max_payload: int) -> list[int]:
        """Return `row` and the rows behind it that wait for nothing but each other, in order."""
        chain = [row]
        if not self.linking and (
            not self.atomic or row in self._singles or self._batches >= MAX_BATCHES
        ):
            return chain
        if self._batch_size < 2 or row in self._attempts:
            return chain
        followers, waits, state = self._followers, self._waits, self._state
        block = self._block(row)
        end = block.first + block.rows
        size = block.payload[row - block.first]
        for _ in range(min(self._batch_size, room) - 1):
            behind = followers.get(row)
            if behind is None or len(behind) > 1 or waits[behind[0]] > 1:
                break
            row = behind[0]
            if row >= end:
                block = self._block(row)
                end = block.first + block.rows
            payload = block.payload[row - block.first]
            size += payload
            if row in block.refused or payload > max_payload or size > BATCH_BYTES:
                break
            if state[row] != _WAITING or (row in self._singles and not self.linking):
                break
            chain.append(row)
        return chain

    def _together(self, chain: list[int]) -> memoryview:
        """Return the frames of rows of one group that go at once."""
        frames = [self._block(row).frame(row) for row in chain]
        if self.linking:
            return memoryview(as_links(frames))
        self._batch_of.update(dict.fromkeys(chain, chain))
        self._batches += 1
        return memoryview(as_batch(frames))

    def is_early(self, row: int) -> bool:
        """Whether a row of its group before this one is not done yet."""
        return bool(self._waits and self._waits[row])

    def take_back(self, row: int) -> None:
        """Send a row again that is in flight, once those are done that it waits for."""
        self._state[row] = _WAITING
        self._resent[row] = 0.0  # its first time does not count any more
        self.flying -= 1
        if not self.is_early(row):
            self._ready.appendleft(row)

    def in_batch(self, row: int) -> bool:
        """Whether a row is in flight as a part of an atomic batch."""
        return row in self._batch_of

    def committed(self, row: int, count: object) -> bool:
        """Take the ack of an atomic batch by its last row; False if it is not that of the whole."""
        chain = self._batch_of[row]
        if row != chain[-1] or count != len(chain):
            return False
        self._forget(chain)
        self.acked([str(row + self.base).encode() for row in chain])
        return True

    def dissolve(self, row: int) -> None:
        """Let the rows of a refused batch go one by one: each tells what is wrong with it."""
        chain = self._batch_of[row]
        self._singles.update(chain)
        self._take_back(chain)

    def _take_back(self, chain: Sequence[int]) -> None:
        self._forget(chain)
        for row in chain:  # of which only the first waits for none
            self.take_back(row)

    def _forget(self, chain: Sequence[int]) -> None:
        for row in chain:
            del self._batch_of[row]
        self._batches -= 1

    def _run_of(self, block: Block, room: int, now: float) -> memoryview:
        at = self._next - block.first
        start = block.offsets[at]
        end = bisect_right(block.offsets, start + WAVE_BYTES, at + 1) - 1
        end = min(max(end, at + 1), block.rows, at + room)
        rows = range(self._next, block.first + end)
        self._state[rows.start : rows.stop] = bytes([_SENT]) * len(rows)
        self._next = rows.stop
        self.flying += len(rows)
        self._waves.append((now, rows))
        return block.data[start : block.offsets[end]]

    def acked(self, numbers: Iterable[bytes], copies: dict[bytes, bytes] | None = None) -> None:
        """Take the numbers of positive acks; rows that waited for these may go.

        `copies` has the acks, by their numbers, of what the stream had before; they are taken out.
        """
        state, base, rows = self._state, self.base, self._rows
        settle = bool(self._followers or self._held)
        done = landed = 0
        for number in numbers:
            row = int(number) - base
            copy = copies.pop(number, None) if copies else None
            if not 0 <= row < rows or (before := state[row]) == _DONE:
                continue  # of an earlier batch, or sent twice
            if row in self._batch_of:
                self.dissolve(row)  # by a server that knows nothing of atomic batches
                continue
            if settle and self.is_early(row):
                if before != _SENT:
                    continue
                if copy is not None:
                    self._doubt(row, stored(copy))  # what is there already keeps its place
                elif self._in_place(row):
                    self._placed.add(row)
                    state[row] = _DONE
                    done += 1
                    landed += 1
                else:
                    self.take_back(row)
                continue
            if copy is not None:
                if before != _DOUBTED:
                    self._doubt(row, stored(copy))
                continue
            if before == _DOUBTED:
                self.doubts.drop(row)
            state[row] = _DONE
            done += 1
            landed += before == _SENT
            if settle:
                self._settle(row)
        self.left -= done
        self.flying -= landed
        self.written.delivered += done

    def _doubt(self, row: int, where: Stored) -> None:
        """Take a row that the stream had before; rows that wait for it do so until it is settled."""
        self.flying -= self._state[row] == _SENT
        self._state[row] = _DOUBTED
        if self._in_place(row):
            self._placed.add(row)
        self.doubts.add(row, where)
        if self._form is not None and self._form.shares(self.key(row)):
            self.believe(row)

    def _in_place(self, row: int) -> bool:
        """Whether the stream has all that `row` waits for, though some of it may be in doubt."""
        if not self.is_early(row):
            return True
        if not self._before:
            for earlier, followers in self._followers.items():
                for follower in followers:
                    self._before.setdefault(follower, []).append(earlier)
        return all(
            earlier in self._placed or earlier not in self._followers
            for earlier in self._before[row]
        )

    def key(self, row: int) -> str:
        """Return the id that a row is sent with."""
        _, _, rest = bytes(self._block(row).frame(row)).partition(b"\r\nNats-Msg-Id: ")
        return rest.partition(b"\r\n")[0].decode(errors="replace")

    def believe(self, row: int) -> None:
        """Count a row as delivered that the stream had before; those that waited for it may go."""
        self.doubts.drop(row)
        if self._state[row] == _DOUBTED:
            self._state[row] = _DONE
            self.left -= 1
            self.written.delivered += 1
            self.written.duplicates += 1
            self._settle(row)

    def flies(self, number: int) -> int | None:
        """Return the row of a reply's number if an answer to it is still awaited."""
        row = number - self.base
        return row if 0 <= row < self._rows and self._state[row] == _SENT else None

    def subject(self, row: int) -> str:
        """Return the subject that a row goes to."""
        return bytes(self._block(row).frame(row)).split(b" ", 2)[1].decode()

    def flying_to(self, subjects: set[str]) -> list[int]:
        """Return the rows in flight to any of these subjects."""
        rows = [row for row in range(self._rows) if self._state[row] == _SENT]
        return [row for row in rows if self.subject(row) in subjects]

    def bury(self, row: int, code: str, reason: str) -> None:
        """Make a dead letter of a row; those that waited for it may go."""
        frame = bytes(self._block(row).frame(row))
        body = frame[frame.index(b"\r\n\r\n") + 4 : -2]
        if self._form is not None:  # a body alone is not the message: headers and id are of the row
            letter = as_captured(self._batch, row, code, reason)
        else:
            key = self._batch.column("idempotency_key")[row].as_py() or ""
            subject = frame.split(b" ", 2)[1].decode()
            letter = DeadLetter(key, subject, code, reason, body.decode(errors="replace"))
        self.written.dead.append(letter)
        self.written.bytes -= len(body)
        self.doubts.drop(row)
        self.flying -= self._state[row] == _SENT
        self._state[row] = _DONE
        self.left -= 1
        self._settle(row)

    def fail(self, rows: Iterable[int], error: SinkError, now: float, on_retry: OnRetry) -> None:
        """Let rows in flight back off; they are `ready` again when their time has come."""
        for row in rows:
            if self._state[row] != _SENT:
                continue
            if row in self._batch_of:
                self.dissolve(row)
                continue
            if self.is_early(row):
                self.take_back(row)
                continue
            self._state[row] = _BACKOFF
            self.flying -= 1
            attempt = self._attempts[row] = self._attempts.get(row, 0) + 1
            bucket = self.buckets.get((attempt, error.code))
            if bucket is None:
                # A busy stream is helped by the smaller window; waiting longer gains nothing.
                busy = error.code == "too_many_requests"
                delay = backoff(1 if busy else attempt + _SLOWER.get(error.code, 0))
                bucket = self.buckets[attempt, error.code] = Bucket(now + delay, error)
                on_retry(error, delay)
            bucket.rows.append(row)

    def backs_off(self, code: str) -> bool:
        """Whether rows back off for this reason."""
        return any(bucket.error.code == code for bucket in self.buckets.values())

    def release_due(self, now: float) -> None:
        """Make rows ready whose backoff has ended.

        Of a subject that is not permitted one row asks for all, as the server logs every refusal.
        """
        for key, bucket in list(self.buckets.items()):
            if bucket.due > now:
                continue
            del self.buckets[key]
            rows = [row for row in bucket.rows if self._state[row] == _BACKOFF]
            if bucket.error.code == "permission_denied":
                rows = [row for row in rows if not self._hold(row)]
            self._again(rows)

    def _hold(self, row: int) -> bool:
        subject = self.subject(row)
        if subject not in self._held:
            self._held[subject] = [row]  # the one that asks stands first
        held = self._held[subject]
        if held[0] == row:
            return False
        held.append(row)
        return True

    def late(self, now: float, timeout: float, last_ack: float) -> list[int]:
        """Return the rows whose ack is overdue.

        A server that is slow but acks gets more patience: sending again would only slow it down.
        """
        rows: list[int] = []
        while self._waves and now - self._waves[0][0] > timeout:
            sent, wave = self._waves[0]
            if now - last_ack <= timeout and now - sent <= 6 * timeout:
                break
            self._waves.popleft()
            for row in wave:
                if self._state[row] == _SENT and now - self._resent.get(row, sent) > timeout:
                    rows.append(row)
        return rows

    def disconnected(self) -> None:
        """Send again what was in flight."""
        self._waves.clear()
        self.doubts.disconnected()
        while self._batch_of:
            self._take_back(next(iter(self._batch_of.values())))
        self.flying = 0
        waiting = list(self._ready)
        self._ready.clear()
        self._again(row for row in range(self._rows) if self._state[row] == _SENT)
        self._ready.extend(waiting)

    def _again(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._state[row] = _WAITING
            if not self.is_early(row):
                self._ready.append(row)

    def rest(self) -> pa.RecordBatch:
        """Return the messages that are neither acked nor dead letters, in their order."""
        # A row may be many things, and only one of them is done.
        left = pa.array([state != _DONE for state in self._state], pa.bool_())
        return self._batch.filter(left)

    def partly_written(self) -> Written:
        """Return what was written, where not all was; bytes are those of an average message."""
        written = self.written
        encoded = sum(block.rows for block in self._blocks[-1:]) + (
            self._blocks[-1].first if self._blocks else 0
        )
        written.bytes = written.bytes * written.delivered // max(encoded, 1)
        return written

    def _settle(self, row: int) -> None:
        if self._held and (held := self._held.get(self.subject(row))) and held[0] == row:
            del self._held[self.subject(row)]
            self._again(other for other in held if self._state[other] == _BACKOFF)
        settled = [row]
        while settled:
            row = settled.pop()
            if self.is_early(row):
                continue  # those behind it go when all before it are done, too
            for follower in self._followers.pop(row, ()):
                self._waits[follower] -= 1
                if self._waits[follower]:
                    continue
                # One in flight is behind this one in the same chain.
                if self._state[follower] == _WAITING:
                    self._ready.append(follower)
                elif self._state[follower] == _DONE:
                    settled.append(follower)

    def _block(self, row: int) -> Block:
        while not self._blocks or row >= self._blocks[-1].first + self._blocks[-1].rows:
            self._encode_next()
        return self._blocks[bisect_right(self._firsts, row) - 1]

    def _encode_next(self) -> None:
        first = self._blocks[-1].first + self._blocks[-1].rows if self._blocks else 0
        # Frames of rows that are done are not wanted again; memory stays at the blocks in flight.
        while len(self._blocks) > 1 and self._is_done(self._blocks[0]):
            del self._blocks[0], self._firsts[0]
        block = self._encoder.block(self._batch, first, self.base)
        self._blocks.append(block)
        self._firsts.append(block.first)
        self.mean_size = len(block.data) / block.rows
        self.written.bytes += block.body_bytes

    def _is_done(self, block: Block) -> bool:
        end = block.first + block.rows
        return self._state.count(_DONE, block.first, end) == block.rows
