"""The console's streams and messages in a real browser."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator

import httpx
import orjson
import pytest
from playwright.sync_api import Page, expect
from tests.api_help import Shop, known
from tests.browser import Window
from tests.streams_help import Change, deleted, inserted, publish, updated

from penstock.core.delivery import DeadLetter
from penstock.core.group_hash import group_hash
from penstock.core.message import UPDATE
from penstock.embedded.handles import Database
from penstock.expressions import ColumnType
from penstock.streams.nats_consumers import NatsConsumers

XSS = '"><img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'
COLUMNS = {"id": ColumnType("pg_catalog", "int8"), "amount": ColumnType("pg_catalog", "numeric")}


@pytest.fixture
def shop(database: Database) -> Iterator[Shop]:
    with Shop(database.url) as shop:
        shop.store.save_catalog("shop", {("public", "items"): COLUMNS})
        yield shop


def paging(page: Page, text: str) -> None:
    """Wait until the list reports this."""
    page.locator("#list .paging", has_text=text).wait_for()


def copied(page: Page, label: str) -> str:
    """Press a button of this name, and return what it has copied."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name=label).click()
    page.get_by_text("Copied", exact=True).first.wait_for()
    return str(page.evaluate("() => navigator.clipboard.readText()"))


def run(command: str, shop: Shop) -> httpx.Response:
    """Send what a command of curl's would, as the shell takes it."""
    shown = subprocess.run(
        ["sh", "-c", f'curl() {{ printf "%s\\0" "$@"; }}\n{command}'],
        env={"PENSTOCK_URL": f"http://{shop.api.address}", "PENSTOCK_TOKEN": shop.token},
        check=True,
        capture_output=True,
        text=True,
    )
    words = iter(shown.stdout.split("\0")[:-1])
    headers: dict[str, str] = {}
    query: dict[str, str] = {}
    url, get = "", False
    for word in words:
        if word == "-H":
            name, _, value = next(words).partition(": ")
            headers[name] = value
        elif word == "--data-urlencode":
            name, _, value = next(words).partition("=")
            query[name] = value
        elif word == "-G":
            get = True
        else:
            url = word
    assert get == bool(query)  # else it were a POST
    return httpx.get(url, headers=headers, params=query)


def test_messages_are_found_by_what_is_typed(shop: Shop, window: Window) -> None:
    window.login(shop.token)
    page = window.open("streams/events")
    page.get_by_text("No message yet").wait_for()
    changes = [inserted(1, amount="5"), updated(2, amount="50"), deleted(3)]
    of_4 = group_hash(b'["public","orders",[4]]')
    later = {"commit_timestamp": "2026-01-01T00:00:05.000000Z"}
    order = Change({"id": 4}, table="orders", group=of_4, metadata=later)
    publish(shop.store, shop.stream, changes)
    publish(shop.store, shop.stream, [order])
    page = window.open("streams")
    page.get_by_role("link", name="events", exact=True).click()
    rows = page.locator("#list tbody tr")
    assert [text.split()[3] for text in rows.all_inner_texts()] == [
        "insert", "delete", "update", "insert"
    ]  # fmt: skip
    page.get_by_label("Filter").fill("record.id > 0 and record.amout > 10")
    fault = page.locator("#fault")
    fault.wait_for()
    text, caret = fault.locator("pre").inner_text().splitlines()[:2]
    assert text[caret.index("^") :].startswith("record.amout")  # the caret is under the fault
    assert "did you mean record.amount?" in fault.inner_text()
    window.check_accessible()
    page.get_by_label("Filter").fill("record.amount > 10")
    paging(page, "1 found among 4 looked at")
    assert (
        "the filter can't be evaluated: record.amount not in" in page.locator("#list").inner_text()
    )
    assert "filter=record.amount+%3E+10" in page.url
    shown = rows.all_inner_texts()
    page.goto(page.url)
    assert page.locator("#list tbody tr").all_inner_texts() == shown  # a link shows the same
    answer = run(copied(page, "Copy: curl"), shop)
    assert answer.status_code == 200
    assert [each["record"]["id"] for each in answer.json()["data"]] == [2]
    page.get_by_role("link", name="Clear").click()
    page.get_by_label("Action", exact=True).select_option("delete")
    paging(page, "1 found among 4 looked at")
    page.get_by_label("Action", exact=True).select_option("any")
    page.get_by_label("Table", exact=True).fill("public.orders")
    page.get_by_label("Key in the table").fill("5")
    paging(page, "0 found")
    page.get_by_label("Key in the table").fill("4")
    paging(page, "1 found among 1 looked at")
    assert [text.split()[4] for text in rows.all_inner_texts()] == ["public.orders"]
    page.get_by_label("Key in the table").fill("")
    paging(page, "1 found among 4 looked at")
    page.get_by_label("Table", exact=True).fill("")
    paging(page, "4 found")
    page.get_by_label("From time (UTC)").fill("nonsense")
    page.get_by_text("expected a time with its offset").wait_for()
    page.get_by_label("From time (UTC)").fill("2026-01-01 00:00:01")
    paging(page, "1 found")
    assert [text.split()[4] for text in rows.all_inner_texts()] == ["public.orders"]
    page.get_by_label("From time (UTC)").fill("2026-01-01 00:00:06")
    page.get_by_text("Nothing fits").wait_for()


