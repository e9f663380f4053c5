"""How many consumers are, read in a few queries for all of them, whichever processes serve them.

What needs more than a short look into a stream, as a consumer is far behind, is left to the consumer
itself (`Consumer.facts`), which counts once and then follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from psycopg import sql

from penstock.core import queries
from penstock.streams.consumers.entry import StreamPosition
from penstock.streams.consumers.facts import ConsumerFacts, facts_of, oldest_position, with_lag
from penstock.streams.consumers.selection import ALL
from penstock.streams.consumers.sessions import SQL, Connection, Sessions, composed
from penstock.streams.consumers.state import START, State, replay
from penstock.streams.consumers.types import ConsumerInfo
from penstock.streams.consumers.view import Segment, StreamRef, StreamView
from penstock.streams.names import batches_table, consumer_table, segment_table

AT_ONCE: Final = 100
"""So many consumers are read at once."""
_LOOKED_AT: Final = 20_000
_KEPT: Final = 20_000
_HEAD: Final = queries.load("penstock.streams", "store.sql")["head"]

Newest = tuple[int, State]
"""The number of a log's last entry, and the state that the log comes to."""


class _One:
    """A consumer while it is looked at."""

    def __init__(
        self, sessions: Sessions, info: ConsumerInfo, stream: StreamRef, dead: int
    ) -> None:
        self.info = info
        self.stream = stream
        self.dead = dead
        self.view = StreamView(sessions, stream, info.settings, info.id)
        self.waiting = 0
        """What is behind the cursor."""
        self.oldest: datetime | None = None
        self.far = False
        """Whether a short look was not enough."""

    def take(self, state: State, now: int) -> None:
        """Note the state as it is now: one that is served here goes on while the streams are read."""
        self.cursor = state.cursor
        self.first = oldest_position(state)
        passed = state.pending + len(state.replays)
        self.facts = facts_of(state, now, waiting=passed, oldest=None, dead=self.dead)
        self.far = state.cursor > self.view.head

    def behind(self, position: StreamPosition) -> Iterable[tuple[Segment, StreamPosition]]:
        """Yield the segments with what lies behind a position, and where that begins in each."""
        for segment in self.view.segments:
            begin = max(position, segment.after)
            if begin < min(self.view.head, segment.through):
                yield segment, begin


class Status:
    """Reads how consumers are. `served` gives the newest state that this process has of one, if any."""

    def __init__(self, sessions: Sessions, served: Callable[[int], Newest | None]) -> None:
        self._sessions = sessions
        self._served = served
        self._known: dict[int, Newest] = {}

    async def read(self, infos: Sequence[ConsumerInfo]) -> dict[int, ConsumerFacts | None]:
        """Return the facts of consumers by id, None where a consumer has to be looked at by itself.

        Those that are gone are not in it. Raises `StoreUnavailable`, and `UndefinedTable` where one
        goes meanwhile.
        """
        async with self._sessions.session() as connection:
            ids = [info.id for info in infos]
            rows = await _rows(connection, SQL["status"], (ids,))
            about = {row[0]: (StreamRef(*row[1:4]), row[4]) for row in rows}
            those = [
                _One(self._sessions, info, *about[info.id]) for info in infos if info.id in about
            ]
            logs = await self._read_logs(connection, list(about))
            await _read_streams(connection, those)
            now = self._sessions.clock.now()
            for one in those:
                first = one.view.head if one.info.settings.deliver_policy == "new" else START
                one.take(logs.get(one.info.id) or State(first), now)
            await _count(connection, those)
            await _find_oldest(connection, those)
        return {
            one.info.id: None if one.far else with_lag(one.facts, one.waiting, one.oldest, now)
            for one in those
        }

    async def _read_logs(self, connection: Connection, ids: Sequence[int]) -> dict[int, State]:
        """Return the states of consumers; one whose log is empty has none."""
        known = {id_: newest for id_ in ids if (newest := self._newest(id_)) is not None}
        branches = [
            composed(
                "status_log",
                consumer=sql.Literal(id_),
                log=consumer_table(id_),
                since=sql.Literal(known[id_][0] if id_ in known else 0),
            )
            for id_ in ids
        ]
        entries: dict[int, list[tuple[int, str]]] = {}
        for id_, seq, entry in await _union(connection, branches, {}):
            entries.setdefault(id_, []).append((seq, entry))
        for id_, found in entries.items():
            since, state = self._newest(id_) or (0, State())
            new = sorted(each for each in found if each[0] > since)
            if new:  # of other processes: what is served here is not touched
                copy = State() if since == 0 else replay(State(), [state.encode().decode()])
                known[id_] = new[-1][0], replay(copy, (entry for _, entry in new))
                self._known[id_] = known[id_]
        while len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]
        return {id_: state for id_, (_, state) in known.items()}

    def _newest(self, consumer: int) -> Newest | None:
        here, known = self._served(consumer), self._known.get(consumer)
        if here is None or (known is not None and known[0] > here[0]):
            return known
        return here


