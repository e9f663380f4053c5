"""Several instances of the API over one store: nothing that one does is unknown to the others."""

from __future__ import annotations

import time

import httpx
import pytest
from tests.api_help import ApiServer, Shop, ids, problem, tokens, until_a_place_is_taken
from tests.waits import Later

WAIT = {"batch_size": 10, "wait_for_ms": 20_000}


@pytest.fixture
def other(shop: Shop) -> ApiServer:
    return shop.serve()


def test_what_one_gave_the_other_takes_back(shop: Shop, other: ApiServer) -> None:
    path = shop.consumer()
    shop.publish(1, 2, 3)
    one, two, three = tokens(shop.client.get(f"{path}/next", params=WAIT))
    assert ids(other.client.get(f"{path}/next")) == []
    ack, nack = {"ack_tokens": [one]}, {"ack_tokens": [two]}
    assert other.client.post(f"{path}/ack", json=ack).json() == {"success": True}
    assert other.client.post(f"{path}/nack", json=nack).json() == {"success": True}
    body = {"ack_tokens": [three], "ack_wait_ms": 40_000}
    assert other.client.post(f"{path}/extend", json=body).json() == {"success": True}
    again = shop.client.get(f"{path}/next", params=WAIT)
    assert ids(again) == [2]
    assert again.json()["data"][0]["deliver_count"] == 2
    late = problem(other.client.post(f"{path}/ack", json=nack), 409)
    assert late["refused"] == [{"ack_token": two, "reason": "expired"}]


def test_a_nack_at_one_wakes_who_waits_at_the_other(shop: Shop, other: ApiServer) -> None:
    path = shop.consumer()
    shop.publish(1)
    taken = tokens(shop.client.get(f"{path}/next", params=WAIT))
    waiting = Later(lambda: other.client.get(f"{path}/next", params=WAIT))
    other.until_waiting(1)
    started = time.monotonic()
    shop.client.post(f"{path}/nack", json={"ack_tokens": taken})
    assert ids(waiting.result()) == [1]
    assert time.monotonic() - started < 3


def test_an_ack_at_one_frees_the_group_for_who_waits_at_the_other(
    shop: Shop, other: ApiServer
) -> None:
    path = shop.consumer()
    shop.publish("a")
    shop.publish("a")
    taken = tokens(shop.client.get(f"{path}/next", params=WAIT))
    assert len(taken) == 1
    waiting = Later(lambda: other.client.get(f"{path}/next", params=WAIT))
    other.until_waiting(1)
    started = time.monotonic()
    shop.client.post(f"{path}/ack", json={"ack_tokens": taken})
    assert ids(waiting.result()) == ["a"]
    assert time.monotonic() - started < 3


def test_new_messages_wake_both(shop: Shop, other: ApiServer) -> None:
    path = shop.consumer()
    one = Later(lambda: shop.client.get(f"{path}/next", params={**WAIT, "batch_size": 1}))
    two = Later(lambda: other.client.get(f"{path}/next", params={**WAIT, "batch_size": 1}))
    shop.api.until_waiting(1)
    other.until_waiting(1)
    started = time.monotonic()
    shop.publish(1, 2)
    assert sorted(ids(one.result()) + ids(two.result())) == [1, 2]
    assert time.monotonic() - started < 3


def test_an_expired_delivery_of_one_goes_to_the_other(shop: Shop, other: ApiServer) -> None:
    path = shop.consumer(ack_wait_ms=500)
    shop.publish(1)
    late = tokens(shop.client.get(f"{path}/next", params=WAIT))
    assert ids(other.client.get(f"{path}/next", params=WAIT)) == [1]
    refused = problem(shop.client.post(f"{path}/ack", json={"ack_tokens": late}), 409)["refused"]
    assert refused == [{"ack_token": late[0], "reason": "expired"}]


def test_consumers_made_changed_rewound_and_dropped_at_one(shop: Shop, other: ApiServer) -> None:
    path = shop.consumer()
    shop.publish(1)
    taken = tokens(other.client.get(f"{path}/next", params=WAIT))
    other.client.post(f"{path}/ack", json={"ack_tokens": taken})
    assert ids(shop.client.get(f"{path}/next")) == []
    other.client.post(f"{path}/rewind", json={"to": "all"})
    assert ids(shop.client.get(f"{path}/next", params=WAIT)) == [1]
    other.client.patch(path, json={"ack_wait_ms": 1234})
    assert _soon(lambda: shop.client.get(path).json()["ack_wait_ms"] == 1234)
    other.client.delete(path)
    # The store is read for the one, and for the other what this API was notified of.
    assert _soon(lambda: shop.client.get(path).status_code == 404)
    assert _soon(lambda: shop.client.get(f"{path}/next").status_code == 404)
    problem(shop.client.get(f"{path}/next"), 404)


def _soon(look: object) -> bool:
    assert callable(look)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if look():
            return True
        time.sleep(0.02)
    return False


def test_one_that_ends_leaves_its_deliveries_to_the_other(shop: Shop, other: ApiServer) -> None:
    path = shop.consumer()
    shop.publish(1)
    taken = tokens(shop.client.get(f"{path}/next", params=WAIT))
    shop.api.stop()
    ack = {"ack_tokens": taken}
    assert other.client.post(f"{path}/ack", json=ack).json() == {"success": True}
    assert ids(other.client.get(f"{path}/next")) == []


def test_max_waiting_counts_over_both(shop: Shop, other: ApiServer) -> None:
    path = shop.consumer(max_waiting=1)
    first = Later(lambda: shop.client.get(f"{path}/next", params={"wait_for_ms": 20_000}))
    until_a_place_is_taken(shop.store.url, "workers")
    for wait in (0, 20_000):
        refused = other.client.get(f"{path}/next", params={"wait_for_ms": wait})
        assert "in all processes of the store" in problem(refused, 429)["detail"]
        assert refused.headers["retry-after"] == "1"
    shop.publish(1, 2)
    assert ids(first.result()) == [1]
    served: list[httpx.Response] = []

    def answered() -> bool:
        served[:] = [other.client.get(f"{path}/next")]
        return served[0].status_code != 429

    assert _soon(answered)
    assert ids(served[0]) == [2]
