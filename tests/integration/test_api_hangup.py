"""A client that hangs up takes nothing with it: while it waits, and when its messages are on the way."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from tests.api_help import Later, Shop, ids, raw, tokens

from penstock.embedded.handles import Database

WAIT = {"batch_size": 100, "wait_for_ms": 10_000}


@pytest.fixture
def shop(database: Database) -> Iterator[Shop]:
    with Shop(database.url) as shop:
        yield shop


def _waiting(shop: Shop, path: str, count: int) -> None:
    """Wait until `count` receives wait: the consumer's max_waiting is that, too."""
    deadline = time.monotonic() + 10
    while shop.client.get(f"{path}/next", params={"wait_for_ms": 1}).status_code != 429:
        assert time.monotonic() < deadline
    assert count > 0


def _none_waiting(shop: Shop, path: str) -> None:
    deadline = time.monotonic() + 10
    while shop.client.get(f"{path}/next", params={"wait_for_ms": 1}).status_code == 429:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_one_that_waits_gives_its_place_up(shop: Shop, method: str) -> None:
    path = shop.consumer(max_waiting=1)
    target = f"{path}/next?wait_for_ms=60000"
    if method == "POST":
        path, target = "/v1/http-consumers/events", "/v1/streams/events/receive?wait_for_ms=60000"
        shop.client.patch(path, json={"max_waiting": 1})
    connection = raw(shop.api.address, shop.token, target, method)
    _waiting(shop, path, 1)
    connection.close()
    _none_waiting(shop, path)
    shop.publish(1)
    answer = shop.client.get(f"{path}/next", params=WAIT)
    assert ids(answer) == [1]
    assert answer.json()["data"][0]["deliver_count"] == 1


def test_the_next_one_in_line_gets_what_one_that_left_would_have_got(shop: Shop) -> None:
    path = shop.consumer(max_waiting=2)
    left = raw(shop.api.address, shop.token, f"{path}/next?wait_for_ms=60000")
    stays = Later(lambda: shop.client.get(f"{path}/next", params=WAIT))
    _waiting(shop, path, 2)
    left.close()
    _none_waiting(shop, path)
    shop.publish(1)
    assert ids(stays.result()) == [1]


def test_at_whatever_moment_clients_leave_each_message_comes_to_one_that_stays(shop: Shop) -> None:
    path = shop.consumer(ack_wait_ms=60_000, max_ack_pending=10_000, max_waiting=1000)
    chance = random.Random(7)
    count = 150
    for key in range(count):
        leaves = raw(shop.api.address, shop.token, f"{path}/next?wait_for_ms=60000")
        if key % 3 == 0:
            time.sleep(0.02)
        shop.publish(key)
        time.sleep(chance.random() * 0.004)
        leaves.close()
    seen: list[int] = []
    counts: list[int] = []
    while len(seen) < count:
        answer = shop.client.get(f"{path}/next", params={**WAIT, "wait_for_ms": 2000})
        if not ids(answer):
            break
        seen += ids(answer)
        counts += [item["deliver_count"] for item in answer.json()["data"]]
        shop.client.post(f"{path}/ack", json={"ack_tokens": tokens(answer)})
    # What was wholly sent before the client left is its own until ack_wait is over.
    left = shop.client.get(f"{path}/messages", params={"state": "delivered"}).json()["data"]
    print("held by the dead:", len(left), "of", count)
    assert sorted(seen + [message["record"]["id"] for message in left]) == list(range(count))
    assert set(counts) <= {1}
