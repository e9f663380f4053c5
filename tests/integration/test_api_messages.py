"""`/v1/streams/{stream}/messages`: by table, action and condition, and one message with its history."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from tests.api_help import Shop, ids, problem
from tests.streams_help import Change, deleted, inserted, make_stream, publish, updated

from penstock.embedded.handles import Database
from penstock.expressions import ColumnType
from penstock.streams.consumers import browse

PATH = "/v1/streams/events/messages"
COLUMNS = {
    "id": ColumnType("pg_catalog", "int8"),
    "amount": ColumnType("pg_catalog", "numeric"),
}


@pytest.fixture
def shop(database: Database) -> Iterator[Shop]:
    with Shop(database.url) as shop:
        shop.store.save_catalog("shop", {("public", "items"): COLUMNS})
        yield shop


def page(shop: Shop, path: str = PATH, **query: Any) -> dict[str, Any]:
    answer = shop.client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def found(shop: Shop, **query: Any) -> list[Any]:
    return [message["record"]["id"] for message in page(shop, **query)["data"]]


def functions(shop: Shop) -> int:
    with psycopg.connect(shop.store.url) as connection:
        row = connection.execute("SELECT count(*) FROM pg_proc WHERE proname LIKE 'filter%'")
        (count,) = row.fetchone() or (None,)
    assert isinstance(count, int)
    return count


def test_the_newest_first_page_by_page(shop: Shop) -> None:
    for n in range(3):
        publish(shop.store, shop.stream, [inserted(n * 2, amount="1"), inserted(n * 2 + 1)])
    first = page(shop, order="newest", limit=4)
    assert [m["record"]["id"] for m in first["data"]] == [5, 4, 3, 2]
    assert found(shop, order="newest", limit=4, cursor=first["next"]) == [1, 0]
    lsn = first["data"][-1]["position"]["lsn"]
    assert found(shop, order="newest", after=f"{lsn}:0") == [5, 4, 3]
    second = page(shop, order="newest", after=f"{lsn}:0", limit=2)
    assert found(shop, order="newest", after=f"{lsn}:0", cursor=second["next"]) == [3]
    assert found(shop, order="oldest", cursor=page(shop, limit=5)["next"]) == [5]


def test_by_table_action_and_condition(shop: Shop) -> None:
    other = Change({"id": 9}, table="orders")
    changes = [inserted(1, amount="5"), updated(2, amount="50"), deleted(3), other]
    publish(shop.store, shop.stream, changes)
    assert found(shop, table="public.orders") == [9]
    assert found(shop, table="public.*") == [1, 2, 3, 9]
    assert found(shop, table="private.*") == []
    assert found(shop, action="update") == [2]
    body = page(shop, filter="record.amount > 10")
    assert [m["record"]["id"] for m in body["data"]] == [2]
    # The delete has its key alone, and so has the row of another table.
    assert (body["looked_at"], body["failures"]) == (4, 2)
    assert "record.amount not in the message" in body["failure"]
    assert found(shop, filter="record.amount < 10", action="insert", order="newest") == [1]
    assert functions(shop) == 0


def test_what_is_wrong_with_a_condition_has_its_position(shop: Shop) -> None:
    for text, position in (("record.id > 0 and record.amout > 1", 19), ("record.amount >", 16)):
        answer = problem(shop.client.get(PATH, params={"filter": text}), 422, "filter")
        assert answer["position"] == position, answer
        assert f"position {position}:" in answer["errors"][0]["message"]
    problem(shop.client.get(PATH, params={"action": "upsert"}), 422, "action")
    problem(shop.client.get(PATH, params={"columns": "a"}), 422, "key")
    make_stream(shop.store, "unseen", source="never")
    answer = problem(shop.client.get("/v1/streams/unseen/messages", params={"filter": "true"}), 409)
    assert "penstock run" in answer["detail"]


def test_a_search_ends_in_time_and_goes_on(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(shop.store, shop.stream, [inserted(n, amount=f"{n}") for n in range(60)])
    monkeypatch.setattr(browse, "_WINDOW", 10)
    # One window after the other, with none passed by between them.
    assert found(shop, order="newest", filter="record.amount < 50", limit=3) == [49, 48, 47]
    assert found(shop, filter="record.amount >= 10", limit=3) == [10, 11, 12]
    monkeypatch.setattr(browse, "_SECONDS", 0.0)
    for order, edge in (("oldest", 55), ("newest", 3)):
        ids: list[Any] = []
        cursor, rounds = None, 0
        text = f"record.amount {'>' if order == 'oldest' else '<'} {edge}"
        while rounds == 0 or cursor is not None:
            query: dict[str, Any] = {"order": order, "filter": text, "limit": 3}
            body = page(shop, **query, **({} if cursor is None else {"cursor": cursor}))
            ids += [m["record"]["id"] for m in body["data"]]
            assert body["looked_at"] <= 11
            cursor, rounds = body["next"], rounds + 1
        assert ids == ([56, 57, 58, 59] if order == "oldest" else [2, 1, 0])
        assert rounds >= 6


def test_a_search_reads_no_more_than_there_is_time_for(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(shop.store, shop.stream, [inserted(n, amount=f"{n}") for n in range(60)])

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            self.now += 0.3
            return self.now

    for name, value in (("_WINDOW", 10), ("_SECONDS", 1.0), ("time", Clock())):
        monkeypatch.setattr(browse, name, value)
    # The first window takes 0.3 of the 1.0 seconds, and 0.4 are left: not enough for twice as many.
    assert page(shop, filter="record.amount < 0", limit=3)["looked_at"] == 10 + 13


def test_a_condition_that_takes_too_long_is_refused_and_others_go_on(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(shop.store, shop.stream, [inserted(n, amount="1") for n in range(200)])
    monkeypatch.setattr(browse, "_MOST_SECONDS", 0.001)
    text = "length(repeat(upper(repeat('a', 9999)), 1)) > 1 and record.amount > 5"
    answer = problem(shop.client.get(PATH, params={"filter": text}), 422, "filter")
    assert "too long" in answer["detail"]
    assert found(shop, limit=1) == [0]


def test_a_stream_of_rows_has_the_newest_versions(shop: Shop) -> None:
    rows = make_stream(shop.store, "rows", kind="rows")
    publish(shop.store, rows, [inserted(1, amount="1"), inserted(2, amount="1")])
    publish(shop.store, rows, [updated(1, amount="9")])
    path = "/v1/streams/rows/messages"
    body = page(shop, path, order="newest")
    assert [m["record"]["id"] for m in body["data"]] == [1, 2]
    assert [m["record"]["id"] for m in page(shop, path, filter="record.amount = 1")["data"]] == [2]


def test_one_message_has_its_history(shop: Shop) -> None:
    dead = shop.consumer("dead", max_deliver=1)
    retried = shop.consumer("retried", max_deliver=5)
    shop.consumer("small", filters={"sql": "record.amount < 10"})
    out = shop.consumer("taken")
    publish(shop.store, shop.stream, [inserted(1, amount="50")])
    for path, delay in ((dead, 0), (retried, 60_000), (out, None)):
        (got,) = shop.client.get(f"{path}/next", params={"wait_for_ms": 20_000}).json()["data"]
        if delay is not None:
            body: dict[str, Any] = {"ack_tokens": [got["ack_token"]], "delay_ms": delay}
            answer = shop.client.post(f"{path}/nack", json=body)
            assert answer.status_code == 200, answer.text
    (at,) = [m["position"] for m in page(shop)["data"]]
    (message,) = page(shop, f"{PATH}/{at['lsn']}:{at['idx']}")["messages"]
    assert message["record"] == {"id": 1, "amount": "50"}
    history = {each["consumer"]: each for each in message["history"]}
    assert {name: each["state"] for name, each in history.items()} == {
        "dead": "dead", "events": "waiting", "retried": "retry", "small": "filtered",
        "taken": "in_flight",
    }  # fmt: skip
    assert message["more_consumers"] == 0
    assert history["dead"]["dead_letter"]["code"] == "max_deliver"
    assert history["dead"]["deliver_count"] == 1
    assert history["retried"]["last_error"]["reason"]
    assert history["retried"]["until"]
    # A dead letter that is replayed waits, and is done when it is acked.
    number = history["dead"]["dead_letter"]["id"]
    shop.client.post(f"/v1/dead-letters/{number}/replay")

    def state() -> str:
        path = f"{PATH}/{at['lsn']}:{at['idx']}"
        (only,) = page(shop, path, consumer="dead")["messages"][0]["history"]
        return str(only["state"])

    assert state() == "replay"
    (got,) = shop.client.get(f"{dead}/next", params={"wait_for_ms": 20_000}).json()["data"]
    shop.client.post(f"{dead}/ack", json={"ack_tokens": [got["ack_token"]]})
    assert state() == "done"
    problem(shop.client.get(f"{PATH}/1:1"), 404)
    problem(shop.client.get(f"{PATH}/x"), 422, "position")


def test_a_consumers_filters_are_tried_and_nothing_is_left(shop: Shop) -> None:
    publish(shop.store, shop.stream, [inserted(n, amount=f"{n}.5") for n in (1, 200)])
    publish(shop.store, shop.stream, [deleted(7), Change({"id": 4}, table="others")])
    taken = [{k: v for k, v in each.items() if k != "position"} for each in page(shop)["data"]]
    path = "/v1/streams/events/try-filters"
    filters = {"table": "public.items", "sql": "record.amount > 100"}

    def tried(filters: dict[str, Any], messages: list[Any]) -> list[tuple[str, str | None]]:
        answer = shop.client.post(path, json={"filters": filters, "messages": messages})
        assert answer.status_code == 200, answer.text
        return [(each["result"], each["why"]) for each in answer.json()["data"]]

    found = tried(filters, taken)
    assert [result for result, _ in found] == ["dropped", "sent", "failed", "dropped"]
    assert "does not hold" in str(found[0][1])
    assert "record.amount not in the message" in str(found[2][1])
    assert "don't name" in str(found[3][1])
    # What a consumer with these filters gets is the same.
    consumer = shop.consumer("large", filters=filters)
    got = shop.client.get(f"{consumer}/next", params={"batch_size": 10, "wait_for_ms": 20_000})
    assert ids(got) == [200]
    assert [r for r, _ in tried({"action": ["delete"]}, taken)] == ["dropped"] * 2 + [
        "sent",
        "dropped",
    ]
    record = {"record": {"sync_id": "s", "collection_id": "stripe:customers"}}
    assert tried({"collection_id": "stripe:customers"}, [record, {"record": {}}])[0][0] == "sent"
    for wrong, field in (
        ({"sql": "record.nothing = 1"}, "filters.sql"), ({"tables": ["a"]}, "filters.tables")
    ):  # fmt: skip
        problem(shop.client.post(path, json={"filters": wrong, "messages": taken}), 422, field)
    for messages in ([], taken * 26, ["text"]):
        assert shop.client.post(path, json={"filters": {}, "messages": messages}).status_code == 422
    assert tried({}, [{"record": None, "metadata": 5}]) == [("sent", None)]
    problem(
        shop.client.post("/v1/streams/none/try-filters", json={"filters": {}, "messages": [{}]}),
        404,
    )
    assert functions(shop) == 1  # that of the consumer
