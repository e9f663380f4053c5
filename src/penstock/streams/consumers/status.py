"""How many consumers are, read in a few queries for all of them, whichever processes serve them.

What needs more than a short look into a stream, as a consumer is far behind, is left to the consumer
itself (`Consumer.facts`), which counts once and then follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import psycopg
import structlog
from psycopg import sql

from penstock.core import queries
from penstock.streams.consumers.entry import StreamPosition
from penstock.streams.consumers.facts import ConsumerFacts, facts_of, oldest_position, with_lag
from penstock.streams.consumers.selection import ALL
from penstock.streams.consumers.sessions import SQL, Connection, Sessions, composed
from penstock.streams.consumers.state import START, State, replay
from penstock.streams.consumers.types import ConsumerError, ConsumerInfo, StoreUnavailable
from penstock.streams.consumers.view import SegmentView, StreamRef, StreamView
from penstock.streams.names import batches_table, segment_table

_AT_ONCE: Final = 100
"""So many consumers are read at once."""
_COUNTED_AT_ONCE: Final = 4
_PATIENCE: Final = 10.0
"""Seconds for those that are read at once, and for one that counts by itself."""
_LOOKED_AT: Final = 100_000
"""So many messages are counted at once,"""
_EVALUATED: Final = 20_000
"""or so many, where a condition in SQL is evaluated for each."""
_KEPT: Final = 20_000
_END: Final = (2**63 - 1, 2**63 - 1)
_HEAD: Final = queries.load("penstock.streams", "store.sql")["head"]

_log: Final = structlog.get_logger("penstock.streams")

Newest = tuple[int, State]
"""The number of a log's last entry, and the state that the log comes to."""


class _One:
    """A consumer while it is looked at."""

    def __init__(self, info: ConsumerInfo, stream: StreamRef, dead: int) -> None:
        self.info = info
        self.stream = stream
        self.dead = dead
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


class _View:
    """What consumers of one stream with the same filters see of it."""

    def __init__(self, view: StreamView, source: int) -> None:
        self.view = view
        self.source = source
        self.those: list[_One] = []


