"""The console's page of sources in a real browser, on a real Postgres: its checks, tables and slots."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page
from tests.api_help import Shop, known
from tests.browser import NARROW, Window
from tests.waits import await_true

from penstock.api.console.render import NONE
from penstock.cli.api_tools import ApiTools
from penstock.embedded.handles import Database

XSS = '"><img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'


@pytest.fixture
def shop(database: Database) -> Iterator[Shop]:
    with Shop(database.url, ApiTools()) as shop:
        yield shop


@pytest.fixture
def limited(database: Database) -> Iterator[str]:
    """The URL of a role that owns nothing and may not replicate."""
    role = f"{database.name}_limited"
    database.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'hush'")
    parts = urlsplit(database.url)
    yield parts._replace(netloc=f"{role}:hush@{parts.netloc.rpartition('@')[2]}").geturl()
    database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def put(shop: Shop, name: str, url: str, **spec: object) -> None:
    answer = shop.client.put(f"/v1/sources/{name}", json={"type": "postgres", "url": url, **spec})
    assert answer.status_code in (200, 201), answer.text


def press(page: Page, button: str) -> None:
    page.get_by_role("button", name=button, exact=True).click()


def tables_of(shop: Shop, name: str) -> list[str]:
    return list(shop.client.get(f"/v1/sources/{name}").json()["spec"].get("tables", []))


def test_a_newcomer_mends_what_is_missing_by_the_statements_of_the_page(
    shop: Shop, window: Window, database: Database, limited: str
) -> None:
    database.execute("CREATE TABLE orders (note text)")
    window.login(shop.token)
    page = window.open("sources")
    page.get_by_text("There are no sources").wait_for()
    window.allow(422)
    page.get_by_label("Name", exact=True).fill("shop")
    page.get_by_label("URL").fill(limited.replace("hush@", "hu/sh@"))
    press(page, "Connect")
    page.locator("#url-error").wait_for()
    assert "hu/sh" not in page.content()
    page.get_by_label("URL").fill(limited)
    press(page, "Connect")
    page.get_by_text("3 things are missing").wait_for()
    assert "hush" not in page.content()
    window.check_accessible()
    assert "may not replicate" in page.locator(".trouble.failed").first.inner_text()
    for statement in page.locator(".trouble .copy code").all_inner_texts():
        database.execute(statement)
    press(page, "Check again")
    page.get_by_text("nothing is missing").wait_for()
    assert "replica identity full" in page.locator(".well").inner_text()
    assert page.locator(".trouble.failed").count() == 0


def test_a_database_that_is_away_is_named_with_its_remedy(shop: Shop, window: Window) -> None:
    put(shop, "away", "postgresql://u:hush@127.0.0.1:1/db")
    window.login(shop.token)
    for path in ("", "/check", "/tables"):
        page = window.open(f"sources/away{path}")
        page.get_by_text("127.0.0.1:1", exact=False).first.wait_for()
        assert page.locator(".problem, .trouble.failed").first.inner_text()
        window.check_accessible()
    window.open("sources/away")
    press(page, "Test the connection")
    page.locator(".trouble.failed").wait_for()
    assert "hush" not in page.content()


def test_what_is_wrong_with_a_source_stands_on_its_page(
    shop: Shop, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(shop, "shop", "postgresql://u:hush@127.0.0.1:1/db")
    look = shop.api.app.status._look
    problem = {
        "subject": "source shop", "level": "failed", "code": "slot_lost",
        "cause": f"The slot is gone {XSS}.", "since": None, "remedy": "Make it again.",
    }  # fmt: skip

    async def with_problem() -> dict[str, Any]:
        return {**await look(), "problems": [problem]}

    monkeypatch.setattr(shop.api.app.status, "_look", with_problem)
    window.login(shop.token)
    page = window.open("sources/shop")
    text = page.locator("#state .trouble").inner_text()
    assert "The slot is gone" in text
    assert "Make it again." in text
    assert page.locator("main img").count() == 0


def test_tables_are_picked_and_their_old_values_explained(
    shop: Shop, window: Window, database: Database
) -> None:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note text); CREATE TABLE logs (note text);"
        'CREATE SCHEMA "Odd One"; CREATE TABLE "Odd One"."T.x" (id int PRIMARY KEY);'
        "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (1) TO (9);"
        "ALTER TABLE parts_1 REPLICA IDENTITY FULL"
    )
    put(shop, "shop", database.url)
    window.login(shop.token)
    page = window.open("sources/shop/tables")
    row = page.get_by_role("row", name="public.orders")
    assert "id alone" in row.inner_text()
    assert "by public.*" in row.inner_text()
    assert "Postgres refuses UPDATE" in page.get_by_role("row", name="public.logs").inner_text()
    assert "every column" in page.get_by_role("row", name="public.parts").inner_text()
    row.get_by_text("Replica identity default").click()
    window.check_accessible()
    database.execute(row.locator(".copy code").inner_text())
    page.reload()
    assert "every column" in page.get_by_role("row", name="public.orders").inner_text()
    # From a whole schema to some tables: what is no longer captured is shown before it is done.
    page.get_by_label("All of public.*").uncheck()
    page.get_by_label('Capture "Odd One"."T.x"').check()
    # A table, and all of its schema: which of the two is meant is not guessed.
    page.get_by_label('All of "Odd One".*').check()
    window.allow(422)
    press(page, "Capture these tables")
    page.get_by_text("is one of").wait_for()
    page.get_by_label('All of "Odd One".*').uncheck()
    assert not page.get_by_label("All of public.*").is_checked()
    press(page, "Capture these tables")
    page.locator(".danger li", has_text="changes of public.* are no longer captured").wait_for()
    window.check_looks()
    page.get_by_label("To go on, type the name shop").fill("public.*")
    press(page, "Do it")
    page.get_by_text("This is not shop.").wait_for()
    assert tables_of(shop, "shop") == []
    page.get_by_label("To go on, type the name shop").fill("shop")
    press(page, "Do it")
    page.get_by_text("The tables are changed.").wait_for()
    assert tables_of(shop, "shop") == ['"Odd One"."T.x"']
    # Those that a search does not show stay as they are.
    page = window.open("sources/shop/tables?q=orders")
    page.get_by_label("Capture public.orders").check()
    press(page, "Capture these tables")
    page.get_by_text("changes of public.orders are captured from now on").wait_for()
    assert page.locator(".danger").count() == 0  # nothing is lost
    press(page, "Do it")
    page.get_by_text("The tables are changed.").wait_for()
    assert tables_of(shop, "shop") == ['"Odd One"."T.x"', "public.orders"]
    page = window.open("sources/shop/tables")
    window.allow(422)
    for label in ('Capture "Odd One"."T.x"', "Capture public.orders"):
        page.get_by_label(label).uncheck()
    press(page, "Capture these tables")
    page.get_by_text("Pick one table at least.").wait_for()


def test_slots_and_what_they_hold(shop: Shop, window: Window, database: Database) -> None:
    slot = f"s_{database.name}"
    put(shop, "shop", database.url, slot=slot)
    window.login(shop.token)
    page = window.open("sources/shop")
    page.get_by_text("No sink takes from it").wait_for()
    held = page.locator(".facts div", has_text="WAL held").locator("dd")
    assert held.inner_text() == NONE
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    database.execute(
        "CREATE TABLE big AS SELECT repeat(md5(i::text), 40) FROM generate_series(1, 4000) i"
    )
    row = page.get_by_role("row", name=slot)  # by itself
    row.wait_for()
    heads = row.locator("xpath=ancestor::table").locator("thead th").all_inner_texts()
    cells = dict(zip(heads, row.locator("th, td").all_inner_texts(), strict=True))
    assert "MiB" in cells["Not confirmed"]
    assert cells["Lag"] == NONE  # nothing has read from it yet
    assert "nothing reads it" in row.inner_text()
    assert "this source's" in row.inner_text()
    assert re.search(r"[\d.]+ MiB", row.inner_text())
    await_true(lambda: "MiB" in held.inner_text(), what="the page shows the WAL that is held")
    press(page, "Test the connection")
    page.get_by_text("it answers").wait_for()
    page.get_by_role("link", name="WAL held").click()  # also of the page that a form has led to
    page.locator("th[aria-sort=ascending]", has_text="WAL held").wait_for()
    page.get_by_role("searchbox").fill(slot.upper())
    page.locator(".paging", has_text="1 to 1 of 1 found").wait_for()
    page.goto(page.url)  # a link shows the same
    page.locator(".paging", has_text="1 to 1 of 1 found").wait_for()
    page.get_by_role("searchbox").fill("no such slot")
    page.locator(".paging", has_text="Nothing matches").wait_for()
    page.get_by_role("link", name="Delete").click()
    page.get_by_text(f"drops the slot {slot}").wait_for()
    page.get_by_label("To go on, type the name").fill("shop")
    press(page, "Delete shop")
    page.get_by_text("The source is deleted.").wait_for()
    assert shop.client.get("/v1/sources/shop").status_code == 404


def test_another_database_is_read_only_when_what_follows_was_seen(
    shop: Shop, window: Window, database: Database
) -> None:
    put(shop, "shop", "postgresql://app:hush@old.example/shop")
    window.login(shop.token)
    window.allow(422)
    page = window.open("sources/shop/edit")
    assert page.get_by_label("URL").input_value() == "postgresql://app:***@old.example/shop"
    page.get_by_label("Publication").fill("shop_changes")
    press(page, "Save")
    page.get_by_text("is started again").wait_for()
    page.get_by_label("Do it, with what follows").check()
    press(page, "Save")
    page.get_by_text("The connection is changed.").wait_for()
    rows = database.execute("SELECT spec FROM penstock.entities WHERE name = 'shop'")
    assert rows[0][0] == {
        "type": "postgres", "url": "postgresql://app:hush@old.example/shop",
        "publication": "shop_changes",
    }  # fmt: skip
    # Where something is lost, the name is asked for, and for what is lost anew where that is another.
    page = window.open("sources/shop/edit")
    new, name = "postgresql://app:fresh@new.example/shop", "To go on, type the name shop"

    def save(url: str, typed: str = "") -> None:
        page.get_by_label("URL").fill(url)
        if typed:
            page.get_by_label(name).fill(typed)
        press(page, "Save")

    save(new)
    lost = page.locator(".danger li")
    lost.get_by_text("the slot penstock_shop of old.example:5432/shop is dropped").wait_for()
    assert "fresh" not in page.content()
    page.set_viewport_size({"width": NARROW[0], "height": NARROW[1]})
    window.check_fits()
    window.check_accessible()
    save(new, "source")
    page.get_by_text("This is not shop.").wait_for()
    save(new.replace("new.", "other."), "shop")
    lost.get_by_text("reads other.example:5432/shop").wait_for()
    assert page.get_by_label(name).input_value() == ""
    url = database.execute("SELECT spec ->> 'url' FROM penstock.entities WHERE name = 'shop'")
    assert url == [("postgresql://app:hush@old.example/shop",)]
    save(new, "shop")
    lost.get_by_text("reads new.example:5432/shop").wait_for()
    save(new, "shop")
    page.get_by_text("The connection is changed.").wait_for()
    url = database.execute("SELECT spec ->> 'url' FROM penstock.entities WHERE name = 'shop'")
    assert url == [(new,)]


def test_a_viewer_sees_hostile_names_as_text_and_no_forms(
    shop: Shop, window: Window, database: Database
) -> None:
    name = XSS.replace('"', '""')[:63]
    database.execute(f'CREATE TABLE "{name}" ("{name}" int PRIMARY KEY)')
    put(shop, "shop", database.url)
    viewer = shop.store.tokens.create("viewer", "viewer")
    known(shop.api.as_bearer(viewer)).close()
    window.login(viewer)
    for path in ("sources", "sources/shop", "sources/shop/check", "sources/shop/tables",
                 "sources/shop/edit", "sources/shop/delete"):  # fmt: skip
        page = window.open(path)
        assert page.locator("main img").count() == 0, path
        assert page.title() != "owned"
        buttons = set(page.locator("main").get_by_role("button").all_inner_texts())
        assert buttons <= {"Search", "Check again", "Copy"}, path
    page = window.open("sources/shop/tables")
    page.get_by_text("onerror=").first.wait_for()
    window.check_looks()
