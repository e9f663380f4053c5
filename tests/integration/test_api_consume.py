"""The Consume API over HTTP: receive, ack, nack, extend, and the waiting in between."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.api_help import Shop, ids, problem, tokens
from tests.streams_help import Change, deleted, inserted, make_stream, publish, updated
from tests.waits import Later

WAIT = {"wait_for_ms": 20_000}


def test_next_gives_messages_whole_with_what_is_pending(shop: Shop) -> None:
    path = shop.consumer()
    shop.publish(1, 2, 3)
    answer = shop.client.get(f"{path}/next", params={"batch_size": 2, **WAIT})
    body = answer.json()
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"
    assert list(body) == ["data", "info"]
    assert body["info"] == {"num_pending": 1, "num_ack_pending": 2}
    first = body["data"][0]
    assert list(first) == [
        "ack_token", "deliver_count", "record", "changes", "action", "metadata",
    ]  # fmt: skip
    assert first["deliver_count"] == 1
    assert first["record"] == {"id": 1}
    assert first["action"] == "insert"
    assert first["changes"] is None
    assert first["metadata"]["table_name"] == "items"
    made = shop.client.get(path).json()
    assert first["metadata"]["consumer"] == {"id": made["id"], "name": "workers"}


def test_what_postgres_wrote_comes_out_byte_for_byte(shop: Shop) -> None:
    path = shop.consumer()
    record = {"id": 7, "text": 'quote " backslash \\ newline \n é 🐘', "n": 12345678901234567890}
    publish(shop.store, shop.stream, [Change(record)])
    answer = shop.client.get(f"{path}/next", params=WAIT)
    assert '"n":12345678901234567890' in answer.text
    assert answer.json()["data"][0]["record"] == record


def test_batch_size_is_1_unless_given_and_can_be_1000(shop: Shop) -> None:
    path = shop.consumer(max_ack_pending=2000)
    shop.publish(*range(1100))
    assert len(ids(shop.client.get(f"{path}/next", params=WAIT))) == 1
    answer = shop.client.get(f"{path}/next", params={"batch_size": 1000, **WAIT})
    assert len(ids(answer)) == 1000
    assert answer.json()["info"] == {"num_pending": 99, "num_ack_pending": 1001}


def test_acked_messages_are_gone_and_acking_twice_is_fine(shop: Shop) -> None:
    path = shop.consumer(ack_wait_ms=500)
    shop.publish(1, 2)
    taken = tokens(shop.client.get(f"{path}/next", params={"batch_size": 10, **WAIT}))
    for _ in range(2):
        answer = shop.client.post(f"{path}/ack", json={"ack_tokens": taken})
        assert (answer.status_code, answer.json()) == (200, {"success": True})
    answer = shop.client.get(f"{path}/next", params={"wait_for_ms": 1000})
    assert answer.json() == {"data": [], "info": {"num_pending": 0, "num_ack_pending": 0}}


def test_nacked_messages_are_back_at_once_and_counted(shop: Shop) -> None:
    path = shop.consumer()
    shop.publish(1)
    taken = tokens(shop.client.get(f"{path}/next", params=WAIT))
    assert shop.client.post(f"{path}/nack", json={"ack_tokens": taken}).json() == {"success": True}
    answer = shop.client.get(f"{path}/next", params={"wait_for_ms": 0})
    assert ids(answer) == [1]
    assert answer.json()["data"][0]["deliver_count"] == 2


def test_nacked_with_a_delay_messages_are_back_later(shop: Shop) -> None:
    path = shop.consumer()
    shop.publish(1)
    taken = tokens(shop.client.get(f"{path}/next", params=WAIT))
    started = time.monotonic()
    shop.client.post(f"{path}/nack", json={"ack_tokens": taken, "delay_ms": 700})
    assert ids(shop.client.get(f"{path}/next")) == []
    assert ids(shop.client.get(f"{path}/next", params=WAIT)) == [1]
    assert 0.6 < time.monotonic() - started < 5


def test_after_ack_wait_a_message_is_another_workers_and_the_first_ones_ack_is_refused(
    shop: Shop,
) -> None:
    path = shop.consumer(ack_wait_ms=300)
    shop.publish(1, 2)
    late = tokens(shop.client.get(f"{path}/next", params=WAIT))
    again = shop.client.get(f"{path}/next", params={"batch_size": 10, **WAIT})
    assert ids(again) == [2]  # the other message, and then the first one's second delivery
    second = shop.client.get(f"{path}/next", params={"batch_size": 10, **WAIT})
    assert 1 in ids(second)
    body = problem(shop.client.post(f"{path}/ack", json={"ack_tokens": late}), 409)
    assert body["acked"] == 0
    assert body["refused"] == [{"ack_token": late[0], "reason": "expired"}]
    held = shop.client.get(f"{path}/messages", params={"state": "delivered"}).json()["data"]
    assert 1 in [message["record"]["id"] for message in held]  # not acked by the late one


def test_of_many_tokens_the_good_ones_are_acked(shop: Shop) -> None:
    path = shop.consumer()
    other = shop.consumer("others")
    shop.publish(1, 2)
    good = tokens(shop.client.get(f"{path}/next", params={"batch_size": 10, **WAIT}))
    foreign = tokens(shop.client.get(f"{other}/next", params=WAIT))
    mixed = [good[0], "garbage", "", foreign[0], "é" * 50, good[1]]
    body = problem(shop.client.post(f"{path}/ack", json={"ack_tokens": mixed}), 409)
    assert body["acked"] == 2
    assert [item["ack_token"] for item in body["refused"]] == [
        "garbage", "", foreign[0], "é" * 50,
    ]  # fmt: skip
    assert {item["reason"] for item in body["refused"]} == {"unknown"}
    assert shop.client.post(f"{other}/ack", json={"ack_tokens": foreign}).status_code == 200


def test_nothing_to_ack_is_fine(shop: Shop) -> None:
    path = shop.consumer()
    assert shop.client.post(f"{path}/ack", json={"ack_tokens": []}).json() == {"success": True}


def test_nack_and_extend_report_what_they_refuse(shop: Shop) -> None:
    path = shop.consumer()
    for action, done in (("nack", "nacked"), ("extend", "extended")):
        answer = shop.client.post(f"{path}/{action}", json={"ack_tokens": ["garbage"]})
        body = problem(answer, 409)
        assert body[done] == 0
        assert body["refused"] == [{"ack_token": "garbage", "reason": "unknown"}]


def test_extend_gives_more_time(shop: Shop) -> None:
    path = shop.consumer(ack_wait_ms=600)
    shop.publish(1)
    taken = tokens(shop.client.get(f"{path}/next", params=WAIT))
    body = {"ack_tokens": taken, "ack_wait_ms": 20_000}
    assert shop.client.post(f"{path}/extend", json=body).json() == {"success": True}
    assert ids(shop.client.get(f"{path}/next", params={"wait_for_ms": 1200})) == []
    # Without a time it is ack_wait_ms from now.
    assert shop.client.post(f"{path}/extend", json={"ack_tokens": taken}).status_code == 200
    assert ids(shop.client.get(f"{path}/next", params=WAIT)) == [1]


def test_at_max_ack_pending_only_redeliveries_are_handed_out(shop: Shop) -> None:
    path = shop.consumer(max_ack_pending=2)
    shop.publish(1, 2, 3)
    taken = shop.client.get(f"{path}/next", params={"batch_size": 10, **WAIT})
    assert ids(taken) == [1, 2]
    assert ids(shop.client.get(f"{path}/next")) == []
    shop.client.post(f"{path}/nack", json={"ack_tokens": tokens(taken)[1:]})
    again = shop.client.get(f"{path}/next", params={"batch_size": 10, **WAIT})
    assert ids(again) == [2]
    shop.client.post(f"{path}/ack", json={"ack_tokens": tokens(taken)[:1]})
    assert ids(shop.client.get(f"{path}/next", params={"batch_size": 10, **WAIT})) == [3]


def test_one_waiting_receive_too_many_is_429(shop: Shop) -> None:
    path = shop.consumer(max_waiting=1)
    first = Later(lambda: shop.client.get(f"{path}/next", params=WAIT))
    shop.api.until_waiting(1)
    deadline = time.monotonic() + 60
    while (answer := shop.client.get(f"{path}/next", params={"wait_for_ms": 1})).status_code == 200:
        assert time.monotonic() < deadline  # the first one counts from the consumer's next step on
    problem(answer, 429)
    assert answer.headers["retry-after"] == "1"
    shop.publish(1)
    assert ids(first.result()) == [1]


def test_messages_of_a_group_come_one_after_the_other(shop: Shop) -> None:
    path = shop.consumer()
    publish(
        shop.store, shop.stream, [inserted("a", n=1), inserted("b", n=1), updated("a", n=2)]
    )  # fmt: skip
    first = shop.client.get(f"{path}/next", params={"batch_size": 10, **WAIT})
    assert ids(first) == ["a", "b"]
    assert ids(shop.client.get(f"{path}/next", params={"wait_for_ms": 100})) == []
    taken = tokens(first)[:1]
    shop.client.post(f"{path}/nack", json={"ack_tokens": taken, "delay_ms": 400})
    retried = shop.client.get(f"{path}/next", params={"batch_size": 10, **WAIT})
    assert [item["record"]["n"] for item in retried.json()["data"]] == [1]
    shop.client.post(f"{path}/ack", json={"ack_tokens": tokens(retried)})
    last = shop.client.get(f"{path}/next", params={"batch_size": 10, **WAIT})
    assert [item["record"]["n"] for item in last.json()["data"]] == [2]


def test_a_long_poll_wakes_at_once(shop: Shop) -> None:
    path = shop.consumer()
    waiting = Later(lambda: shop.client.get(f"{path}/next", params=WAIT))
    shop.api.until_waiting(1)
    started = time.monotonic()
    shop.publish(1)
    assert ids(waiting.result()) == [1]
    assert time.monotonic() - started < 0.9


def test_a_waiting_worker_is_not_answered_empty_because_others_hold_messages(shop: Shop) -> None:
    path = shop.consumer(ack_wait_ms=700)
    shop.publish(1)
    assert ids(shop.client.get(f"{path}/next", params=WAIT)) == [1]
    started = time.monotonic()
    assert ids(shop.client.get(f"{path}/next", params=WAIT)) == [1]
    assert 0.4 < time.monotonic() - started < 5


def test_wait_for_ms_over_the_answer_is_empty(shop: Shop) -> None:
    path = shop.consumer()
    started = time.monotonic()
    answer = shop.client.get(f"{path}/next", params={"wait_for_ms": 400})
    assert answer.json() == {"data": [], "info": {"num_pending": 0, "num_ack_pending": 0}}
    assert 0.35 < time.monotonic() - started < 3


@pytest.mark.parametrize("ask", ["query", "body", "get"])
def test_a_streams_own_group(shop: Shop, ask: str) -> None:
    path = "/v1/streams/events"
    shop.publish(1, 2, 3)
    asked = {"batch_size": 2, **WAIT}
    options: dict[str, Any] = {"json": asked} if ask == "body" else {"params": asked}
    method = "GET" if ask == "get" else "POST"
    answer = shop.client.request(method, f"{path}/receive", **options)
    body = answer.json()
    assert list(body) == ["data"]
    assert [list(item) for item in body["data"]] == [["ack_id", "data"]] * 2
    assert list(body["data"][0]["data"]) == ["record", "changes", "action", "metadata"]
    assert body["data"][0]["data"]["metadata"]["consumer"]["name"] == "events"
    one, two = tokens(answer)
    assert shop.client.post(f"{path}/ack", json={"ack_ids": [one]}).json() == {"success": True}
    assert shop.client.post(f"{path}/nack", json={"ack_ids": [two]}).json() == {"success": True}
    again = shop.client.post(f"{path}/receive", params={"batch_size": 10})
    assert ids(again) == [2, 3]
    extended = shop.client.post(f"{path}/extend", json={"ack_ids": tokens(again)})
    assert extended.json() == {"success": True}
    body = problem(shop.client.post(f"{path}/ack", json={"ack_ids": ["garbage"]}), 409)
    assert body["refused"] == [{"ack_id": "garbage", "reason": "unknown"}]


def test_a_stream_of_rows_hands_out_deletes_where_it_is_asked_for(shop: Shop) -> None:
    rows = make_stream(shop.store, "rows", kind="rows")
    path = "/v1/http-consumers/copy"
    shop.client.post("/v1/http-consumers", json={"name": "copy", "stream": "rows"})
    publish(shop.store, rows, [inserted("a", n=1), updated("b", n=1), updated("a", n=2)])
    publish(shop.store, rows, [deleted("b")])
    asked = {"batch_size": 10, **WAIT}
    assert ids(shop.client.get(f"{path}/next", params=asked)) == ["a"]
    info = shop.client.get(f"{path}/next").json()["info"]
    assert info == {"num_pending": 0, "num_ack_pending": 1}
    shop.client.patch(path, json={"deletes": True})
    shop.client.post(f"{path}/rewind", json={"to": "all"})
    answer = shop.client.get(f"{path}/next", params=asked)
    assert sorted(ids(answer)) == ["a", "b"]
    shop.client.patch("/v1/http-consumers/rows", json={"deletes": True})
    answer = shop.client.get("/v1/streams/rows/receive", params=asked)
    seen = {item["data"]["record"]["id"]: item["data"] for item in answer.json()["data"]}
    assert list(seen["a"]) == ["record", "metadata"]
    assert seen["a"]["record"] == {"id": "a", "n": 2}
    assert seen["b"]["action"] == "delete"
    body = problem(
        shop.client.patch("/v1/http-consumers/events", json={"deletes": True}), 422, "deletes"
    )
    assert "`actions`" in body["detail"]


def test_workers_in_parallel_get_each_message_once(shop: Shop) -> None:
    path = shop.consumer()
    shop.publish(*range(40))
    workers = [
        Later(lambda: shop.client.get(f"{path}/next", params={"batch_size": 10, **WAIT}))
        for _ in range(4)
    ]
    seen = [key for worker in workers for key in ids(worker.result())]
    assert sorted(seen) == list(range(40))


def test_a_paused_consumer_hands_out_nothing_and_takes_acks(shop: Shop) -> None:
    path = shop.consumer()
    publish(shop.store, shop.stream, [inserted("a", n=1), inserted("b", n=1), updated("a", n=2)])
    first = shop.client.get(f"{path}/next", params={"batch_size": 10, **WAIT})
    assert ids(first) == ["a", "b"]
    assert "paused" not in first.json()
    waiting = Later(lambda: shop.client.get(f"{path}/next", params={"batch_size": 10, **WAIT}))
    shop.api.until_waiting(1)
    assert shop.client.post(f"{path}/pause").json() == {"success": True}
    a, b = tokens(first)
    assert shop.client.post(f"{path}/ack", json={"ack_tokens": [a]}).json() == {"success": True}
    assert shop.client.post(f"{path}/nack", json={"ack_tokens": [b]}).json() == {"success": True}
    empty = shop.client.get(f"{path}/next", params={"batch_size": 10, "wait_for_ms": 200})
    assert empty.json() == {
        "data": [],
        "info": {"num_pending": 1, "num_ack_pending": 1},
        "paused": "admin paused it",
    }
    assert not waiting.done
    status = shop.client.get(path).json()["status"]
    assert (status["state"], status["lag_messages"]) == ("paused", 2)
    assert status["disabled_since"] is not None
    assert shop.client.post(f"{path}/resume").json() == {"success": True}
    # What waited for the consumer is served at once, and in order.
    rest = waiting.result()
    assert sorted(item["record"]["n"] for item in rest.json()["data"]) == [1, 2]
    assert shop.client.get(path).json()["status"]["state"] == "ok"


def test_a_pause_holds_in_every_process_and_for_a_streams_own_group(shop: Shop) -> None:
    other = shop.serve().client
    assert shop.client.post("/v1/http-consumers/events/pause").status_code == 200
    deadline = time.monotonic() + 30
    while other.get("/v1/http-consumers/events").json()["disabled"] is None:
        assert time.monotonic() < deadline
    shop.publish(1)
    empty = other.post("/v1/streams/events/receive", params={"wait_for_ms": 200})
    assert empty.json() == {"data": [], "paused": "admin paused it"}
    waiting = Later(lambda: other.post("/v1/streams/events/receive", params=WAIT))
    shop.client.post("/v1/http-consumers/events/resume")
    assert ids(waiting.result()) == [1]


def test_what_an_ack_has_handed_out_already_is_given_back_by_a_pause(shop: Shop) -> None:
    path = shop.consumer()
    shop.publish(*range(40))
    for _ in range(8):  # receives that follow acks: the next ack hands out for the next receive
        got = shop.client.get(f"{path}/next", params={"batch_size": 2, **WAIT})
        shop.client.post(f"{path}/ack", json={"ack_tokens": tokens(got)}).raise_for_status()
    shop.client.post(f"{path}/pause").raise_for_status()
    assert ids(shop.client.get(f"{path}/next", params={"batch_size": 2})) == []
    shop.client.post(f"{path}/resume").raise_for_status()
    rest = shop.client.get(f"{path}/next", params={"batch_size": 100, **WAIT})
    assert ids(rest) == list(range(16, 40))
    assert {item["deliver_count"] for item in rest.json()["data"]} == {1}
