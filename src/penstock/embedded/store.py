"""The embedded store: a Postgres that all Penstock processes of a folder share.

The first one that needs it starts it, and the last one that is done with it stops it, whichever started
it. Each holds a shared lock on `store.lock` meanwhile, which ends with the process; the server's guard
waits for the lock and ends what was left running. The file has the server's port: what Postgres itself
notes of it is gone where a start is killed. While they hold it each of them supervises the
server. The lock on `store.password` is that of the one process that starts it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TextIO
from urllib.parse import quote

from penstock.config.settings import StoreSettings
from penstock.core.errors import EmbeddedError, PortTakenError
from penstock.embedded.account import own
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.embedded.supervisor import OnOutage, Supervisor
from penstock.streams.errors import EMBEDDED

FOLDER: Final = Path(".penstock")
_SETTINGS: Final[Mapping[str, str]] = {
    "wal_level": "logical",  # what syncs write is captured from here
    "shared_buffers": "128MB",
    "max_locks_per_transaction": "256",  # for 3,200 consumers made at once
    "log_checkpoints": "off",
}
_STOPPING: Final = "stopping"
_TIMEOUT = 60.0
_POLL = 0.02


@contextlib.contextmanager
def open_store(
    settings: StoreSettings, folder: Path = FOLDER, *, on_outage: OnOutage = lambda _: None
) -> Iterator[str]:
    """Give the URL of the store: the one that is configured, or else the embedded one in `folder`.

    The embedded one runs while the context lasts, and is started again where it ends; `on_outage` is
    called then, from another thread. Raises `EmbeddedError`; `Store.open` raises where a configured one
    does not answer.
    """
    if settings.store is not None:
        yield settings.store.get_secret_value()
        return
    share = _Share(folder.absolute())
    try:
        url = share.url()
        supervisor = Supervisor(share, on_outage)
        supervisor.start()
        try:
            yield url
        finally:
            supervisor.stop()
    finally:
        share.leave()


def exists(folder: Path = FOLDER) -> bool:
    """Return whether the embedded store of a folder was made."""
    return (folder / "store" / "PG_VERSION").exists()


class _Running(NamedTuple):
    pid: int
    port: int
    state: str


class _Share:
    """This process's part in the embedded store of a folder."""

    name = "the embedded store"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = folder / "store"
        self._password = folder / "store.password"
        self._port: int | None = None
        self._server: EmbeddedPostgres | None = None
        with self._explained():
            _make_private(folder)
            self._lock = _open_private(folder / "store.lock")
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # waits while another process stops it

    def url(self) -> str:
        """Return the URL of the running server, started if it was not."""
        with self._starting() as file:
            password = file.read().strip()
            if not password:
                if (self._data / "PG_VERSION").exists():
                    raise EmbeddedError(
                        f"{self._password} is gone or empty, and no session opens in "
                        f"{self._data} without it: put it back, or remove that folder to start with an "
                        "empty store"
                    )
                password = secrets.token_urlsafe(24)
                file.write(password)
                file.flush()
                os.fsync(file.fileno())
            self._port = self._find() or self._start()
        # The remedies of a session's errors there differ from those of another Postgres.
        mark = quote(f"{EMBEDDED}{self._data}.log", safe="")
        return (
            f"postgresql://postgres:{password}@127.0.0.1:{self._port}/postgres"
            f"?fallback_application_name={mark}"
        )

    @contextlib.contextmanager
    def _starting(self) -> Iterator[TextIO]:
        """Lend the file of the password; one process at a time has it, and may start the server."""
        with self._explained(), os.fdopen(_open_private(self._password), "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    # What the supervisor calls

    def runs(self) -> bool:
        """Whether the server runs; one that is stopping does not."""
        found = _running(self._data)
        return found is not None and found.state != _STOPPING

    def ending(self) -> str:
        """How the server ended; a server that another process started has no exit code here."""
        if _running(self._data) is not None:
            return "stopped by a signal that Penstock did not send"
        return "its process is gone" if self._server is None else self._server.ending

    def restart(self) -> None:
        """Have the server running again on its port, by this process or another one."""
        with self._starting():
            port = self._find()
            if port is None:
                port = self._start()
            elif self._server is not None and self._server.pid is None:
                self._server = None  # another process's server has taken its place
        if port != self._port:
            raise EmbeddedError(
                f"it listens on port {port} now, and this process uses port {self._port}: start "
                "this process again"
            )

    def leave(self) -> None:
        """Give up this process's part; the last one to do so stops the server."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Others use it, or one stops it now: wait for that.
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        else:
            self._stop()
        finally:
            os.close(self._lock)

    def _find(self) -> int | None:
        """Return the port of the server that runs, once it is ready, or None."""
        deadline, signalled = time.monotonic() + _TIMEOUT, False
        while (found := _running(self._data)) is not None:
            if found.state == "ready":
                return found.port
            if found.state == _STOPPING and not signalled:
                # No process of ours stops it: this one uses it. A server that only waits for its
                # sessions to end would take no new ones for ever.
                signalled = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found.pid, signal.SIGINT)
            if time.monotonic() > deadline:
                raise EmbeddedError(
                    f"the embedded store (process {found.pid}) is not ready after {_TIMEOUT:g} s: "
                    f"see {self._data}.log"
                )
            time.sleep(_POLL)
        return None

    def _start(self) -> int:
        """Start the server: on this process's port, or else on its last one, or else on any.

        It does not move while other processes use it: the port is in their URLs.
        """
        _clear(self._data)
        try:
            return self._start_on(self._port or self._last_port())
        except PortTakenError:
            if self._port is not None or self._is_shared():
                raise
            return self._start_on(None)

    def _is_shared(self) -> bool:
        """Whether other processes have a part in the store."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        return False

    def _start_on(self, port: int | None) -> int:
        if self._server is not None:
            self._server.stop()  # its guard may still be there
        self._server = EmbeddedPostgres(
            self._data,
            _SETTINGS,
            password_file=self._password,
            while_locked=self._folder / "store.lock",
            port=port,
        )
        self._server.start()
        assert self._server.port is not None  # noqa: S101 - for the type checker
        os.pwrite(self._lock, b"%5d\n" % self._server.port, 0)
        return self._server.port

    def _last_port(self) -> int | None:
        """Return the port of the server's last start: other processes may have it in their URLs."""
        with contextlib.suppress(ValueError):
            return int(os.pread(self._lock, 5, 0))
        return None  # there was none yet

    def _stop(self) -> None:
        if self._server is not None and self._server.pid is not None:
            self._server.stop()
        elif (found := _running(self._data)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(found.pid, signal.SIGINT)
            deadline = time.monotonic() + _TIMEOUT
            while _running(self._data) is not None and time.monotonic() < deadline:
                time.sleep(_POLL)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EmbeddedError(
                f"the embedded store in {self._folder} cannot be used: {error.filename or ''} "
                f"{error.strerror}; run as the user who made it, or set `store` to a Postgres of yours"
            ) from None


def _make_private(folder: Path) -> None:
    """Make the folder if it is missing, as its neighbours' owner has them, and keep others out."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise
    else:
        own(folder, folder.parent)
    if not folder.is_symlink() and os.geteuid() in (0, folder.stat().st_uid):
        folder.chmod(0o700)


def _open_private(path: Path) -> int:
    """Open a file for reading and writing, made where it is missing, for its folder's owner alone."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if os.geteuid() in (0, os.fstat(file).st_uid):
        os.fchmod(file, 0o600)
        own(file, path.parent)
    return file


def _running(data: Path) -> _Running | None:
    """Return what `postmaster.pid` has of the server, None where none runs.

    Its lines are the process id, the folder, the start, the port and, at last, the state.
    """
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
        pid, port = int(lines[0]), int(lines[3])
    except (FileNotFoundError, IndexError, ValueError):
        return None
    if not _is_server(pid, data):
        return None
    return _Running(pid, port, lines[7].strip() if len(lines) > 7 else "")


def _clear(data: Path) -> None:
    """Take away what a killed server left, where its process id is another program's now.

    Process ids come again, soon in a container, perhaps as another Postgres's: Postgres would not start
    for that.
    """
    path = data / "postmaster.pid"
    with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
        pid = int(path.read_text().splitlines()[0])
        if _is_alive(pid) and not _is_server(pid, data):
            path.unlink()


def _is_server(pid: int, data: Path) -> bool:
    """Return whether a process is a Postgres, and as far as it can be seen the one of a data folder."""
    if not _is_alive(pid) or _command(pid) != "postgres":
        return False
    try:
        return Path(f"/proc/{pid}/cwd").samefile(data)  # each of its processes works there
    except OSError:  # there is no /proc, or another user's process does not show it
        return True


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _command(pid: int) -> str:
    """Return the name of the program that a process runs, or nothing if it has ended."""
    if Path("/proc/self/stat").exists():
        with contextlib.suppress(OSError):
            _, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")
            name, _, state = rest.rpartition(") ")
            return "" if state.startswith("Z") else name
        return ""
    ps = ["ps", "-o", "comm=", "-p", str(pid)]
    ran = subprocess.run(ps, capture_output=True, text=True, check=False)  # noqa: S603 - ps, and a number
    return Path(ran.stdout.strip()).name
