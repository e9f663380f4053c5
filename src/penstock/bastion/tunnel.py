"""A tunnel: one SSH connection of a process to one bastion, shared by all that goes through it.

It is made when it is first needed, and anew, with a backoff, when it is needed after it was lost. Each
time it expects the host key that is pinned then. A bastion that is dead without a word is noticed
within 15 s.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import os
import socket
import threading
import time
from dataclasses import replace
from typing import Any, Final, TypeVar

import asyncssh

from penstock.bastion.bridge import Local, Remote
from penstock.bastion.keys import fingerprint, private_key
from penstock.bastion.loop import submit
from penstock.bastion.pins import pinned
from penstock.config.bastion import Bastion
from penstock.core.backoff import Backoff
from penstock.core.errors import BastionError

_CONNECT_SECONDS: Final = 10.0
_KEEPALIVE: Final = {"keepalive_interval": 4, "keepalive_count_max": 2}
_BACKOFF: Final = (0.25, 5.0)
_NO_KEY: Final = (
    asyncssh.HostKeyNotVerifiable,
    asyncssh.KeyExchangeFailed,
    asyncssh.ConnectionLost,
)
"""How a handshake ends for which the bastion has no host key, by which side saw it first."""
_CLOSED: Final = "SSH connection closed"
"""What asyncssh gives as the reason before it reports the end of a connection."""

_Address = tuple[str, int]
_Result = TypeVar("_Result")


class Tunnel:
    """What leads through one bastion; made by `tunnel_to`. Its methods are for any thread."""

    def __init__(self, bastion: Bastion) -> None:
        self._bastion = bastion
        self._connection: asyncssh.SSHClientConnection | None = None
        self._client: _Client | None = None
        self._connecting = asyncio.Lock()
        self._backoff = Backoff(*_BACKOFF, jitter=0.25)
        self._error: BastionError | None = None
        self._resume_at = 0.0
        self._ports: dict[_Address, int] = {}
        self._failures: dict[_Address, BastionError] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, host: str, port: int, timeout: float = _CONNECT_SECONDS) -> socket.socket:
        """Return a socket that is connected to `host:port`, as the bastion resolves that.

        Raises `BastionError`; its code is `unreachable` where the bastion is there and the server
        behind it is not.
        """
        return _result(self.opening(host, port, timeout))

    def opening(
        self, host: str, port: int, timeout: float = _CONNECT_SECONDS
    ) -> concurrent.futures.Future[socket.socket]:
        """Return what gives the socket of `open`, for those who must not block."""
        return submit(self._open(host, port, timeout))

    def port(self, host: str, port: int) -> int:
        """Return a port of 127.0.0.1 from which each connection leads to `host:port`.

        Raises `BastionError` where the bastion can't be used. Why a connection from the port was
        closed at once is `failure`.
        """
        return _result(submit(self._port(host, port)))

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
            remote = await self._channel(*to, _CONNECT_SECONDS)
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
                self._connection, self._client = await self._connect()
            except BastionError as error:
                self._error = error
                self._resume_at = time.monotonic() + self._backoff.after_failure()
                raise copy.copy(error) from None
            self._backoff.reset()
            self._error = None
            return self._connection

    async def _connect(self) -> tuple[asyncssh.SSHClientConnection, _Client]:
        host_key = await asyncio.to_thread(pinned, self._bastion)
        bastion = self._bastion = replace(self._bastion, host_key=host_key)
        key = private_key(bastion)
        client = _Client(bastion)
        try:
            connection, _ = await asyncssh.create_connection(
                lambda: client, bastion.host, bastion.port, username=bastion.user,
                client_keys=[key], preferred_auth="publickey",
                **client.host_keys(), **_KEEPALIVE, **_PLAIN,
            )  # fmt: skip
            return connection, client
        except asyncssh.PermissionDenied:
            raise BastionError(
                "bastion_refused_login",
                f"Bastion {bastion} of {bastion.owner} refuses the login by its key.",
                remedy=f"Put the line that `penstock target show {bastion.owner}` prints into the"
                " user's authorized_keys there, or correct user and private_key.",
            ) from None
        except (asyncssh.Error, OSError) as error:
            if client.refused is None and host_key is not None and isinstance(error, _NO_KEY):
                client.refused = await _other_key(bastion)
            if client.refused is not None:
                raise client.refused from None
            timed_out = isinstance(error, TimeoutError)
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
            if timed_out:
                reason = f"no answer within {_CONNECT_SECONDS:g} s"
            raise _no_connection(bastion, str(reason or error)) from None


_AND_THEN: Final = {
    False: ". What runs goes on by itself then.",
    True: ", and start Penstock again.",
}
"""What follows a pinned host key, by whether this process lacks the store that keeps it."""
_PLAIN: Final[dict[str, Any]] = {
    # Nothing of the user's own: no ~/.ssh/config, no agent, no other key.
    "config": None, "agent_path": None, "password": None, "gss_host": None,
    "client_host_keys": None, "x509_trusted_certs": None,
    "connect_timeout": _CONNECT_SECONDS, "login_timeout": _CONNECT_SECONDS,
}  # fmt: skip


class _Accepted(Local):
    """A connection that came to a port."""

    def __init__(self, tunnel: Tunnel, to: _Address) -> None:
        super().__init__()
        self._tunnel = tunnel
        self._to = to

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._tunnel.accepted(self, self._to)


class _Client(asyncssh.SSHClient):
    """Judges the host key, by the pinned one alone."""

    def __init__(self, bastion: Bastion) -> None:
        self._bastion = bastion
        self.gone = False
        self.refused: BastionError | None = None
        self.shown: str | None = None

    def host_keys(self) -> dict[str, Any]:
        """Return what asyncssh is to know: no key, so that it asks, and which type to ask for."""
        known: dict[str, Any] = {"known_hosts": ([], [], [])}
        if self._bastion.host_key is not None:
            pinned = asyncssh.import_public_key(self._bastion.host_key)
            known["server_host_key_algs"] = [name.decode() for name in pinned.sig_algorithms]
        return known

    def validate_host_public_key(
        self,
        host: str,  # noqa: ARG002 - asyncssh's, as the next two
        addr: str,  # noqa: ARG002
        port: int,  # noqa: ARG002
        key: asyncssh.SSHKey,
    ) -> bool:
        """Return whether the key is the pinned one."""
        shown = " ".join(key.export_public_key().decode().split()[:2])
        self.shown = shown
        pinned = self._bastion.host_key
        if pinned is None:
            self.refused = _unknown(self._bastion, shown)
        elif shown != pinned:
            self.refused = changed_host_key(self._bastion, fingerprint(shown))
        return shown == pinned

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncssh's
        """Note the end of the connection."""
        self.gone = True


def _no_connection(bastion: Bastion, reason: str) -> BastionError:
    return BastionError(
        "bastion_unreachable",
        f"Bastion {bastion} of {bastion.owner} cannot be reached: {reason.rstrip('.')}.",
        remedy="See whether it runs and sshd listens there; correct host and port of the bastion.",
        transient=True,
    )


def _unknown(bastion: Bastion, shown: str) -> BastionError:
    return BastionError(
        "bastion_host_key",
        f"The host key of bastion {bastion} is not known; it has shown {fingerprint(shown)}.",
        remedy=f"Compare that with the bastion's own (ssh-keygen -lf), then pin it: `penstock target"
        f" trust {bastion.owner}`{_AND_THEN[bastion.pinned_in is None]}",
        transient=bastion.pinned_in is not None,
    )


def changed_host_key(bastion: Bastion, shown: str) -> BastionError:
    """Return the error of a host key that is not the pinned one; `shown` is its fingerprint."""
    return BastionError(
        "bastion_host_key",
        f"THE HOST KEY OF BASTION {bastion} HAS CHANGED: pinned is"
        f" {fingerprint(bastion.host_key or '')}, and it has shown {shown}. Another machine may"
        " stand in its place.",
        remedy=(
            "If it was replaced on purpose, correct `host_key`."
            if bastion.pinned_in is None
            else "If it was replaced on purpose, pin the new one: `penstock target trust"
            f" {bastion.owner} --replace`{_AND_THEN[False]}"
        ),
        transient=bastion.pinned_in is not None,
    )


_tunnels: dict[Bastion, Tunnel] = {}
_lock = threading.Lock()


def tunnel_to(bastion: Bastion) -> Tunnel:
    """Return the process's tunnel through a bastion."""
    with _lock:
        return _tunnels.setdefault(bastion, Tunnel(bastion))


