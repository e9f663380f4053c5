"""Records through `penstock run`: from the records table to workers over HTTP and to NATS.

The same run follows localstripe, which is empty at first: customers are made, changed and deleted there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

import httpx
import orjson
import pytest

from penstock.embedded.handles import Database, JetStream
from penstock.streams.store import Store
from penstock.syncs.connectors.contract import Record
from penstock.syncs.records.purge import purge
from penstock.syncs.records.writer import RecordWriter

from ..localstripe import KEY, localstripe, proxied
from ..loopback_api import LoopbackApi
from ..pipeline import PATIENCE, Penstock
from .api import Api

SYNC = UUID("902261b0-6b22-48a0-8d6b-2fdb16cf8402")
CONFIG = """\
store: ${STORE}
credentials:
  live: {provider: servicenow, properties: {instance: none, username: u, password: p}}
  stripe: {provider: stripe, properties: {api_key: "${STRIPE_KEY}", api_url: "http://stripe.test"}}
syncs:
  incidents: {provider: servicenow, collections: [incident], credential: live, status: disabled}
  billing: {provider: stripe, collections: [customers], credential: stripe, frequency: 1s}
sinks:
  open:
    type: stream
    source: syncs
    filter: "record.data ->> 'state' = 'open'"
consumers:
  changes: {type: nats, stream: events, url: "${NATS}", create_stream: true}
  newest: {type: nats, stream: records, url: "${NATS}", create_stream: true}
  workers: {stream: events, filters: {provider: servicenow}}
  opened: {stream: open}
  customer-events: {stream: events, filters: {provider: stripe}}
  customers: {stream: records, filters: {provider: stripe}}
spark:
  master: local[2]
"""


def incident(state: str, *, deleted: bool = False) -> Record:
    """Return a version of an incident."""
    return Record("inc_2891", b"" if deleted else orjson.dumps({"state": state}), deleted=deleted)


class Customers:
    """The customers of an API, and what workers have received of them."""

    def __init__(self, stripe: httpx.Client, api: Api) -> None:
        self._stripe = stripe
        self._api = api
        self.events: list[dict[str, Any]] = []
        self.records: dict[str, dict[str, Any]] = {}

    def write(self, method: str, path: str = "", **fields: str) -> str:
        """Make, change or delete a customer; return its id."""
        answer = self._stripe.request(method, f"/v1/customers{path}", data=fields or None)
        return str(answer.raise_for_status().json()["id"])

    def there(self) -> dict[str, Any]:
        """Return what the API has."""
        found = self._stripe.get("/v1/customers", params={"limit": 1_000}).json()["data"]
        return {each["id"]: each for each in found if not each.get("deleted")}

    def have_come(self) -> bool:
        """Receive; return whether events and records add up to what the API has."""
        self.events += [each["event"] for each in self._api.receive("customer-events")]
        for each in self._api.receive("customers"):
            self.records[each["record"]["upstream_id"]] = each["record"]
        folded = {each["upstream_id"]: each for each in self.events}
        there = self.there()
        return there == self._alive(folded) == self._alive(self.records)

    @staticmethod
    def _alive(of: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return {key: each["data"] for key, each in of.items() if not each["deleted"]}


def follows_localstripe(pipeline: Penstock, api: Api, stripe: httpx.Client) -> None:
    """Check that what is done through Stripe's API arrives, each change once."""
    customers = Customers(stripe, api)

    def wait(what: str) -> None:
        pipeline.wait_for(customers.have_come, PATIENCE, what)

    ids = [customers.write("POST", name=f"c{n}") for n in range(25)]
    wait("those that were made")
    customers.write("POST", f"/{ids[0]}", name="new", email="new@example.com")
    customers.write("DELETE", f"/{ids[1]}")
    customers.write("POST", name="last")
    wait("what was changed, deleted and made")
    # All is read again, and nothing of it has changed: what is made after that is the next event.
    api("POST", "/v1/syncs/billing/backfill", {})
    pipeline.wait_for(
        lambda: api("GET", "/v1/syncs/billing")["collections"][0]["records_read"] >= 52,
        PATIENCE, "reading all again",
    )  # fmt: skip
    customers.write("POST", f"/{ids[2]}", name="newer")
    wait("what was changed after that")
    did = Counter((each["upstream_id"], each["event"]) for each in customers.events)
    assert set(did.values()) == {1}
    assert Counter(event for _, event in did) == {"inserted": 26, "updated": 2, "deleted": 1}
    changed = {each["upstream_id"]: each["changes"] for each in customers.events if each["changes"]}
    assert changed[ids[0]]["data"]["name"] == "c0"


