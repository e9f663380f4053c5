"""The embedded store: started once, shared by processes, ended with the last of them."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
from pydantic import SecretStr

from penstock.embedded.process import EmbeddedError
from penstock.embedded.store import open_store
from penstock.settings import StoreSettings

EMBEDDED = StoreSettings()
USER = """
import pathlib, sys
from penstock.embedded.store import open_store
from penstock.settings import StoreSettings
with open_store(StoreSettings(), pathlib.Path(sys.argv[1])) as url:
    print(url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="penstock-test-", ignore_cleanup_errors=True) as path:
        yield Path(path) / "deep" / ".penstock"


class User:
    """Another process that uses the store of a folder until it is told to leave, or killed."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def url(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def leave(self) -> None:
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


@pytest.fixture
def users(folder: Path) -> Iterator[list[User]]:
    """Three users that start at once."""
    found = [User(folder) for _ in range(3)]
    yield found
    for user in found:
        if user.process.returncode is None:
            user.kill()
    ended(folder)


def server(folder: Path) -> psutil.Process | None:
    try:
        pid = int((folder / "store" / "postmaster.pid").read_text().splitlines()[0])
        return psutil.Process(pid)
    except (OSError, psutil.NoSuchProcess):
        return None


def ended(folder: Path) -> None:
    """Wait until the server is gone, which its guard sees to."""
    process = server(folder)
    if process is not None:
        process.wait(60)


def answer(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT 42").fetchone()
    assert row is not None
    return int(row[0])


def test_a_configured_store_is_taken_as_it_is(folder: Path) -> None:
    url = "postgresql://nobody:nothing@192.0.2.1/x"
    with open_store(StoreSettings(store=SecretStr(url)), folder) as given:
        assert given == url
    assert not folder.exists()


def test_it_keeps_what_it_has_and_asks_for_its_password(folder: Path) -> None:
    with open_store(EMBEDDED, folder) as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE t AS SELECT 7 AS a")
            settings = "SELECT current_setting(name) FROM unnest(%s::text[]) AS name"
            names = ["listen_addresses", "fsync", "synchronous_commit", "unix_socket_directories"]
            found = [row[0] for row in connection.execute(settings, [names])]
            assert found == ["127.0.0.1", "on", "on", ""]
        password = (folder / "store.password").read_text()
        assert f":{password}@127.0.0.1:" in url
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(url.replace(password, "wrong"))
        for path in ("store.password", "store"):
            assert stat.S_IMODE((folder / path).stat().st_mode) & 0o077 == 0
    assert server(folder) is None
    with open_store(EMBEDDED, folder) as url, psycopg.connect(url) as connection:
        assert connection.execute("SELECT a FROM t").fetchall() == [(7,)]


def test_processes_that_start_at_once_share_one_server(folder: Path, users: list[User]) -> None:
    urls = {user.url() for user in users}
    assert len(urls) == 1
    assert answer(urls.pop()) == 42
    running = server(folder)
    with open_store(EMBEDDED, folder) as url:
        assert server(folder) == running
        for user in users:  # whichever of them has started it
            user.leave()
            assert answer(url) == 42
    assert server(folder) is None


def test_it_outlives_a_killed_user_and_ends_with_the_last(folder: Path, users: list[User]) -> None:
    url = {user.url() for user in users}.pop()
    running = server(folder)
    assert running is not None
    guard = running.parent()
    assert guard is not None
    for user in users[:-1]:
        user.kill()
        assert answer(url) == 42
    users[-1].kill()
    assert psutil.wait_procs([running, guard], 60)[1] == []
    with open_store(EMBEDDED, folder) as again:
        assert answer(again) == 42


def test_who_comes_while_it_ends_starts_it_again(folder: Path) -> None:
    failed: list[BaseException] = []

    def use() -> None:
        try:
            for _ in range(6):
                with open_store(EMBEDDED, folder) as url:
                    assert answer(url) == 42
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failed == []
    assert server(folder) is None


def test_a_server_that_was_killed_is_started_again(folder: Path) -> None:
    with open_store(EMBEDDED, folder):
        running = server(folder)
        assert running is not None
        running.send_signal(signal.SIGKILL)
        running.wait(30)
        with open_store(EMBEDDED, folder) as url:
            assert answer(url) == 42
    ended(folder)


def test_what_a_killed_server_left_is_not_taken_for_one(folder: Path) -> None:
    with open_store(EMBEDDED, folder):
        pass
    # This process has the number that the server had: so it goes in a container that restarts.
    lines = [str(os.getpid()), str(folder / "store"), "1", "5432", "", "127.0.0.1", "1 1", "ready"]
    left = folder / "store" / "postmaster.pid"
    left.write_text("\n".join(lines))
    os.chown(left, (folder / "store").stat().st_uid, -1)
    with open_store(EMBEDDED, folder) as url:
        assert answer(url) == 42


def test_an_initdb_that_was_killed_is_begun_again(folder: Path) -> None:
    half = folder / "store.new"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("18")
    with open_store(EMBEDDED, folder) as url:
        assert answer(url) == 42
    assert not half.exists()


def test_a_lost_password_is_told(folder: Path) -> None:
    with open_store(EMBEDDED, folder):
        pass
    (folder / "store.password").unlink()
    with pytest.raises(EmbeddedError, match=r"store\.password is gone or empty"):
        open_store(EMBEDDED, folder).__enter__()
    assert server(folder) is None


def test_a_folder_that_cannot_be_used_is_told(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file")
    with pytest.raises(EmbeddedError, match=r"cannot be used: .*\.penstock File exists"):
        open_store(EMBEDDED, folder).__enter__()
