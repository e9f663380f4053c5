"""The config of a relay pipeline: what is wrong with one, and the NATS sink that it makes.

`read` takes the config as `tide.relays` keeps it, resolves its references, and returns a
`RelayPipeline`; its `sink` is what the relay runs. Errors show the config as it was set, never the
value of a reference and never a secret. `config_keys` has the keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import (
    Field,
    SecretStr,
    StrictBool,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)

from penstock.config.explain import message_of
from penstock.config.nats import Format, KeyScope, NatsSinkConfig, OutboxForm, check_login
from penstock.config.sinks import NatsSinkSettings
from penstock.config.strict import StrictModel
from penstock.config.transforms import NOT_IN_SUBJECT, RouteSettings, check_route
from penstock.core.errors import PipelineError
from penstock.core.subject import SubjectTemplate
from penstock.core.tables import qualified_name
from penstock.core.text import dotted
from penstock.outbox.config_keys import (
    BATCH_SIZE,
    CONTENT,
    GROUP_BY,
    Backend,
    Start,
    keys,
)
from penstock.outbox.explain import explanation
from penstock.outbox.secrets import UnresolvedError, has_reference, resolve

DEFAULT_SUBJECT: Final = "{stream_table}.{op}"
_CONTENT: Final = re.compile(CONTENT)
_ANY_OUTBOX: Final = "outbox"
_KEYS: Final = keys("out")

_NAMES: Final = {"user": "username", "tls": "tls_enabled"}
"""Keys of a NATS sink that have another name in a pipeline's config."""


class OutboxSinkSettings(NatsSinkSettings):
    """The NATS sink of a relay pipeline: its messages are those of an outbox."""

    outbox: OutboxForm

    @property
    def form(self) -> OutboxForm:
        """How messages are made of the outbox's rows."""
        return self.outbox

    @field_validator("subject")
    @classmethod
    def _check_subject(cls, value: str) -> str:
        SubjectTemplate.parse(value, outbox=_ANY_OUTBOX)
        return value

    @field_validator("route")
    @classmethod
    def _check_route(cls, route: Any) -> Any:
        return _checked_route(route)

    def setting(self, key: str) -> str:
        """Return the name of the setting `key` in a pipeline's config, as a text quotes it."""
        return super().setting(_NAMES.get(key, key))

    def subject_template(self, text: str) -> SubjectTemplate:
        """Return a template that is read with the variables of an outbox."""
        return SubjectTemplate.parse(text, outbox=self.outbox.name)


class RelayPipeline(StrictModel):
    """The config of a pipeline, checked and with its references resolved."""

    sink_type: Backend
    url: str = Field(repr=False)
    subject: str = DEFAULT_SUBJECT
    stream: str | None = None
    credentials_file: str | None = None
    nkey_seed: SecretStr | None = None
    token: SecretStr | None = None
    username: str | None = None
    password: SecretStr | None = None
    tls_enabled: StrictBool | None = None
    tls_ca_cert: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    batch_size: Annotated[StrictInt, Field(ge=BATCH_SIZE[0], le=BATCH_SIZE[1])] = 100
    """How many messages of one group go at once to a stream that takes atomic batches."""
    format: Format = "plain"
    start: Start = "beginning"
    """Where a new pipeline starts: at the oldest message of the outbox, or at the next one."""
    route: RouteSettings | None = None
    """Rules that choose the subject; `subject` is for messages that none of them matches."""
    group_by: str | None = None
    """The unit of order: None is the whole outbox, `none` a single message."""
    key_scope: KeyScope = "outbox"
    """Where a dedup key is unique: in its outbox, or in the stream, for all its publishers."""

    @field_validator("url", "stream")
    @classmethod
    def _check_with_sink(cls, value: str | None, info: Any) -> str | None:
        if value is not None:
            try:
                NatsSinkConfig.model_validate({info.field_name: value})
            except ValidationError as error:
                raise ValueError(message_of(error.errors(include_url=False)[0])) from None
        return value

    @field_validator("subject")
    @classmethod
    def _check_subject(cls, value: str) -> str:
        SubjectTemplate.parse(value, outbox=_ANY_OUTBOX)
        return value

    @field_validator("credentials_file", "nkey_seed", "tls_ca_cert", "tls_cert", "tls_key")
    @classmethod
    def _check_path(cls, value: Any, info: Any) -> Any:
        text = value.get_secret_value() if isinstance(value, SecretStr) else value
        if text is not None and not text.strip():
            raise ValueError("it is empty; leave the key out instead")
        # An error shows the path, and a file's content may be a private key.
        if text is not None and info.field_name != "nkey_seed" and _CONTENT.search(text):
            raise ValueError("expected the path of a file, not what is in it")
        return value

    @field_validator("route", mode="before")
    @classmethod
    def _check_rules(cls, route: Any) -> Any:
        if not isinstance(route, list | tuple):
            raise ValueError(f"expected {_KEYS['route'].expected}; leave it out for none")
        return route

    @field_validator("route")
    @classmethod
    def _check_route(cls, route: Any) -> Any:
        return _checked_route(route)

    @field_validator("group_by")
    @classmethod
    def _check_group_by(cls, value: str | None) -> str | None:
        if value is not None and re.fullmatch(GROUP_BY, value, re.DOTALL) is None:
            expected = _KEYS["group_by"].expected
            raise ValueError(f"expected {expected}; leave it out for the whole outbox")
        return value

    @model_validator(mode="after")
    def _check_login(self) -> Self:
        check_login(self, "username", "tls_enabled")
        return self

    def sink(self, *, source: str, outbox: str, tag: str = "") -> OutboxSinkSettings:
        """Return the settings of the sink that delivers the messages of `outbox`.

        Args:
            source: The name of the source that captures the outbox's table.
            outbox: The outbox's name, as in `tide.outboxes`.
            tag: Differs for each outbox of this name, in other databases too.
        """
        return OutboxSinkSettings(
            type="nats",
            source=source,
            tables=(qualified_name("tide", f"outbox_{outbox}"),),
            actions=("insert",),
            outbox=OutboxForm(outbox, self.format, self.group_by, tag, self.key_scope),
            url=self.url,
            subject=self.subject,
            route=self.route,
            stream=self.stream,
            credentials_file=_path(self.credentials_file),
            nkey_seed=self.nkey_seed,
            token=self.token,
            user=self.username,
            password=self.password,
            tls=self.tls_enabled,
            tls_ca_cert=_path(self.tls_ca_cert),
            tls_cert=_path(self.tls_cert),
            tls_key=_path(self.tls_key),
            batch_size=self.batch_size,
        )


