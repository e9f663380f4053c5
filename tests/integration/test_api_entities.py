"""The Management API's entities: sources, sinks and consumers of the desired state, plan and apply."""

from __future__ import annotations

import asyncio
import itertools
import time
from functools import partial
from typing import Any
from uuid import UUID

import httpx
import pytest
from tests.api_help import ApiServer, Shop, known, problem
from tests.streams_help import inserted, make_stream, publish, updated
from tests.waits import at_once

from penstock.api.app import Api
from penstock.api.auth import Grant
from penstock.api.console.calls import Management
from penstock.api.manage.pages import cursor_of
from penstock.cli.api_tools import ApiTools
from penstock.core.delivery import DeadLetter
from penstock.core.group_hash import group_hash
from penstock.desired.state import DesiredState
from penstock.embedded.handles import Database
from penstock.expressions import ColumnType
from penstock.streams.nats_consumers import NatsConsumers

SOURCE = {"type": "postgres", "url": "postgresql://app:hush%40hush@db.invalid/shop", "slot": "shop"}
MASKED = "postgresql://app:***@db.invalid/shop"
SINK = {"type": "stream", "source": "shop"}
HOOK = {
    "type": "webhook",
    "stream": "events",
    "url": "https://user:pw@example.com/in?token=t0k",
    "headers": {"X-Key": "k3y"},
    "secrets": ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"],
}


