"""The NATS sinks of a worker that have one login: what is for several of them goes out together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Set
from concurrent.futures import Executor, wait
from typing import Final

import pyarrow as pa

from penstock.core.blocks import Block
from penstock.core.delivery import Unfinished
from penstock.core.errors import SinkError
from penstock.sinks.nats.login import by_login
from penstock.sinks.nats.together import Together, may_share
from penstock.spark.audience import Audience, rows_by_kind
from penstock.spark.sink_writer import PATIENCE, SinkDelivery, SinkWriter

_FEW: Final = 1_000
"""So many messages are shared out by kind; of more, each sink finds its own in all of them."""


class SharedSinks:
    """Sinks that share a connection.

    Args:
        writers: The sinks, by name.
        source: Their source.
        pool: Has threads for the sinks that have messages left to send.
        audience: Names the sinks that take a message.
    """

    def __init__(
        self, writers: Mapping[str, SinkWriter], source: str, pool: Executor, audience: Audience
    ) -> None:
        self.names: Set[str] = frozenset(writers)
        self._writers = dict(writers)
        self._pool = pool
        self._audience = audience
        self._together = Together(next(iter(writers.values())).settings, source)
        self._encoders = {name: of.encoder(self._together) for name, of in writers.items()}

    def connect(self, names: Iterable[str]) -> dict[str, SinkError]:
        """Connect, and return why that is not possible for the sinks of these names."""
        try:
            self._together.connect(PATIENCE)
        except Unfinished as unfinished:
            return dict.fromkeys(names, unfinished.error)
        for name in names:
            self._writers[name].note_connected()
        return {}

    def close(self) -> None:
        """Close the connection."""
        self._together.close()

    def deliver(self, block: Block, names: Set[str]) -> dict[str, SinkDelivery]:
        """Publish a part that is one block to some of the sinks; see `SinkWriter.deliver`."""
        done, tasks = {}, {}
        for name, its_block in self._shared_out(block, names):
            writer, delivery = self._writers[name], SinkDelivery()
            messages = writer.prepare(its_block, delivery)
            task = self._together.task(writer.settings, self._encoders[name], messages)
            done[name] = delivery
            if task is not None:
                tasks[name] = task
        began = time.monotonic()
        self._together.publish([*tasks.values()])
        took, late = time.monotonic() - began, []
        try:
            for name, task in tasks.items():
                end = self._writers[name].end
                if task.rows.left:
                    late.append(self._pool.submit(end, task, done[name], took))
                else:
                    end(task, done[name], took)
        finally:
            wait(late)  # whatever has happened, the next part finds the sinks idle
        for future in late:
            future.result()
        return done

    def _shared_out(self, block: Block, names: Set[str]) -> Iterator[tuple[str, Block]]:
        """Yield what each sink is to look at: the messages that it takes, where they are few."""
        messages = block.messages
        if messages.num_rows > _FEW:
            yield from ((name, block) for name in names)
            return
        rows_of: dict[str, list[list[int]]] = {name: [] for name in names}
        for kind, rows in rows_by_kind(messages).items():
            for name in self._audience.of(kind) & names:
                rows_of[name].append(rows)
        for name, found in rows_of.items():
            rows = found[0] if len(found) == 1 else sorted(row for some in found for row in some)
            yield name, _rows(block, rows)


def _rows(block: Block, rows: list[int]) -> Block:
    """Return a block of some of the messages."""
    if len(rows) == block.messages.num_rows:
        return block
    messages, results = block.messages, block.results
    if rows and rows[-1] - rows[0] + 1 == len(rows):
        first, count = rows[0], len(rows)
        messages = messages.slice(first, count)
        results = None if results is None else results.slice(first, count)
    else:
        taken = pa.array(rows, pa.int64())
        messages = messages.take(taken)
        results = None if results is None else results.take(taken)
    return block._replace(messages=messages, results=results)


def shared(
    writers: Mapping[str, SinkWriter], source: str, pool: Executor, audience: Audience
) -> list[SharedSinks]:
    """Return those of a worker's sinks that share connections, one for each login of several."""
    settings = {n: of.settings for n, of in writers.items() if may_share(of.settings)}
    return [
        SharedSinks({name: writers[name] for name in names}, source, pool, audience)
        for names in by_login(settings)
        if len(names) > 1
    ]
