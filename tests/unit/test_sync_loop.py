"""The loop of the syncs and its lanes, without Spark and Postgres: an API is copied into a table."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from tests.loopback_api import Answer, LoopbackApi
from tests.loopback_api import Asked as Request
from tests.waits import await_end

from penstock.config.providers import PythonProvider, RestProvider
from penstock.core.errors import SparkError
from penstock.spark import sync_loop
from penstock.spark.sync_lanes import SyncLane, work
from penstock.spark.sync_loop import SyncLoop
from penstock.syncs import lane as lanes
from penstock.syncs.controls import SyncCommand
from penstock.syncs.errors import SyncError
from penstock.syncs.lane import JobClient
from penstock.syncs.progress import CollectionProgress
from penstock.syncs.records.sweep import SweepResult
from penstock.syncs.records.writer import RecordsWritten
from penstock.syncs.setup import Setup
from penstock.syncs.sync import Limit, SyncSettings

ID = "902261b0-6b22-48a0-8d6b-2fdb16cf8402"
KEY = (ID, "crm:contacts")
SECONDS = 120.0
LIMIT = Limit(1000, 1.0, 2)
PAGES = 2
"""So many pages an object takes: each page of two begins with an object of the one before."""


class Table:
    """What the store has: records, ids of sweeps, dead letters and progress."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.deleted: set[str] = set()
        self.swept: set[str] = set()
        self.missed: set[str] = set()
        self.obeyed: set[int] = set()
        self.letters: list[Any] = []
        self.progress: dict[Any, CollectionProgress] = {}
        self.writes = 0
        self.closed = 0


