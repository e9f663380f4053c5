"""What the API answers where a request is wrong: a problem that names the field at fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.api_help import Shop, problem, raw

from penstock.embedded.handles import Database


@pytest.fixture(scope="module")
def shop(postgres: Any) -> Iterator[Shop]:
    name = "test_api_errors"
    database = Database(name, postgres.create_database(name))
    with Shop(database.url) as shop:
        shop.consumer()
        yield shop
    database.drop(postgres.url)


NEXT = "/v1/http-consumers/workers/next"
ACK = "/v1/http-consumers/workers/ack"
RECEIVE = "/v1/streams/events/receive"


@pytest.mark.parametrize("path", [NEXT, RECEIVE])
@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("batch_size=0", "batch_size"),
        ("batch_size=1001", "batch_size"),
        ("batch_size=-1", "batch_size"),
        ("batch_size=ten", "batch_size"),
        ("batch_size=", "batch_size"),
        ("batch_size=1_0", "batch_size"),
        ("batch_size=1.0", "batch_size"),
        ("batch_size=%C2%B2", "batch_size"),
        ("batch_size=99999999999999999999", "batch_size"),
        ("batch_size=1&batch_size=2", "batch_size"),
        ("wait_for_ms=-1", "wait_for_ms"),
        ("wait_for_ms=300001", "wait_for_ms"),
        ("wait_for_ms=5s", "wait_for_ms"),
        ("batchsize=5", "batchsize"),
    ],
)
def test_a_wrong_query(shop: Shop, path: str, query: str, field: str) -> None:
    body = problem(shop.client.get(f"{path}?{query}"), 422, field)
    assert field in body["detail"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": "1"}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"batch_size": None}, "batch_size"),
        ({"wait_for_ms": 1.5}, "wait_for_ms"),
        ({"wait": 5}, "wait"),
        ([], "body"),
    ],
)
def test_a_wrong_receive_body(shop: Shop, body: Any, field: str) -> None:
    problem(shop.client.post(RECEIVE, json=body), 422, field)


@pytest.mark.parametrize("action", ["ack", "nack", "extend"])
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "ack_tokens"),
        ({"ack_tokens": None}, "ack_tokens"),
        ({"ack_tokens": "abc"}, "ack_tokens"),
        ({"ack_tokens": ["a", 7]}, "ack_tokens[1]"),
        ({"ack_tokens": [None]}, "ack_tokens[0]"),
        ({"ack_tokens": ["a"] * 10_001}, "ack_tokens"),
        ({"ack_ids": []}, "ack_ids"),
        (7, "body"),
        (None, "body"),
        ([], "body"),
    ],
)
def test_a_wrong_list_of_tokens(shop: Shop, action: str, body: Any, field: str) -> None:
    content = json.dumps(body).encode()
    answer = shop.client.post(f"/v1/http-consumers/workers/{action}", content=content)
    problem(answer, 422, field)


@pytest.mark.parametrize(
    ("action", "field", "value"),
    [
        ("nack", "delay_ms", -1),
        ("nack", "delay_ms", 86_400_001),
        ("nack", "delay_ms", "5"),
        ("nack", "delay_ms", None),
        ("nack", "reason", 5),
        ("nack", "reason", "x" * 501),
        ("ack", "reason", "x"),
        ("extend", "ack_wait_ms", 0),
        ("extend", "ack_wait_ms", 86_400_001),
        ("extend", "ack_wait_ms", False),
        ("ack", "delay_ms", 5),
    ],
)
def test_a_wrong_time(shop: Shop, action: str, field: str, value: Any) -> None:
    body = {"ack_tokens": [], field: value}
    content = json.dumps(body).encode()
    answer = shop.client.post(f"/v1/http-consumers/workers/{action}", content=content)
    problem(answer, 422, field)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"NaN", b'{"ack_tokens":["\\ud800"]}'])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", ACK),
        ("POST", "/v1/http-consumers"),
        ("PATCH", "/v1/http-consumers/workers"),
        ("POST", "/v1/http-consumers/workers/rewind"),
    ],
)
def test_a_body_that_is_not_json(shop: Shop, method: str, path: str, content: bytes) -> None:
    problem(shop.client.request(method, path, content=content), 400)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", [ACK, "/v1/http-consumers", RECEIVE])
def test_a_body_of_more_than_1_mib(shop: Shop, path: str, chunked: bool) -> None:
    content = json.dumps({"ack_tokens": ["x" * (1 << 20)]}).encode()
    halves = [content[: 1 << 19], content[1 << 19 :]]
    sent = iter(halves) if chunked else content
    assert "1048576" in problem(shop.client.post(path, content=sent), 413)["detail"]


def test_a_body_of_1_mib_is_read(shop: Shop) -> None:
    content = json.dumps({"ack_tokens": ["x" * ((1 << 20) - 100)]}).encode()
    assert problem(shop.client.post(ACK, content=content), 409)["acked"] == 0


def test_paths_and_methods_that_are_not_there(shop: Shop) -> None:
    for path in ("/v1", "/v1/", "/v1/http-consumers/", f"{NEXT}/", "/nothing"):
        problem(shop.client.get(path), 404)
    answer = shop.client.delete(NEXT)
    problem(answer, 405)
    assert answer.headers["allow"] == "GET"
    answer = shop.client.put("/v1/http-consumers/workers")
    assert answer.headers["allow"] == "DELETE, GET, PATCH"
    # HEAD would take messages with it and not give them.
    assert shop.client.head(NEXT).status_code == 405
    assert shop.client.head(RECEIVE).status_code == 405


def test_names_of_any_characters_are_looked_up(shop: Shop) -> None:
    for name in ("%00", "a%2Fb", "%F0%9F%90%98", "..", "'; DROP TABLE x", "x" * 1000, "%ff"):
        for path in (f"/v1/http-consumers/{name}", f"/v1/http-consumers/{name}/next"):
            answer = shop.client.get(httpx.URL(f"http://{shop.api.address}{path}"))
            problem(answer, 404)


def test_what_is_no_http_at_all(shop: Shop) -> None:
    with raw(shop.api.address, shop.token, "/ HTTP/9.9\r\nx") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert shop.client.get("/v1/streams").status_code == 200
