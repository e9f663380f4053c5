"""A newcomer's way through the console of a run, from an empty configuration to a lag of zero."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from penstock.embedded.handles import Database

from ..browser import Window
from ..cli import run
from ..loopback_api import Answer, Asked, LoopbackApi
from ..pipeline import Penstock

_MS = 60_000


class Endpoint:
    """Takes the messages of a webhook once it is `mended`."""

    def __init__(self) -> None:
        self.mended = False
        self.taken: list[int] = []

    def answer(self, asked: Asked) -> Answer:
        if not self.mended:
            return Answer({"error": "no such mailbox"}, 500)
        self.taken.append(asked.json["record"]["id"])
        return Answer({})


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint()


@pytest.fixture
def hook(endpoint: Endpoint) -> Iterator[str]:
    with LoopbackApi(endpoint.answer) as server:
        yield f"{server.url}/mail"


def test_from_a_database_to_a_lag_of_zero(
    tmp_path: Path, database: Database, chromium_browser: Browser, endpoint: Endpoint, hook: str
) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, total numeric)")
    database.execute("CREATE TABLE drafts (id int PRIMARY KEY)")
    (tmp_path / "penstock.yaml").write_text("# Everything is made in the console.\n")
    with ExitStack() as stack:
        pipeline = stack.enter_context(Penstock(tmp_path)).start()
        pipeline.wait_for(lambda: pipeline.get("/healthz")[0] == 200, _MS / 1000, "serving")
        token = run(tmp_path, "token create ops --role admin").split()[-1]
        context = chromium_browser.new_context(viewport={"width": 1280, "height": 900})
        stack.callback(context.close)
        window = Window(context, pipeline.listen)
        # Log in, connect the database, and pick a table.
        window.page.set_default_timeout(_MS)
        page = window.open("login")
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("link", name="Sources", exact=True).click()
        page.get_by_label("Name", exact=True).fill("shop")
        page.get_by_label("URL").fill(database.url)
        page.get_by_role("button", name="Connect", exact=True).click()
        page.get_by_role("link", name="Go on: pick tables").click()
        page.get_by_label("All of public.*").uncheck()
        page.get_by_label("Capture public.orders").check()
        page.get_by_role("button", name="Capture these tables").click()
        page.get_by_label("To go on, type the name shop").fill("shop")
        page.get_by_role("button", name="Do it").click()
        page.get_by_text("The tables are changed.").wait_for()

        # A stream of what costs much, by the filter's builder; and its webhook.
        page.get_by_role("link", name="Sinks", exact=True).click()
        page.get_by_role("link", name="New sink").first.click()
        page.get_by_label("1. Source").select_option("shop")
        page.get_by_label("2. Where to").select_option("webhook")
        page.get_by_role("button", name="Next").click()
        page.get_by_label("Name", exact=True).fill("large")
        page.get_by_label("public.orders").check()
        page.locator("#columns-filter option").nth(1).wait_for(state="attached")
        page.get_by_label("Column").fill("total")
        page.get_by_label("Operator").select_option(">")
        page.get_by_label("Value").fill("100")
        page.get_by_role("button", name="Add with and").click()
        page.get_by_role("button", name="Make the sink").click()
        page.get_by_label("Name", exact=True).fill("mail")
        page.get_by_label("URL", exact=False).first.fill(hook)
        page.get_by_label("may be a private one").check()
        page.get_by_text("Limits").click()
        page.get_by_label("Deliveries until it is a dead letter").fill("1")
        page.get_by_role("button", name="Make the consumer").click()
        page.get_by_text("The consumer is made.").wait_for()
        page.locator("#state .facts").wait_for()  # its page waits until a run serves it
        pipeline.wait_ready()

        # Its messages, as they come.
        window.open("streams/large?tail=1")
        page.get_by_text("No message yet").wait_for()
        database.execute("INSERT INTO drafts VALUES (9)")
        database.execute("INSERT INTO orders VALUES (1, 99.50), (2, 100.50), (3, 200.10)")
        for id_ in ("2", "3"):
            page.get_by_role("cell", name=id_, exact=True).wait_for()
        assert page.locator("#list tbody tr td:nth-of-type(4)").all_inner_texts() in (
            ["2", "3"], ["3", "2"],
        )  # fmt: skip
        assert "200.10" in page.locator("#list").inner_text()

        # What the endpoint refuses is found, and delivered once that is mended.
        window.open("dead-letters")
        link = page.get_by_role("link", name=re.compile("max_deliver of mail"))
        expect(page.get_by_role("row").filter(has=link)).to_contain_text(
            re.compile(r"\b2\b"), timeout=_MS
        )
        link.click()
        page.locator("#list tbody th a").first.click()
        expect(page.locator("main")).to_contain_text("500", timeout=_MS)
        assert "total" in page.locator("pre.whole").inner_text()
        endpoint.mended = True
        window.open("dead-letters/list?consumer=mail&code=max_deliver")
        page.get_by_role("link", name="Replay 2…").click()
        page.get_by_role("button", name="Replay 2").click()
        page.locator("#rounds", has_text="Done: 2 of 2 replayed.").wait_for()
        window.open("consumers/mail")
        facts = page.locator("#state .facts")
        for name in ("Lag", "Dead letters", "In flight"):
            fact = facts.locator("div", has=page.locator(f'dt:text-is("{name}")'))
            expect(fact.locator("dd")).to_have_text("0", timeout=_MS)
        assert sorted(endpoint.taken) == [2, 3]
        page.get_by_role("link", name="Overview").click()
        page.get_by_role("row", name=re.compile("^shop ready postgres 3 0 ")).wait_for()
        expect(page.locator(".trouble")).to_have_text([], timeout=_MS)
        large = page.get_by_role("region", name="Sinks").get_by_role("row", name="large")
        expect(large).to_contain_text("0.0 s", timeout=_MS)
        source = pipeline.status()["sources"]["shop"]
        assert source["deliveries"] >= 1
        assert 0 < source["delivery_seconds"] / source["deliveries"] < 60  # the chart's latency

        # What its sink has delivered; then the rows that there are already, once more.
        page.get_by_role("link", name="Sinks", exact=True).click()
        delivered_filtered = re.compile("^large ready stream shop .* 2 1 0 0$")
        page.get_by_role("row", name=delivered_filtered).wait_for()
        page.get_by_role("link", name="large", exact=True).click()
        expect(page.locator("#state .facts")).to_contain_text("Delivered2")
        page.get_by_role("link", name="Backfills", exact=True).click()
        page.get_by_label("Sink").select_option("large")
        page.get_by_label("Table").fill("public.orders")
        page.get_by_role("button", name="Start the backfill").click()
        backfill = page.get_by_role("row", name="public.orders")
        expect(backfill.locator(".badge")).to_have_text("done", timeout=_MS)
        expect(backfill.locator(".far")).to_have_text(re.compile(r"^\s*3( of 3)?\s*$"))
        pipeline.wait_for(lambda: len(endpoint.taken) == 4, _MS / 1000, "the rows are delivered")
        assert sorted(endpoint.taken) == [2, 2, 3, 3]
        assert pipeline.stop() == 0
        window.check_clean()
