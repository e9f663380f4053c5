"""How workers address a consumer, and the forms in which its messages are written to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from penstock.api.schemas import ReceivedIds, ReceivedMessages
from penstock.streams.consumers.types import Delivery, Received


class Form(NamedTuple):
    """How a consumer is addressed, and what its deliveries are called."""

    path: str
    parameter: str
    receive: tuple[str, list[str]]
    token: str
    tokens: str
    written: Callable[[Received, bytes], bytes]
    model: type
    operation: str = ""  # what the ids of its operations begin with, the parameter if none


def _messages(received: Received, paused: bytes) -> bytes:
    data = b",".join([_message(delivery) for delivery in received.deliveries])
    info = b'{"num_pending":%d,"num_ack_pending":%d}' % received[1:3]
    return b'{"data":[%b],"info":%b%b}' % (data, info, paused)


def _message(delivery: Delivery) -> bytes:
    token, count, message, _ = delivery
    return b'{"ack_token":"%b","deliver_count":%d,%b' % (token.encode(), count, message[1:])


def _identified(received: Received, paused: bytes) -> bytes:
    data = b",".join(
        [b'{"ack_id":"%b","data":%b}' % (d.token.encode(), d.message) for d in received.deliveries]
    )
    return b'{"data":[%b]%b}' % (data, paused)


FORMS: Final = (
    Form(
        path="/v1/http-consumers/{consumer}",
        parameter="consumer",
        receive=("next", ["GET"]),
        token="ack_token",  # noqa: S106 - a member's name
        tokens="ack_tokens",
        written=_messages,
        model=ReceivedMessages,
    ),
    Form(
        path="/v1/consumers/{consumer}",
        parameter="consumer",
        receive=("receive", ["GET", "POST"]),
        token="ack_token",  # noqa: S106 - a member's name
        tokens="ack_tokens",
        written=_messages,
        model=ReceivedMessages,
        operation="short",
    ),
    Form(
        path="/v1/streams/{stream}",
        parameter="stream",
        receive=("receive", ["GET", "POST"]),
        token="ack_id",  # noqa: S106 - a member's name
        tokens="ack_ids",
        written=_identified,
        model=ReceivedIds,
    ),
)
