"""`/v1/streams`: the streams."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Query
from fastapi.responses import Response

from penstock.api.manage.endpoints import AppConsumers, new_router
from penstock.api.manage.pages import Paged as PagedQuery
from penstock.api.manage.pages import paged
from penstock.api.requests import json_answer
from penstock.api.schemas import StreamBody, StreamsBody, stream_body
from penstock.streams.consumers.types import UnknownStream

_STREAMS: Final = "/v1/streams"

api = new_router()


@api.get(_STREAMS, response_model=StreamsBody, summary="List the streams")
async def list_streams(consumers: AppConsumers, query: Annotated[PagedQuery, Query()]) -> Response:
    page, last = paged(await consumers.streams(), query, lambda info: info.name)
    return json_answer({"data": [stream_body(info) for info in page], "next": last})


@api.get(f"{_STREAMS}/{{stream}}", response_model=StreamBody, summary="Show a stream")
async def show_stream(consumers: AppConsumers, stream: str) -> Response:
    for info in await consumers.streams():
        if stream in (info.name, info.uuid):
            return json_answer(stream_body(info))
    raise UnknownStream(f"There is no stream {stream!r}.")
