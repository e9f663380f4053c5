"""A live page's stream: what it sends, what ends it, and what the browser makes of it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
from playwright.sync_api import expect
from tests.api_help import Shop
from tests.browser import Window
from tests.waits import await_end, await_true

from penstock.api import status
from penstock.api.console import live
from penstock.api.console.sessions import COOKIE, Sessions
from penstock.embedded.handles import Database
from penstock.streams.nats_consumers import NatsConsumers

SINK = "/console/sinks/events"
SOURCE = {"type": "postgres", "url": "postgresql://app@db.invalid/shop", "slot": "shop"}


@pytest.fixture
def shop(database: Database) -> Iterator[Shop]:
    with Shop(database.url) as shop:
        shop.client.put("/v1/sources/shop", json=SOURCE).raise_for_status()
        sink = {"type": "stream", "source": "shop"}
        shop.client.put("/v1/sinks/events", json=sink).raise_for_status()
        yield shop


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look as often as the parts ask for, however long it takes."""
    for each in (live, status):
        monkeypatch.setattr(each, "_SHARE", 0)


@pytest.fixture
def session(shop: Shop) -> str:
    found = Sessions(shop.store).begin(shop.token)
    assert found is not None
    return found.id


@contextlib.contextmanager
def stream(shop: Shop, session: str, path: str = SINK) -> Iterator[httpx.Response]:
    """Open the stream of a page."""
    headers = {"Accept": "text/event-stream", "Cookie": f"{COOKIE}={session}"}
    with shop.api.as_bearer(None) as client, client.stream("GET", path, headers=headers) as answer:
        yield answer


def events(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    """Yield each event's kind and data."""
    kind = ""
    for line in answer.iter_lines():
        name, _, value = line.partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield kind, orjson.loads(value)


def await_count(shop: Shop, count: int) -> None:
    await_true(lambda: shop.api.app.console.live.count == count, what=f"{count} streams are open")


def test_a_part_is_sent_when_it_is_another_one(shop: Shop, session: str) -> None:
    with stream(shop, session) as answer:
        headers = answer.headers
        assert headers["content-type"].partition(";")[0] == "text/event-stream"
        assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-store", "no")
        assert "default-src 'none'" in headers["content-security-policy"]
        sent = events(answer)
        kind, data = next(sent)
        assert (kind, data["ids"], [*data["changed"]]) == (
            "parts", ["state", "list"], ["state", "list"]
        )  # fmt: skip
        shop.consumer("later")
        kind, data = next(sent)
        assert (kind, data["ids"], [*data["changed"]]) == ("parts", ["state", "list"], ["list"])
        assert "later" in data["changed"]["list"]
    await_count(shop, 0)


def test_a_silent_one_has_a_heartbeat(
    shop: Shop, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_HEARTBEAT", 0.5)
    with stream(shop, session, "/console/streams/events?tail=1") as answer:
        lines = answer.iter_lines()
        assert any(line.startswith("event: parts") for line in lines)
        assert [line for line in itertools.islice(lines, 6) if line.startswith(":")]
        assert not answer.is_closed


def test_an_end_of_the_session_ends_it(shop: Shop, session: str) -> None:
    with stream(shop, session) as answer:
        sent = events(answer)
        next(sent)
        with shop.store.connection() as connection:
            connection.execute(
                "UPDATE penstock.console_sessions SET seen_at = now() - interval '3 h'"
            )
        assert [*sent] == [("reload", None)]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (SINK, [("reload", None)]), ("/console/overview/charts", [("reload", None)]),
        ("/console/login", [("parts", {"ids": [], "changed": {}})]), ("/", []),
        ("/console/static/console.js", [("parts", {"ids": [], "changed": {}})]),
    ],
)  # fmt: skip
def test_who_has_not_logged_in_has_none(
    shop: Shop, path: str, expected: list[tuple[str, Any]]
) -> None:
    with stream(shop, "nobody's", path) as answer:
        assert [*events(answer)] == expected


def test_one_of_a_page_that_fails_ends(shop: Shop, session: str) -> None:
    for path in ("/console/sinks/nothing", "/console/nothing"):
        with stream(shop, session, path) as answer:
            assert [*events(answer)] == []


