"""Whether a target can be reached: connects to it, through its bastion if it has one."""

from __future__ import annotations

import socket
import ssl
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from penstock.bastion import tunnel_to
from penstock.config.bastion import Bastion
from penstock.config.nats import NatsSinkConfig
from penstock.config.targets import HttpTarget, NatsTarget, Target
from penstock.core.errors import BastionError, SinkError, TargetError
from penstock.core.tls import client_context
from penstock.sinks.nats.client import connect_first

_SECONDS: Final = 10.0
_LOGIN: Final = frozenset(NatsSinkConfig.model_fields)


class Reached(NamedTuple):
    """A target that answered; `version` and `jetstream` are a NATS server's."""

    address: str
    version: str | None = None
    jetstream: bool | None = None


def reach(target: Target, bastion: Bastion | None, name: str, timeout: float = _SECONDS) -> Reached:
    """Connect to a target, log in where that is NATS, and send an HTTP endpoint nothing.

    `name` is how the connection calls itself, `timeout` what each server may take. Raises `TargetError`.
    """
    try:
        if isinstance(target, NatsTarget):
            return _nats(target, bastion, name, timeout)
        return _http(target, bastion, timeout)
    except (BastionError, SinkError) as error:
        raise TargetError(
            error.code, error.message, remedy=error.remedy, transient=error.transient
        ) from None


def _nats(target: NatsTarget, bastion: Bastion | None, name: str, timeout: float) -> Reached:
    given = {key: getattr(target, key) for key in target.model_fields_set & _LOGIN}
    config = NatsSinkConfig(**given).behind(bastion)
    connection = connect_first(config, name, timeout=lambda: timeout)
    connection.close()
    info = connection.info
    return Reached(
        str(connection.server), str(info.get("version", "")), bool(info.get("jetstream"))
    )


def _http(target: HttpTarget, bastion: Bastion | None, timeout: float) -> Reached:
    parts = urlsplit(target.url.get_secret_value())
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    where = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    try:
        if bastion is None:
            sock = socket.create_connection((host, port), timeout)
        else:
            sock = tunnel_to(bastion).open(host, port, timeout)
        with sock:
            sock.settimeout(timeout)
            if parts.scheme == "https":
                context = client_context(target.ca(), target.identity())
                context.wrap_socket(sock, server_hostname=host).close()
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", "") or error.reason or "the connection ended"
        raise TargetError(
            "tls_failed",
            f"{where}: TLS failed: {why}.",
            remedy="Correct the target's url, its tls_ca_cert, or its tls_cert and tls_key.",
        ) from None
    except OSError as error:
        refused = isinstance(error, ConnectionRefusedError)
        late = isinstance(error, TimeoutError)
        why = f"no answer within {timeout:g} s" if late else error.strerror or str(error)
        raise TargetError(
            "connection_refused" if refused else "unreachable",
            f"{where} cannot be reached: {why}.",
            remedy="Start it, or correct the target's url or the network.",
            transient=True,
        ) from None
    return Reached(where)
