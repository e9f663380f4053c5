"""Targets: NATS clusters and HTTP endpoints by name, with their logins and bastions.

A sink or a webhook that names a target takes from it what it would have as keys of its own:
`joined_sink`, `joined_webhook`. From then on it is one like any other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from penstock.config.bastion import Bastion, BastionSettings
from penstock.config.consumers import (
    Headers,
    Secrets,
    WebhookConsumer,
    WebhookTarget,
    check_url,
)
from penstock.config.nats_login import NatsLogin, check_pair
from penstock.config.strict import StrictModel

_OF_TARGET: Final = tuple(NatsLogin.model_fields)

S = TypeVar("S", bound=NatsLogin)


class NatsTarget(NatsLogin):
    """A NATS cluster."""

    type: Literal["nats"]
    url: str = Field(repr=False)
    """Servers of one cluster, separated by commas, `nats://` or `tls://`."""
    bastion: BastionSettings | None = None


class HttpTarget(StrictModel):
    """An HTTP endpoint, or all that lie below one address."""

    type: Literal["http"]
    url: SecretStr
    """http or https; a webhook's `path` comes behind it."""
    headers: Headers = Field(default_factory=dict)
    secrets: Secrets = ()
    """What requests are signed with, where the webhook has no secrets of its own."""
    tls_ca_cert: Path | None = None
    """The CA that signed the endpoint's certificate, if it is none that the system knows."""
    tls_cert: Path | None = None
    """The certificate that is shown to an endpoint which demands one."""
    tls_key: Path | None = None
    bastion: BastionSettings | None = None

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: SecretStr) -> SecretStr:
        parts = urlsplit(check_url(url).get_secret_value())
        if parts.query or parts.fragment:
            raise ValueError("a target's URL has no query: write it into the webhook's `path`")
        return url

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        check_pair(self, "tls_cert", "tls_key")
        return self

    def ca(self) -> str | None:
        """Return the text of `tls_ca_cert`; raises `ValueError` where it can't be read."""
        return None if self.tls_ca_cert is None else _pem("tls_ca_cert", self.tls_ca_cert)

    def identity(self) -> SecretStr | None:
        """Return the texts of `tls_cert` and `tls_key`; raises `ValueError` as `ca` does."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return SecretStr(f"{_pem('tls_cert', self.tls_cert)}\n{_pem('tls_key', self.tls_key)}")


def _pem(key: str, path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no PEM file"
        raise ValueError(f"{key} {path} cannot be read: {why}") from None


Target = NatsTarget | HttpTarget


def bastion_of(name: str, target: Target) -> Bastion | None:
    """Return the bastion that a target lies behind; raises `ValueError` for an unreadable key."""
    return None if target.bastion is None else target.bastion.of(name)


def joined_sink(sink: S, name: str, target: NatsTarget) -> S:
    """Return a NATS sink or consumer with the servers, the login and the bastion of its target."""
    of_target = {key: getattr(target, key) for key in _OF_TARGET}
    return sink.model_copy(update=of_target).behind(bastion_of(name, target))


def joined_webhook(consumer: WebhookConsumer, name: str, target: HttpTarget) -> WebhookConsumer:
    """Return a webhook with the URL, the headers and the bastion of its target."""
    base = target.url.get_secret_value()
    url = base.rstrip("/") + consumer.path if consumer.path else base
    lower = {header.lower() for header in consumer.headers}
    headers = {k: v for k, v in target.headers.items() if k.lower() not in lower}
    bastion = target.bastion
    if bastion is not None and bastion.private_key_file is not None:
        # What pushes may run where the file is not.
        key = bastion_of(name, target)
        text = None if key is None else key.private_key
        update = {"private_key": SecretStr(text or ""), "private_key_file": None}
        bastion = bastion.model_copy(update=update)
    return consumer.model_copy(
        update={
            "url": SecretStr(url),
            "headers": headers | consumer.headers,
            "secrets": consumer.secrets or target.secrets,
            "via": WebhookTarget(
                name=name, ca=target.ca(), identity=target.identity(), bastion=bastion
            ),
        }
    )
