"""The config of a relay pipeline: its keys, what is wrong with one, and the NATS sink that it makes.

`read` takes the config as `tide.relays` keeps it, resolves what it refers to, and gives a
`RelayPipeline`; its `sink` is what the relay runs. What an error shows is the config as it was set,
never what a reference gave and never a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    StrictBool,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from penstock.config.nats import Format, KeyScope, NatsSinkConfig, OutboxForm, check_login
from penstock.config.settings import NatsSinkSettings
from penstock.config.transforms import ROUTE_KINDS, RouteSettings, check_route
from penstock.core.errors import PipelineError
from penstock.core.redact import MASK, redact_url
from penstock.core.subject import SubjectTemplate
from penstock.core.tables import qualified_name
from penstock.core.text import Path as Place
from penstock.core.text import dotted, nearest
from penstock.outbox.secrets import UnresolvedError, has_reference, resolve

DEFAULT_SUBJECT: Final = "{stream_table}.{op}"
_GROUP_BY: Final = re.compile(r"none\Z|(?:payload|header)\..+\Z", re.S)
_NO_SUBJECT: Final = re.compile(r"[\x00-\x20\x7f*>]")
_CONTENT: Final = re.compile(r"\n|-BEGIN")
_SECRETS: Final = frozenset({"password", "token", "nkey_seed"})
_SHOWN: Final = 100
_ANY_OUTBOX: Final = "outbox"

_KEYS: Final = {"user": "username", "tls": "tls_enabled"}
"""Keys of a NATS sink that a pipeline's config calls otherwise."""

_EXPECTED: Final = {
    "sink_type": "'nats'",
    "url": "nats://host:port or tls://host:port, several separated by commas",
    "subject": "a subject with {stream_table} {op} {outbox_id} {payload.<field>} {header.<name>}",
    "stream": "the name of a stream: letters, digits, '-' and '_'",
    "credentials_file": "the path of a file that `nsc generate creds` wrote",
    "nkey_seed": "a seed (SU…), or the path of a file that holds it",
    "tls_ca_cert": "the path of a PEM file",
    "tls_cert": "the path of a PEM file",
    "tls_key": "the path of a PEM file",
    "tls_enabled": "true or false",
    "batch_size": "a number from 1 to 1000",
    "format": "'plain', 'envelope', 'cloudevents' or 'debezium'",
    "start": "'beginning' or 'end'",
    "route": 'a list of rules {"when": …, "to": …}',
    "group_by": "'payload.<field>', 'header.<name>' or 'none'",
    "key_scope": "'outbox' or 'stream'",
}


class OutboxSinkSettings(NatsSinkSettings):
    """The NATS sink that a relay pipeline makes: a sink whose messages are those of an outbox."""

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
        """Return what the pipeline's config calls the setting `key`, as a text quotes it."""
        return super().setting(_KEYS.get(key, key))

    def subject_template(self, text: str) -> SubjectTemplate:
        """Return a template that is read with the variables of an outbox."""
        return SubjectTemplate.parse(text, outbox=self.outbox.name)


class RelayPipeline(BaseModel):
    """The config of a pipeline, checked and with its references resolved; the keys of the issue."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    sink_type: Literal["nats"]
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
    batch_size: Annotated[StrictInt, Field(ge=1, le=1000)] = 100
    """How many messages of one group go at once to a stream that takes atomic batches."""
    format: Format = "plain"
    start: Literal["beginning", "end"] = "beginning"
    """Where a new pipeline starts: at the oldest message that is kept, or at the next one."""
    route: RouteSettings | None = None
    """Rules that choose the subject; `subject` is for what none of them matches."""
    group_by: str | None = None
    """What messages keep their order by: None the whole outbox, `none` nothing."""
    key_scope: KeyScope = "outbox"
    """Within what a dedup key is one message: its outbox, or the stream, for all who publish there."""

    @field_validator("url", "stream")
    @classmethod
    def _check_with_sink(cls, value: str | None, info: Any) -> str | None:
        if value is not None:
            try:
                NatsSinkConfig.model_validate({info.field_name: value})
            except ValidationError as error:
                raise ValueError(_message(error.errors(include_url=False)[0])) from None
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
        # An error about a file shows its path, and this is no path: it may be a private key.
        if text is not None and info.field_name != "nkey_seed" and _CONTENT.search(text):
            raise ValueError("expected the path of a file, not what is in it")
        return value

    @field_validator("route", mode="before")
    @classmethod
    def _check_rules(cls, route: Any) -> Any:
        if not isinstance(route, list | tuple):
            raise ValueError(f"expected {_EXPECTED['route']}; leave it out for none")
        return route

    @field_validator("route")
    @classmethod
    def _check_route(cls, route: Any) -> Any:
        return _checked_route(route)

    @field_validator("group_by")
    @classmethod
    def _check_group_by(cls, value: str | None) -> str | None:
        if value is not None and not _GROUP_BY.match(value):
            raise ValueError(f"expected {_EXPECTED['group_by']}; leave it out for the whole outbox")
        return value

    @model_validator(mode="after")
    def _check_login(self) -> Self:
        check_login(self, "username", "tls_enabled")
        return self

    def sink(self, *, source: str, outbox: str, tag: str = "") -> OutboxSinkSettings:
        """Return the settings of the sink that delivers the messages of `outbox`.

        Args:
            source: The name of the source that captures the outbox's table.
            outbox: The outbox's name, as `tide.outbox_create` was given it.
            tag: What differs for each outbox of its name, as in other databases.
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
    """Return a pipeline's config, checked; raises `PipelineError` with all that is wrong in it.

    `config` is the JSON object of `tide.relay_set_outbox`; `environ` gives `${env:NAME}`.
    """
    config = without_nulls(config)
    try:
        resolved = resolve(config, environ)
    except UnresolvedError as error:
        raise PipelineError(
            "unresolved_reference",
            [f"{dotted(error.place)}: {error}"],
            "Mend it where the relay runs, or set the pipeline's config anew.",
        ) from None
    try:
        return RelayPipeline.model_validate(_typed(config, resolved))
    except ValidationError as error:
        problems = [_explain(config, e) for e in error.errors(include_url=False)]
        remedy = "Set it anew by `select tide.relay_set_outbox(…)`."
        raise PipelineError("invalid_config", problems, remedy) from None


