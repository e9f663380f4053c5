"""The console's dead letters in a real browser: counted, looked at, replayed and purged."""

from __future__ import annotations

import re
import uuid

from tests.api_help import ApiServer, Shop, ids, known, problem
from tests.browser import NARROW, WIDE, Window

from penstock.cli.api_tools import ApiTools
from penstock.core.delivery import DeadLetter
from penstock.embedded.handles import JetStream
from penstock.embedded.nats import EmbeddedNats

XSS = '"><img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'
WAIT = {"wait_for_ms": 20_000, "batch_size": 100}


def fail(shop: Shop, path: str, *keys: str, reason: str = "no such mailbox") -> None:
    """Publish messages, and let a consumer with one delivery each fail at all of them."""
    shop.publish(*keys)
    left = set(keys)
    while left:
        got = shop.client.get(f"{path}/next", params=WAIT)
        left -= set(ids(got))
        tokens = [message["ack_token"] for message in got.json()["data"]]
        shop.client.post(f"{path}/nack", json={"ack_tokens": tokens, "reason": reason})


def at_a_sink(shop: Shop, code: str, *keys: str, reason: str = "why") -> None:
    shop.store.letters.add(
        "orders", [DeadLetter(k, "s", code, reason, f'{{"k":"{k}"}}') for k in keys]
    )


def test_they_are_counted_by_cause_and_one_is_replayed(shop: Shop, window: Window) -> None:
    window.login(shop.token)
    page = window.open("dead-letters")
    page.get_by_text("No dead letters").wait_for()
    path = shop.consumer("mail", max_deliver=1)
    fail(shop, path, "a", "b")
    at_a_sink(shop, "too_large", "k1", "k2", "k3")
    page.get_by_role("link", name="too_large of orders").wait_for()  # the page looks by itself
    first, second = page.locator("#list tbody tr").all_inner_texts()
    assert first.split()[:7] == ["orders", "sink", "too_large", "of", "orders", "3", "0"]
    assert second.split()[:7] == ["mail", "consumer", "max_deliver", "of", "mail", "2", "0"]
    page.get_by_role("link", name="max_deliver of mail").click()
    page.locator("#list tbody th a").first.click()
    whole = page.locator("pre.whole").inner_text()
    assert '"id": "a"' in whole
    page.get_by_role("button", name="Replay it").click()
    page.get_by_text("It is delivered again.").wait_for()
    assert page.get_by_role("button", name="Replay it").count() == 0
    assert ids(shop.client.get(f"{path}/next", params=WAIT)) == ["a"]
    window.check_accessible()
    page.locator("dd a").click()  # its message in the stream
    page.get_by_role("heading", name="History").wait_for()
    assert "in flight" in page.get_by_role("row", name=re.compile("^mail")).inner_text()


