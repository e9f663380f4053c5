"""Who works, and over what, where a run has many sinks: a store in memory stands for the real one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, cast

import pyarrow as pa
import pytest
from tests.streams_help import Change, wire
from tests.waits import await_end, await_true

from penstock.core.delivery import Unfinished, Written
from penstock.core.errors import SinkError, StoreError
from penstock.core.message import Position
from penstock.sinks.backlog import drainer as drainer_module
from penstock.sinks.backlog import drainers as drainers_module
from penstock.sinks.backlog import store as backlog
from penstock.sinks.backlog.drainers import Drainers
from penstock.sinks.backlog.sink import SinkBacklog
from penstock.sinks.backlog.store import Attention, Behind, Taken
from penstock.streams import pool as pool_module
from penstock.streams.pool import StorePool

SOURCE = 7
DONE = Position(100, 0)
_SOON = 1.5
"""Before the store is asked again without a wake."""
AWAY = SinkError("connection_refused", "Nothing listens there.")


class Store:
    """What the store has of backlogs: how many messages wait for each sink that is behind."""

    def __init__(self) -> None:
        self.waiting: dict[str, int] = {}
        self.queries = 0

    def attention(self, _: object) -> Attention:
        self.queries += 1
        return Attention({(SOURCE, name) for name in self.waiting}, set())

    def behind(self, _: object, source_id: int, sink: str) -> Behind | None:
        if sink not in self.waiting:
            return None
        return Behind(source_id, sink, "shop", 1.0, "timeout", "Late.", Position(0, 0))

    def take(self, _: object, of: Behind, until: Position | None = None) -> Taken | None:
        if not self.waiting[of.sink]:
            return None
        messages = wire([Change() for _ in range(self.waiting[of.sink])])
        return Taken(messages, until or DONE)

    def drained(self, _: object, __: int, sink: str, ___: Position) -> None:
        self.waiting[sink] = 0

    def join(self, _: object, __: int, sink: str) -> None:
        del self.waiting[sink]


class Lent:
    """Stands for a connection, and those of a pool."""

    def __init__(self, _: str) -> None:
        self.busy = self.closed = False

    @contextlib.contextmanager
    def lend(self) -> Iterator[Lent]:
        yield self

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        self.closed = True


class Target:
    """A sink that takes all, unless it is away."""

    def __init__(self, made: list[Target]) -> None:
        self.written = self.checks = 0
        self.away: SinkError | None = None
        made.append(self)

    def write(self, batch: pa.RecordBatch, _: float | None = None) -> Written:
        self.written += batch.num_rows
        return Written(delivered=batch.num_rows)

    def check(self, _: float) -> None:
        self.checks += 1
        if self.away is not None:
            raise Unfinished(self.away, wire([]), Written())

    def connect(self, _: float | None = None) -> None:
        pass

    def close(self) -> None:
        pass


class Bed:
    """A hundred sinks of one server, and one of another."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.made: list[Target] = []
        self.reports: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.drainers = Drainers("", self.reports.put)
        for number in range(100):
            self.add(f"s{number}", "one")
        self.add("other", "two")
        self.drainers.done(SOURCE, DONE)

    def add(self, name: str, login: str) -> None:
        of = SinkBacklog(SOURCE, name)
        self.drainers.add(of, lambda: cast(Any, Target(self.made)), timedelta(seconds=30), [login])

    @property
    def at_work(self) -> list[str]:
        return sorted(t.name for t in threading.enumerate() if t.name.startswith("drain "))

    @property
    def checkers(self) -> list[Target]:
        return [target for target in self.made if target.checks]


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    store = Store()
    for name in ("attention", "behind", "take", "drained", "join"):
        monkeypatch.setattr(backlog, name, getattr(store, name))
    monkeypatch.setattr(backlog, "pause_of", lambda *_: None)
    monkeypatch.setattr(backlog, "drop", lambda *_: None)
    monkeypatch.setattr(backlog, "size", lambda _, __, sink: (store.waiting.get(sink, 0), 0))
    monkeypatch.setattr(drainer_module, "lock_writers", lambda *_: None)
    monkeypatch.setattr(pool_module, "StoreConnection", Lent)
    bed = Bed(store)
    bed.drainers.start()
    yield bed
    bed.drainers.stop()


