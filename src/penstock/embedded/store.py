"""The embedded store: a Postgres that all Penstock processes of a folder share.

The first one that needs it starts it, and the last one that is done with it stops it, whoever started
it. Each holds a shared lock on `store.lock` meanwhile, and so does nobody after any kind of death; the
server's guard waits for the lock and ends what was left running.
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

from penstock.embedded.postgres import EmbeddedPostgres
from penstock.embedded.process import EmbeddedError
from penstock.settings import StoreSettings

FOLDER: Final = Path(".penstock")
_SETTINGS: Final[Mapping[str, str]] = {
    "wal_level": "replica",
    "shared_buffers": "128MB",
    "log_checkpoints": "off",
}
_TIMEOUT = 60.0
_POLL = 0.02


@contextlib.contextmanager
def open_store(settings: StoreSettings, folder: Path = FOLDER) -> Iterator[str]:
    """Give the URL of the store: the one that is configured, or else the embedded one in `folder`.

    The embedded one runs while the context lasts. Raises `EmbeddedError`; whether a configured one
    answers is for `Store.open` to tell.
    """
    if settings.store is not None:
        yield settings.store.get_secret_value()
        return
    share = _Share(folder.absolute())
    try:
        yield share.url()
    finally:
        share.leave()


class _Running(NamedTuple):
    pid: int
    port: int
    ready: bool


class _Share:
    """This process's part in the embedded store of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = folder / "store"
        self._password = folder / "store.password"
        self._server: EmbeddedPostgres | None = None
        with self._explained():
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "store.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # waits while somebody stops it

    def url(self) -> str:
        """Return the URL of the running server, started if it was not."""
        with self._explained(), _open_private(self._password) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # one process at a time starts it
            password = file.read().strip()
            if not password:
                if (self._data / "PG_VERSION").exists():
                    raise EmbeddedError(
                        f"{self._password} is gone or empty, and {self._data} opens to nobody "
                        "without it: put it back, or remove that folder to start with an empty store"
                    )
                password = secrets.token_urlsafe(24)
                file.write(password)
                file.flush()
                os.fsync(file.fileno())
            port = self._find() or self._start()
        return f"postgresql://postgres:{password}@127.0.0.1:{port}/postgres"

    def leave(self) -> None:
        """Give up this process's part; the last one to do so stops the server."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Others use it, or one stops it now and is waited for.
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        else:
            self._stop()
        finally:
            os.close(self._lock)

    def _find(self) -> int | None:
        """Return the port of the server that runs, once it is ready, or None."""
        deadline = time.monotonic() + _TIMEOUT
        while (found := _running(self._data)) is not None:
            if found.ready:
                return found.port
            if time.monotonic() > deadline:
                raise EmbeddedError(
                    f"the embedded store (process {found.pid}) is not ready after {_TIMEOUT:g} s: "
                    f"see {self._data}.log"
                )
            time.sleep(_POLL)
        return None

    def _start(self) -> int:
        self._server = EmbeddedPostgres(
            self._data,
            _SETTINGS,
            password_file=self._password,
            while_locked=self._folder / "store.lock",
        )
        self._server.start()
        assert self._server.port is not None  # noqa: S101 - for the type checker
        return self._server.port

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


def _open_private(path: Path) -> TextIO:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+")


def _running(data: Path) -> _Running | None:
    """Read `postmaster.pid`; what a killed server left of it is taken away.

    Its lines are the process id, the folder, the start, the port and, at last, the state.
    """
    path = data / "postmaster.pid"
    try:
        lines = path.read_text().splitlines()
        pid, port = int(lines[0]), int(lines[3])
    except (FileNotFoundError, IndexError, ValueError):
        return None
    if not _is_alive(pid):
        return None
    if _command(pid) != "postgres":
        # Process ids come again, soon in a container, and Postgres would not start for that.
        path.unlink(missing_ok=True)
        return None
    return _Running(pid, port, len(lines) > 7 and lines[7].strip() == "ready")


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
    if Path("/proc/self/comm").exists():
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/comm").read_text().strip()
        return ""
    ps = ["ps", "-o", "comm=", "-p", str(pid)]
    ran = subprocess.run(ps, capture_output=True, text=True, check=False)  # noqa: S603
    return Path(ran.stdout.strip()).name
