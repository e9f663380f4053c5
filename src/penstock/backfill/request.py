"""Backfills as they are asked for, and as the store has them.

The run that has the source alone moves a backfill's cursor; the command line alone pauses, resumes and
cancels it. Each statement checks the state that it changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, get_args

from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from penstock.core import queries
from penstock.core.errors import StoreError
from penstock.core.tables import qualified_name
from penstock.postgres.reads import SavedCursor
from penstock.streams.names import LOCK_RUN
from penstock.streams.store import Store

BackfillState = Literal["waiting", "running", "paused", "done", "failed", "cancelled"]
Command = Literal["pause", "resume", "cancel"]

OPEN: Final[tuple[BackfillState, ...]] = ("waiting", "running", "paused")
NOTICE: Final = "b"
"""The payload on the store's channel when a backfill was asked for, or got a command."""

_SQL: Final = queries.load("penstock.backfill", "request.sql")
_STORE_SQL: Final = queries.load("penstock.streams", "store.sql")


@dataclass(frozen=True, slots=True)
class BackfillRequest:
    """A backfill as it is asked for: the rows of a table, to one sink.

    `where` is SQL, `start` the value of `sort_by` to start at, `rows_total` an estimate.
    """

    source: str
    sink: str
    schema: str
    table: str
    where: str | None = None
    sort_by: str | None = None
    start: str | None = None
    initial: bool = False
    rows_total: int | None = None


