"""How a connection to a nats-server is secured, how it logs in, and which sinks do so alike."""

from __future__ import annotations

import base64
import re
import socket
import ssl
from collections.abc import Mapping
from typing import Any, Final

import nkeys

from penstock.config.nats import NatsServer, NatsSinkConfig
from penstock.config.nats_login import NatsLogin
from penstock.core.errors import SinkError
from penstock.core.tls import verifying_context
from penstock.sinks.nats.errors import tls_error

_JWT: Final = re.compile(r"-+BEGIN NATS USER JWT-+\s*(\S+)")
_SEED: Final = re.compile(r"-+BEGIN USER NKEY SEED-+\s*(\S+)")


def login_of(config: NatsSinkConfig) -> list[object]:
    """Return what is equal of the sinks that have the same servers, login and bastion."""
    return [config.reached, *(getattr(config, name) for name in NatsLogin.model_fields)]


def by_login(configs: Mapping[str, NatsSinkConfig]) -> list[list[str]]:
    """Return the names of sinks, those together that have one login."""
    found: list[tuple[list[object], list[str]]] = []  # a login can't be hashed
    for name, config in configs.items():
        login = login_of(config)
        names = next((names for other, names in found if other == login), None)
        if names is None:
            found.append((login, [name]))
        else:
            names.append(name)
    return [names for _, names in found]


def secure(
    sock: socket.socket, config: NatsSinkConfig, server: NatsServer, info: dict[str, Any]
) -> socket.socket:
    """Return the socket, by TLS where the configuration or the server asks for it."""
    required = bool(info.get("tls_required"))
    asked = server.tls or config.wants_tls
    tls = config.setting("tls")
    if config.tls is False and required:
        reason = f"the server requires TLS, and {tls} is false"
        raise tls_error(config, server, reason, f"Leave {tls} out.")
    if asked and not (required or info.get("tls_available")):
        raise tls_error(
            config, server, "the configuration asks for TLS, and the server offers none",
            f"Leave {tls} and the certificates out, and write nats:// in {config.setting('url')}; or "
            "give the server a `tls {}` block.",
        )  # fmt: skip
    if not (asked or required):
        return sock
    if info.get("tls_verify") and not config.tls_cert:
        cert, key = config.setting("tls_cert"), config.setting("tls_key")
        raise tls_error(
            config, server, f"the server asks for a client's certificate, and {cert} is none",
            f"Set {cert} and {key} to one that the server's CA has signed, and its key.",
        )  # fmt: skip
    return tls_context(config).wrap_socket(sock, server_hostname=server.tls_name or server.host)


def tls_context(config: NatsSinkConfig) -> ssl.SSLContext:
    """Return a TLS context that verifies the server; raises `SinkError` for unusable files."""
    try:
        context = verifying_context(config.tls_ca_cert)
        if config.tls_cert:
            context.load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:
        files = ", ".join(
            str(f) for f in (config.tls_ca_cert, config.tls_cert, config.tls_key) if f
        )
        raise SinkError(
            "tls_failed",
            f"Cannot use the certificates ({files}): {error}.",
            remedy=f"Set {config.setting('tls_ca_cert')}, {config.setting('tls_cert')} and "
            f"{config.setting('tls_key')} to readable PEM files.",
            transient=False,
        ) from None
    return context


def connect_options(
    config: NatsSinkConfig, server: NatsServer, info: dict[str, Any], name: str
) -> dict[str, Any]:
    """Return the options of `CONNECT` for a server that sent `info`; raises `SinkError`."""
    if not info.get("headers"):
        raise SinkError(
            "headers_unsupported",
            f"{server} does not support message headers, which carry the deduplication id.",
            remedy="Use nats-server 2.2 or newer, without `no_header_support`.",
            transient=False,
        )
    return {
        "verbose": False,
        "pedantic": False,
        "tls_required": server.tls or config.wants_tls,
        "headers": True,
        "no_responders": True,
        "protocol": 1,
        "lang": "python-penstock",
        "version": "1",
        "name": name,
        **_login(config, server, str(info.get("nonce", ""))),
    }


def _login(config: NatsSinkConfig, server: NatsServer, nonce: str) -> dict[str, Any]:
    """Return the fields of `CONNECT` that log in; the server's `nonce` is signed by an nkey."""
    if server.user is not None:
        return {"user": server.user, "pass": server.password}
    if server.token is not None:
        return {"auth_token": server.token}
    if config.user is not None and config.password is not None:
        return {"user": config.user, "pass": config.password.get_secret_value()}
    if config.token is not None:
        return {"auth_token": config.token.get_secret_value()}
    key = "credentials_file" if config.credentials_file else "nkey_seed"
    try:
        if config.credentials_file is not None:
            text = config.credentials_file.expanduser().read_text(encoding="utf-8")
            jwt, user_seed = _JWT.search(text), _SEED.search(text)
            if not jwt or not user_seed:
                raise ValueError("it holds no user JWT and seed")
            return {"jwt": jwt.group(1), "sig": _sign(user_seed.group(1).encode(), nonce)[1]}
        if (seed := config.seed()) is not None:
            public, signature = _sign(seed, nonce)
            return {"nkey": public, "sig": signature}
    except (OSError, ValueError, nkeys.NkeysError) as error:
        # Not str(error) of an OSError: it names the file, and a mistyped seed was taken for one.
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SinkError(
            "credentials_unusable",
            f"Cannot use {config.setting(key)}"
            f"{f' {path}' if (path := config.credentials_file) else ''}: {reason}.",
            remedy="Set it to a file that `nsc generate creds` or `nk -gen user` wrote.",
            transient=False,
        ) from None
    return {}


def _sign(seed: bytes, nonce: str) -> tuple[str, str]:
    pair = nkeys.from_seed(bytearray(seed))
    try:
        signature = base64.urlsafe_b64encode(pair.sign(nonce.encode())).rstrip(b"=").decode()
        return pair.public_key.decode(), signature
    finally:
        pair.wipe()