class Fakes:
    """In the place of `States`, `Store`, `RecordWriter` and `Sweeps`."""

    def __init__(self, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
        class States:
            store = None

            def __init__(self, url: str, stored: Callable[[Any], None], asked: Any) -> None:
                self._stored, self.asked = stored, asked

            def start(self) -> None:
                pass

            def save(self, changed: Mapping[Any, Any], obeyed: Any = ()) -> None:
                table.obeyed.update(obeyed)
                for key, (data, _) in changed.items():
                    table.progress[key] = msgspec.json.decode(data, type=CollectionProgress)
                self._stored(list(changed))

            def close(self, seconds: float) -> bool:
                return True

        class Store:
            def __init__(self, url: str) -> None:
                self.letters = self

            def known(self, sink: str, keys: list[str]) -> set[str]:
                return {letter.idempotency_key for letter in table.letters}

            def add(self, sink: str, letters: list[Any]) -> None:
                table.letters += letters

            def close(self) -> None:
                pass

        class Writer:
            def __init__(self, url: str) -> None:
                pass

            def close(self) -> None:
                table.closed += 1

            def write(
                self, sync: UUID, provider: str, collection: str, records: Any, *, expects_new: bool
            ) -> RecordsWritten:
                new = changed = 0
                for record in records:
                    there = table.records.get(record.upstream_id)
                    new += there is None
                    changed += there is not None and there != record.data
                    table.records[record.upstream_id] = record.data
                    table.deleted.discard(record.upstream_id)
                table.writes += 1
                return RecordsWritten(new, changed, 0, len(records) - new - changed)

        class Sweeps:
            def __init__(self, writer: Any, url: str) -> None:
                pass

            def begin(self, sync: UUID, collection: str) -> UUID:
                table.swept.clear()
                return uuid4()

            def add(self, sweep: UUID, sync: UUID, collection: str, ids: Any) -> None:
                table.swept.update(ids)

            def complete(self, sweep: UUID, share: float) -> SweepResult:
                known = set(table.records) - table.deleted
                missing = known - table.swept
                if known and len(missing) / len(known) > share:
                    return SweepResult(len(known), len(missing), 0)
                gone, table.missed = missing & table.missed, missing - table.missed
                table.deleted |= gone
                return SweepResult(len(known), len(missing), len(gone), len(missing - gone))

            def hold(self, sweep: UUID) -> None:
                table.missed = set(table.records) - table.deleted - table.swept

            def drop(self, sweep: UUID) -> None:
                pass

        monkeypatch.setattr(sync_loop, "States", States)
        monkeypatch.setattr(sync_loop, "load", lambda store, syncs: dict(table.progress))
        monkeypatch.setattr(lanes, "Store", Store)
        monkeypatch.setattr(lanes, "RecordWriter", Writer)
        monkeypatch.setattr(lanes, "Sweeps", Sweeps)


class Crm:
    """An API with contacts, pages of two; `refuses` answers 401."""

    def __init__(self) -> None:
        self.contacts: dict[int, int] = {}  # when each was changed
        self.refuses = False
        self.token = "old"
        self.limited = 0
        self.under_way = self.most_under_way = 0
        self.broken = False
        self.lock = threading.Lock()
        self.gate = threading.Event()
        self.gate.set()
        self.closes_at: tuple[str, int] | None = None
        """At which request of which kind the gate closes, once."""
        self.kinds: Counter[str] = Counter()

    def answer(self, asked: Request) -> Answer:
        with self.lock:
            self.under_way += 1
            self.most_under_way = max(self.under_way, self.most_under_way)
            kind = asked.query.get("kind", "")
            self.kinds[kind] += 1
            if self.closes_at == (kind, self.kinds[kind]):
                self.gate.clear()
        try:
            self.gate.wait(SECONDS)
            if asked.headers["authorization"] != f"Bearer {self.token}":
                return Answer({}, 401)
            if self.limited:
                self.limited -= 1
                return Answer({}, 429, {"Retry-After": "0.2"})
            since, at = int(asked.query.get("since", 0)), int(asked.query.get("offset", 0))
            found = sorted((at, id_) for id_, at in self.contacts.items() if at >= since)
            rows: list[Any] = [{"id": id_, "changed": time_} for time_, id_ in found[at : at + 2]]
            if self.broken:
                rows = [row if row["id"] != 3 else {"no": "id", "changed": 3} for row in rows]
            return Answer({"data": rows})
        finally:
            with self.lock:
                self.under_way -= 1


WHOLE = """
def read(request):
    at, page = 0, []
    while at == 0 or page:
        params = {"kind": request.kind, "offset": at}
        answer = request.session.request("GET", request.settings["url"], params=params)
        page = answer.json()["data"]
        yield page
        at += 2
"""
"""A function that goes on nowhere: it reads all pages, each time."""


def whole(url: str, folder: Path) -> PythonProvider:
    file = folder / "whole.py"
    file.write_text(WHOLE)
    return PythonProvider.model_validate(
        {
            "type": "python", "function": f"{file}:read", "settings": {"url": url},
            "base_url": url, "allow_private": True, "auth": {"type": "bearer", "token": "{token}"},
            "collections": {"contacts": {"deletes": {"type": "sweep"}}},
        }
    )  # fmt: skip


def provider(url: str) -> RestProvider:
    return RestProvider.model_validate(
        {
            "type": "rest", "base_url": url, "allow_private": True,
            "auth": {"type": "bearer", "token": "{token}"},
            "paginator": {"type": "offset", "limit": 2},
            "collections": {
                "contacts": {
                    "path": "contacts", "data_selector": "data", "params": {"since": "{cursor}"},
                    "incremental": {"cursor_path": "changed", "format": "number", "order": "ascending",
                                    "overlap": "1s"},
                    "deletes": {"type": "sweep"},
                }
            },
        }
    )  # fmt: skip


class Rig:
    """A loop with lanes as threads."""

    def __init__(self, url: str, table: Table) -> None:
        self.url = url
        self.provider: RestProvider | PythonProvider = provider(url)
        self.table = table
        self.changed = threading.Event()
        self.loop = SyncLoop(
            host="127.0.0.1", store_url="", records_url="", seconds=1000.0,
            on_shown=lambda _: self.changed.set(),
        )  # fmt: skip
        self.loop.start()
        self.batch = 0
        self.threads: list[threading.Thread] = []

    def configure(self, token: str = "old", limit: Limit = LIMIT, **settings: Any) -> None:
        settings = {"frequency": 0.1, "sweep_interval": 1e6} | settings
        sync = SyncSettings(ID, "customers", "crm", "key", token, ("crm:contacts",), **settings)
        error = SyncError("credential", "no key")
        client = JobClient("key", "crm", self.provider, {"token": token}, error)
        self.loop.configure(Setup((sync,), {ID: client}, {"key": limit}))

    def open(self, count: int = 2) -> None:
        self.batch += 1
        self.loop.open(self.batch)
        self.join(count)

    def join(self, count: int) -> None:
        for number in range(count):
            thread = threading.Thread(target=self._lane, args=(number,), daemon=True)
            self.threads.append(thread)
            thread.start()

    def _lane(self, number: int) -> None:
        with contextlib.suppress(SparkError):  # the loop was closed
            list(work(SyncLane(self.loop.address, self.batch, number)))

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not true():
            assert time.monotonic() < deadline, list(map(str, self.table.progress.values()))
            self.changed.wait(0.05)
            self.changed.clear()

    def progress(self) -> CollectionProgress | None:
        return self.table.progress.get(KEY)

    def close(self) -> None:
        self.loop.close()
        for thread in self.threads:
            thread.join(SECONDS)


@pytest.fixture
def crm() -> Crm:
    return Crm()


@pytest.fixture
def rig(crm: Crm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    table = Table()
    Fakes(table, monkeypatch)
    with LoopbackApi(crm.answer) as api:
        made = Rig(api.url, table)
        yield made
        crm.gate.set()
        made.close()


def backfilled(rig: Rig) -> bool:
    progress = rig.progress()
    return progress is not None and progress.backfilled_at is not None


def test_no_lane_comes_before_its_batch_is_open(rig: Rig, crm: Crm) -> None:
    """It would be refused, as of another batch, and the batch would have none."""
    crm.contacts = {1: 1}
    rig.configure()
    held, gate = threading.Event(), threading.Event()

    def hold(_: float) -> None:
        held.set()
        assert gate.wait(SECONDS)

    rig.loop._call(hold)
    assert held.wait(SECONDS)
    opening = threading.Thread(target=rig.open, daemon=True)
    opening.start()
    opening.join(0.2)
    assert not rig.threads
    gate.set()
    await_end(opening)
    rig.until(lambda: backfilled(rig))


def test_an_api_is_copied_and_followed(rig: Rig, crm: Crm) -> None:
    crm.contacts = {n: n for n in range(1, 8)}
    rig.configure()
    rig.open()
    rig.until(lambda: backfilled(rig) and len(rig.table.records) == 7)
    crm.contacts[3] = 20
    crm.contacts[9] = 21
    rig.until(lambda: (p := rig.progress()) is not None and p.counts.inserted == 8)
    assert b"20" in rig.table.records["3"]
    progress = rig.progress()
    assert progress is not None
    assert progress.counts.changed == 1
    assert progress.stuck is None


def test_the_requests_of_all_lanes_share_one_budget(rig: Rig, crm: Crm) -> None:
    crm.contacts = {n: n for n in range(1, 4)}
    crm.limited = 2
    rig.configure()
    rig.open()
    rig.until(lambda: len(rig.table.records) == 3)
    assert crm.most_under_way <= 2
    assert rig.loop.budgets["key"][3] == 2


def test_a_batch_ends_between_two_pages_and_the_next_one_goes_on(rig: Rig, crm: Crm) -> None:
    crm.contacts = {n: n for n in range(1, 201)}
    rig.configure()
    rig.open(1)
    rig.until(lambda: len(rig.table.records) > 30)
    rig.loop._seconds = 0.0
    rig.until(lambda: not rig.threads[0].is_alive())
    there = len(rig.table.records)
    assert there < 200
    assert rig.loop.failure is None
    rig.loop._seconds = 1000.0
    writes = rig.table.writes
    rig.open(1)
    rig.until(lambda: backfilled(rig))
    assert len(rig.table.records) == 200
    assert rig.table.writes - writes < PAGES * (200 - there) + 8  # it went on where it was


def test_a_batch_lasts_until_a_read_that_goes_on_nowhere_has_ended(
    rig: Rig, crm: Crm, tmp_path: Path
) -> None:
    crm.contacts = {n: n for n in range(1, 12)}
    crm.closes_at = "backfill", 4
    rig.provider = whole(rig.url, tmp_path)
    rig.configure(frequency=1e6)
    rig.open(1)
    rig.until(lambda: not crm.gate.is_set())
    rig.loop._seconds = 0.0
    rig.loop._server.wake()
    rig.until(lambda: rig.loop._due < math.inf)
    assert rig.loop._ending is None
    crm.gate.set()
    rig.until(lambda: not rig.threads[0].is_alive())
    assert len(rig.table.records) == 11
    rig.until(lambda: backfilled(rig))
    assert crm.kinds["backfill"] == 7, "it was read once"


def test_a_batch_does_not_last_for_a_budget(rig: Rig, crm: Crm) -> None:
    """A job that waits for it behind a page loses nothing where the batch ends."""
    crm.contacts = {n: n for n in range(1, 101)}
    rig.configure(limit=Limit(3, 3600.0, 2))
    rig.open(1)
    rig.until(lambda: rig.loop.budgets.get("key", [0])[0] == 3 and rig.table.writes >= 3)
    rig.loop._seconds = 0.0
    rig.loop._server.wake()
    rig.until(lambda: not rig.threads[0].is_alive())
    progress = rig.progress()
    assert progress is not None
    assert progress.backfill is not None


def test_a_sweep_that_goes_on_nowhere_ends_although_polls_are_due(
    rig: Rig, crm: Crm, tmp_path: Path
) -> None:
    crm.contacts = {n: n for n in range(1, 12)}
    crm.closes_at = "sweep", 4
    rig.provider = whole(rig.url, tmp_path)
    rig.configure(sweep_interval=0.2)
    rig.open(1)
    rig.until(lambda: not crm.gate.is_set())
    entry = rig.loop._scheduler.entry(KEY)
    assert entry is not None
    rig.until(lambda: any(flight.yields for flight in list(entry.flights.values())))
    polls = crm.kinds["poll"]
    rig.configure(sweep_interval=1e6)
    crm.gate.set()
    rig.until(lambda: (p := rig.progress()) is not None and p.swept_at is not None)
    assert crm.kinds["sweep"] == 7, "it was read once"
    rig.until(lambda: crm.kinds["poll"] > polls)


def test_a_pause_ends_a_read_that_goes_on_nowhere(rig: Rig, crm: Crm, tmp_path: Path) -> None:
    crm.contacts = {n: n for n in range(1, 12)}
    crm.closes_at = "backfill", 4
    rig.provider = whole(rig.url, tmp_path)
    rig.configure()
    rig.open(1)
    rig.until(lambda: not crm.gate.is_set())
    rig.loop._note_asked([], {ID})
    entry = rig.loop._scheduler.entry(KEY)
    assert entry is not None
    rig.until(lambda: any(flight.stops for flight in list(entry.flights.values())))
    crm.gate.set()
    rig.until(lambda: not entry.flights)
    assert len(rig.table.records) == 8


def test_a_batch_ends_early_where_the_next_one_has_more_lanes(rig: Rig, crm: Crm) -> None:
    crm.contacts = {n: n for n in range(1, 101)}
    rig.configure()
    rig.open(1)
    rig.until(lambda: len(rig.table.records) > 30)
    rig.loop.renew()
    rig.until(lambda: not rig.threads[0].is_alive())
    rig.open(2)
    rig.until(lambda: backfilled(rig))
    assert all(thread.is_alive() for thread in rig.threads[1:]), "this one lasts"


def test_a_batch_lasts_from_its_first_lane_on(
    rig: Rig, crm: Crm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Spark has few slots its tasks wait for them, as long as a batch of others lasts."""
    crm.contacts = {n: n for n in range(1, 101)}
    rig.configure()
    rig.open(0)
    later = SimpleNamespace(time=lambda: time.time() + 2000, time_ns=time.time_ns)
    monkeypatch.setattr(sync_loop, "time", later)
    rig.join(1)
    rig.until(lambda: backfilled(rig))
    assert rig.threads[0].is_alive()


def test_a_drain_ends_the_batch(rig: Rig, crm: Crm) -> None:
    crm.contacts = {n: n for n in range(1, 60)}
    rig.configure()
    rig.open(1)
    rig.until(lambda: len(rig.table.records) > 4)
    rig.loop.drain()
    rig.until(lambda: rig.loop.drained and not rig.threads[0].is_alive())
    progress = rig.progress()
    assert progress is not None
    assert progress.backfill is not None


def test_a_restart_goes_on_where_it_was(rig: Rig, crm: Crm) -> None:
    crm.contacts = {n: n for n in range(1, 60)}
    rig.configure()
    rig.open(1)
    rig.until(lambda: len(rig.table.records) > 30)
    rig.close()
    after = Rig(rig.url, rig.table)
    after.configure()
    there, writes = len(rig.table.records), rig.table.writes
    after.open(1)
    after.until(lambda: backfilled(after))
    after.close()
    assert len(rig.table.records) == 59
    assert rig.table.writes - writes < PAGES * (59 - there) + 8


def test_a_command_is_removed_with_the_store_of_what_it_has_brought_about(
    rig: Rig, crm: Crm
) -> None:
    crm.contacts = {n: n for n in range(1, 4)}
    other = UUID(int=1)
    rig.loop._note_asked(
        [SyncCommand(UUID(ID), None, "backfill", 7), SyncCommand(other, None, "backfill", 8)], set()
    )
    rig.configure(frequency=1e6)
    rig.open()
    rig.until(lambda: backfilled(rig))
    assert rig.table.obeyed == {7}  # nobody has the other sync
    progress = rig.progress()
    assert progress is not None
    first = progress.succeeded_at
    rig.loop._note_asked([SyncCommand(UUID(ID), None, "backfill", 9)], set())
    rig.until(lambda: 9 in rig.table.obeyed)
    progress = rig.progress()
    assert progress is not None
    assert progress.backfill is not None or progress.succeeded_at != first


def test_a_refused_credential_waits_for_another_one(rig: Rig, crm: Crm) -> None:
    crm.contacts = {1: 1}
    crm.token = "new"
    rig.configure()
    rig.open()
    rig.until(lambda: (p := rig.progress()) is not None and bool(p.failed))
    progress = rig.progress()
    assert progress is not None
    (failed,) = progress.failed.values()
    assert failed.code == "unauthorized", failed.cause
    assert failed.credential == "old"
    rig.configure("new")
    rig.until(lambda: len(rig.table.records) == 1)


def test_what_vanishes_is_deleted_by_a_sweep(rig: Rig, crm: Crm) -> None:
    crm.contacts = {n: n for n in range(1, 8)}
    rig.configure(sweep_interval=0.3)
    rig.open()
    rig.until(lambda: backfilled(rig) and len(rig.table.records) == 7)
    del crm.contacts[4]
    rig.until(lambda: rig.table.deleted == {"4"})
    for n in (1, 2, 3, 5):
        del crm.contacts[n]
    rig.until(lambda: (p := rig.progress()) is not None and p.asks is not None)
    assert rig.table.deleted == {"4"}
    rig.loop._note_asked([SyncCommand(UUID(ID), None, "resume", 1)], set())
    rig.until(lambda: rig.table.deleted == {"1", "2", "3", "4", "5"})


def test_what_cant_be_read_is_one_dead_letter(rig: Rig, crm: Crm) -> None:
    crm.contacts = {n: n for n in range(1, 5)}
    crm.broken = True
    rig.configure()
    rig.open()
    rig.until(lambda: (p := rig.progress()) is not None and (p.polled_at or 0) > 0)
    polled = rig.progress()
    assert polled is not None
    rig.until(lambda: (p := rig.progress()) is not None and p.polled_at != polled.polled_at)
    assert len(rig.table.letters) == 1
    assert rig.table.letters[0].subject == "crm:contacts"


def test_a_lane_that_has_ended_writes_nothing_more(rig: Rig, crm: Crm) -> None:
    crm.contacts = {n: n for n in range(1, 8)}
    crm.gate.clear()
    rig.configure()
    rig.open(1)
    rig.until(lambda: crm.under_way > 0)
    rig.loop.close()
    rig.threads[0].join(SECONDS)
    crm.gate.set()
    rig.until(lambda: crm.under_way == 0)
    rig.until(lambda: not any(t.name == "sync job" for t in threading.enumerate()))
    assert rig.table.writes == 0
    assert rig.table.closed == 4
