"""Standard Webhooks, verified by that project's own library."""

from __future__ import annotations

import base64
import os

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from penstock.core.message import Position
from penstock.push.signing import Signer, request_id

BODY = '{"record":{"id":1,"name":"Zoë \\u0000 €"}}'.encode()


def secret() -> str:
    return "whsec_" + base64.b64encode(os.urandom(32)).decode()


def headers(raw: bytes) -> dict[str, str]:
    assert raw.endswith(b"\r\n")
    lines = raw.decode("ascii").removesuffix("\r\n").split("\r\n")
    return dict(line.split(": ", 1) for line in lines)


def test_either_secret_verifies_during_rotation() -> None:
    new, old = secret(), secret()
    sent = headers(Signer([new, old]).headers("msg_1", BODY))
    for known in (new, old):
        assert Webhook(known).verify(BODY, sent)["record"]["id"] == 1
    assert sent["webhook-id"] == "msg_1"
    with pytest.raises(WebhookVerificationError):
        Webhook(secret()).verify(BODY, sent)
    with pytest.raises(WebhookVerificationError):
        Webhook(new).verify(BODY + b" ", sent)


def test_without_a_secret_there_is_no_signature() -> None:
    assert headers(Signer([]).headers("msg_1", BODY)).keys() == {"webhook-id", "webhook-timestamp"}


def test_the_ids_of_messages_and_batches_differ() -> None:
    a, b, c = Position(5, 0), Position(5, 1), Position(6, 0)
    ids = [request_id(3, positions) for positions in ([a], [b], [a, b], [a, c], [a, b, c])]
    assert ids[0] == "msg_3_5_0"
    assert len({*ids, request_id(4, [a])}) == 6
    assert request_id(3, [a, b]) == ids[2]
