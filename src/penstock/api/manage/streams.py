"""`/v1/streams`: the streams, and their messages by position, by time and by key."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import AwareDatetime, BeforeValidator, Field, TypeAdapter, ValidationError

from penstock.api.manage.pages import Limit, after, cursor_of, paged
from penstock.api.manage.pages import Paged as PagedQuery
from penstock.api.problems import documented, wrong
from penstock.api.requests import Json, json_answer
from penstock.api.schemas import (
    StreamBody,
    StreamMessages,
    StreamsBody,
    iso_time,
    position_body,
    stream_body,
)
from penstock.core.message import Position
from penstock.core.tables import TablePattern
from penstock.streams.consumers.registry import Consumers
from penstock.streams.consumers.search import Found, Key
from penstock.streams.consumers.types import UnknownStream
from penstock.streams.records import START

_STREAMS: Final = "/v1/streams"
_MAX_LSN: Final = 2**63 - 1
_MAX_IDX: Final = 2**53 - 1
_TIME: Final[TypeAdapter[datetime]] = TypeAdapter(
    Annotated[AwareDatetime, BeforeValidator(iso_time)]
)


class _Search(Limit):
    cursor: str | None = Field(None, description="The `next` of the page before.")
    after: str | None = Field(None, description="Behind this position, as `23876608:0`.")
    since: str | None = Field(
        None, description="Committed at this time or later, as `2026-01-31T12:00:00Z`."
    )
    table: str | None = Field(None, description="The table that `key` is of, as `public.orders`.")
    key: str | None = Field(
        None,
        description="The primary key of a row: its value, or a JSON array of several. Of a stream "
        "with `group_by`, the values of `columns`.",
    )
    columns: str | None = Field(
        None, description="The columns of the stream's `group_by`, separated by commas."
    )


def add(api: APIRouter, consumers: Consumers) -> None:
    """Add the endpoints of streams to `api`."""

    @api.get(_STREAMS, response_model=StreamsBody, summary="List the streams")
    async def list_streams(query: Annotated[PagedQuery, Query()]) -> Response:
        page, last = paged(await consumers.streams(), query, lambda info: info.name)
        return json_answer({"data": [stream_body(info) for info in page], "next": last})

    @api.get(f"{_STREAMS}/{{stream}}", response_model=StreamBody, summary="Show a stream")
    async def show_stream(stream: str) -> Response:
        for info in await consumers.streams():
            if stream in (info.name, info.uuid):
                return json_answer(stream_body(info))
        raise UnknownStream(f"There is no stream {stream!r}.")


def add_search(api: APIRouter, consumers: Consumers) -> None:
    """Add the endpoint that finds messages of a stream."""

    @api.get(
        f"{_STREAMS}/{{stream}}/messages",
        response_model=StreamMessages,
        summary="Find messages of a stream",
        description="By position, by time or by key; none is taken. Without any of these from the "
        "first one on. Of a stream of kind `rows` the newest version of each row is there.",
        responses=documented(),
    )
    async def messages(stream: str, search: Annotated[_Search, Query()]) -> Response:
        given = [name for name in ("after", "since", "cursor") if getattr(search, name) is not None]
        if len(given) > 1:
            raise wrong(given[1], f"{given[0]} is given too: one of them is where to begin")
        key = _key(search)
        position = None if search.after is None else _position(search.after)
        time = None if search.since is None else _time(search.since)
        begin = after(search.cursor, int, int) or START
        found = await consumers.search(_storable("stream", stream))
        if position is not None:
            begin = found.behind(position)
        if time is not None:
            begin = await found.at_time(time)
        listed = await found.page((begin[0], begin[1]), search.limit + 1, key)
        page = listed[: search.limit]
        last = cursor_of(*page[-1].at) if len(listed) > len(page) else None
        data = b",".join([_message(message) for message in page])
        return Json(b'{"data":[%b],"next":%b}' % (data, orjson.dumps(last)))


def _message(found: Found) -> bytes:
    head = orjson.dumps({"position": position_body(found.position)})
    return head[:-1] + b"," + found.message[1:]


def _storable(field: str, text: str) -> str:
    if "\0" in text:
        raise wrong(field, "it has a NUL character, which no name has")
    return text


def _position(text: str) -> Position:
    lsn, colon, idx = text.partition(":")
    try:
        if not colon or not text.isascii() or len(text) > 60:
            raise ValueError
        position = Position(int(lsn), int(idx))
    except ValueError:
        position = None
    if position is None or abs(position.lsn) > _MAX_LSN or not 0 <= position.idx <= _MAX_IDX:
        raise wrong("after", "expected a position: commit_lsn:commit_idx, as in 23876608:0")
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
        if search.table is not None or search.columns is not None:
            raise wrong("key", "missing: table and columns say what a key is of")
        return None
    if search.table is None:
        raise wrong("table", "missing: the table that the key is of, as in public.orders")
    try:
        table = TablePattern.parse(_storable("table", search.table))
    except ValueError as error:
        raise wrong("table", str(error)) from None
    if table.table is None:
        raise wrong("table", "expected one table, as in public.orders")
    columns = () if search.columns is None else tuple(search.columns.split(","))
    return Key(table.schema, table.table, _values(_storable("key", search.key)), columns)


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
