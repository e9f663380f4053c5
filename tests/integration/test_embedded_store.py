"""The embedded store: started once, shared by processes, ended with the last of them."""

from __future__ import annotations

import os
import pwd
import queue
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
from pydantic import SecretStr

from penstock.config.settings import StoreSettings
from penstock.core.errors import EmbeddedError, StoreError
from penstock.embedded.account import Account, programs_for
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.embedded.store import open_store
from penstock.streams.errors import EMBEDDED_DOWN
from penstock.streams.store import Store

from ..waits import await_end, await_true

EMBEDDED = StoreSettings()
USER = """
import pathlib, sys
from penstock.embedded.store import open_store
from penstock.config.settings import StoreSettings
with open_store(StoreSettings(), pathlib.Path(sys.argv[1])) as url:
    print(url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="penstock-test-", ignore_cleanup_errors=True) as path:
        yield Path(path) / "deep" / ".penstock"


class User:
    """Another process that uses the store of a folder until it leaves, or is killed."""

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

    threads = [threading.Thread(target=use, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    await_end(*threads)
    assert failed == []
    assert server(folder) is None


class Outages:
    """What `on_outage` is called with, as it comes."""

    def __init__(self) -> None:
        self._queue: queue.Queue[str | None] = queue.Queue()

    def __call__(self, error: str | None) -> None:
        self._queue.put(error)

    def began(self) -> str:
        error = self._queue.get(timeout=60)
        assert error is not None
        return error

    def ended(self) -> list[str]:
        """Wait for the end of the outage, and return what was reported before."""
        return list(iter(lambda: self._queue.get(timeout=60), None))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_ends_is_started_again_on_its_port(folder: Path, number: int) -> None:
    """After SIGTERM it would wait for its sessions, and take no new ones, for ever."""
    outages = Outages()
    with open_store(EMBEDDED, folder, on_outage=outages) as url, Store.open(url) as store:
        session = psycopg.connect(url)
        running = server(folder)
        assert running is not None
        sent = time.monotonic()
        running.send_signal(number)
        assert outages.began() == "the embedded store has ended and is being restarted."
        assert time.monotonic() - sent < 1.0
        (cause,) = outages.ended()
        assert ("killed by SIGKILL" if number == signal.SIGKILL else "stopped by a signal") in cause
        assert answer(url) == 42
        assert store.sources() == []  # over a new connection
        assert server(folder) != running
        with pytest.raises(psycopg.OperationalError):
            session.execute("SELECT 1")
    assert server(folder) is None


def test_many_processes_start_a_killed_server_once(folder: Path, users: list[User]) -> None:
    url = {user.url() for user in users}.pop()
    for _ in range(2):
        running = server(folder)
        assert running is not None
        running.send_signal(signal.SIGKILL)
        running.wait(60)

        def answers() -> bool:
            try:
                return answer(url) == 42
            except psycopg.OperationalError:
                return False

        await_true(answers, what="the store's server is started again")
    log = (folder / "store.log").read_text()
    assert log.count("starting PostgreSQL") == 3
    assert log.count("not properly shut down") == 2


def test_a_store_that_can_not_be_restarted_is_tried_again(folder: Path) -> None:
    """Its port is taken meanwhile; errors name the cause, and no other server is proposed."""
    outages = Outages()
    with open_store(EMBEDDED, folder, on_outage=outages) as url:
        running = server(folder)
        assert running is not None
        port = psycopg.conninfo.conninfo_to_dict(url)["port"]
        (folder / "store" / "postgresql.conf").rename(folder / "kept.conf")
        running.send_signal(signal.SIGKILL)
        while "does not start" not in (error := outages.began()):
            pass
        assert "postgresql.conf" in error
        # A start that is killed may leave this so.
        (folder / "store" / "postmaster.opts").write_text("")
        with socket.create_server(("127.0.0.1", int(str(port)))):
            (folder / "kept.conf").rename(folder / "store" / "postgresql.conf")
            while "is in use by another program" not in (error := outages.began()):
                pass
            assert f"port {port}" in error
            # Nor does a process that comes now move it away from those that have its URL.
            taken = pytest.raises(EmbeddedError, match="is in use by another program")
            with taken, open_store(EMBEDDED, folder):
                pass
        outages.ended()
        assert answer(url) == 42


def test_errors_of_a_store_that_is_away_name_what_runs_it(folder: Path) -> None:
    with open_store(EMBEDDED, folder) as url, Store(url) as store:
        assert Store.open(url).sources() == []
    with pytest.raises(StoreError) as raised:
        store.sources()
    assert raised.value.code == EMBEDDED_DOWN
    assert raised.value.transient
    assert "Connection refused" in raised.value.message
    assert str(folder / "store.log") in raised.value.remedy
    assert "Start Postgres there" not in str(raised.value)


def test_the_last_port_is_taken_again_unless_it_is_in_use(folder: Path) -> None:
    with open_store(EMBEDDED, folder) as first:
        pass
    with open_store(EMBEDDED, folder) as again:
        assert again == first
    port = int(str(psycopg.conninfo.conninfo_to_dict(first)["port"]))
    with socket.create_server(("127.0.0.1", port)), open_store(EMBEDDED, folder) as other:
        assert other != first
        assert answer(other) == 42


# -- who may read what


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


MODES = {
    ".": 0o700, "store": 0o700, "store.log": 0o600, "store.password": 0o600, "store.lock": 0o600,
}  # fmt: skip


def test_it_is_closed_to_others_and_opens_nothing_above(folder: Path) -> None:
    """The folders above are closed to the user that the server runs as under root."""
    folder.mkdir(parents=True, mode=0o755)  # as the checkpoints are made before it
    above = [folder.parent, folder.parent.parent]
    for path in above:
        path.chmod(0o700)
    before = {path: mode(path) for path in folder.parents}
    umask = os.umask(0)
    try:
        with open_store(EMBEDDED, folder) as url:
            assert answer(url) == 42
            assert {name: mode(folder / name) for name in MODES} == MODES
    finally:
        os.umask(umask)
    assert {path: mode(path) for path in folder.parents} == before
    assert [mode(path) for path in above] == [0o700, 0o700]


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@as_root
def test_under_root_the_server_runs_as_the_owner_of_the_folder(folder: Path) -> None:
    owner = pwd.getpwnam("nobody")
    home = folder.parent
    home.mkdir(parents=True, mode=0o700)
    home.parent.chmod(0o755)  # its owner gets there
    os.chown(home, owner.pw_uid, owner.pw_gid)
    with open_store(EMBEDDED, folder) as url:
        assert answer(url) == 42
        running = server(folder)
        assert running is not None
        assert running.uids().real == running.uids().effective == owner.pw_uid
        assert running.gids().effective == owner.pw_gid
        assert {name: mode(folder / name) for name in MODES} == MODES
        assert {(folder / name).stat().st_uid for name in MODES} == {owner.pw_uid}
    # So the owner can go on without root.
    assert {path.lstat().st_uid for path in [folder, *folder.rglob("*")]} == {owner.pw_uid}


MAKER = """
import sys
from penstock.embedded.account import pgserver, system_user
pgserver()  # imported
print(flush=True)
sys.stdin.readline()
print(system_user(sys.argv[1]).uid)
"""


@as_root
def test_processes_that_need_the_system_user_at_once_have_the_same() -> None:
    name = f"penstock-{os.getpid()}"
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", MAKER, name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(4)
    ]  # fmt: skip
    try:
        for maker in makers:
            assert maker.stdout is not None
            maker.stdout.readline()
        for maker in makers:
            assert maker.stdin is not None
            maker.stdin.write("\n")
            maker.stdin.flush()
        found = {int(maker.communicate(timeout=60)[0]) for maker in makers}
        assert found == {pwd.getpwnam(name).pw_uid}
    finally:
        subprocess.run(["userdel", name], check=True)


@as_root
def test_programs_below_a_closed_folder_are_run_from_a_copy(folder: Path) -> None:
    installed = EmbeddedPostgres(folder / "store").bin_dir.parent
    nobody = pwd.getpwnam("nobody")
    account = Account("nobody", nobody.pw_uid, nobody.pw_gid)
    assert programs_for(installed / "bin", account) == installed / "bin"
    closed = folder.parent / "closed"
    package = closed / installed.parent.name
    libraries = f"{package.name}.libs"
    shutil.copytree(installed, package / installed.name)
    shutil.copytree(installed.parent.parent / libraries, closed / libraries)
    closed.chmod(0o700)
    programs = package / installed.name / "bin"
    with tempfile.TemporaryDirectory() as copies:
        Path(copies).chmod(0o755)
        found = [programs_for(programs, account, Path(copies) / "here") for _ in range(2)]
        assert found[0] == found[1] != programs
        asked = [str(found[0] / "initdb"), "--version"]  # it needs the libraries beside the package
        ran = subprocess.run(
            asked, user=account.uid, extra_groups=[], cwd="/", check=True, capture_output=True
        )
        assert b"18" in ran.stdout
    assert mode(closed) == 0o700


@as_root
def test_programs_that_can_be_neither_reached_nor_copied(folder: Path) -> None:
    closed = folder.parent / "closed"
    (closed / "bin").mkdir(parents=True)
    closed.chmod(0o700)
    shutil.copy("/bin/true", closed / "bin" / "postgres")
    nobody = pwd.getpwnam("nobody")
    account = Account("nobody", nobody.pw_uid, nobody.pw_gid)
    with pytest.raises(EmbeddedError) as raised:
        programs_for(closed / "bin", account, closed / "bin" / "postgres" / "copies")
    assert f"the user nobody may not run Postgres's programs in {closed}/bin" in str(raised.value)
    assert f"chmod o+x {closed}" in str(raised.value)
    assert mode(closed) == 0o700
    for path in (closed, closed.parent.parent):
        path.chmod(0o711)
    assert programs_for(closed / "bin", account) == closed / "bin"


@pytest.mark.parametrize("other", ["this process", "another Postgres"])
def test_what_a_killed_server_left_is_not_taken_for_one(
    folder: Path, other: str, postgres: EmbeddedPostgres
) -> None:
    with open_store(EMBEDDED, folder):
        pass
    # Another process has the number that the server had: so it goes in a container that restarts.
    pid = os.getpid() if other == "this process" else postgres.pid
    lines = [str(pid), str(folder / "store"), "1", "5432", "", "127.0.0.1", "1 1", "ready"]
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


def test_a_lost_password_is_reported(folder: Path) -> None:
    with open_store(EMBEDDED, folder):
        pass
    (folder / "store.password").unlink()
    with pytest.raises(EmbeddedError, match=r"store\.password is gone or empty"):
        open_store(EMBEDDED, folder).__enter__()
    assert server(folder) is None


def test_a_folder_that_cannot_be_used_is_reported(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file")
    with pytest.raises(EmbeddedError, match=r"cannot be used: .*\.penstock File exists"):
        open_store(EMBEDDED, folder).__enter__()