class Status:
    """Reads how consumers are.

    `served` gives the newest state that this process has of one, if any. `counted` has a consumer count
    by itself what waits for it, and may raise.
    """

    def __init__(
        self,
        sessions: Sessions,
        served: Callable[[int], Newest | None],
        counted: Callable[[str], Awaitable[ConsumerFacts]],
    ) -> None:
        self._sessions = sessions
        self._served = served
        self._counted = counted
        self._known: dict[int, Newest] = {}

    async def facts(self, infos: Sequence[ConsumerInfo]) -> dict[int, ConsumerFacts | None]:
        """Return the facts of consumers by id, None where the store gave no answer to that.

        Those that are gone are not in it.
        """
        found: dict[int, ConsumerFacts | None] = {}
        for first in range(0, len(infos), _AT_ONCE):
            found |= await self._some_facts(infos[first : first + _AT_ONCE])
        return found

    async def _some_facts(self, infos: Sequence[ConsumerInfo]) -> dict[int, ConsumerFacts | None]:
        found: dict[int, ConsumerFacts | None]
        try:
            async with asyncio.timeout(_PATIENCE):
                found = await self.read(infos)
        except (StoreUnavailable, psycopg.errors.UndefinedTable, TimeoutError):
            found = dict.fromkeys(info.id for info in infos)
        except Exception:
            _log.exception("the status of consumers can't be read")
            found = dict.fromkeys(info.id for info in infos)
        rest = [info for info in infos if found.get(info.id, True) is None]
        some = asyncio.Semaphore(_COUNTED_AT_ONCE)
        looked = await asyncio.gather(*[self._one_facts(info.name, some) for info in rest])
        found |= {info.id: facts for info, facts in zip(rest, looked, strict=True)}
        return found

    async def _one_facts(self, name: str, some: asyncio.Semaphore) -> ConsumerFacts | None:
        """Return how one consumer is, None where that can't be read."""
        try:
            async with some, asyncio.timeout(_PATIENCE):
                return await self._counted(name)
        except (ConsumerError, TimeoutError):
            pass
        except Exception:
            _log.exception("the status of a consumer can't be read", consumer=name)
        return None

    async def read(self, infos: Sequence[ConsumerInfo]) -> dict[int, ConsumerFacts | None]:
        """Return the facts of consumers by id, None where a consumer has to be looked at by itself.

        Those that are gone are not in it. Raises `StoreUnavailable`, and `UndefinedTable` where one
        goes meanwhile.
        """
        async with self._sessions.session() as connection:
            ids = [info.id for info in infos]
            rows = await _rows(connection, SQL["status"], (ids,))
            about = {row[0]: (StreamRef(*row[1:4]), row[4]) for row in rows}
            those = [_One(info, *about[info.id]) for info in infos if info.id in about]
            logs = await self._read_logs(connection, list(about))
            views = self._views(those)
            await _read_streams(connection, views)
            now = self._sessions.clock.now()
            for view in views:
                for one in view.those:
                    # One that is about to begin elsewhere than at the beginning is near the end.
                    everything = one.info.settings.deliver_policy == "all"
                    first = START if everything else view.view.head
                    one.take(logs.get(one.info.id) or State(first), now)
                    one.far = one.cursor > view.view.head
            behind = sum(one.cursor < view.view.head for view in views for one in view.those)
            has_sql = any(view.view.has_sql for view in views)
            limit = max((_EVALUATED if has_sql else _LOOKED_AT) // max(behind, 1), 100)
            await _count(connection, views, limit)
            await _find_oldest(connection, views, limit)
        return {
            one.info.id: None if one.far else with_lag(one.facts, one.waiting, one.oldest, now)
            for one in those
        }

    def _views(self, those: Sequence[_One]) -> list[_View]:
        found: dict[tuple[Any, ...], _View] = {}
        for one in those:
            settings, stream = one.info.settings, one.stream
            filters = settings.filters
            own = one.info.id if filters.sql is not None else None
            key = (stream.id, settings.deletes, filters.model_dump_json(), own)
            if key not in found:
                view = StreamView(self._sessions, stream, settings, one.info.id)
                found[key] = _View(view, stream.source_id)
            found[key].those.append(one)
        return list(found.values())

    async def _read_logs(self, connection: Connection, ids: Sequence[int]) -> dict[int, State]:
        """Return the states of consumers; one whose log is empty has none."""
        known = {id_: newest for id_ in ids if (newest := self._newest(id_)) is not None}
        branches = [
            SQL["status_log"] % {"consumer": id_, "since": known[id_][0] if id_ in known else 0}
            for id_ in ids
        ]
        entries: dict[int, list[tuple[int, str]]] = {}
        query = " UNION ALL ".join(branches).encode()
        for id_, seq, entry in await _rows(connection, query, None) if ids else ():
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


async def _read_streams(connection: Connection, views: Sequence[_View]) -> None:
    """Read heads, and then the segments up to there."""
    branches = [
        sql.SQL("SELECT {}, h.* FROM ({}) h").format(
            sql.Literal(source), sql.SQL(_HEAD).format(batches=batches_table(source))
        )
        for source in {view.source for view in views}
    ]
    heads = {row[0]: (row[1], row[2]) for row in await _union(connection, branches, {})}
    streams = [one.stream.id for view in views for one in view.those[:1]]
    segments: dict[int, list[SegmentView]] = {}
    for stream, id_, lsn, idx, *through in await _rows(connection, SQL["segments_of"], (streams,)):
        last = _END if None in through else (through[0], through[1])
        segments.setdefault(stream, []).append(SegmentView(id_, (lsn, idx), last))
    for view in views:
        view.view.head = heads.get(view.source, START)
        view.view.segments = segments.get(view.those[0].stream.id, [])


class _Looks:
    """Questions to segments, one a position, that are put together into one query for each source."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._parts: dict[tuple[int, int, bool], tuple[_View, SegmentView]] = {}
        self._asked: dict[tuple[int, int, bool], dict[StreamPosition, list[_One]]] = {}

    def add(self, number: int, view: _View, one: _One, begin: StreamPosition, first: bool) -> None:
        """Ask each segment of a view about what lies behind a position."""
        for segment in view.view.segments:
            after = max(begin, segment.after)
            if after < min(view.view.head, segment.through):
                key = number, segment.id, first
                self._parts[key] = view, segment
                self._asked.setdefault(key, {}).setdefault(after, []).append(one)

    async def ask(
        self, connection: Connection, limit: int
    ) -> list[tuple[list[_One], SegmentView, tuple[Any, ...]]]:
        """Return the answers, each with the consumers that it is for."""
        branches: dict[int, list[sql.Composed]] = {}
        heads: dict[int, dict[str, int]] = {}
        keys = list(self._asked)
        for number, key in enumerate(keys):
            view, segment = self._parts[key]
            condition = ALL if key[2] else view.view.newest(segment, view.view.matches)
            branches.setdefault(view.source, []).append(
                composed(
                    self._name,
                    part=sql.Literal(number),
                    lsns=sql.Literal([lsn for lsn, _ in self._asked[key]]),
                    idxs=sql.Literal([idx for _, idx in self._asked[key]]),
                    segment=segment_table(segment.id),
                    limit=sql.Literal(1 if key[2] else limit),
                    condition=condition,
                    matches=view.view.matches,
                )
            )
            lsn, idx = view.view.head
            heads[view.source] = {"head_lsn": lsn, "head_idx": idx}
        found = []
        for source, of_source in branches.items():
            for number, place, *answer in await _union(connection, of_source, heads[source]):
                key = keys[number]
                those = list(self._asked[key].values())[place - 1]
                found.append((those, self._parts[key][1], tuple(answer)))
        return found


async def _count(connection: Connection, views: Sequence[_View], limit: int) -> None:
    """Count what was never handed out, where that are not very many."""
    looks = _Looks("status_count")
    for number, view in enumerate(views):
        for one in view.those:
            looks.add(number, view, one, one.cursor, False)
    for those, _, (found, seen) in await looks.ask(connection, limit):
        for one in those:
            one.waiting += found
            one.far |= seen >= limit


async def _find_oldest(connection: Connection, views: Sequence[_View], limit: int) -> None:
    """Find when the first message was committed that is not acked."""
    looks = _Looks("status_oldest")
    asked: list[_One] = []
    for number, view in enumerate(views):
        for one in view.those:
            if one.far or not (one.waiting or one.first):
                continue
            asked.append(one)
            held = one.first is not None
            begin = one.cursor if one.first is None else (one.first[0], one.first[1] - 1)
            looks.add(number, view, one, begin, held)
    found: dict[int, tuple[StreamPosition, str | None]] = {}
    for those, segment, (at,) in await looks.ask(connection, limit):
        for one in those:
            earlier = found.get(one.info.id)
            if earlier is None or segment.after < earlier[0]:
                found[one.info.id] = segment.after, at
    for one in asked:
        at = found.get(one.info.id, (START, None))[1]
        one.oldest = None if at is None else datetime.fromisoformat(at)
        one.far = one.info.id not in found and one.first is None


async def _union(
    connection: Connection, branches: Sequence[sql.Composed], values: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    if not branches:
        return []
    return await _rows(connection, sql.SQL(" UNION ALL ").join(branches), values)


async def _rows(connection: Connection, query: Any, values: Any) -> list[tuple[Any, ...]]:
    return await (await connection.execute(query, values, prepare=False)).fetchall()
