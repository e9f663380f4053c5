"""Which addresses a webhook may be delivered to."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from typing import Final

from penstock.push.errors import EndpointError

_IP = ipaddress.IPv4Address | ipaddress.IPv6Address
# Behind these addresses stands an IPv4 address: the gateway of an IPv6 network takes them there.
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public internet, and of a single host."""
    ip = _inner(ipaddress.ip_address(address))
    if ip.is_multicast or ip.is_reserved or not ip.is_global:
        return False
    return not (isinstance(ip, ipaddress.IPv6Address) and ip.is_site_local)


def _inner(ip: _IP) -> _IP:
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    if ip in _NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
    return ip.ipv4_mapped or ip.sixtofour or ip


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