def _put(shop: Shop, path: str, spec: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = shop.client.put(
        path, json=spec, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )
    assert answer.status_code in (200, 201), answer.text
    body: dict[str, Any] = answer.json()
    return body


def _events(shop: Shop) -> None:
    _put(shop, "/v1/sources/shop", SOURCE)
    _put(shop, "/v1/sinks/events", SINK)


def test_put_creates_replaces_and_repeats(shop: Shop) -> None:
    made = shop.client.put("/v1/sources/shop", json=SOURCE)
    assert made.status_code == 201, made.text
    entity = made.json()["entity"]
    assert made.json()["action"] == "create"
    assert any("slot shop" in text for text in made.json()["consequences"])
    assert entity["spec"] == {**SOURCE, "url": MASKED}
    assert made.headers["etag"] == f'"{entity["version"]}"'
    again = shop.client.put("/v1/sources/shop", json=SOURCE)
    assert (again.status_code, again.json()["action"]) == (200, "nothing")
    assert again.headers["etag"] == made.headers["etag"]
    changed = _put(shop, "/v1/sources/shop", {**SOURCE, "tables": ["public.orders"]})
    assert [field["path"] for field in changed["fields"]] == ["tables"]
    assert changed["entity"]["version"] > entity["version"]
    for path in ("/v1/sources/shop", f"/v1/sources/{UUID(entity['id'])}"):
        shown = shop.client.get(path)
        assert shown.json() == changed["entity"]
        assert shown.headers["etag"] == f'"{changed["entity"]["version"]}"'
    assert "hush" not in shop.client.get("/v1/sources").text


def test_patch_merges_and_null_is_the_default(shop: Shop) -> None:
    _events(shop)
    answer = shop.client.patch("/v1/sinks/events", json={"retention": "3d", "actions": ["insert"]})
    assert answer.json()["entity"]["spec"] == {**SINK, "retention": "3d", "actions": ["insert"]}
    answer = shop.client.patch("/v1/sinks/events", json={"actions": None})
    assert answer.json()["entity"]["spec"] == {**SINK, "retention": "3d"}
    problem(shop.client.patch("/v1/sinks/nothing", json={}), 404)


def test_lost_updates_are_refused(shop: Shop) -> None:
    _events(shop)
    tag = shop.client.get("/v1/sinks/events").headers["etag"]
    first = shop.client.patch(
        "/v1/sinks/events", json={"retention": "3d"}, headers={"If-Match": tag}
    )
    assert first.status_code == 200
    for method, body in (("PATCH", {"retention": "5d"}), ("PUT", SINK), ("DELETE", None)):
        answer = shop.client.request(
            method, "/v1/sinks/events", json=body, headers={"If-Match": tag}
        )
        problem(answer, 412)
        assert answer.headers["etag"] == first.headers["etag"]
    assert shop.client.get("/v1/sinks/events").json()["spec"]["retention"] == "3d"
    ok = shop.client.put("/v1/sinks/events", json=SINK, headers={"If-Match": first.headers["etag"]})
    assert ok.status_code == 200
    new = problem(shop.client.put("/v1/sinks/new", json=SINK, headers={"If-Match": "*"}), 412)
    assert (
        new["detail"]
        == "If-Match: sink 'new' is not there: it was deleted since, or was never made."
    )
    bare = ok.headers["etag"].strip('"')  # the version that it has, and no ETag
    wrong = shop.client.delete("/v1/sinks/events", headers={"If-Match": bare})
    assert "is no ETag: expected one in its quotes" in problem(wrong, 412)["detail"]
    problem(shop.client.put("/v1/sinks/events", json=SINK, headers={"If-None-Match": "*"}), 412)


def test_masked_secrets_stay_and_are_never_shown(shop: Shop, database: Database) -> None:
    _events(shop)
    made = _put(shop, "/v1/consumers/hook", HOOK)
    shown = made["entity"]["spec"]
    again = _put(shop, "/v1/consumers/hook", {**shown, "timeout_ms": 5000})
    assert [field["path"] for field in again["fields"]] == ["timeout_ms"]
    ((stored,),) = database.execute(
        "SELECT spec FROM penstock.entities WHERE kind = 'consumer' AND name = 'hook'"
    )
    assert stored == {**HOOK, "timeout_ms": 5000}
    masked = {"url": "postgresql://app:***@elsewhere.invalid/shop"}
    assert (
        "***" in problem(shop.client.patch("/v1/sources/shop", json=masked), 422, "url")["detail"]
    )
    answers = [
        shop.client.get("/v1/consumers/hook").text,
        shop.client.get("/v1/consumers?status=true").text,
        shop.client.get("/v1/audit").text,
        shop.client.get("/v1/export").text,
        shop.client.delete("/v1/consumers/hook?dry_run=true").text,
        shop.client.delete("/v1/consumers/hook").text,
    ]
    for text in answers:
        for secret in ("pw@", "t0k", "k3y", "whsec_", "hush"):
            assert secret not in text
    assert shop.client.get("/v1/consumers/hook").status_code == 404


def test_a_consumer_is_served_and_deleted_with_its_consequences(shop: Shop) -> None:
    _events(shop)
    spec = {"stream": "events", "ack_wait_ms": 500}
    _put(shop, "/v1/consumers/workers", spec)
    shop.publish(1)
    got = shop.client.get("/v1/http-consumers/workers/next", params={"wait_for_ms": 20_000})
    assert len(got.json()["data"]) == 1
    listed = shop.client.get("/v1/consumers", params={"status": True}).json()["data"]
    assert [(c["name"], c["status"]["in_flight"]) for c in listed] == [("workers", 1)]
    assert "status" not in shop.client.get("/v1/consumers").json()["data"][0]
    dry = shop.client.delete("/v1/consumers/workers", params={"dry_run": True}).json()
    assert "drops the consumer workers" in dry["consequences"][0]
    assert dry["entity"]["name"] == "workers"
    gone = shop.client.delete("/v1/consumers/workers").json()
    assert (gone["entity"], gone["consequences"]) == (None, dry["consequences"])
    problem(shop.client.get("/v1/http-consumers/workers"), 404)
    problem(shop.client.delete("/v1/consumers/workers"), 404)


def test_what_others_need_stays(shop: Shop) -> None:
    _events(shop)
    refused = problem(shop.client.delete("/v1/sources/shop"), 409)
    assert "sink events" in refused["conflicts"][0]
    assert refused["detail"] == (
        "source 'shop' is needed by sink events: delete these first, or have them name another."
    )
    problem(shop.client.put("/v1/sinks/orders", json={**SINK, "source": "shoop"}), 422, "source")
    wrong = {"type": "stream", "source": "shop", "filtr": "true", "actions": ["inserted"]}
    answer = problem(shop.client.put("/v1/sinks/x", json=wrong), 422, "actions[0]", "filtr")
    assert "filter" in answer["detail"]
    problem(shop.client.put("/v1/sinks/-x", json=SINK), 422, "name")
    lua = {**SINK, "transform": {"lua": {"file": "/etc/hostname"}}}
    assert (
        "no file is read"
        in problem(shop.client.put("/v1/sinks/x", json=lua), 422, "transform.lua")["detail"]
    )


def test_a_dry_run_writes_nothing(shop: Shop) -> None:
    dry = _put(shop, "/v1/sources/shop?dry_run=true", SOURCE)
    assert (dry["entity"], dry["action"]) == (None, "create")
    problem(shop.client.get("/v1/sources/shop"), 404)


def test_the_audit_log_names_the_token_and_the_door(shop: Shop) -> None:
    _events(shop)
    shop.consumer("workers")
    shop.client.delete("/v1/http-consumers/workers")
    log = shop.client.get("/v1/audit", params={"limit": 3}).json()
    assert [(e["kind"], e["name"], e["action"]) for e in log["data"]] == [
        ("consumer", "workers", "delete"),
        ("consumer", "workers", "create"),
        ("sink", "events", "create"),
    ]
    assert {(e["who"], e["door"]) for e in log["data"]} == {("admin", "api")}
    rest = shop.client.get("/v1/audit", params={"limit": 3, "cursor": log["next"]}).json()
    assert [(e["name"], e["after"]["url"]) for e in rest["data"]] == [("shop", MASKED)]
    assert rest["next"] is None
    of = shop.client.get("/v1/audit", params={"kind": "sink", "name": "events"}).json()["data"]
    assert len(of) == 1


def test_what_the_console_changes_came_by_the_console(shop: Shop) -> None:
    console = Management(super(Api, shop.api.app).__call__)
    spec = {"type": "nats", "url": "nats://nats.invalid:4222"}
    ann = Grant("ann", "admin", None)
    put = console.call(ann, "PUT", "/v1/targets/far", body=spec)
    assert asyncio.run(put).status == 201
    changed = {**spec, "url": "nats://other.invalid:4222"}
    claimed = shop.client.put("/v1/targets/far", json=changed, headers={"door": "console"})
    assert claimed.status_code == 200
    log = shop.client.get("/v1/audit", params={"q": "TARGET far"}).json()["data"]
    assert [(e["who"], e["door"]) for e in log] == [("admin", "api"), ("ann", "console")]
    assert shop.client.get("/v1/audit", params={"q": "no such text"}).json()["data"] == []


DOCUMENT = """
sources:
  shop: {type: postgres, url: "postgresql://app:hush@db.invalid/shop", slot: shop}
sinks:
  events: {type: stream, source: shop}
consumers:
  workers: {stream: events}
"""


def test_plan_apply_and_export(shop: Shop) -> None:
    planned = shop.client.post("/v1/plan", content=DOCUMENT)
    assert planned.status_code == 200, planned.text
    assert planned.json()["counts"]["create"] == 3
    assert "hush" not in planned.text
    assert shop.client.get("/v1/sources").json()["data"] == []
    applied = shop.client.post(
        "/v1/apply", content=DOCUMENT, headers={"If-Match": planned.headers["etag"]}
    )
    assert applied.status_code == 200, applied.text
    export = shop.client.get("/v1/export")
    assert "${SOURCE_SHOP_URL}" in export.text
    assert shop.client.post("/v1/plan", content=export.text).json()["changes"] == []
    problem(
        shop.client.post("/v1/apply", content="{}", headers={"If-Match": planned.headers["etag"]}),
        412,
    )
    fewer = DOCUMENT.partition("consumers:")[0]
    kept = shop.client.post("/v1/plan", content=fewer).json()
    assert [(each["name"], each["action"]) for each in kept["kept"]] == [("workers", "delete")]
    assert shop.client.post("/v1/apply", content=fewer).json()["changes"] == []
    assert (
        "workers" in problem(shop.client.post("/v1/apply?prune=true", content=fewer), 428)["detail"]
    )
    tag = {"If-Match": shop.client.post("/v1/plan?prune=true", content=fewer).headers["etag"]}
    pruned = shop.client.post("/v1/apply?prune=true", content=fewer, headers=tag)
    assert [each["action"] for each in pruned.json()["changes"]] == ["delete"]
    assert shop.client.get("/v1/consumers").json()["data"] == []
    who = {(e["who"], e["door"]) for e in shop.client.get("/v1/audit").json()["data"]}
    assert who == {("admin", "file")}


def test_a_plan_refuses_a_condition_that_the_stream_lacks_the_columns_for(shop: Shop) -> None:
    columns = {"id": ColumnType("pg_catalog", "int8"), "total": ColumnType("pg_catalog", "numeric")}
    shop.store.save_catalog("shop", {("public", "items"): columns})
    wrong = DOCUMENT.replace("workers: {", "workers: {filters: {sql: record.totl > 1}, ")
    for path in ("/v1/plan", "/v1/apply"):
        refused = shop.client.post(path, content=wrong)
        expected = "unknown column record.totl of public.items; did you mean record.total?"
        assert refused.json()["detail"].endswith(expected)
        problem(refused, 422, "body")
    assert shop.client.get("/v1/sources").json()["data"] == []
    _events(shop)
    spec = {"stream": "events", "filters": {"sql": "record.totl > 1"}}
    for path in ("/v1/consumers/workers", "/v1/consumers/workers?dry_run=true"):
        alone = problem(shop.client.put(path, json=spec), 422, "filters.sql")
        assert alone["detail"].startswith("filters.sql: position 1: unknown column record.totl")


@pytest.mark.parametrize("with_etag", [True, False])
def test_what_comes_between_a_plan_and_its_apply(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, with_etag: bool
) -> None:
    """Also while it is being applied, and though it concerns none of what the plan changes."""
    tag = shop.client.post("/v1/plan", content=DOCUMENT).headers["etag"]
    write = DesiredState.write

    def write_late(self: DesiredState, *of: Any, **options: Any) -> Any:
        monkeypatch.undo()
        shop.client.put("/v1/targets/else", json={"type": "http", "url": "https://else.invalid"})
        return write(self, *of, **options)

    monkeypatch.setattr(DesiredState, "write", write_late)
    headers = {"If-Match": tag} if with_etag else {}
    answer = shop.client.post("/v1/apply", content=DOCUMENT, headers=headers)
    assert answer.status_code == (412 if with_etag else 200), answer.text
    assert [each["name"] for each in shop.client.get("/v1/targets").json()["data"]] == ["else"]
    assert bool(shop.client.get("/v1/sources").json()["data"]) is not with_etag


def test_a_document_that_is_wrong_is_refused_by_line(shop: Shop) -> None:
    wrong = DOCUMENT.replace("slot: shop", "slott: shop")
    answer = problem(shop.client.post("/v1/apply", content=wrong), 422, "body")
    assert "document:3" in answer["detail"]
    assert "slott" in answer["detail"]
    for text in ("[", "", "- 1", 'sources: {a: {type: postgres, url: "x\0y"}}'):
        assert shop.client.post("/v1/apply", content=text).status_code == 422
    problem(shop.client.post("/v1/apply", content=b"\xff"), 400)


def test_lists_go_by_pages(shop: Shop) -> None:
    _events(shop)
    for name in ("c", "a", "b"):
        _put(shop, f"/v1/consumers/{name}", {"stream": "events"})
    seen, cursor = [], None
    while True:
        query = {"limit": 2} if cursor is None else {"limit": 2, "cursor": cursor}
        page = shop.client.get("/v1/consumers", params=query).json()
        seen.append([entity["name"] for entity in page["data"]])
        if (cursor := page["next"]) is None:
            break
    assert seen == [["a", "b"], ["c"]]
    own = shop.client.get("/v1/http-consumers", params={"limit": 1}).json()
    assert [each["name"] for each in own["data"]] == ["a"]
    for wrong in ("x", cursor_of(7), cursor_of("\0"), cursor_of("a", "b")):
        problem(shop.client.get("/v1/consumers", params={"cursor": wrong}), 422, "cursor")


def test_tokens_are_made_listed_and_revoked(shop: Shop) -> None:
    new = {"name": "ci", "role": "viewer"}
    made = shop.client.post("/v1/tokens", json=new)
    assert made.status_code == 201
    secret = made.json()["token"]
    listed = shop.client.get("/v1/tokens")
    assert [(t["name"], t["role"]) for t in listed.json()["data"]] == [
        ("admin", "admin"),
        ("ci", "viewer"),
    ]
    assert secret not in listed.text
    with shop.api.as_bearer(secret) as client:
        assert known(client).get("/v1/tokens").status_code == 200
    problem(shop.client.post("/v1/tokens", json=new), 409)
    problem(shop.client.post("/v1/tokens", json={**new, "consumers": ["a"]}), 422, "consumers")
    assert shop.client.delete("/v1/tokens/ci").json() == {"success": True}
    problem(shop.client.delete("/v1/tokens/ci"), 409)
    problem(shop.client.delete("/v1/tokens/nobody"), 404)


def test_a_sources_database_for_pickers(shop: Shop, database: Database) -> None:
    database.execute(
        'CREATE TABLE "Orders" (id bigint, line int, note text, PRIMARY KEY (line, id))'
    )
    _put(shop, "/v1/sources/shop", {"type": "postgres", "url": database.url})
    tables = shop.client.get("/v1/sources/shop/tables").json()["data"]
    assert [(t["name"], t["has_key"], t["selected"]) for t in tables] == [
        ('public."Orders"', True, True)
    ]
    path = '/v1/sources/shop/tables/public."Orders"/columns'
    columns = shop.client.get(path).json()["data"]
    assert [(c["name"], c["type"], c["key"]) for c in columns] == [
        ("id", "bigint", 2), ("line", "integer", 1), ("note", "text", None),
    ]  # fmt: skip
    for table in ("public.nothing", "nothing", "public.*"):
        problem(shop.client.get(f"/v1/sources/shop/tables/{table}/columns"), 404)
    problem(shop.client.get("/v1/sources/nothing/tables"), 404)
    slot = f"penstock_{database.name}"
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    slots = shop.client.get("/v1/sources/shop/slots", params={"limit": 1000}).json()["data"]
    (shown,) = (each for each in slots if each["name"] == slot)
    assert (shown["plugin"], shown["active"], shown["own"]) == ("pgoutput", False, False)
    assert shown["database"] == database.name
    assert "active_pid" not in shown
    assert (shown["wal_status"], shown["invalidation_reason"]) == ("reserved", None)
    begins = shown["confirmed_flush_lsn"]
    database.execute(
        "INSERT INTO \"Orders\" SELECT n, 1, repeat('x', 1000) FROM generate_series(1, 100) n"
    )
    later = shop.client.get("/v1/sources/shop/slots", params={"limit": 1000}).json()["data"]
    (waits,) = (each for each in later if each["name"] == slot)
    assert waits["confirmed_flush_lsn"] == begins
    assert waits["current_lsn"] != shown["current_lsn"]
    assert waits["lag_bytes"] >= shown["lag_bytes"] + 100_000
    assert waits["retained_bytes"] >= waits["lag_bytes"]
    tested = shop.client.post("/v1/sources/shop/test").json()
    assert tested["may_replicate"] is True
    assert shop.client.post("/v1/test-source", json={"url": database.url}).status_code == 200


def test_a_sources_old_values_and_its_check(database: Database) -> None:
    database.execute(
        "CREATE TABLE a (id int PRIMARY KEY, note text); CREATE TABLE b (note text);"
        "CREATE TABLE c (id int PRIMARY KEY, note text) PARTITION BY RANGE (id);"
        "CREATE TABLE c1 PARTITION OF c FOR VALUES FROM (1) TO (5);"
        "CREATE TABLE c2 PARTITION OF c FOR VALUES FROM (5) TO (9);"
        "ALTER TABLE c2 REPLICA IDENTITY FULL; CREATE TABLE d (note text);"
        "ALTER TABLE d REPLICA IDENTITY FULL;"
        "CREATE TABLE e (id int PRIMARY KEY) PARTITION BY RANGE (id)"
    )
    with Shop(database.url, ApiTools()) as shop:
        _put(shop, "/v1/sources/shop", {"type": "postgres", "url": database.url})
        tables = shop.client.get("/v1/sources/shop/tables").json()["data"]
        found = [(t["table_name"], t["replica_identity"], t["old_values"]) for t in tables]
        assert found == [
            ("a", "default", ["id"]), ("b", "default", []), ("c", "mixed", ["id"]),
            ("d", "full", None), ("e", None, None),
        ]  # fmt: skip
        report = shop.client.get("/v1/sources/shop/check").json()
        assert report["errors"] == 1, report
        for table in tables:
            database.execute(table["identity_sql"] or "SELECT 1")
        again = shop.client.get("/v1/sources/shop/tables").json()["data"]
        assert [t["old_values"] for t in again] == [None] * 5
        report = shop.client.get("/v1/sources/shop/check").json()
        assert (report["errors"], report["warnings"]) == (0, 0), report
        problem(shop.client.get("/v1/sources/none/check"), 404)


def test_the_next_changes_of_a_source_that_is_not_prepared(database: Database) -> None:
    """The database answers: that it lacks the publication is no failure of a server."""
    with Shop(database.url, ApiTools()) as shop:
        _put(shop, "/v1/sources/shop", {"type": "postgres", "url": database.url})
        answer = shop.client.post("/v1/sources/shop/next-changes", json={"wait_for_ms": 100})
        assert answer.status_code == 409
        assert answer.json()["code"] == "publication_missing"
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
        database.execute("CREATE PUBLICATION penstock_shop FOR TABLE t")
        answer = shop.client.post("/v1/sources/shop/next-changes", json={"wait_for_ms": 100})
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"data": []}