def test_pages_go_back_in_time_and_on_from_a_position(shop: Shop, window: Window) -> None:
    first, *_ = publish(shop.store, shop.stream, [inserted(n) for n in range(120)])
    window.login(shop.token)
    page = window.open("streams/events")
    ids = page.locator("#list tbody tr td:nth-child(5)")
    assert (ids.first.inner_text(), ids.count()) == ("119", 50)
    page.get_by_role("link", name="Next page").click()
    page.get_by_role("link", name="Next page").click()
    page.get_by_role("link", name="First page").wait_for()
    assert ids.all_inner_texts() == [str(n) for n in range(19, -1, -1)]
    page = window.open(f"streams/events?after={first.lsn}:9")
    assert ids.first.inner_text() == "10"
    page.get_by_role("link", name="Next page").click()
    page.get_by_role("link", name="First page").wait_for()
    assert ids.first.inner_text() == "60"


def test_a_tail_shows_what_comes(shop: Shop, window: Window) -> None:
    publish(shop.store, shop.stream, [inserted(1)])
    window.login(shop.token)
    page = window.open("streams/events")
    page.get_by_role("link", name="Tail live").click()
    page.get_by_role("link", name="Stop the tail").wait_for()
    publish(shop.store, shop.stream, [inserted(777)])
    page.get_by_role("cell", name="777", exact=True).wait_for()


