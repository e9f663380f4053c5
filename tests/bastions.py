"""An SSH server in this process that forwards, for what lies behind a bastion."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

import asyncssh

from penstock.config.bastion import Bastion

T = TypeVar("T")


def public(key: asyncssh.SSHKey) -> str:
    return " ".join(key.export_public_key().decode().split()[:2])


class SshServer:
    """Lets `user_key` in and forwards to `names`, which it alone resolves; a context manager.

    `asked` has where clients wanted to go.
    """

    def __init__(self) -> None:
        self.host_key = asyncssh.generate_private_key("ssh-ed25519")
        self.user_key = asyncssh.generate_private_key("ssh-ed25519")
        self.names: dict[tuple[str, int], tuple[str, int]] = {}
        self.asked: list[tuple[str, int]] = []
        self.logins = 0
        self.port = 0
        self._connections: set[asyncssh.SSHServerConnection] = set()
        self._listener: asyncssh.SSHAcceptor | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def start(self) -> None:
        """Listen, at the port of before if there was one."""
        self._run(self._start())

    async def _start(self) -> None:
        keys = asyncssh.import_authorized_keys(public(self.user_key) + "\n")
        self._listener = await asyncssh.listen(
            "127.0.0.1", self.port, server_factory=lambda: _Server(self),
            server_host_keys=[self.host_key], authorized_client_keys=keys,
        )  # fmt: skip
        self.port = self._listener.get_port()

    def logged_in(self, port: int) -> None:
        """Count a login, of a client at this port."""
        self.logins += 1

    def kill(self) -> None:
        """Cut every connection, and listen no more."""
        self._run(self._kill())

    async def _kill(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self.cut()
        if self._listener is not None:
            await self._listener.wait_closed()  # since Python 3.12 for its connections, too

    def cut(self) -> None:
        for connection in list(self._connections):
            connection.abort()

    def bastion(self, owner: str = "far", **other: Any) -> Bastion:
        given: dict[str, Any] = {
            "private_key": self.user_key.export_private_key().decode(),
            "host_key": public(self.host_key),
        }
        return Bastion(owner, "127.0.0.1", self.port, "penstock", **(given | other))


class _Server(asyncssh.SSHServer):
    def __init__(self, of: SshServer) -> None:
        self._of = of
        self._connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self._of._connections.add(conn)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connection is not None:
            self._of._connections.discard(self._connection)

    def auth_completed(self) -> None:
        assert self._connection is not None
        self._of.logged_in(self._connection.get_extra_info("peername")[1])

    def connection_requested(
        self, dest_host: str, dest_port: int, orig_host: str, orig_port: int
    ) -> Any:
        to = (dest_host, dest_port)
        self._of.asked.append(to)
        if dest_host == "forbidden":
            raise asyncssh.ChannelOpenError(
                asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED, "open failed"
            )
        assert self._connection is not None
        return self._connection.forward_connection(*self._of.names.get(to, to))