def test_a_source_that_is_away_is_reported_in_time(shop: Shop) -> None:
    # 192.0.2.0/24 is never routed: either nothing answers, or the network refuses at once.
    for url in ("postgresql://u:hush@127.0.0.1:1/db", "postgresql://u:hush@192.0.2.1/db"):
        began = time.monotonic()
        answer = shop.client.post("/v1/test-source", json={"url": url})
        assert "hush" not in problem(answer, 424)["detail"]
        assert time.monotonic() - began < 6
    problem(shop.client.post("/v1/test-source", json={"url": "nothing"}), 422, "url")


def test_a_source_that_refuses_the_login_is_reported(shop: Shop, database: Database) -> None:
    url = database.url.replace(database.name, "not_there")
    body = problem(shop.client.post("/v1/test-source", json={"url": url}), 424)
    assert (body["title"], body["code"]) == ("Failed Dependency", "database_missing")
    assert '"not_there"' in body["detail"]


def test_backfills_are_asked_for_and_commanded(shop: Shop, database: Database) -> None:
    database.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
    _put(shop, "/v1/sources/shop", {"type": "postgres", "url": database.url})
    _put(shop, "/v1/sinks/events", SINK)
    asked = {"sink": "events", "table": "public.orders", "where": "id > 7"}
    made = shop.client.post("/v1/backfills", json=asked)
    assert made.status_code == 201, made.text
    (backfill,) = made.json()["data"]
    assert (backfill["state"], backfill["where"]) == ("waiting", "id > 7")
    problem(shop.client.post("/v1/backfills", json=asked), 409)
    problem(shop.client.post("/v1/backfills", json={**asked, "where": "nothing > 7"}), 422)
    problem(shop.client.post("/v1/backfills", json={"sink": "nothing"}), 404)
    path = f"/v1/backfills/{backfill['id']}"
    for command, state in (("pause", "paused"), ("resume", "waiting"), ("cancel", "cancelled")):
        assert shop.client.post(f"{path}/{command}").json()["state"] == state
    problem(shop.client.post(f"{path}/pause"), 409)
    problem(shop.client.get("/v1/backfills/99"), 404)
    listed = shop.client.get("/v1/backfills", params={"sink": "events", "state": "cancelled"})
    assert [each["id"] for each in listed.json()["data"]] == [backfill["id"]]