def test_a_message_is_shown_whole_with_its_history(shop: Shop, window: Window) -> None:
    consumers = [shop.consumer("mail", max_deliver=1), shop.consumer("retried", max_deliver=5)]
    change = Change({"id": 7, "name": "new", "note": XSS}, UPDATE, {"name": XSS})
    publish(shop.store, shop.stream, [change])
    NatsConsumers(shop.store).register(shop.stream, "push", {"url": "nats://127.0.0.1:1"}, "all")
    for path in consumers:
        (got,) = shop.client.get(f"{path}/next", params={"wait_for_ms": 20_000}).json()["data"]
        nack = {"ack_tokens": [got["ack_token"]], "reason": f"full {XSS}", "delay_ms": 60_000}
        assert shop.client.post(f"{path}/nack", json=nack).status_code == 200
    key = got["metadata"]["idempotency_key"]
    letters = [DeadLetter(key, "s", "too_large", "2 MiB", "{}")]
    shop.store.letters.add("out", letters)
    window.login(shop.token)
    page = window.open("streams/events")
    page.locator("#list tbody th a").click()
    row = page.locator(".compare tr.changed")
    assert row.locator("td").all_inner_texts() == [XSS, "new"]
    assert page.locator(".compare tbody tr").count() == 3
    assert page.get_by_role("row", name=re.compile("^events")).inner_text().split("\t")[1] == (
        "waits for its delivery"
    )
    mail = page.get_by_role("row", name=re.compile("^mail"))
    assert "dead letter" in mail.inner_text()
    assert "max_deliver" in mail.inner_text()
    cells = page.get_by_role("row", name=re.compile("^retried")).locator("td").all_inner_texts()
    assert cells[:2] == ["waits for its retry", "1"]
    assert cells[2].startswith("20")  # when
    assert cells[3].endswith(f"full {XSS}")
    push = page.get_by_role("row", name=re.compile("^push nats"))
    assert "waits" in push.inner_text()
    out = page.get_by_role("row", name=re.compile("^out sink")).inner_text()
    assert "dead letter" in out
    assert "too_large: 2 MiB" in out
    body = json.dumps({"metadata": got["metadata"]})
    letters = [DeadLetter(key, "s", "too_large", "2 MiB", body)]
    shop.store.letters.add("push", letters, "consumer")
    expect(push).to_contain_text("too_large: 2 MiB")  # the page looks by itself
    assert push.inner_text().split("\t")[1] == "dead letter"
    assert page.title().startswith("Message ")
    assert page.locator("main img").count() == 0
    window.check_looks()
    answer = run(copied(page, "Copy: curl"), shop)
    assert answer.status_code == 200
    (message,) = answer.json()["messages"]
    assert message["record"] == change.record
    mail.get_by_role("link", name="max_deliver").click()
    page.get_by_role("heading", name="Dead letter").first.wait_for()
    page = window.open("consumers/push")
    page.get_by_role("link", name="All its dead letters").click()
    page.get_by_role("row", name="push consumer").get_by_role("link").click()
    page.get_by_role("heading", name="Dead letter").first.wait_for()
    assert page.locator(".facts div", has_text="Consumer").inner_text().split() == [
        "Consumer",
        "push",
    ]
    page.locator(".facts a").click()  # its message in the stream
    page.get_by_role("heading", name="History").wait_for()


def test_numbers_keep_their_digits(shop: Shop, window: Window) -> None:
    price = {"price": orjson.Fragment(b"1.10"), "big": orjson.Fragment(b"123456789012345678901")}
    publish(shop.store, shop.stream, [Change({"id": 1, "j": price})])
    window.login(shop.token)
    page = window.open("streams/events")
    written = '{"price":1.10,"big":123456789012345678901}'
    assert written in page.locator("#list tbody tr").inner_text()
    page.locator("#list tbody th a").click()
    assert written in page.locator(".compare").inner_text()
    assert '"price": 1.10' in page.locator("pre.whole").inner_text()
    assert written in str(page.get_by_label("Copy a POST of it").get_attribute("data-copy"))


def test_hostile_names_are_text_and_a_viewer_sees_all(shop: Shop, window: Window) -> None:
    publish(shop.store, shop.stream, [Change({"id": 1, "x": XSS}, table=XSS)])
    viewer = shop.store.tokens.create("viewer", "viewer")
    known(shop.api.as_bearer(viewer)).close()
    window.login(viewer)
    page = window.open("streams/events?filter=" + "%22%3E%3Cscript%3Ealert(1)%3C/script%3E")
    page.locator("#fault").wait_for()
    page = window.open("streams/events")
    page.get_by_role("cell", name="onerror=").first.wait_for()
    assert page.title() == "events · Penstock"
    assert page.locator("main img").count() == 0
    window.check_looks()
    window.allow(404)
    page = window.open("streams/nothing")
    page.get_by_text("There is no stream 'nothing'.").wait_for()
