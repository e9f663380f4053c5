"""A sink that is slow or down holds back nobody; what it missed waits in the store, in order."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.integration.nats_servers import freeze
from tests.isolation_help import (
    SUBJECT,
    Source,
    assert_whole,
    loaded,
    nats_settings,
    position,
    published,
    stream_settings,
)
from tests.waits import await_end, await_true

from penstock.core.errors import SinkError
from penstock.core.monitor import Report
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.sinks.backlog import store as backlog
from penstock.sinks.backlog.drainers import Drainers
from penstock.sinks.stream import Stored, StreamWriter
from penstock.spark.sink_writer import SinkDelivery, SinkWriter
from penstock.streams import pauses

WINDOW = 600
OTHER = "other"
SHAKY = "shaky"
EVENTS = "events"


class Servers:
    """A shared nats-server, one that a test may stop, and a stream in each."""

    def __init__(self, other: EmbeddedNats, shaky: EmbeddedNats, stack: ExitStack) -> None:
        self.shaky = shaky
        self.other_streams = stack.enter_context(JetStream(other.url))
        self.shaky_streams = stack.enter_context(JetStream(shaky.url, error_cb=_ignore_error))
        self.stream = f"S{uuid.uuid4().hex[:8]}"
        prefix = self.stream.lower()
        self.other_streams.add_stream(self.stream, f"{prefix}.>", duplicate_window=WINDOW)
        self.shaky_streams.add_stream(self.stream, f"{prefix}.>", duplicate_window=WINDOW)
        subject = prefix + ".{table}"
        self.sinks: dict[str, Any] = {
            OTHER: nats_settings(other.url, subject=subject),
            SHAKY: nats_settings(shaky.url, subject=subject),
            EVENTS: stream_settings(),
        }

    def assert_all(self, source: Source) -> None:
        """All three hold all messages once, every group's in order."""
        count = source.written
        await_true(lambda: not source.behind())
        assert_whole(source.streamed(EVENTS), count)
        assert_whole(published(self.other_streams, self.stream), count)
        assert_whole(published(self.shaky_streams, self.stream), count)


async def _ignore_error(_: Exception) -> None:
    """Stand in for nats-py's logging of every try to connect to a server that is down."""


