"""The audit log has what is done beside changes of the desired state: by whom, how and to what."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.api_help import Shop, problem, refuse_lines, tokens
from typer.testing import CliRunner

from penstock.cli.api_tools import ApiTools
from penstock.cli.main import app
from penstock.core.delivery import DeadLetter
from penstock.desired.actions import who
from penstock.embedded.handles import Database
from penstock.streams.nats_consumers import NatsConsumers
from penstock.trial.replay import Replay

PROVIDER = {
    "type": "rest", "base_url": "https://crm.invalid", "paginator": {"type": "single_page"},
    "collections": {"things": {"path": "things"}},
}  # fmt: skip
SYNC = {"provider": "mine", "collections": ["things"], "credential": "key"}
BASTION = {"host": "127.0.0.1", "port": 1, "user": "penstock"}
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEbcEH6b1OtnYcXlb2H9mRC0o2Vq8KPMQVsqVyqKxOjD"
NOWHERE = "nats://127.0.0.1:1"


@pytest.fixture
def shop(database: Database) -> Any:
    database.execute("CREATE TABLE things (id int PRIMARY KEY)")
    with Shop(database.url, ApiTools(), "orders") as shop:
        for path, spec in (
            ("sources/shop", {"type": "postgres", "url": database.url}),
            ("sinks/orders", {"type": "stream", "source": "shop"}),
            ("targets/far", {"type": "nats", "url": NOWHERE, "bastion": BASTION}),
            ("sinks/out", {"type": "nats", "source": "shop", "target": "far"}),
            ("consumers/mail", {"type": "nats", "stream": "orders", "target": "far"}),
            ("consumers/workers", {"stream": "orders", "max_deliver": 1}),
            ("providers/mine", PROVIDER),
            ("credentials/key", {"provider": "mine", "properties": {"api_key": "k"}}),
            ("syncs/copy", SYNC),
        ):
            answer = shop.client.put(f"/v1/{path}", json=spec)
            assert answer.status_code == 201, answer.text
        NatsConsumers(shop.store).register(shop.stream, "mail", {"url": NOWHERE}, "all")
        yield shop


def _actions(shop: Shop) -> list[tuple[str, str, str, str, str, dict[str, Any]]]:
    """Return the actions of the log, the oldest first."""
    log = shop.client.get("/v1/audit", params={"limit": 100}).json()
    assert log["next"] is None
    return [
        (e["who"], e["door"], e["action"], e["kind"], e["name"], e["after"])
        for e in reversed(log["data"])
        if e["version"] is None
    ]


def _add_letters(shop: Shop, count: int) -> list[int]:
    """Add dead letters of the sink and of the consumer; return the numbers of all."""
    letters = [DeadLetter(f"tag-{n}-0", "a", "too_large", "Too large.", "{}") for n in range(count)]
    shop.store.letters.add("out", letters)
    shop.publish(*range(count))
    got = shop.client.post(
        "/v1/consumers/workers/receive", json={"batch_size": count, "wait_for_ms": 20_000}
    )
    assert len(tokens(got)) == count
    nack = {"ack_tokens": tokens(got)}
    assert shop.client.post("/v1/consumers/workers/nack", json=nack).status_code == 200
    found = shop.client.get("/v1/dead-letters").json()["data"]
    assert len(found) == 2 * count
    return [each["id"] for each in found]


def test_actions_of_the_api(shop: Shop) -> None:
    def post(path: str, body: Any = None, status: int = 200) -> Any:
        answer = shop.client.post(f"/v1/{path}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    made = post("tokens", {"name": "w", "role": "worker", "consumers": ["workers"]}, 201)
    by_id = f"/v1/tokens/{made['id']}"
    assert shop.client.delete(by_id).json() == {"success": True}
    problem(shop.client.delete(by_id), 409)
    first, second, *others = _add_letters(shop, 3)
    of_consumer = others[-1]
    letters = [DeadLetter(f"tag-{n}-0", "a", "too_large", "Too large.", "{}") for n in range(2)]
    shop.store.letters.add("mail", letters, "consumer")
    published = shop.store.letters.page(consumer="mail")[0].id
    for kind, name in (("http-consumers", "workers"), ("nats-consumers", "mail"), ("sinks", "out")):
        post(f"{kind}/{name}/pause")
        post(f"{kind}/{name}/resume")
    post("http-consumers/workers/rewind", {"to": "all"})
    mail = shop.client.get("/v1/consumers/mail").json()["id"]
    post(f"nats-consumers/{mail}/rewind", {"to": {"lsn": 1, "idx": 0}})
    post(f"dead-letters/{of_consumer}/replay")
    assert shop.client.delete(f"/v1/dead-letters/{published}").status_code == 200
    assert post("drop-dead-letters", {"consumer": mail}) == {"dropped": 1}
    post("replay-dead-letters", {"consumer": "workers", "code": "max_deliver"})
    assert shop.client.delete(f"/v1/dead-letters/{first}").status_code == 200
    assert post("drop-dead-letters", {"ids": [second]}) == {"dropped": 1}
    assert post("drop-dead-letters", {"sink": "out"}) == {"dropped": 1}
    assert post("drop-dead-letters", {"sink": "out"}) == {"dropped": 0}
    (backfill,) = post("backfills", {"sink": "orders", "table": "public.things"}, 201)["data"]
    post(f"backfills/{backfill['id']}/cancel")
    post(f"backfills/{backfill['id']}/cancel", status=409)
    post("syncs/copy/run", {"collection": "things"})
    post("syncs/copy/pause")
    post("syncs/copy/resume")
    key = {"host_key": HOST_KEY}
    assert shop.client.put("/v1/targets/far/bastion/host-key", json=key).status_code == 200
    problem(shop.client.post("/v1/http-consumers/nobody/rewind", json={"to": "all"}), 404)
    found = _actions(shop)
    assert {(who, door) for who, door, *_ in found} == {("admin", "api")}
    *rest, trusted = [each[2:] for each in found]
    assert trusted[:3] == ("trust host key", "target", "far")
    assert trusted[3]["fingerprint"].startswith("SHA256:")
    assert rest == [
        ("create", "token", "w", {"role": "worker", "consumers": ["workers"]}),
        ("revoke", "token", "w", {}),
        ("pause", "consumer", "workers", {}), ("resume", "consumer", "workers", {}),
        ("pause", "consumer", "mail", {}), ("resume", "consumer", "mail", {}),
        ("pause", "sink", "out", {}), ("resume", "sink", "out", {}),
        ("rewind", "consumer", "workers", {"to": "all"}),
        ("rewind", "consumer", "mail", {"to": {"lsn": 1, "idx": 0}}),
        ("replay dead letter", "consumer", "workers", {"id": of_consumer}),
        ("drop dead letter", "consumer", "mail", {"id": published}),
        ("drop dead letters", "consumer", "mail", {"count": 1}),
        ("replay dead letters", "consumer", "workers", {"code": "max_deliver", "count": 2}),
        ("drop dead letter", "sink", "out", {"id": first}),
        ("drop dead letters", "dead letters", "of any", {"ids": [second], "count": 1}),
        ("drop dead letters", "sink", "out", {"count": 1}),
        ("start", "backfill", "1", {"sink": "orders", "table": "public.things"}),
        ("cancel", "backfill", "1", {}),
        ("run", "sync", "copy", {"collection": "mine:things"}),
        ("pause", "sync", "copy", {}), ("resume", "sync", "copy", {}),
    ]  # fmt: skip
    log = shop.client.get("/v1/audit", params={"kind": "token"}).json()["data"]
    assert [each["action"] for each in log] == ["revoke", "create"]


def test_actions_of_commands(shop: Shop, database: Database, tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(json.dumps({"store": database.url}))

    def call(words: str, code: int = 0) -> None:
        done = CliRunner().invoke(app, [*words.split(), "-c", str(file)])
        assert done.exit_code == code, done.output

    ids = _add_letters(shop, 2)
    letters = [DeadLetter("tag-0-0", "a", "too_large", "Too large.", "{}")]
    shop.store.letters.add("mail", letters, "consumer")
    call("token create w --consumer workers")
    call("token revoke w")
    call("token revoke w", code=1)
    for what in (
        "consumer pause workers",
        "consumer resume workers",
        "sink pause out",
        "sink resume out",
    ):
        call(what)
    call("consumer rewind mail --to beginning")
    call(f"dead-letters replay {ids[-1]}")
    call(f"dead-letters purge {ids[0]} {ids[-1]} --yes")
    call("dead-letters purge --sink mail --yes", code=1)
    call("dead-letters purge --consumer mail --yes")
    call("dead-letters purge --sink out --yes")
    call("dead-letters purge --sink out --yes")
    call("backfill start --sink orders --table public.things")
    call("backfill pause")
    call("sync backfill copy")
    found = _actions(shop)
    assert {(who, door) for who, door, *_ in found} == {(who(), "command")}
    assert [each[2:] for each in found] == [
        ("create", "token", "w", {"role": "worker", "consumers": ["workers"]}),
        ("revoke", "token", "w", {}),
        ("pause", "consumer", "workers", {}), ("resume", "consumer", "workers", {}),
        ("pause", "sink", "out", {}), ("resume", "sink", "out", {}),
        ("rewind", "consumer", "mail", {"to": "beginning"}),
        ("replay dead letters", "consumer", "workers", {"count": 1}),
        ("drop dead letters", "sink", "out", {"count": 1}),
        ("drop dead letters", "consumer", "workers", {"count": 1}),
        ("drop dead letters", "consumer", "mail", {"count": 1}),
        ("drop dead letters", "sink", "out", {"count": 1}),
        ("start", "backfill", "1", {"sink": "orders", "table": "public.things"}),
        ("pause", "backfill", "1", {}),
        ("backfill", "sync", "copy", {}),
    ]  # fmt: skip


ASKED = ("tokens", "paused_sinks", "nats_consumers", "backfills", "paused_syncs", "sync_commands",
         "dead_letters", "bastions", "consumers", "consumer_{}")  # fmt: skip


def test_an_action_without_its_line_is_not_done(
    shop: Shop, database: Database, tmp_path: Path
) -> None:
    """Both are one transaction: a process that is killed in between leaves neither."""
    file = tmp_path / "penstock.yaml"
    file.write_text(json.dumps({"store": database.url}))
    numbers = _add_letters(shop, 2)
    of_consumer = numbers[-1]
    ((consumer,),) = database.execute("SELECT id FROM penstock.consumers WHERE name = 'workers'")
    shop.store.tokens.create("w", "worker")
    database.execute("CREATE TABLE others (id int PRIMARY KEY)")
    asked = {"sink": "orders", "table": "public.things"}
    (backfill,) = shop.client.post("/v1/backfills", json=asked).json()["data"]
    asked["table"] = "public.others"
    shop.client.post("/v1/sinks/out/pause")

    def state() -> list[Any]:
        tables = [table.format(consumer) for table in ASKED]
        return [database.execute(f"SELECT t FROM penstock.{t} t ORDER BY 1") for t in tables]

    before = state()
    refuse_lines(database)
    for method, path, body in (
        ("POST", "tokens", {"name": "v", "role": "viewer"}), ("DELETE", "tokens/w", None),
        ("POST", "sinks/out/resume", None), ("POST", "nats-consumers/mail/pause", None),
        ("POST", "nats-consumers/mail/rewind", {"to": "all"}),
        ("DELETE", f"dead-letters/{numbers[0]}", None),
        ("POST", "drop-dead-letters", {"ids": numbers}), ("POST", "backfills", asked),
        ("POST", f"backfills/{backfill['id']}/cancel", None), ("POST", "syncs/copy/pause", None),
        ("POST", "syncs/copy/run", {}),
        ("PUT", "targets/far/bastion/host-key", {"host_key": HOST_KEY}),
        ("POST", "http-consumers/workers/pause", None),
        ("POST", "http-consumers/workers/resume", None),
        ("POST", "http-consumers/workers/rewind", {"to": "all"}),
        ("POST", f"http-consumers/workers/dead-letters/{of_consumer}/replay", None),
        ("POST", f"dead-letters/{of_consumer}/replay", None),
    ):  # fmt: skip
        answer = shop.client.request(method, f"/v1/{path}", json=body)
        assert answer.status_code >= 500, (path, answer.text)
        assert state() == before, path
    for words in (
        "token create v", "token revoke w", "sink resume out", "consumer pause mail",
        "consumer rewind mail --to beginning", f"dead-letters purge {numbers[0]} --yes",
        "backfill start --sink orders --table public.others", "backfill cancel",
        "sync pause copy", "consumer pause workers", f"dead-letters replay {of_consumer}",
    ):  # fmt: skip
        done = CliRunner().invoke(app, [*words.split(), "-c", str(file)])
        assert (done.exit_code, "no line" in done.output) == (1, True), (words, done.output)
        assert state() == before, words
    many = {"ids": numbers[2:]}
    answer = shop.client.post("/v1/replay-dead-letters", json=many).json()
    assert answer["replayed"] == 0
    assert [each["id"] for each in answer["failed"]] == numbers[2:]
    assert state() == before


def test_a_dead_letter_that_comes_anyway(shop: Shop, database: Database) -> None:
    """After a rewind it is only marked as replayed, with its line."""
    *_, number = _add_letters(shop, 1)
    shop.client.post("/v1/http-consumers/workers/rewind", json={"to": "all"})
    refuse_lines(database)
    assert shop.client.post(f"/v1/dead-letters/{number}/replay").status_code == 503
    assert shop.client.get(f"/v1/dead-letters/{number}").json()["replayed_at"] is None
    database.execute("DROP TRIGGER refuse ON penstock.audit")
    assert shop.client.post(f"/v1/dead-letters/{number}/replay").status_code == 200
    assert shop.client.get(f"/v1/dead-letters/{number}").json()["replayed_at"] is not None
    assert [each[2] for each in _actions(shop)] == ["rewind", "replay dead letter"]


def test_a_published_dead_letter_is_marked_with_its_line(
    shop: Shop, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    def publisher(*_: object) -> Any:
        return SimpleNamespace(publish=lambda _subject, key, _body: sent.append(key))

    monkeypatch.setattr(Replay, "_publisher", publisher)
    first, second, *_ = _add_letters(shop, 2)

    def waiting() -> list[int]:
        query = {"sink": "out", "replayed": "false"}
        found = shop.client.get("/v1/dead-letters", params=query).json()["data"]
        return [each["id"] for each in found]

    refuse_lines(database)
    problem(shop.client.post(f"/v1/dead-letters/{first}/replay"), 503)
    assert (sent, waiting()) == (["tag-0-0"], [first, second])
    database.execute("DROP TRIGGER refuse ON penstock.audit")
    assert shop.client.post(f"/v1/dead-letters/{first}/replay").json() == {"success": True}
    assert (sent, waiting()) == (["tag-0-0"] * 2, [second])
    replayed = shop.client.post("/v1/replay-dead-letters", json={"sink": "out"}).json()
    assert (replayed["replayed"], waiting()) == (1, [])
    assert [each[2:] for each in _actions(shop)] == [
        ("replay dead letter", "sink", "out", {"id": first}),
        ("replay dead letters", "sink", "out", {"count": 1}),
    ]


def test_the_line_of_many_replays_counts_those_that_are_done(
    shop: Shop, database: Database
) -> None:
    """It is there from the first one on; those that fail are not in it, even as late as at COMMIT."""
    first, second, *others = _add_letters(shop, 2)
    database.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF NEW.id = {others[0]} THEN RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$;"
        " CREATE CONSTRAINT TRIGGER refuse AFTER UPDATE ON penstock.dead_letters"
        " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    asked = [others[0], first, others[1], second]
    replayed = shop.client.post("/v1/replay-dead-letters", json={"ids": asked}).json()
    assert (replayed["replayed"], len(replayed["failed"])) == (1, 3)
    assert [each[2:] for each in _actions(shop)] == [
        ("replay dead letters", "dead letters", "of any", {"ids": asked, "count": 1})
    ]
    database.execute("DROP TRIGGER refuse ON penstock.dead_letters")
    none = shop.client.post("/v1/replay-dead-letters", json={"ids": [first]}).json()
    assert none["replayed"] == 0
    asked = others
    replayed = shop.client.post("/v1/replay-dead-letters", json={"ids": asked}).json()
    assert replayed["replayed"] == 2
    assert [each[5]["count"] for each in _actions(shop)] == [1, 2]


def test_settings_of_a_group_without_an_entity(database: Database) -> None:
    """Its stream is no sink's, so that the change is an action of the log, not one of the state."""
    with Shop(database.url, ApiTools(), "orders") as shop:
        path, asked = "/v1/http-consumers/orders", {"ack_wait_ms": 2_000}
        refuse_lines(database)
        problem(shop.client.patch(path, json=asked), 503)
        assert shop.client.get(path).json()["ack_wait_ms"] != 2_000
        database.execute("DROP TRIGGER refuse ON penstock.audit")
        assert shop.client.patch(path, json=asked).json()["ack_wait_ms"] == 2_000
        assert [each[2:] for each in _actions(shop)] == [("update", "consumer", "orders", asked)]