def test_all_that_match_are_listed_and_replayed_round_by_round(shop: Shop, window: Window) -> None:
    path = shop.consumer("mail", max_deliver=1)
    keys = [f"k{n}" for n in range(45)]
    full = [f"f{n}" for n in range(10)]
    fail(shop, path, *full, reason="the mailbox is full")
    fail(shop, path, *keys)
    letters = shop.client.get("/v1/dead-letters").json()["data"]
    newest = [str(letter["id"]) for letter in letters][::-1]
    window.login(shop.token)
    page = window.open("consumers/mail")
    assert page.locator("#letters").inner_text() == "Dead letters the first 10 of 55"
    page.get_by_role("link", name="All its dead letters").click()
    page.locator(".paging", has_text="50 on this page").wait_for()
    page = window.open("dead-letters/list?consumer=mail&code=max_deliver")
    rows = page.locator("#list tbody th")
    assert rows.all_inner_texts() == newest[:4:-1]
    page.get_by_role("columnheader", name="Number").get_by_role("link").click()
    page.locator("th[aria-sort=descending]").wait_for()
    assert rows.all_inner_texts() == newest[:50]
    page.get_by_role("link", name="Next page").click()
    page.locator(".paging", has_text="5 on this page").wait_for()
    page.goto(page.url)  # a link shows the same
    assert rows.all_inner_texts() == newest[50:]
    page.get_by_label("Text in reason or message").fill("NO SUCH mailbox")
    page.get_by_role("button", name="Search").click()
    page.locator(".paging", has_text="45 in all").wait_for()
    assert rows.all_inner_texts() == newest[:45]  # it keeps the sort
    page.get_by_role("link", name="Replay 45…").click()
    found = (
        "45 dead letters of consumer mail with the cause max_deliver that have “NO SUCH mailbox”"
    )
    page.get_by_text(found).wait_for()
    fail(shop, path, "late")  # what has come since it was counted stays
    page.get_by_role("button", name="Replay 45").click()
    page.locator("#rounds", has_text="Done: 45 of 45 replayed.").wait_for()
    window.check_accessible()
    page.get_by_role("link", name="To the dead letters").click()
    assert page.locator(".facts dd").all_inner_texts() == ["1", "45"]
    waiting = {"consumer": "mail", "text": "is full", "replayed": "false"}
    assert len(shop.client.get("/v1/dead-letters", params=waiting).json()["data"]) == 10
    got: set[str] = set()
    while len(got) < 45:
        got |= set(ids(shop.client.get(f"{path}/next", params=WAIT)))
    assert got == set(keys)


def test_what_fails_again_is_listed_and_holds_up_nothing(shop: Shop, window: Window) -> None:
    at_a_sink(shop, "too_large", *[f"k{n}" for n in range(25)])  # this process can't publish
    window.login(shop.token)
    page = window.open("dead-letters/replay?sink=orders")
    page.get_by_role("button", name="Replay 25").click()
    page.locator("#rounds", has_text="Done: 0 of 25 replayed, 25 failed.").wait_for()
    assert page.locator("main li").all_inner_texts() == [
        "This process can't publish: `penstock dead-letters replay` can."
    ]


def test_dead_letters_of_sinks_and_nats_consumers_are_published(
    shop: Shop, window: Window, nats_server: EmbeddedNats, nats: JetStream
) -> None:
    stream = f"D{uuid.uuid4().hex[:8]}"
    nats.add_stream(stream, f"{stream}.>")
    source = {"type": "postgres", "url": "postgresql://db.invalid/shop"}
    sink = {"type": "nats", "source": "shop", "url": nats_server.url}
    consumer = {"type": "nats", "stream": "events", "url": nats_server.url}
    for path, spec in (
        ("sources/shop", source), ("sinks/orders", sink),
        ("sinks/events", {"type": "stream", "source": "shop"}), ("consumers/push", consumer),
    ):  # fmt: skip
        assert shop.client.put(f"/v1/{path}", json=spec).status_code == 201
    shop.store.letters.add(
        "orders", [DeadLetter(k, f"{stream}.{k}", "too_large", "why", f"<{k}>") for k in "abc"]
    )
    with ApiServer(shop.store.url, shop.token, ApiTools()) as api:
        window.address = api.address
        window.login(shop.token)
        page = window.open("dead-letters/list?sink=orders")
        page.locator("#list tbody th a").nth(1).click()
        page.get_by_role("button", name="Replay it").click()
        page.get_by_text("It is delivered again.").wait_for()
        (one,) = nats.messages(stream)
        assert (one.subject, one.headers["Nats-Msg-Id"], one.data) == (f"{stream}.b", "b", b"<b>")
        page = window.open("dead-letters/replay?sink=orders")
        page.get_by_role("button", name="Replay 2").click()
        page.locator("#rounds", has_text="Done: 2 of 2 replayed.").wait_for()
        letter = DeadLetter("p", f"{stream}.p", "too_large", "why", "<p>")
        shop.store.letters.add("push", [letter], "consumer")
        page = window.open("dead-letters")
        row = page.get_by_role("row", name="too_large of push")
        assert row.inner_text().split()[:2] == ["push", "consumer"]
        row.get_by_role("link", name="push", exact=True).click()
        page.get_by_role("heading", name="Dead letters of consumer push").wait_for()
        page.get_by_role("link", name="Replay 1…").click()
        page.get_by_role("button", name="Replay 1").click()
        page.locator("#rounds", has_text="Done: 1 of 1 replayed.").wait_for()
        at_a_sink(shop, "bad_subject", *[f"k{n}" for n in range(25)])
        page = window.open("dead-letters/replay?sink=orders")
        page.get_by_role("button", name="Replay 25").click()
        page.locator("#rounds", has_text="Done: 0 of 25 replayed, 25 failed.").wait_for()
        assert page.locator("#rounds li").count() == 20
        page.get_by_text("Only the first 20 reasons are listed.").wait_for()
    assert [(m.subject, m.data) for m in nats.messages(stream)] == [
        (f"{stream}.{k}", f"<{k}>".encode()) for k in "bacp"
    ]


