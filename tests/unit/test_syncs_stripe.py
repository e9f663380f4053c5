"""Stripe: against localstripe, and against a server that keeps events as Stripe does."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import format_datetime

import httpx
import pytest
from tests.localstripe import KEY, localstripe, proxied
from tests.loopback_api import Answer, Asked, LoopbackApi
from tests.sync_copy import Copy, made
from tests.waits import await_true

from penstock.syncs.connectors.contract import Json, Kind


@pytest.fixture
def stripe() -> Iterator[httpx.Client]:
    with localstripe() as client:
        yield client


@pytest.fixture
def proxy(stripe: httpx.Client) -> Iterator[LoopbackApi]:
    with proxied(stripe) as api:
        yield api


def test_stripe_with_localstripe(stripe: httpx.Client, proxy: LoopbackApi) -> None:
    connector = made("stripe", proxy.url, api_key=KEY)
    copy = Copy(connector, "customers")

    def create(name: str) -> str:
        answer = stripe.post("/v1/customers", data={"name": name})
        return str(answer.raise_for_status().json()["id"])

    first = [create(f"c{i}") for i in range(230)]
    copy.job(Kind.BACKFILL)
    assert set(copy.records) == set(first)
    stripe.post(f"/v1/customers/{first[0]}", data={"name": "new"}).raise_for_status()
    stripe.delete(f"/v1/customers/{first[1]}").raise_for_status()
    twice = create("made")
    stripe.post(f"/v1/customers/{twice}", data={"name": "changed at once"}).raise_for_status()
    last = create("last")
    # The clock of an API counts in seconds: what is of this one is read by the next poll.
    await_true(
        lambda: bool(copy.job(Kind.POLL)) and last in copy.records, what="the last record is copied"
    )
    assert copy.records[first[1]].deleted
    assert copy.alive()[first[0]]["name"] == "new"
    assert copy.alive()[twice]["name"] == "changed at once"
    there = {
        each["id"]
        for each in stripe.get("/v1/customers", params={"limit": 1000}).json()["data"]
        if not each.get("deleted")
    }
    assert copy.alive().keys() == there
    assert connector.access.auth is not None
    connector.check(copy.session)


class Stripe:
    """Lists newest first; events newest first, by type and time."""

    def __init__(self) -> None:
        self.customers: list[Json] = []
        self.events: list[Json] = []

    def event(self, kind: str, at: int, of: Json) -> None:
        self.events.insert(0, {
            "id": f"evt_{len(self.events)}", "type": kind, "created": at, "data": {"object": dict(of)},
        })  # fmt: skip

    def __call__(self, asked: Asked) -> Answer:
        rows = self.events if asked.path == "/v1/events" else self.customers
        if asked.path == "/v1/events":
            assert asked.query["type"] == "customer.*"
        after = asked.query.get("starting_after")
        if after is not None:
            at = next((i for i, each in enumerate(rows) if each["id"] == after), None)
            if at is None:
                return Answer({"error": {"message": f"No such customer: {after}"}}, status=400)
            rows = rows[at + 1 :]
        compare: dict[str, Callable[[int, int], bool]] = {
            "gte": operator.ge, "lt": operator.lt, "lte": operator.le,
        }  # fmt: skip
        for name, keeps in compare.items():
            if f"created[{name}]" in asked.query:
                limit = int(asked.query[f"created[{name}]"])
                rows = [each for each in rows if keeps(each["created"], limit)]
        return Answer({"object": "list", "data": rows[:100], "has_more": len(rows) > 100})


def test_stripe_events() -> None:
    stripe = Stripe()
    now = int(time.time())
    stripe.customers = [
        {"id": f"cus_{i}", "object": "customer", "created": now - 9000 - i // 3, "n": 0}
        for i in range(250)
    ]
    with LoopbackApi(stripe) as api:
        copy = Copy(made("stripe", api.url, api_key="k0"), "customers")
        copy.job(Kind.BACKFILL)
        assert len(copy.records) == 250
        # Three days later: a customer has changed twice, another is gone, and a subscription has ended.
        copy.cursor = {"value": now - 3 * 86_400}
        one, two = stripe.customers[7], stripe.customers[8]
        stripe.event("customer.updated", now - 200_000, {**one, "n": 1})
        # Of one second, in whichever order: what is deleted stays so.
        stripe.event("customer.deleted", now - 150_000, two)
        stripe.event("customer.updated", now - 150_000, two)
        stripe.event(
            "customer.subscription.deleted",
            now - 100_000,
            {"id": "cus_9", "object": "subscription"},
        )
        stripe.event("customer.updated", now - 500, {**one, "n": 2})
        stripe.event("customer.updated", now - 500, {**one, "n": 3})
        copy.job(Kind.POLL)
        assert copy.records["cus_8"].deleted
        assert copy.alive()["cus_7"]["n"] == 3
        assert copy.records["cus_7"].updated_at == datetime.fromtimestamp(now - 500, UTC)
        assert not copy.records["cus_9"].deleted
        assert now - 30 <= copy.cursor["value"] <= now + 30
        # Stripe has no events of 40 days ago: all are listed again.
        copy.cursor = {"value": now - 40 * 86_400}
        assert len(copy.job(Kind.POLL)) == 3


def test_stripe_goes_on_where_the_last_object_is_gone() -> None:
    stripe = Stripe()
    stripe.customers = [
        {"id": f"cus_{i}", "object": "customer", "created": 1_700_000_000 - i} for i in range(250)
    ]
    with LoopbackApi(stripe) as api:
        copy = Copy(made("stripe", api.url, api_key="k0"), "customers")
        (slice_,) = copy.connector.plan(copy.collection, None, Kind.BACKFILL, copy.session)
        pages = copy.connector.read(copy.collection, slice_, copy.session)
        found = {each.upstream_id for each in next(pages).records}
        del stripe.customers[99]
        found |= {each.upstream_id for page in pages for each in page.records}
    assert len(found) == 250


def test_stripe_sees_what_is_deleted_while_a_run_is_killed_at_the_first_page() -> None:
    stripe = Stripe()
    now = int(time.time())
    stripe.customers = [
        {"id": f"cus_{i}", "object": "customer", "created": now - 9000 - i} for i in range(150)
    ]
    with LoopbackApi(stripe) as api:
        copy = Copy(made("stripe", api.url, api_key="k0"), "customers")
        (slice_,) = copy.connector.plan(copy.collection, None, Kind.BACKFILL, copy.session)
        first = next(iter(copy.connector.read(copy.collection, slice_, copy.session)))
        copy.records |= {each.upstream_id: each for each in first.records}
        # The run is killed; a customer goes, and another run reads the slice an hour later.
        gone = stripe.customers.pop(3)
        stripe.event("customer.deleted", now + 5, gone)
        api.date = format_datetime(datetime.fromtimestamp(now + 3600, UTC), usegmt=True)
        for page in copy.connector.read(copy.collection, slice_, copy.session):
            copy.records |= {each.upstream_id: each for each in page.records}
            copy.cursor |= page.cursor or {}
        assert not copy.records["cus_3"].deleted
        copy.job(Kind.POLL)
        assert copy.records["cus_3"].deleted
        assert copy.alive().keys() == {each["id"] for each in stripe.customers}
