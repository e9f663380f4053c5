"""A backfill under test: a capture, a backfiller beside it, and what a run would do."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import pyarrow as pa
import pytest
from tests.integration.capturing import PATIENCE, Message, Reader, messages, prepare
from tests.waits import await_true

from penstock.backfill.chunks.attempt import Attempt
from penstock.backfill.chunks.backfiller import Backfiller
from penstock.backfill.chunks.next_chunk import ReadChunk
from penstock.backfill.events import Delivered, Done, Event, Failed
from penstock.backfill.read.chunk import with_messages
from penstock.core.message import Position
from penstock.embedded.handles import Database
from penstock.postgres.chunk import Chunk, partition
from penstock.postgres.reads import BackfillSpec, Reads, SavedCursor

Key = tuple[Any, ...]

TEXTS = [
    "b",
    "B",
    "a",
    "á",
    "Z",
    "",
    " ",
    "a'b",
    'a"b',
    "a\\b",
    "a,b\n(c)",
    "{%s}",
    "ß",
    "😀",
    "\ufeffx",
]
"""Keys that databases compare and order in different ways."""


class Backfilling:
    """Drives a capture with a backfiller, as a run would, and remembers what came."""

    def __init__(self, url: str, start: Position | None = None, **options: Any) -> None:
        self.reader = Reader(url, start, **options)
        self.events: list[Event] = []
        self.received: list[Message] = []
        self.chunks: list[Reads] = []
        self._begun: SavedCursor = None
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.backfiller = Backfiller(self.reader.capture, self._queue.put)

    def start(self, table: str = "public.t", cursor: SavedCursor = None, **spec: Any) -> int:
        """Start a backfill of a table, number 1, for the sink `sink`."""
        schema, _, name = table.partition(".")
        self._begun = cursor
        return self.backfiller.start(BackfillSpec(1, "sink", schema, name, **spec), cursor)

    def new_events(self) -> list[Event]:
        """Return the events that have come since the last call."""
        new = []
        while not self._queue.empty():
            new.append(self._queue.get())
        self.events += new
        taken = {(reads.attempt, reads.chunk) for reads in self.chunks}
        for event in new:
            if isinstance(event, Delivered) and event.rows:
                assert (event.attempt, event.chunk) in taken, f"its rows were not taken: {event}"
        return new

    def await_event(self, kind: type[Event]) -> Event:
        """Wait for the next event of a kind, without a batch meanwhile."""
        while True:
            event = self._queue.get(timeout=PATIENCE)
            self.events.append(event)
            if isinstance(event, kind):
                return event

    def batch(self, wait: float = 0.2) -> list[Message]:
        """Deliver and confirm the next batch, if one comes within `wait` seconds."""
        reader = self.reader
        reader.capture.confirm(reader.position)
        end = reader.capture.available(reader.position, 10_000, wait)
        return [] if end == reader.position else self._deliver(end)

    def pause(self) -> None:
        """Pause, and deliver and confirm all chunks that are read."""
        self.backfiller.pause()
        self._await_step()
        while (attempt := self.backfiller._attempt) is not None and attempt.in_flight:
            self.batch(0.05)
        self._await_step()
        self.new_events()

    def _await_step(self) -> None:
        """Wait until the backfiller's thread has ended what it does, and handled all reports."""
        waiting = self.backfiller._commands._queue
        waiting.put(None)
        await_true(waiting.empty)

    def drain(self) -> None:
        """Deliver and confirm all that is written now."""
        reader, until = self.reader, self.reader.written()
        while True:
            end = reader.capture.available(reader.position, 10_000, PATIENCE, until)
            if end == reader.position:
                return
            self._deliver(end)

    def _deliver(self, end: Position) -> list[Message]:
        reader = self.reader
        found = self.take(reader.position, end)
        reader.position = end
        reader.capture.confirm(end)
        return found

    def take(self, start: Position, end: Position) -> list[Message]:
        """Deliver the batch (start, end], without confirming it."""
        chunks = self.reader.capture.take(start, end)
        self.chunks += [chunk.reads for chunk in chunks if chunk.reads is not None]
        assert len(chunks) == 1 or all(chunk.reads is None for chunk in chunks)
        found = messages([b for chunk in chunks for b in self._batches(chunk)])
        self.received += found
        return found

    def _batches(self, chunk: Chunk) -> Iterator[pa.RecordBatch]:
        """Yield a chunk's messages."""
        if chunk.reads is not None:
            chunk = with_messages(chunk, self.reader.capture.options.splits)
        yield from partition([chunk], 1)

    def run(self, until: Callable[[], bool] | None = None) -> list[Message]:
        """Deliver batches until the backfill is done (or `until` holds); return all messages."""
        seen = len(self.events)
        for _ in range(100_000):
            self.batch(0.05)
            self.new_events()
            new, seen = self.events[seen:], len(self.events)
            failed = [event for event in new if isinstance(event, Failed)]
            assert not failed, failed
            if until() if until else any(isinstance(event, Done) for event in new):
                return self.received
        raise AssertionError("the backfill does not end")

    def failed(self) -> Failed:
        """Wait for the backfill to fail."""
        event = self.await_event(Failed)
        assert isinstance(event, Failed)
        return event

    @property
    def cursor(self) -> Any:
        """Where the backfill was when it last reported; else where it was begun."""
        delivered = [event for event in self.events if isinstance(event, Delivered)]
        return delivered[-1].cursor if delivered else self._begun

    def reads(self) -> list[Message]:
        """Return the reads that came."""
        return [message for message in self.received if message.action == "read"]

    def close(self) -> None:
        """End both, as a kill would, except that the server gets a last confirmation."""
        self.backfiller.close()
        self.reader.capture.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def backfilling(database: Database, *statements: str, **options: Any) -> Iterator[Backfilling]:
    """Prepare a database and yield a capture of it with a backfiller."""
    prepare(database, *statements)
    with Backfilling(database.url, **options) as driver:
        yield driver


def before_watermarks(monkeypatch: pytest.MonkeyPatch, act: Callable[[ReadChunk], None]) -> None:
    """Call `act` with each chunk after its snapshot is taken, before its watermark is written."""
    write = Attempt.write_watermark

    def act_first(attempt: Attempt, chunk: ReadChunk) -> None:
        act(chunk)
        write(attempt, chunk)

    monkeypatch.setattr(Attempt, "write_watermark", act_first)


def fold(received: Sequence[Message], key: Sequence[str] = ("id",)) -> dict[Key, dict[str, Any]]:
    """Return the table that the messages make; a read after a newer change of its row fails."""
    rows: dict[Key, dict[str, Any]] = {}
    for message in received:
        at = tuple(message.record.get(k) for k in key)
        if message.action == "delete":
            rows.pop(at, None)
        elif message.action == "truncate":
            rows.clear()
        else:
            old = {**message.record, **(message.changes or {})}
            before = rows.pop(tuple(old.get(k) for k in key), {})
            kept = {n: before[n] for n in message.metadata["unavailable"] if n in before}
            rows[at] = {**message.record, **kept}
    return rows