def test_dead_letters_of_sinks_and_consumers(shop: Shop, database: Database) -> None:
    path = shop.consumer(max_deliver=1)
    shop.publish("a")
    (got,) = shop.client.get(f"{path}/next", params={"wait_for_ms": 20_000}).json()["data"]
    shop.client.post(f"{path}/nack", json={"ack_tokens": [got["ack_token"]]})
    database.execute(
        "INSERT INTO penstock.dead_letters (sink, idempotency_key, subject, code, reason, message)"
        " VALUES ('orders', 'k', 's', 'too_large', 'why', '{}') RETURNING id"
    )
    listed = shop.client.get("/v1/dead-letters").json()["data"]
    assert [(x["consumer"], x["sink"]) for x in listed] == [("workers", None), (None, "orders")]
    mine, other = (letter["id"] for letter in listed)
    found = shop.client.get("/v1/dead-letters", params={"consumer": "workers"}).json()["data"]
    assert [letter["id"] for letter in found] == [mine]
    assert '"a"' in shop.client.get(f"/v1/dead-letters/{mine}").json()["message"]
    publisher = {"type": "nats", "stream": "events", "url": "nats://nats.invalid"}
    source = {"type": "postgres", "url": "postgresql://db.invalid/shop"}
    _put(shop, "/v1/sources/shop", source)
    _put(shop, "/v1/sinks/events", {"type": "stream", "source": "shop"})
    _put(shop, "/v1/consumers/mail", publisher)
    by_id = shop.client.get("/v1/consumers/mail").json()["id"]
    shop.store.letters.add("mail", [DeadLetter("k", "s", "too_large", "2 MiB", "{}")], "consumer")
    for at in ("/v1/dead-letters", "/v1/dead-letter-causes"):
        for name in ("mail", by_id):
            (of,) = shop.client.get(at, params={"consumer": name}).json()["data"]
            assert (of["consumer"], of["sink"], of["code"]) == ("mail", None, "too_large")
        assert shop.client.get(at, params={"sink": "mail"}).json()["data"] == []
    answer = shop.client.post("/v1/replay-dead-letters", json={"ids": [mine, other]}).json()
    assert (answer["replayed"], [each["id"] for each in answer["failed"]]) == (1, [other])
    (again,) = shop.client.get(f"{path}/next", params={"wait_for_ms": 20_000}).json()["data"]
    assert again["record"]["id"] == "a"
    assert shop.client.post("/v1/drop-dead-letters", json={"sink": "orders"}).json() == {
        "dropped": 1
    }
    for of, count in (("sink", 0), ("consumer", 1)):
        answer = shop.client.post("/v1/drop-dead-letters", json={of: "mail"})
        assert answer.json() == {"dropped": count}
    problem(shop.client.delete(f"/v1/dead-letters/{other}"), 404)
    problem(shop.client.post("/v1/drop-dead-letters", json={}), 422, "ids")


