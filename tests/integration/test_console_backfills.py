"""The console's backfills in a real browser, over a real store and a real source."""

from __future__ import annotations

import pytest
from tests.api_help import Shop, known
from tests.browser import Window

from penstock.backfill.request import BackfillRequest as Asked
from penstock.backfill.request import Backfills
from penstock.embedded.handles import Database

XSS = '"><img src=x onerror="document.title=1"><script>document.title="owned"</script>'


@pytest.fixture
def backfills(shop: Shop) -> Backfills:
    return Backfills(shop.store)


@pytest.fixture
def sink(shop: Shop, database: Database) -> str:
    """A sink of a table of 10,000 rows."""
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, total int)")
    database.execute("INSERT INTO orders SELECT n, n FROM generate_series(1, 10000) AS n")
    database.execute("ANALYZE orders")
    source = {"type": "postgres", "url": database.url, "slot": "shop", "tables": ["public.orders"]}
    assert shop.client.put("/v1/sources/shop", json=source).status_code == 201
    answer = shop.client.put("/v1/sinks/clicks", json={"type": "stream", "source": "shop"})
    assert answer.status_code == 201, answer.text
    return "clicks"


def test_a_backfill_is_started_followed_and_stopped(
    shop: Shop, window: Window, sink: str, backfills: Backfills
) -> None:
    window.login(shop.token)
    page = window.open("backfills")
    page.get_by_text("There are no backfills").wait_for()
    window.check_accessible()
    page.get_by_label("Table").fill("public.orders")
    page.get_by_role("button", name="Start the backfill").click()
    page.get_by_text("Asked for: public.orders to clicks").wait_for()
    (made,) = backfills.find()
    assert (made.rows_total, made.state) == (10_000, "waiting")
    page.get_by_text("No run reads shop now").wait_for()
    page = window.open("backfills")  # and not its form again
    row = page.get_by_role("row", name="public.orders")
    assert backfills.claim("shop") is not None
    backfills.progress(made.id, ("2000",), 2_000)
    row.get_by_text("running").wait_for()
    row.get_by_text("2,000 of about 10,000").wait_for()
    backfills.progress(made.id, ("5000",), 5_000)
    row.get_by_text("5,000 of about 10,000").wait_for()
    bar = page.get_by_role("progressbar", name="public.orders, rows read")
    assert bar.get_attribute("value") == "0.5"
    rate, left = (
        float(t.split()[0].replace(",", "")) for t in row.locator(".figure").all_inner_texts()
    )
    assert rate > 0
    assert left == pytest.approx(5_000 / rate, rel=0.2)
    row.get_by_role("button", name="Pause").click()
    page.get_by_text("It is paused").wait_for()
    row.get_by_text("paused").wait_for()
    row.get_by_role("button", name="Resume").click()
    page.get_by_text("It goes on where it was.").wait_for()
    row.get_by_role("link", name="Cancel public.orders").click()
    page.get_by_text("after 5,000 of about 10,000 rows").wait_for()
    window.allow(422)
    page.get_by_label("type the name public.orders").fill("orders")
    page.get_by_role("button", name="Cancel the backfill of public.orders").click()
    page.get_by_text("This is not public.orders.").wait_for()
    page.get_by_label("type the name public.orders").fill("public.orders")
    page.get_by_role("button", name="Cancel the backfill of public.orders").click()
    page.get_by_text("It is cancelled.").wait_for()
    assert [each.state for each in backfills.find()] == ["cancelled"]


def test_what_the_source_refuses_stands_beside_the_field(
    shop: Shop, window: Window, sink: str, backfills: Backfills
) -> None:
    window.login(shop.token)
    window.allow(409, 422)
    page = window.open("backfills")
    page.get_by_label("Table").fill("public.orders")
    page.get_by_label("Only rows that fit").fill("nothing > 7")
    page.get_by_role("button", name="Start the backfill").click()
    page.locator("#new ~ form, form.card").get_by_text("nothing").first.wait_for()
    assert page.get_by_label("Only rows that fit").input_value() == "nothing > 7"
    assert backfills.find() == []
    window.check_accessible()
    page.get_by_label("Only rows that fit").fill("total > 7")
    page.get_by_role("button", name="Start the backfill").click()
    page.get_by_text("Asked for: public.orders").wait_for()
    assert [each.condition for each in backfills.find()] == ["total > 7"]
    page.get_by_label("Table").fill("public.orders")
    page.get_by_role("button", name="Start the backfill").click()
    page.get_by_text("already: it is waiting").wait_for()


def test_the_list_is_searched_and_hostile_names_are_text(
    shop: Shop, window: Window, backfills: Backfills
) -> None:
    tables = [*(f"t{i:02}" for i in range(60)), XSS]
    backfills.create([Asked("shop", "clicks", "public", name, rows_total=10) for name in tables])
    claimed = backfills.claim("shop")
    assert claimed is not None
    backfills.fail(claimed.id, f"It broke {XSS}.")
    window.login(shop.token)
    page = window.open("backfills?sort=table")
    page.get_by_text("onerror=").first.wait_for()
    assert page.locator("#list tbody tr").count() == 50
    page.get_by_label("Search backfills").fill("t0")
    page.locator(".paging", has_text="1 to 10 of 10 found").wait_for()
    assert "q=t0" in page.url
    failed = page.get_by_role("row", name="t00")
    assert "It broke" in failed.inner_text()
    failed.get_by_role("button", name="Resume").click()
    page.get_by_text("It goes on where it was.").wait_for()
    window.check_looks()
    assert page.title() == "Backfills · Penstock"
    assert page.locator("main img").count() == 0


def test_a_viewer_starts_and_stops_nothing(
    shop: Shop, window: Window, backfills: Backfills
) -> None:
    backfills.create([Asked("shop", "clicks", "public", "orders")])
    viewer = shop.store.tokens.create("viewer", "viewer")
    known(shop.api.as_bearer(viewer)).close()
    window.login(viewer)
    page = window.open("backfills")
    page.get_by_role("row", name="public.orders").wait_for()
    assert page.get_by_role("button").all_inner_texts() == ["Log out", "Search"]
    assert page.get_by_role("link", name="Cancel").count() == 0
