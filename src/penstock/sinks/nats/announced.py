"""The servers that a cluster announces in its INFO: where to go when those of the `url` are away."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit

from penstock.config.nats import NatsServer, NatsSinkConfig

_MOST: Final = 32

_announced: dict[tuple[str, object], list[NatsServer]] = {}


def note(config: NatsSinkConfig, server: NatsServer, info: dict[str, Any]) -> None:
    """Keep for this process what `server` announces; its next INFO replaces it."""
    if isinstance(urls := info.get("connect_urls"), list):
        _announced[config.url, config.reached] = list(_read(server, urls[:_MOST]))


def servers_of(config: NatsSinkConfig) -> list[NatsServer]:
    """Return the servers of `url`, and behind them those that the cluster has announced beside."""
    servers = config.servers
    known = {(server.host, server.port) for server in servers}
    more = _announced.get((config.url, config.reached), ())
    return servers + [server for server in more if (server.host, server.port) not in known]


def _read(server: NatsServer, urls: list[Any]) -> Iterator[NatsServer]:
    """Yield what is announced, with the login of the server that announces it."""
    for url in urls:
        try:
            parts = urlsplit(f"//{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            continue
        if not host:
            continue
        # A certificate has names: an address is one of the servers behind the name known already.
        name = (server.tls_name or server.host) if _is_address(host) else None
        yield replace(server, host=host, port=port or 4222, tls_name=name)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
