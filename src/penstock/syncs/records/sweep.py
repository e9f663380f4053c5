"""Deletes by absence: what two complete, error-free listings of all ids in a row lack is deleted.

One alone proves little: pages that an API counts shift while they are read, and an object that stood
between two of them is in neither.

The ids are spilled into a table of the records store, so that any number of tasks may add to a sweep,
and none keeps them. A sweep that is not complete counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar
from uuid import UUID, uuid4

import psycopg

from penstock.core.connect import Connection
from penstock.streams.errors import store_error
from penstock.syncs.errors import SyncError
from penstock.syncs.records import rows as forms
from penstock.syncs.records.payload import Unfit, check_id
from penstock.syncs.records.rows import Ids
from penstock.syncs.records.schema import SQL
from penstock.syncs.records.writer import RecordWriter

MAX_DELETED_SHARE: Final = 0.3
"""The share of a collection that a sweep deletes without being asked."""
_ROWS: Final = 10_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep found: `missing` of `known` records.

    Those that the sweep before missed, too, are `deleted`, and `waiting` ones are not before the next.
    Of too large a share neither is any.
    """

    known: int
    missing: int
    deleted: int
    waiting: int = 0

    @property
    def share(self) -> float:
        """The share of the known records that the API does not list any more."""
        return self.missing / self.known if self.known else 0.0

    @property
    def is_held(self) -> bool:
        """Whether nothing was done because the share is too large."""
        return self.missing > self.deleted + self.waiting


class Sweeps:
    """Sweeps of the records store; its methods raise `StoreError`.

    It shares the connection of a writer, and so its thread.
    """

    def __init__(self, writer: RecordWriter, url: str) -> None:
        self._writer = writer
        self._url = url

    def begin(self, sync_id: UUID, collection_id: str) -> UUID:
        """Begin a sweep, before its first request, and return its id."""
        sweep = uuid4()
        self._run(lambda c: c.execute(SQL["begin_sweep"], [sweep, sync_id, collection_id]))
        return sweep

    def add(
        self, sweep: UUID, sync_id: UUID, collection_id: str, upstream_ids: Iterable[str]
    ) -> None:
        """Note ids that the API has listed; noting one twice is harmless."""
        make = Ids(sync_id, collection_id)
        for some in _batched(upstream_ids, _ROWS):
            found = [make(of) for of in some if _is_kept(of)]
            self._run(partial(_copy, sweep, found))

    def complete(self, sweep: UUID, max_deleted_share: float = MAX_DELETED_SHARE) -> SweepResult:
        """Mark as deleted what the sweep has not seen, unless that is too large a share.

        What was written since the sweep began is left alone. A sweep that is held stays: `complete`
        with a larger share goes on, `hold` ends it. Raises `SyncError` for a sweep that is lost.
        """
        return self._run(lambda c: _complete(c, sweep, max_deleted_share))

    def hold(self, sweep: UUID) -> None:
        """End a complete sweep that deletes nothing; the next one deletes what it misses, too."""
        self._run(lambda c: _hold(c, sweep))

    def drop(self, sweep: UUID) -> None:
        """Give a sweep up, as it is not complete: it counts for nothing."""
        self._run(lambda c: c.execute(SQL["end_sweep"], {"sweep": sweep}))

    def _run(self, work: Callable[[Connection], T]) -> T:
        try:
            return work(self._writer.connected())
        except psycopg.Error as error:
            self._writer.close()
            raise store_error(error, self._url) from None


def _complete(connection: Connection, sweep: UUID, max_deleted_share: float) -> SweepResult:
    # One transaction, so that two tasks which complete it do so one after the other.
    with connection.transaction():
        values = _locked(connection, sweep)
        known, missing = connection.execute(SQL["missing"], values).fetchone() or (0, 0)
        if known and missing / known > max_deleted_share:
            return SweepResult(known, missing, 0)
        deleted = 0
        while missing and (
            marked := connection.execute(SQL["delete_missing"], values | {"rows": _ROWS}).rowcount
        ):
            deleted += marked
        waiting = _note(connection, values)
    # A record that came in between is not deleted, nor is it missing.
    return SweepResult(known, deleted + waiting, deleted, waiting)


def _hold(connection: Connection, sweep: UUID) -> None:
    with connection.transaction():
        _note(connection, _locked(connection, sweep))


def _locked(connection: Connection, sweep: UUID) -> dict[str, Any]:
    found = connection.execute(SQL["sweep"], [sweep]).fetchone()
    if found is None:
        raise SyncError(
            "sweep_lost",
            f"The ids of sweep {sweep} are not in the records store: it was completed or dropped, "
            "or that Postgres crashed. Nothing is deleted.",
            remedy="Sweep again.",
            transient=True,
        )
    sync_id, collection_id, began = found
    return {"sync": sync_id, "collection": collection_id, "began": began, "sweep": sweep}


def _note(connection: Connection, values: dict[str, Any]) -> int:
    """Note what a complete sweep has missed, and end it; return how many these are."""
    connection.execute(SQL["forget_missing"], values)
    waiting = connection.execute(SQL["note_missing"], values).rowcount
    connection.execute(SQL["end_sweep"], values)
    return waiting


def _copy(sweep: UUID, found: list[bytes], connection: Connection) -> None:
    with connection.cursor() as cursor, cursor.copy(SQL["copy_sweep_ids"]) as to:
        to.write(forms.swept(sweep, found))


def _batched(upstream_ids: Iterable[str], size: int) -> Iterator[list[str]]:
    left = iter(upstream_ids)
    while some := list(islice(left, size)):
        yield some


def _is_kept(upstream_id: str) -> bool:
    try:
        check_id(upstream_id)
    except Unfit:
        return False
    return True
