"""`/v1/http-consumers`: consumers that are pulled or pushed over HTTP, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

import orjson
from fastapi import Path, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from penstock.api.manage.access import grant_of
from penstock.api.manage.context import actor_of
from penstock.api.manage.endpoints import AppConsumers, new_router
from penstock.api.manage.etags import IF_MATCH, check, etag
from penstock.api.manage.pages import Limit, Paged, after, following
from penstock.api.problems import documented, wrong
from penstock.api.requests import SUCCESS, Json, body_of, inline, json_answer, read_object
from penstock.api.schemas import (
    NEW_CONSUMER,
    ConsumerBody,
    ConsumerMessages,
    ConsumersBody,
    DryRun,
    Letters,
    NewPull,
    NewWebhook,
    Rewind,
    RewindEffectBody,
    Success,
    consumer_body,
    position_body,
)
from penstock.config.consumers import ConsumerSettings, WebhookKeys
from penstock.config.strict import DIGITS
from penstock.core.message import Position
from penstock.desired.actions import Action
from penstock.desired.facts import messages as messages_text
from penstock.streams.connection import Also
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.facts import ConsumerFacts
from penstock.streams.consumers.registry import Consumers
from penstock.streams.consumers.types import (
    ConsumerError,
    ConsumerInfo,
    ConsumerLetter,
    ConsumerMessage,
    ConsumerSpec,
    RewindEffect,
)

_CONSUMERS: Final = "/v1/http-consumers"
_CONSUMER: Final = f"{_CONSUMERS}/{{consumer}}"
_MAX_BIGINT: Final = 2**63 - 1

api = new_router()


class _List(Paged):
    status: bool = Field(True, description="Whether each one's `status` is read.")


class _Look(Limit):
    state: Literal["pending", "delivered", "dead"] = "pending"


def _changes_schema() -> dict[str, Any]:
    fields = {
        name: {"anyOf": [schema, {"type": "null"}]}
        for model in (ConsumerSettings, WebhookKeys)
        for name, schema in inline(model)["properties"].items()
    }
    return {"type": "object", "properties": fields, "additionalProperties": False}


@api.get(_CONSUMERS, response_model=ConsumersBody, summary="List the consumers")
async def list_consumers(consumers: AppConsumers, paged: Annotated[_List, Query()]) -> Response:
    (name,) = after(paged.cursor, str) or ("",)
    infos = await consumers.page(name, paged.limit + 1)
    page, last = following(infos, paged.limit, lambda info: (info.name,))
    found: Sequence[tuple[ConsumerInfo, ConsumerFacts | None]] = [(i, None) for i in page]
    if paged.status:
        found = await consumers.facts(page)
    data = [consumer_body(info, facts) for info, facts in found]
    return json_answer({"data": data, "next": last})


@api.post(
    _CONSUMERS,
    status_code=201,
    response_model=ConsumerBody,
    summary="Create a consumer",
    responses=documented(409, 413),
    openapi_extra=body_of({"anyOf": [inline(NewPull), inline(NewWebhook)]}),
)
async def create_consumer(consumers: AppConsumers, request: Request) -> Response:
    body = await read_object(request)
    new = NEW_CONSUMER.validate_python(body)
    settings = {k: v for k, v in body.items() if k not in ("name", "stream", "type")}
    info = await consumers.create(
        ConsumerSpec(new.name, new.stream, new.type, settings), by=grant_of(request).name
    )
    return await _changed(consumers, info, 201)


@api.get(_CONSUMER, response_model=ConsumerBody, summary="Show a consumer")
async def show_consumer(consumers: AppConsumers, consumer: str) -> Response:
    version = await consumers.version(consumer)
    return json_answer(await _shown(consumers, consumer), headers=_etag(version))


@api.patch(
    _CONSUMER,
    response_model=ConsumerBody,
    summary="Change settings of a consumer",
    description="Changes the given settings alone; null resets one to its default.",
    responses=documented(409, 412, 413),
    openapi_extra={**IF_MATCH, **body_of(_changes_schema())},
)
async def update_consumer(consumers: AppConsumers, consumer: str, request: Request) -> Response:
    changes = await read_object(request)
    for key in ("via", "type", "stream"):
        if key in changes:
            raise wrong(key, "unknown key")
    line = _line(request, await consumers.get(consumer), "update", **changes)
    info = await consumers.update(
        consumer, changes, by=grant_of(request).name, check=_checked(consumer, request),
        also=line,
    )  # fmt: skip
    return await _changed(consumers, info, 200)


@api.delete(
    _CONSUMER,
    response_model=Success,
    summary="Delete a consumer",
    responses=documented(409, 412),
    openapi_extra=IF_MATCH,
)
async def delete_consumer(consumers: AppConsumers, consumer: str, request: Request) -> Response:
    await consumers.delete(consumer, by=grant_of(request).name, check=_checked(consumer, request))
    return Json(SUCCESS)


@api.post(
    f"{_CONSUMER}/rewind",
    response_model=Success | RewindEffectBody,
    summary="Continue from another position",
    description="Deliveries in flight are forgotten: their tokens are refused from now on. With "
    "`dry_run` nothing is done: the answer has what would be.",
    responses=documented(413),
    openapi_extra=body_of(Rewind),
)
async def rewind(
    consumers: AppConsumers, consumer: str, request: Request, query: Annotated[DryRun, Query()]
) -> Response:
    given = await read_object(request)
    to = place(given)
    found = await consumers.get(consumer)
    if isinstance(to, Position):
        lsn = to.lsn + await consumers.base(found)
        to = Position(max(0, min(lsn, _MAX_BIGINT)), to.idx)
    if query.dry_run:
        return effect_answer(found.info.name, await found.effect_of_rewind(to))
    await found.rewind(to, _line(request, found, "rewind", **given))
    return Json(SUCCESS)


@api.post(
    f"{_CONSUMER}/pause",
    response_model=Success,
    summary="Pause a consumer",
    description="Nothing is delivered until it is resumed: its messages wait in the stream. What is "
    "in flight can be acked, nacked and extended.",
)
async def pause(consumers: AppConsumers, consumer: str, request: Request) -> Response:
    found = await consumers.get(consumer)
    await found.pause(grant_of(request).name, _line(request, found, "pause"))
    return Json(SUCCESS)


@api.post(
    f"{_CONSUMER}/resume",
    response_model=Success,
    summary="Resume a consumer that is paused, or was disabled",
)
async def resume(consumers: AppConsumers, consumer: str, request: Request) -> Response:
    found = await consumers.get(consumer)
    await found.enable(_line(request, found, "resume"))
    return Json(SUCCESS)


@api.get(
    f"{_CONSUMER}/messages",
    response_model=ConsumerMessages,
    summary="Show messages without receiving them",
)
async def messages(
    consumers: AppConsumers, consumer: str, look: Annotated[_Look, Query()]
) -> Response:
    found = await consumers.get(consumer)
    listed = await found.messages(look.state, look.limit)
    base = await consumers.base(found)
    return Json(b'{"data":[%b]}' % b",".join([_message_body(message, base) for message in listed]))


@api.get(f"{_CONSUMER}/dead-letters", response_model=Letters, summary="List dead letters")
async def dead_letters(
    consumers: AppConsumers, consumer: str, paged: Annotated[Paged, Query()]
) -> Response:
    (last,) = after(paged.cursor, int) or (0,)
    found = await consumers.get(consumer)
    letters = await found.dead_letters(paged.limit + 1, last)
    page, cursor = following(letters, paged.limit, lambda letter: (letter.id,))
    base = await consumers.base(found)
    return json_answer({"data": [_letter(letter, base) for letter in page], "next": cursor})


@api.post(
    f"{_CONSUMER}/dead-letters/{{id}}/replay",
    response_model=Success,
    summary="Put a dead letter back into its consumer",
    responses=documented(409),
)
async def replay(
    consumers: AppConsumers,
    consumer: str,
    number: Annotated[int, Path(alias="id", ge=1, le=_MAX_BIGINT), DIGITS],
    request: Request,
) -> Response:
    found = await consumers.get(consumer)
    await found.replay(number, _line(request, found, "replay dead letter", id=number))
    return Json(SUCCESS)


def _line(request: Request, of: Consumer, action: str, **details: Any) -> Also:
    """Return what adds an action to the audit log, in the transaction that does it."""
    return Action("consumer", of.info.name, action, details).line(actor_of(request))


async def _shown(consumers: Consumers, name: str) -> dict[str, Any]:
    consumer = await consumers.get(name)
    facts = await consumer.facts()
    return consumer_body(consumer.info, facts)


async def _changed(consumers: Consumers, info: ConsumerInfo, status: int) -> Response:
    """Answer with a consumer that was changed, even if the store does not answer any more."""
    try:
        version = await consumers.version(info.name)
        return json_answer(await _shown(consumers, info.name), status, _etag(version))
    except ConsumerError:
        return json_answer(consumer_body(info, None), status)


def _etag(version: int | None) -> dict[str, str] | None:
    return None if version is None else etag(version)


def _checked(consumer: str, request: Request) -> Callable[[int | None], None]:
    """Return what raises `Problem` where a request's headers rule out a change of some version."""
    return lambda version: check(request.headers, version, f"consumer {consumer!r}")


