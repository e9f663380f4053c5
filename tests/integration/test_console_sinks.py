"""The console's pages of sinks in a real browser: state, settings, readers, and their end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.api_help import ApiServer, Shop, known, run_curl
from tests.browser import Window
from tests.waits import await_true

from penstock.embedded.handles import Database

XSS = '<script>document.title="owned"</script>"><img src=x onerror="document.title=\'owned\'">'
SOURCE = {"type": "postgres", "url": "postgresql://app:hush@db.invalid/shop", "slot": "shop"}


@pytest.fixture
def shop(database: Database) -> Iterator[Shop]:
    with Shop(database.url) as shop:
        shop.client.put("/v1/sources/shop", json=SOURCE).raise_for_status()
        sink = {"type": "stream", "source": "shop", "filter": "record.note <> '<b>'"}
        shop.client.put("/v1/sinks/events", json=sink).raise_for_status()
        yield shop


@pytest.fixture
def console(shop: Shop) -> ApiServer:
    return shop.api


def running(**changes: Any) -> dict[str, Any]:
    """Return what a run reports of a sink."""
    return {
        "type": "stream", "state": "behind", "delivered": 1000, "per_second": 12.5,
        "duplicates": 0, "dead_lettered": 2, "filtered": 3, "retries": 4, "error": None,
        "code": None, "since": None, "backlog": 190, "backlog_bytes": 1000, **changes,
    }  # fmt: skip


@pytest.fixture
def reported(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a run would report to the API."""
    look, found = shop.api.app.status._look, {"events": running()}

    async def with_sinks() -> dict[str, Any]:
        status = await look()
        parts = {**status["parts"], **{f"sink {name}": "degraded" for name in found}}
        return {**status, "sinks": found, "parts": parts}

    monkeypatch.setattr(shop.api.app.status, "_look", with_sinks)
    return found


def test_the_list_has_what_a_run_reports(
    shop: Shop, window: Window, reported: dict[str, Any]
) -> None:
    reported["other"] = running(backlog=7, error=f"It failed: {XSS}", type="nats")
    window.login(shop.token)
    page = window.open("sinks?sort=-lag")
    assert page.locator("tbody th").all_inner_texts() == ["events", "other"]
    row = page.get_by_role("row", name="events").inner_text().split()
    assert row == ["events", "degraded", "behind", "stream", "shop", "190", "12.5", "1,000", "3",
                   "4", "2"]  # fmt: skip
    assert "onerror" in page.get_by_role("row", name="other").inner_text()
    page.get_by_role("link", name=re.compile("^Lag")).click()
    assert page.locator("tbody th").all_inner_texts() == ["other", "events"]
    reported["events"]["delivered"] = 4321
    page.get_by_role("cell", name="4,321").wait_for()  # by itself
    assert page.locator("main img").count() == 0
    assert page.title() == "Sinks · Penstock"
    window.check_looks(dark=True)


def test_a_sink_has_its_settings_and_readers(
    shop: Shop, window: Window, reported: dict[str, Any]
) -> None:
    shop.consumer("mail")
    shop.publish(1, 2, 3)
    window.login(shop.token)
    page = window.open("sinks/events")
    assert "<b>" in page.locator("dl.settings").inner_text()
    reader = page.get_by_role("row", name="mail")
    reader.wait_for()
    assert reader.inner_text().split() == ["mail", "ready", "pull", "3", "0"]
    receive, ack, nack = page.locator(".copy code").all_inner_texts()
    assert f"http://{window.address}/v1/streams/events/receive" in receive
    token = shop.store.tokens.create("worker", "worker", ["events"])
    for command in (nack, ack):
        ack_id = run_curl(receive, token)["data"][0]["ack_id"]
        assert run_curl(command.replace("…", ack_id), token) == {"success": True}
    reported["events"]["error"] = f"Nothing listens {XSS}"

    def shows_the_error() -> bool:
        page.reload()
        return page.get_by_text("Nothing listens").count() > 0

    await_true(shows_the_error, what="the page shows the error that the run reports")
    assert page.title() == "Sink events · Penstock"
    assert "hush" not in page.content()
    window.check_accessible()
    window.allow(404)
    window.open("sinks/nothing")
    page.get_by_text("There is no sink 'nothing'.").wait_for()


def test_it_is_deleted_by_its_name_alone(shop: Shop, window: Window) -> None:
    window.login(shop.token)
    page = window.open("sinks/events")
    page.get_by_role("link", name="Delete").click()
    lost = page.locator(".danger ul").inner_text()
    assert "events" in lost
    window.allow(422)
    page.get_by_label("To go on, type the name events").fill("event")
    page.get_by_role("button", name="Delete events").click()
    page.get_by_text("This is not events.").wait_for()
    assert shop.client.get("/v1/sinks/events").status_code == 200
    page.get_by_label("To go on, type the name events").fill("events")
    page.get_by_role("button", name="Delete events").click()
    page.get_by_text("The sink is deleted.").wait_for()
    assert shop.client.get("/v1/sinks/events").status_code == 404
    page.get_by_text("There is no sink yet").wait_for()


def test_what_is_needed_is_not_deleted(shop: Shop, window: Window) -> None:
    shop.consumer("mail")
    window.login(shop.token)
    page = window.open("sinks/events/delete")
    assert "mail" in page.locator(".problem").inner_text()
    assert page.get_by_role("button").all_inner_texts() == ["Log out"]


def test_a_viewer_changes_nothing(shop: Shop, window: Window) -> None:
    viewer = shop.store.tokens.create("viewer", "viewer")
    known(shop.api.as_bearer(viewer)).close()
    window.login(viewer)
    page = window.open("sinks/events")
    assert page.get_by_role("link", name="Delete").count() == 0


def test_a_sink_to_nats_is_paused_and_goes_on(
    shop: Shop, window: Window, reported: dict[str, Any]
) -> None:
    sink = {"type": "nats", "source": "shop", "url": "nats://here:4222"}
    shop.client.put("/v1/sinks/copy", json=sink).raise_for_status()
    reported["copy"] = running(type="nats")
    window.login(shop.token)
    assert window.open("sinks/events").get_by_role("button", name="Pause").count() == 0
    page = window.open("sinks/copy")
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("It is paused: its messages wait in the store").wait_for()
    assert shop.client.get("/v1/sinks/copy").json()["paused"] == "admin"
    window.check_accessible()
    page.get_by_role("button", name="Resume").click()
    page.get_by_text("It goes on").wait_for()
    page.get_by_role("button", name="Pause").wait_for()
    assert shop.client.get("/v1/sinks/copy").json()["paused"] is None
