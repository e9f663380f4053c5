"""Syncs, credentials and providers over HTTP: entities, what is asked of them, records and purges."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from psycopg.types.json import Jsonb
from tests.api_help import Shop, problem, refuse_lines
from tests.loopback_api import Answer, Asked, LoopbackApi

from penstock.embedded.handles import Database
from penstock.streams.connect import connect
from penstock.syncs.controls import CHANNEL, SyncControls
from penstock.syncs.records.schema import migrate

LIVE = {"provider": "stripe", "properties": {"api_key": "sk_never_shown"}, "metadata": {"a": 1}}
SYNC = {"provider": "stripe", "collections": ["customers", "stripe:invoices"], "credential": "live"}


@pytest.fixture
def shop(database: Database) -> Iterator[Shop]:
    with Shop(database.url, stream="orders") as shop:
        yield shop


def put(shop: Shop, path: str, spec: dict[str, Any]) -> dict[str, Any]:
    answer = shop.client.put(path, json=spec)
    assert answer.status_code in (200, 201), answer.text
    body: dict[str, Any] = answer.json()
    return body


def made(shop: Shop) -> uuid.UUID:
    """Make a credential and a sync, and return the sync's id."""
    put(shop, "/v1/credentials/live", LIVE)
    return uuid.UUID(put(shop, "/v1/syncs/billing", SYNC)["entity"]["id"])


def test_syncs_are_entities(shop: Shop) -> None:
    problem(shop.client.put("/v1/syncs/billing", json=SYNC), 422, "credential")
    id_ = made(shop)
    shown = shop.client.get(f"/v1/syncs/{id_}")
    assert shown.json() == shop.client.get("/v1/syncs/billing").json()
    body = shown.json()
    assert (body["status"], body["health"]) == ("active", None)
    assert [(each["id"], each["phase"]) for each in body["collections"]] == [
        ("stripe:customers", "waiting"),
        ("stripe:invoices", "waiting"),
    ]
    assert body["spec"] == SYNC
    assert shown.headers["etag"] == f'"{body["version"]}"'
    assert [each["name"] for each in shop.client.get("/v1/syncs").json()["data"]] == ["billing"]
    problem(shop.client.delete("/v1/credentials/live"), 409)
    wrong = {**SYNC, "collections": ["custmers"]}
    assert (
        "did you mean customers?"
        in problem(shop.client.put("/v1/syncs/billing", json=wrong), 422, "collections[0]")[
            "detail"
        ]
    )
    tag = shown.headers["etag"]
    changed = shop.client.patch(
        "/v1/syncs/billing", json={"frequency": "5m"}, headers={"If-Match": tag}
    )
    assert changed.status_code == 200, changed.text
    stale = shop.client.patch(
        "/v1/syncs/billing", json={"frequency": "1m"}, headers={"If-Match": tag}
    )
    problem(stale, 412)
    added = shop.client.patch("/v1/syncs/billing", json={"collections": ["customers", "prices"]})
    assert added.json()["consequences"] == [
        "sync billing: stripe:prices: read from the beginning",
        "sync billing: stripe:invoices: read no more; their records stay until they are purged",
    ]
    assert shop.client.delete("/v1/syncs/billing").status_code == 200
    assert shop.client.delete("/v1/credentials/live").status_code == 200


def test_the_properties_of_a_credential_are_never_shown(shop: Shop, database: Database) -> None:
    shown = put(shop, "/v1/credentials/live", LIVE)["entity"]["spec"]
    assert shown == {**LIVE, "properties": {"api_key": "***"}}
    again = put(shop, "/v1/credentials/live", {**shown, "metadata": {"a": 2}})
    assert [field["path"] for field in again["fields"]] == ["metadata.a"]
    ((stored,),) = database.execute("SELECT spec FROM penstock.entities WHERE kind = 'credential'")
    assert stored == {**LIVE, "metadata": {"a": 2}}
    rotated = put(shop, "/v1/credentials/live", {**LIVE, "properties": {"api_key": "sk_other"}})
    assert rotated["consequences"] == [
        "the syncs of credential live use it from their next request on; nothing is read again"
    ]
    for path in ("/v1/credentials", "/v1/audit", "/v1/export"):
        text = shop.client.get(path).text
        assert "sk_never_shown" not in text
        assert "sk_other" not in text
    assert "${CREDENTIAL_LIVE_PROPERTIES_API_KEY}" in shop.client.get("/v1/export").text


