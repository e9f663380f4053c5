"""The Management API over HTTP: consumers, rewind, dead letters, looking, streams."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.api_help import Shop, ids, problem, tokens
from tests.streams_help import Change, deleted, inserted, make_stream, publish, updated

from penstock.cli.api_tools import ApiTools
from penstock.embedded.handles import Database

WORKERS = "/v1/http-consumers/workers"
WAIT = {"batch_size": 100, "wait_for_ms": 20_000}
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture(scope="module")
def refusing(shared_database: Database) -> Iterator[Shop]:
    """A shop with a consumer `workers`, for tests that change nothing."""
    with Shop(shared_database.url) as shop:
        shop.consumer()
        yield shop


def test_a_consumer_has_the_defaults(shop: Shop) -> None:
    body = {"name": "workers", "stream": "events"}
    answer = shop.client.post("/v1/http-consumers", json=body)
    assert answer.status_code == 201
    made = answer.json()
    assert made["name"] == "workers"
    assert made["stream"] == "events"
    assert made["type"] == "pull"
    assert made["own"] is False
    assert made["disabled"] is None
    assert (made["ack_wait_ms"], made["max_deliver"]) == (30_000, -1)
    assert (made["max_ack_pending"], made["max_waiting"]) == (1000, 20)
    assert made["deliver_policy"] == "all"
    assert shop.client.get("/v1/http-consumers/workers").json() == made
    assert made in shop.client.get("/v1/http-consumers").json()["data"]


def test_a_consumers_status_has_why_its_messages_fail(shop: Shop) -> None:
    path = shop.consumer(max_deliver=2)
    shop.publish("a", "b")
    for _ in range(2):
        got = shop.client.get(f"{path}/next", params=WAIT).json()["data"]
        taken = [message["ack_token"] for message in got if message["record"]["id"] == "a"]
        nack = {"ack_tokens": taken, "reason": "no such shop\0"}
        assert shop.client.post(f"{path}/nack", json=nack).status_code == 200
    shown = shop.client.get(path).json()
    status = shown["status"]
    assert (status["lag_messages"], status["in_flight"], status["failures"]) == (1, 1, 2)
    assert (status["redeliveries"], status["dead_letters"], status["state"]) == (1, 1, "ok")
    assert status["lag_seconds"] > 0
    why = "a worker nacked it: no such shop\0"
    assert (status["last_error"]["status"], status["last_error"]["reason"]) == (None, why)
    listed = {c["name"]: c for c in shop.client.get("/v1/http-consumers").json()["data"]}
    assert listed["workers"]["status"]["failures"] == 2
    assert listed["events"]["status"]["lag_messages"] == 2
    (letter,) = shop.client.get(f"{path}/dead-letters").json()["data"]
    assert letter["reason"] == (
        "The last of 2 deliveries failed: a worker nacked it: no such shop\N{REPLACEMENT CHARACTER}"
    )


def test_a_body_needs_no_content_type(shop: Shop) -> None:
    answer = shop.client.post(
        "/v1/http-consumers",
        content=b'{"name":"workers","stream":"events"}',
        headers={"Content-Type": "application/x-www-form-urlencoded"},  # as curl -d has it
    )
    assert answer.status_code == 201


def test_patch_changes_what_it_gives_and_null_is_the_default(shop: Shop) -> None:
    path = shop.consumer(ack_wait_ms=100, max_waiting=3)
    changed = shop.client.patch(path, json={"ack_wait_ms": 700, "max_deliver": 5})
    assert changed.status_code == 200
    assert changed.json()["ack_wait_ms"] == 700
    assert changed.json()["max_waiting"] == 3
    assert shop.client.patch(path, json={"max_waiting": None}).json()["max_waiting"] == 20
    assert shop.client.get(path).json()["max_deliver"] == 5


def test_a_consumer_that_is_dropped_is_gone(shop: Shop) -> None:
    path = shop.consumer()
    assert shop.client.delete(path).json() == {"success": True}
    for answer in (
        shop.client.get(path),
        shop.client.delete(path),
        shop.client.patch(path, json={}),
        shop.client.get(f"{path}/next"),
        shop.client.post(f"{path}/ack", json={"ack_tokens": []}),
        shop.client.post(f"{path}/rewind", json={"to": "all"}),
        shop.client.get(f"{path}/messages"),
        shop.client.get(f"{path}/dead-letters"),
        shop.client.post(f"{path}/dead-letters/1/replay"),
        shop.client.post(f"{path}/resume"),
    ):
        assert "workers" in problem(answer, 404)["detail"]


def test_names_are_taken_once(shop: Shop) -> None:
    shop.consumer()
    for name in ("workers", "events"):
        body = {"name": name, "stream": "events"}
        problem(shop.client.post("/v1/http-consumers", json=body), 409, "name")


def test_a_stream_that_is_not_there(refusing: Shop) -> None:
    body = {"name": "other", "stream": "nothing"}
    answer = refusing.client.post("/v1/http-consumers", json=body)
    assert "nothing" in problem(answer, 404)["detail"]
    problem(refusing.client.get("/v1/streams/nothing"), 404)
    problem(refusing.client.get("/v1/streams/nothing/receive"), 404)


def test_a_streams_own_group_stays(refusing: Shop) -> None:
    assert refusing.client.get("/v1/http-consumers/events").json()["own"] is True
    problem(refusing.client.delete("/v1/http-consumers/events"), 409)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"ack_wait_ms": 0}, "ack_wait_ms"),
        ({"ack_wait_ms": "soon"}, "ack_wait_ms"),
        ({"max_deliver": 0}, "max_deliver"),
        ({"max_ack_pending": 100_001}, "max_ack_pending"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"deliver_policy": "latest"}, "deliver_policy"),
        ({"filters": {"action": "upsert"}}, "filters.action[0]"),
        ({"filters": {"tables": "x"}}, "filters.tables"),
        ({"filters": {"table": "a\0b"}}, "filters.table[0]"),
        ({"filters": {"resource_id": ["crm", "a\0b"]}}, "filters.resource_id[1]"),
        ({"ack_wait": 5}, "ack_wait"),
        ({"url": "https://example.com"}, "url"),
        ({"type": "push"}, "type"),
        ({"name": "a/b"}, "name"),
        ({"stream": 7}, "stream"),
        ({"stream": "ev\0ents"}, "stream"),
    ],
)
def test_a_wrong_setting_is_named_by_its_field(
    refusing: Shop, settings: dict[str, Any], field: str
) -> None:
    body = {"name": "other", "stream": "events", **settings}
    problem(refusing.client.post("/v1/http-consumers", json=body), 422, field)
    if field not in ("name", "stream", "type"):
        problem(refusing.client.patch(WORKERS, json=settings), 422, field)


WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"ack_wait_ms": True}, "ack_wait_ms"),
    ({"ack_wait_ms": "3000"}, "ack_wait_ms"),
    ({"ack_wait_ms": 1.5}, "ack_wait_ms"),
    ({"max_deliver": "5"}, "max_deliver"),
    ({"max_ack_pending": True}, "max_ack_pending"),
    ({"max_waiting": "20"}, "max_waiting"),
    ({"filters": {"table": True}}, "filters.table"),
    ({"filters": {"table": [1]}}, "filters.table[0]"),
    ({"timeout_ms": "5"}, "timeout_ms"),
    ({"concurrency": True}, "concurrency"),
    ({"batch": 1}, "batch"),
    ({"batch": "true"}, "batch"),
    ({"batch_size": "10"}, "batch_size"),
    ({"allow_private": "yes"}, "allow_private"),
    ({"headers": {"X": 5}}, "headers.X"),
    ({"secrets": SECRET}, "secrets"),
]


def test_a_setting_of_another_type(shop: Shop) -> None:
    body = {"name": "hook", "stream": "events", "type": "webhook", "url": "https://example.com"}
    for settings, field in WRONG_TYPES:
        problem(shop.client.post("/v1/http-consumers", json={**body, **settings}), 422, field)
    assert shop.client.post("/v1/http-consumers", json=body).status_code == 201
    for settings, field in WRONG_TYPES:
        problem(shop.client.patch("/v1/http-consumers/hook", json=settings), 422, field)


def test_what_is_no_name(shop: Shop) -> None:
    for name in ("a.b", "a" * 64, "-a", "", "a\n", True, 5):
        body = {"name": name, "stream": "events"}
        problem(shop.client.post("/v1/http-consumers", json=body), 422, "name")
    shop.consumer("a" * 63)


def test_what_is_no_number_in_a_url(refusing: Shop) -> None:
    for number in ("1_0", "5.0", "true", "%2B5", "%205", "%D9%A3", ""):
        problem(refusing.client.get(f"{WORKERS}/messages?limit={number}"), 422, "limit")
        problem(refusing.client.get(f"{WORKERS}/dead-letters?limit={number}"), 422, "limit")
        if number:
            problem(refusing.client.post(f"{WORKERS}/dead-letters/{number}/replay"), 422, "id")


def test_what_is_no_place_to_rewind_to(refusing: Shop) -> None:
    for place in (
        {"lsn": True, "idx": 0},
        {"lsn": "5", "idx": 0},
        {"lsn": 5, "idx": False},
        5,
        True,
    ):
        problem(refusing.client.post(f"{WORKERS}/rewind", json={"to": place}), 422, "to")


def test_what_a_consumer_needs(shop: Shop) -> None:
    answer = shop.client.post("/v1/http-consumers", json={})
    # Without a stream it is a consumer of the syncs' records.
    assert "name: field required" in problem(answer, 422, "name")["detail"]
    path = shop.consumer()
    problem(shop.client.patch(path, json={"name": "other"}), 422, "name")


def test_a_webhooks_secrets_are_never_shown(shop: Shop) -> None:
    settings = {
        "type": "webhook",
        "url": "https://user:hidden@example.com/hook?key=hidden",
        "headers": {"X-Key": "hidden"},
        "secrets": [SECRET],
    }
    body = {"name": "hook", "stream": "events", **settings}
    answers = [
        shop.client.post("/v1/http-consumers", json=body),
        shop.client.get("/v1/http-consumers/hook"),
        shop.client.get("/v1/http-consumers"),
        shop.client.patch("/v1/http-consumers/hook", json={"timeout_ms": 5}),
    ]
    assert answers[0].status_code == 201, answers[0].text
    assert answers[-1].json()["timeout_ms"] == 5
    assert answers[0].json()["url"] == "https://example.com/hook"
    wrong = {**body, "name": "other", "secrets": ["whsec_hidden"], "headers": {"a b": "hidden"}}
    answers.append(shop.client.post("/v1/http-consumers", json=wrong))
    problem(answers[-1], 422, "headers", "secrets")
    for answer in answers:
        assert "hidden" not in answer.text
        assert SECRET not in answer.text


def test_a_disabled_webhook_shows_why_and_can_be_enabled(shop: Shop, database: Database) -> None:
    body = {"name": "hook", "stream": "events", "type": "webhook", "url": "https://example.com"}
    shop.client.post("/v1/http-consumers", json=body)
    path = "/v1/http-consumers/hook"
    database.execute("UPDATE penstock.consumers SET disabled = '410 Gone' WHERE name = 'hook'")
    database.execute("SELECT pg_notify('penstock', 'k')")
    assert _soon(lambda: shop.client.get(path).json()["disabled"]) == "410 Gone"
    assert shop.client.post(f"{path}/resume").json() == {"success": True}
    assert shop.client.get(path).json()["disabled"] is None


def _soon(look: Any) -> Any:
    deadline = time.monotonic() + 120
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def test_filters(shop: Shop) -> None:
    make = [
        Change({"id": 1}, table="orders", schema="public"),
        Change({"id": 2}, table="items", schema="public"),
        Change({"id": 3}, table="orders", schema="crm"),
        updated(4),
    ]
    publish(shop.store, shop.stream, make)
    for name, filters, expected in (
        ("a", {"collection_id": "orders"}, [1, 3]),
        ("b", {"table": "orders", "resource_id": "crm"}, [3]),
        ("c", {"action": ["update"]}, [4]),
        ("d", {"collection_id": "*", "resource_id": "*"}, [1, 2, 3, 4]),
    ):
        path = shop.consumer(name, filters=filters)
        assert ids(shop.client.get(f"{path}/next", params=WAIT)) == expected, name


def test_deliver_policy_new_begins_with_what_comes(shop: Shop) -> None:
    shop.publish(1)
    path = shop.consumer(deliver_policy="new")
    shop.publish(2)
    assert ids(shop.client.get(f"{path}/next", params=WAIT)) == [2]


def test_rewind(shop: Shop) -> None:
    path = shop.consumer()
    positions = shop.publish(1, 2, 3)
    answer = shop.client.get(f"{path}/next", params=WAIT)
    shop.client.post(f"{path}/ack", json={"ack_tokens": tokens(answer)})
    second = {"lsn": positions[1].lsn, "idx": positions[1].idx}
    last = {"lsn": 2**63 - 1, "idx": 2**53 - 1}
    before = datetime(2025, 1, 1, tzinfo=UTC)
    for to, expected in (
        (second, [2, 3]),
        (last, []),
        ("all", [1, 2, 3]),
        ("new", []),
        (before.isoformat(), [1, 2, 3]),
        ((before + timedelta(days=800)).isoformat(), []),
    ):
        assert shop.client.post(f"{path}/rewind", json={"to": to}).json() == {"success": True}
        answer = shop.client.get(f"{path}/next", params={"batch_size": 100})
        assert ids(answer) == expected, to
    old = tokens(answer)
    shop.client.post(f"{path}/rewind", json={"to": "all"})
    answer = shop.client.get(f"{path}/next", params=WAIT)
    shop.client.post(f"{path}/rewind", json={"to": "all"})
    old = tokens(answer)
    refused = problem(shop.client.post(f"{path}/ack", json={"ack_tokens": old}), 409)["refused"]
    assert {item["reason"] for item in refused} == {"unknown"}


def test_what_a_rewind_would_do(shop: Shop) -> None:
    path = shop.consumer(filters={"action": ["insert"]}, max_ack_pending=100)
    at = [{"lsn": each.lsn, "idx": each.idx} for each in shop.publish(1, 2, 2, 2, 3, 4)]
    publish(shop.store, shop.stream, [deleted(4)])
    # 1 and 3 are acked, the first 2 is in flight and holds the others back, 4 waits.
    first = shop.client.get(f"{path}/next", params={**WAIT, "batch_size": 2})
    shop.client.post(f"{path}/ack", json={"ack_tokens": tokens(first)[:1]}).raise_for_status()
    out = shop.client.get(f"{path}/next", params={"batch_size": 1})
    assert (ids(first), ids(out)) == ([1, 2], [3])
    shop.client.post(f"{path}/ack", json={"ack_tokens": tokens(out)}).raise_for_status()

    def effect(to: Any) -> tuple[list[str], list[str]]:
        answer = shop.client.post(f"{path}/rewind", params={"dry_run": True}, json={"to": to})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        return body["losses"], [each for each in body["consequences"] if each not in body["losses"]]

    def lost(number: int) -> list[str]:
        text = f"{number} message{'' if number == 1 else 's'}"
        return [f"consumer workers skips {text} that it is not done with"]

    assert effect("new") == (lost(4), [])
    assert effect(at[5]) == (lost(3), [])
    assert effect("all") == effect(at[0]) == ([], ["consumer workers delivers 5 messages again"])
    # Behind what is in flight, and before what it has passed.
    assert effect(at[4]) == (lost(3), ["consumer workers delivers 1 message again"])
    assert effect(at[3]) == (lost(2), ["consumer workers delivers 2 messages again"])
    assert effect(at[2]) == (lost(1), ["consumer workers delivers 3 messages again"])
    assert ids(shop.client.get(f"{path}/next", params={"batch_size": 9})) == [4]  # nothing was done


@pytest.mark.parametrize(
    "to",
    [None, "", "yesterday", "2026-01-31T12:00:00", {"lsn": 1, "idx": -1}, {"lsn": 1}, 7, [], True,
     {"lsn": 1, "idx": 0, "more": 1}, {"lsn": 2**63, "idx": 0},
     {"lsn": 1, "idx": 2**53}, "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"],
)  # fmt: skip
def test_a_rewind_to_nowhere(refusing: Shop, to: Any) -> None:
    body = problem(refusing.client.post(f"{WORKERS}/rewind", json={"to": to}), 422, "to")
    assert "2026-01-31T12:00:00Z" in body["detail"]


def test_positions_are_those_of_the_metadata_after_the_source_was_replaced(shop: Shop) -> None:
    path = shop.consumer(max_deliver=1)
    shop.publish("old")
    shop.store.register_source("shop", "another cluster's")
    shop.publish("new", "newest")
    pending = shop.client.get(f"{path}/messages").json()["data"]
    positions = {message["record"]["id"]: message["position"] for message in pending}
    assert [positions["new"], positions["newest"]] == [_place(message) for message in pending[1:]]
    assert shop.client.get("/v1/streams/events").json()["head"] == positions["newest"]
    for start, expected in (
        ("newest", ["newest"]),
        ("old", ["old", "new", "newest"]),
        ("new", ["new", "newest"]),
    ):
        shop.client.post(f"{path}/rewind", json={"to": positions[start]}).raise_for_status()
        answer = shop.client.get(f"{path}/next", params=WAIT)
        assert ids(answer) == expected
    shop.client.post(f"{path}/nack", json={"ack_tokens": tokens(answer)}).raise_for_status()
    letters = shop.client.get(f"{path}/dead-letters").json()["data"]
    assert [letter["position"] for letter in letters] == [positions["new"], positions["newest"]]
    for lsn, expected in ((2**63 - 1, []), (1 - 2**63, ["old", "new", "newest"])):
        to = {"lsn": lsn, "idx": 0}
        shop.client.post(f"{path}/rewind", json={"to": to}).raise_for_status()
        assert ids(shop.client.get(f"{path}/next", params={"batch_size": 100})) == expected


def _place(message: dict[str, Any]) -> dict[str, int]:
    metadata = message["metadata"]
    return {"lsn": metadata["commit_lsn"], "idx": metadata["commit_idx"]}


def test_dead_letters(shop: Shop) -> None:
    path = shop.consumer(max_deliver=2)
    shop.publish(1, 2)
    for _ in range(2):
        answer = shop.client.get(f"{path}/next", params=WAIT)
        assert ids(answer) == [1, 2]
        shop.client.post(f"{path}/nack", json={"ack_tokens": tokens(answer)})
    assert ids(shop.client.get(f"{path}/next")) == []
    letters = shop.client.get(f"{path}/dead-letters").json()["data"]
    assert [letter["message"]["record"]["id"] for letter in letters] == [1, 2]
    assert [letter["deliver_count"] for letter in letters] == [2, 2]
    first = letters[0]
    assert first["code"] == "max_deliver"
    assert first["reason"]
    assert first["replayed_at"] is None
    assert set(first["position"]) == {"lsn", "idx"}
    page = shop.client.get(f"{path}/dead-letters", params={"limit": 1}).json()
    assert [letter["id"] for letter in page["data"]] == [first["id"]]
    page = shop.client.get(f"{path}/dead-letters", params={"cursor": page["next"]}).json()
    assert ([letter["id"] for letter in page["data"]], page["next"]) == ([letters[1]["id"]], None)
    dead = shop.client.get(f"{path}/messages", params={"state": "dead"}).json()["data"]
    assert [message["record"]["id"] for message in dead] == [1, 2]

    replay = f"{path}/dead-letters/{first['id']}/replay"
    assert shop.client.post(replay).json() == {"success": True}
    again = shop.client.get(f"{path}/next", params=WAIT)
    assert ids(again) == [1]
    shop.client.post(f"{path}/ack", json={"ack_tokens": tokens(again)})
    letters = shop.client.get(f"{path}/dead-letters").json()["data"]
    assert [bool(letter["replayed_at"]) for letter in letters] == [True, False]
    problem(shop.client.post(f"{path}/dead-letters/999999/replay"), 404)
    problem(shop.client.post(f"{path}/dead-letters/x/replay"), 422, "id")
    problem(shop.client.get(f"{path}/dead-letters", params={"limit": 0}), 422, "limit")


def test_looking_takes_nothing(shop: Shop) -> None:
    path = shop.consumer()
    positions = shop.publish(1, 2, 3)
    answer = shop.client.get(f"{path}/next", params={"batch_size": 1, "wait_for_ms": 20_000})
    for _ in range(2):
        held = shop.client.get(f"{path}/messages", params={"state": "delivered"}).json()["data"]
        assert [message["record"]["id"] for message in held] == ids(answer) == [1]
        assert held[0]["deliver_count"] == 1
        assert datetime.fromisoformat(held[0]["held_until"]) > datetime.now(UTC)
        assert held[0]["position"] == {"lsn": positions[0].lsn, "idx": positions[0].idx}
        pending = shop.client.get(f"{path}/messages", params={"state": "pending"}).json()["data"]
        assert [message["record"]["id"] for message in pending] == [2, 3]
        assert [message["held_until"] for message in pending] == [None, None]
    one = shop.client.get(f"{path}/messages", params={"limit": 1}).json()["data"]
    assert [message["record"]["id"] for message in one] == [2]
    assert ids(shop.client.get(f"{path}/next", params=WAIT)) == [2, 3]
    problem(shop.client.get(f"{path}/messages", params={"state": "acked"}), 422, "state")
    problem(shop.client.get(f"{path}/messages", params={"limit": 1001}), 422, "limit")
    problem(shop.client.get(f"{path}/messages", params={"stat": "dead"}), 422, "stat")


def test_streams(shop: Shop) -> None:
    make_stream(shop.store, "newest", kind="rows")
    make_stream(shop.store, "week", retention=timedelta(days=7))
    positions = publish(shop.store, shop.stream, [inserted(1), inserted(2)])
    streams = {s["name"]: s for s in shop.client.get("/v1/streams").json()["data"]}
    assert list(streams) == ["events", "newest", "week"]
    assert streams["newest"]["kind"] == "rows"
    assert streams["newest"]["retention_ms"] is None
    assert streams["week"]["retention_ms"] == 7 * 86_400_000
    events = shop.client.get("/v1/streams/events").json()
    assert events == streams["events"]
    assert (events["kind"], events["source"], events["segments"]) == ("changes", "shop", 1)
    assert events["head"] == {"lsn": positions[-1].lsn, "idx": positions[-1].idx}


def test_lost_updates_are_refused(shop: Shop) -> None:
    """A consumer has the ETag of its entity, by either path."""
    path = shop.consumer()
    first = shop.client.get(path).headers["etag"]
    assert first == shop.client.get("/v1/consumers/workers").headers["etag"]
    changed = shop.client.patch(path, json={"max_waiting": 3}, headers={"If-Match": first})
    assert changed.status_code == 200, changed.text
    assert changed.headers["etag"] != first
    for method, body in (("PATCH", {"max_waiting": 4}), ("DELETE", None)):
        late = shop.client.request(method, path, json=body, headers={"If-Match": first})
        problem(late, 412)
        assert late.headers["etag"] == changed.headers["etag"]
    assert shop.client.get(path).json()["max_waiting"] == 3
    newest = {"If-Match": changed.headers["etag"]}
    assert shop.client.delete(path, headers=newest).status_code == 200
    assert "etag" not in shop.client.get("/v1/http-consumers/events").headers, "it is no entity"


def test_a_streams_own_group_has_the_settings_of_its_sink(database: Database) -> None:
    """One change is in one place: the sink, its version, the audit log, a plan."""
    with Shop(database.url, ApiTools(), "orders") as shop:
        make_stream(shop.store, "pool")
        source = {"type": "postgres", "url": database.url}
        assert shop.client.put("/v1/sources/shop", json=source).status_code == 201
        spec = {"type": "stream", "source": "shop", "ack_wait_ms": 5_000}
        assert shop.client.put("/v1/sinks/orders", json=spec).status_code == 201
        group, sink = "/v1/http-consumers/orders", "/v1/sinks/orders"
        changed = shop.client.patch(group, json={"max_ack_pending": 3, "deletes": None})
        assert changed.status_code == 200, changed.text
        assert changed.json()["max_ack_pending"] == 3
        found = shop.client.get(sink)
        assert found.json()["spec"] == {**spec, "max_ack_pending": 3}
        assert changed.headers["etag"] == found.headers["etag"]
        assert shop.client.get(group).headers["etag"] == found.headers["etag"]
        (line,) = shop.client.get("/v1/audit", params={"limit": 1}).json()["data"]
        assert (line["kind"], line["name"], line["action"]) == ("sink", "orders", "update")
        # A file that has it otherwise would change it.
        document = {"sinks": {"orders": spec}}
        (planned,) = shop.client.post("/v1/plan", json=document).json()["changes"]
        assert (planned["kind"], planned["name"]) == ("sink", "orders")
        late = shop.client.patch(group, json={"max_waiting": 4}, headers={"If-Match": '"1"'})
        problem(late, 412)
        assert shop.client.patch(group, json={"max_ack_pending": None}).status_code == 200
        assert shop.client.get(sink).json()["spec"] == spec
        for key, value in (("filters", {"table": "a.b"}), ("deliver_policy", "new")):
            refused = problem(shop.client.patch(group, json={key: value}), 409)
            assert "Set it on a consumer of this stream." in refused["detail"]
        problem(shop.client.patch(group, json={"max_wating": 4}), 422, "max_wating")
        # A sink that fills it no more keeps its own settings.
        other_type = {"type": "nats", "source": "shop", "url": "nats://127.0.0.1:1"}
        assert shop.client.put(sink, json=other_type).status_code == 200
        assert shop.client.patch(group, json={"max_waiting": 5}).json()["max_waiting"] == 5
        assert shop.client.get(sink).json()["spec"] == other_type
        # A stream that no sink fills has them for itself.
        other = shop.client.patch("/v1/http-consumers/pool", json={"max_waiting": 4})
        assert other.json()["max_waiting"] == 4
        (line,) = shop.client.get("/v1/audit", params={"limit": 1}).json()["data"]
        assert (line["kind"], line["name"], line["action"]) == ("consumer", "pool", "update")
        assert line["after"] == {"max_waiting": 4}
