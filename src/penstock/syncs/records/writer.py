"""Writes records in bulk: ids and hashes first, payloads only of what is new or differs.

Writing the same again changes nothing, so that a task which runs twice is harmless. Two writers may
have the same records at once: the version with the later `upstream_updated_at` stays, whoever comes
first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

import psycopg

from penstock.core import connect as postgres
from penstock.core.connect import Connection, is_lost
from penstock.streams.errors import store_error
from penstock.syncs.connectors.contract import Record
from penstock.syncs.records import rows as forms
from penstock.syncs.records.rows import Ids, RefusedObject, Row, rows_of
from penstock.syncs.records.schema import SQL

_ROWS: Final = 10_000
_BYTES: Final = 16 * 1024 * 1024
_UNFIT: Final = (
    psycopg.errors.DataError,
    psycopg.errors.ProgramLimitExceeded,
    psycopg.errors.StatementTooComplex,
)


@dataclass(frozen=True, slots=True)
class RecordsWritten:
    """What became of records; each is in one of the counts, or refused.

    `deleted` are those that became so; a record that came back is `inserted`. An older version, a
    second one of the same batch, and the tombstone of what is not there are `unchanged`.
    """

    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    unchanged: int = 0
    refused: tuple[RefusedObject, ...] = ()

    @property
    def only_inserted(self) -> bool:
        """Whether all that could be kept was inserted."""
        return not (self.updated or self.deleted or self.unchanged)

    def plus(self, other: RecordsWritten) -> RecordsWritten:
        """Return the sum of both."""
        return RecordsWritten(
            self.inserted + other.inserted,
            self.updated + other.updated,
            self.deleted + other.deleted,
            self.unchanged + other.unchanged,
            self.refused + other.refused,
        )


class _Collection(NamedTuple):
    """Whose records are written."""

    sync: UUID
    provider: str
    collection: str


class RecordWriter:
    """Writes to the records table at `url`, over one connection; one thread at a time uses it.

    Its methods raise `StoreError`; nothing of the batch that failed is there then, and it can be
    written again.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Connection | None = None

    def close(self) -> None:
        """Close the connection; the next call makes another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def write(
        self,
        sync_id: UUID,
        provider: str,
        collection_id: str,
        records: Sequence[Record],
        *,
        expects_new: bool = False,
    ) -> RecordsWritten:
        """Write records of one collection.

        With `expects_new` they are inserted without a look at what is there, at two thirds of the price;
        where one is there, all are written as without it.
        """
        rows, refused = rows_of(records, Ids(sync_id, collection_id))
        of = _Collection(sync_id, provider, collection_id)
        done = RecordsWritten(
            unchanged=len(records) - len(rows) - len(refused), refused=tuple(refused)
        )
        expects_new = expects_new and not any(record.deleted for record in records)
        try:
            for part in _parts(rows):
                done = done.plus(self._written(part, of, expects_new=expects_new))
        except psycopg.Error as error:
            self.close()
            raise store_error(error, self._url) from None
        return done

    def _written(
        self, rows: Sequence[Row], of: _Collection, *, expects_new: bool
    ) -> RecordsWritten:
        """Write rows; what Postgres does not take is found by halves, and refused."""
        try:
            if expects_new:
                with contextlib.suppress(psycopg.errors.UniqueViolation):
                    return self._insert(rows, of)
            return self._write(rows, of)
        except _UNFIT as error:
            if len(rows) == 1:
                reason = f"Postgres refuses it: {str(error.diag.message_primary)[:200]}"
                return RecordsWritten(refused=(forms.refused_of(rows[0].record, reason),))
        middle = len(rows) // 2
        first = self._written(rows[:middle], of, expects_new=expects_new)
        return first.plus(self._written(rows[middle:], of, expects_new=expects_new))

    def _insert(self, rows: Sequence[Row], of: _Collection) -> RecordsWritten:
        fit, refused = forms.checked(rows)
        connection = self.connected()
        with (
            connection.transaction(),
            connection.cursor() as cursor,
            cursor.copy(SQL["copy_new"]) as to,
        ):
            to.write(forms.new(fit, *of))
        return RecordsWritten(len(fit), refused=tuple(refused))

    def _write(self, rows: Sequence[Row], of: _Collection) -> RecordsWritten:
        connection = self.connected()
        with connection.transaction(), connection.cursor(binary=True) as cursor:
            with cursor.copy(SQL["copy_seen"]) as to:
                to.write(forms.seen(rows))
            # Not prepared: the plan that suits an empty table does not suit a full one.
            cursor.execute(SQL["differing"], prepare=False)
            found = [n for (n,) in cursor.fetchall()]
            if not found:
                return RecordsWritten(unchanged=len(rows))
            # Only what is new or differs is looked at: the others are there already.
            fit, refused = forms.checked([rows[n] for n in found])
            with cursor.copy(SQL["copy_differing"]) as to:
                to.write(forms.differing(fit))
            cursor.execute(SQL["upsert"], of._asdict(), prepare=False)
            inserted, updated, deleted = cursor.fetchone() or (0, 0, 0)
        unchanged = len(rows) - inserted - updated - deleted - len(refused)
        return RecordsWritten(inserted, updated, deleted, unchanged, tuple(refused))

    def connected(self) -> Connection:
        """Return the connection, made where there is none; raises `psycopg.Error`."""
        if self._connection is not None and is_lost(self._connection):
            self.close()
        if self._connection is None:
            connection = postgres.connect(
                self._url, session=SQL["session"], application_name="penstock syncs"
            )
            self._connection = connection
            connection.execute(SQL["temp_buffers"])
            connection.execute(SQL["staging"])
        return self._connection


def _parts(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    first, size = 0, 0
    for at, row in enumerate(rows):
        if at > first and (at - first >= _ROWS or size + row.size > _BYTES):
            yield rows[first:at]
            first, size = at, 0
        size += row.size
    if first < len(rows):
        yield rows[first:]