def test_ready_providers_stand_beside_the_own_ones(shop: Shop) -> None:
    crm = {
        "type": "rest", "base_url": "https://crm.invalid", "paginator": {"type": "single_page"},
        "collections": {"contacts": {"path": "contacts"}},
    }  # fmt: skip
    put(shop, "/v1/providers/crm", crm)
    page = shop.client.get("/v1/providers?limit=4").json()
    names = [each["name"] for each in page["data"]]
    rest = shop.client.get(f"/v1/providers?cursor={page['next']}").json()
    names += [each["name"] for each in rest["data"]]
    assert names == ["crm", "github", "hubspot", "salesforce", "servicenow", "stripe"]
    assert rest["next"] is None
    own, stripe = page["data"][0], shop.client.get("/v1/providers/stripe").json()
    assert (own["ready"], own["collections"], own["spec"]) == (False, ["crm:contacts"], crm)
    assert (stripe["ready"], stripe["spec"], stripe["id"]) == (True, None, None)
    assert "stripe:customers" in stripe["collections"]
    problem(shop.client.put("/v1/providers/stripe", json=crm), 422, "body")
    of_crm = shop.client.get("/v1/collections?provider=crm").json()["data"]
    assert [(each["id"], each["key"], each["deletes"]) for each in of_crm] == [
        ("crm:contacts", ["id"], "sweep")
    ]
    every = {each["id"] for each in shop.client.get("/v1/collections").json()["data"]}
    assert {"crm:contacts", "stripe:customers", "github:issues"} <= every
    problem(shop.client.get("/v1/collections?provider=none"), 404)


def test_what_is_asked_waits_for_the_run(shop: Shop) -> None:
    id_ = made(shop)
    controls = SyncControls(shop.store)
    with connect(shop.store.url) as listener:
        listener.execute(f"LISTEN {CHANNEL}")
        assert shop.client.post("/v1/syncs/billing/run").status_code == 200
        assert [n.channel for n in listener.notifies(timeout=30, stop_after=1)] == [CHANNEL]
    backfill = shop.client.post(f"/v1/syncs/{id_}/backfill", json={"collection": "invoices"})
    assert backfill.status_code == 200, backfill.text
    assert [each[:3] for each in controls.asked()] == [
        (id_, None, "run"), (id_, "stripe:invoices", "backfill"),
    ]  # fmt: skip
    assert shop.client.post("/v1/syncs/billing/pause").status_code == 200
    assert controls.paused() == {id_}
    assert shop.client.get("/v1/syncs/billing").json()["status"] == "paused"
    assert shop.client.post("/v1/syncs/billing/resume", json={}).status_code == 200
    assert (controls.paused(), controls.asked()[-1][:3]) == (set(), (id_, None, "resume"))
    assert shop.client.get("/v1/syncs/billing").json()["status"] == "active"
    wrong = shop.client.post("/v1/syncs/billing/backfill", json={"collection": "invoice"})
    assert "did you mean" in problem(wrong, 422, "collection")["detail"]
    problem(shop.client.post("/v1/syncs/none/run"), 404)
    viewer = shop.api.as_bearer(shop.store.tokens.create("v", "viewer"))
    with viewer:
        problem(viewer.post("/v1/syncs/billing/run"), 403)
        assert viewer.get("/v1/syncs").status_code == 200


def test_a_sync_shows_what_its_run_has_written(shop: Shop, database: Database) -> None:
    id_ = made(shop)
    health = {
        "code": "unauthorized", "cause": "The API refuses the key.", "remedy": "Give another.",
        "since": "2026-01-31T12:00:00Z",
    }  # fmt: skip
    done = "initial_backfill_completed_at"
    for collection, shown in (
        ("stripe:customers", {"phase": "polling", done: "2026-01-31T12:00:00Z"}),
        ("stripe:invoices", {"phase": "stopped", done: None, "health": health}),
    ):
        database.execute(
            "INSERT INTO penstock.sync_collections (sync_id, collection_id, progress, shown)"
            " VALUES (%s, %s, '{}', %s)",
            [id_, collection, Jsonb(shown)],
        )
    body = shop.client.get("/v1/syncs/billing").json()
    assert [each["id"] for each in body["collections"]] == ["stripe:customers", "stripe:invoices"]
    assert (body["health"], body["initial_backfill_completed_at"]) == (health, None)
    database.execute(
        "UPDATE penstock.sync_collections SET shown = %s WHERE collection_id = 'stripe:invoices'",
        [Jsonb({"phase": "polling", done: "2026-01-31T13:00:00Z"})],
    )
    body = shop.client.get("/v1/syncs/billing").json()
    assert body["initial_backfill_completed_at"] == "2026-01-31T13:00:00Z"
    database.execute(
        "INSERT INTO penstock.credential_tokens (credential, origin, key_id, sealed)"
        " VALUES ('live', '', '', '')"
    )
    put(shop, "/v1/credentials/other", LIVE)
    assert shop.client.delete("/v1/credentials/other").status_code == 200
    controls = SyncControls(shop.store)
    controls.pause(id_, "me")
    assert len(controls.status([id_])[id_].collections) == 2
    assert shop.client.delete("/v1/syncs/billing").status_code == 200
    assert (controls.status([id_])[id_].collections, controls.paused()) == ({}, set())
    assert database.execute("SELECT count(*) FROM penstock.credential_tokens") == [(1,)]
    assert shop.client.delete("/v1/credentials/live").status_code == 200
    assert database.execute("SELECT count(*) FROM penstock.credential_tokens") == [(0,)]