def test_sinks_that_are_not_behind_share_a_query_and_a_check(bed: Bed) -> None:
    await_true(bed.drainers.is_drained)
    await_true(lambda: len(bed.checkers) == 2)
    assert bed.at_work == []
    before = bed.store.queries
    bed.drainers.look()
    await_true(bed.drainers.is_drained)
    assert bed.store.queries <= before + 2
    assert len(bed.checkers) == 2  # one for each login


def test_one_that_falls_behind_works_until_it_has_joined(bed: Bed) -> None:
    await_true(bed.drainers.is_drained)
    bed.store.waiting["s7"] = 5
    bed.drainers.wake("s7")
    assert not bed.drainers.is_attached("s7")
    await_true(lambda: bed.drainers.is_attached("s7"), _SOON)
    assert "s7" not in bed.store.waiting
    assert sum(target.written for target in bed.made) == 5
    await_true(lambda: bed.at_work == [])


def test_all_that_are_behind_are_drained_over_a_few_connections(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent, most, first_ones = [0], [0], iter(range(20))
    lock, too_many = threading.Lock(), threading.Event()
    lend = Lent.lend

    @contextlib.contextmanager
    def counted(self: Lent) -> Iterator[Lent]:
        with lend(self) as connection:
            with lock:
                lent[0] += not self.busy
                most[0] = max(most[0], lent[0])
                if lent[0] > drainers_module.CONNECTIONS:
                    too_many.set()
                first, self.busy = not self.busy, True
            if next(first_ones, None) is not None:
                too_many.wait(0.2)  # so that many ask at once
            try:
                yield connection
            finally:
                with lock:
                    lent[0] -= first
                    self.busy = self.busy and not first

    monkeypatch.setattr(Lent, "lend", counted)
    await_true(bed.drainers.is_drained)
    bed.store.waiting |= {f"s{number}": 1 for number in range(100)}
    bed.drainers.look()
    await_true(lambda: not bed.store.waiting and bed.drainers.is_drained())
    assert 1 < most[0] <= drainers_module.CONNECTIONS
    assert sum(target.written for target in bed.made) == 100


def test_a_server_that_is_away_is_reported_of_all_its_sinks(bed: Bed) -> None:
    await_true(lambda: len(bed.checkers) == 2)
    one = max(bed.checkers, key=lambda target: bed.made.index(target) == 1)
    for target in bed.checkers:
        target.away = AWAY if target is one else None
    found = set[str]()
    while len(found) < 100:
        report = bed.reports.get(timeout=20)
        if report.get("code") == AWAY.code:
            found.add(report["sink"])
    assert found == {f"s{number}" for number in range(100)}
    one.away = None
    back = set[str]()
    while len(back) < 100:
        report = bed.reports.get(timeout=20)
        if "error" not in report and report.get("delivered") == 0:
            back.add(report["sink"])
    assert back == found


# The pool


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> StorePool:
    monkeypatch.setattr(pool_module, "StoreConnection", Lent)
    return StorePool("", 2)


def test_a_thread_that_asks_again_has_the_same_connection(pool: StorePool) -> None:
    with pool.lend() as first, pool.lend() as again:
        assert first is again
        with pool.lend() as third:
            assert third is first
    with pool.lend() as later:
        assert later is first


def test_a_thread_waits_where_all_are_lent(pool: StorePool) -> None:
    release, waits, got = threading.Event(), threading.Event(), SimpleQueue[object]()

    def hold() -> None:
        with pool.lend() as connection:
            got.put(connection)
            release.wait(20)

    def wait() -> None:
        waits.set()
        with pool.lend() as connection:
            got.put(connection)

    holders = [threading.Thread(target=hold, daemon=True) for _ in range(2)]
    for thread in holders:
        thread.start()
    held = {got.get(timeout=20), got.get(timeout=20)}
    assert len(held) == 2
    last = threading.Thread(target=wait, daemon=True)
    last.start()
    assert waits.wait(20)
    assert got.empty()
    release.set()
    assert got.get(timeout=20) in held
    await_end(*holders, last)


def test_it_shrinks_to_one(pool: StorePool) -> None:
    with pool.lend() as held:
        pool.shrink()
        assert not cast(Lent, held).closed
    pool.shrink()
    with pool.lend() as kept:
        assert not cast(Lent, kept).closed


def test_what_is_closed_lends_nothing_more() -> None:
    """A drainer that did not end in time must not go on beside that of the next run."""
    pool = StorePool("", 2)
    pool.close()
    with pytest.raises(StoreError, match="closed"), pool.lend():
        pass
