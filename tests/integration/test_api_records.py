"""Consumers of records and events over HTTP, as the specification of syncs has them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from tests.api_help import Shop, problem
from tests.record_rows import SYNC, batch, captured
from tests.streams_help import make_stream, source_of

from penstock.core.message import Position, RoundPart
from penstock.core.record_forms import SYNCS, form_of, formed, passing_rows
from penstock.sinks.stream import StreamRoute, StreamWriter
from penstock.streams.records import StreamRecord

BODY = (
    '{"name": "my-http-consumer", "ack_wait_ms": 30000, "max_deliver": -1, "deliver_policy": "all",'
    ' "filters": {"collection_id": "salesforce:contact", "resource_id": "*"}}'
)
PATH = "/v1/http-consumers"
OTHER = "00000000-0000-4000-8000-000000000000"


def publish(shop: Shop, name: str, *rows: dict[str, Any], lsn: int = 7) -> StreamRecord:
    """Write rows of the records table to one of the two streams, in one round."""
    kind = "rows" if name == "records" else "changes"
    stream = make_stream(
        shop.store, name, source=SYNCS, kind=kind,
        retention=None if kind == "rows" else timedelta(days=7),
    )  # fmt: skip
    whole = batch(
        *[row | {"commit_lsn": lsn, "group_hash": lsn * 100 + n} for n, row in enumerate(rows)]
    )
    messages: pa.RecordBatch = formed(whole.filter(passing_rows(whole, kind)), kind)
    source = source_of(shop.store, stream)
    route = StreamRoute(stream.name, stream.id, form_of(SYNCS, kind))
    writer = StreamWriter(shop.store.url, source.id, source.base, [route])
    writer.begin()
    writer.write(0, messages)
    writer.commit(RoundPart(Position(lsn - 1, 99), Position(lsn, 99), 0, 1))
    writer.close()
    return stream


def contact(idx: int = 0, **columns: Any) -> dict[str, Any]:
    """Return a row of a Salesforce contact."""
    given = {
        "provider": "salesforce", "collection_id": "salesforce:contact",
        "id": f"11111111-2222-5333-8444-{idx:012d}", "upstream_id": f"c{idx}",
        "data": {"FirstName": "Paul"},
    }  # fmt: skip
    return captured(idx=idx, **{**given, **columns})


def received(shop: Shop, name: str, size: int = 10, wait_ms: int = 0) -> dict[str, Any]:
    """Return what a receive answers."""
    answer = shop.client.get(f"{PATH}/{name}/next?batch_size={size}&wait_for_ms={wait_ms}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_the_body_of_the_specification_makes_a_consumer_of_records(shop: Shop) -> None:
    missing = shop.client.post(PATH, content=BODY)
    assert missing.status_code == 404
    assert "no stream 'records'" in missing.text
    publish(shop, "records", contact(0), contact(1), captured(idx=2))
    headers = {"content-type": "application/json"}
    answer = shop.client.post(PATH, content=BODY, headers=headers)
    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert made["stream"] == "records"
    body = received(shop, "my-http-consumer", 1)
    assert body["info"] == {"num_pending": 1, "num_ack_pending": 1}
    (first,) = body["data"]
    assert list(first) == ["ack_token", "deliver_count", "record", "metadata"]
    record = first["record"]
    assert record["collection_id"] == "salesforce:contact"
    assert record["resource_id"] == record["sync_id"] == SYNC
    assert record["data"] == {"FirstName": "Paul"}
    assert record["upstream_updated_at"]
    assert "payload_hash" not in record
    by_id = received(shop, made["id"])
    assert [each["record"]["upstream_id"] for each in by_id["data"]] == ["c1"]


def test_events_come_as_events(shop: Shop) -> None:
    publish(shop, "changes", contact(0), contact(1, deleted=True), captured("delete", idx=2))
    shop.client.post(PATH, json={"name": "events-worker", "stream": "changes"})
    (only,) = received(shop, "events-worker")["data"]
    assert list(only) == ["ack_token", "deliver_count", "event", "metadata"]
    assert only["event"]["event"] == only["event"]["event_type"] == "inserted"


@pytest.mark.parametrize(
    ("filters", "taken"),
    [
        ({"collection_id": ["salesforce:contact", "x:y"]}, ["c0"]),
        ({"provider": "servicenow"}, ["inc_2891"]),
        ({"provider": ["servicenow", "salesforce"], "sync_id": "*"}, ["c0", "inc_2891"]),
        ({"sync_id": [SYNC]}, ["c0", "inc_2891"]),
        ({"resource_id": OTHER}, []),
    ],
)
def test_filters(shop: Shop, filters: dict[str, Any], taken: list[str]) -> None:
    publish(shop, "records", contact(0), captured(idx=1))
    assert shop.client.post(PATH, json={"name": "workers", "filters": filters}).is_success
    found = received(shop, "workers")["data"]
    assert [each["record"]["upstream_id"] for each in found] == taken


@pytest.mark.parametrize(
    ("policy", "taken"), [("all", [0, 1, 2]), ("new", []), ("last", [2]), ("1h", [1, 2])]
)
def test_where_a_consumer_begins(shop: Shop, policy: str, taken: list[int]) -> None:
    now = datetime.now(UTC)
    for n, ago in enumerate((timedelta(hours=2), timedelta(minutes=5), timedelta(minutes=1))):
        row = contact(n)
        at = (now - ago).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        row["metadata"] = row["metadata"].replace("2026-01-31T12:00:02.000000Z", at)
        publish(shop, "records", row, lsn=10 + n)
    answer = shop.client.post(PATH, json={"name": "workers", "deliver_policy": policy})
    assert answer.status_code == 201, answer.text
    found = received(shop, "workers")["data"]
    assert [int(each["record"]["upstream_id"][1:]) for each in found] == taken
    problem(
        shop.client.post(PATH, json={"name": "x", "deliver_policy": "soon"}), 422, "deliver_policy"
    )


def test_the_list_of_syncs_changes_and_the_others_lose_and_repeat_nothing(shop: Shop) -> None:
    came: list[str] = []
    path = f"{PATH}/workers"

    def both(lsn: int) -> None:
        """Publish an event of each of two syncs."""
        one = contact(lsn, upstream_id=f"a{lsn}")
        other = contact(50 + lsn, upstream_id=f"b{lsn}", sync_id=OTHER)
        publish(shop, "changes", one, other, lsn=lsn)

    def take(*last: str, size: int = 10) -> list[str]:
        """Receive until these events have come: one receive may be too early."""
        tokens: list[str] = []
        while not {*last} <= {*came}:
            found = received(shop, "workers", size, 30_000)["data"]
            assert found, f"{last} has not come behind {came}"
            came.extend(each["event"]["upstream_id"] for each in found)
            tokens += [each["ack_token"] for each in found]
        return tokens

    def ack(tokens: list[str]) -> None:
        answer = shop.client.post(f"{path}/ack", json={"ack_tokens": tokens})
        assert answer.is_success, answer.text

    def follow(*syncs: str) -> None:
        answer = shop.client.patch(path, json={"filters": {"sync_id": list(syncs)}})
        assert answer.is_success, answer.text

    both(10)
    both(11)
    body = {"name": "workers", "stream": "changes", "filters": {"sync_id": [SYNC]}}
    assert shop.client.post(PATH, json=body).is_success
    held = take("a10", size=1)
    assert came == ["a10"]
    follow(SYNC, OTHER)  # while one is in flight and one waits
    both(12)
    ack(held)
    ack(take("a12", "b12"))
    follow(OTHER)
    both(13)
    ack(take("b13"))
    follow(OTHER, SYNC)
    both(14)
    ack(take("a14", "b14"))
    assert received(shop, "workers")["data"] == []
    of_one = [each for each in came if each.startswith("a")]
    of_other = [each for each in came if each.startswith("b")]
    assert of_one == ["a10", "a11", "a12", "a14"]
    assert of_other[-3:] == ["b12", "b13", "b14"]
    assert len(set(came)) == len(came)