def without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in which what is null is as if it was not given, at every depth."""
    return {key: _given(value) for key, value in config.items() if value is not None}


def _given(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_nulls(value)
    return [_given(item) for item in value] if isinstance(value, list | tuple) else value


def held(
    config: Mapping[str, Any], environ: Mapping[str, str], *, source: str, outbox: str
) -> OutboxSinkSettings | None:
    """Return a sink for a pipeline that can't run: it keeps the messages, and nothing connects it.

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
        route, lambda text: SubjectTemplate.parse(text, outbox=_ANY_OUTBOX), _NO_SUBJECT
    )


def _typed(config: Mapping[str, Any], resolved: dict[str, Any]) -> dict[str, Any]:
    """Return the config with numbers and booleans that references gave as text."""
    typed = dict(resolved)
    if "start" in config:  # judged in SQL too, where nothing is resolved
        typed["start"] = config["start"]
    text = resolved.get("batch_size")
    if isinstance(text, str) and has_reference(config["batch_size"]) and text.strip().isdecimal():
        typed["batch_size"] = int(text)
    text = resolved.get("tls_enabled")
    if isinstance(text, str) and has_reference(config["tls_enabled"]):
        typed["tls_enabled"] = {"true": True, "false": False}.get(text.strip().lower(), text)
    return typed


def _explain(config: Mapping[str, Any], error: ErrorDetails) -> str:
    """Return what is wrong: the key, the value as it was set, what is expected."""
    place: Place = tuple(p for p in error["loc"] if p not in ROUTE_KINDS)
    if not place:
        return _message(error)
    key, kind, where = str(place[0]), error["type"], dotted(place)
    if kind == "extra_forbidden":
        known = list(RelayPipeline.model_fields) if len(place) == 1 else ["when", "to"]
        unknown = str(place[-1])
        return f"{where}: unknown key{nearest(unknown, known)}; expected one of: {', '.join(known)}"
    expected = _EXPECTED.get(key, "a string")
    if kind == "missing" and len(place) == 1:
        return f"{where}: missing; expected {expected}"
    given: Any = config
    for step in place:
        try:
            given = given[step]
        except (LookupError, TypeError):  # the lacking key of a rule
            return f"{where}: missing; expected {expected}"
    if has_reference(given):
        return f"{where}: {_shown(key, given)} gives what can't be used: expected {expected}"
    if kind == "value_error":
        message = _message(error)
        shown = _shown(key, given)
        return f"{where}: {message}" if shown in message else f"{where}: {message} (got {shown})"
    hint = ""
    if kind == "literal_error":
        field = RelayPipeline.model_fields[key]
        hint = nearest(given, get_args(field.annotation))
    return f"{where}: expected {expected}, got {_shown(key, given)}{hint}"


def _message(error: ErrorDetails) -> str:
    return error["msg"].removeprefix("Value error, ")


def _shown(key: str, value: Any) -> str:
    """Return a value as an error may show it."""
    if isinstance(value, list | tuple | Mapping):
        return "a list" if isinstance(value, list | tuple) else "an object"
    if key in _SECRETS and not has_reference(value):
        return MASK
    if isinstance(value, str):
        text = redact_url(value) if key == "url" else value
        # What is no path, but a file's content, may be a secret.
        if key in _SECRETS or _CONTENT.search(text):
            text = MASK if _CONTENT.search(text) else _masked(text)
        return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
    return orjson.dumps(value).decode()


def _masked(text: str) -> str:
    """Return a secret's text with all but its references masked."""
    references = re.findall(r"\$\{[A-Za-z_]+:[^{}]*\}", text)
    return "".join(references) if "".join(references) == text else MASK
