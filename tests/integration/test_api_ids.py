"""The API knows streams and consumers by their ids as well as by their names."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from tests.api_help import Shop, ids, problem, tokens


def _id(body: dict[str, Any]) -> str:
    return str(uuid.UUID(body["id"]))


def test_every_path_takes_an_id(shop: Shop) -> None:
    made = shop.client.post("/v1/http-consumers", json={"name": "a", "stream": "events"}).json()
    by_id = f"/v1/http-consumers/{_id(made)}"
    assert shop.client.get(by_id).json()["name"] == "a"
    assert shop.client.patch(by_id, json={"ack_wait_ms": 5}).json()["ack_wait_ms"] == 5
    listed = shop.client.get("/v1/http-consumers").json()["data"]
    assert made["id"] in [one["id"] for one in listed]
    stream = shop.client.get("/v1/streams/events").json()
    assert shop.client.get(f"/v1/streams/{_id(stream)}").json() == stream
    assert stream["id"] != next(one["id"] for one in listed if one["own"])
    shop.publish(1)
    got = shop.client.post(f"/v1/streams/{stream['id']}/receive", json={"wait_for_ms": 20_000})
    assert [item["data"]["record"]["id"] for item in got.json()["data"]] == [1]
    assert shop.client.post(f"{by_id}/rewind", json={"to": "all"}).status_code == 200
    problem(shop.client.get(f"/v1/http-consumers/{uuid.uuid4()}"), 404)
    problem(shop.client.get(f"/v1/streams/{made['id']}"), 404)
    assert shop.client.delete(by_id).status_code == 200
    problem(shop.client.get(by_id), 404)
    again = shop.client.post("/v1/http-consumers", json={"name": "a", "stream": "events"}).json()
    assert again["id"] != made["id"]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_short_paths(shop: Shop, method: str) -> None:
    path = f"/v1/consumers/{shop.client.get(shop.consumer()).json()['id']}"
    shop.publish(1, 2)
    asked: dict[str, Any] = {"params": {"batch_size": 2, "wait_for_ms": 20_000}}
    answer = shop.client.request(method, f"{path}/receive", **asked)
    assert ids(answer) == [1, 2]
    assert answer.json()["data"][0]["metadata"]["consumer"]["id"] == path.rpartition("/")[2]
    one, two = tokens(answer)
    assert shop.client.post(f"{path}/ack", json={"ack_tokens": [one]}).json() == {"success": True}
    assert shop.client.post(f"{path}/nack", json={"ack_tokens": [two]}).status_code == 200
    assert ids(shop.client.request(method, f"{path}/receive", **asked)) == [2]


def test_a_worker_of_some_consumers_may_use_their_ids(shop: Shop) -> None:
    path = shop.consumer()
    shop.consumer("others")
    worker = shop.worker("w", "workers")
    mine = shop.client.get(path).json()["id"]
    other = shop.client.get("/v1/http-consumers/others").json()["id"]
    assert worker.get(f"/v1/consumers/{mine}/receive").json()["data"] == []
    problem(worker.get(f"/v1/consumers/{other}/receive"), 403)
    problem(worker.get(f"/v1/consumers/{uuid.uuid4()}/receive"), 403)
