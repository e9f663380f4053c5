"""Which addresses a webhook may be delivered to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable

from penstock.core.addresses import is_public
from penstock.push.errors import EndpointError


async def resolve(host: str, port: int, *, allow_private: bool) -> list[str]:
    """Return the IP addresses of `host`, in the order to try them.

    Raises `EndpointError` where there are none, or one of them is not public and may not be called.
    Connect to these addresses alone: the name may stand for others a moment later.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "not a name"
        raise EndpointError("unknown_host", f"{host} does not resolve: {why}") from None
    addresses = list(dict.fromkeys(str(address[4][0]) for address in found))
    if not allow_private:
        refuse_private(host, addresses)
    return addresses


def refuse_private(host: str, addresses: Iterable[str]) -> None:
    """Raise `EndpointError` if one of the addresses that `host` resolves to is not public."""
    for address in addresses:
        if not is_public(address):
            what = address if address == host.strip("[]") else f"{host} ({address})"
            raise EndpointError(
                "private_address",
                f"{what} is not an address of the public internet, and is not called. If it is "
                "meant: allow_private: true",
            )
