"""The console's dead letters in a real browser: counted, looked at, replayed and purged."""

from __future__ import annotations

import re

from tests.api_help import Shop, ids, known, problem
from tests.browser import NARROW, WIDE, Window

from penstock.core.delivery import DeadLetter

XSS = '"><img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'
WAIT = {"wait_for_ms": 20_000, "batch_size": 100}


def fail(shop: Shop, path: str, *keys: str) -> None:
    """Publish messages, and let a consumer with one delivery each fail at all of them."""
    shop.publish(*keys)
    left = set(keys)
    while left:
        got = shop.client.get(f"{path}/next", params=WAIT)
        left -= set(ids(got))
        tokens = [message["ack_token"] for message in got.json()["data"]]
        shop.client.post(f"{path}/nack", json={"ack_tokens": tokens, "reason": "no such mailbox"})


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


def test_all_of_a_cause_are_replayed_round_by_round(shop: Shop, window: Window) -> None:
    path = shop.consumer("mail", max_deliver=1)
    keys = [f"k{n}" for n in range(45)]
    fail(shop, path, *keys)
    window.login(shop.token)
    page = window.open("dead-letters/list?consumer=mail&code=max_deliver")
    page.get_by_role("link", name="Replay 45…").click()
    page.get_by_text("45 dead letters of consumer mail with the cause max_deliver").wait_for()
    fail(shop, path, "late")  # what has come since it was counted stays
    page.get_by_role("button", name="Replay 45").click()
    page.locator("#rounds", has_text="Done: 45 of 45 replayed.").wait_for()
    window.check_accessible()
    page.get_by_role("link", name="To the dead letters").click()
    assert page.locator(".facts dd").all_inner_texts() == ["1", "45"]
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
        window.check_accessible()
    window.allow(403)
    token = page.locator("input[name=csrf]").first.get_attribute("value") or ""
    for path in ("replay?sink=orders", "purge?sink=orders", f"{letter['id']}/replay",
                 f"{letter['id']}/purge"):  # fmt: skip
        answer = page.request.post(
            f"http://{window.address}/console/dead-letters/{path}",
            form={"csrf": token, "confirm": "orders"},
            headers={"Sec-Fetch-Site": "same-origin"},
        )
        assert answer.status == 403
    assert shop.client.get("/v1/dead-letters").json()["data"] == [letter]
