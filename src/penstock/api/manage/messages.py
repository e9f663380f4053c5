"""`/v1/streams/{stream}/messages`: a stream's messages, and where one stands with its consumers."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

import orjson
from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from penstock.api.manage.endpoints import AppConsumers, new_router
from penstock.api.manage.pages import Limit, after, cursor_of
from penstock.api.problems import Problem, documented, wrong
from penstock.api.requests import Json, body_of, json_answer, read_object
from penstock.api.schemas import LastError, StreamMessage, StreamMessages, iso_time, position_body
from penstock.config.consumers import Filters, storable
from penstock.core.message import Position
from penstock.core.tables import TablePattern
from penstock.core.text import sentence
from penstock.streams.consumers.browse import END, Criteria, SearchPage, browse, condition
from penstock.streams.consumers.history import ConsumerStanding, history
from penstock.streams.consumers.search import Found, Key, StreamSearch
from penstock.streams.consumers.try_filters import try_filters
from penstock.streams.records import START

_MESSAGES: Final = "/v1/streams/{stream}/messages"
_MAX_LSN: Final = 2**63 - 1
_MAX_IDX: Final = 2**53 - 1
_MOST_TRIED: Final = 100
_PARTS: Final = 1_000
"""How many messages may have been made of one, and share its position."""
_TIME: Final[TypeAdapter[datetime]] = TypeAdapter(
    Annotated[AwareDatetime, BeforeValidator(iso_time)]
)
_Text = Annotated[str, Field(max_length=10_000), AfterValidator(storable)]

api = new_router()


class _Search(Limit):
    cursor: str | None = Field(None, description="The `next` of the page before.")
    order: Literal["oldest", "newest"] = Field("oldest", description="Which ones come first.")
    after: str | None = Field(None, description="Behind this position, as `23876608:0`.")
    since: str | None = Field(
        None, description="Committed at this time or later, as `2026-01-31T12:00:00Z`."
    )
    action: Literal["insert", "update", "delete", "read"] | None = None
    filter: _Text | None = Field(
        None,
        description="Those for which a condition holds, as `record.amount > 100`. A problem has the"
        " `position` of what is wrong in it.",
    )
    table: str | None = Field(
        None, description="Those of this table, as `public.orders`, or of a schema, as `public.*`."
    )
    key: str | None = Field(
        None,
        description="Those of one row of `table`: its primary key's value, or a JSON array of several."
        " Of a stream with `group_by`, the values of `columns`.",
    )
    columns: str | None = Field(
        None, description="The columns of the stream's `group_by`, separated by commas."
    )


class _Look(BaseModel):
    consumer: _Text | None = Field(None, description="How it stands with this one alone, by name.")


class _Letter(BaseModel):
    id: int
    code: str
    reason: str
    at: datetime
    replayed_at: datetime | None


class _Standing(BaseModel):
    """Where a message stands with one consumer."""

    consumer: str
    type: Literal["pull", "webhook"]
    state: Literal["waiting", "in_flight", "retry", "replay", "filtered", "dead", "done"] = Field(
        description="`waiting` for its first delivery; `retry`, waiting for another; `replay`, a dead "
        "letter that is to be delivered again; `done`: acked, or from before where the consumer began."
    )
    deliver_count: int = Field(description="How often it was handed out, as far as that is known.")
    until: datetime | None = Field(
        description="When it is available again, if it is in flight or waits for a retry."
    )
    last_error: LastError | None = Field(description="Why its last delivery failed.")
    dead_letter: _Letter | None


class _WholeMessage(StreamMessage):
    history: list[_Standing] = Field(description="That of the first consumers by name.")
    more_consumers: int = Field(description="How many other consumers the stream has.")


class _Whole(BaseModel):
    """The messages at a position: several where a transform made several of one."""

    messages: list[_WholeMessage]


class _Try(BaseModel):
    """A consumer's `filters`, and messages as it gets them; `action` is insert where it is left out."""

    model_config = ConfigDict(extra="forbid")

    filters: Filters
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=_MOST_TRIED)


class _Verdict(BaseModel):
    """What would become of a message; `why` is null where it is handed out."""

    result: Literal["sent", "dropped", "failed"]
    why: str | None


class _Verdicts(BaseModel):
    """A verdict for each message, in their order."""

    data: list[_Verdict]


@api.post(
    "/v1/streams/{stream}/try-filters",
    response_model=_Verdicts,
    summary="Try a consumer's filters on messages",
    description="What a consumer of the stream with these `filters` would be handed out. Nothing is "
    "delivered, and no consumer need exist.",
    responses=documented(409, 413),
    openapi_extra=body_of(_Try),
)
async def tried(consumers: AppConsumers, stream: str, request: Request) -> Response:
    asked = _Try.model_validate(await read_object(request))
    search = await consumers.search(_storable("stream", stream))
    found = await try_filters(search, asked.filters, asked.messages)
    return json_answer({"data": [each._asdict() for each in found]})


