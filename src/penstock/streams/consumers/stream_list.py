"""The streams of a store, and up to where each has messages."""

from __future__ import annotations

from typing import Final

from psycopg import sql

from penstock.core import queries
from penstock.streams.consumers.sessions import SQL, Sessions
from penstock.streams.consumers.state import START
from penstock.streams.consumers.types import StreamInfo
from penstock.streams.names import batches_table
from penstock.streams.records import commit_position

_HEAD: Final = queries.load("penstock.streams", "store.sql")["head"]


async def streams(sessions: Sessions) -> list[StreamInfo]:
    """Return all streams by name."""
    found = []
    heads: dict[int, tuple[int, int]] = {}
    for row in await sessions.rows(SQL["streams"]):
        id_, name, kind, source, retention, segments, at, source_id, base, uuid = row
        if source_id not in heads:
            heads[source_id] = await head_of(sessions, source_id)
        head = heads[source_id]
        position = None if head == START else commit_position(head[0] - base, head[1])
        found.append(StreamInfo(id_, name, kind, source, retention, segments, position, at, uuid))
    return found


async def head_of(sessions: Sessions, source: int) -> tuple[int, int]:
    """Return the position of the last message that the store has of a source."""
    rows = await sessions.rows(sql.SQL(_HEAD).format(batches=batches_table(source)))
    return (rows[0][0], rows[0][1]) if rows else START
