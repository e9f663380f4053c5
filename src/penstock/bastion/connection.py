"""One SSH connection to a bastion: made with its key alone, and only to the host key that is pinned."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, Final

import asyncssh

from penstock.bastion.keys import fingerprint, private_key
from penstock.bastion.loop import run
from penstock.config.bastion import Bastion
from penstock.core.errors import BastionError

CONNECT_SECONDS: Final = 10.0
_KEEPALIVE: Final = {"keepalive_interval": 4, "keepalive_count_max": 2}
_PLAIN: Final[dict[str, Any]] = {
    # Nothing of the user's own: no ~/.ssh/config, no agent, no other key.
    "config": None, "agent_path": None, "password": None, "gss_host": None,
    "client_host_keys": None, "x509_trusted_certs": None,
    "connect_timeout": CONNECT_SECONDS, "login_timeout": CONNECT_SECONDS,
}  # fmt: skip
_NO_KEY: Final = (
    asyncssh.HostKeyNotVerifiable,
    asyncssh.KeyExchangeFailed,
    asyncssh.ConnectionLost,
)
"""How a handshake ends for which the bastion has no host key, by which side saw it first."""
_AND_THEN: Final = {
    False: ". What runs goes on by itself then.",
    True: ", and start Penstock again.",
}
"""What follows a pinned host key, by whether this process lacks the store that keeps it."""


async def connect(bastion: Bastion) -> tuple[asyncssh.SSHClientConnection, Client]:
    """Log in to a bastion; raises `BastionError`."""
    key = private_key(bastion)
    client = Client(bastion)
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
        if client.refused is None and bastion.host_key is not None and isinstance(error, _NO_KEY):
            client.refused = await _other_key(bastion)
        if client.refused is not None:
            raise client.refused from None
        timed_out = isinstance(error, TimeoutError)
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
        if timed_out:
            reason = f"no answer within {CONNECT_SECONDS:g} s"
        raise _no_connection(bastion, str(reason or error)) from None


class Client(asyncssh.SSHClient):
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
        addr: str,  # noqa: ARG002 - as above
        port: int,  # noqa: ARG002 - as above
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


def host_key(bastion: Bastion) -> str:
    """Ask a bastion for its host key, whichever is pinned; raises `BastionError`."""
    unpinned = Bastion(bastion.owner, bastion.host, bastion.port, bastion.user)
    return run(_host_key(unpinned))


async def _host_key(bastion: Bastion) -> str:
    client = Client(bastion)
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
