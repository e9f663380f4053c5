"""Consumers with a filter in SQL: over the API, and two workers of one stream that each take a part."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from tests.api_help import Shop, ids, problem, tokens
from tests.streams_help import Change, deleted, inserted, make_stream, publish, updated

from penstock.expressions import ColumnType
from penstock.streams.consumers.sql_filter import FILTER_FAILED

ALL = {"batch_size": 100, "wait_for_ms": 20_000}
COLUMNS = {
    "id": ColumnType("pg_catalog", "int8"),
    "amount": ColumnType("pg_catalog", "numeric"),
}


def with_catalog(shop: Shop) -> Shop:
    shop.store.save_catalog("shop", {("public", "items"): COLUMNS})
    return shop


def sql(condition: str) -> dict[str, Any]:
    return {"filters": {"sql": condition}}


def test_two_workers_of_one_stream_each_take_their_part(shop: Shop) -> None:
    with_catalog(shop)
    large = shop.consumer("large", **sql("record.amount > 100 and action <> 'delete'"))
    rest = shop.consumer("rest", **sql("not coalesce(record.amount > 100, false)"))
    shop.store.register_consumer("events", "file", "pull", sql("record.amount = 7.0"))
    changes = [inserted(n, amount=f"{n}.50") for n in (99, 100, 7, 5000)]
    publish(shop.store, shop.stream, [*changes, Change({"id": 4, "amount": "7"}), deleted(8)])
    found = shop.client.get(f"{large}/next", params=ALL)
    assert ids(found) == [100, 5000]
    assert found.json()["info"] == {"num_pending": 0, "num_ack_pending": 2}
    assert ids(shop.client.get(f"{rest}/next", params=ALL)) == [99, 7, 4]
    assert ids(shop.client.get("/v1/http-consumers/file/next", params=ALL)) == [4]
    # The delete has its key alone, so the second filter can't be evaluated on it.
    (letter,) = shop.client.get(f"{rest}/dead-letters").json()["data"]
    assert (letter["code"], letter["message"]["record"]) == (FILTER_FAILED, {"id": 8})
    assert "record.amount not in the message" in letter["reason"]
    assert shop.client.get(f"{large}/dead-letters").json()["data"] == []
    # The next one that is handed out is the first one that a changed filter counts for.
    shop.client.post(f"{large}/ack", json={"ack_tokens": tokens(found)})
    changed = shop.client.patch(large, json=sql("record.amount < 10"))
    assert changed.json()["filters"]["sql"] == "record.amount < 10"
    publish(shop.store, shop.stream, [inserted(1, amount="1"), inserted(2, amount="200")])
    assert ids(shop.client.get(f"{large}/next", params=ALL)) == [1]
    # A dead letter that is put back is delivered.
    assert shop.client.post(f"{rest}/dead-letters/{letter['id']}/replay").status_code == 200
    assert 8 in ids(shop.client.get(f"{rest}/next", params=ALL))
    shop.client.delete(large)
    with psycopg.connect(shop.store.url) as connection:
        (count,) = connection.execute(
            "SELECT count(*) FROM pg_proc WHERE pronamespace = 'penstock'::regnamespace"
            " AND proname LIKE 'filter%'"
        ).fetchone() or (0,)
    assert count == 2


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        ("record.amout > 1", "did you mean record.amount?"),
        ("to_char(record.amount) = '1'", "to_char"),
        ("record.amount >", ""),
    ],
)
def test_a_filter_that_does_not_plan_is_refused(shop: Shop, condition: str, text: str) -> None:
    with_catalog(shop)
    body = {"name": "c", "stream": "events", **sql(condition)}
    answer = problem(shop.client.post("/v1/http-consumers", json=body), 422, "filters.sql")
    assert text in answer["detail"]
    path = shop.consumer("d")
    problem(shop.client.patch(path, json=sql(condition)), 422, "filters.sql")
    assert shop.client.get(path).json()["filters"]["sql"] is None


def test_a_source_that_never_ran(shop: Shop) -> None:
    body = {"name": "c", "stream": "events", **sql("record.amount > 1")}
    answer = problem(shop.client.post("/v1/http-consumers", json=body), 409)
    assert "never ran" in answer["detail"]


def test_a_stream_of_rows(shop: Shop) -> None:
    rows = make_stream(with_catalog(shop).store, "rows", kind="rows")
    path = "/v1/http-consumers/c"
    publish(shop.store, rows, [inserted(n, amount=20) for n in (1, 2, 3)])
    publish(shop.store, rows, [updated(1, amount=5), updated(2, amount=30), deleted(3)])
    # Made behind both: a receive between them would get the first versions.
    body = {"name": "c", "stream": "rows", **sql("record.amount > 10")}
    assert shop.client.post("/v1/http-consumers", json=body).status_code == 201
    answer = shop.client.get(f"{path}/next", params=ALL)
    assert ids(answer) == [2]
    assert answer.json()["data"][0]["record"] == {"id": 2, "amount": 30}
    # Superseded and deleted rows are none whose filter could fail.
    assert shop.client.get(f"{path}/dead-letters").json()["data"] == []
