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
from penstock.sinks.nats.together import Together, login_of, may_share
from penstock.spark.sink_writer import Delivery, SinkWriter
from penstock.spark.steps import Steps

_PATIENCE: Final = 1.0
_FEW: Final = 1_000
"""So many messages are shared out by table; of more, each sink finds its own in all of them."""
_MOST_TABLES: Final = 10_000


class SharedSinks:
    """Sinks that share a connection; `pool` has threads for what does not go without a hitch."""

    def __init__(self, writers: Mapping[str, SinkWriter], source: str, pool: Executor) -> None:
        self.names: Set[str] = frozenset(writers)
        self._writers = dict(writers)
        self._pool = pool
        self._together = Together(next(iter(writers.values())).settings, source)
        self._taken: dict[tuple[str, str], Set[str]] = {}
        self._encoders = {name: of.encoder(self._together) for name, of in writers.items()}

    def connect(self, names: Iterable[str]) -> dict[str, SinkError]:
        """Connect, and return why that is not possible for the sinks of these names."""
        try:
            self._together.connect(_PATIENCE)
        except Unfinished as unfinished:
            return dict.fromkeys(names, unfinished.error)
        for name in names:
            self._writers[name].note_connected()
        return {}

    def close(self) -> None:
        """Close the connection."""
        self._together.close()

    def deliver(self, block: Block, names: Iterable[str]) -> dict[str, Delivery]:
        """Publish a part that is one block to some of the sinks; see `SinkWriter.deliver`."""
        done, tasks = {}, {}
        for name, its_block in self._shared_out(block, names):
            writer, delivery = self._writers[name], Delivery()
            messages = writer.prepare(its_block, delivery)
            task = self._together.task(writer.settings, self._encoders[name], messages)
            done[name] = delivery
            if task is not None:
                tasks[name] = task
        began = time.monotonic()
        self._together.publish([*tasks.values()])
        took, late = time.monotonic() - began, []
        for name, task in tasks.items():
            end = self._writers[name].end
            if task.rows.left:
                late.append(self._pool.submit(end, task, done[name], took))
            else:
                end(task, done[name], took)
        wait(late)
        for future in late:
            future.result()
        return done

    def _shared_out(self, block: Block, names: Iterable[str]) -> Iterator[tuple[str, Block]]:
        """Yield what each sink is to look at: the messages of its tables, where they are few."""
        messages = block.messages
        if messages.num_rows > _FEW:
            yield from ((name, block) for name in names)
            return
        places: dict[tuple[str, str], list[int]] = {}
        columns = (messages.column(name).to_pylist() for name in ("table_schema", "table_name"))
        for at, (schema, table) in enumerate(zip(*columns, strict=True)):
            places.setdefault((schema or "", table or ""), []).append(at)
        of_sinks: dict[str, list[list[int]]] = {name: [] for name in names}
        for table, rows in places.items():
            for name in self._takers(table):
                if name in of_sinks:
                    of_sinks[name].append(rows)
        for name, found in of_sinks.items():
            rows = found[0] if len(found) == 1 else sorted(row for some in found for row in some)
            yield name, _rows(block, rows)

    def _takers(self, table: tuple[str, str]) -> Set[str]:
        takers = self._taken.get(table)
        if takers is None:
            if len(self._taken) >= _MOST_TABLES:
                self._taken.clear()
            takers = self._taken[table] = {
                name
                for name, of in self._writers.items()
                if isinstance(of.steps, Steps) and of.steps.route.has_table(*table)
            }
        return takers


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


def shared(writers: Mapping[str, SinkWriter], source: str, pool: Executor) -> list[SharedSinks]:
    """Return those of a worker's sinks that share connections, one for each login of several."""
    found: list[tuple[list[object], dict[str, SinkWriter]]] = []
    for name, writer in writers.items():
        if not may_share(writer.settings):
            continue
        login = login_of(writer.settings)
        for other, those in found:
            if other == login:
                those[name] = writer
                break
        else:
            found.append((login, {name: writer}))
    return [SharedSinks(those, source, pool) for _, those in found if len(those) > 1]
