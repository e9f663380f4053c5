"""The console's forms of sinks and consumers in a real browser, and the trial on real messages."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from tests.api_help import Shop, problem
from tests.browser import NARROW, Window
from tests.streams_help import Change, deleted, inserted, publish
from tests.waits import await_end, await_true

from penstock.cli.api_tools import ApiTools
from penstock.embedded.handles import Database
from penstock.expressions import ColumnType

XSS = '<script>document.title="owned"</script>"><img src=x onerror="document.title=\'owned\'">'
TABLE = 'CREATE TABLE orders (id int PRIMARY KEY, note text, total numeric, "Paid At" date)'
LUA = """function transform(message)
  if message.record.note == 'skip' then return nil end
  message.record.note = string.upper(message.record.note)
  return message
end"""


@pytest.fixture
def shop(database: Database) -> Iterator[Shop]:
    database.execute(TABLE)
    database.execute("CREATE PUBLICATION shop FOR TABLE orders")
    with Shop(database.url, ApiTools()) as shop:
        source = {"type": "postgres", "url": database.url, "slot": "shop", "publication": "shop",
                  "tables": ["public.orders"]}  # fmt: skip
        shop.client.put("/v1/sources/shop", json=source).raise_for_status()
        sink = {"type": "stream", "source": "shop"}
        shop.client.put("/v1/sinks/events", json=sink).raise_for_status()
        yield shop


def messages(*notes: str) -> str:
    return "\n".join(
        orjson.dumps({"record": {"id": i, "note": note}}).decode() for i, note in enumerate(notes)
    )


def test_a_sink_is_made_step_by_step_and_changed(shop: Shop, window: Window) -> None:
    window.login(shop.token)
    page = window.open("sinks/form/new")
    page.get_by_label("1. Source").select_option("shop")
    page.get_by_label("2. Where to").select_option("webhook")
    page.get_by_role("button", name="Next").click()
    page.get_by_label("Name", exact=True).fill("paid")
    page.get_by_label("public.orders").check()
    page.get_by_label("delete", exact=True).uncheck()
    await_true(
        lambda: page.locator("#columns-filter option").count() == 4,
        what="the form offers the table's four columns, from Postgres",
    )
    for column, operator, value, word in (
        ("total", ">", "100", "and"), ("note", "<>", "it's", "or"), ("Paid At", "is null", "", "and")
    ):  # fmt: skip
        page.get_by_label("Column").fill(column)
        page.get_by_label("Operator").select_option(operator)
        page.get_by_label("Value").fill(value)
        page.get_by_role("button", name=f"Add with {word}").click()
    written = "(record.total > 100 or record.note <> 'it''s') and record.\"Paid At\" is null"
    assert page.get_by_label("Filter").input_value() == written
    window.check_looks()
    page.get_by_role("button", name="Review").click()
    page.get_by_role("heading", name="What it would do").wait_for()
    assert shop.client.get("/v1/sinks/paid").status_code == 404
    page.get_by_role("button", name="Make the sink").click()
    page.wait_for_url("**/consumers/form/new?stream=paid&type=webhook")
    spec = shop.client.get("/v1/sinks/paid").json()["spec"]
    assert spec == {"type": "stream", "source": "shop", "tables": ["public.orders"],
                    "actions": ["insert", "update"], "filter": written}  # fmt: skip
    page = window.open("sinks/paid/edit")
    page.get_by_label("Filter").fill("record.total >")
    window.allow(422, 409)
    page.get_by_role("button", name="Save").click()
    assert page.locator("#filter-error").inner_text()
    assert page.get_by_label("public.orders").is_checked()
    page.get_by_label("Filter").fill("record.total > 5")
    page.get_by_label("delete", exact=True).check()
    page.get_by_role("button", name="Save").click()
    page.get_by_text("The sink is changed").wait_for()
    spec = shop.client.get("/v1/sinks/paid").json()["spec"]
    assert (spec["filter"], "actions" in spec) == ("record.total > 5", False)
    # What loses something is saved by the sink's name alone.
    page = window.open("sinks/paid/edit")
    page.get_by_label("Kept for").fill("1d")
    page.get_by_label("delete", exact=True).uncheck()
    page.get_by_role("button", name="Save").click()
    lost = page.locator(".danger li")
    assert lost.all_inner_texts() == [
        "deletes no longer go to sink paid", "the stream paid drops what is older than 1d"
    ]  # fmt: skip
    page.set_viewport_size({"width": NARROW[0], "height": NARROW[1]})
    window.check_fits()
    window.check_accessible()
    page.get_by_label("To go on, type the name paid").fill("events")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("This is not paid.").wait_for()
    assert shop.client.get("/v1/sinks/paid").json()["spec"] == spec
    # Typed for another change, it does not count.
    page.get_by_label("To go on, type the name paid").fill("paid")
    page.get_by_label("delete", exact=True).check()
    page.get_by_role("button", name="Save").click()
    assert lost.all_inner_texts() == ["the stream paid drops what is older than 1d"]
    assert shop.client.get("/v1/sinks/paid").json()["spec"] == spec
    page.get_by_label("To go on, type the name paid").fill("paid")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("The sink is changed").wait_for()
    assert shop.client.get("/v1/sinks/paid").json()["spec"] == {**spec, "retention": "1d"}


def test_sinks_of_rows_and_to_nats_are_made(shop: Shop, window: Window) -> None:
    target = {"type": "nats", "url": "nats://nats.invalid:4222"}
    shop.client.put("/v1/targets/hub", json=target).raise_for_status()
    window.login(shop.token)
    shared = {"source": "shop", "tables": ["public.orders"]}
    for name, to, expected in (
        ("newest", "stream", {"type": "stream", "kind": "rows", "deletes": True,
                              "initial_backfill": True}),
        ("copy", "nats", {"type": "nats", "url": "nats://here.invalid:4222",
                          "subject": "shop.{table}", "create_stream": True}),
        ("hubbed", "nats", {"type": "nats", "target": "hub"}),
    ):  # fmt: skip
        page = window.open(f"sinks/form/new?source=shop&to={to}&table=public.orders")
        page.get_by_label("Name", exact=True).fill(name)
        if "kind" in expected:
            page.get_by_label("Messages", exact=True).first.select_option("rows")
            page.get_by_label("Send deletes too").check()
            page.get_by_label("Begin with the rows that the tables have").check()
        elif "url" in expected:
            page.get_by_label("URL of the servers").fill(str(expected["url"]))
            page.get_by_role("textbox", name="Subject").fill(str(expected["subject"]))
            page.get_by_label("Make the JetStream stream").check()
        else:
            page.get_by_label("Target").select_option("hub")
        page.get_by_role("button", name="Make the sink").click()
        page.get_by_text("The sink is made").wait_for()
        assert shop.client.get(f"/v1/sinks/{name}").json()["spec"] == shared | expected
        # Its form has all of it again, and saves it as it was.
        page = window.open(f"sinks/{name}/edit")
        page.get_by_role("button", name="Save").click()
        page.get_by_text("The sink is changed").wait_for()
        assert shop.client.get(f"/v1/sinks/{name}").json()["spec"] == shared | expected


def test_what_another_changed_is_not_overwritten(shop: Shop, window: Window) -> None:
    window.login(shop.token)
    page = window.open("sinks/events/edit")
    shop.client.patch("/v1/sinks/events", json={"retention": "3d"}).raise_for_status()
    page.get_by_label("Kept for").fill("9d")
    window.allow(422)
    page.get_by_role("button", name="Save").click()
    page.get_by_text("Somebody else has changed it").wait_for()
    assert shop.client.get("/v1/sinks/events").json()["spec"]["retention"] == "3d"


def test_a_consumer_is_made_and_changed_and_its_secrets_stay(shop: Shop, window: Window) -> None:
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    window.login(shop.token)
    page = window.open("consumers/form/new?stream=events")
    page.get_by_label("2. Where to").select_option("webhook")
    page.get_by_role("button", name="Next").click()
    page.get_by_label("Name", exact=True).fill("hook")
    page.get_by_label("URL", exact=False).first.fill("ftp://example.com")
    page.get_by_label("Secret that signs them").fill(secret)
    page.get_by_label("Where it begins").fill("new")
    page.get_by_label("insert").check()
    window.allow(422)
    page.get_by_role("button", name="Make the consumer").click()
    assert "webhook" in page.locator("#url-error").inner_text()
    page.get_by_label("URL", exact=False).first.fill("https://user:pw@example.com/in")
    page.get_by_label("Secret that signs them").fill(secret)
    window.check_accessible()
    page.get_by_role("button", name="Make the consumer").click()
    page.get_by_text("The consumer is made.").wait_for()
    assert secret not in page.content()
    assert "pw@" not in page.content()
    page = window.open("consumers/hook/edit")
    assert "pw@" not in page.content()
    page.get_by_label("Tables").fill("public.orders")
    page.get_by_text("Limits").click()
    page.get_by_label("Most in flight").fill("7")
    page.get_by_label("may be a private one").check()
    page.get_by_role("button", name="Save").click()
    page.get_by_text("The consumer is changed.").wait_for()
    with shop.store.connection() as connection:
        ((stored,),) = connection.execute(
            "SELECT spec FROM penstock.entities WHERE kind = 'consumer' AND name = 'hook'"
        ).fetchall()
    assert stored == {
        "type": "webhook", "stream": "events", "url": "https://user:pw@example.com/in",
        "secrets": [secret], "deliver_policy": "new", "max_ack_pending": 7, "allow_private": True,
        "filters": {"table": ["public.orders"], "action": ["insert"]},
    }  # fmt: skip


def test_a_consumer_begins_where_its_form_has_it(shop: Shop, window: Window) -> None:
    # Syncs have a stream `events` of their own.
    shop.client.delete("/v1/sinks/events").raise_for_status()
    shop.client.put(
        "/v1/sinks/clicks", json={"type": "stream", "source": "shop"}
    ).raise_for_status()
    live = {"provider": "stripe", "properties": {"api_key": "hush"}}
    shop.client.put("/v1/credentials/live", json=live).raise_for_status()
    sync = {"provider": "stripe", "collections": ["customers", "invoices"], "credential": "live"}
    shop.client.put("/v1/syncs/billing", json=sync).raise_for_status()
    target = {"type": "nats", "url": "nats://nats.invalid:4222"}
    shop.client.put("/v1/targets/hub", json=target).raise_for_status()
    window.login(shop.token)
    window.allow(422)
    url = "nats://here.invalid:4222"
    nats = {"type": "nats", "stream": "clicks"}
    for name, stream, start, expected in (
        ("bills", "records", "1h", {"type": "pull", "stream": "records", "deliver_policy": "1h",
                                    "deletes": True,
                                    "filters": {"collection_id": ["stripe:invoices"]}}),
        ("copy", "clicks", "0/16C5E80", nats | {"url": url, "subject": "shop.{table}",
                                                "create_stream": True, "start_at": "0/16C5E80"}),
        ("later", "clicks", "2026-01-31T12:00:00Z", nats | {"target": "hub",
                                                            "start_at": "2026-01-31T12:00:00Z"}),
    ):  # fmt: skip
        page = window.open(f"consumers/form/new?stream={stream}")
        page.get_by_label("2. Where to").select_option(str(expected["type"]))
        page.get_by_role("button", name="Next").click()
        page.get_by_label("Name", exact=True).fill(name)
        if "filters" in expected:
            page.get_by_label("stripe:invoices (billing)").check()
            page.get_by_label("Hand out deletes too").check()
        elif "url" in expected:
            page.get_by_label("URL of the servers").fill(url)
            page.get_by_role("textbox", name="Subject").fill(str(expected["subject"]))
            page.get_by_label("Make the JetStream stream").check()
        else:
            page.get_by_label("Target").select_option("hub")
        page.get_by_label("Where it begins").fill("yesterday")
        page.get_by_role("button", name="Make the consumer").click()
        page.locator("#start-error", has_text="'yesterday' is no place").wait_for()
        page.get_by_label("Where it begins").fill(start)
        page.get_by_role("button", name="Make the consumer").click()
        page.get_by_text("The consumer is made.").wait_for()
        assert shop.client.get(f"/v1/consumers/{name}").json()["spec"] == expected
    page = window.open("consumers/bills/edit")
    assert page.get_by_label("stripe:invoices (billing)").is_checked()
    assert not page.get_by_label("stripe:customers (billing)").is_checked()


def test_a_transform_is_tried_as_it_is_typed(shop: Shop, window: Window) -> None:
    shop.publish("a", XSS)
    window.login(shop.token)
    page = window.open("sinks/form/new?source=shop&to=stream")
    page.get_by_role("button", name="Take them").click()  # of the stream
    trial = page.locator("#trial")
    trial.locator(".outcome").nth(1).wait_for()
    assert "onerror" in trial.inner_text()
    assert "insert of public.items" in trial.inner_text()
    page.get_by_label("One a line, as JSON").fill(messages("keep", "skip", XSS))
    page.get_by_label("public.orders").check()
    page.get_by_label("Transform").select_option("lua")
    page.get_by_label("Its code").fill(LUA)
    # A text alone is found in any case: in what was tried before the code was there, too.
    trial.get_by_text(re.compile("KEEP")).wait_for()
    assert [each.inner_text() for each in trial.locator(".badge").all()] == [
        "sent", "dropped", "sent"
    ]  # fmt: skip
    page.get_by_label("Its code").fill("function transform(message")
    trial.locator(".problem").wait_for()
    assert trial.locator(".outcome").count() == 0
    assert page.title() == "New sink of shop · Penstock"
    assert page.locator("main img").count() == 0
    window.check_accessible()
    assert shop.client.get("/v1/sinks").json()["data"][0]["name"] == "events"


def test_the_tables_of_the_form_are_those_whose_messages_are_taken(
    shop: Shop, window: Window
) -> None:
    old = [Change({"id": n, "note": "mine"}, table="orders") for n in range(2)]
    publish(shop.store, shop.stream, [*old, *(inserted(n, note="other") for n in range(9))])
    window.login(shop.token)
    page = window.open("sinks/form/new?source=shop&to=stream&table=public.orders")
    assert page.get_by_label("public.orders").is_checked()
    page.get_by_role("button", name="Take them").click()
    page.locator("#trial .outcome").nth(1).wait_for()
    given = page.get_by_label("One a line, as JSON")
    taken = [orjson.loads(line) for line in given.input_value().splitlines()]
    assert [(each["metadata"]["table_name"], each["record"]["id"]) for each in taken] == [
        ("orders", 0), ("orders", 1)
    ]  # fmt: skip
    page.get_by_label("public.orders").uncheck()
    page.get_by_role("button", name="Take them").click()
    page.locator("#trial .outcome").nth(4).wait_for()
    assert given.input_value().count('"other"') == 5  # the newest
    page.get_by_label("Others, or patterns").fill("public.gone")
    page.get_by_role("button", name="Take them").click()
    page.locator("#taken", has_text="has no message of public.gone").wait_for()


def test_a_consumers_filter_is_tried_as_it_is_typed(shop: Shop, window: Window) -> None:
    types = {"id": ColumnType("pg_catalog", "int8"), "note": ColumnType("pg_catalog", "text")}
    shop.store.save_catalog("shop", {("public", "items"): types, ("public", "orders"): types})
    rows = [inserted(1, note="keep"), inserted(2, note=XSS), deleted(3)]
    publish(shop.store, shop.stream, [*rows, Change({"id": 4, "note": "keep"}, table="orders")])
    window.login(shop.token)
    page = window.open("consumers/form/new?stream=events&type=pull")
    page.get_by_label("Tables").fill("public.items")
    page.get_by_role("button", name="Take them").click()
    trial = page.locator("#trial")
    trial.locator(".outcome").nth(2).wait_for()
    assert trial.locator(".outcome").count() == 3  # none of orders
    assert "onerror" in trial.inner_text()
    page.get_by_label("Filter").fill("record.note = 'keep'")
    trial.get_by_text("can't be evaluated").wait_for()  # the delete has its key alone
    assert [each.inner_text() for each in trial.locator(".badge").all()] == [
        "sent", "dropped", "failed"
    ]  # fmt: skip
    page.get_by_label("insert").check()
    trial.get_by_text("don't name its table, collection or action").wait_for()
    page.get_by_label("Filter").fill("record.nothing = 1")
    trial.locator(".problem", has_text="nothing").wait_for()
    assert trial.locator(".outcome").count() == 0
    assert page.title() == "New pull consumer of events · Penstock"
    window.check_looks()
    assert shop.client.get("/v1/http-consumers").json()["data"][0]["name"] == "events"
    page = window.open("consumers/form/new?stream=events&type=nats")
    page.get_by_label("One a line, as JSON").fill(messages("keep"))
    trial.get_by_text("sent").wait_for()


def test_the_next_changes_are_taken_from_the_source(
    shop: Shop, window: Window, database: Database
) -> None:
    window.login(shop.token)
    page = window.open("sinks/form/new?source=shop&to=stream")
    page.locator("#f-from").select_option("")
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.wait(0.3):
            number += 1
            database.execute("INSERT INTO orders VALUES (%s, 'fresh')", [number])

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        page.get_by_role("button", name="Take them").click()
        page.locator("#trial .outcome").nth(4).wait_for()
    finally:
        stop.set()
        await_end(writer)
    assert '"fresh"' in page.get_by_label("One a line, as JSON").input_value()
    slots = "SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE 'penstock_try%'"
    await_true(lambda: database.execute(slots) == [(0,)], what="the slot of the trial is dropped")


def test_expressions_are_tried_by_spark(shop: Shop, window: Window) -> None:
    def tried(sink: dict[str, Any], *notes: str) -> Any:
        body = {
            "sink": {"type": "stream", "source": "shop", "tables": ["public.orders"], **sink},
            "messages": [{"record": {"id": i, "note": n}} for i, n in enumerate(notes)],
        }
        return shop.client.post("/v1/try-sink", json=body, timeout=300)

    answer = tried(
        {"filter": "record.note <> 'b'", "transform": {"sql": "record.id, upper(record.note) as n"}},
        "a", "b",
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    sent, dropped = answer.json()["data"]
    assert (sent["result"], sent["out"][0]["message"]["record"]) == ("sent", {"id": 0, "n": "A"})
    assert (dropped["result"], dropped["why"]) == ("dropped", "by the filter")
    window.login(shop.token)
    page = window.open("sinks/form/new?source=shop&to=stream&table=public.orders")
    page.get_by_label("Filter").fill("record.note <> 'b'")
    page.get_by_label("Transform").select_option("sql")
    page.get_by_label("Its code").fill("record.id, upper(record.note) as n")
    page.get_by_label("One a line, as JSON").fill(messages("keep", "b"))
    trial = page.locator("#trial")
    trial.get_by_text('"n": "KEEP"').wait_for()
    assert trial.locator(".badge").all_inner_texts() == ["sent", "dropped"]
    page.get_by_label("Its code").fill("record.id, uper(record.note) as n")
    trial.locator(".problem", has_text="uper").wait_for()
    problem(tried({"filter": "record.nothing = 1"}, "a"), 422, "filter")
    problem(tried({"filter": "record.note ="}, "a"), 422, "filter")
    problem(tried({"transform": {"lua": "x"}}, "a"), 422, "transform")
    problem(tried({"source": "nothing"}, "a"), 422, "source")
