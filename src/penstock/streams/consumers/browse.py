"""Browses a stream: messages by table, action and condition, the oldest or the newest first.

A search ends after some time whatever it has found, and another goes on where it has ended: so a
stream of many millions of messages is searched without any request that takes long.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psycopg
from psycopg import sql

from penstock.streams.catalogs import read_catalog
from penstock.streams.consumers import sql_filter
from penstock.streams.consumers.entry import StreamPosition
from penstock.streams.consumers.search import (
    TABLE_IS,
    EventKey,
    Found,
    Key,
    StreamSearch,
    condition_of,
)
from penstock.streams.consumers.selection import ALL
from penstock.streams.consumers.sessions import Connection, composed, messages
from penstock.streams.consumers.types import Refused, WrongSetting
from penstock.streams.consumers.view import SegmentView
from penstock.streams.names import segment_table
from penstock.streams.records import commit_position

if TYPE_CHECKING:
    from penstock.expressions.postgres.translate import Translated

END: Final[StreamPosition] = ((1 << 63) - 1, (1 << 63) - 1)
"""Behind all positions."""
_SECONDS: Final = 0.09
_MOST_SECONDS: Final = 5
"""How long one window of messages may take; a regular expression may never end."""
_WINDOW: Final = 500
_WINDOWS: Final = 8_000
_SCHEMA_IS: Final = sql.SQL("m.table_schema = %(schema)s")
_ACTION_IS: Final = sql.SQL("m.action = %(action)s")
_PASSES: Final = sql.SQL("''")
_ORDER: Final = {True: sql.SQL("DESC"), False: sql.SQL("ASC")}


@dataclass(frozen=True, slots=True)
class Criteria:
    """What is looked for; what is None leaves nothing out.

    Attributes:
        key: The messages of one row, of one group, or of some events of records.
        table: Those of a schema, and of its table of that name if it is given.
        action: Those with this action.
        condition: Those for which it holds, as `condition` returns it.
        newest_first: In which order.
    """

    key: Key | EventKey | None = None
    table: tuple[str, str | None] | None = None
    action: str | None = None
    condition: Translated | None = None
    newest_first: bool = False


class SearchPage(NamedTuple):
    """What was found.

    Attributes:
        found: In the order that was asked for.
        end: The last position that was looked at; None where nothing is left.
        looked_at: How many messages that was.
        failures: For how many of them the condition can't be evaluated.
        failure: Why, of the first.
    """

    found: Sequence[Found]
    end: StreamPosition | None
    looked_at: int
    failures: int
    failure: str | None


async def condition(search: StreamSearch, text: str) -> Translated:
    """Return a condition on the messages of a stream.

    Raises `ExpressionError` for what its source's tables refuse, and `Refused` where they are not
    known yet.
    """
    rows = await search.sessions.rows(sql_filter.FILTER_SQL["catalog"], (search.stream.id,))
    tables, source, version = rows[0]
    if tables is None:
        raise Refused(
            f"The tables of source {source!r} are not known yet, as it never ran: start "
            "`penstock run`, and filter then."
        )
    columns = read_catalog(tables)
    # In a thread, as the parser takes a while to import.
    return await asyncio.to_thread(sql_filter.translated, text, columns, version)


async def browse(
    search: StreamSearch, criteria: Criteria, low: StreamPosition, high: StreamPosition, limit: int
) -> SearchPage:
    """Return the first messages in (low, high], in the order of `criteria`; `limit` at most."""
    deadline = time.monotonic() + _SECONDS  # what comes before the first window counts, too
    await search.view.refresh()

    async def take() -> SearchPage:
        async with _evaluated(search, criteria.condition) as (connection, passed):
            walk = _Walk(search, criteria, connection, passed)
            return await walk.take(low, high, limit, deadline)

    return await search.view.whole(take)


@contextlib.asynccontextmanager
async def _evaluated(
    search: StreamSearch, condition: Translated | None
) -> AsyncIterator[tuple[Connection, sql.Composable]]:
    """Lend a connection as `evaluating` does; without a condition all messages pass."""
    if condition is None:
        async with search.sessions.session() as connection:
            yield connection, _PASSES
    else:
        async with evaluating(search, condition, "filter") as lent:
            yield lent


@contextlib.asynccontextmanager
async def evaluating(
    search: StreamSearch, condition: Translated, field: str
) -> AsyncIterator[tuple[Connection, sql.Composable]]:
    """Lend a connection, and what a condition gives there for a message `m`.

    Raises `WrongSetting` of `field` where that takes too long.
    """
    name = f"search_{secrets.token_hex(8)}"
    async with search.sessions.searches, search.sessions.session() as connection:
        try:
            # The function is the transaction's own: nothing is left of it.
            async with connection.transaction(force_rollback=True):
                await connection.execute(f"SET LOCAL statement_timeout = '{_MOST_SECONDS}s'")
                await connection.execute(sql_filter.create(name, condition))
                yield connection, sql_filter.passed(name)
        except psycopg.errors.QueryCanceled:
            raise WrongSetting(
                f"it takes too long, more than {_MOST_SECONDS} s for some messages: make"
                " its patterns simpler.",
                field,
            ) from None


class _Walk:
    """One search through a stream's segments, over one connection."""

    def __init__(
        self,
        search: StreamSearch,
        criteria: Criteria,
        connection: Connection,
        passed: sql.Composable,
    ) -> None:
        self._search = search
        self._criteria = criteria
        self._connection = connection
        self._passed = passed
        of_rows = search.view.of_rows
        self._indexed, self._values = condition_of(criteria.key, of_rows=of_rows)
        conditions = []
        if criteria.table is not None:
            self._values |= {"schema": criteria.table[0], "table": criteria.table[1]}
            conditions.append(_SCHEMA_IS if criteria.table[1] is None else TABLE_IS)
        if criteria.action is not None:
            self._values["action"] = criteria.action
            conditions.append(_ACTION_IS)
        self._condition = sql.SQL(" AND ").join(conditions) if conditions else ALL
        # Where all messages are asked for, a window larger than the page would be read in vain.
        self._sparse = bool(conditions) or criteria.condition is not None

    async def take(
        self, low: StreamPosition, high: StreamPosition, limit: int, deadline: float
    ) -> SearchPage:
        """Return what a search finds in (low, high] until the deadline, in one window at least."""
        view, down = self._search.view, self._criteria.newest_first
        found: list[Found] = []
        looked_at = failures = 0
        failure: str | None = None
        rows = max(_WINDOW, limit + 1) if self._sparse else limit + 1
        for segment in reversed(view.segments) if down else view.segments:
            begin, last = max(low, segment.after), min(high, segment.through, view.head)
            while begin < last:
                began = time.monotonic()
                window = await self._window(segment, begin, last, rows)
                looked_at += len(window)
                wrong = [text for *_, text in window if text]
                failures += len(wrong)
                failure = failure or (wrong[0].decode()[1:] if wrong else None)
                at = [(lsn, idx) for lsn, idx, text in window if text == b""]
                room = limit - len(found)
                found += await self._messages(segment, at[:room])
                if len(at) > room:
                    return SearchPage(found, found[-1].at, looked_at, failures, failure)
                if len(window) < rows:
                    break
                lsn, idx, _ = window[-1]
                now = time.monotonic()
                if now > deadline:
                    return SearchPage(found, (lsn, idx), looked_at, failures, failure)
                if down:
                    last = (lsn, idx - 1)
                else:
                    begin = (lsn, idx)
                # What the time that is left is enough for, at the pace of this window.
                left = int(rows * (deadline - now) / max(now - began, 1e-6))
                rows = min(rows * 2, _WINDOWS, max(left, _WINDOW))
        return SearchPage(found, None, looked_at, failures, failure)

    async def _window(
        self, segment: SegmentView, begin: StreamPosition, last: StreamPosition, rows: int
    ) -> list[Any]:
        view = self._search.view
        query = composed(
            "browsed",
            segment=segment_table(segment.id),
            indexed=self._indexed,
            condition=view.newest(segment, self._condition),
            passed=self._passed,
            order=_ORDER[self._criteria.newest_first],
        )
        params = {**view.range(begin, last), **self._values, "limit": rows}
        return await messages(self._connection, query, params)

    async def _messages(self, segment: SegmentView, at: Sequence[StreamPosition]) -> list[Found]:
        if not at:
            return []
        query = composed("messages", segment=segment_table(segment.id), condition=ALL)
        params = {"lsns": [lsn for lsn, _ in at], "idxs": [idx for _, idx in at]}
        rows = await messages(self._connection, query, params)
        texts = {(lsn, idx): text for lsn, idx, text in rows}
        made = []
        for lsn, idx in at:
            if (text := texts.get((lsn, idx))) is not None:
                position = commit_position(lsn - self._search.base, idx)
                made.append(Found((lsn, idx), position, text))
        return made
