"""Connections through a bastion: an SSH server that forwards to what lies behind it.

What others use of it is here: asyncssh takes a seventh of a second to load, and few have a bastion, so
the first call loads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.bastion.tunnel import Tunnel
    from penstock.config.bastion import Bastion


def tunnel_to(bastion: Bastion) -> Tunnel:
    """Return the process's tunnel through a bastion."""
    from penstock.bastion import tunnel  # noqa: PLC0415 - see above

    return tunnel.tunnel_to(bastion)


def host_key(bastion: Bastion) -> str:
    """Return the host key that a bastion shows, as a line; raises `BastionError`."""
    from penstock.bastion import connection  # noqa: PLC0415 - see above

    return connection.host_key(bastion)


def new_private_key() -> str:
    """Return a new Ed25519 key as OpenSSH's text."""
    from penstock.bastion import keys  # noqa: PLC0415 - see above

    return keys.new_private_key()


def public_line(bastion: Bastion) -> str:
    """Return the line for authorized_keys that lets a bastion's key in; raises `BastionError`."""
    from penstock.bastion import keys  # noqa: PLC0415 - see above

    return keys.public_line(bastion)


def fingerprint(key: str) -> str:
    """Return a public key's fingerprint, `SHA256:…`, as ssh shows it; raises `ValueError`."""
    from penstock.bastion import keys  # noqa: PLC0415 - see above

    return keys.fingerprint(key)
