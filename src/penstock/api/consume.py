"""The Consume API: receive, ack, nack and extend, of consumers and of streams' own groups."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import orjson
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from penstock.api.auth import Grant
from penstock.api.client import Client
from penstock.api.consume_forms import FORMS, Form
from penstock.api.problems import Problem, documented, wrong
from penstock.api.requests import (
    SUCCESS,
    BytesRoute,
    Json,
    body_of,
    known,
    query,
    read_object,
    within,
)
from penstock.api.schemas import BEARER, Success
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.registry import Consumers
from penstock.streams.consumers.types import (
    Outcome,
    Received,
    UnknownConsumer,
    UnknownStream,
)

_RECEIVE: Final = {"batch_size": (1, 1000, 1), "wait_for_ms": (0, 300_000, 0)}
_MAX_TOKENS: Final = 10_000
_MAX_MS: Final = 86_400_000
_MAX_REASON: Final = 500

_Endpoint = Callable[[Request], Awaitable[Response]]

api = APIRouter(
    route_class=BytesRoute,
    dependencies=[Depends(BEARER)],
    responses=documented(),
    tags=["consume"],
)
"""What workers call, of every app: an endpoint takes consumers and receives from the request's."""


class Receives:
    """The receives that wait: each ends when its client hangs up, all when the server stops."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Task[Any]] = set()
        self._ending = False

    @property
    def count(self) -> int:
        """How many there are now."""
        return len(self._waiting)

    def end(self) -> None:
        """Answer those that wait, and from now on don't let any wait."""
        self._ending = True
        for task in self._waiting:
            task.cancel()

    async def receive(
        self, consumer: Consumer, limit: int, wait: float, client: Client
    ) -> Received:
        """Receive for `client`, whose request has been read.

        A client that hung up takes nothing: raises `ClientDisconnect`. It is `gone` some turns of the
        event loop before it is seen to hang up: what is written from then on is lost. Write what
        this returns at once.
        """
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - an event loop runs this
        left = False

        def hang_up() -> None:
            nonlocal left
            left = True
            task.cancel()

        client.watch(hang_up)
        self._waiting.add(task)
        try:
            received = await consumer.receive(limit, 0.0 if self._ending else wait)
        except asyncio.CancelledError:
            client.watch(None)
            self._waiting.discard(task)
            if left:
                task.uncancel()
                raise ClientDisconnect from None
            if not self._ending:
                raise
            task.uncancel()
            received = await consumer.receive(limit, 0.0)
        finally:
            client.watch(None)
            self._waiting.discard(task)
        if client.gone:
            if received.deliveries:
                await consumer.release([delivery.token for delivery in received.deliveries])
            raise ClientDisconnect
        return received


def _paused(consumer: Consumer, received: Received) -> bytes:
    """Return the member that says who has paused a consumer, nothing where messages came."""
    info = consumer.info
    return b',"paused":' + orjson.dumps(info.disabled) if info.paused and not received[0] else b""


def _add(form: Form) -> None:
    parameter, tokens_field = form.parameter, form.tokens

    async def consumer_of(request: Request) -> Consumer:
        consumers: Consumers = request.app.consumers
        find = consumers.get if parameter == "consumer" else consumers.own
        name = request.path_params[parameter]
        grant: Grant = request.scope["grant"]
        if grant.may_consume(name):
            return await find(name)
        with contextlib.suppress(UnknownConsumer, UnknownStream):
            consumer = await find(name)  # it may be an id
            if grant.may_consume(consumer.info.name):
                return consumer
        raise Problem(403, f"The token {grant.name!r} is not for {parameter} {name!r}.")

    async def receive(request: Request) -> Response:
        values = query(request, _RECEIVE)
        if request.method == "POST" and await request.body():
            values |= await read_object(request)
            known(values, *_RECEIVE)
            values = {
                name: within(name, value, *_RECEIVE[name][:2]) for name, value in values.items()
            }
        consumer = await consumer_of(request)
        receives: Receives = request.app.receives
        received = await receives.receive(
            consumer,
            values["batch_size"],
            values["wait_for_ms"] / 1000,
            request.scope["state"]["client"],
        )
        return Json(form.written(received, _paused(consumer, received)))

    async def ack(request: Request) -> Response:
        consumer = await consumer_of(request)
        body = await read_object(request)
        tokens = _tokens(body, tokens_field)
        return _answer(await consumer.ack(tokens, followed=True), form, "acked")

    async def nack(request: Request) -> Response:
        consumer = await consumer_of(request)
        body = await read_object(request)
        tokens = _tokens(body, tokens_field, "delay_ms", "reason")
        delay = within("delay_ms", body.get("delay_ms", 0), 0, _MAX_MS) / 1000
        outcome = await consumer.nack(tokens, delay, reason=_reason(body))
        return _answer(outcome, form, "nacked")

    async def extend(request: Request) -> Response:
        consumer = await consumer_of(request)
        body = await read_object(request)
        tokens = _tokens(body, tokens_field, "ack_wait_ms")
        wait = body.get("ack_wait_ms")
        seconds = None if wait is None else within("ack_wait_ms", wait, 1, _MAX_MS) / 1000
        return _answer(await consumer.extend(tokens, seconds), form, "extended")

    path, methods = form.receive
    for method in methods:
        _declare(
            f"{form.path}/{path}", receive, form, method=method, summary="Receive messages",
            description="Waits up to `wait_for_ms` for the first one; its messages are this "
            "worker's until they are acked, nacked, or the consumer's `ack_wait_ms` is over. While the "
            "consumer is paused there is none, and `paused` names who paused it.",
            model=form.model, extra=_receive_schema(method), codes=(429,),
        )  # fmt: skip
    for endpoint, summary, description, more in (
        (ack, "Ack messages", "They are never delivered again.", {}),
        (nack, "Nack messages", "They are available again, after `delay_ms`. The consumer's status "
         "and dead letters show the `reason`.",
         {"delay_ms": _number(0, _MAX_MS, 0), "reason": _REASON}),
        (extend, "Extend deliveries", "They get `ack_wait_ms` from now, by default the consumer's.",
         {"ack_wait_ms": {"anyOf": [_number(1, _MAX_MS), {"type": "null"}]}}),
    ):  # fmt: skip
        _declare(
            f"{form.path}/{endpoint.__name__}", endpoint, form, method="POST",
            summary=summary, description=description, model=Success,
            extra=body_of(_tokens_schema(form.tokens, more)), codes=(409, 413),
        )  # fmt: skip