def place(body: dict[str, Any]) -> Position | datetime | Literal["all", "new"]:
    """Return where a rewind leads; raises `Problem`."""
    try:
        to = Rewind.model_validate(body).to
        if isinstance(to, datetime):
            return to.astimezone(UTC)
    except (ValueError, OverflowError):
        raise wrong(
            "to",
            'expected "all", "new", a position as in {"lsn": 23876608, "idx": 0}, or a time with '
            "its offset as in 2026-01-31T12:00:00Z",
        ) from None
    return Position(to.lsn, to.idx) if isinstance(to, BaseModel) else to


def effect_answer(name: str, effect: RewindEffect) -> Response:
    """Answer with what a rewind of a consumer would do."""

    def counted(number: int) -> str:
        return messages_text(number) + ("" if effect.exact else " or more")

    losses, consequences = [], []
    if effect.skipped or (not effect.again and not effect.exact):
        losses = [f"consumer {name} skips {counted(effect.skipped)} that it is not done with"]
    if effect.again:
        consequences = [f"consumer {name} delivers {counted(effect.again)} again"]
    body = {"consequences": [*losses, *consequences], "losses": losses, "dry_run": True}
    return json_answer(body)


def _message_body(message: ConsumerMessage, base: int) -> bytes:
    head = {
        "position": position_body(message.position, base),
        "deliver_count": message.deliver_count,
        "held_until": message.until,
    }
    return orjson.dumps(head)[:-1] + b"," + message.message[1:]


def _letter(letter: ConsumerLetter, base: int) -> dict[str, Any]:
    return {
        "id": letter.id,
        "position": position_body(letter.position, base),
        "deliver_count": letter.deliver_count,
        "code": letter.code,
        "reason": letter.reason,
        "at": letter.at,
        "replayed_at": letter.replayed_at,
        "message": orjson.Fragment(letter.message),
    }
