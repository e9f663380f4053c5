"""A publisher's transaction stays open while others publish and commit: nobody waits, nothing is lost.

Its messages have the lowest ids and the oldest times, the outbox keeps nothing beyond what is not
delivered, and it is swept all the while.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from tests.nats_cluster import await_

from penstock.embedded.handles import Database, JetStream, Msg
from penstock.embedded.nats import EmbeddedNats
from penstock.outbox.sql.install import install

from ..pipeline import PATIENCE, Penstock

STREAM = "OPEN"
KEPT_OPEN = 20
"""Messages of the transaction that stays open."""
OTHERS = 2
TOGETHER = 10  # messages of one transaction of the others
RATE = 150  # messages a second of each of the others
_BEFORE = 4.0  # seconds that the others publish before, for comparison; the first half warms up
_SETUP = """\
select tide.outbox_create('events', retention_hours => 0);
select tide.relay_set_outbox('open', 'events', 'g',
  '{"sink_type":"nats","url":"${env:NATS_URL}","subject":"open"}');
select tide.relay_enable('open');
"""
_PUBLISH = (
    "select tide.outbox_publish('events', jsonb_build_object('by', %(by)s::int, 'n', n))"
    " from generate_series(%(first)s::int, %(end)s) n"
)


@dataclass(frozen=True)
class Outcome:
    """What was seen; latencies are in seconds, from a commit to the message at a consumer."""

    seconds: float
    before: list[float]
    meanwhile: list[float]
    swept_meanwhile: int

    def line(self) -> str:
        return (
            f"open for {self.seconds:.0f} s; {len(self.meanwhile)} messages of others meanwhile,"
            f" {self.swept_meanwhile} swept; before {_shown(self.before)}; meanwhile"
            f" {_shown(self.meanwhile)}, max {max(self.meanwhile) * 1000:.0f} ms"
        )


def p99(seconds: list[float]) -> float:
    return quantiles(seconds, n=100)[98]


def _shown(seconds: list[float]) -> str:
    return f"p50 {median(seconds) * 1000:.0f} ms, p99 {p99(seconds) * 1000:.0f} ms"


class Arrivals:
    """When each message came to a consumer, by publisher and number."""

    def __init__(self) -> None:
        self.at: dict[tuple[int, int], float] = {}

    def note(self, message: Msg) -> None:
        body = json.loads(message.data)
        self.at[body["by"], body["n"]] = time.monotonic()


class Other(threading.Thread):
    """Publishes message after message, some in each transaction."""

    def __init__(self, database: Database, number: int) -> None:
        super().__init__(daemon=True)
        self.number = number
        self.committed: list[float] = []
        self.error: Exception | None = None
        self._database = database
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            with self._database.connect(autocommit=True) as connection:
                while not self._stopping.wait(TOGETHER / RATE):
                    n = len(self.committed)
                    values = {"by": self.number, "first": n, "end": n + TOGETHER - 1}
                    connection.execute(_PUBLISH, values)
                    self.committed += [time.monotonic()] * TOGETHER
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        self._stopping.set()
        self.join(PATIENCE)
        assert self.error is None, self.error


def keep_open(
    folder: Path,
    app: Database,
    server: EmbeddedNats,
    *,
    seconds: float = 0,
    messages: int = 0,
    report: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Run the scenario; an `AssertionError` names what is wrong.

    The transaction is open for so long, and until so many messages of the others, published meanwhile,
    have arrived; then until all of theirs have arrived and are swept.
    """
    with app.connect(autocommit=True) as connection:
        install(connection)
    app.execute(_SETUP)
    arrivals = Arrivals()
    with contextlib.ExitStack() as stack:
        streams = stack.enter_context(JetStream(server.url))
        streams.add_stream(STREAM, "open", duplicate_window=seconds + 600)
        streams.follow(STREAM, "open", arrivals.note)
        environment = {"NATS_URL": server.url}
        relay = stack.enter_context(
            Penstock(folder, "--url", app.url, command="relay", environment=environment)
        )
        relay.start().wait_ready()
        report("ready")
        others = [Other(app, number) for number in range(1, OTHERS + 1)]
        for other in others:
            other.start()
        swept = 0
        try:
            threading.Event().wait(min(_BEFORE, seconds))
            await_(lambda: len(arrivals.at) > 0, "the first messages")
            opened = stack.enter_context(app.connect())
            first = opened.execute(_PUBLISH, {"by": 0, "first": 1, "end": KEPT_OPEN}).fetchall()
            start = time.monotonic()
            sweep(app)
            enough = sum(len(other.committed) for other in others) + messages
            until = start + seconds
            while time.monotonic() < until or len(arrivals.at) < enough:
                assert time.monotonic() < until + PATIENCE, "the others' messages don't arrive"
                threading.Event().wait(0.5)
                swept += sweep(app)
        finally:
            for other in others:
                other.stop()
        committed = {(o.number, n): at for o in others for n, at in enumerate(o.committed)}
        await_(lambda: arrivals.at.keys() >= committed.keys(), "the others' messages")
        await_(lambda: sweep(app) >= 0 and not ids(app), "the sweep of the others' messages")
        assert arrivals.at.keys() == committed.keys(), "an open transaction's messages came"
        report("commit")
        with stalled(server):
            # Older than the retention, with lower ids than all that was delivered.
            opened.commit()
            sweep(app)
            assert ids(app) >= {row[0] for row in first}, "swept before they were delivered"
        whole = len(committed) + KEPT_OPEN
        await_(lambda: len(arrivals.at) >= whole, "those of the transaction that was open")
        await_(lambda: sweep(app) >= 0 and not ids(app), "the sweep of all, once delivered")
        assert relay.stop() == 0
        bodies = [json.loads(message.data) for message in streams.messages(STREAM)]
    assert len(bodies) == whole, "some came twice"
    for by in range(OTHERS + 1):
        numbers = [body["n"] for body in bodies if body["by"] == by]
        assert numbers == sorted(numbers), f"publisher {by}: out of order"
    # What came before its publisher heard of its own commit took no time.
    latencies = [(at, max(0.0, arrivals.at[key] - at)) for key, at in committed.items()]
    before = [took for at, took in latencies if start - _BEFORE / 2 < at <= start]
    return Outcome(seconds, before, [took for at, took in latencies if at > start], swept)


def sweep(app: Database) -> int:
    ((deleted,),) = app.execute("select tide.outbox_sweep('events')")
    return int(deleted)


def ids(app: Database) -> set[int]:
    return {row[0] for row in app.execute("select id from tide.outbox_events")}


@contextlib.contextmanager
def stalled(server: EmbeddedNats) -> Iterator[None]:
    """Stop the server's process: nothing is delivered meanwhile."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)
