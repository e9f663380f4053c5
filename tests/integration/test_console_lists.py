"""Every list of the console in a real browser: its search, its sort and its pages are in its URL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.api_help import Shop
from tests.browser import Window
from tests.streams_help import make_stream

from penstock.api.console import page as page_module
from penstock.core.delivery import DeadLetter
from penstock.embedded.handles import Database

COUNT = 55
SIZE = 50  # rows of a page
MS = 20_000
NAMES = [f"x-{i:02}" for i in range(COUNT)]
PROVIDER = {
    "type": "rest", "base_url": "https://crm.invalid", "paginator": {"type": "single_page"},
    "collections": {name: {"path": "things"} for name in NAMES},
}  # fmt: skip


def each(spec: dict[str, Any]) -> dict[str, Any]:
    return {name: {**spec} for name in NAMES}


def fill(shop: Shop) -> None:
    """Have 55 of each kind in the store, and lists of 55 at one of some."""
    nats = {"type": "nats", "url": "nats://nats.invalid:4222"}
    outgoing = {"type": "nats", "source": "x-00", "target": "x-00"}
    sync = {"provider": "crm", "collections": ["x-00"], "credential": "x-00"}
    document: dict[str, dict[str, Any]] = {
        "sources": {
            name: {"type": "postgres", "url": "postgresql://db.invalid/a", "slot": f"s{i}"}
            for i, name in enumerate(NAMES)
        },
        "targets": each(nats),
        "sinks": {
            **each(outgoing),
            "orders": {"type": "stream", "source": "x-00"},
        },
        "consumers": each({"stream": "orders"}),
        "providers": {"crm": PROVIDER},
        "credentials": each({"provider": "crm", "properties": {"api_key": "k"}}),
        "syncs": {
            **{name: {**sync, "credential": name} for name in NAMES},
            "whole": {**sync, "collections": NAMES},
        },
    }
    make_stream(shop.store, "orders", source="x-00")
    answer = shop.client.post("/v1/apply", content=json.dumps(document))
    assert answer.status_code == 200, answer.text
    for name in NAMES:
        make_stream(shop.store, f"s-{name}")
        shop.store.letters.add(name, [DeadLetter("k", "s", "too_large", "why", "{}")])


@pytest.fixture(scope="module")
def shop(shared_database: Database) -> Iterator[Shop]:
    with Shop(shared_database.url) as shop:
        fill(shop)
        yield shop


@pytest.fixture(scope="module")
def window(chromium_browser: Browser, shop: Shop) -> Iterator[Window]:
    context = chromium_browser.new_context(viewport={"width": 1280, "height": 900})
    found = Window(context, shop.api.address)
    found.login(shop.token)
    yield found
    context.close()
    found.check_clean()


@pytest.fixture(scope="module")
def other(window: Window) -> Page:
    """Another page of the browser, where a link is opened."""
    return window.context.new_page()


def names(page: Page) -> list[str]:
    """Return what the rows begin with."""
    return [text.split()[0] for text in page.locator("#list tbody th").all_inner_texts()]


@pytest.mark.parametrize(
    ("path", "heading", "more"),
    [
        ("sources", "Name", 0),
        ("sinks", "Name", 1),
        ("streams", "Name", 2),
        ("consumers", "Name", COUNT + 2),  # each stream has a group of its own
        ("syncs", "Name", 1),
        ("targets", "Name", 0),
        ("credentials", "Name", 0),
        ("dead-letters", "Of", 0),
        ("sinks/orders", "Name", 1),
        ("syncs/whole", "Collection", 0),
        ("targets/x-00", "Name", 0),
    ],
)
def test_a_link_shows_the_search_the_sort_and_the_page(
    window: Window, other: Page, path: str, heading: str, more: int
) -> None:
    page = window.open(path)
    paging, head = page.locator("#list .paging"), page.get_by_role("columnheader", name=heading)
    expect(paging).to_contain_text(f"1 to {SIZE} of {COUNT + more}", timeout=MS)
    for way in ("ascending", "descending"):
        if head.get_attribute("aria-sort") != way:
            head.get_by_role("link").click()
            expect(head).to_have_attribute("aria-sort", way)
        found = names(page)
        assert found == sorted(found, reverse=way == "descending")
    while (following := page.get_by_role("link", name="Next page")).count():
        following.click()
        expect(paging).to_contain_text(f"{len(found) + 1:,} to ")
        found += names(page)
    assert len(set(found)) == len(found) == COUNT + more
    assert found == sorted(found, reverse=True)
    last = names(page)
    assert len(last) < SIZE
    other.goto(page.url)
    assert names(other) == last
    page.get_by_role("searchbox").fill("-1")
    expect(paging).to_contain_text("found")
    narrowed = names(page)
    assert narrowed == [name for name in found if "-1" in name]
    assert 10 <= len(narrowed) < SIZE
    other.goto(page.url)
    assert names(other) == narrowed
    expect(other.get_by_role("searchbox")).to_have_value("-1")


def test_a_list_that_is_cut_says_so(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "MAX_PAGE", 20)
    monkeypatch.setattr(page_module, "MOST", 40)
    paging = window.open("targets").locator("#list .paging")
    expect(paging).to_contain_text("1 to 40 of 40")
    expect(paging).to_contain_text("There are more than 40: these alone are searched and sorted.")
    monkeypatch.setattr(page_module, "MOST", COUNT)
    paging = window.open("targets").locator("#list .paging")
    expect(paging).to_contain_text(f"1 to {SIZE} of {COUNT}")
    expect(paging).not_to_contain_text("There are more")
