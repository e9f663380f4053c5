"""The console's overview in a real browser: what runs, what is wrong, the last hour, hostile names."""

from __future__ import annotations

import time
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from tests.api_help import Shop
from tests.browser import NARROW, WIDE, Window
from tests.waits import await_true

XSS = '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'


def status(**changes: Any) -> dict[str, Any]:
    """Return what a run reports, as `/status` has it."""
    source = {
        "level": "ready", "state": "streaming", "holder": "host", "error": None, "code": None,
        "captured": 1200, "waiting": 7, "oldest_waiting_seconds": 3.0, "truncates_skipped": 0,
        "reconnects": 0, "restarts": 0, "confirmed_lsn": "0/16B3748",
    }  # fmt: skip
    sink = {
        "type": "nats", "state": "behind", "delivered": 1000, "per_second": 12.5, "duplicates": 0,
        "dead_lettered": 2, "filtered": 3, "retries": 0, "error": None, "code": None, "since": None,
        "backlog": 190, "backlog_bytes": 1000,
    }  # fmt: skip
    problem = {
        "subject": "sink orders", "level": "degraded", "code": "no_listener",
        "cause": f"Nothing listens at {XSS}.", "since": "2026-01-31T12:00:00+00:00",
        "remedy": "Start nats-server there: `penstock target show orders`.",
    }  # fmt: skip
    return {
        "runs": True, "level": "degraded", "sources": {"shop": source}, "sinks": {"orders": sink},
        "parts": {"source shop": "ready", "sink orders": "degraded", "store": "ready"},
        "problems": [problem], "nats_consumers": {}, "consumers": {}, "syncs": {}, "backfills": [],
        "store": {"error": None}, **changes,
    }  # fmt: skip


@pytest.fixture
def facts(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the run reports to the API: a dictionary that tests change."""
    found = status()

    async def look() -> dict[str, Any]:
        return found

    monkeypatch.setattr(shop.api.app.status, "_look", look)
    return found


def test_a_new_store_shows_what_to_do_first(shop: Shop, window: Window) -> None:
    window.login(shop.token)
    page = window.open()
    for text in ("No source yet", "No sink yet", "No sync yet"):
        page.get_by_text(text).wait_for()
    assert page.get_by_role("row", name="events").count() == 2  # the stream, and its own consumer
    page.get_by_text("This process serves the API alone.").wait_for()
    window.check_accessible()


def test_what_is_wrong_stands_first_with_its_remedy(
    shop: Shop, window: Window, facts: dict[str, Any]
) -> None:
    window.login(shop.token)
    page = window.open()
    trouble = page.locator(".trouble")
    assert "Nothing listens at" in trouble.inner_text()
    assert trouble.locator(".copy code").inner_text() == "penstock target show orders"
    row = page.get_by_role("row", name="orders").first
    assert row.inner_text().split() == [
        "orders", "degraded", "behind", "nats", "12.5", "1,000", "3", "190", "2"
    ]  # fmt: skip
    assert "3.0 s" in page.get_by_role("row", name="shop").first.inner_text()
    window.check_accessible()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        for width, height in (NARROW, WIDE):
            page.set_viewport_size({"width": width, "height": height})
            window.check_fits()
            window.check_accessible()


def test_it_changes_by_itself_while_it_is_seen(
    shop: Shop, window: Window, facts: dict[str, Any]
) -> None:
    window.login(shop.token)
    page = window.open()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.resource_type))
    facts["sinks"]["orders"] |= {"delivered": 4321, "per_second": 77.7}
    facts["problems"] = []
    page.get_by_role("cell", name="4,321").wait_for()
    page.locator(".facts").get_by_text("77.7").wait_for()  # of another part
    page.get_by_text("What is wrong").wait_for(state="detached")
    streams = shop.api.app.console.live
    show_or_hide(page, hidden=True)
    await_true(lambda: streams.count == 0, what="a hidden tab ends its stream")
    facts["sinks"]["orders"]["delivered"] = 5432
    show_or_hide(page, hidden=False)
    page.get_by_role("cell", name="5,432").wait_for()
    assert asked == ["eventsource"] * 2


def show_or_hide(page: Page, *, hidden: bool) -> None:
    page.evaluate(
        "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        hidden,
    )


def test_rows_link_to_the_pages_that_there_are(
    shop: Shop, window: Window, facts: dict[str, Any]
) -> None:
    live = {"provider": "stripe", "properties": {"api_key": "hush"}}
    assert shop.client.put("/v1/credentials/live", json=live).status_code == 201
    sync = {"provider": "stripe", "collections": ["customers"], "credential": "live"}
    assert shop.client.put("/v1/syncs/billing", json=sync).status_code == 201
    window.login(shop.token)
    page = window.open()
    page.get_by_role("link", name="billing").click()
    page.wait_for_url("**/console/syncs/billing")
    page.get_by_role("heading", name="Sync billing").wait_for()
    page = window.open("overview")
    links = page.locator("tbody th a")
    for path in {str(each.get_attribute("href")) for each in links.all()}:
        window.allow(404)  # what runs here by `facts` alone is no entity
        assert "There is no page" not in page.request.get(f"http://{window.address}{path}").text()


def test_its_charts_have_the_last_hour(shop: Shop, window: Window, facts: dict[str, Any]) -> None:
    history, now = shop.api.app.status.history, time.time()
    for i in range(10):
        facts["sinks"]["orders"]["delivered"] += 100
        history.note(facts, now - 100 + i * 5)
    window.login(shop.token)
    page = window.open()
    throughput = page.locator("[data-chart$=throughput][data-points]")
    throughput.wait_for()
    expect(page.locator(".chart canvas")).to_have_count(3)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.resource_type))
    points = throughput.get_attribute("data-points") or ""
    history.note(facts, time.time())
    expect(throughput).not_to_have_attribute("data-points", points)  # one joins them by itself
    assert asked == ["eventsource"]
    body = page.evaluate("async () => (await fetch('/console/overview/chart/throughput')).json()")
    assert len(body["at"]) >= 10
    assert body["series"][1]["values"][1:10] == [20.0] * 9
    script = shop.client.get("/v1/status/history").json()
    assert script["delivered_per_second"][1:10] == [20.0] * 9


@pytest.mark.parametrize("where", ["names", "errors"])
def test_what_others_wrote_is_text(
    shop: Shop, window: Window, facts: dict[str, Any], where: str
) -> None:
    if where == "names":
        for kind in ("sources", "sinks"):
            facts[kind][XSS] = next(iter(facts[kind].values()))
        facts["problems"][0]["subject"] = f"sink {XSS}"
    else:
        facts["problems"][0] |= {"cause": XSS, "remedy": f"`penstock {XSS}`", "level": "failed"}
    window.login(shop.token)
    page = window.open()
    page.get_by_text("onerror=").first.wait_for()
    facts["sinks"]["orders"]["delivered"] = 4321
    facts["problems"].append({**facts["problems"][0], "subject": "sink later"})
    page.get_by_role("cell", name="4,321").first.wait_for()  # a live look swaps both parts
    page.get_by_text("sink later").first.wait_for()
    assert page.title() == "Overview · Penstock"
    assert page.locator("main img").count() == 0