async def _read_streams(connection: Connection, those: Sequence[_One]) -> None:
    """Read heads, and then the segments up to there."""
    sources = {one.stream.source_id for one in those}
    heads = await _union(
        connection,
        [
            sql.SQL("SELECT {}, h.* FROM ({}) h").format(
                sql.Literal(source), sql.SQL(_HEAD).format(batches=batches_table(source))
            )
            for source in sources
        ],
        {},
    )
    head = {row[0]: (row[1], row[2]) for row in heads}
    streams = {one.stream.id for one in those}
    segments: dict[int, list[Segment]] = {}
    for stream, id_, lsn, idx, *through in await _rows(
        connection, SQL["segments_of"], (list(streams),)
    ):
        last = (2**63 - 1, 2**63 - 1) if None in through else (through[0], through[1])
        segments.setdefault(stream, []).append(Segment(id_, (lsn, idx), last))
    for one in those:
        one.view.head = head.get(one.stream.source_id, START)
        one.view.segments = segments.get(one.stream.id, [])


async def _count(connection: Connection, those: Sequence[_One]) -> None:
    """Count what was never handed out, where that are not very many."""
    limit = max(_LOOKED_AT // max(len(those), 1), 100)

    def branches(one: _One) -> Iterable[sql.Composed]:
        for segment, begin in one.behind(one.cursor):
            yield composed(
                "status_count", **_range(one, segment, begin, limit), matches=one.view.matches
            )

    by_id = {one.info.id: one for one in those if not one.far}
    for id_, found, seen in await _by_source(connection, by_id.values(), branches):
        by_id[id_].waiting += found
        by_id[id_].far |= seen >= limit


async def _find_oldest(connection: Connection, those: Sequence[_One]) -> None:
    """Find when the first message was committed that is not acked."""
    limit = max(_LOOKED_AT // max(len(those), 1), 100)

    def branches(one: _One) -> Iterable[sql.Composed]:
        first = one.first
        begin = one.cursor if first is None else (first[0], first[1] - 1)
        for number, (segment, after) in enumerate(one.behind(begin)):
            condition: sql.Composable = ALL
            if first is None:
                condition = one.view.newest(segment, one.view.matches)
            yield composed(
                "status_oldest",
                **_range(one, segment, after, limit if first is None else 1),
                number=sql.Literal(number),
                condition=condition,
            )

    by_id = {one.info.id: one for one in those if not one.far and (one.waiting or one.first)}
    found: dict[int, tuple[int, str | None]] = {}
    for id_, number, at in await _by_source(connection, by_id.values(), branches):
        if id_ not in found or number < found[id_][0]:
            found[id_] = number, at
    for id_, one in by_id.items():
        at = found.get(id_, (0, None))[1]
        one.oldest = None if at is None else datetime.fromisoformat(at)
        one.far = id_ not in found and one.first is None


def _range(
    one: _One, segment: Segment, begin: StreamPosition, limit: int
) -> dict[str, sql.Composable]:
    return {
        "consumer": sql.Literal(one.info.id),
        "segment": segment_table(segment.id),
        "lsn": sql.Literal(begin[0]),
        "idx": sql.Literal(begin[1]),
        "limit": sql.Literal(limit),
    }


async def _by_source(
    connection: Connection,
    those: Iterable[_One],
    branches: Callable[[_One], Iterable[sql.Composed]],
) -> list[tuple[Any, ...]]:
    """Return the rows of all consumers' branches; those of one source have one head."""
    parts: dict[int, tuple[dict[str, int], list[sql.Composed]]] = {}
    for one in those:
        head = {"head_lsn": one.view.head[0], "head_idx": one.view.head[1]}
        _, of_source = parts.setdefault(one.stream.source_id, (head, []))
        of_source += branches(one)
    rows = []
    for values, of_source in parts.values():
        rows += await _union(connection, of_source, values)
    return rows


async def _union(
    connection: Connection, branches: Sequence[sql.Composed], values: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    if not branches:
        return []
    query = sql.SQL(" UNION ALL ").join(sql.SQL("({})").format(branch) for branch in branches)
    return await _rows(connection, query, values)


async def _rows(connection: Connection, query: Any, values: Any) -> list[tuple[Any, ...]]:
    return await (await connection.execute(query, values, prepare=False)).fetchall()
