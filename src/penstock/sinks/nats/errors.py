"""Why a nats-server refuses a connection: the error, the value at fault, and the remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from penstock.config.nats import NatsSinkConfig, Server
from penstock.core.errors import SinkError

_DENIED: Final = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"', re.I)


def none_of(errors: Sequence[SinkError]) -> SinkError:
    """Return one error for all servers of a sink, with each one's reason."""
    # A server's reply explains more than another server that could not be reached.
    lead = next((error for error in errors if not error.transient), errors[0])
    reasons = list(dict.fromkeys(error.message.removesuffix(".") for error in errors))
    if len(reasons) == 1:
        return lead
    return SinkError(
        lead.code,
        f"None of {len(errors)} servers can be used: {'; '.join(reasons)}.",
        remedy=lead.remedy,
        transient=lead.transient,
    )


def problem_error(text: str, config: NatsSinkConfig, server: Server) -> SinkError:
    """Return the `SinkError` for a server's `-ERR` that concerns the connection."""
    low = text.lower()
    if "authorization violation" in low or "authentication" in low or "revoked" in low:
        expired = "expired" in low or "timeout" in low
        return SinkError(
            "authorization_violation",
            f"{server} refuses the login: {text}.",
            remedy=f"Set {config.setting('user')} and {config.setting('password')}, "
            f"{config.setting('token')}, {config.setting('credentials_file')} or "
            f"{config.setting('nkey_seed')} to what the server's configuration has.",
            transient=expired,
        )
    if "permissions violation" in low:
        return SinkError(
            "permission_denied",
            f"{server} does not permit it: {text}.",
            remedy=_permit(text),
            transient=False,
        )
    if "secure connection" in low or "tls" in low:
        return tls_error(config, server, text)
    return SinkError("server_error", f"{server} closes the connection: {text}.")


def _permit(text: str) -> str:
    """Return what mends a violation of permissions."""
    found = _DENIED.search(text)
    if found is None:
        return "Permit it in the user's `permissions`."
    if found[1].lower() == "subscription":
        return 'Permit this user to subscribe to "_INBOX.>", where acks and replies come.'
    subject = "$JS.API.>" if found[2].startswith("$JS.API.") else found[2]
    return f'Permit this user to publish to "{subject}".'


def tls_error(
    config: NatsSinkConfig, server: Server, reason: str, remedy: str | None = None
) -> SinkError:
    """Return the error for a connection that could not be secured."""
    return SinkError(
        "tls_failed",
        f"No secure connection to {server}: {reason}.",
        remedy=remedy
        or f"Set {config.setting('tls_ca_cert')} to the CA that signed the server's certificate, "
        f"{config.setting('tls_cert')} and {config.setting('tls_key')} if it asks for a client's, "
        f"and {config.setting('url')} to a name that is in the certificate.",
        transient=False,
    )


def unresponsive(server: Server, seconds: float) -> SinkError:
    """Return the error for a server that sends nothing."""
    return SinkError(
        "timeout",
        f"{server} has not answered for {seconds:g} s.",
        remedy="See whether the server is stopped or overloaded, and the network.",
    )


def not_nats(where: str, line: bytes) -> SinkError:
    """Return the error for a port where something else listens."""
    return SinkError(
        "protocol_error",
        f"What listens {where} does not speak NATS: {line[:40]!r}.",
        remedy="Set `url` to the client port of nats-server (4222 by default).",
    )
