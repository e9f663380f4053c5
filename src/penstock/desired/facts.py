"""What the store knows of the entities of a plan: streams, consumers, backlogs and positions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql

from penstock.core import queries
from penstock.streams.names import segment_table
from penstock.streams.store import Store

_COUNTED: Final = 100_000
"""Up to how many messages of an estimate are counted; more take too long."""
_SQL: Final = queries.load("penstock.desired", "facts.sql")


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """A stream that is there; `source` and `kind` are what it was made with."""

    source: str
    kind: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What consequences are read from, by names.

    Args:
        streams: The streams that are there.
        consumers: The stream of each consumer, and how many dead letters go with it.
        backlogs: How many messages wait, by sink and source; a sink that is behind has an entry.
        positions: When the newest confirmed transaction of each source was committed, in UTC.
        messages: How many messages a stream has, as a text.
    """

    streams: Mapping[str, StreamFacts]
    consumers: Mapping[str, tuple[str, int]]
    backlogs: Mapping[tuple[str, str], int]
    positions: Mapping[str, str | None]
    messages: Mapping[str, str]

    def readers_of(self, stream: str) -> list[str]:
        """Return the consumers of a stream."""
        return sorted(name for name, (of, _) in self.consumers.items() if of == stream)


def facts_of(store: Store, counted: Collection[str]) -> Facts:
    """Read the facts; the messages of the streams in `counted` are counted. Raises `StoreError`."""
    with store.connection() as connection:

        def rows(name: str, values: Any = None) -> list[tuple[Any, ...]]:
            return connection.execute(_SQL[name], values).fetchall()

        return Facts(
            {name: StreamFacts(source, kind) for name, source, kind in rows("streams")},
            {name: (stream, letters) for name, stream, letters in rows("consumers")},
            {(sink, source): waiting for sink, source, waiting in rows("backlogs")},
            dict(rows("positions")),
            _messages(connection, rows("segments", [list(counted)])),
        )


def _messages(
    connection: psycopg.Connection[Any], segments: list[tuple[Any, ...]]
) -> dict[str, str]:
    estimates: dict[str, list[tuple[int, int]]] = {}
    for stream, segment, estimate in segments:
        estimates.setdefault(stream, []).append((segment, max(0, estimate)))
    found = {}
    for stream, of_stream in estimates.items():
        if (total := sum(estimate for _, estimate in of_stream)) > _COUNTED:
            found[stream] = f"about {total:,} messages"
            continue
        counts = [
            sql.SQL("(SELECT count(*) FROM {})").format(segment_table(id_)) for id_, _ in of_stream
        ]
        row = connection.execute(sql.SQL("SELECT ") + sql.SQL(" + ").join(counts)).fetchone()
        found[stream] = messages(row[0] if row else 0)
    return found


def messages(count: int) -> str:
    """Return a number of messages in words."""
    return f"{count:,} message{'' if count == 1 else 's'}"
