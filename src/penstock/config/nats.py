"""The settings of a NATS sink: where the servers are, how to log in, what to publish to.

Pickles, because it travels to the executors; its repr and its errors never show a secret.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from penstock.config.deletes import check_deletes
from penstock.config.strict import Flag, Number, StrictModel, Whole
from penstock.core.subject import DEFAULT_SUBJECT, ROWS_SUBJECT, SubjectTemplate

_USERINFO = re.compile(r"((?:^|,)\s*(?:\w+://)?)[^,]*@")
_SEED = re.compile(r"S[UOANC][A-Z2-7]{56}")
_LOGIN = ("password", "token", "credentials_file", "nkey_seed")
_STREAM_FORBIDDEN = re.compile(r"[\x00-\x20\x7f.*>/\\]")


Format = Literal["plain", "envelope", "cloudevents", "debezium"]
KeyScope = Literal["outbox", "stream"]


@dataclass(frozen=True, slots=True)
class OutboxForm:
    """How messages are made of the rows of the outbox `name`.

    `group_by` is what messages keep their order by: None the whole outbox, `none` nothing,
    `payload.<field>` and `header.<name>` a value. `tag` differs from that of all others of its name;
    with the `key_scope` `stream` a dedup key is sent as it was given, so that outboxes can share it.
    """

    name: str
    format: Format = "plain"
    group_by: str | None = None
    tag: str = ""
    key_scope: KeyScope = "outbox"

    @property
    def identity(self) -> str:
        """What the ids of its messages begin with; a name has neither `/` nor `:` nor `#`."""
        return f"{self.name}/{self.tag}" if self.tag else self.name

    def shares(self, key: str) -> bool:
        """Return whether a message of this id may be another publisher's, as the user has set it."""
        return self.key_scope == "stream" and not key.startswith(f"{self.identity}#")


@dataclass(frozen=True, slots=True)
class Server:
    """One server of the `url` list; login data in a URL goes before the settings of the sink."""

    host: str
    port: int
    tls: bool
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'nats'}://{host}:{self.port}"


def _check_group_by(value: list[str] | None) -> list[str] | None:
    if value is not None and (not value or len(set(value)) < len(value) or "" in value):
        raise ValueError(
            f"{value!r}: name one or more columns, each once (or leave `group_by` out, "
            "and the primary key is the unit of order)"
        )
    return value


GroupBy = Annotated[list[str] | None, AfterValidator(_check_group_by)]


class NatsSinkConfig(StrictModel):
    """Settings of a NATS sink; the names are nats-py's own where it has the setting."""

    url: str = Field("nats://localhost:4222", repr=False)
    """Servers of one cluster, separated by commas, `nats://` or `tls://`."""
    kind: Literal["changes", "rows"] = "changes"
    """Every change with its old values, or the newest version of each row alone, whose messages have
    neither `changes` nor `action`."""
    deletes: Flag = False
    """Whether hard deletes are sent in kind rows, with `"action": "delete"`."""
    subject: str = DEFAULT_SUBJECT
    """Subject template, see `penstock.core.subject`; without `{action}` in kind rows if unset."""
    stream: str | None = None
    """Refuse to publish to another stream than this one; found from the subject if unset."""
    group_by: GroupBy = None
    """Columns that make the unit of order; the primary key if unset."""
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
    ack_timeout: Number = Field(5.0, gt=0, le=300)
    """Seconds to wait for an ack before the connection is given up and the message sent again."""
    batch_size: Whole = Field(1, ge=1, le=1000)
    """How many messages of one group go at once to a stream that takes atomic batches; 1 is none."""

    @model_validator(mode="before")
    @classmethod
    def _choose_subject(cls, given: Any) -> Any:
        # Versions of a row are no actions.
        if isinstance(given, dict) and given.get("kind") == "rows" and "subject" not in given:
            return {**given, "subject": ROWS_SUBJECT}
        return given

    @field_validator("deletes")
    @classmethod
    def _check_deletes(cls, value: bool, info: ValidationInfo) -> bool:
        return check_deletes(value, info.data.get("kind"), info.data.get("actions", ()))

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        _servers(value)
        return value

    @field_validator("subject")
    @classmethod
    def _check_subject(cls, value: str) -> str:
        SubjectTemplate.parse(value)
        return value

    @field_validator("stream")
    @classmethod
    def _check_stream(cls, value: str | None) -> str | None:
        if value is not None and (not value or _STREAM_FORBIDDEN.search(value)):
            raise ValueError(
                f"{value!r} cannot name a stream: use letters, digits, '-' and '_' "
                "(or leave `stream` out, and it is found from the subject)"
            )
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
    def servers(self) -> list[Server]:
        """The servers of `url`, in its order."""
        return _servers(self.url)

    @property
    def template(self) -> SubjectTemplate:
        """The subject template, read."""
        return self.subject_template(self.subject)

    def setting(self, key: str) -> str:
        """Return what the user calls the setting `key`, as a text quotes it."""
        return f"`{key}`"

    def subject_template(self, text: str) -> SubjectTemplate:
        """Return a template that is read with the variables of this sink's messages."""
        return SubjectTemplate.parse(text)

    @property
    def form(self) -> OutboxForm | None:
        """How messages are made of an outbox's rows; None is the envelope of a change."""
        return None

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
        if len(lacking := {one, other} - given) == 1:
            raise ValueError(f"{lacking.pop()} is missing: {one} and {other} go together")
    if getattr(settings, tls) is False and given & {"tls_ca_cert", "tls_cert"}:
        raise ValueError(f"{tls} is false, but tls_ca_cert or tls_cert is set: remove one of them")


def redact(url: str) -> str:
    """Return a URL list with the login data taken out of it."""
    return _USERINFO.sub(r"\1", url)


def _servers(urls: str) -> list[Server]:
    # Where the list does not parse, no part of it is shown that a password could have spilt into.
    shown = "url" if "@" in urls else repr(urls)
    servers = [_server(part.strip(), shown) for part in urls.split(",") if part.strip()]
    if not servers:
        raise ValueError("url is empty (expected nats://host:port, several separated by commas)")
    return servers


def _server(url: str, shown: str) -> Server:
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
    return Server(
        host,
        port or 4222,
        parts.scheme == "tls",
        user if password is not None else None,
        password,
        user if password is None else None,
    )