def test_dead_letters_and_the_audit_log_come_in_both_orders(shop: Shop) -> None:
    letters = [DeadLetter(f"k{n}", "s", f"code{n % 2}", "why", "{}") for n in range(5)]
    shop.store.letters.add("orders", letters)
    for n in range(3):
        _put(shop, f"/v1/targets/t{n}", {"type": "nats", "url": "nats://nats.invalid:4222"})

    def pages(path: str, **query: str) -> list[list[int]]:
        """Return the ids of a list, by pages of two."""
        found: list[list[int]] = []
        cursor = None
        while not found or cursor is not None:
            assert len(found) < 5
            sent = {**query, "limit": "2", **({"cursor": cursor} if cursor else {})}
            answer = shop.client.get(path, params=sent).json()
            found.append([each["id"] for each in answer["data"]])
            cursor = answer["next"]
        return found

    for path, count, first in (("/v1/dead-letters", 5, "oldest"), ("/v1/audit", 3, "newest")):
        oldest = list(itertools.chain(*pages(path, order="oldest")))
        assert (len(oldest), oldest) == (count, sorted(oldest))
        newest = oldest[::-1]
        assert pages(path, order="newest") == [newest[i : i + 2] for i in range(0, count, 2)]
        assert list(itertools.chain(*pages(path))) == (oldest if first == "oldest" else newest)
        problem(shop.client.get(path, params={"order": "first"}), 422, "order")
    assert [len(page) for page in pages("/v1/dead-letters", order="newest", code="code0")] == [2, 1]