@pytest.fixture
def stripe() -> Iterator[httpx.Client]:
    with localstripe() as client:
        yield client


@pytest.fixture
def proxy(stripe: httpx.Client) -> Iterator[LoopbackApi]:
    with proxied(stripe) as made:
        yield made


def test_from_the_records_table_to_http_and_nats(
    database: Database, nats: JetStream, tmp_path: Path, stripe: httpx.Client, proxy: LoopbackApi
) -> None:
    (tmp_path / "penstock.yaml").write_text(CONFIG)
    environment = {
        "STORE": database.url, "NATS": nats.url, "STRIPE_KEY": KEY,
        "http_proxy": proxy.url, "no_proxy": "127.0.0.1,localhost",
    }  # fmt: skip
    with Penstock(tmp_path, environment=environment, own_jvm=True) as pipeline:
        pipeline.start().wait_ready()
        with Store(database.url) as store:
            api = Api(pipeline, store.tokens.create("admin", "admin"))
        writer = RecordWriter(database.url)
        for version in (incident("open"), incident("done"), incident("", deleted=True)):
            writer.write(SYNC, "servicenow", "servicenow:incident", [version])
        writer.write(SYNC, "servicenow", "servicenow:incident", [incident("open")])

        events: list[dict[str, object]] = []

        def all_came() -> bool:
            events.extend(each["event"] for each in api.receive("workers"))
            return len(events) == 4

        pipeline.wait_for(all_came, PATIENCE, "four events")
        pipeline.wait_for(lambda: len(nats.messages("CHANGES")) == 4, PATIENCE, "four in NATS")
        subject = f"{SYNC}.servicenow.servicenow:incident.inc_2891"
        published = nats.messages("CHANGES")
        types = ["inserted", "updated", "deleted", "inserted"]
        assert [event["event"] for event in events] == types
        assert [m.subject for m in published] == [
            f"sequin-events.default.{subject}.{kind}" for kind in types
        ]
        assert [orjson.loads(m.data)["event"] for m in published] == events
        assert events[1]["changes"]["data"] == {"state": "open"}  # type: ignore[index]  # it is there
        assert events[3]["changes"]["deleted"] is True  # type: ignore[index]  # it is there

        def found(**filters: object) -> list[str]:
            asked = urlencode({"sync_id": SYNC, **filters})
            return [each["event"]["event"] for each in api("GET", f"/v1/events?{asked}")["data"]]

        of = {"collection_id": "servicenow:incident", "upstream_id": "inc_2891"}
        assert found() == found(**of) == found(provider="servicenow", **of) == types
        assert found(**of, deleted="true") == found(deleted="true") == ["deleted"]
        assert found(upstream_id="inc_2891") == types
        assert found(upstream_id="inc_1") == found(**{**of, "upstream_id": "inc_1"}) == []
        assert found(collection_id="servicenow:task") == found(provider="crm") == []

        def newest() -> list[dict[str, object]]:
            return [orjson.loads(m.data)["record"] for m in nats.messages("NEWEST")]

        pipeline.wait_for(
            lambda: [r["updated_at"] for r in newest()] == [events[3]["updated_at"]],
            PATIENCE, "the newest record",
        )  # fmt: skip
        (record,) = newest()
        assert (record["data"], record["deleted"]) == ({"state": "open"}, False)
        assert nats.messages("NEWEST")[0].subject == f"sequin-records.default.{subject}"
        opened = [each["event"]["event"] for each in api.receive("opened")]
        assert opened[0] == "inserted"

        assert purge(database.url, SYNC) == 1
        writer.write(SYNC, "servicenow", "servicenow:incident", [incident("new")])
        pipeline.wait_for(lambda: len(nats.messages("CHANGES")) == 5, PATIENCE, "no event of it")
        writer.close()

        follows_localstripe(pipeline, api, stripe)
        assert pipeline.stop() == 0
