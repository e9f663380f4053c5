"""The shapes of requests and answers, for OpenAPI and, where a model is validated, for that too."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, Literal

from fastapi.security import HTTPBearer
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
)
from pydantic.json_schema import SkipJsonSchema

from penstock.config.consumers import ConsumerSettings, WebhookKeys, storable
from penstock.config.strict import Name, Whole
from penstock.core.message import Position
from penstock.core.record_forms import RECORDS
from penstock.streams.consumers.facts import ConsumerFacts, facts_body
from penstock.streams.consumers.types import ConsumerInfo, StreamInfo

BEARER: Final = HTTPBearer(
    auto_error=False, description="A token of `penstock token create`, as it was shown: `pst_…`."
)
_MAX_LSN: Final = 2**63 - 1
_MAX_IDX: Final = 2**53 - 1  # each has 2**10 places in a stream


def iso_time(value: Any) -> Any:
    """Return what is a time in ISO 8601; raises `ValueError` for all else."""
    # pydantic also takes seconds since 1970.
    if not isinstance(value, str) or value[4:5] != "-":
        raise ValueError("not a time")
    return value


class PositionBody(BaseModel):
    """A message's place in its stream: its commit_lsn and commit_idx.

    LSNs from before the source was replaced by another cluster or slot are 0 or negative.
    """

    model_config = ConfigDict(extra="forbid")

    lsn: Whole = Field(ge=-_MAX_LSN, le=_MAX_LSN)
    idx: Whole = Field(ge=0, le=_MAX_IDX)


class Page(BaseModel):
    """A page of a list; `next` is the cursor of the page behind it."""

    next: str | None = Field(None, description="The `cursor` of the next page; null at the end.")


class _Message(BaseModel):
    record: dict[str, Any]
    changes: dict[str, Any] | None = Field(None, description="Not in streams of kind `rows`.")
    action: str | None = Field(None, description="In streams of kind `rows` only where `delete`.")
    metadata: dict[str, Any]


class _Delivered(_Message):
    ack_token: str
    deliver_count: int


class _Info(BaseModel):
    num_pending: int = Field(description="Messages not handed out.")
    num_ack_pending: int = Field(description="Messages out, or waiting for their retry.")


class _Received(BaseModel):
    paused: SkipJsonSchema[None] | str = Field(
        None, description="Who has paused the consumer; left out where it is not paused."
    )


class ReceivedMessages(_Received):
    """Messages of a consumer."""

    data: list[_Delivered]
    info: _Info


class _Identified(BaseModel):
    ack_id: str
    data: _Message


class ReceivedIds(_Received):
    """Messages of a stream's own consumer group."""

    data: list[_Identified]


class DryRun(BaseModel):
    """Whether a change is only looked at."""

    model_config = ConfigDict(extra="forbid")

    dry_run: bool = Field(False, description="Only show what would be done.")


class Success(BaseModel):
    """All was done."""

    success: Literal[True]


class _ConsumerMessage(_Message):
    position: PositionBody
    deliver_count: int
    held_until: datetime | None = Field(description="When it is available again, if it is out.")


class ConsumerMessages(BaseModel):
    """Messages as they are, none taken."""

    data: list[_ConsumerMessage]


class StreamMessage(_Message):
    """A message of a stream."""

    position: PositionBody


class StreamMessages(Page):
    """Messages of a stream, in its order."""

    data: list[StreamMessage]
    looked_at: int = Field(description="How many messages this page was found among.")
    failures: int = Field(description="For how many of these the filter can't be evaluated.")
    failure: str | None = Field(description="Why, of the first of them.")


class _Letter(BaseModel):
    id: int
    position: PositionBody
    deliver_count: int
    code: str
    reason: str
    at: datetime
    replayed_at: datetime | None
    message: _Message


class Letters(Page):
    """Dead letters, the oldest first."""

    data: list[_Letter]


class LastError(BaseModel):
    """Why a delivery failed last."""

    at: datetime
    status: int | None = Field(description="The HTTP status that a webhook's endpoint answered.")
    reason: str


