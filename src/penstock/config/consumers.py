"""A consumer's settings, as penstock.yaml, the API and the store have them."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from penstock.config.bastion import BastionSettings
from penstock.config.durations import parse, shown
from penstock.config.strict import Flag, StrictModel, Whole
from penstock.config.transforms import Filter
from penstock.core.message import ACTIONS
from penstock.core.tables import TablePattern

ConsumerType = Literal["pull", "webhook"]
ANY: Final = "*"
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_OWN_HEADERS: Final = ("host", "content-length", "content-type", "transfer-encoding", "connection")
_SECRET: Final = "whsec_"  # noqa: S105 - the prefix of one


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


# Beside an error of a name, a constraint of Field's reports a second one: that there are too few.
def _counted(names: tuple[str, ...]) -> tuple[str, ...]:
    if not 1 <= len(names) <= _MAX_NAMES:
        raise ValueError(f"{len(names)} names: expected 1 to {_MAX_NAMES}")
    return names


_MAX_NAMES: Final = 100
_ONE_IN_A_LIST: Final = BeforeValidator(
    _listed,
    json_schema_input_type=str
    | Annotated[tuple[str, ...], Field(min_length=1, max_length=_MAX_NAMES)],
)


def storable(text: str) -> str:
    """Return `text` if Postgres can hold it; raises `ValueError`."""
    if "\0" in text:
        raise ValueError(f"{text!r} has a NUL character, which no name in Postgres has")
    return text


def _table(name: str) -> str:
    # A collection's id, as in stripe:customers, is no pattern.
    if name != ANY and "." in name and ":" not in name:
        TablePattern.parse(name)
    return name


def _action(action: str) -> str:
    if action not in (*ACTIONS, ANY):
        raise ValueError(f"{action!r} is not an action: expected one of {', '.join(ACTIONS)}, *")
    return action


_Text = Annotated[str, AfterValidator(storable)]
_Names = Annotated[tuple[_Text, ...], AfterValidator(_counted), _ONE_IN_A_LIST]
_Tables = Annotated[
    tuple[Annotated[_Text, AfterValidator(_table)], ...],
    AfterValidator(_counted),
    _ONE_IN_A_LIST,
]
_Actions = Annotated[
    tuple[Annotated[str, AfterValidator(_action)], ...],
    AfterValidator(_counted),
    _ONE_IN_A_LIST,
]


class Filters(StrictModel):
    """Which messages a consumer gets; each member is a name, a list of names, or `*` for all.

    `table` (or `collection_id`, which is the same) is a table's name, `schema.table` or `schema.*`, or
    the id of a sync's collection, as in `stripe:customers`. `resource_id` (or `sync_id`) is the schema
    of a database, or the id of a sync. `provider` is that of a sync. `sql` is a condition, in the
    language of sinks' filters.
    """

    table: _Tables = (ANY,)
    collection_id: _Tables = (ANY,)
    resource_id: _Names = (ANY,)
    sync_id: _Names = (ANY,)
    provider: _Names = (ANY,)
    action: _Actions = (ANY,)
    sql: Filter | None = None


def check_max_deliver(value: int) -> int:
    """Return a `max_deliver`; raises `ValueError` for 0."""
    if value == 0:
        raise ValueError("0 would deliver nothing: expected -1 (for ever), or 1 and more")
    return value


def _policy(value: Any) -> Any:
    if value in ("all", "new", "last"):
        return value
    try:
        return shown(parse(value))
    except ValueError as error:
        raise ValueError(
            f"{value!r} is no place to begin: expected all, new, last, or a duration as in 1h"
        ) from error


DeliverPolicy = Annotated[str, BeforeValidator(_policy)]
"""`all`, `new`, `last`, or a duration."""


class ConsumerSettings(StrictModel):
    """What every consumer has; times are in milliseconds."""

    ack_wait_ms: Whole = Field(30_000, ge=1, le=86_400_000)
    max_deliver: Whole = Field(-1, ge=-1, le=1_000_000)
    max_ack_pending: Whole = Field(1_000, ge=1, le=100_000)
    max_waiting: Whole = Field(20, ge=1, le=10_000)
    deliver_policy: DeliverPolicy = "all"
    """Where it begins when it is made: with all there is, new messages, the last message, or those of
    a duration before."""
    filters: Filters = Filters()
    deletes: Flag = False
    """Of a stream of kind rows: whether hard deletes are handed out."""

    @field_validator("max_deliver")
    @classmethod
    def _check_max_deliver(cls, value: int) -> int:
        return check_max_deliver(value)

    def stored(self) -> dict[str, Any]:
        """Return what the store keeps, secrets included; defaults are left out."""
        return {name: _revealed(v) for name, v in self.model_dump(exclude_defaults=True).items()}

    def shown(self) -> dict[str, Any]:
        """Return what may be shown: all but secrets and the values of headers."""
        return self.model_dump(mode="json", exclude={"secrets", "via"})


def check_url(url: SecretStr) -> SecretStr:
    """Return the URL of an endpoint; raises `ValueError`, without it, for what is none."""
    try:
        parts = urlsplit(url.get_secret_value())
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        whole = None
    if not whole or any(c <= " " for c in url.get_secret_value()):
        raise ValueError("not a URL of a webhook: expected https://host/path")
    return url


def _check_headers(headers: dict[str, SecretStr]) -> dict[str, SecretStr]:
    """Return the headers of requests; raises `ValueError` for one that can't be sent."""
    for name, value in headers.items():
        if not _HEADER.match(name):
            raise ValueError(f"{name!r} is not a header's name")
        if name.lower() in _OWN_HEADERS or name.lower().startswith("webhook-"):
            raise ValueError(f"{name!r} is set by Penstock: leave it out")
        text = value.get_secret_value()
        if not text.isascii() or not text.isprintable():
            raise ValueError(f"the value of {name!r} has characters that no header may have")
    return headers


