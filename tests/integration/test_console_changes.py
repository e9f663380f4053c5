"""The console's audit log, plans, applies and export, in a real browser over a real store."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Page
from tests.api_help import Shop, known
from tests.browser import Window

XSS = '"><img src=x onerror="document.title=1"><script>document.title="owned"</script>'
DOCUMENT = """\
sources:
  shop: {type: postgres, url: "postgresql://app:hush@db.invalid/shop", slot: shop}
sinks:
  clicks: {type: stream, source: shop}
consumers:
  mail: {stream: clicks}
"""
TARGET = {"type": "nats", "url": "nats://nats.invalid:4222"}


def log(shop: Shop) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = shop.client.get("/v1/audit").json()["data"]
    return found


def credentials(count: int) -> str:
    """Return a document of so many credentials, with what a browser could take for markup."""
    of = {
        f"live-{i:02}": {
            "provider": "stripe", "properties": {"api_key": "hush"}, "metadata": {"note": XSS},
        }
        for i in range(count)
    }  # fmt: skip
    return json.dumps({"credentials": of})


def planned(page: Page, document: str, *, prune: bool = False) -> None:
    page.get_by_label("Document", exact=True).fill(document)
    page.get_by_label("Delete what a document managed").set_checked(prune)
    page.get_by_role("button", name="Plan", exact=True).click()


def test_a_pasted_document_is_planned_and_that_plan_applied(shop: Shop, window: Window) -> None:
    window.login(shop.token)
    page = window.open("changes")
    page.get_by_text("Nothing has changed yet").wait_for()
    planned(page, DOCUMENT)
    plan = page.locator("#plan pre")
    plan.get_by_text("Plan: 3 to create.").wait_for()
    text = plan.inner_text()
    assert "+ source shop\n    type: postgres" in text
    assert "+ consumer mail\n    stream: clicks" in text
    window.check_accessible()
    assert log(shop) == []
    sent = [page.content()]
    page.get_by_role("button", name="Apply this plan").click()
    page.get_by_text("Applied: the desired state has version 1.").wait_for()
    sent.append(page.content())
    assert not [each for each in sent if "hush" in each]  # it is in the browser's form alone
    assert {(e["kind"], e["name"], e["who"], e["door"]) for e in log(shop)} == {
        ("source", "shop", "admin", "file"), ("sink", "clicks", "admin", "file"),
        ("consumer", "mail", "admin", "file"),
    }  # fmt: skip
    planned(page, DOCUMENT)
    page.get_by_text("Nothing to do: the file and the desired state agree.").wait_for()
    assert page.get_by_role("button", name="Apply this plan").count() == 0


def test_actions_stand_in_the_log_beside_changes(shop: Shop, window: Window) -> None:
    shop.consumer("mail")
    new = {"name": "w", "role": "worker", "consumers": ["mail"]}
    assert shop.client.post("/v1/tokens", json=new).status_code == 201
    assert shop.client.post("/v1/http-consumers/mail/pause").status_code == 200
    window.login(shop.token)
    page = window.open("changes")
    rows = page.locator("tbody tr")
    cells = [[cell.strip() for cell in row.split("\t")] for row in rows.all_inner_texts()]
    assert [row[1:4] for row in cells] == [
        ["admin", "api", "pause consumer mail"],
        ["admin", "api", "create token w"],
        ["admin", "api", "create consumer mail"],
    ]
    rows.nth(1).locator("summary").click()
    rows.nth(1).get_by_text('consumers: ["mail"]').wait_for()
    window.check_accessible()


def test_a_plan_is_refused_where_the_state_or_the_document_moved(
    shop: Shop, window: Window
) -> None:
    window.login(shop.token)
    window.allow(409, 412)
    page = window.open("changes")
    planned(page, DOCUMENT)
    page.get_by_text("Plan: 3 to create.").wait_for()
    assert shop.client.put("/v1/targets/other", json=TARGET).status_code == 201
    page.get_by_role("button", name="Apply this plan").click()
    page.get_by_text("The desired state has moved since the plan").wait_for()
    planned(page, DOCUMENT)
    page.get_by_text("Plan: 3 to create.").wait_for()
    page.get_by_label("Document", exact=True).fill(DOCUMENT.replace("mail", "post"))
    page.get_by_role("button", name="Apply this plan").click()
    page.get_by_text("another than the one that was planned").wait_for()
    assert [each["name"] for each in log(shop)] == ["other"]


def test_what_is_lost_asks_for_a_name(shop: Shop, window: Window) -> None:
    assert shop.client.post("/v1/apply", content=DOCUMENT).status_code == 200
    window.login(shop.token)
    page = window.open("changes")
    fewer = DOCUMENT.partition("consumers:")[0]
    planned(page, fewer)
    page.get_by_text("1 kept that --prune would delete").wait_for()
    assert page.get_by_role("button", name="Apply this plan").count() == 0
    planned(page, fewer, prune=True)
    page.get_by_text("Plan: 1 to delete.").wait_for()
    assert "consumer mail is deleted" in page.locator(".danger ul").inner_text()
    page.get_by_label("type the name mail").fill("1")
    window.allow(422)
    page.get_by_role("button", name="Apply this plan").click()
    page.get_by_text("This is not mail.").wait_for()
    assert shop.client.get("/v1/consumers/mail").status_code == 200
    page.get_by_label("type the name mail").fill("mail")
    page.get_by_role("button", name="Apply this plan").click()
    page.get_by_text("Applied: the desired state has version 2.").wait_for()
    assert shop.client.get("/v1/consumers/mail").status_code == 404
    # An update that loses something, too.
    page = window.open("changes")
    planned(page, fewer.replace("source: shop}", "source: shop, retention: 1h}"))
    page.locator(".danger li", has_text="sink clicks: the stream clicks drops what is").wait_for()
    page.get_by_label("type the name clicks").fill("clicks")
    page.get_by_role("button", name="Apply this plan").click()
    page.get_by_text("Applied: the desired state has version 3.").wait_for()


def test_a_wrong_document_is_refused_by_line_and_as_text(shop: Shop, window: Window) -> None:
    window.login(shop.token)
    window.allow(422)
    page = window.open("changes")
    planned(page, DOCUMENT.replace("slot: shop", "slott: shop"))
    problem = page.locator("#plan .problem")
    problem.get_by_text("did you mean slot?").wait_for()
    assert "line 2" in problem.inner_text() or ":2" in problem.inner_text()
    planned(page, f"sinks: {{'{XSS}': {{type: stream, source: shop}}}}")
    problem.get_by_text("onerror=").wait_for()
    planned(page, credentials(1))
    page.locator("#plan pre", has_text="onerror=").wait_for()
    assert page.title() == "Changes · Penstock"
    assert page.locator("main img").count() == 0


def test_the_log_is_searched_sorted_and_paged_in_the_url(shop: Shop, window: Window) -> None:
    assert shop.client.post("/v1/apply", content=credentials(60)).status_code == 200
    plain = {"metadata": {"note": f"plain {XSS}"}, "properties": {"api_key": "sk_other"}}
    assert shop.client.patch("/v1/credentials/live-07", json=plain).status_code == 200
    assert shop.client.delete("/v1/credentials/live-07").status_code == 200
    window.login(shop.token)
    page = window.open("changes")
    assert page.locator("#list tbody tr").count() == 50
    when = page.get_by_role("columnheader", name="When, UTC")
    assert when.get_attribute("aria-sort") == "descending"
    what = page.locator("#list tbody td:nth-child(4) b")
    newest = what.all_inner_texts()
    page.get_by_role("link", name="Next page").click()
    page.locator(".paging", has_text="12 on this page").wait_for()
    newest += what.all_inner_texts()
    page.get_by_role("link", name="First page").click()
    when.get_by_role("link").click()
    page.locator("th[aria-sort=ascending]").wait_for()
    oldest = what.all_inner_texts()
    assert sorted(oldest) == [f"live-{n:02}" for n in range(50)]
    page.get_by_role("link", name="Next page").click()
    page.locator(".paging", has_text="12 on this page").wait_for()
    same, rest = page.url, what.all_inner_texts()
    assert oldest + rest == newest[::-1]
    assert rest[-2:] == ["live-07"] * 2
    page.get_by_label("Search the log").fill("Credential LIVE-07")
    page.locator(".paging", has_text="3 in all").wait_for()
    assert "q=Credential+LIVE-07" in page.url
    page.locator("summary", has_text="update").click()
    page.locator("details[open] pre").wait_for()
    text = page.locator("details[open] pre").inner_text()
    assert f"metadata.note: {XSS} → plain {XSS}" in text
    page.locator("summary", has_text="delete").click()
    page.get_by_text("As it was:").wait_for()
    window.check_looks()
    page.goto(same)
    assert what.all_inner_texts() == rest
    assert page.title() == "Changes · Penstock"
    assert page.locator("main img").count() == 0
    page.get_by_label("Search the log").fill("nothing like it")
    page.locator(".paging", has_text="Nothing matches").wait_for()


def test_the_export_is_a_download_without_secrets(shop: Shop, window: Window) -> None:
    assert shop.client.post("/v1/apply", content=DOCUMENT).status_code == 200
    window.login(shop.token)
    page = window.open("changes")
    with page.expect_download() as begun:
        page.get_by_role("link", name="Export as penstock.yaml").click()
    assert begun.value.suggested_filename == "penstock.yaml"
    text = begun.value.path().read_text()
    assert "${SOURCE_SHOP_URL}" in text
    assert "hush" not in text
    planned(page, text)
    page.get_by_text("Nothing to do: the file and the desired state agree.").wait_for()


def test_a_viewer_plans_and_applies_nothing(shop: Shop, window: Window) -> None:
    viewer = shop.store.tokens.create("viewer", "viewer")
    known(shop.api.as_bearer(viewer)).close()
    window.login(viewer)
    page = window.open("changes")
    planned(page, DOCUMENT)
    page.get_by_text("To apply it needs an admin's token.").wait_for()
    assert page.get_by_role("button", name="Apply this plan").count() == 0