@api.get(
    _MESSAGES,
    response_model=StreamMessages,
    summary="Find messages of a stream",
    description="Those that fit all that is given; none is taken. Of a stream of kind `rows` the "
    "newest version of each row is there. A page may have few messages, or none, and a `next`: the "
    "search goes on there.",
    responses=documented(409),
)
async def messages(
    consumers: AppConsumers, stream: str, search: Annotated[_Search, Query()]
) -> Response:
    newest = search.order == "newest"
    bounds = ("after", "since") if newest else ("after", "since", "cursor")
    given = [name for name in bounds if getattr(search, name) is not None]
    if len(given) > 1:
        raise wrong(given[1], f"{given[0]} is given too: one of them is where to begin")
    key, table = _key(search), _table(search.table)
    position = None if search.after is None else _position(search.after, "after")
    time = None if search.since is None else _time(search.since)
    place = after(search.cursor, int, int)
    found = await consumers.search(_storable("stream", stream))
    low, high = (START.lsn, START.idx), END
    if position is not None:
        low = found.behind(position)
    if time is not None:
        low = await found.at_time(time)
    if place is not None and newest:
        high = place[0], place[1] - 1
    elif place is not None:
        low = place[0], place[1]
    criteria = Criteria(
        key,
        None if key is not None else table,
        search.action,
        await _condition(found, search.filter),
        newest,
    )
    listed = await browse(found, criteria, low, high, search.limit)
    return Json(_page(listed))


@api.get(
    f"{_MESSAGES}/{{position}}",
    response_model=_Whole,
    summary="Show a message, and where it stands",
    description="With its history at the consumers of type `pull` and `webhook`. `position` is as "
    "`23876608:0`.",
    responses=documented(),
)
async def message(
    consumers: AppConsumers, stream: str, position: str, look: Annotated[_Look, Query()]
) -> Response:
    at = _position(position, "position")
    found = await consumers.search(_storable("stream", stream))
    low = found.behind(Position(at.lsn, at.idx - 1))
    high = found.behind(at)
    listed = await browse(found, Criteria(), low, high, _PARTS)
    if not listed.found:
        raise Problem(
            404,
            f"There is no message at {position} of {stream!r}: it never was there, retention has"
            " taken it, or its row has a newer version.",
        )
    known, more = await history(
        consumers, stream, found, [each.at for each in listed.found], look.consumer
    )
    parts = [
        _message(each, {"history": [_standing(of) for of in standings], "more_consumers": more})
        for each, standings in zip(listed.found, known, strict=True)
    ]
    return Json(b'{"messages":[%b]}' % b",".join(parts))


async def _condition(search: StreamSearch, text: str | None) -> Any:
    if text is None or not text.strip():
        return None
    from penstock.expressions.errors import ExpressionError  # noqa: PLC0415 - takes a while

    try:
        return await condition(search, text)
    except ExpressionError as error:
        raise Problem(
            422,
            sentence(f"filter: {error}"),
            [("filter", str(error))],
            more={"position": error.position},
        ) from None


def _page(listed: SearchPage) -> bytes:
    tail = {
        "next": None if listed.end is None else cursor_of(*listed.end),
        "looked_at": listed.looked_at,
        "failures": listed.failures,
        "failure": listed.failure,
    }
    data = b",".join([_message(message, {}) for message in listed.found])
    return b'{"data":[%b],%b' % (data, orjson.dumps(tail)[1:])


def _message(found: Found, more: dict[str, Any]) -> bytes:
    head = orjson.dumps({"position": position_body(found.position), **more})
    return head[:-1] + b"," + found.message[1:]


def _standing(of: ConsumerStanding) -> dict[str, Any]:
    failure = of.failure
    return {
        "consumer": of.consumer,
        "type": of.type,
        "state": of.state,
        "deliver_count": of.deliver_count,
        "until": _from_us(of.until),
        "last_error": failure
        and {"at": _from_us(failure.at), "status": failure.status, "reason": failure.reason},
        "dead_letter": of.letter and of.letter._asdict(),
    }


def _from_us(at: int | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at / 1e6, UTC)


def _storable(field: str, text: str) -> str:
    if "\0" in text:
        raise wrong(field, "it has a NUL character, which no name has")
    return text


def _position(text: str, field: str) -> Position:
    lsn, colon, idx = text.partition(":")
    try:
        if not colon or not text.isascii() or len(text) > 60:
            raise ValueError
        position = Position(int(lsn), int(idx))
    except ValueError:
        position = None
    if position is None or abs(position.lsn) > _MAX_LSN or not 0 <= position.idx <= _MAX_IDX:
        raise wrong(field, "expected a position: commit_lsn:commit_idx, as in 23876608:0")
    return position


def _time(text: str) -> datetime:
    try:
        return _TIME.validate_python(text).astimezone()
    except (ValidationError, OverflowError, ValueError):
        raise wrong(
            "since", "expected a time with its offset, as in 2026-01-31T12:00:00Z"
        ) from None


def _key(search: _Search) -> Key | None:
    if search.key is None:
        if search.columns is not None:
            raise wrong("key", "missing: columns say what a key is of")
        return None
    if search.table is None:
        raise wrong("table", "missing: the table that the key is of, as in public.orders")
    schema, table = _table(search.table) or ("", None)
    if table is None:
        raise wrong("table", "expected one table, as in public.orders")
    columns = () if search.columns is None else tuple(search.columns.split(","))
    return Key(schema, table, _values(_storable("key", search.key)), columns)


def _table(text: str | None) -> tuple[str, str | None] | None:
    if text is None:
        return None
    try:
        found = TablePattern.parse(_storable("table", text))
    except ValueError as error:
        raise wrong("table", str(error)) from None
    return found.schema, found.table


def _values(text: str) -> tuple[bytes, ...]:
    """Return the JSON arrays that a key may stand for: 42 may be a number or a text."""
    try:
        value: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        return (orjson.dumps([text]),)
    if isinstance(value, list):
        return (_compact(text),)
    if isinstance(value, str):
        return (orjson.dumps([value]),)
    return tuple({b"[%b]" % text.strip().encode(), orjson.dumps([text])})


def _compact(text: str) -> bytes:
    """Return a JSON array without blanks; numbers keep their digits only as far as JSON has them."""
    return orjson.dumps(orjson.loads(text))