def _check_secrets(secrets: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    """Return what requests are signed with; raises `ValueError` for what Standard Webhooks lack."""
    for secret in secrets:
        text = secret.get_secret_value()
        try:
            key = base64.b64decode(text.removeprefix(_SECRET), validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if not text.startswith(_SECRET) or not 24 <= len(key) <= 64:
            raise ValueError(
                "not a Standard Webhooks secret: expected whsec_ and the base64 of 24 to 64 "
                "random bytes"
            )
    return secrets


Headers = Annotated[dict[str, SecretStr], AfterValidator(_check_headers)]
Secrets = Annotated[tuple[SecretStr, ...], Field(max_length=2), AfterValidator(_check_secrets)]


class WebhookTarget(StrictModel):
    """What a target gives its webhooks beside their URL and headers; only stored, never shown.

    `ca` is the PEM text of the CA that signed the endpoint's certificate, `identity` that of the
    certificate that it is shown, and of its key.
    """

    name: str
    ca: str | None = None
    identity: SecretStr | None = None
    bastion: BastionSettings | None = None


class WebhookSettings(ConsumerSettings):
    """What a webhook has over that; `secrets` has two while one takes the other's place."""

    url: SecretStr
    headers: Headers = Field(default_factory=dict)
    timeout_ms: Whole = Field(30_000, ge=1, le=600_000)
    concurrency: Whole = Field(4, ge=1, le=1_000)
    batch: Flag = False
    batch_size: Whole = Field(10, ge=1, le=1_000)
    secrets: Secrets = ()
    allow_private: Flag = False

    via: SkipJsonSchema[WebhookTarget | None] = None
    """What the target has over the URL; set where the file's webhooks are joined with their targets."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: SecretStr) -> SecretStr:
        return check_url(url)

    def shown(self) -> dict[str, Any]:
        """Return what may be shown: the URL without credentials and query, its target, no secrets."""
        parts = urlsplit(self.url.get_secret_value())
        host = parts.netloc.rpartition("@")[2]
        target = None if self.via is None else self.via.name
        url = f"{parts.scheme}://{host}{parts.path}"
        return {**super().shown(), "url": url, "target": target}


class WebhookKeys(WebhookSettings):
    """A webhook as it is written: with a URL of its own, or its target's with `path` behind it."""

    url: SecretStr = SecretStr("")
    target: str | None = None
    path: str | None = None

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str | None) -> str | None:
        if path is not None and (not path.startswith("/") or any(c <= " " for c in path)):
            raise ValueError(f"{path!r} is not a path: expected one that begins with /")
        return path

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.via is not None and "via" in self.model_fields_set:
            raise ValueError("via: unknown key; name a `target`")
        if self.target is None and "url" not in self.model_fields_set:
            raise ValueError(
                "url is missing: give the webhook's `url`, or the `target` that has it"
            )
        if self.target is not None and "url" in self.model_fields_set:
            raise ValueError("target and url: use one of them; `path` comes behind a target's URL")
        if self.target is None and self.path is not None:
            raise ValueError("path goes with a `target`; write it into the `url`")
        return self


class _Consumer(ConsumerSettings):
    """A consumer of the file: what every one has, and its stream."""

    stream: str

    def stored(self) -> dict[str, Any]:
        """Return the settings that the store keeps: what the API would be given, secrets too."""
        return {k: v for k, v in super().stored().items() if k not in ("type", "stream")}

    def written(self) -> dict[str, Any]:
        """Return all keys that differ from their defaults, as the file has them."""
        return ConsumerSettings.stored(self)


class PullConsumer(_Consumer):
    """A consumer that workers read over HTTP."""

    type: Literal["pull"] = "pull"


class WebhookConsumer(_Consumer, WebhookKeys):
    """A consumer whose messages are sent to a URL, its own or its target's with `path` behind it."""

    type: Literal["webhook"]

    def stored(self) -> dict[str, Any]:
        """Return the settings that the store keeps: what the API would be given, secrets too."""
        return {k: v for k, v in super().stored().items() if k not in ("target", "path")}


HttpConsumer = PullConsumer | WebhookConsumer


def settings_of(kind: str, settings: Mapping[str, Any]) -> ConsumerSettings:
    """Return the settings of a consumer of type `pull` or `webhook`; raises `ValidationError`."""
    model = WebhookSettings if kind == "webhook" else ConsumerSettings
    return model.model_validate(dict(settings))


def _revealed(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, dict):
        return {key: _revealed(member) for key, member in value.items()}
    return [_revealed(member) for member in value] if isinstance(value, list | tuple) else value