def test_messages_of_a_stream_by_position_time_and_key(shop: Shop) -> None:
    key = group_hash(b'["public","items",[2]]')
    changes = [inserted(1), inserted(2), updated(2, n=5), inserted(3)]
    for change in changes[1:3]:
        object.__setattr__(change, "group", key)
    publish(shop.store, shop.stream, changes[:2])
    publish(shop.store, shop.stream, changes[2:])
    path = "/v1/streams/events/messages"

    def found(**query: Any) -> list[Any]:
        answer = shop.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return [message["record"]["id"] for message in answer.json()["data"]]

    assert found() == [1, 2, 2, 3]
    first = shop.client.get(path, params={"limit": 1}).json()
    assert first["data"][0]["position"]["idx"] == 0
    assert found(cursor=first["next"]) == [2, 2, 3]
    lsn = first["data"][0]["position"]["lsn"]
    assert found(after=f"{lsn}:0") == [2, 2, 3]
    assert found(table="public.items", key="2") == [2, 2]
    assert found(table="public.items", key="[2]", limit=1) == [2]
    assert found(table="public.orders", key="2") == []
    assert found(since="2026-01-01T00:00:00Z") == [1, 2, 2, 3]
    assert found(since="2026-01-01T00:00:01Z") == []
    for query, field in (
        ({"after": "x"}, "after"),
        ({"since": "today"}, "since"),
        ({"key": "2"}, "table"),
    ):
        problem(shop.client.get(path, params=query), 422, field)
    problem(shop.client.get("/v1/streams/nothing/messages"), 404)
    rows = make_stream(shop.store, "rows", kind="rows")
    publish(shop.store, rows, [inserted("x"), updated("x", n=2), inserted("y")])
    answer = shop.client.get(
        "/v1/streams/rows/messages", params={"table": "public.items", "key": "x"}
    )
    assert [message["record"]["n"] for message in answer.json()["data"]] == [2]


