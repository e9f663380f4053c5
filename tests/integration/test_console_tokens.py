"""The console's page of tokens in a real browser."""

from __future__ import annotations

import re

from tests.api_help import Shop, known
from tests.browser import Window
from tests.waits import await_true


def test_a_token_is_made_used_and_revoked(shop: Shop, window: Window) -> None:
    window.login(shop.token)
    page = window.open("tokens")
    page.get_by_label("Name", exact=True).fill("mail")
    page.get_by_role("button", name="Make the token").click()
    page.get_by_role("heading", name="The token mail").wait_for()
    secret = page.locator(".copy code").inner_text()
    with shop.api.as_bearer(secret) as worker:
        known(worker)
        window.open("tokens")
        assert secret not in page.content()
        page.get_by_role("link", name="Revoke mail").click()
        page.get_by_label("To go on, type the name mail").fill("nail")
        window.allow(422)
        page.get_by_role("button", name="Revoke mail").click()
        page.get_by_text("This is not mail.").wait_for()
        window.check_accessible()
        page.get_by_label("To go on, type the name mail").fill("mail")
        page.get_by_role("button", name="Revoke mail").click()
        page.get_by_text("The token is revoked").wait_for()
        assert "revoked" in page.get_by_role("row", name=re.compile("mail")).inner_text()
        # The API takes in that a token is revoked by a notification, which no answer shows before.
        await_true(
            lambda: worker.get("/v1/streams/events/receive").status_code == 401,
            what="the API refuses the revoked token",
        )


def test_what_the_api_refuses_stands_beside_the_field(shop: Shop, window: Window) -> None:
    window.login(shop.token)
    window.allow(409, 422)
    page = window.open("tokens")
    page.get_by_label("Name", exact=True).fill("no good/name")
    page.get_by_label("Consumers of a worker").fill("mail")
    page.get_by_role("button", name="Make the token").click()
    field = page.get_by_label("Name", exact=True)
    assert field.get_attribute("aria-invalid") == "true"
    assert field.input_value() == "no good/name"  # what was filled in stays
    assert page.locator("#name-error").inner_text()
    assert page.get_by_label("Consumers of a worker").input_value() == "mail"
    page.get_by_label("Name", exact=True).fill("admin")
    page.get_by_role("button", name="Make the token").click()
    page.get_by_text("There is a token 'admin' already.").first.wait_for()


def test_the_list_is_searched_sorted_and_paged_in_the_url(shop: Shop, window: Window) -> None:
    for i in range(120):
        shop.store.tokens.create(f"w{i:03}", "worker")
    window.login(shop.token)
    page = window.open("tokens?sort=-name")
    assert page.locator("tbody th").first.inner_text() == "w119"
    page.get_by_role("link", name="Next page").click()
    assert page.locator("tbody th").first.inner_text() == "w069"
    assert "51 to 100 of 121" in page.locator(".paging").inner_text()
    same = page.url
    page.get_by_label("Search tokens").fill("w01")
    page.locator(".paging", has_text="1 to 10 of 10 found").wait_for()
    assert "q=w01" in page.url
    assert "sort=-name" in page.url
    page.goto(same)
    assert page.locator("tbody th").first.inner_text() == "w069"
    page.get_by_label("Search tokens").fill("nothing like it")
    page.locator(".paging", has_text="Nothing matches").wait_for()


def test_a_viewer_sees_all_and_is_offered_no_change(shop: Shop, window: Window) -> None:
    viewer = shop.store.tokens.create("viewer", "viewer")
    known(shop.api.as_bearer(viewer)).close()
    window.login(viewer)
    page = window.open("tokens")
    page.get_by_role("cell", name="viewer", exact=True).wait_for()
    assert page.get_by_role("button").all_inner_texts() == ["Log out", "Search"]
    assert page.get_by_role("link", name="Revoke").count() == 0