def test_records_are_listed_and_purged(shop: Shop, database: Database) -> None:
    assert shop.client.get("/v1/records").json() == {"data": [], "next": None}
    assert shop.client.get("/v1/events").json() == {"data": [], "next": None}
    id_, other = made(shop), uuid.uuid4()
    with connect(shop.store.url) as connection:
        migrate(connection)
    for number, (sync, collection) in enumerate(
        [(id_, "stripe:customers"), (id_, "stripe:invoices"), (other, "crm:contacts")]
    ):
        for key in range(5):
            database.execute(
                "INSERT INTO penstock.records (id, sync_id, provider, collection_id, upstream_id,"
                " deleted, data) VALUES (%s, %s, %s, %s, %s, %s, %s)",
                [uuid.UUID(int=10 * number + key), sync, collection.partition(":")[0], collection,
                 str(key), key == 4, '{"amount": 1.10}'],
            )  # fmt: skip

    def listed(query: str = "") -> list[tuple[str, str]]:
        answer = shop.client.get(f"/v1/records?{query}")
        assert answer.status_code == 200, answer.text
        return [(each["collection_id"], each["upstream_id"]) for each in answer.json()["data"]]

    assert len(listed()) == 15
    assert len(listed("sync_id=billing")) == 10
    assert len(listed(f"sync_id={other}&provider=crm")) == 5
    assert listed("collection_id=stripe:invoices&upstream_id=2") == [("stripe:invoices", "2")]
    assert [key for _, key in listed("deleted=true")] == ["4", "4", "4"]
    first = shop.client.get("/v1/records?limit=6").json()
    second = shop.client.get(f"/v1/records?limit=100&cursor={first['next']}").json()
    assert (len(first["data"]), len(second["data"]), second["next"]) == (6, 9, None)
    assert '"amount": 1.10' in shop.client.get("/v1/records?limit=1").text
    record = first["data"][0]
    assert record["resource_id"] == record["sync_id"] == str(id_)
    assert "payload_hash" not in record
    problem(shop.client.get("/v1/records?sync_id=none"), 422, "sync_id")
    problem(shop.client.get("/v1/records?cursor=x"), 422, "cursor")

    def purge(status: int = 200, **body: Any) -> dict[str, Any]:
        answer = shop.client.post("/v1/purge-records", json=body)
        assert answer.status_code == status, answer.text
        found: dict[str, Any] = answer.json()
        return found

    asked: dict[str, Any] = {"sync_id": "billing", "collection_id": "stripe:invoices"}
    assert purge(**asked) == {"count": 5, "purged": 0}
    assert "5 records now, not 4" in purge(409, **asked, count=4)["detail"]
    refuse_lines(database)  # without its line nothing is purged
    purge(503, **asked, count=5)
    database.execute("DROP TRIGGER refuse ON penstock.audit")
    assert len(listed()) == 15
    assert purge(**asked, count=5) == {"count": 5, "purged": 5}
    assert len(listed()) == 10
    assert purge(sync_id=str(other), count=5) == {"count": 5, "purged": 5}
    assert listed() == [("stripe:customers", str(key)) for key in range(5)]
    log = shop.client.get("/v1/audit").json()["data"]
    lines = [(e["name"], e["after"]) for e in log if e["action"] == "purge records"]
    assert lines == [
        (str(other), {"count": 5}), ("billing", {"collection": "stripe:invoices", "count": 5}),
    ]  # fmt: skip


def test_a_credential_is_tried(shop: Shop) -> None:
    def answer(asked: Asked) -> Answer:
        return Answer(body=b"[]", status=200 if asked.headers.get("x-key") == "good" else 401)

    with LoopbackApi(answer) as api:
        crm = {
            "type": "rest", "base_url": api.url, "allow_private": True,
            "auth": {"type": "api_key", "name": "X-Key", "api_key": "{key}"},
            "paginator": {"type": "single_page"}, "collections": {"contacts": {"path": "contacts"}},
        }  # fmt: skip
        put(shop, "/v1/providers/crm", crm)
        for name, key in (("good", "good"), ("bad", "never_shown")):
            put(shop, f"/v1/credentials/{name}", {"provider": "crm", "properties": {"key": key}})
        good = shop.client.post("/v1/credentials/good/check")
        assert (good.status_code, good.json()["provider"]) == (200, "crm")
        bad = problem(shop.client.post("/v1/credentials/bad/check"), 424)
        assert bad["code"] == "unauthorized"
        assert "never_shown" not in str(bad)
    problem(shop.client.post("/v1/credentials/none/check"), 404)
