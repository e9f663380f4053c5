"""The demo's fake API, read by the connector that the demo describes; what changes in it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import orjson
import pytest
import yaml

from penstock.config.providers import RestProvider
from penstock.demo.consumer import read_change
from penstock.demo.customers import FIRST, CustomerWriter
from penstock.demo.fake_stripe import COLLECTION, KEY, FakeStripe, FakeStripeServer
from penstock.demo.ledger import DELETED, Change
from penstock.syncs import probe
from penstock.syncs.connectors.contract import Connector, Kind, Record, Session
from penstock.syncs.errors import SyncError


@pytest.fixture
def fake() -> FakeStripe:
    return FakeStripe()


@pytest.fixture
def provider(fake: FakeStripe) -> Iterator[RestProvider]:
    with FakeStripeServer(fake) as server:
        settings = yaml.safe_load(server.settings)
        provider = RestProvider.model_validate(settings["providers"]["fake_stripe"])
        limit = provider.rate_limit.model_copy(update={"interval": timedelta(milliseconds=1)})
        yield provider.model_copy(update={"rate_limit": limit})


class Sync:
    """Polls as a sync does, and enters what has changed."""

    def __init__(self, connector: Connector, session: Session) -> None:
        self._connector, self._session = connector, session
        self._collection = connector.collection("customers")
        self._cursor: dict[str, Any] = {}
        self._records: dict[str, bytes] = {}
        self.changes: list[tuple[str, int]] = []

    def run(self, *kinds: Kind) -> None:
        for kind in kinds:
            plan = self._connector.plan(self._collection, self._cursor, kind, self._session)
            for slice_ in plan:
                for page in self._connector.read(self._collection, slice_, self._session):
                    assert not page.unreadable
                    for record in page.records:
                        self._note(record)
                    self._cursor |= page.cursor or {}

    def _note(self, record: Record) -> None:
        if record.deleted:
            if self._records.pop(record.upstream_id, None) is not None:
                self.changes.append((record.upstream_id, DELETED))
        elif self._records.get(record.upstream_id) != record.data:
            self._records[record.upstream_id] = record.data
            version = int(orjson.loads(record.data)["metadata"]["version"])
            self.changes.append((record.upstream_id, version))


def test_each_change_is_read_once_and_in_order(fake: FakeStripe, provider: RestProvider) -> None:
    made: list[Change] = []
    writer = CustomerWriter(fake, lambda changes, _: made.extend(changes))
    writer.write_first()
    with probe.opened("fake_stripe", provider, {"api_key": KEY}) as (connector, session):
        sync = Sync(connector, session)
        sync.run(Kind.EVENTS, Kind.BACKFILL)
        assert len(sync.changes) == FIRST
        assert not fake.settled(), "no poll has followed the one that has shown them"
        for _ in range(60):
            for _ in range(8):
                writer.step()
            sync.run(Kind.POLL, Kind.EVENTS)
    assert {change.action for change in made} == {"insert", "update", "delete"}
    assert len(made) > 200
    assert {change.table for change in made} == {COLLECTION}
    of_each: dict[str, list[int]] = {}
    for key, version in sync.changes:
        of_each.setdefault(key, []).append(version)
    wanted: dict[str, list[int]] = {}
    for change in made:
        wanted.setdefault(f"cus_{change.id}", []).append(change.version)
    assert of_each == wanted


def test_more_than_a_page_is_listed_whole(fake: FakeStripe, provider: RestProvider) -> None:
    for number in range(250):
        fake.put(number, 1, "Ada")
    with probe.opened("fake_stripe", provider, {"api_key": KEY}) as (connector, session):
        sync = Sync(connector, session)
        sync.run(Kind.BACKFILL)
        assert len(sync.changes) == 250
        sync.run(Kind.POLL)
        for number in range(250):
            fake.delete(number)
        sync.run(Kind.EVENTS)
        assert sync.changes[250:] == [(f"cus_{n}", DELETED) for n in reversed(range(250))]


def test_another_key_is_refused(provider: RestProvider) -> None:
    with (
        probe.opened("fake_stripe", provider, {"api_key": "other"}) as (connector, session),
        pytest.raises(SyncError) as caught,
    ):
        connector.check(session)
    assert caught.value.code == "unauthorized"


def event(kind: str, version: int, deleted: bool = False) -> bytes:
    return orjson.dumps(
        {
            "event": {
                "event_type": kind,
                "collection_id": COLLECTION,
                "upstream_id": "cus_7",
                "deleted": deleted,
                "data": {"metadata": {"version": str(version)}},
            }
        }
    )


@pytest.mark.parametrize(
    ("kind", "version", "deleted", "change"),
    [
        ("inserted", 1, False, ("insert", 1)),
        ("updated", 3, False, ("update", 3)),
        ("deleted", 3, True, ("delete", DELETED)),
    ],
)
def test_an_event_is_a_change(
    kind: str, version: int, deleted: bool, change: tuple[str, int]
) -> None:
    subject = f"shop.api.{COLLECTION}.{kind}"
    assert read_change(subject, event(kind, version, deleted)) == Change(COLLECTION, 7, *change)


@pytest.mark.parametrize(
    ("subject", "data"),
    [
        ("inserted", event("inserted", 2)),
        ("updated", event("updated", 1)),
        ("updated", event("updated", 2, deleted=True)),
        ("deleted", event("deleted", 2)),
        ("updated", event("inserted", 1)),
    ],
)
def test_an_event_that_contradicts_itself_is_none(subject: str, data: bytes) -> None:
    with pytest.raises(ValueError, match=r"event|wrong subject"):
        read_change(f"shop.api.{COLLECTION}.{subject}", data)
