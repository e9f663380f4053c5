"""A group's lock, whose session ends, or whose holder's machine dies without a word."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.netns_help import HOST, Machine, machine
from tests.waits import await_true

from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.outbox.relay.lock import GroupLock

HOLDER = """
import sys, time
from penstock.outbox.relay.lock import GroupLock
lock = GroupLock(sys.argv[1], "g")
print("held" if lock.acquire() else "not held", flush=True)
while lock.check():
    time.sleep(0.5)
print("lost", flush=True)
"""


@pytest.fixture
def other_machine() -> Iterator[Machine]:
    with machine() as made:
        if made is None:
            pytest.skip("no network namespace can be made here")
        yield made


@pytest.fixture
def server(server_dir: Path, other_machine: Machine) -> Iterator[EmbeddedPostgres]:
    """A server that the other machine reaches, too."""
    rules = server_dir / "reached.hba"
    rules.write_text("host all all 0.0.0.0/0 trust\n")
    rules.chmod(0o644)
    server_dir.chmod(0o711)  # under root Postgres runs as another user
    settings = {"listen_addresses": f"127.0.0.1,{HOST}", "hba_file": str(rules)}
    with EmbeddedPostgres(server_dir / "reached", settings) as server:
        yield server


def test_a_machine_that_dies(server: EmbeddedPostgres, other_machine: Machine) -> None:
    """Another relay has the lock soon; the first one, reached again, knows that it has it no more."""
    url = server.url.replace("127.0.0.1", HOST)
    command = [*other_machine.prefix, sys.executable, "-c", HOLDER, url]
    lock = GroupLock(server.url, "g")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            assert not lock.acquire()
            other_machine.plug("down")
            died = time.monotonic()
            await_true(lock.acquire)
            took = time.monotonic() - died
            other_machine.plug("up")
            assert holder.stdout.readline() == "lost\n"
        finally:
            holder.kill()
            lock.close()
    assert took < 10, f"{took:.1f} s"


def test_a_session_that_ends_is_noticed_at_once(database: Database) -> None:
    lock = GroupLock(database.url, "g")
    until, end = socket.socketpair()
    with until, end:
        assert lock.acquire()
        assert not lock.wait(until, 0)
        database.execute("SELECT pg_terminate_backend(%s)", [lock.pid])
        began = time.monotonic()
        assert not lock.wait(until, 60)
        assert time.monotonic() - began < 30
        assert not lock.check()
        end.close()
        assert lock.wait(until, 60)
