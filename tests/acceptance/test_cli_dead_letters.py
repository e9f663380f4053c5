"""`penstock dead-letters` as a user runs it, mistakes and all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import psycopg
import pytest

from penstock.core.delivery import DeadLetter
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.expressions import load_columns
from penstock.streams.consumers.registry import Consumers
from penstock.streams.nats_consumers import NatsConsumers
from penstock.streams.store import Store

from ..cli import fails, listed, run, write
from ..pipeline import penstock
from ..streams_help import make_stream, publish


@pytest.fixture
def shop(tmp_path: Path, database: Database, nats_server: EmbeddedNats) -> Path:
    """A folder with a file whose store is the database and whose sinks are NATS ones."""
    write(
        tmp_path,
        f"sources: {{shop: {{type: postgres, url: '{database.url}'}}}}",
        "sinks:",
        f"  out: {{type: nats, source: shop, url: '{nats_server.url}', ack_timeout: 2}}",
        "  down: {type: nats, source: shop, url: 'nats://127.0.0.1:9'}",
        f"store: {database.url}",
    )
    return tmp_path


def letter(number: int, subject: str, body: str = '{"record":{"id":1}}') -> DeadLetter:
    return DeadLetter(f"tag-{number}-0", subject, "message_too_large", "It was too large.", body)


def test_a_sinks_letters_are_replayed_once(shop: Path, database: Database, nats: JetStream) -> None:
    subject = f"{database.name}.a"
    nats.add_stream(database.name.upper(), [f"{database.name}.>"], duplicate_window=60)
    with Store.open(database.url) as store:
        store.letters.add("out", [letter(1, subject, '{"a":"é"}'), letter(2, subject)])
    table = run(shop, "dead-letters list")
    assert "sink out" in table
    first, second = listed(shop, "dead-letters list --sink out")
    assert (first["idempotency_key"], first["code"]) == ("tag-1-0", "message_too_large")
    assert "message" not in first
    shown = run(shop, "dead-letters show", str(first["id"]))
    assert "reason: It was too large." in shown
    assert shown.rstrip().endswith('\n{"a":"é"}')
    whole = json.loads(run(shop, "dead-letters show --json", str(first["id"])))
    assert whole["message"] == '{"a":"é"}'

    output = run(shop, "dead-letters replay", str(first["id"]))
    assert output == f"Replayed {first['id']}, of sink out.\n"
    (published,) = nats.messages(database.name.upper())
    assert (published.subject, published.data.decode()) == (subject, '{"a":"é"}')
    assert published.headers["Nats-Msg-Id"] == "tag-1-0"
    replayed = [x["replayed_at"] is not None for x in listed(shop, "dead-letters list")]
    assert replayed == [True, False]
    assert run(shop, "dead-letters replay --all") == f"Replayed {second['id']}, of sink out.\n"
    assert run(shop, "dead-letters replay --all") == "There is nothing to replay.\n"
    run(shop, "dead-letters replay", str(first["id"]))  # again: JetStream drops the second copy
    assert [m.headers["Nats-Msg-Id"] for m in nats.messages(database.name.upper())] == [
        "tag-1-0", "tag-2-0",
    ]  # fmt: skip


def test_a_replay_that_fails_leaves_the_letter(
    shop: Path, database: Database, nats: JetStream
) -> None:
    nats.add_stream(database.name.upper(), [f"{database.name}.>"], max_msg_size=100)
    with Store.open(database.url) as store:
        store.letters.add("out", [letter(1, f"elsewhere.{database.name}")])
        store.letters.add("out", [letter(2, f"{database.name}.a", "x" * 200)])
        store.letters.add("out", [letter(3, f"{database.name}.a", "x" * 2_000_000)])
        store.letters.add("down", [letter(4, "a")])
        store.letters.add("gone", [letter(5, "a")])
        long = "a subject of 5000 bytes; at most 4000 can be sent"
        store.letters.add("out", [DeadLetter("k", "-", "subject_too_long", long, "{}")])
        store.letters.add("out", [DeadLetter("r", "-", "bad_subject", "'a..b' is none", "{}")])
        ids = [str(found.id) for found in store.letters.page()]
    for number, expected in zip(
        ids,
        (
            "No JetStream stream captures the subject",
            "message size exceeds maximum",
            "the server takes",
            "Nothing listens at 127.0.0.1:9",
            "has no NATS sink 'gone' any more",
            f"no subject that it could be sent to: {long}. Publish its message by hand",
            "no subject that it could be sent to: 'a..b' is none. Publish its message by hand",
        ),
        strict=True,
    ):
        assert expected in fails(shop, 1, "dead-letters replay", number)
    assert not [x for x in listed(shop, "dead-letters list") if x["replayed_at"]]
    assert nats.messages(database.name.upper()) == []


def test_purge(shop: Path, database: Database) -> None:
    with Store.open(database.url) as store:
        store.letters.add("out", [letter(n, "a") for n in (1, 2, 3)])
        store.letters.add("down", [letter(n, "a") for n in (4, 5)])
        first, second, *_, last = (found.id for found in store.letters.page())
        store.letters.mark_replayed(second)
    for arguments, which in (((), "all"), (("--sink", "out"), "these"), ((str(first),), "these")):
        output = fails(shop, 1, "dead-letters purge", *arguments)
        assert output == f"purge deletes {which} dead letters for ever: add --yes to do it\n"
    assert len(listed(shop, "dead-letters list")) == 5
    assert "belongs to sink down" in fails(
        shop, 1, "dead-letters purge --yes --sink out", str(first), str(last)
    )
    assert "there is no dead letter 999" in fails(
        shop, 1, "dead-letters purge --yes", str(first), "999"
    )
    assert len(listed(shop, "dead-letters list")) == 5
    assert run(shop, "dead-letters purge --yes --replayed") == "Deleted 1 dead letter.\n"
    assert run(shop, "dead-letters purge --yes", str(first)) == "Deleted 1 dead letter.\n"
    assert run(shop, "dead-letters purge --yes --sink down") == "Deleted 2 dead letters.\n"
    assert len(listed(shop, "dead-letters list")) == 1
    assert run(shop, "dead-letters purge --yes") == "Deleted 1 dead letter.\n"


def test_unknown_names_and_numbers(shop: Path, database: Database) -> None:
    with Store.open(database.url) as store:
        orders = store.register_stream(
            "orders", store.register_source("shop", "t"), "changes", None
        )
        store.register_consumer(orders.name, "billing", "pull", {})
        store.letters.add("removed", [letter(1, "a")])
    assert len(listed(shop, "dead-letters list --sink removed")) == 1  # the file has it no more
    assert listed(shop, "dead-letters list --sink down") == []
    assert listed(shop, "dead-letters list --consumer billing") == []
    for command in ("list", "replay --all", "purge --yes"):
        output = fails(shop, 1, f"dead-letters {command} --sink dwon")
        assert output == "there is no sink 'dwon': expected one of out, down; did you mean down?\n"
        output = fails(shop, 1, f"dead-letters {command} --consumer biling")
        assert "there is no consumer 'biling': expected one of " in output
        assert "did you mean billing?" in output
        output = fails(shop, 1, f"dead-letters {command} --sink down --consumer billing")
        assert "give --sink or --consumer" in output
    for command in ("show", "replay"):
        assert "there is no dead letter 77" in fails(shop, 1, f"dead-letters {command} 77")
        assert "Usage: " in fails(shop, 2, f"dead-letters {command} x")
    for arguments in ((), ("1", "--all")):
        assert "or add --all" in fails(shop, 1, "dead-letters replay", *arguments)
    assert len(listed(shop, "dead-letters list")) == 1


def test_a_long_list_shows_that_there_is_more(shop: Path, database: Database) -> None:
    with Store.open(database.url) as store:
        store.letters.add("out", [letter(n, "a") for n in range(3)])
    done = penstock("dead-letters", "list", "--limit", "2", "--json", cwd=shop)
    assert [x["idempotency_key"] for x in json.loads(done.stdout)] == ["tag-0-0", "tag-1-0"]
    assert "There are more than these 2" in done.stderr
    assert penstock("dead-letters", "list", "--limit", "3", cwd=shop).stderr == ""


def test_a_consumers_letter_goes_back_into_it(shop: Path, database: Database) -> None:
    with Store.open(database.url) as store:
        stream = make_stream(store)
        store.register_consumer(stream.name, "billing", "pull", {"max_deliver": 1})
        publish(store, stream, [{"id": 7}])

    async def take() -> list[bytes]:
        consumers = Consumers(database.url, pool_size=2)
        await consumers.open()
        try:
            consumer = await consumers.get("billing")
            received = await consumer.receive(10, 0.0)
            await consumer.nack([delivery.token for delivery in received.deliveries])
            return [delivery.message for delivery in received.deliveries]
        finally:
            await consumers.close()

    (message,) = asyncio.run(take())
    assert asyncio.run(take()) == []
    (found,) = listed(shop, "dead-letters list --consumer billing")
    assert (found["consumer"], found["sink"], found["code"]) == ("billing", None, "max_deliver")
    output = run(shop, "dead-letters replay --all --consumer billing")
    assert output == f"Replayed {found['id']}, of consumer billing.\n"
    assert asyncio.run(take()) == [message]


def test_a_nats_consumers_letters_are_published_again(
    shop: Path, database: Database, nats: JetStream, nats_server: EmbeddedNats
) -> None:
    nats.add_stream(database.name.upper(), [f"{database.name}.>"], duplicate_window=60)
    file = shop / "penstock.yaml"
    text = file.read_text().replace("sinks:\n", "sinks:\n  events: {type: stream, source: shop}\n")
    mail = f"mail: {{type: nats, stream: events, url: '{nats_server.url}', ack_timeout: 2}}"
    file.write_text(f"{text}\nconsumers:\n  {mail}\n")
    with Store.open(database.url) as store:
        NatsConsumers(store).register(make_stream(store), "mail", {}, "all")
        store.letters.add("mail", [letter(1, f"{database.name}.a")], "consumer")
    (found,) = listed(shop, "dead-letters list --consumer mail")
    assert (found["idempotency_key"], found["consumer"]) == ("tag-1-0", "mail")
    assert found["sink"] is None
    refused = fails(shop, 1, "dead-letters list --sink mail")
    assert refused == "'mail' is a consumer, and no sink: give --consumer mail\n"
    table = run(shop, "dead-letters list")
    assert "consumer mail" in table
    assert "sink" not in table
    assert "\nof: consumer mail\n" in run(shop, "dead-letters show", str(found["id"]))
    replayed = run(shop, "dead-letters replay --all --consumer mail")
    assert replayed == f"Replayed {found['id']}, of consumer mail.\n"
    (published,) = nats.messages(database.name.upper())
    assert published.headers["Nats-Msg-Id"] == "tag-1-0"


def test_a_relays_letters_are_of_pipelines(shop: Path, database: Database) -> None:
    with Store.open(database.url) as store:
        for name in ("notify", "out"):
            store.letters.add(name, [letter(1, "a")])
    url = f"--url {database.url}"
    assert "sink notify" in run(shop, "dead-letters list")
    relayed = run(shop, f"dead-letters list {url}")
    assert "pipeline notify" in relayed
    assert "sink" not in relayed
    file = shop / "penstock.yaml"
    outbox = f"sources: {{app: {{type: outbox, url: '{database.url}'}}, "
    file.write_text(file.read_text().replace("sources: {", outbox))
    both = run(shop, "dead-letters list")
    assert "pipeline notify" in both
    assert "sink out" in both


def test_a_nats_consumers_letter_meets_its_filter_of_today(
    shop: Path, database: Database, nats: JetStream, nats_server: EmbeddedNats
) -> None:
    database.execute("CREATE TABLE items (id int PRIMARY KEY, n int)")
    nats.add_stream(database.name.upper(), [f"{database.name}.>"], duplicate_window=60)
    file = shop / "penstock.yaml"
    text = file.read_text().replace("sinks:\n", "sinks:\n  events: {type: stream, source: shop}\n")
    subject = f"{database.name}.{{table}}"
    mail = f"mail: {{type: nats, stream: events, url: '{nats_server.url}', subject: '{subject}'}}"
    file.write_text(f"{text}\nconsumers:\n  {mail}\n")
    metadata = (
        '"metadata":{"table_schema":"public","table_name":"items","idempotency_key":"tag-1-0"}'
    )
    body = f'{{"record":{{"id":1,"n":0}},"changes":null,"action":"insert",{metadata}}}'
    dead = DeadLetter("tag-1-0", "", "filter_failed", "It divides by zero.", body)
    with Store.open(database.url) as store:
        stream, consumers = make_stream(store), NatsConsumers(store)
        with psycopg.connect(database.url) as connection:
            store.save_catalog("shop", load_columns(connection, [("public", "items")]))
        store.letters.add("mail", [dead], "consumer")

        def replay(condition: str) -> str:
            consumers.register(stream, "mail", {"filters": {"sql": condition}}, "all")
            output = (
                ""
                if condition == "record.n = 0"
                else fails(shop, 1, "dead-letters replay --all --consumer mail")
            )
            return output or run(shop, "dead-letters replay --all --consumer mail")

        assert "fails again: the filter can't be evaluated: division by zero" in replay(
            "1 / record.n > 0"
        )
        assert "its `filters.sql` leaves it out" in replay("record.n = 1")
        assert not nats.messages(database.name.upper())
        assert "Replayed" in replay("record.n = 0")
    (published,) = nats.messages(database.name.upper())
    assert (published.subject, published.headers["Nats-Msg-Id"]) == (
        f"{database.name}.items",
        "tag-1-0",
    )
