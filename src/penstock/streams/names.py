"""The names of the tables that come and go, and the store's advisory locks."""

from __future__ import annotations

from typing import Final

from psycopg import sql

LOCK_WRITE: Final = 7380
"""With a source's id. Shared: writes its streams; exclusive: changes which segments there are."""
LOCK_MIGRATE: Final = 7381
"""With 0: changes the schema, or what is registered in it."""
LOCK_RUN: Final = 7382
"""With a source's id, held by a session: runs the source's pipeline."""

LOCK_PERMITS: Final = 7383
"""With a consumer's id: takes permits for receives."""
LOCK_PROCESS: Final = 7386
"""With a process's number, held by a session: the process lives. `current_refusals` asks for it."""

CHANNEL: Final = "penstock"
"""Notifications: `s<source id>` there is a new head; `c<consumer id>` the consumer changed; `k` the
list of streams and consumers did; `w<consumer id>` another process needs permits for its receives,
`f<consumer id>` some are free; `t` the tokens did; `b` the backfills did."""


def batches_table(source_id: int) -> sql.Identifier:
    """Return the table of a source's written batches."""
    return sql.Identifier("penstock", f"batches_{source_id}")


def segment_table(segment_id: int) -> sql.Identifier:
    """Return the table of a segment of a stream."""
    return sql.Identifier("penstock", f"segment_{segment_id}")


def consumer_table(consumer_id: int) -> sql.Identifier:
    """Return the table with a consumer's log."""
    return sql.Identifier("penstock", f"consumer_{consumer_id}")
