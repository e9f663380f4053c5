"""What goes into and comes out of consumers, and what may go wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, ClassVar, NamedTuple

from penstock.config.consumers import ConsumerSettings, ConsumerType
from penstock.core.errors import PenstockError
from penstock.core.message import Position


class RewindEffect(NamedTuple):
    """What a rewind does to messages.

    Attributes:
        skipped: How many of those that are not acked lie before its place, and are not delivered.
        again: How many of those that were passed lie behind it, and are delivered again.
        exact: Whether all were counted: of very many only the first are.
    """

    skipped: int
    again: int
    exact: bool


class ConsumerError(PenstockError):
    """A request cannot be served; the text names the reason, the value and the remedy.

    `field` is the setting at fault, which the text begins with, or empty; `reason` is the text without.
    """

    _code: ClassVar[str]

    def __init_subclass__(cls, code: str) -> None:
        cls._code = code

    def __init__(self, reason: str, field: str = "") -> None:
        super().__init__(self._code, f"{field}: {reason}" if field else reason)
        self.reason = reason
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.field)


class UnknownConsumer(ConsumerError, code="no_consumer"):  # noqa: N818 - it reads better where it is caught
    """There is no consumer of that name."""


class UnknownStream(ConsumerError, code="no_stream"):  # noqa: N818 - as above
    """There is no stream of that name."""


class UnknownDeadLetter(ConsumerError, code="no_dead_letter"):  # noqa: N818 - as above
    """The consumer has no dead letter of that number."""


class NameTaken(ConsumerError, code="name_taken"):  # noqa: N818 - as above
    """Another consumer or a stream has that name."""


class WrongSetting(ConsumerError, code="wrong_setting"):  # noqa: N818 - as above
    """A setting does not go with the stream."""


class Refused(ConsumerError, code="refused"):  # noqa: N818 - as above
    """The request makes no sense for this consumer."""


class TooManyWaiting(ConsumerError, code="too_many_waiting"):  # noqa: N818 - as above
    """As many receives wait as the consumer's `max_waiting` allows."""


class StoreUnavailable(ConsumerError, code="store_unavailable"):  # noqa: N818 - as above
    """The store did not answer. What the request would have done may have been done, or not."""


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """A consumer to be made; `settings` are those of its type, unchecked."""

    name: str
    stream: str
    type: ConsumerType = "pull"
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """A consumer; `own` where it is its stream's own group, `disabled` is why nothing is delivered.

    It is `paused` where someone has asked for that; then no receive gets a message either.
    """

    id: int
    name: str
    stream: str
    type: ConsumerType
    own: bool
    settings: ConsumerSettings
    disabled: str | None
    created_at: datetime
    disabled_at: datetime | None = None
    paused: bool = False
    uuid: str = field(kw_only=True)
    """What users know it by, beside its name."""


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream; `head` is the newest position that is there to be read, None before the first."""

    id: int
    name: str
    kind: str
    source: str
    retention: timedelta | None
    segments: int
    head: Position | None
    created_at: datetime
    uuid: str


class Delivery(NamedTuple):
    """A message handed out: `message` is the whole JSON, `deliver_count` 1 at first.

    `position` is the stream's own, unique among its messages
    (`penstock.streams.records.stream_idx`). The positions of dead letters and of a `ConsumerMessage`
    have the stream's LSN and the message's `commit_idx`; a stream's head is as the metadata has it.
    """

    token: str
    deliver_count: int
    message: bytes
    position: Position


class Received(NamedTuple):
    """What a receive gives; the numbers are of messages not yet handed out, and not yet acked."""

    deliveries: list[Delivery]
    num_pending: int
    num_ack_pending: int


class Outcome(NamedTuple):
    """How many tokens were taken, and which not, with `expired` or `unknown`.

    expired: another worker holds the message now. unknown: no token of this consumer, or from
    before a rewind.
    """

    done: int
    refused: list[tuple[str, str]]


class ConsumerMessage(NamedTuple):
    """A message that is not taken: how often it was handed out, and until when it is out, if it is."""

    position: Position
    deliver_count: int
    message: bytes
    until: datetime | None


@dataclass(frozen=True, slots=True)
class ConsumerLetter:
    """A dead letter of a consumer; `code` is `max_deliver`, `message` the JSON text."""

    id: int
    position: Position
    deliver_count: int
    code: str
    reason: str
    message: str
    at: datetime
    replayed_at: datetime | None
