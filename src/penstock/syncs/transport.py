"""Connections to APIs: TLS is verified, and private networks are refused unless they are allowed."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import NameResolutionError, NewConnectionError
from urllib3.poolmanager import PoolManager

from penstock.core.addresses import is_public
from penstock.syncs.errors import SyncError


class _PublicConnection(HTTPConnection):
    """Connects to public addresses alone, and to the one that it has looked at."""

    def _new_conn(self) -> socket.socket:
        host = self._dns_host
        failure: Exception | None = None
        for address in _addresses(self, host, self.port or self.default_port):
            # The name may stand for another address a moment later.
            self._dns_host = address
            try:
                return super()._new_conn()
            except (NewConnectionError, OSError) as error:
                failure = error
            finally:
                self._dns_host = host
        assert failure is not None  # noqa: S101 - there is an address
        raise failure


class _PublicTlsConnection(_PublicConnection, HTTPSConnection):
    pass


def _addresses(connection: HTTPConnection, host: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise NameResolutionError(host, connection, socket.gaierror("not a name")) from None
    except socket.gaierror as error:
        raise NameResolutionError(host, connection, error) from None
    addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
    for address in addresses:
        if not is_public(address.partition("%")[0]):
            what = address if address == host.strip("[]") else f"{host} ({address})"
            raise SyncError(
                "private_address",
                f"{what} is not an address of the public internet, and is not called.",
                remedy="If it is meant, set `allow_private: true` in the provider.",
            )
    return addresses


class _PublicPool(HTTPConnectionPool):
    ConnectionCls = _PublicConnection


class _PublicTlsPool(HTTPSConnectionPool):
    ConnectionCls = _PublicTlsConnection


class PublicAdapter(HTTPAdapter):
    """An adapter of requests whose connections go to public addresses alone.

    A proxy of the environment is called wherever it stands: the operator has named it.
    """

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Make the pools, with connections that look where they go."""
        super().init_poolmanager(*args, **kwargs)
        manager: PoolManager = self.poolmanager
        manager.pool_classes_by_scheme = {"http": _PublicPool, "https": _PublicTlsPool}


def origin_of(url: str) -> tuple[str, str, int | None]:
    """Return scheme, host and port of a URL."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, (parts.hostname or "").lower(), port
