"""The console's overview in a real browser: what runs, what is wrong, the last hour, hostile names."""

from __future__ import annotations

import time
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from tests.api_help import Shop, tokens
from tests.browser import Window
from tests.waits import await_true

from penstock.core.health import Failure, Health, Level, Part
from penstock.desired.state import DesiredState

XSS = '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'


def status(**changes: Any) -> dict[str, Any]:
    """Return what a run reports, as `/status` has it."""
    source = {
        "level": "ready", "state": "streaming", "holder": "host", "error": None, "code": None,
        "captured": 1200, "waiting": 7, "oldest_waiting_seconds": 3.0, "truncates_skipped": 0,
        "reconnects": 0, "restarts": 0, "confirmed_lsn": "0/16B3748", "deliveries": 10,
        "delivery_seconds": 0.5,
    }  # fmt: skip
    sink = {
        "type": "nats", "state": "behind", "delivered": 1000, "per_second": 12.5, "duplicates": 0,
        "dead_lettered": 2, "filtered": 3, "retries": 0, "error": None, "code": None, "since": None,
        "backlog": 190, "backlog_bytes": 1000, "lag_seconds": 42.0,
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
    assert page.get_by_role("row", name="events").count() == 2  # the stream, and its own consumer
    page.get_by_text("This process serves the API alone.").wait_for()
    window.check_accessible()
    for title, link, heading in (
        ("No source yet", "Connect a database", "Connect a database"),
        ("No sink yet", "Make a sink", "New sink"),
        ("No sync yet", "paste them here", "Plan a document"),
    ):
        page.locator(".empty", has_text=title).get_by_role("link", name=link).click()
        page.get_by_role("heading", name=heading).wait_for()
        page = window.open("overview")


def test_what_is_wrong_stands_first_with_its_remedy(
    shop: Shop, window: Window, facts: dict[str, Any]
) -> None:
    cause, remedy = f"Nothing listens at {XSS}.", "Start it: `penstock target show orders`."
    sink = Failure("no_listener", cause, remedy, time.time())
    source = Failure("no_privilege", "It may not.", 'ALTER ROLE "app" REPLICATION', time.time())
    health = Health(
        (
            Part("store"),
            Part.failing("sink orders", Level.DEGRADED, sink),
            Part.failing("source shop", Level.FAILED, source),
        )
    )
    facts |= health.as_json()
    window.login(shop.token)
    page = window.open()
    first, second = page.locator(".trouble").all()
    assert first.get_by_role("heading").inner_text() == "failed source shop"
    assert first.locator(".copy code").inner_text() == 'ALTER ROLE "app" REPLICATION'
    assert second.get_by_role("heading").inner_text() == "degraded sink orders"
    assert "Nothing listens at" in second.inner_text()
    assert second.locator(".copy code").inner_text() == "penstock target show orders"
    tops = [
        top(page, each) for each in (".trouble >> nth=0", ".trouble >> nth=1", ".chart", "table")
    ]
    assert tops == sorted(tops)
    row = page.get_by_role("row", name="orders").first
    assert row.inner_text().split() == [
        "orders", "degraded", "behind", "nats", "12.5", "1,000", "3", "190", "42", "s", "2"
    ]  # fmt: skip
    assert "3.0 s" in page.get_by_role("row", name="shop").first.inner_text()
    window.check_looks(dark=True)


def top(page: Page, selector: str) -> float:
    box = page.locator(selector).first.bounding_box()
    assert box is not None
    return box["y"]


def test_a_consumer_lags_until_its_messages_are_acked(shop: Shop, window: Window) -> None:
    path = shop.consumer("mail")
    shop.publish(1, 2, 3)
    window.login(shop.token)
    page = window.open()
    lag = page.get_by_role("region", name="Consumers").get_by_role("row", name="mail")
    stream = page.get_by_role("region", name="Streams").get_by_role("row", name="events")
    for row, places in ((lag, (4, 5)), (stream, (5, 6))):
        messages, seconds = (row.locator("> *").nth(place) for place in places)
        expect(messages).to_have_text("3")
        expect(seconds).to_contain_text(" d")  # the messages are of January
    got = shop.client.get(f"{path}/next", params={"batch_size": 10})
    shop.client.post(f"{path}/ack", json={"ack_tokens": tokens(got)}).raise_for_status()
    expect(lag.locator("> *").nth(4)).to_have_text("0")
    expect(lag.locator("> *").nth(5)).to_have_text("0.0 s")
    expect(stream.locator("> *").nth(5)).to_have_text("3")  # its own group has them yet


def test_a_remedy_is_copied_and_its_button_pressed(shop: Shop, window: Window) -> None:
    path = shop.consumer("mail")
    shop.client.post(f"{path}/pause").raise_for_status()
    window.login(shop.token)
    page = window.open()
    trouble = page.locator(".trouble", has_text="consumer events/mail")
    trouble.get_by_role("link", name="Open consumer mail").wait_for()
    window.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.evaluate("window.board = navigator.clipboard")
    command, copy = "penstock consumer resume mail", trouble.locator("[data-copy]")

    def copied(said: str) -> str:
        page.evaluate("() => window.board.writeText('nothing')")
        copy.click()
        expect(copy).to_have_text(said)
        expect(copy).to_have_accessible_name(said)
        return str(page.evaluate("() => window.board.readText()"))

    assert copied("Copied") == command
    expect(copy).to_have_accessible_name(f"Copy: {command}")
    # As over plain HTTP from another machine.
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    assert copied("Copied") == command
    assert page.evaluate("() => String(getSelection())") == ""  # else nothing is read again
    page.evaluate("document.execCommand = () => false")
    assert copied("Selected: press Ctrl+C") == "nothing"
    page.keyboard.press("Control+C")
    assert page.evaluate("() => window.board.readText()") == command
    trouble.get_by_role("button", name="Resume mail", exact=True).click()
    page.get_by_text("It goes on, with what waits in its stream first.").wait_for()
    assert shop.client.get(path).json()["disabled"] is None
    expect(trouble).to_have_count(0)


def test_more_than_it_shows_of_a_kind_are_on_the_kinds_page(
    shop: Shop, window: Window, facts: dict[str, Any]
) -> None:
    facts["sinks"] = {f"sink{n}": facts["sinks"]["orders"] for n in range(60)}
    window.login(shop.token)
    page = window.open()
    expect(page.get_by_text("The 50 worst of 60.")).to_have_count(1)
    page.get_by_role("link", name="All sinks").click()
    page.get_by_text("1 to 50 of 60").wait_for()


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
    source = {"type": "postgres", "url": "postgresql://app:hush@db.invalid/shop"}
    assert shop.client.put("/v1/sources/shop", json=source).status_code == 201
    facts["sources"] |= dict.fromkeys(("syncs", "removed"), facts["sources"]["shop"])
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
    links = page.locator("tbody th a, .trouble a")
    paths = {str(each.get_attribute("href")) for each in links.all()}
    assert {f"/console/{path}" for path in ("sources/shop", "syncs", "sinks/orders")} <= paths
    for path in paths:
        assert page.request.get(f"http://{window.address}{path}").status == 200, path
    of = page.get_by_role("region", name="Sources")
    assert of.get_by_role("link").all_inner_texts() == ["shop", "syncs"]  # no page has `removed`


def test_what_is_refused_is_the_same_on_its_page(
    shop: Shop, window: Window, facts: dict[str, Any]
) -> None:
    source = {"type": "postgres", "url": "postgresql://app:hush@db.invalid/shop"}
    for path, spec in (
        ("sources/late", source),
        ("sinks/copy", {"type": "stream", "source": "late"}),
    ):
        assert shop.client.put(f"/v1/{path}", json=spec).status_code == 201
        DesiredState(shop.store).refuse(path.partition("s/")[0], path.partition("/")[2], "Not now.")
    window.login(shop.token)
    for path in ("overview", "sources"):
        row = (
            window.open(path).get_by_role("region", name="Sources").get_by_role("row", name="late")
        )
        expect(row.locator(".badge")).to_have_text("degraded")
    for path in ("overview", "sinks"):
        row = window.open(path).get_by_role("region", name="Sinks").get_by_role("row", name="copy")
        expect(row.locator(".badge")).to_have_text("degraded")


def test_its_charts_have_the_last_hour(shop: Shop, window: Window, facts: dict[str, Any]) -> None:
    history, now = shop.api.app.status.history, time.time()

    def deliver(at: float) -> None:
        facts["sinks"]["orders"]["delivered"] += 100
        facts["sources"]["shop"]["deliveries"] += 4
        facts["sources"]["shop"]["delivery_seconds"] += 0.05
        history.note(facts, at)

    for i in range(10):
        deliver(now - 100 + i * 5)
    window.login(shop.token)
    page = window.open()
    chart = page.locator("[data-chart=latency]")
    expect(page.locator(".chart canvas")).to_have_count(4)
    points = chart.get_attribute("data-points")
    body = page.evaluate("async () => (await fetch('/console/overview/charts')).json()")
    assert len(body["at"]) >= 10
    assert set(body["charts"]) == {"throughput", "latency", "age", "lag"}
    (latency,), (age, _) = body["charts"]["latency"], body["charts"]["age"]
    assert latency["values"][:10] == [None, *[0.0125] * 9]
    assert set(age["values"]) == {3.0}
    assert body["charts"]["throughput"][1]["values"][1:10] == [20.0] * 9
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.resource_type))
    deliver(time.time())
    expect(chart).not_to_have_attribute("data-points", str(points))  # it joins them by itself
    assert set(asked) <= {"eventsource"}
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
