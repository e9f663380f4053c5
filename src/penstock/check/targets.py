"""Checks targets: whether a connection to each can be made, through its bastion if it has one."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from penstock.bastion.tunnel import tunnel_to
from penstock.config.bastion import Bastion
from penstock.config.nats import NatsSinkConfig
from penstock.config.settings import Config
from penstock.config.sinks import NatsSinkSettings
from penstock.config.targets import HttpTarget, NatsTarget, Target
from penstock.core.errors import BastionError, SinkError
from penstock.core.finding import Finding
from penstock.sinks.nats.client import connect_first

_SECONDS: Final = 10.0
_LOGIN: Final = frozenset(NatsSinkConfig.model_fields)


def inspect_target(
    name: str, target: Target, config: Config, bastion: Bastion | None
) -> Iterator[Finding]:
    """Connect to a target behind `bastion`; a NATS target that has sinks is checked with these."""
    what = f"target {name}"
    try:
        if isinstance(target, NatsTarget):
            if not any(
                isinstance(sink, NatsSinkSettings) and sink.target == name
                for sink in config.sinks.values()
            ):
                yield _nats(what, target, bastion)
        else:
            yield _http(what, target, bastion)
    except (BastionError, SinkError) as error:
        yield Finding("error", what, error.message, error.remedy)


def _nats(what: str, target: NatsTarget, bastion: Bastion | None) -> Finding:
    given = {key: getattr(target, key) for key in target.model_fields_set & _LOGIN}
    connection = connect_first(NatsSinkConfig(**given).behind(bastion), "penstock check")
    connection.close()
    return Finding("ok", what, f"reachable and logged in: {connection.server}{_through(bastion)}")


def _http(what: str, target: HttpTarget, bastion: Bastion | None) -> Finding:
    parts = urlsplit(target.url.get_secret_value())
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    where = f"{parts.scheme}://{host}:{port}"
    try:
        if bastion is None:
            sock = socket.create_connection((host, port), _SECONDS)
        else:
            sock = tunnel_to(bastion).open(host, port, _SECONDS)
        with sock:
            sock.settimeout(_SECONDS)
            if parts.scheme == "https":
                context = ssl.create_default_context(cadata=target.ca())
                context.wrap_socket(sock, server_hostname=host).close()
    except OSError as error:
        reason = getattr(error, "verify_message", "") or error.strerror or str(error)
        fix = "start it, or correct the target's url, tls_ca_cert or the network"
        return Finding("error", what, f"{where} cannot be reached: {reason}", fix)
    return Finding("ok", what, f"{where} takes connections{_through(bastion)}")


def _through(bastion: Bastion | None) -> str:
    return "" if bastion is None else f", through bastion {bastion}"