@pytest.fixture
def servers(nats_server: EmbeddedNats, server_dir: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        folder = server_dir / f"shaky-{uuid.uuid4().hex[:8]}"
        shaky = stack.enter_context(EmbeddedNats(folder))
        yield Servers(nats_server, shaky, stack)


@pytest.fixture
def published_to(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The NATS sinks that parts of batches are published to, and may wait for."""
    names: list[str] = []
    deliver = SinkWriter.deliver

    def noted(writer: SinkWriter, *args: Any) -> SinkDelivery:
        names.append(writer.steps.route.name)
        return deliver(writer, *args)

    monkeypatch.setattr(SinkWriter, "deliver", noted)
    return names


def test_a_server_that_is_gone_for_a_while(
    servers: Servers, database: Database, published_to: list[str]
) -> None:
    with Source(database.url, servers.sinks) as source:
        source.warm()
        with loaded(source) as load:
            await_true(lambda: source.written > 500)
            servers.shaky.kill()
            await_true(lambda: SHAKY in source.behind())
            usual, at = sorted(load.seconds[:-1]), len(load.seconds)
            await_true(lambda: len(load.seconds) > at)
            tries = published_to.count(SHAKY)
            await_true(lambda: "detached" in source.states(SHAKY))
            await_true(lambda: len(load.seconds) > at + 20)
            assert published_to.count(SHAKY) == tries, "a batch waits for the sink again"
            # The stream's and the other sink's messages go on, past those that wait.
            assert len(source.streamed(EVENTS)) > source.written - 200
            assert source.waiting(SHAKY) > 0
            while_down = sorted(load.seconds[at:])
            servers.shaky.start()
            await_true(lambda: source.states(SHAKY)[-1] == "attached")
            joined = source.written
            await_true(lambda: source.written > joined + 500)
        servers.assert_all(source)
        # One batch waits for the sink; the median does not know of it.
        assert while_down[len(while_down) // 2] < max(0.2, 2 * usual[len(usual) // 2])
        assert max(load.seconds) < 3
        assert source.states(SHAKY) == ["behind", "detached", "attached"]
        assert source.states(OTHER) == []


@pytest.mark.parametrize("patience", ["1s", "60s"])
def test_a_server_that_hangs(
    servers: Servers, database: Database, patience: str, published_to: list[str]
) -> None:
    """Bound by the patience with a single batch, whatever `detach_after` is."""
    sinks = {**servers.sinks, SHAKY: nats_settings(servers.shaky.url,
             subject=servers.sinks[SHAKY].subject, detach_after=patience)}  # fmt: skip
    with Source(database.url, sinks) as source:
        source.warm()
        source.batch(100)
        started = time.monotonic()
        source.batch(1100)
        usual = time.monotonic() - started
        assert servers.shaky.pid is not None
        freeze(servers.shaky.pid)
        try:
            started = time.monotonic()
            source.batch(4000)
            assert 1 <= time.monotonic() - started < 4
            assert source.behind() == {SHAKY: "too_slow"}
            tries, started = published_to.count(SHAKY), time.monotonic()
            source.batch(5000)
            assert time.monotonic() - started < max(0.8, 2 * usual)
            assert published_to.count(SHAKY) == tries, "a batch waits for the sink again"
            assert len(source.streamed(EVENTS)) == 5000
            await_true(lambda: source.states(SHAKY)[:1] == ["behind"])
        finally:
            os.kill(servers.shaky.pid, signal.SIGCONT)
        servers.assert_all(source)


def test_a_sink_is_paused_and_goes_on_under_load(servers: Servers, database: Database) -> None:
    """Also over a restart of the run: nothing is delivered meanwhile, and all of it afterwards."""
    key = {"source": "shop", "sink": SHAKY, "by": "admin"}

    def ask(query: str) -> None:
        with source.store.connection() as connection:
            connection.execute(pauses.SQL[query], key)

    def published() -> int:
        return servers.shaky_streams.info(servers.stream).state.messages

    with Source(database.url, servers.sinks) as source:
        source.warm()
        with loaded(source, rows=400, pause=0.005):
            for _ in range(3):
                ask("pause_sink")
                await_true(lambda: source.behind().get(SHAKY) == "paused")
                seen = source.written
                # The batch that is on its way meanwhile may have begun before the pause.
                await_true(lambda seen=seen: source.written > seen)  # type: ignore[misc]  # mypy infers no lambda with a default
                held, seen = published(), source.written
                await_true(lambda seen=seen: source.written > seen + 1_000)  # type: ignore[misc]  # mypy infers no lambda with a default
                assert published() == held
                assert source.behind() == {SHAKY: "paused"}
                ask("resume_sink")
                await_true(lambda: SHAKY not in source.behind())
        assert source.states(SHAKY) == ["paused", "behind", "attached"] * 3
        assert source.states(OTHER) == []
        ask("pause_sink")
        await_true(lambda: source.behind().get(SHAKY) == "paused")
        source.restart()
        held = published()
        source.batch(source.written + 500)
        assert source.behind() == {SHAKY: "paused"}
        assert published() == held
        await_true(lambda: source.state.sinks[SHAKY].backlog == 500)
        (problem,) = next(
            part.problems for part in source.state.parts() if part.subject == f"sink {SHAKY}"
        )
        assert problem.cause == "admin paused it. 500 messages wait in the store."
        assert problem.remedy == f"Let it go on: penstock sink resume {SHAKY}"
        ask("resume_sink")
        servers.assert_all(source)


def test_flapping(servers: Servers, database: Database) -> None:
    """Again and again gone and back under load, with the joins in the middle of it."""
    with Source(database.url, servers.sinks) as source:
        source.warm()
        with loaded(source, rows=400, pause=0.005):
            for _ in range(3):
                servers.shaky.kill()
                await_true(lambda: SHAKY in source.behind())
                servers.shaky.start()
                await_true(lambda: SHAKY not in source.behind())
                joined = source.written
                await_true(lambda joined=joined: source.written > joined + 500)  # type: ignore[misc]  # mypy infers no lambda with a default
        servers.assert_all(source)


def test_counters_equal_what_is_committed_whatever_is_done_again(
    servers: Servers, database: Database
) -> None:
    """Tasks that die, queries that begin anew, in other batches, and a sink that is away meanwhile."""
    seen: list[dict[str, int]] = []
    with Source(database.url, servers.sinks) as source:

        def counted(count: int) -> bool:
            seen.append(source.delivered())
            return set(seen[-1].values()) == {count}

        source.batch(200)
        source.batch(300)
        await_true(lambda: counted(300))
        # A task dies, when the other one has delivered and reported its part.
        source.batch(400, only=[0])
        source.restart_query()
        source.written = 200  # the slot was not confirmed up to 300
        source.batch(330)
        source.batch(420, tasks=1)
        await_true(lambda: counted(420))
        assert source.state.sinks[EVENTS].duplicates > 0
        servers.shaky.kill()
        source.batch(500)
        assert SHAKY in source.behind()
        source.batch(600, only=[1])
        source.restart_query()
        source.written = 420
        source.batch(550, tasks=1)
        source.batch(600)
        servers.shaky.start()
        servers.assert_all(source)
        await_true(lambda: counted(600))
        # Again what went to the backlog, now directly.
        source.restart_query()
        source.written = 480
        source.batch(700)
        servers.assert_all(source)
        await_true(lambda: counted(700))
    for name in servers.sinks:
        counts = [each[name] for each in seen]
        assert counts == sorted(counts), f"{name} fell"


def test_a_store_that_fails_between_what_is_counted_and_what_is_not(
    servers: Servers, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that comes again in two pieces is tried again with both."""
    with Source(database.url, servers.sinks) as source:
        source.batch(100)
        await_true(lambda: set(source.delivered().values()) == {100})
        source.restart_query()
        source.written = 50  # the slot was not confirmed up to 100
        write, pieces = StreamWriter.write, list[int]()

        def fail_once(self: StreamWriter, stream_index: int, batch: pa.RecordBatch) -> Stored:
            pieces.append(batch.num_rows)
            if len(pieces) == 1:
                self.rollback()
                raise SinkError("store_down", "It is away for a moment.")
            return write(self, stream_index, batch)

        monkeypatch.setattr(StreamWriter, "write", fail_once)
        source.batch(150, tasks=1)
        assert pieces == [50, 50, 50]
        servers.assert_all(source)
        await_true(lambda: set(source.delivered().values()) == {150})


def test_what_a_sink_missed_counts_however_late_its_drainer_notices(
    servers: Servers, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drainers, "wake", lambda *_: None)  # it looks every two seconds
    with Source(database.url, servers.sinks) as source:
        source.batch(200)
        await_true(lambda: set(source.delivered().values()) == {200})
        servers.shaky.kill()
        source.batch(300)
        assert SHAKY in source.behind()
        servers.shaky.start()
        servers.assert_all(source)
        await_true(lambda: set(source.delivered().values()) == {300}, 30)


def test_what_comes_again_and_is_missed_then_counts_once(
    servers: Servers, database: Database
) -> None:
    with Source(database.url, servers.sinks) as source:
        source.batch(300)
        await_true(lambda: set(source.delivered().values()) == {300})
        drainer = source.drainers[SHAKY]
        drainer.wake()
        await_true(drainer.is_attached)
        source.restart_query()
        source.written = 200  # the slot was not confirmed up to 300
        servers.shaky.kill()
        source.batch(330)
        assert SHAKY in source.behind()
        servers.shaky.start()
        servers.assert_all(source)
        await_true(lambda: set(source.delivered().values()) == {330})


def test_lsns_that_start_anew_while_a_sink_is_away(servers: Servers, database: Database) -> None:
    """What the run before has counted, up to a higher LSN, is not what the sink has."""
    with Source(database.url, {SHAKY: servers.sinks[SHAKY]}) as source:
        source.written = 100
        source.batch(200)
        await_true(lambda: source.delivered() == {SHAKY: 100})
        before = source.state
        servers.shaky.kill()
        source.restart()
        source.state.continue_from(before)
        source.written = 0  # the server was restored
        source.warm()
        assert SHAKY in source.behind()
        source.batch(100)
        servers.shaky.start()
        await_true(lambda: not source.behind())
        assert sorted(published(servers.shaky_streams, servers.stream)) == [*range(200)]


def test_a_crash_of_the_run_in_the_middle(servers: Servers, database: Database) -> None:
    """What was spilled before is there once, whichever way the batch is cut when it comes again."""
    with Source(database.url, servers.sinks) as source:
        source.batch(200)
        servers.shaky.kill()
        source.batch(400)
        source.batch(600)
        source.batch(900, only=[0])  # of the other part there is nothing
        source.restart()
        source.written = 400  # the slot was not confirmed since
        assert source.waiting(SHAKY) > 0
        servers.shaky.start()
        source.batch(650, tasks=1)
        source.batch(1000)
        servers.assert_all(source)
        source.batch(1200)
        assert source.behind() == {}
        servers.assert_all(source)


def test_a_crash_while_the_backlog_drains(servers: Servers, database: Database) -> None:
    with Source(database.url, servers.sinks) as source:
        source.batch(100)
        servers.shaky.kill()
        source.batch(200)
        for end in range(2_000, 62_000, 2_000):
            source.batch(end)
        servers.shaky.start()
        info = servers.shaky_streams
        await_true(lambda: info.info(servers.stream).state.messages > 1000)
        source.restart()
        assert source.behind() != {}
        source.done(60_000)
        servers.assert_all(source)


def test_a_replay_of_what_was_drained(servers: Servers, database: Database) -> None:
    """Nothing of it is delivered again, and it keeps nobody from joining."""
    with Source(database.url, servers.sinks) as source:
        source.batch(100)
        servers.shaky.kill()
        source.batch(200)
        with source.store.connection() as connection:
            end = position(199)
            backlog.drained(connection, source.source.id, SHAKY, end)
        source.restart()
        source.written = 150
        source.batch(200)
        assert source.waiting(SHAKY) == 50
        servers.shaky.start()
        await_true(lambda: not source.behind())
        assert_whole(published(servers.shaky_streams, servers.stream), 100)
        assert_whole(source.streamed(EVENTS), 200)


def test_down_from_the_start(servers: Servers, database: Database) -> None:
    servers.shaky.kill()
    with Source(database.url, servers.sinks) as source:
        started = time.monotonic()
        source.warm()
        assert time.monotonic() - started < 3
        assert source.behind() == {SHAKY: "connection_refused"}
        source.batch(300)
        servers.shaky.start()
        servers.assert_all(source)


def test_a_refused_login_holds_back_no_other(servers: Servers, database: Database) -> None:
    """What an operator has to mend is no reason to stop either."""
    login = {"user": "penstock", "password": "wrong-hunter7"}
    servers.shaky.stop()
    servers.shaky.config = 'authorization { user: penstock, password: "right" }'
    servers.shaky.start()
    url, subject = servers.shaky.url, servers.sinks[SHAKY].subject
    sinks = {**servers.sinks, SHAKY: nats_settings(url, subject=subject, **login)}
    with Source(database.url, sinks) as source:
        source.batch(300)
        assert source.behind() == {SHAKY: "authorization_violation"}
        source.batch(600)
        assert_whole(source.streamed(EVENTS), 600)
        assert [r for r in source.reports if r.get("sink") == SHAKY and r.get("error")]
        assert "hunter7" not in str(source.reports)
        servers.shaky.stop()
        servers.shaky.config = 'authorization { user: penstock, password: "wrong-hunter7" }'
        servers.shaky.start()
        await_true(lambda: not source.behind())
    with JetStream(url, **login) as stream:
        assert_whole(published(stream, servers.stream), 600)


def test_dead_letters_of_a_backlog(server_dir: Path, database: Database) -> None:
    config = "max_payload: 4KB"
    with ExitStack() as stack:
        folder = server_dir / f"dead-{uuid.uuid4().hex[:8]}"
        server = stack.enter_context(EmbeddedNats(folder, config))
        with JetStream(server.url, error_cb=_ignore_error) as stream:
            stream.add_stream("SHOP", SUBJECT, duplicate_window=WINDOW)
            sinks = {SHAKY: nats_settings(server.url)}
            with Source(database.url, sinks) as source:  # type: ignore[arg-type]  # a list of one type
                source.batch(10)
                server.kill()
                source.batch(20, size=5000)
                source.batch(30)
                server.start()
                await_true(lambda: not source.behind())
                letters = source.store.letters.page(sink=SHAKY)
                assert {letter.code for letter in letters} == {"message_too_large"}
                assert len(letters) == 10
                source.batch(35, size=5000)
                assert len(source.store.letters.page(sink=SHAKY)) == 15
                assert sorted(published(stream, "SHOP")) == [*range(10), *range(20, 30)]


def test_a_store_that_is_gone_for_a_while(servers: Servers, server_dir: Path) -> None:
    """Nothing can be written without it, and nothing is lost; the run gets a report of it."""
    with ExitStack() as stack:
        folder = server_dir / f"store-{uuid.uuid4().hex[:8]}"
        postgres = stack.enter_context(EmbeddedPostgres(folder))
        source = stack.enter_context(Source(postgres.create_database("store"), servers.sinks))
        source.batch(100)
        with loaded(source):
            await_true(lambda: source.written > 300)
            postgres.kill()
            await_true(lambda: any(r.get("store") for r in source.reports))
            at = source.written
            postgres.start()
            await_true(lambda: source.written > at + 500)
        source.store.close()  # the test's own connection is gone too
        servers.assert_all(source)
        assert reported(source.reports)[-1] is None


def test_an_error_of_the_store_is_reported_until_it_is_over(database: Database) -> None:
    """Also where it ended the query, and with it the process that reported it."""
    hide = "ALTER TABLE penstock.segment_1 RENAME TO hidden"
    with Source(database.url, {EVENTS: stream_settings()}) as source:
        source.batch(10)
        for restart in (False, True):
            database.execute(hide)
            with pytest.raises(SinkError, match="missing"):
                source.batch(source.written + 10)
            await_true(lambda: any(reported(source.reports)[-1:]))
            database.execute("ALTER TABLE penstock.hidden RENAME TO segment_1")
            if restart:
                source.restart()
            source.batch(source.written + 10)
            await_true(lambda: reported(source.reports)[-1] is None)
        assert_whole(source.streamed(EVENTS), source.written)


def test_a_dead_letter_that_the_store_takes_late(
    nats_server: EmbeddedNats, nats: JetStream, database: Database
) -> None:
    """The error is reported while it lasts, and is over afterwards."""
    stream = f"D{uuid.uuid4().hex[:8]}"
    nats.add_stream(stream, f"{stream.lower()}.>")
    sinks: dict[str, Any] = {
        SHAKY: nats_settings(nats_server.url, subject=stream.lower() + ".{table}")
    }
    with Source(database.url, sinks) as source:
        source.batch(10)
        source.refuse_letters = "No room for it."
        batch = threading.Thread(
            target=source.batch, args=(11,), kwargs={"size": 2_000_000}, daemon=True
        )
        batch.start()
        await_true(lambda: "No room for it." in reported(source.reports))
        source.refuse_letters = None
        await_end(batch)
        assert source.written == 11
        await_true(lambda: reported(source.reports)[-1] is None)
        assert len(source.store.letters.page(sink=SHAKY)) == 1


def reported(reports: Sequence[Report]) -> list[str | None]:
    """Return what was reported of the store."""
    return [report["store"] for report in reports if "store" in report]
