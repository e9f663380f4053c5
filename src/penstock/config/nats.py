"""The settings of a NATS sink: what it publishes, and to where (`nats_login` has the cluster).

Pickles, because it travels to the executors; its repr and its errors never show a secret.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from penstock.config.deletes import check_deletes
from penstock.config.nats_login import NatsLogin, NatsServer, check_login, redact
from penstock.config.strict import Flag, Number, Whole
from penstock.core.subject import DEFAULT_SUBJECT, ROWS_SUBJECT, SubjectTemplate

__all__ = [
    "Format",
    "GroupBy",
    "KeyScope",
    "NatsServer",
    "NatsSinkConfig",
    "OutboxForm",
    "check_login",
    "redact",
]

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


def _check_group_by(value: list[str] | None) -> list[str] | None:
    if value is not None and (not value or len(set(value)) < len(value) or "" in value):
        raise ValueError(
            f"{value!r}: name one or more columns, each once (or leave `group_by` out, "
            "and the primary key is the unit of order)"
        )
    return value


GroupBy = Annotated[list[str] | None, AfterValidator(_check_group_by)]


class NatsSinkConfig(NatsLogin):
    """Settings of a NATS sink: the cluster, and what is published to it."""

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

    @property
    def template(self) -> SubjectTemplate:
        """The subject template, read."""
        return self.subject_template(self.subject)

    def subject_template(self, text: str) -> SubjectTemplate:
        """Return a template that is read with the variables of this sink's messages."""
        return SubjectTemplate.parse(text)

    @property
    def form(self) -> OutboxForm | None:
        """How messages are made of an outbox's rows; None is the envelope of a change."""
        return None
