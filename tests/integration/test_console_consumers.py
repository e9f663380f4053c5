"""The console's pages of consumers in a real browser: what they hold, pause, rewind, end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.api_help import Shop, ids, known, run_curl, tokens
from tests.browser import NARROW, Window

from penstock.embedded.handles import Database
from penstock.streams.nats_consumers import NatsConsumers

XSS = '<script>document.title="owned"</script>"><img src=x onerror="document.title=\'owned\'">'
SOURCE = {"type": "postgres", "url": "postgresql://app:hush@db.invalid/shop", "slot": "shop"}


@pytest.fixture
def shop(database: Database) -> Iterator[Shop]:
    with Shop(database.url) as shop:
        shop.client.put("/v1/sources/shop", json=SOURCE).raise_for_status()
        sink = {"type": "stream", "source": "shop"}
        shop.client.put("/v1/sinks/events", json=sink).raise_for_status()
        yield shop


def facts(window: Window) -> dict[str, str]:
    """Return the figures on top of a page."""
    pairs = window.page.locator(".facts > div").all()
    return {each.locator("dt").inner_text(): each.locator("dd").inner_text() for each in pairs}


def test_the_list_is_sorted_by_lag(shop: Shop, window: Window) -> None:
    for name, count in (("a", 1), ("b", 3), ("c", 2)):
        path = shop.consumer(name)
        shop.publish(*(f"{name}{n}" for n in range(3)))
        got = shop.client.get(f"{path}/next", params={"batch_size": 100})
        shop.client.post(f"{path}/ack", json={"ack_tokens": tokens(got)[count:]}).raise_for_status()
    window.login(shop.token)
    page = window.open("consumers?sort=-lag_messages")
    names = page.locator("tbody th").all_inner_texts()
    lags = [int(each) for each in page.locator("tbody td:nth-child(5)").all_inner_texts()]
    assert lags == sorted(lags, reverse=True)
    assert names[-1] == "c"  # 2 of the 9 that there were, and nothing since
    page.get_by_role("link", name=re.compile(r"^Lag(?!,)")).click()
    assert page.locator("tbody th").first.inner_text() == "c"
    page.get_by_label("Search consumers").fill("eve")
    page.locator(".paging", has_text="found").wait_for()


def test_pages_have_each_consumer_once(shop: Shop, window: Window) -> None:
    made = {f"c{number}" for number in range(55)}
    for name in sorted(made):
        shop.consumer(name)
    NatsConsumers(shop.store).register(shop.stream, "copy", {"url": "nats://here:4222"}, "all")
    window.login(shop.token)

    def names(query: str, pages: int) -> list[str]:
        page = window.open(f"consumers?{query}")
        found: list[str] = []
        for number in range(pages):
            if number:
                page.get_by_role("link", name="Next page").click()
                page.get_by_role("link", name="First page").wait_for()
            found += page.locator("tbody th").all_inner_texts()
        assert page.get_by_role("link", name="Next page").count() == 0
        return found

    every = sorted({*made, "copy", "events"})
    # Looks at the store are some time apart: the list has what the last one saw.
    for _ in range(120):
        if len(shop.client.get("/v1/status").json()["consumers"]) == len(every) - 1:
            break
        window.page.wait_for_timeout(500)
    assert names("sort=name", 2) == every
    assert names("sort=-name", 2) == every[::-1]
    assert sorted(names("sort=-lag_messages", 2)) == every
    assert names("q=c1&sort=-name", 1) == sorted((n for n in made if "c1" in n), reverse=True)


def test_what_is_out_and_what_failed(shop: Shop, window: Window) -> None:
    path = shop.consumer("mail", max_deliver=2)
    shop.publish(1, XSS, 3)
    first = shop.client.get(f"{path}/next", params={"batch_size": 3})
    at = ids(first).index(XSS)
    bad = tokens(first)[at]
    nack = {"ack_tokens": [bad], "reason": f"no such shop {XSS}"}
    shop.client.post(f"{path}/nack", json=nack).raise_for_status()
    again = shop.client.get(f"{path}/next", params={"wait_for_ms": 20_000})
    assert ids(again) == [XSS]
    window.login(shop.token)
    page = window.open("consumers/mail")
    found = facts(window)
    assert (found["Lag"], found["In flight"], found["Redeliveries"]) == ("3", "3", "1")
    assert "no such shop" in page.locator(".last").inner_text()
    rows = page.locator("#state table").first.locator("tbody tr")
    assert rows.count() == 3
    assert XSS.replace('"', '\\"')[:7] in rows.filter(has_text="onerror").inner_text()
    assert page.locator("#held").inner_text() == "In flight 3"
    page.get_by_role("link", name="All that is in flight").click()
    page.locator(".paging", has_text="1 to 3 of 3").wait_for()
    page.get_by_role("link", name="Delivered").click()
    page.locator("th[aria-sort=ascending]", has_text="Delivered").wait_for()
    delivered = page.locator("#list tbody td:nth-child(4)").all_inner_texts()
    assert delivered == ["1", "1", "2"]
    page.get_by_role("searchbox").fill("onerror")
    page.locator(".paging", has_text="1 to 1 of 1 found").wait_for()
    window.check_accessible()
    shop.client.post(f"{path}/nack", json={**nack, "ack_tokens": tokens(again)}).raise_for_status()
    page = window.open("consumers/mail")
    page.get_by_role("heading", name="Dead letters").wait_for()
    assert facts(window)["Dead letters"] == "1"
    assert page.title() == "Consumer mail · Penstock"
    assert page.locator("main img").count() == 0
    command = page.locator(".copy code").first.inner_text()
    assert f"http://{window.address}/v1/http-consumers/mail/next" in command
    window.check_looks()
    # The commands do what they are for, in a shell.
    shop.publish("again")
    token = shop.store.tokens.create("worker", "worker", ["mail"])
    commands = page.locator(".copy code").all_inner_texts()
    receive, to_ack, to_nack = (each for each in commands if each.startswith("curl"))
    for command in (to_nack, to_ack):
        (got,) = run_curl(receive, token)["data"]
        assert got["record"]["id"] == "again"
        assert run_curl(command.replace("…", got["ack_token"]), token) == {"success": True}
    assert shop.client.get(path).json()["status"]["in_flight"] == 2


def test_it_is_rewound(shop: Shop, window: Window) -> None:
    path = shop.consumer("mail")
    _, two, three = shop.publish("a", "b", "c")

    def drain() -> list[Any]:
        got = shop.client.get(f"{path}/next", params={"batch_size": 9, "wait_for_ms": 20_000})
        shop.client.post(f"{path}/ack", json={"ack_tokens": tokens(got)}).raise_for_status()
        return ids(got)

    assert drain() == ["a", "b", "c"]
    window.login(shop.token)
    for to, at, expected in (
        ("at", f"{two.lsn}:{two.idx}", ["b", "c"]),
        ("at", f"{three.lsn >> 32:X}/{three.lsn & 0xFFFFFFFF:X}:{three.idx}", ["c"]),
        ("at", "2000-01-01T00:00:00Z", ["a", "b", "c"]),
        ("all", "", ["a", "b", "c"]),
    ):
        page = window.open("consumers/mail")
        page.get_by_label("Go on").select_option(to)
        page.get_by_label("Position or time").fill(at)
        page.get_by_role("button", name="Rewind mail").click()
        page.get_by_text("It goes on from there.").wait_for()
        assert drain() == expected
    window.allow(422)

    def pending() -> list[Any]:
        found = shop.client.get(f"{path}/messages").json()["data"]
        return [each["record"]["id"] for each in found]

    # What waits is skipped by its name alone.
    page.set_viewport_size({"width": NARROW[0], "height": NARROW[1]})
    *_, last = shop.publish("d", "e", "f")
    for to, at, waiting, left in (
        ("at", f"{last.lsn}:{last.idx}", ["d", "e", "f"], ["f"]),
        ("new", "", ["g"], []),
    ):
        if to == "new":
            shop.publish("g")
        page = window.open("consumers/mail")
        page.get_by_label("Go on").select_option(to)
        page.get_by_label("Position or time").fill(at)
        page.get_by_role("button", name="Rewind mail").click()
        lost = page.locator(".danger ul")
        skipped = "2 messages" if left else "1 message"
        assert lost.inner_text() == f"consumer mail skips {skipped} that it is not done with"
        assert pending() == waiting
        page.get_by_label("To go on, type the name mail").fill("events")
        page.get_by_role("button", name="Rewind mail").click()
        page.get_by_text("This is not mail.").wait_for()
        assert pending() == waiting
        if left:
            window.check_fits()
            window.check_accessible()
        page.get_by_label("To go on, type the name mail").fill("mail")
        page.get_by_role("button", name="Rewind mail").click()
        page.get_by_text("It goes on from there.").wait_for()
        assert pending() == left
        if left:
            assert drain() == left
    for wrong in ("yesterday", "5", "2026-01-31"):
        page.get_by_label("Go on").select_option("at")
        page.get_by_label("Position or time").fill(wrong)
        page.get_by_role("button", name="Rewind mail").click()
        page.locator("#at-error", has_text=wrong).wait_for()
    window.check_accessible()


def test_a_webhook_is_paused_and_goes_on(shop: Shop, window: Window) -> None:
    shop.consumer("hook", type="webhook", url="https://example.com/in?token=t0k")
    window.login(shop.token)
    page = window.open("consumers/hook")
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("It is paused").wait_for()
    assert shop.client.get("/v1/http-consumers/hook").json()["disabled"] == "admin paused it"
    assert "paused" in facts(window)["State"]
    page.get_by_role("button", name="Resume").click()
    page.get_by_text("It goes on").wait_for()
    assert shop.client.get("/v1/http-consumers/hook").json()["disabled"] is None
    assert "t0k" not in page.content()


def test_a_pull_consumer_is_paused_and_goes_on(shop: Shop, window: Window) -> None:
    path = shop.consumer("mail")
    shop.publish("a", "b")
    (held,) = tokens(shop.client.get(f"{path}/next", params={"wait_for_ms": 20_000}))
    window.login(shop.token)
    page = window.open("consumers/mail")
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("It is paused").first.wait_for()
    found = facts(window)
    assert "paused" in found["State"]
    assert (found["Lag"], found["In flight"]) == ("2", "1")
    assert page.locator("#state", has_text="admin paused it").count() == 1
    assert "paused" in shop.client.get(f"{path}/next").json()
    shop.client.post(f"{path}/ack", json={"ack_tokens": [held]}).raise_for_status()
    row = window.open("consumers").get_by_role("row", name="mail")
    row.locator("span", has_text="paused").wait_for()
    page = window.open("consumers/mail")
    window.check_accessible()
    page.get_by_role("button", name="Resume").click()
    page.get_by_text("It goes on").wait_for()
    assert ids(shop.client.get(f"{path}/next", params={"wait_for_ms": 20_000})) == ["b"]


def test_a_nats_consumer_is_paused_and_rewound(shop: Shop, window: Window) -> None:
    NatsConsumers(shop.store).register(shop.stream, "copy", {"url": "nats://here:4222"}, "all")
    shop.publish("a", "b")
    window.login(shop.token)
    page = window.open("consumers")
    assert "behind" in page.get_by_role("row", name="copy").inner_text()
    page.get_by_role("link", name="copy").click()
    assert facts(window)["Lag"] == "2"
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("It is paused").wait_for()
    assert NatsConsumers(shop.store).get("copy").body()["state"] == "paused"
    page.get_by_label("Go on").select_option("new")
    page.get_by_role("button", name="Rewind copy").click()
    page.get_by_text("consumer copy skips 2 messages that it is not done with").wait_for()
    window.allow(422)
    page.get_by_label("To go on, type the name copy").fill("mail")
    page.get_by_role("button", name="Rewind copy").click()
    page.get_by_text("This is not copy.").wait_for()
    assert NatsConsumers(shop.store).get("copy").rewind is None
    page.get_by_label("To go on, type the name copy").fill("copy")
    page.get_by_role("button", name="Rewind copy").click()
    page.get_by_text("A rewind is asked for").wait_for()
    page.get_by_role("button", name="Resume").click()
    page.get_by_text("It goes on, with").wait_for()


def test_it_is_deleted_by_its_name_alone(shop: Shop, window: Window) -> None:
    shop.consumer("mail")
    window.login(shop.token)
    page = window.open("consumers/mail")
    page.get_by_role("link", name="Delete").click()
    page.get_by_text("drops the consumer mail").wait_for()
    window.allow(422)
    page.get_by_label("To go on, type the name mail").fill("events")
    page.get_by_role("button", name="Delete mail").click()
    page.get_by_text("This is not mail.").wait_for()
    assert shop.client.get("/v1/http-consumers/mail").status_code == 200
    page.get_by_label("To go on, type the name mail").fill("mail")
    page.get_by_role("button", name="Delete mail").click()
    page.get_by_text("The consumer is deleted.").wait_for()
    assert shop.client.get("/v1/http-consumers/mail").status_code == 404
    page = window.open("consumers/events/delete")
    page.get_by_text("it goes with its sink").wait_for()
    window.allow(404)
    window.open("consumers/mail")
    page.get_by_text("There is no consumer 'mail'.").wait_for()


def test_a_viewer_changes_nothing(shop: Shop, window: Window) -> None:
    shop.consumer("hook", type="webhook", url="https://example.com/in")
    viewer = shop.store.tokens.create("viewer", "viewer")
    known(shop.api.as_bearer(viewer)).close()
    window.login(viewer)
    page = window.open("consumers/hook")
    assert page.get_by_role("button").all_inner_texts() == ["Log out"]
    assert page.get_by_role("link", name=re.compile("Edit|Delete|Rewind")).count() == 0