def host_key(bastion: Bastion) -> str:
    """Ask a bastion for its host key, whichever is pinned; raises `BastionError`."""
    unpinned = Bastion(bastion.owner, bastion.host, bastion.port, bastion.user)
    return _result(submit(_host_key(unpinned)))


async def _host_key(bastion: Bastion) -> str:
    client = _Client(bastion)
    try:
        connection, _ = await asyncssh.create_connection(
            lambda: client, bastion.host, bastion.port, username=bastion.user, client_keys=None,
            **client.host_keys(), **_PLAIN,
        )  # fmt: skip
        connection.abort()
    except (asyncssh.Error, OSError) as error:
        if client.shown is None:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
            raise _no_connection(bastion, str(reason or error)) from None
    return client.shown or ""


async def _other_key(bastion: Bastion) -> BastionError | None:
    """Return the error of a bastion that shows another key than the pinned one, None of any other."""
    with contextlib.suppress(BastionError):
        shown = await _host_key(replace(bastion, host_key=None))
        if shown != bastion.host_key:
            return changed_host_key(bastion, fingerprint(shown))
    return None


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    _tunnels.clear()


os.register_at_fork(after_in_child=_forget)


def _result(future: concurrent.futures.Future[_Result]) -> _Result:
    """Wait for what the thread of the tunnels does; an interrupted wait ends it."""
    try:
        return future.result()
    finally:
        future.cancel()
