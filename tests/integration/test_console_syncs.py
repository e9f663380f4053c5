"""The console's syncs and credentials in a real browser, over a real store."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from playwright.sync_api import expect
from psycopg.types.json import Jsonb
from tests.api_help import Shop, known
from tests.browser import Window
from tests.loopback_api import Answer, Asked, LoopbackApi

from penstock.api.console.render import time
from penstock.desired.state import DesiredState
from penstock.syncs.controls import SyncControls

XSS = '"><img src=x onerror="document.title=1"><script>document.title="owned"</script>'
SYNC = {"provider": "stripe", "collections": ["customers", "invoices"], "credential": "live"}


def put(shop: Shop, path: str, spec: dict[str, Any]) -> dict[str, Any]:
    answer = shop.client.put(path, json=spec)
    assert answer.status_code in (200, 201), answer.text
    body: dict[str, Any] = answer.json()
    return body


@pytest.fixture
def sync(shop: Shop) -> uuid.UUID:
    """A sync of two collections, that no run has taken yet."""
    live = {"provider": "stripe", "properties": {"api_key": "hush"}, "metadata": {"note": XSS}}
    put(shop, "/v1/credentials/live", live)
    return uuid.UUID(put(shop, "/v1/syncs/billing", SYNC)["entity"]["id"])


def at(minutes: float) -> str:
    return (datetime.now(UTC) + timedelta(minutes=minutes)).isoformat()


def report(shop: Shop, sync: uuid.UUID, collection: str, **changes: Any) -> None:
    """Store what a run shows of a collection."""
    shown = {
        "phase": "polling", "initial_backfill_completed_at": at(-60), "health": None,
        "last_run": at(-1), "last_success": at(-1), "next_run": at(4), "lag_seconds": 60.0,
        "records_read": 4100, "inserted": 4000, "changed": 90, "deleted": 10, "unreadable": 0,
        "skipped": 0, "requests": 57, "deletes": "events", "delete_notes": "", "backfill": None,
        **changes,
    }  # fmt: skip
    with shop.store.connection() as connection:
        connection.execute(
            "INSERT INTO penstock.sync_collections (sync_id, collection_id, progress, shown)"
            " VALUES (%s, %s, '{}', %s) ON CONFLICT (sync_id, collection_id)"
            " DO UPDATE SET shown = excluded.shown",
            [sync, f"stripe:{collection}", Jsonb(shown)],
        )


def reading(read: int) -> dict[str, Any]:
    """Return what is shown of a backfill of 10,000 records."""
    share = read / 10_000
    run = {"started_at": at(-3), "read": read, "share": share, "estimated_end": at(7)}
    return {"phase": "backfill", "initial_backfill_completed_at": None, "backfill": run}


def test_a_sync_is_seen_and_asked_of(shop: Shop, window: Window, sync: uuid.UUID) -> None:
    window.login(shop.token)
    page = window.open("syncs")
    row = page.get_by_role("region", name="Syncs").get_by_role("row", name="billing")
    assert "starting" in row.inner_text()
    soon, later = at(4), at(30)
    report(shop, sync, "customers", next_run=later)
    began = {**reading(2_000), "next_run": soon}
    report(shop, sync, "invoices", **began)
    row.get_by_text("20 %").wait_for()  # by itself
    assert "8,200" in row.inner_text()
    assert row.locator("td").nth(7).inner_text() == time(soon)  # that of the first
    row.get_by_role("link", name="billing").click()
    next_run = page.locator(".facts div", has_text="Next run").locator("dd")
    assert next_run.inner_text() == time(soon)
    first = page.get_by_role("row", name="stripe:customers")
    assert "polling" in first.inner_text()
    assert "4,000" in first.inner_text()
    assert time(later) in first.inner_text()
    second = page.get_by_role("row", name="stripe:invoices")
    second.get_by_text("2,000 read, 20 %").wait_for()
    second.get_by_text("min left").wait_for()
    more = {**began, "backfill": {**began["backfill"], "read": 5_000, "share": 0.5}}
    report(shop, sync, "invoices", **more)
    second.get_by_text("a second").wait_for()
    bar = page.get_by_role("progressbar", name="Backfill of stripe:invoices")
    assert bar.get_attribute("value") == "0.5"
    window.check_accessible()
    first.get_by_role("button", name="Run now").click()
    page.get_by_text("It was asked to read what has changed.").wait_for()
    first.get_by_role("button", name="Read all again").click()
    page.get_by_text("It was asked to read all again.").wait_for()
    asked = [each[:3] for each in SyncControls(shop.store).asked()]
    assert asked == [
        (sync, "stripe:customers", "run"), (sync, "stripe:customers", "backfill"),
    ]  # fmt: skip
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("It is paused: it does nothing").wait_for()
    assert SyncControls(shop.store).paused() == {sync}
    page.get_by_role("button", name="Resume").click()
    page.get_by_text("It goes on within seconds.").wait_for()
    assert SyncControls(shop.store).paused() == set()


def test_a_sync_is_the_same_on_the_overview(
    shop: Shop, window: Window, sync: uuid.UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    window.login(shop.token)

    def is_everywhere(level: str) -> None:
        for path in ("overview", "syncs", "syncs/billing"):
            page = window.open(path)
            of = page.get_by_role("region", name="Syncs").get_by_role("row", name="billing")
            place = page.locator(".facts") if path == "syncs/billing" else of
            expect(place.locator(".badge")).to_have_text(level)

    is_everywhere("starting")
    DesiredState(shop.store).refuse("sync", "billing", f"no such provider {XSS}")
    is_everywhere("degraded")
    window.page.get_by_text("no such provider").wait_for()
    look = shop.api.app.status._look

    async def of_a_run() -> dict[str, Any]:
        return {**await look(), "parts": {"sync billing": "ready"}}

    monkeypatch.setattr(shop.api.app.status, "_look", of_a_run)
    expect(window.page.locator(".facts .badge")).to_have_text("ready")  # once the look is a new one
    is_everywhere("ready")


def test_deletes_that_a_sync_asks_for_need_its_name(
    shop: Shop, window: Window, sync: uuid.UUID
) -> None:
    health = {"code": "mass_delete", "cause": f"40 of 50 are gone {XSS}.", "remedy": "Agree.",
              "since": at(-2)}  # fmt: skip
    report(shop, sync, "customers", phase="asks", health=health)
    window.login(shop.token)
    page = window.open("syncs/billing")
    page.get_by_text("40 of 50 are gone").wait_for()
    page.get_by_role("link", name="Agree or not").click()
    window.allow(422)
    page.get_by_label("type the name billing").fill("billin")
    page.get_by_role("button", name="Delete, and resume billing").click()
    page.get_by_text("This is not billing.").wait_for()
    assert SyncControls(shop.store).asked() == []
    window.check_accessible()
    page.get_by_label("type the name billing").fill("billing")
    page.get_by_role("button", name="Delete, and resume billing").click()
    page.get_by_text("It goes on within seconds.").wait_for()
    assert [each[:3] for each in SyncControls(shop.store).asked()] == [(sync, None, "resume")]
    assert page.title() == "Sync billing · Penstock"
    assert page.locator("main img").count() == 0


def test_credentials_show_health_and_budget_and_are_checked(
    shop: Shop, window: Window, sync: uuid.UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = {"code": "unauthorized", "cause": f"The key was refused {XSS}.",
              "remedy": "Give another key.", "since": at(-2)}  # fmt: skip
    report(shop, sync, "customers", phase="stopped", health=health)
    look = shop.api.app.status._look

    async def with_budgets() -> dict[str, Any]:
        used = {"used": 24, "allowed_requests": 25, "interval_seconds": 1.0, "refused": 3}
        return {**await look(), "budgets": {"live": used}}

    monkeypatch.setattr(shop.api.app.status, "_look", with_budgets)

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
        window.login(shop.token)
        page = window.open("credentials")
        of = page.get_by_role("region", name="Credentials")
        live = of.get_by_role("row", name="live").inner_text()
        assert "degraded" in live
        assert "The key was refused" in live
        assert "Give another key." in live
        assert "24 of 25 in 1.0 s" in live
        assert "billing" in live
        of.get_by_role("row", name="good").get_by_role("button", name="Check").click()
        page.get_by_text("crm takes the credential good").wait_for()
        of.get_by_role("row", name="bad").get_by_role("button", name="Check").click()
        page.get_by_text("The check of the credential bad failed").wait_for()
        assert "never_shown" not in page.content()
        assert "hush" not in page.content()
    window.check_looks(dark=True)
    assert page.title() == "Credentials · Penstock"
    assert page.locator("main img").count() == 0


def test_without_syncs_it_shows_what_to_do_first(shop: Shop, window: Window) -> None:
    window.login(shop.token)
    page = window.open("syncs")
    page.get_by_text("No sync yet").wait_for()
    window.check_accessible()
    page.get_by_role("link", name="Credentials").click()
    page.get_by_text("No credential yet").wait_for()
    window.check_accessible()
    window.allow(404)
    page = window.open("syncs/none")
    page.get_by_text("There is no sync 'none'").wait_for()


def test_a_viewer_asks_for_nothing(shop: Shop, window: Window, sync: uuid.UUID) -> None:
    viewer = shop.store.tokens.create("viewer", "viewer")
    known(shop.api.as_bearer(viewer)).close()
    window.login(viewer)
    for path in ("syncs", "syncs/billing", "credentials"):
        page = window.open(path)
        page.get_by_text("stripe").first.wait_for()
        assert set(page.get_by_role("button").all_inner_texts()) <= {"Log out", "Search"}