def test_one_beyond_the_most_looks_once(
    shop: Shop, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MOST", 1)
    with stream(shop, session) as first:
        sent = events(first)
        next(sent)
        with stream(shop, session) as second:
            lines = [*second.iter_lines()]
            assert lines[0] == "retry: 15000"
            assert [line for line in lines if line.startswith("event")] == ["event: parts"]
        shop.consumer("later")
        assert next(sent)[0] == "parts"


def test_it_holds_up_no_end(shop: Shop, session: str) -> None:
    server = shop.api._server
    server._server.config.timeout_graceful_shutdown = 1_000
    with stream(shop, session) as answer:
        sent = events(answer)
        next(sent)
        shop.api.stop()
        await_end(server._thread)
        assert [*sent] == []


def test_the_stream_alone_brings_what_is_new(shop: Shop, window: Window) -> None:
    window.login(shop.token)
    page = window.open("sinks/events")
    asked: list[tuple[str, str]] = []
    page.on("request", lambda request: asked.append((request.resource_type, request.url)))
    shop.consumer("later")
    page.get_by_role("link", name="later").wait_for()
    shop.consumer("last")
    page.get_by_role("link", name="last").wait_for()
    assert asked == [("eventsource", page.url)]


def test_what_is_selected_stays_until_it_is_not(shop: Shop, window: Window) -> None:
    window.login(shop.token)
    page = window.open("sinks/events")
    for part in ("#state", "#list"):
        page.locator(part).evaluate("part => part.append('old')")
    reader = page.locator("#list tbody th a")
    reader.evaluate("link => document.getSelection().selectAllChildren(link)")
    expect(page.locator("#state")).not_to_contain_text("old")  # the first look mends it
    expect(page.locator("#list")).to_contain_text("old")
    page.evaluate("document.getSelection().removeAllRanges()")
    expect(page.locator("#list")).not_to_contain_text("old")


def test_one_that_is_lost_is_shown_and_found_again(shop: Shop, window: Window) -> None:
    window.login(shop.token)
    window.page.clock.install()
    page = window.open("sinks/events")
    window.allow(503)
    page.route(page.url, lambda route: route.fulfill(status=503))
    page.clock.run_for(2_000)  # until the first look
    expect(page.locator("#list.stale")).to_have_count(1)
    page.unroute(page.url)
    shop.consumer("later")
    page.clock.run_for(5_000)
    page.get_by_role("link", name="later").wait_for()
    expect(page.locator(".stale")).to_have_count(0)


def test_a_revoked_token_leads_to_the_login(shop: Shop, window: Window) -> None:
    window.login(shop.token)
    page = window.open("sinks/events")
    await_count(shop, 1)
    shop.store.tokens.revoke("admin")
    page.wait_for_url("**/console/login?next=*")
    await_count(shop, 0)


def test_a_search_is_followed(shop: Shop, window: Window) -> None:
    """The stream is that of the URL which the search has written."""
    window.login(shop.token)
    page = window.open("consumers")
    await_count(shop, 1)
    page.get_by_role("searchbox").fill("mail")
    expect(page.get_by_role("link", name="events")).to_have_count(0)
    assert page.url.endswith("/console/consumers?q=mail")
    shop.consumer("mail")
    shop.consumer("other")
    page.get_by_role("link", name="mail").wait_for()
    assert page.get_by_role("link", name="other").count() == 0


def test_what_is_waited_for_is_shown_once_it_is_there(
    shop: Shop, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon, also where looks take long: a run that starts has the processor."""
    monkeypatch.setattr(live, "_SHARE", 1_000_000)
    consumer = {"type": "nats", "stream": "events", "url": "nats://here:4222"}
    shop.client.put("/v1/consumers/copy", json=consumer).raise_for_status()
    window.login(shop.token)
    page = window.open("consumers/copy")
    page.get_by_text("not served yet").evaluate("part => part.append('old')")
    expect(page.locator("#waiting")).not_to_contain_text("old")  # there was a first look
    NatsConsumers(shop.store).register(shop.stream, "copy", {"url": "nats://here:4222"}, "all")
    page.locator("#state .facts").wait_for(timeout=6_000)