def test_a_sinks_filter_is_checked_against_its_source(database: Database) -> None:
    database.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
    with Shop(database.url, ApiTools()) as shop:
        _put(shop, "/v1/sources/shop", {"type": "postgres", "url": database.url})
        wrong = {**SINK, "filter": "record.nothing > 7"}
        answer = problem(shop.client.put("/v1/sinks/orders", json=wrong), 422, "filter")
        assert "nothing" in answer["detail"]
        _put(shop, "/v1/sinks/orders", {**SINK, "filter": "record.id > 7"})
        _put(shop, "/v1/sources/shop", {"type": "postgres", "url": "postgresql://127.0.0.1:1/db"})
        away = shop.client.patch("/v1/sinks/orders", json={"filter": "record.id > 8"}).json()
        assert any("not checked" in warning for warning in away["warnings"])


def test_check_is_there_where_the_process_has_it(shop: Shop, database: Database) -> None:
    _put(shop, "/v1/sources/shop", {"type": "postgres", "url": "postgresql://127.0.0.1:1/db"})
    problem(shop.client.get("/v1/check"), 404)
    with ApiServer(database.url, shop.token, tools=ApiTools()) as api:
        report = api.client.get("/v1/check").json()
    assert report["errors"] == 1
    assert {finding["subject"] for finding in report["findings"]} >= {"source shop"}


