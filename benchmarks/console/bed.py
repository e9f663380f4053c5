"""The store that the console is measured over, filled in bulk as runs and workers would fill it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from psycopg import sql

from benchmarks.configuration import bed as configured
from benchmarks.contenders import Running
from benchmarks.rig import say
from benchmarks.streams import bed as streams
from benchmarks.syncs import bed as synced
from penstock.core import queries
from penstock.core.group_hash import group_hash, key_start
from penstock.desired import consumers
from penstock.expressions.catalog import ColumnType
from penstock.streams.consumers.state import State
from penstock.streams.names import consumer_table, segment_table
from penstock.streams.records import PLACES, stream_end
from penstock.streams.store import Store

SQL = queries.load("benchmarks.console", "console.sql")
SMALL = 1_000
"""Messages of each stream but the first."""
WITH_LETTERS, LETTERS = 100, 100
"""So many consumers have so many dead letters each."""
BACKFILLS = 500
SYNCS = TARGETS = 10
BEHIND = 10
"""One consumer in so many has messages that wait; the others have acked all."""
_SOURCE = "shop"
_AT_ONCE = 500  # consumers; each takes locks of the store's Postgres
_GROUP = 10  # messages, on average
_COLUMNS = {
    ("public", "orders"): {
        "id": ColumnType("pg_catalog", "int8"),
        "customer_id": ColumnType("pg_catalog", "int8"),
        "status": ColumnType("pg_catalog", "text"),
        "amount": ColumnType("pg_catalog", "numeric"),
    }
}


@dataclass(frozen=True, slots=True)
class Scale:
    """How much the store has, and how often each page is asked for."""

    sinks: int = 100
    consumers: int = 10_000
    messages: int = 10_000_000
    asks: int = 30

    @property
    def keyed(self) -> int:
        """The number of the message that is found by its key, which is its id, too."""
        return self.messages // 2

    def lag(self, consumer: int) -> int:
        """Return how many messages wait for a consumer, by its number."""
        behind = consumer // self.sinks % BEHIND == 0
        return 1 + consumer * 7 % min(SMALL, self.messages) if behind else 0


@contextmanager
def serving(scale: Scale) -> Iterator[tuple[configured.Bed, Running]]:
    """Fill a store and start `penstock api` over it; ends all of it."""
    began = time.monotonic()
    with configured.bed(scale.sinks) as of:
        targets = {f"t{n}": {"type": "http", "url": "http://127.0.0.1:9"} for n in range(TARGETS)}
        document = {
            **synced.document("http://127.0.0.1:9", SYNCS, "1h", 100),
            **configured.document(of, nats=0, streams=scale.sinks, consumers=scale.consumers),
            "targets": targets,
        }
        of.command("apply", "--yes", str(of.file(document)))
        with Store.open(of.url) as store:
            _fill(of, store, scale)
        say(f"store filled in {time.monotonic() - began:.0f} s")
        with of.serve("api", "api", "--store", of.url) as running:
            of.wait(running, "ready", lambda: of.ask(running, "/healthz")[0] == 200)
            yield of, running


def _fill(of: configured.Bed, store: Store, scale: Scale) -> None:
    filled = streams.Bed(of.postgres, of.url, of.folder, store, of.token)
    source = store.register_source(_SOURCE, "bench")
    made = [store.register_stream(f"s{n}", source, "changes", None, {}) for n in range(scale.sinks)]
    store.save_catalog(_SOURCE, _COLUMNS)
    names = [f"c{n}" for n in range(scale.consumers)]
    for first in range(0, len(names), _AT_ONCE):
        consumers.register(store, names[first : first + _AT_ONCE])
    with store.connection() as connection:
        connection.execute(SQL["orders"])
        connection.execute(streams.SQL["messages"])
    filled.fill(made[0], scale.messages, max(scale.messages // _GROUP, 1))
    with store.connection() as connection:
        least = max(scale.messages - SMALL, 0) + 1
        for stream in made[1:]:
            row = connection.execute(streams.SQL["open_segment"], [stream.id]).fetchone()
            assert row is not None
            insert = sql.SQL(streams.SQL["add_to_segment"]).format(
                segment=segment_table(row[0]), places=sql.Literal(PLACES)
            )
            connection.execute(insert, [least, scale.messages, SMALL])
        keyed = streams.position(scale.keyed)
        group = group_hash(key_start("public", "orders") + b"[%d]]" % scale.keyed)
        segments = "SELECT id FROM penstock.segments WHERE stream_id = %s"
        for (segment,) in connection.execute(segments, [made[0].id]).fetchall():
            update = sql.SQL(SQL["set_group"]).format(segment=segment_table(segment))
            connection.execute(update, [group, keyed.lsn, PLACES * keyed.idx + 1])
        numbers = {f"c{n}": n for n in range(scale.consumers)}
        entries = []
        for each in store.consumers():
            if not each.own:
                at = streams.position(scale.messages - scale.lag(numbers[each.name]))
                state = State((at.lsn, stream_end(at.idx))).encode().decode()
                entries.append(
                    sql.SQL(SQL["first_entry"]).format(log=consumer_table(each.id), state=state)
                )
        for first in range(0, len(entries), _AT_ONCE):
            connection.execute(sql.SQL(";\n").join(entries[first : first + _AT_ONCE]))
        letters = sql.SQL(SQL["add_letters"]).format(places=sql.Literal(PLACES))
        connection.execute(letters, [names[:WITH_LETTERS]])
        backfills = sql.SQL(SQL["add_backfills"])
        connection.execute(
            backfills.format(sinks=sql.Literal(scale.sinks), backfills=sql.Literal(BACKFILLS))
        )
        # Statistics, which a database that is in use has had long since.
        connection.execute("ANALYZE")
