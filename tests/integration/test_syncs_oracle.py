"""Syncs of an API that fails and changes while it is read: what the records table comes to is the API.

Scheduler, jobs, connector, session and records table are the real ones, in one thread; time is virtual,
and a kill is an exception that nothing catches. Events are what a trigger sees of the table.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

import msgspec
import psycopg
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tests.faulty_api import (
    COLLECTIONS,
    FAULTS,
    PROVIDER,
    Adapter,
    Change,
    FaultyApi,
    KilledError,
    Turn,
    made,
)
from tests.integration.test_record_writer import LOG
from tests.sync_oracle import Event, judge, rows_of

from penstock.config.providers import RestProvider
from penstock.core.delivery import DeadLetter
from penstock.embedded.handles import Database
from penstock.syncs.connectors.make import connector_of, session_of
from penstock.syncs.job import Control, run
from penstock.syncs.jobs import Report
from penstock.syncs.local_budget import LocalBudget
from penstock.syncs.progress import CollectionProgress
from penstock.syncs.records import schema
from penstock.syncs.records.sweep import Sweeps
from penstock.syncs.records.writer import RecordWriter
from penstock.syncs.schedule import Scheduler
from penstock.syncs.sync import Key, SyncSettings

IDS: Final = 8
SETTLED: Final = 6000.0
"""So long after the last fault all that waits has been tried again, and swept twice."""

TURNS: Final = 80


@dataclass(frozen=True)
class Rates:
    """How much happens at a request, on average."""

    changes: float
    faults: float
    kills: float

    def program(self, draw: random.Random) -> list[Turn]:
        """Return what happens at the requests to come."""
        return [self._turn(draw) for _ in range(TURNS)]

    def _turn(self, draw: random.Random) -> Turn:
        changes = []
        while draw.random() < self.changes / (1 + self.changes):
            changes.append(
                Change(draw.choice(COLLECTIONS), draw.randrange(IDS), draw.random() < 0.3,
                       draw.choice((0, 0, 3)))
            )  # fmt: skip
        return Turn(
            tuple(changes),
            draw.choice(FAULTS) if draw.random() < self.faults else None,
            draw.choice(("request", "report", "store")) if draw.random() < self.kills else None,
        )


RATES = st.builds(
    Rates,
    st.sampled_from([0.2, 1.0, 3.0]),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.sampled_from([0.0, 0.02, 0.1]),
)


class Tools:
    """What the jobs of one sync work with."""

    def __init__(self, rig: Rig, api: FaultyApi) -> None:
        self._rig = rig
        self.connector = connector_of("fake", RestProvider.model_validate(PROVIDER), {})
        self._budget = LocalBudget(1_000_000, sleep=lambda _: None)
        self.session = session_of(self.connector.access, self._budget, sleep=rig.sleep)
        self.session.http.mount("http://", Adapter(api, rig.sleep))

    @property
    def requests(self) -> int:
        return self._budget.requests

    @contextlib.contextmanager
    def writing(self) -> Iterator[tuple[RecordWriter, Sweeps]]:
        yield self._rig.writer, Sweeps(self._rig.writer, self._rig.url)

    def bury(self, letters: Sequence[DeadLetter]) -> int:
        raise AssertionError(letters)


class Rig:
    """Two syncs, each with an API of its own that has the same collections and ids."""

    def __init__(self, writer: RecordWriter, url: str, skew: float = 0.0) -> None:
        self.writer, self.url = writer, url
        self.now = self.began = float(int(time.time()))
        self.apis = {str(uuid4()): FaultyApi(lambda: self.now, skew) for _ in range(2)}
        self.names: Sequence[str] = COLLECTIONS
        self.stored: dict[Key, bytes] = {}
        self.kills = 0
        self.number = 1
        self.start()

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def start(self) -> None:
        """Begin as a process does: with what is stored."""
        self.tools = {sync: Tools(self, api) for sync, api in self.apis.items()}
        self.scheduler = Scheduler(8, lambda _: 4, self.number)
        known = {
            k: msgspec.json.decode(of, type=CollectionProgress) for k, of in self.stored.items()
        }
        ids = tuple(f"fake:{name}" for name in self.names)
        syncs = [
            SyncSettings(id_, id_, "fake", id_, "1", ids, frequency=600.0, sweep_interval=900.0,
                 max_deleted_share=1.0)
            for id_ in self.apis
        ]  # fmt: skip
        self.scheduler.configure(syncs, known, self.now)
        self.scheduler.join(0)

    def go(self, until: float) -> None:
        """Go on until a time, with kills where the APIs have them."""
        while self.now < until:
            try:
                self._step(until)
            except KilledError:
                self.kills += 1
                for api in self.apis.values():
                    api.kill = None
                self.start()

    def _step(self, until: float) -> None:
        jobs = self.scheduler.hand_out(self.now)
        for _, job in jobs:
            self.number = job.number + 1
            run(job, self.tools[job.sync], Control(), self._report)
        self.scheduler.yields()
        self.scheduler.stops()
        self._kill("store")
        taken = self.scheduler.take_dirty()
        for progress in taken:
            self.stored[progress.sync, progress.collection] = msgspec.json.encode(progress)
        self.scheduler.stored([(p.sync, p.collection) for p in taken], self.now)
        if not jobs and not taken:
            self.now = min(until, max(self.now + 0.01, self.scheduler.wake_at() or until))

    def _report(self, report: Report) -> None:
        self._kill("report")
        self.scheduler.report(report, self.now)

    def _kill(self, where: str) -> None:
        if any(api.kill == where for api in self.apis.values()):
            raise KilledError

    def settle(self) -> None:
        """Let all go well from now on."""
        for api in self.apis.values():
            api.turns.clear()
        self.go(self.now + SETTLED)

    def check(self) -> None:
        """Compare the events, the newest records and the APIs."""
        with psycopg.connect(self.url) as connection:
            for sync, api in self.apis.items():
                log = connection.execute(
                    "SELECT action, old, new FROM public.log WHERE new ->> 'sync_id' = %s ORDER BY n",
                    [sync],
                ).fetchall()
                events = [_event(*of) for of in log]
                judge(api, self.names, rows_of(connection, sync), events)
        for _, progress in self.scheduler.progresses:
            assert not progress.failed
            assert progress.stuck is None


def _event(action: str, old: Any, new: Any) -> Event:
    """Return the event that a change of the table is; one that is none is `unseen`."""
    was_deleted = action == "INSERT" or old["deleted"]
    what = "updated"
    if new["deleted"]:
        what = "unseen" if action == "INSERT" else "deleted"
    elif was_deleted:
        what = "inserted"
    return Event.of(what, new)


@pytest.fixture
def writer(database: Database) -> Iterator[RecordWriter]:
    schema.prepare(database.url)
    with psycopg.connect(database.url) as connection:
        connection.execute(LOG)
    writer = RecordWriter(database.url)
    yield writer
    writer.close()


@settings(
    max_examples=4, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(rates=RATES, skew=st.sampled_from([0.0, -86_400.0, 86_400.0]), seed=st.integers(0, 10**6))
def test_the_table_comes_to_what_the_api_has(
    writer: RecordWriter, database: Database, rates: Rates, skew: float, seed: int
) -> None:
    random.seed(seed)
    rig = Rig(writer, database.url, skew)
    for api in rig.apis.values():
        made(api, [Change(name, id_, late=90 * id_) for name in COLLECTIONS for id_ in range(IDS)])
        api.turns = rates.program(random.Random(seed))
    rig.go(rig.now + 4500.0)
    rig.settle()
    rig.check()
    event(f"{min(3, rig.kills)} kills")


def test_a_clock_that_stands_still_is_an_error_and_loses_nothing(
    writer: RecordWriter, database: Database
) -> None:
    rig = Rig(writer, database.url)
    rig.names = ["flagged"]
    rig.start()
    for api in rig.apis.values():
        api.frozen_at = api.clock - 1000
        made(api, [Change("flagged", 1)])
    rig.go(rig.now + 700.0)
    for api in rig.apis.values():
        made(api, [Change("flagged", id_) for id_ in range(2, IDS)])
    rig.go(rig.now + 700.0)
    codes = {p.stuck.code for _, p in rig.scheduler.progresses if p.stuck is not None}
    assert codes == {"cursor_stuck"}
    for _, progress in rig.scheduler.progresses:
        progress.stuck = None
    rig.check()