@dataclass(frozen=True, slots=True)
class Backfill:
    """A backfill as the store has it; `is_run`: a run has its source now."""

    id: int
    source: str
    sink: str
    table_schema: str
    table_name: str
    condition: str | None
    sort_by: str | None
    start: str | None
    initial: bool
    state: BackfillState
    cursor: list[str | None] | None
    rows_done: int
    rows_total: int | None
    error: str | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    is_run: bool

    @property
    def table(self) -> str:
        """The table's name, with its schema, as SQL takes it."""
        return qualified_name(self.table_schema, self.table_name)

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.state in OPEN

    @property
    def asked(self) -> dict[str, str | None]:
        """What was asked for, as the audit log has it."""
        return {
            "sink": self.sink, "table": self.table, "where": self.condition, "from": self.start,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"backfill {self.id} of {self.table} to sink {self.sink}"


class Backfills:
    """The backfills in a store. All methods raise `StoreError`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # For the command line

    def create(self, requests: Sequence[BackfillRequest]) -> list[int]:
        """Make backfills that wait for a run, all or none, and return their numbers.

        Raises where one of the same sink and table has not ended yet.
        """
        with self._store.connection() as connection, connection.transaction():
            made = []
            for request in requests:
                row = connection.execute(_SQL["create"], _values(request)).fetchone()
                if row is None:
                    raise self._open_already(request)
                made.append(int(row[0]))
            connection.execute(_STORE_SQL["notify"], [NOTICE])
        return made

    def create_initial(self, requests: Iterable[BackfillRequest]) -> list[int]:
        """Make the initial backfills that were not made yet, and return their numbers."""
        made = []
        with self._store.connection() as connection:
            for request in requests:
                row = connection.execute(_SQL["create"], _values(request)).fetchone()
                if row is not None:
                    made.append(int(row[0]))
        return made

    def command(self, id: int, command: Command) -> Backfill:  # noqa: A002 - the field's name
        """Pause, resume or cancel a backfill, and return it with its new state.

        Raises where there is none, or where its state does not allow the command.
        """
        with self._store.connection() as connection, connection.transaction():
            changed = connection.execute(_SQL[command], [id]).rowcount
            found = self.get(id)
            if found is None:
                raise StoreError(
                    "no_backfill", f"There is no backfill {id}.",
                    remedy="`penstock backfill list` lists them.",
                )  # fmt: skip
            if not changed:
                raise _not_allowed(found, command)
            connection.execute(_STORE_SQL["notify"], [NOTICE])
        return found

    def get(self, id: int) -> Backfill | None:  # noqa: A002 - the field's name
        """Return a backfill, None if no backfill has that number."""
        found = self.find(ids=[id])
        return found[0] if found else None

    def find(
        self,
        *,
        ids: Sequence[int] | None = None,
        source: str | None = None,
        sink: str | None = None,
        states: Sequence[BackfillState] | None = None,
        after: int = 0,
        limit: int | None = None,
    ) -> list[Backfill]:
        """Return the first `limit` backfills behind number `after` that match, the oldest first."""
        values = {
            "ids": None if ids is None else list(ids), "source": source, "sink": sink,
            "states": None if states is None else list(states), "lock": LOCK_RUN,
            "after": after, "limit": limit,
        }  # fmt: skip
        with (
            self._store.connection() as connection,
            connection.cursor(row_factory=class_row(Backfill)) as cursor,
        ):
            return cursor.execute(_SQL["list"], values).fetchall()

    # For the run

    def forget(self, source: str, but: Iterable[str] = ()) -> None:
        """Cancel a source's backfills, failed ones too, except those of the sinks in `but`."""
        self._changed("forget", [source, list(but)])

    def with_initial(self, source: str) -> set[tuple[str, str, str]]:
        """Return the (sink, schema, table) that have had an initial backfill."""
        with self._store.connection() as connection:
            return set(connection.execute(_SQL["has_initial"], [source]).fetchall())

    def claim(self, source: str) -> Backfill | None:
        """Return the backfill that the source's run goes on with, in state running, or None."""
        with self._store.connection() as connection:
            row = connection.execute(_SQL["claim"], [source]).fetchone()
            return None if row is None else self.get(row[0])

    def progress(self, id: int, cursor: SavedCursor, rows_done: int) -> bool:  # noqa: A002 - the field's name
        """Store that all rows up to `cursor` are delivered, `rows_done` in all; False: it has ended."""
        values = {
            "id": id, "rows_done": rows_done,
            "cursor": None if cursor is None else Jsonb(list(cursor)),
        }  # fmt: skip
        return self._changed("progress", values)

    def set_error(self, id: int, error: str | None) -> bool:  # noqa: A002 - the field's name
        """Store why a backfill does not progress, None once it goes on."""
        return self._changed("set_error", [error, id])

    def finish(self, id: int, rows_done: int) -> bool:  # noqa: A002 - the field's name
        """Store that a backfill is done; False: it was cancelled meanwhile."""
        return self._changed("finish", {"id": id, "rows_done": rows_done})

    def fail(self, id: int, error: str) -> bool:  # noqa: A002 - the field's name
        """Store that a backfill has failed; False: it was paused or cancelled meanwhile."""
        return self._changed("fail", [error, id])

    def _changed(self, query: str, values: Any) -> bool:
        with self._store.connection() as connection:
            return connection.execute(_SQL[query], values).rowcount > 0

    def _open_already(self, request: BackfillRequest) -> StoreError:
        same = [
            found
            for found in self.find(source=request.source, sink=request.sink, states=OPEN)
            if (found.table_schema, found.table_name) == (request.schema, request.table)
        ]
        if not same:
            return StoreError(
                "backfill_exists", "Another session has just asked for the same backfill."
            )
        (found,) = same
        remedy = "Let it end, or cancel it: `penstock backfill cancel {}`."
        if found.state == "paused":
            remedy = "Resume or cancel it: `penstock backfill resume {}`."
        return StoreError(
            "backfill_exists",
            f"There is {found} already: it is {found.state}.",
            remedy=remedy.format(found.id),
        )


def _values(request: BackfillRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in BackfillRequest.__slots__}


def _not_allowed(found: Backfill, command: Command) -> StoreError:
    if command == "resume" and found.state == "failed":
        message = f"{found} failed, and there is a newer one of its table."
        remedy = "Let that one go on: `penstock backfill list`."
    else:
        message = f"{found} is {found.state}: it can't be {_PAST[command]}."
        remedy = "" if found.is_open else "Start another: `penstock backfill start`."
    return StoreError("backfill_state", message[0].upper() + message[1:], remedy=remedy)


_PAST: Final[dict[Command, str]] = dict(
    zip(get_args(Command), ("paused", "resumed", "cancelled"), strict=True)
)
