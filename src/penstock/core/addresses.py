"""Which IP addresses are of the public internet."""

from __future__ import annotations

import ipaddress
from typing import Final

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
