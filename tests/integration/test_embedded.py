"""The embedded servers: they start, survive crashes on the same port, and outlive nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from penstock.core.errors import EmbeddedError
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres, StopMode
from penstock.embedded.process import GuardedProcess

from ..waits import await_true


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="penstock-test-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def test_postgres_is_ready_for_logical_decoding(database: Database) -> None:
    assert database.execute("SHOW wal_level") == [("logical",)]
    [(version,)] = database.execute("SHOW server_version_num")
    assert int(version) >= 180000
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [database.name])
    # The fixture has to drop this database although a slot hangs on it.


def test_databases_do_not_see_each_other(postgres: EmbeddedPostgres, database: Database) -> None:
    database.execute("CREATE TABLE t (a int); INSERT INTO t VALUES (1)")
    other = Database("other", postgres.create_database("other"))
    with pytest.raises(psycopg.errors.UndefinedTable):
        other.execute("SELECT * FROM t")
    other.drop(postgres.url)
    assert database.execute("SELECT a FROM t WHERE a = %s", [1]) == [(1,)]


def test_postgres_keeps_commits_and_port_through_crash_and_restart(folder: Path) -> None:
    with EmbeddedPostgres(folder / "pg", {"work_mem": "5MB"}) as server:
        database = Database("shop", server.create_database("shop"))
        database.execute("CREATE TABLE t (a int)")
        url = server.url
        modes: list[StopMode] = ["fast", "immediate"]
        for value, mode in enumerate(modes):
            database.execute("INSERT INTO t VALUES (%s)", [value])
            server.restart(mode)
            database.close()
        database.execute("INSERT INTO t VALUES (2)")
        server.kill()
        assert server.pid is None
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.url)
        server.start()
        database.close()
        assert server.url == url
        assert database.execute("SELECT a FROM t ORDER BY a") == [(0,), (1,), (2,)]
        assert database.execute("SHOW work_mem") == [("5MB",)]
        assert database.execute("SHOW fsync") == [("on",)]
        database.close()


def test_postgres_reports_what_it_refused(folder: Path) -> None:
    with pytest.raises(EmbeddedError, match="wal_level"):
        EmbeddedPostgres(folder / "pg", {"wal_level": "nonsense"}).start()


def test_nats_keeps_its_streams_and_port_through_crash_and_restart(folder: Path) -> None:
    with EmbeddedNats(folder / "nats") as server, JetStream(server.url) as client:
        client.add_stream("s", "s.>", duplicate_window=60)
        assert client.publish("s.a", b"1", {"Nats-Msg-Id": "x"}) == (1, False)
        url = server.url
        server.kill()
        assert server.pid is None
        assert server.server_info() is None
        server.start()
        server.restart()
        assert server.url == url
        assert client.publish("s.a", b"1", {"Nats-Msg-Id": "x"}) == (1, True)


def test_nats_takes_a_configuration(folder: Path) -> None:
    config = 'authorization { user: "u", password: "p" }'
    with EmbeddedNats(folder / "nats", config) as server:
        info = server.server_info()
        assert info is not None
        assert info["auth_required"] is True
        with JetStream(server.url, user="u", password="p") as client:
            client.add_stream("s", ["s"])
            assert client.info("s").state.messages == 0


def test_nats_reports_what_it_refused(folder: Path) -> None:
    with pytest.raises(EmbeddedError, match="nonsense"):
        EmbeddedNats(folder / "nats", "nonsense nonsense").start()


def test_messages_are_read_back_in_order_with_their_headers(nats: JetStream) -> None:
    nats.add_stream("many", ["many.*"])
    for i in range(5):
        nats.publish(f"many.{i}", str(i).encode(), {"Nats-Msg-Id": f"id-{i}"})
    read = nats.messages("many")
    assert [(m.subject, m.data, m.seq) for m in read] == [
        (f"many.{i}", str(i).encode(), i + 1) for i in range(5)
    ]
    assert read[3].headers["Nats-Msg-Id"] == "id-3"


def test_an_empty_stream_has_no_messages(nats: JetStream) -> None:
    nats.add_stream("empty", ["empty"])
    assert nats.messages("empty") == []


OWNER = """
import sys, tempfile, pathlib
from penstock.embedded.postgres import EmbeddedPostgres, StopMode
from penstock.embedded.nats import EmbeddedNats
folder = pathlib.Path(sys.argv[1])
postgres = EmbeddedPostgres(folder / "pg").start()
nats = EmbeddedNats(folder / "nats").start()
print(postgres.pid, nats.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_servers_end_with_the_process_that_started_them(folder: Path, number: int) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert owner.stdout is not None
    servers = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    assert len(servers) == 2
    children = [child for server in servers for child in server.children(recursive=True)]
    guards = [server.parent() for server in servers]
    owner.send_signal(number)
    owner.communicate(timeout=60)
    mourners = [*servers, *children, *(guard for guard in guards if guard is not None)]
    alive = psutil.wait_procs(mourners, timeout=60)[1]
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_server_ends_when_its_guard_is_killed(folder: Path) -> None:
    server = EmbeddedPostgres(folder / "pg").start()
    assert server.pid is not None
    postmaster = psutil.Process(server.pid)
    guard = postmaster.parent()
    assert guard is not None
    guard.kill()
    alive = psutil.wait_procs([postmaster], timeout=60)[1]
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    server.stop()


def test_signals_to_our_group_do_not_reach_a_guarded_process(folder: Path) -> None:
    process = GuardedProcess(["sleep", "60"], log=folder / "log")
    assert os.getsid(process.pid) != os.getsid(0)
    assert process.returncode is None
    assert process.stop(signal.SIGTERM) == -signal.SIGTERM


def test_a_guarded_process_leaves_no_grandchildren(folder: Path) -> None:
    # setsid takes it out of the process group, as Spark's Python workers do.
    script = f"setsid sleep 60 & echo $! > {folder}/pid; exec sleep 60"
    process = GuardedProcess(["sh", "-c", script], log=folder / "log")
    pid = folder / "pid"

    def is_written() -> bool:
        assert process.wait(0.01) is None
        return pid.exists() and bool(pid.read_text().strip())

    await_true(is_written, what="the guarded process writes its child's process id")
    grandchild = psutil.Process(int(pid.read_text()))
    process.stop()
    assert psutil.wait_procs([grandchild], timeout=60)[1] == []


def test_a_missing_program_is_named(folder: Path) -> None:
    with pytest.raises(EmbeddedError, match="/no/such/program"):
        GuardedProcess(["/no/such/program"], log=folder / "log")
