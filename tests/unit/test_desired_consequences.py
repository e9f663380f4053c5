"""What follows from a plan, in words; and what the store has that forbids it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from penstock.config.document import ConfigDocument
from penstock.config.settings import Config
from penstock.core.errors import ConfigError
from penstock.desired.consequences import with_facts
from penstock.desired.entities import Entity, Snapshot
from penstock.desired.facts import Facts, StreamFacts
from penstock.desired.plan import Plan, plan_of

Specs = dict[tuple[str, str], dict[str, Any]]

SHOP = {"type": "postgres", "url": "postgres://app:pw@db/shop"}
STREAM = {"type": "stream", "source": "shop"}
NATS = {"type": "nats", "source": "shop"}
MAIL = {"type": "nats", "stream": "orders"}
STATE: Specs = {
    ("source", "shop"): SHOP,
    ("sink", "orders"): STREAM,
    ("sink", "out"): NATS,
    ("consumer", "a"): {"stream": "orders"},
}
FACTS = Facts(
    streams={"orders": StreamFacts("shop", "changes")},
    consumers={"a": ("orders", 3), "b": ("orders", 0)},
    backlogs={("out", "shop"): 1200},
    positions={"shop": "2026-11-23 20:00:00"},
    messages={"orders": "1,204 messages"},
)


def planned(after: Specs, before: Specs = STATE) -> Plan:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    entities = {
        key: Entity(key[0], key[1], UUID(int=number), spec, 1, "file", at)
        for number, (key, spec) in enumerate(before.items())
    }
    document = ConfigDocument("penstock.yaml", after, Config(sources={}, sinks={}), {})
    plan = plan_of(document, Snapshot(1, entities), prune=True, environ={})
    return with_facts(plan, FACTS, {})


def words(after: Specs, before: Specs = STATE) -> list[str]:
    return [word for change in planned(after, before).changes for word in change.consequences]


def changed(key: tuple[str, str], **keys: Any) -> Specs:
    return {**STATE, key: {**STATE.get(key, {}), **keys}}


def test_deletes_name_what_goes_with_them() -> None:
    assert words({}) == [
        "drops the consumer a: what it has not acked goes with it",
        "its 3 dead letters go with it",
        "drops the stream orders with 1,204 messages and its consumers a, b",
        "sink out has a backlog of 1,200 messages, which goes with it",
        "drops the slot penstock_shop: what was committed since then (2026-11-23 20:00:00 UTC) "
        "can't be read",
    ]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (changed(("source", "shop"), slot="s2"), "the slot s2, where it is new, begins at its"),
        (changed(("source", "shop"), slot="s2"), "once that streams, the slot penstock_shop is dropped"),
        (changed(("source", "shop"), url="postgres://app:pw@db2/shop"), "reads db2:5432/shop: the"),
        (
            changed(("source", "shop"), url="postgres://app:pw@db2/shop"),
            "the slot penstock_shop of db:5432/shop is dropped, with what was not sent of it",
        ),
        (changed(("source", "shop"), url="postgres://app:new@db/shop"), "shop is started again"),
        (changed(("source", "shop"), tables=["public.a"]), "changes of public.* are no longer"),
        (changed(("source", "new"), **SHOP, slot="x"), "a new slot x begins at its present end"),
        (changed(("sink", "more"), **NATS), "sink more gets what is committed from now on"),
        (changed(("sink", "more"), **NATS, initial_backfill=True), "gets the rows that its tables"),
        (changed(("sink", "out"), filter="action = 'insert'"), "filter counts from the next round"),
        (changed(("sink", "orders"), retention="1d"), "stream orders drops what is older than 1d"),
        (changed(("consumer", "c"), stream="orders"), "c starts at the beginning of the stream orders"),
        (changed(("consumer", "a"), deliver_policy="new"), "consumer a stays where it is"),
        (
            changed(("sink", "two"), **STREAM) | {("consumer", "a"): {"stream": "two"}},
            "a is made anew and starts at the beginning of the stream two; what it has not acked of o",
        ),
        (changed(("consumer", "m"), **MAIL), "m publishes what the stream orders holds, from its"),
        (changed(("consumer", "m"), **MAIL, deliver_policy="new"), "what the stream orders gets from"),
        (changed(("consumer", "m"), **MAIL, start_at="0/1:0"), "stream orders holds from 0/1:0 on"),
        (changed(("consumer", "a"), type="nats"), "becomes one of type nats: what it has not acked"),
    ],
)  # fmt: skip
def test_changes_say_what_follows(after: Specs, expected: str) -> None:
    assert any(expected in word for word in words(after)), words(after)


@pytest.mark.parametrize(
    ("after", "lost"),
    [
        ({("source", "shop"): SHOP, ("sink", "orders"): STREAM, ("sink", "out"): NATS}, 2),
        (changed(("source", "shop"), slot="s2"), 1),
        (changed(("source", "shop"), url="postgres://app:pw@db2/shop"), 1),
        (changed(("source", "shop"), url="postgres://app:new@db/shop"), 0),
        (changed(("source", "shop"), tables=["public.a", "x.*"]), 1),
        (changed(("source", "shop"), tables=["public.*", "x.*"]), 0),
        (changed(("sink", "orders"), retention="1d"), 1),
        (changed(("sink", "orders"), retention="168h"), 0),
        (changed(("sink", "orders"), retention="8d"), 0),
        (changed(("sink", "orders"), tables=["public.a"], actions=["insert", "delete"]), 2),
        (changed(("sink", "orders"), actions=["insert", "update", "delete", "truncate"]), 0),
        (changed(("sink", "out"), filter="action = 'insert'"), 0),
        (changed(("sink", "out"), type="stream"), 1),
        (changed(("sink", "two"), **STREAM) | {("consumer", "a"): {"stream": "two"}}, 2),
        (changed(("consumer", "a"), type="nats"), 2),
        (changed(("consumer", "a"), filters={"action": ["insert"]}), 0),
    ],
)  # fmt: skip
def test_what_is_lost_is_marked(after: Specs, lost: int) -> None:
    changes = planned(after).changes
    losses = [loss for change in changes for loss in change.losses]
    assert len(losses) == lost, losses
    assert all(set(change.losses) <= set(change.consequences) for change in changes)


def test_a_pattern_covers_the_tables_that_were_named() -> None:
    def lost(kind: str, had: list[str], has: list[str]) -> list[str]:
        key = (kind, "shop" if kind == "source" else "orders")
        before = {**STATE, key: {**STATE[key], "tables": had}}
        after = {**STATE, key: {**STATE[key], "tables": has}}
        return [loss for change in planned(after, before).changes for loss in change.losses]

    for kind in ("source", "sink"):
        assert lost(kind, ["public.a", "public.b"], ["public.*"]) == []
        assert "${T}" in lost(kind, ["public.a", "${T}"], ["public.A"])[0]
    assert lost("source", ["public.*"], ["public.a"]) == [
        "changes of public.* are no longer captured"
    ]
    assert lost("sink", ["public.a", "public.b"], ["public.b"]) == [
        "changes of public.a no longer go to sink orders"
    ]


def test_what_the_store_forbids_is_refused() -> None:
    without_a = {key: spec for key, spec in STATE.items() if key != ("consumer", "a")}
    with pytest.raises(ConfigError, match="orders of the store has the kind 'changes', not 'rows'"):
        planned(changed(("sink", "orders"), kind="rows"))
    other = {("source", "new"): {**SHOP, "slot": "s"}, ("sink", "out"): {**NATS, "source": "new"}}
    with pytest.raises(ConfigError, match=r"backlog of 1,200 messages from source shop: let it"):
        planned({**without_a, **other})


def test_changes_of_a_nats_consumer_say_what_follows() -> None:
    before = {**STATE, ("consumer", "m"): MAIL}
    key = ("consumer", "m")

    def of(**keys: Any) -> list[str]:
        return words({**before, key: {**MAIL, **keys}}, before)

    assert of(filters={"table": "a"}) == [
        "filters counts from the next round on; what was sent stays as it is"
    ]
    assert of(deliver_policy="new") == [
        "consumer m stays where it is: its start counts when one is made"
    ]
    moved = {("sink", "two"): {**STREAM, "source": "new"}, ("source", "new"): {**SHOP, "slot": "s"}}
    made_anew = {**before, **moved, key: {**MAIL, "stream": "two"}}
    assert words(made_anew, {**before, **moved}) == [
        "consumer m is made anew and publishes what the stream two holds, from its beginning, then what"
        " it gets"
    ]
    assert words(STATE, before) == [
        "consumer m publishes no more; what was not yet is in its stream still"
    ]
    assert of(type="pull") == [
        "consumer m publishes to NATS no longer",
        "consumer m starts at the beginning of the stream orders",
    ]


def test_syncs_name_what_is_read_and_what_stays() -> None:
    sync = {"provider": "stripe", "collections": ["customers", "prices"], "credential": "live"}
    key = {"provider": "stripe", "properties": {"api_key": "a"}}
    before: Specs = {("credential", "live"): key, ("sync", "s"): sync}
    assert words(before, {("credential", "live"): key}) == [
        "sync s: stripe:customers, stripe:prices: read from the beginning"
    ]
    after = {**before, ("sync", "s"): {**sync, "collections": ["stripe:customers", "invoices"]}}
    assert words(after, before) == [
        "sync s: stripe:invoices: read from the beginning",
        "sync s: stripe:prices: read no more; their records stay until they are purged",
    ]
    rotated = {**before, ("credential", "live"): {**key, "properties": {"api_key": "b"}}}
    assert words(rotated, before) == [
        "the syncs of credential live use it from their next request on; nothing is read again"
    ]
    assert words({("credential", "live"): key}, before) == [
        "sync s: stripe:customers, stripe:prices: read no more; their records stay until they are purged"
    ]