def test_two_writers_lose_nothing(shop: Shop) -> None:
    """Each adds a table of its own to what is there, again and again where the other was faster."""
    _put(shop, "/v1/sources/shop", {**SOURCE, "tables": ["public.t"]})

    def writer(name: str) -> None:
        with httpx.Client(
            base_url=str(shop.client.base_url), headers=shop.client.headers
        ) as client:
            for number in range(5):
                while True:
                    read = client.get("/v1/sources/shop")
                    tables = [*read.json()["spec"]["tables"], f"public.{name}{number}"]
                    answer = client.patch(
                        "/v1/sources/shop",
                        json={"tables": tables},
                        headers={"If-Match": read.headers["etag"]},
                    )
                    if answer.status_code == 200:
                        break
                    assert answer.status_code == 412

    at_once(partial(writer, "a"), partial(writer, "b"))
    tables = shop.client.get("/v1/sources/shop").json()["spec"]["tables"]
    assert sorted(tables) == sorted(
        ["public.t", *(f"public.{w}{n}" for w in "ab" for n in range(5))]
    )


def test_a_nats_consumer_is_an_entity_that_only_a_run_serves(
    shop: Shop, database: Database
) -> None:
    _events(shop)
    _put(shop, "/v1/consumers/mail", {**HOOK, "url": "https://example.com/in"})
    spec = {"type": "nats", "stream": "events", "url": "nats://a:hush1@h1,nats://b:hush2@h2"}
    made = _put(shop, "/v1/consumers/mail", spec)
    assert any("becomes one of type nats" in text for text in made["consequences"])
    served = "SELECT count(*) FROM penstock.consumers WHERE name = 'mail'"
    assert database.execute(served) == [(0,)]
    entity = shop.client.get("/v1/consumers/mail").json()
    assert (entity["spec"]["type"], entity["status"], entity["refusal"]) == ("nats", None, None)
    NatsConsumers(shop.store).register(shop.stream, "mail", {}, "all")  # as the run does
    assert shop.client.get(f"/v1/nats-consumers/{entity['id']}").json()["id"] == entity["id"]
    assert shop.client.post(f"/v1/nats-consumers/{entity['id']}/pause").status_code == 200
    patched = shop.client.patch("/v1/consumers/mail", json={"filters": {"table": "orders"}}).json()
    assert [field["path"] for field in patched["fields"]] == ["filters"]
    for wrong, pointer in (
        ({"target": "no", "url": None}, "target"),
        ({"deletes": True}, "deletes"),
    ):
        problem(shop.client.patch("/v1/consumers/mail", json=wrong), 422, pointer)
    assert "hush" not in shop.client.get("/v1/consumers").text + shop.client.get("/v1/audit").text
    gone = shop.client.delete("/v1/consumers/mail").json()
    assert gone["consequences"] == [
        "consumer mail publishes no more; what was not yet is in its stream still"
    ]
    assert _put(shop, "/v1/consumers/mail", {"type": "pull", "stream": "events"})["entity"]
    assert database.execute(served) == [(1,)]