def read(config: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> RelayPipeline:
    """Return a pipeline's config, checked; raises `PipelineError` with all its mistakes.

    `config` is the JSON object of `tide.relay_set_outbox`; `environ` gives `${env:NAME}`.
    """
    config = without_nulls(config)
    try:
        resolved = resolve(config, environ)
    except UnresolvedError as error:
        raise PipelineError(
            "unresolved_reference",
            [f"{dotted(error.path)}: {error}"],
            "Correct it where the relay runs, or set the pipeline's config again.",
        ) from None
    try:
        return RelayPipeline.model_validate(_typed(config, resolved))
    except ValidationError as error:
        problems = [
            explanation(config, e, RelayPipeline.model_fields)
            for e in error.errors(include_url=False)
        ]
        remedy = "Set it again by `select tide.relay_set_outbox(…)`."
        raise PipelineError("invalid_config", problems, remedy) from None


def without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the keys that are null, at every depth."""
    return {key: _without_nulls(value) for key, value in config.items() if value is not None}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_nulls(value)
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def paused_sink(
    config: Mapping[str, Any], environ: Mapping[str, str], *, source: str, outbox: str
) -> OutboxSinkSettings | None:
    """Return a sink for a pipeline that can't run: its messages wait, and it never connects.

    Messages are routed before they wait: None where the pipeline's `route` can't be used.
    """
    kept = {key: value for key, value in without_nulls(config).items() if key == "route"}
    anywhere = {"sink_type": "nats", "url": "nats://localhost:4222"}
    try:
        pipeline = RelayPipeline.model_validate(anywhere | resolve(kept, environ))
    except (UnresolvedError, ValidationError):
        return None
    return pipeline.sink(source=source, outbox=outbox)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _checked_route(route: Any) -> Any:
    return check_route(
        route, lambda text: SubjectTemplate.parse(text, outbox=_ANY_OUTBOX), NOT_IN_SUBJECT
    )


def _typed(config: Mapping[str, Any], resolved: dict[str, Any]) -> dict[str, Any]:
    """Return the config with numbers and booleans that references gave as text."""
    typed = dict(resolved)
    if "start" in config:  # SQL reads it too, and resolves no reference
        typed["start"] = config["start"]
    text = resolved.get("batch_size")
    if isinstance(text, str) and has_reference(config["batch_size"]) and text.strip().isdecimal():
        typed["batch_size"] = int(text)
    text = resolved.get("tls_enabled")
    if isinstance(text, str) and has_reference(config["tls_enabled"]):
        typed["tls_enabled"] = {"true": True, "false": False}.get(text.strip().lower(), text)
    return typed
