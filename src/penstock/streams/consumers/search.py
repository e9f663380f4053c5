"""Where a search of a stream's messages begins, and the conditions of its keys; `browse` does it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from psycopg import sql

from penstock.config.consumers import ConsumerSettings
from penstock.config.reserved import TABLE
from penstock.core.group_hash import group_hash, key_start
from penstock.core.message import Position
from penstock.streams.consumers.entry import StreamPosition
from penstock.streams.consumers.reader import ConsumerReader
from penstock.streams.consumers.selection import ALL, PROVIDER
from penstock.streams.consumers.sessions import Sessions
from penstock.streams.consumers.view import StreamRef, StreamView
from penstock.streams.copy import KEY_BYTES
from penstock.streams.records import stream_end

_GROUPS: Final = sql.SQL("(m.group_hash = ANY (%(hashes)s) OR m.old_group_hash = ANY (%(hashes)s))")
_KEYS: Final = sql.SQL("m.key = ANY (%(keys)s)")
_HASH: Final = sql.SQL("m.group_hash = %(hash)s")
_RECORDS: Final = key_start(*TABLE.split("."))
_EVENTS: Final = {
    "sync_id": sql.SQL("m.table_schema = %(sync_id)s"),
    "collection_id": sql.SQL("m.table_name = %(collection_id)s"),
    "provider": sql.SQL("{} = %(provider)s").format(PROVIDER),
    # Looked at where the columns fit.
    "upstream_id": sql.SQL("m.message::json -> 'event' ->> 'upstream_id' = %(upstream_id)s"),
    "deleted": sql.SQL("m.message::json -> 'event' ->> 'deleted' = %(deleted)s"),
}
TABLE_IS: Final = sql.SQL("m.table_schema = %(schema)s AND m.table_name = %(table)s")


class Key(NamedTuple):
    """The messages of one row, or of one group.

    Attributes:
        schema: The table's schema.
        table: Its name.
        values: JSON texts of arrays, any of which may be the key's values: as `record_pks` has them.
        columns: The columns that the stream is grouped by; without any it is the primary key.
    """

    schema: str
    table: str
    values: tuple[bytes, ...]
    columns: tuple[str, ...] = ()


class EventKey(NamedTuple):
    """The events of records, each by its text; `record_id` is the one record's that may have any."""

    texts: Mapping[str, str]
    record_id: UUID | None = None


class Found(NamedTuple):
    """A message: where it stands in the stream, as users know its position, and its JSON."""

    at: StreamPosition
    position: Position
    message: bytes


class StreamSearch:
    """Finds messages of one stream; `base` is what its LSNs have over the source's."""

    def __init__(self, sessions: Sessions, stream: StreamRef, base: int) -> None:
        self.sessions = sessions
        self.stream = stream
        self.base = base
        self._reader = ConsumerReader(sessions, stream, 0, ConsumerSettings(deletes=True))

    @property
    def view(self) -> StreamView:
        """The stream, whole."""
        return self._reader.view

    def behind(self, position: Position) -> StreamPosition:
        """Return the stream's own position of the last message at `position`."""
        lsn = max(0, min(position.lsn + self.base, (1 << 63) - 1))
        return lsn, stream_end(position.idx)

    async def at_time(self, time: datetime) -> StreamPosition:
        """Return the position before the first message that was committed at `time` or later."""
        await self.view.refresh()
        text = time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        return await self._reader.at_time(text)


def condition_of(
    key: Key | EventKey | None, *, of_rows: bool
) -> tuple[sql.Composable, dict[str, Any]]:
    """Return the condition that a message is of `key`, and its parameters."""
    if key is None:
        return ALL, {}
    if isinstance(key, EventKey):
        return _events(key)
    if of_rows and not key.columns:
        names = [_row_key(key, values) for values in key.values]
        return _KEYS, {"keys": names}
    start = key_start(key.schema, key.table, *key.columns)
    hashes = [group_hash(start + values + b"]") for values in key.values]
    # Of two groups with one hash only this table's is meant.
    condition = sql.SQL("{} AND {}").format(_GROUPS, TABLE_IS)
    return condition, {"hashes": hashes, "schema": key.schema, "table": key.table}


def _events(key: EventKey) -> tuple[sql.Composable, dict[str, Any]]:
    values: dict[str, Any] = dict(key.texts)
    conditions: list[sql.Composable] = [of for name, of in _EVENTS.items() if name in values]
    if key.record_id is not None:
        values["hash"] = group_hash(b'%b["%b"]]' % (_RECORDS, str(key.record_id).encode()))
        conditions.insert(0, _HASH)
    return sql.SQL(" AND ").join(conditions) if conditions else ALL, values


def _row_key(key: Key, values: bytes) -> str:
    text = b"%b.%b:%b" % (key.schema.encode(), key.table.encode(), values)
    return f"sha256:{hashlib.sha256(text).hexdigest()}" if len(text) > KEY_BYTES else text.decode()
