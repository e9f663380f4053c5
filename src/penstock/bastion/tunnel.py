"""A tunnel: one SSH connection of a process to one bastion, shared by all that goes through it.

It is made when it is first needed, and anew, with a backoff, when it is needed after it was lost. Each
time it expects the host key that is pinned then. A bastion that is dead without a word is noticed
within 15 s.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import os
import socket
import threading
import time
from dataclasses import replace
from typing import Final

import asyncssh

from penstock.bastion.bridge import Local, Remote
from penstock.bastion.connection import CONNECT_SECONDS, Client, connect
from penstock.bastion.loop import run, submit
from penstock.bastion.pins import pinned
from penstock.config.bastion import Bastion
from penstock.core.backoff import Backoff
from penstock.core.errors import BastionError

_BACKOFF: Final = (0.25, 5.0)
_CLOSED: Final = "SSH connection closed"
"""What asyncssh gives as the reason before it reports the end of a connection."""

_Address = tuple[str, int]


class Tunnel:
    """What leads through one bastion; made by `tunnel_to`. Its methods are for any thread."""

    def __init__(self, bastion: Bastion) -> None:
        self._bastion = bastion
        self._connection: asyncssh.SSHClientConnection | None = None
        self._client: Client | None = None
        self._connecting = asyncio.Lock()
        self._backoff = Backoff(*_BACKOFF, jitter=0.25)
        self._error: BastionError | None = None
        self._resume_at = 0.0
        self._ports: dict[_Address, int] = {}
        self._failures: dict[_Address, BastionError] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, host: str, port: int, timeout: float = CONNECT_SECONDS) -> socket.socket:
        """Return a socket that is connected to `host:port`, as the bastion resolves that.

        Raises `BastionError`; its code is `unreachable` where the bastion is there and the server
        behind it is not.
        """
        return run(self._open(host, port, timeout))

    def opening(
        self, host: str, port: int, timeout: float = CONNECT_SECONDS
    ) -> concurrent.futures.Future[socket.socket]:
        """Return what gives the socket of `open`, for those who must not block."""
        return submit(self._open(host, port, timeout))

    def port(self, host: str, port: int) -> int:
        """Return a port of 127.0.0.1 from which each connection leads to `host:port`.

        Raises `BastionError` where the bastion can't be used. Why a connection from the port was
        closed at once is `failure`.
        """
        return run(self._port(host, port))

    def failure(self, host: str, port: int) -> BastionError | None:
        """Return why the last connection from the port of `host:port` led nowhere; None: it did."""
        return self._failures.get((host, port))

    async def _open(self, host: str, port: int, timeout: float) -> socket.socket:
        remote = await self._channel(host, port, timeout)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        _, local = await asyncio.get_running_loop().create_connection(Local, sock=ours)
        local.join(remote)
        return theirs

    async def _port(self, host: str, port: int) -> int:
        await self._connected()
        found = self._ports.get((host, port))
        if found is None:
            loop = asyncio.get_running_loop()
            server = await loop.create_server(lambda: _Accepted(self, (host, port)), "127.0.0.1", 0)
            found = self._ports[host, port] = server.sockets[0].getsockname()[1]
        return found

    def accepted(self, local: Local, to: _Address) -> None:
        """Lead a connection from a port to where it belongs; called by the port's server."""
        task = asyncio.ensure_future(self._lead(local, to))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _lead(self, local: Local, to: _Address) -> None:
        try:
            remote = await self._channel(*to, CONNECT_SECONDS)
        except BastionError as error:
            self._failures[to] = error
            local.abort()
            return
        self._failures.pop(to, None)
        local.join(remote)

    async def _channel(self, host: str, port: int, timeout: float) -> Remote:
        connection = await self._connected()
        client = self._client
        where = f"{host}:{port}"
        try:
            async with asyncio.timeout(timeout):
                _, remote = await connection.create_connection(Remote, host, port)
        except TimeoutError:
            raise self._unreachable(where, f"no answer within {timeout:g} s") from None
        except asyncssh.ChannelOpenError as error:
            if error.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED:
                raise BastionError(
                    "bastion_forbids",
                    f"Bastion {self._bastion} does not forward to {where}: {error.reason}.",
                    remedy="Permit it there: AllowTcpForwarding and PermitOpen in sshd_config,"
                    " and permitopen= in authorized_keys.",
                ) from None
            if client is None or client.gone or error.reason == _CLOSED:
                raise self._lost() from None
            raise self._unreachable(where, error.reason) from None
        except (asyncssh.Error, OSError):
            raise self._lost() from None
        assert isinstance(remote, Remote)  # noqa: S101 - for the type checker
        return remote

    def _unreachable(self, where: str, reason: str) -> BastionError:
        return BastionError(
            "unreachable",
            f"Bastion {self._bastion} is there, and cannot reach {where}: {reason}.",
            remedy="Start the server, or correct its name, its port or the network behind the bastion.",
            transient=True,
        )

    def _lost(self) -> BastionError:
        return BastionError(
            "bastion_unreachable",
            f"The connection to bastion {self._bastion} is lost.",
            remedy="See whether the bastion runs; it is tried again.",
            transient=True,
        )

    async def _connected(self) -> asyncssh.SSHClientConnection:
        async with self._connecting:
            if self._connection is not None and self._client is not None and not self._client.gone:
                return self._connection
            self._connection = self._client = None
            if self._error is not None and time.monotonic() < self._resume_at:
                raise copy.copy(self._error)
            try:
                host_key = await asyncio.to_thread(pinned, self._bastion)
                self._bastion = replace(self._bastion, host_key=host_key)
                self._connection, self._client = await connect(self._bastion)
            except BastionError as error:
                self._error = error
                self._resume_at = time.monotonic() + self._backoff.after_failure()
                raise copy.copy(error) from None
            self._backoff.reset()
            self._error = None
            return self._connection


class _Accepted(Local):
    """A connection that came to a port."""

    def __init__(self, tunnel: Tunnel, to: _Address) -> None:
        super().__init__()
        self._tunnel = tunnel
        self._to = to

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._tunnel.accepted(self, self._to)


_tunnels: dict[Bastion, Tunnel] = {}
_lock = threading.Lock()


def tunnel_to(bastion: Bastion) -> Tunnel:
    """Return the process's tunnel through a bastion."""
    with _lock:
        return _tunnels.setdefault(bastion, Tunnel(bastion))


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    _tunnels.clear()


os.register_at_fork(after_in_child=_forget)
