"""A client that hangs up takes nothing with it: while it waits, and when its messages are on the way."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time

import pytest
from tests.api_help import Shop, ids, raw, rest
from tests.streams_help import inserted, wire, writer_of
from tests.waits import Later, await_end

from penstock.api.client import Client
from penstock.api.consume import Receives
from penstock.core.message import Position, RoundPart
from penstock.sinks.stream import StreamWriter
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.types import Received

WAIT = {"batch_size": 100, "wait_for_ms": 10_000}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_one_that_waits_gives_its_place_up(shop: Shop, method: str) -> None:
    path, target = shop.consumer(max_waiting=1), "/v1/http-consumers/workers/next"
    if method == "POST":
        path, target = "/v1/http-consumers/events", "/v1/streams/events/receive"
        shop.client.patch(path, json={"max_waiting": 1}).raise_for_status()
    leaves = raw(shop.api.address, shop.token, f"{target}?wait_for_ms=60000", method)
    shop.api.until_waiting(1)
    leaves.close()
    shop.api.until_waiting(0)
    waiting = Later(lambda: shop.client.get(f"{path}/next", params=WAIT))
    shop.api.until_waiting(1)
    shop.publish(1)
    answer = waiting.result()
    assert ids(answer) == [1]
    assert answer.json()["data"][0]["deliver_count"] == 1


def test_one_that_waits_is_missed_though_it_has_sent_the_next_request(shop: Shop) -> None:
    path = shop.consumer(max_waiting=1)
    leaves = raw(shop.api.address, shop.token, f"{path}/next?wait_for_ms=60000")
    leaves.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
    shop.api.until_waiting(1)
    leaves.close()
    shop.api.until_waiting(0)


def test_the_next_one_in_line_gets_what_one_that_left_would_have_got(shop: Shop) -> None:
    path = shop.consumer()
    leaves = raw(shop.api.address, shop.token, f"{path}/next?wait_for_ms=60000")
    shop.api.until_waiting(1)
    stays = Later(lambda: shop.client.get(f"{path}/next", params=WAIT))
    shop.api.until_waiting(2)
    leaves.close()
    shop.api.until_waiting(1)
    shop.publish(1)
    assert ids(stays.result()) == [1]


def test_an_answer_that_a_closing_connection_would_lose_is_given_back(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shop.consumer()
    shop.publish(1)
    ready = threading.Event()
    serve = Receives.receive

    async def served(
        self: Receives, consumer: Consumer, limit: int, wait: float, client: Client
    ) -> Received:
        receive = consumer.receive

        async def received(limit: int, wait: float) -> Received:
            got = await receive(limit, wait)
            monkeypatch.undo()
            ready.set()
            async with asyncio.timeout(60):
                while not client.gone:  # seen in the turn in which the connection is found closed
                    await asyncio.sleep(0)
            return got

        monkeypatch.setattr(consumer, "receive", received)
        return await serve(self, consumer, limit, wait, client)

    monkeypatch.setattr(Receives, "receive", served)
    leaves = raw(shop.api.address, shop.token, f"{path}/next")
    assert ready.wait(60)
    leaves.shutdown(socket.SHUT_WR)
    assert rest(leaves) == b""
    answer = shop.client.get(f"{path}/next", params=WAIT)
    assert ids(answer) == [1]
    assert answer.json()["data"][0]["deliver_count"] == 1


def test_at_whatever_moment_clients_leave_each_message_comes_to_one_that_got_it(
    shop: Shop,
) -> None:
    path = shop.consumer(ack_wait_ms=60_000, max_ack_pending=10_000, max_waiting=1000)
    chance = random.Random(7)
    keys, got = list(range(120)), []
    writer = writer_of(shop.store, shop.stream)
    for key in keys:
        leaves = raw(shop.api.address, shop.token, f"{path}/next?wait_for_ms=60000")
        publishing = threading.Thread(target=_publish, args=[writer, key], daemon=True)
        publishing.start()
        time.sleep(chance.random() * 0.012)
        # The server sees that the client is gone; the client, what was sent before.
        leaves.shutdown(socket.SHUT_WR)
        answer = rest(leaves)
        await_end(publishing)
        if answer:
            got += [item["record"]["id"] for item in json.loads(answer)["data"]]
    writer.close()
    seen: list[int] = []
    while len(seen) + len(got) < len(keys):
        left = shop.client.get(f"{path}/next", params={**WAIT, "wait_for_ms": 3000})
        assert {item["deliver_count"] for item in left.json()["data"]} == {1}, (got, seen)
        seen += ids(left)
    assert sorted(seen + got) == keys
    assert seen
    assert got


def _publish(writer: StreamWriter, key: int) -> None:
    start, end = Position(100 + key, 0), Position(101 + key, 0)
    writer.begin()
    writer.write(0, wire([inserted(key)], start))
    writer.commit(RoundPart(start, end, 0, 1))