def test_a_purge_names_what_is_lost_and_asks_for_the_name(shop: Shop, window: Window) -> None:
    at_a_sink(shop, "too_large", "k1", "k2")
    at_a_sink(shop, "bad_subject", "k3", reason=f"it has {XSS}")
    window.login(shop.token)
    page = window.open("dead-letters/list?sink=orders")
    page.get_by_label("Text in reason or message").fill("IT HAS")
    page.get_by_role("button", name="Search").click()
    assert page.locator("#list tbody tr").count() == 1
    page.get_by_role("link", name="Purge 1…").click()
    assert "1 dead letter of sink orders that have “IT HAS”, for ever." in page.content()
    at_a_sink(shop, "bad_subject", "k4", reason="it has come since")
    page.get_by_label("To go on, type the name orders").fill("order")
    window.allow(422)
    page.get_by_role("button", name="Purge the dead letters of orders").click()
    page.get_by_text("This is not orders.").wait_for()
    window.check_accessible()
    page.get_by_label("To go on, type the name orders").fill("orders")
    page.get_by_role("button", name="Purge the dead letters of orders").click()
    page.get_by_text("1 dead letter of sink orders that have “IT HAS” is deleted.").wait_for()
    left = shop.client.get("/v1/dead-letters").json()["data"]
    assert [letter["idempotency_key"] for letter in left] == ["k1", "k2", "k4"]
    page = window.open(f"dead-letters/{left[0]['id']}/purge")
    page.get_by_label(f"To go on, type the name {left[0]['id']}").fill(str(left[0]["id"]))
    page.get_by_role("button", name="Purge").click()
    page.get_by_text("It is deleted.").wait_for()
    problem(shop.client.get(f"/v1/dead-letters/{left[0]['id']}"), 404)


def test_a_viewer_sees_all_and_changes_nothing(shop: Shop, window: Window) -> None:
    at_a_sink(shop, XSS, "k1", reason=XSS)
    viewer = shop.store.tokens.create("viewer", "viewer")
    known(shop.api.as_bearer(viewer)).close()
    (letter,) = shop.client.get("/v1/dead-letters").json()["data"]
    window.login(viewer)
    for path in ("", "/list?sink=orders", f"/{letter['id']}"):
        page = window.open(f"dead-letters{path}")
        page.get_by_text("onerror=").first.wait_for()
        assert page.locator("main img").count() == 0
        assert page.title() != "owned"
        assert page.get_by_role("link", name=re.compile(r"^(Replay|Purge)\b")).count() == 0
        assert page.get_by_role("button", name=re.compile(r"^(Replay|Purge)\b")).count() == 0
        for width, height in (NARROW, WIDE):
            page.set_viewport_size({"width": width, "height": height})
            window.check_fits()