class ConsumerStatus(BaseModel):
    """How a consumer is, whichever processes serve it."""

    state: Literal["ok", "paused", "disabled", "deliveries_fail", "message_fails"]
    lag_messages: int = Field(description="Messages that are not acked yet.")
    lag_seconds: float = Field(description="Since the oldest of these was committed.")
    in_flight: int = Field(description="Messages handed out, and neither acked nor nacked.")
    waiting_for_retry: int
    redeliveries: int = Field(description="Deliveries that were not their message's first.")
    failures: int = Field(description="Deliveries that were nacked, or not acked in time.")
    dead_letters: int = Field(description="Dead letters that were not replayed.")
    last_error: LastError | None
    failing_since: datetime | None = Field(description="Since when none was acked and some failed.")
    disabled_since: datetime | None


class ConsumerBody(BaseModel):
    """A consumer, with all of its settings beside these members."""

    model_config = ConfigDict(extra="allow")

    id: str = Field(description="A UUID.")
    name: str
    stream: str
    type: Literal["pull", "webhook"]
    own: bool = Field(description="Whether it is its stream's own consumer group.")
    disabled: str | None = Field(
        description="Why nothing is delivered: a webhook's endpoint refused all, or who paused it."
    )
    created_at: datetime
    status: ConsumerStatus | None = Field(
        description="Null where the store did not answer, or was not asked."
    )


class ConsumersBody(Page):
    """Consumers by name."""

    data: list[ConsumerBody]


class StreamBody(BaseModel):
    """A stream."""

    id: str = Field(description="A UUID.")
    name: str
    kind: Literal["changes", "rows"]
    source: str
    retention_ms: int | None = Field(description="None where each row's newest version stays.")
    segments: int
    head: PositionBody | None = Field(description="The newest message that can be received.")
    created_at: datetime


class StreamsBody(Page):
    """Streams by name."""

    data: list[StreamBody]


class _Named(BaseModel):
    name: Name
    stream: Annotated[str, Field(min_length=1), AfterValidator(storable)] = Field(
        RECORDS, description="By default the records of API syncs."
    )


class NewPull(ConsumerSettings, _Named):
    """A consumer whose workers receive over HTTP."""

    type: Literal["pull"] = "pull"


class NewWebhook(WebhookKeys, _Named):
    """A consumer whose messages are posted to a URL, its own or that of a target of type http."""

    type: Literal["webhook"]
    via: SkipJsonSchema[None] = None  # a target's: the API takes none


def _type(value: Any) -> str:
    kind = value.get("type", "pull") if isinstance(value, dict) else "pull"
    return kind if isinstance(kind, str) else "pull"


NewConsumer = Annotated[
    Annotated[NewPull, Tag("pull")] | Annotated[NewWebhook, Tag("webhook")], Discriminator(_type)
]
NEW_CONSUMER: Final[TypeAdapter[NewPull | NewWebhook]] = TypeAdapter(NewConsumer)


class Rewind(BaseModel):
    """Where to go on: the first message, the next new one, a position, or a commit time."""

    model_config = ConfigDict(extra="forbid")

    to: Literal["all", "new"] | PositionBody | Annotated[AwareDatetime, BeforeValidator(iso_time)]


class RewindEffectBody(BaseModel):
    """What a rewind would do, in words."""

    consequences: list[str]
    losses: list[str] = Field(description="Those of them by which messages are skipped.")
    dry_run: Literal[True]


def consumer_body(info: ConsumerInfo, facts: ConsumerFacts | None) -> dict[str, Any]:
    """Return what the API shows of a consumer: no secret."""
    return {
        "id": info.uuid,
        "name": info.name,
        "stream": info.stream,
        "type": info.type,
        "own": info.own,
        "disabled": info.disabled,
        "created_at": info.created_at,
        "status": None if facts is None else facts_body(info, facts),
        **info.settings.shown(),
    }


def stream_body(info: StreamInfo) -> dict[str, Any]:
    """Return what the API shows of a stream."""
    return {
        "id": info.uuid,
        "name": info.name,
        "kind": info.kind,
        "source": info.source,
        "retention_ms": info.retention and round(info.retention.total_seconds() * 1000),
        "segments": info.segments,
        "head": info.head and position_body(info.head),
        "created_at": info.created_at,
    }


def position_body(position: Position, base: int = 0) -> dict[str, int]:
    """Return a position's JSON form; `base` is what its LSN has over the source's."""
    return {"lsn": position.lsn - base, "idx": position.idx}
