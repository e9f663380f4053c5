"""How a connection to a NATS cluster is made: its servers, and the login.

Pickles, because it travels to the executors; its repr and its errors never show a secret.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, Field, PrivateAttr, SecretStr, field_validator, model_validator

from penstock.config.bastion import Bastion
from penstock.config.strict import Flag, StrictModel

_USERINFO = re.compile(r"((?:^|,)\s*(?:\w+://)?)[^,]*@")
_SEED = re.compile(r"S[UOANC][A-Z2-7]{56}")
_LOGIN = ("password", "token", "credentials_file", "nkey_seed")


@dataclass(frozen=True, slots=True)
class NatsServer:
    """One server of the `url` list; login data in a URL goes before the settings of the sink."""

    host: str
    port: int
    tls: bool
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    tls_name: str | None = None
    """The name that its certificate is verified for, if that is not `host`."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'nats'}://{host}:{self.port}"


class NatsLogin(StrictModel):
    """The servers of a cluster and the login; the names are nats-py's own where it has the setting."""

    url: str = Field("nats://localhost:4222", repr=False)
    """Servers of one cluster, separated by commas, `nats://` or `tls://`."""
    user: str | None = None
    password: SecretStr | None = None
    token: SecretStr | None = None
    credentials_file: Path | None = None
    nkey_seed: SecretStr | None = None
    """The seed itself (`SU…`), or the path of a file that holds it."""
    tls: Flag | None = None
    """Require TLS; if unset it is used where the server, the URL or a certificate requires it."""
    tls_ca_cert: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    _reached: Bastion | None = PrivateAttr(None)

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        _servers(value)
        return value

    @model_validator(mode="after")
    def _check_login(self) -> Self:
        check_login(self)
        return self

    def __repr_args__(self) -> Any:
        """Show the URL without its login data; pydantic shows the rest, secrets as stars."""
        return [("url", self.safe_url), *super().__repr_args__()]

    @property
    def safe_url(self) -> str:
        """`url` without login data, for messages and logs."""
        return redact(self.url)

    @property
    def servers(self) -> list[NatsServer]:
        """The servers of `url`, in its order."""
        return _servers(self.url)

    @property
    def reached(self) -> Bastion | None:
        """The bastion that connections go through; None where they are direct."""
        return self._reached

    def behind(self, bastion: Bastion | None) -> Self:
        """Return the same behind a bastion."""
        copy = self.model_copy()
        copy._reached = bastion
        return copy

    def setting(self, key: str) -> str:
        """Return what the user calls the setting `key`, as a text quotes it."""
        return f"`{key}`"

    @property
    def wants_tls(self) -> bool:
        """Whether TLS is demanded for every server, whatever its URL."""
        return bool(self.tls or self.tls_ca_cert or self.tls_cert)

    def seed(self) -> bytes | None:
        """Return the nkey seed, read from its file if `nkey_seed` is a path; raises `OSError`."""
        if self.nkey_seed is None:
            return None
        text = self.nkey_seed.get_secret_value().strip()
        if _SEED.fullmatch(text):
            return text.encode()
        found = _SEED.search(Path(text).expanduser().read_text(encoding="utf-8"))
        if found is None:
            raise ValueError("nkey_seed: the file holds no seed (58 characters that start with SU)")
        return found.group().encode()


def check_target(settings: NatsLogin, target: str | None) -> None:
    """Raise `ValueError` where `settings` have a login beside the target that has one."""
    own = [key for key in NatsLogin.model_fields if key in settings.model_fields_set]
    if target is not None and own:
        keys = ", ".join(own)
        raise ValueError(f"target and {keys}: the target has them all; remove {keys} or `target`")


def check_login(settings: BaseModel, user: str = "user", tls: str = "tls") -> None:
    """Raise `ValueError` unless `settings` have one way to log in at most, and whole pairs.

    `user` and `tls` are what these settings call the two.
    """
    given = {
        key
        for key in (user, *_LOGIN, "tls_ca_cert", "tls_cert", "tls_key")
        if getattr(settings, key) is not None
    }
    pair = f"{user} and password"
    ways = [pair] if given & {user, "password"} else []
    ways += [key for key in _LOGIN[1:] if key in given]
    if len(ways) > 1:
        raise ValueError(f"{', '.join(ways)}: use one way to log in, not {len(ways)}")
    for one, other in ((user, "password"), ("tls_cert", "tls_key")):
        check_pair(settings, one, other)
    if getattr(settings, tls) is False and given & {"tls_ca_cert", "tls_cert"}:
        raise ValueError(f"{tls} is false, but tls_ca_cert or tls_cert is set: remove one of them")


def check_pair(settings: BaseModel, one: str, other: str) -> None:
    """Raise `ValueError` where `settings` have one of two keys alone."""
    lacking = [key for key in (one, other) if getattr(settings, key) is None]
    if len(lacking) == 1:
        raise ValueError(f"{lacking[0]} is missing: {one} and {other} go together")


def redact(url: str) -> str:
    """Return a URL list with the login data taken out of it."""
    return _USERINFO.sub(r"\1", url)


def _servers(urls: str) -> list[NatsServer]:
    # Where the list does not parse, no part of it is shown that a password could have spilt into.
    shown = "url" if "@" in urls else repr(urls)
    servers = [_server(part.strip(), shown) for part in urls.split(",") if part.strip()]
    if not servers:
        raise ValueError("url is empty (expected nats://host:port, several separated by commas)")
    return servers


def _server(url: str, shown: str) -> NatsServer:
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, None
    if parts is None or not host or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(
            f"{shown} is not a list of servers (expected nats://host:port or tls://host:port, "
            "separated by commas; a password's / @ : , are written %2F %40 %3A %2C)"
        )
    if parts.scheme not in ("nats", "tls"):
        raise ValueError(f"{shown}: unknown scheme {parts.scheme!r} (expected nats:// or tls://)")
    user = unquote(parts.username) if parts.username else None
    password = unquote(parts.password) if parts.password is not None else None
    return NatsServer(
        host,
        port or 4222,
        parts.scheme == "tls",
        user if password is not None else None,
        password,
        user if password is None else None,
    )