def _declare(
    path: str,
    endpoint: _Endpoint,
    form: Form,
    *,
    method: str,
    summary: str,
    description: str,
    model: type,
    extra: dict[str, Any],
    codes: tuple[int, ...],
) -> None:
    name = {"name": form.parameter, "in": "path", "required": True, "schema": {"type": "string"}}
    extra = {**extra, "parameters": [name, *extra.get("parameters", ())]}
    action = path.rpartition("/")[2]
    api.add_api_route(
        path, endpoint, methods=[method], summary=summary, description=description,
        response_model=model, openapi_extra=extra, responses=documented(*codes),
        operation_id=f"{form.operation or form.parameter}_{action}_{method.lower()}",
    )  # fmt: skip


_REASON: Final = {"anyOf": [{"type": "string", "maxLength": _MAX_REASON}, {"type": "null"}]}


def _number(least: int, most: int, default: int | None = None) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer", "minimum": least, "maximum": most}
    return schema if default is None else {**schema, "default": default}


def _receive_schema(method: str) -> dict[str, Any]:
    numbers = {name: _number(*field) for name, field in _RECEIVE.items()}
    parameters = [{"name": name, "in": "query", "schema": numbers[name]} for name in numbers]
    body = {"type": "object", "properties": numbers, "additionalProperties": False}
    documented_body = body_of(body, required=False) if method == "POST" else {}
    return {"parameters": parameters, **documented_body}


def _tokens_schema(field: str, more: dict[str, Any]) -> dict[str, Any]:
    tokens = {
        "type": "array",
        "items": {"type": "string"},
        "description": f"At most {_MAX_TOKENS}.",
    }
    return {
        "type": "object",
        "properties": {field: tokens, **more},
        "required": [field],
        "additionalProperties": False,
    }


def _tokens(body: dict[str, Any], field: str, *others: str) -> list[str]:
    known(body, field, *others)
    tokens = body.get(field)
    if type(tokens) is not list:
        raise wrong(field, "expected a list of tokens")
    if len(tokens) > _MAX_TOKENS:
        raise wrong(field, f"{len(tokens)} are too many: at most {_MAX_TOKENS} at a time")
    for index, token in enumerate(tokens):
        if type(token) is not str:
            raise wrong(f"{field}[{index}]", "not a string")
    return tokens


def _reason(body: dict[str, Any]) -> str | None:
    reason = body.get("reason")
    if reason is None:
        return None
    if type(reason) is not str:
        raise wrong("reason", "not a string")
    if len(reason) > _MAX_REASON:
        raise wrong("reason", f"{len(reason)} characters are too many: at most {_MAX_REASON}")
    return f"a worker nacked it: {reason}" if reason.strip() else None


def _answer(outcome: Outcome, form: Form, done: str) -> Response:
    if not outcome.refused:
        return Json(SUCCESS)
    refused = [{form.token: token, "reason": reason} for token, reason in outcome.refused]
    raise Problem(
        409,
        f"{len(refused)} of {len(refused) + outcome.done} were refused: `expired` where another "
        f"worker holds the message now, `unknown` where the {form.parameter} has no such delivery.",
        more={done: outcome.done, "refused": refused},
    )


for _form in FORMS:
    _add(_form)
