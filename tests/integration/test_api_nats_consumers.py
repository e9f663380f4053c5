"""The Management API of consumers of type nats, and the command beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.api_help import Shop, ids, problem
from tests.waits import Later
from typer.testing import CliRunner, Result

from penstock.cli.main import app
from penstock.core.message import Position
from penstock.embedded.handles import Database
from penstock.streams.nats_consumers import NatsConsumers
from penstock.streams.records import START

PATH = "/v1/nats-consumers"


@pytest.fixture
def shop(database: Database) -> Iterator[Shop]:
    with Shop(database.url) as shop:
        NatsConsumers(shop.store).register(shop.stream, "mail", {"url": "nats://here:4222"}, "all")
        yield shop


def test_it_is_shown_paused_and_rewound(shop: Shop) -> None:
    *_, last = shop.publish("a", "b", "c")
    made = shop.client.get(f"{PATH}/mail").json()
    assert (made["stream"], made["source"], made["state"]) == ("events", "shop", "behind")
    assert (made["lag_messages"], made["position"], made["dropped"]) == (3, None, 0)
    assert made["settings"] == {"url": "nats://here:4222"}
    assert made["why"]["reason"] == "It publishes what the stream holds."
    assert shop.client.get(PATH).json() == {"data": [made], "next": None}
    assert shop.client.post(f"{PATH}/mail/pause").json() == {"success": True}
    assert shop.client.get(f"{PATH}/mail").json()["state"] == "paused"
    assert shop.client.post(f"{PATH}/mail/resume").status_code == 200
    known = NatsConsumers(shop.store)
    far = {"lsn": 2**62, "idx": 0}
    before = Position(last.lsn, last.idx - 1)
    places: list[tuple[Any, Position]] = [
        ("all", START), ("new", last), ({"lsn": last.lsn, "idx": last.idx}, before), (far, last),
        ({"lsn": -5, "idx": 0}, START), ("2000-01-01T00:00:00Z", START),
        ("0001-01-01T00:00:00Z", START), ("2100-01-01T00:00:00+02:00", last),
    ]  # fmt: skip
    for to, position in places:
        assert shop.client.post(f"{PATH}/mail/rewind", json={"to": to}).status_code == 200
        assert known.get("mail").rewind == position, to
    assert shop.client.get(f"{PATH}/mail").json()["rewinding"] is True


def test_what_a_rewind_would_do(shop: Shop) -> None:
    _, second, last = shop.publish("a", "b", "c")

    def effect(to: Any) -> tuple[list[str], list[str]]:
        answer = shop.client.post(f"{PATH}/mail/rewind", params={"dry_run": True}, json={"to": to})
        assert answer.status_code == 200, answer.text
        return answer.json()["losses"], answer.json()["consequences"]

    lost = ["consumer mail skips 3 messages that it is not done with"]
    assert effect("new") == (lost, lost)
    two = ["consumer mail skips 2 messages that it is not done with"]
    assert effect({"lsn": last.lsn, "idx": last.idx}) == (two, two)
    assert effect("all") == ([], [])
    known = NatsConsumers(shop.store)
    assert known.get("mail").rewind is None
    known.rewind("mail", second)  # which is where it will be
    assert effect("all") == ([], ["consumer mail delivers 1 message again"])
    problem(shop.client.post(f"{PATH}/mial/rewind?dry_run=true", json={"to": "all"}), 404)


def test_what_is_wrong(shop: Shop) -> None:
    for name in ("other", "mai", "a%00b", "%ff", "a%20b"):
        problem(shop.client.get(f"{PATH}/{name}"), 404)
        problem(shop.client.post(f"{PATH}/{name}/pause"), 404)
    assert "did you mean mail?" in shop.client.get(f"{PATH}/mai").json()["detail"]
    for to in (None, "0", 5, "2026-01-01", {"lsn": 1}, "9999-12-31T23:59:59-23:59"):
        problem(shop.client.post(f"{PATH}/mail/rewind", json={"to": to}), 422, "to")
    worker = shop.worker("w")
    problem(worker.get(PATH), 403)
    problem(worker.post(f"{PATH}/mail/pause"), 403)
    problem(shop.client.get(PATH, params={"cursor": "x"}), 422, "cursor")


def test_lists_come_by_pages(shop: Shop) -> None:
    known = NatsConsumers(shop.store)
    for name in ("copy", "zoo"):
        known.register(shop.stream, name, {}, "all")
    names, cursor = [], None
    for _ in range(3):
        page = shop.client.get(
            PATH, params={"limit": 1} | ({"cursor": cursor} if cursor else {})
        ).json()
        names += [of["name"] for of in page["data"]]
        cursor = page["next"]
    assert (names, cursor) == (["copy", "mail", "zoo"], None)


def _call(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["consumer", *arguments, "-c", str(folder / "penstock.yaml")])


def test_the_command(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "penstock.yaml").write_text(f"store: {shop.store.url}\n")
    (at,) = shop.publish("a")
    known = NatsConsumers(shop.store)
    assert "mail" in _call(tmp_path, "list").output
    assert '"lag_messages": 1' in _call(tmp_path, "list", "--json").output
    assert _call(tmp_path, "pause", "mail").exit_code == 0
    assert known.get("mail").state == "paused"
    assert _call(tmp_path, "resume", "mail").exit_code == 0
    assert not known.get("mail").paused
    places = {
        "beginning": START, "end": at, f"0/{at.lsn:X}:{at.idx}": Position(at.lsn, at.idx - 1),
        "2000-01-01T00:00:00+01:00": START,
    }  # fmt: skip
    for to, position in places.items():
        assert _call(tmp_path, "rewind", "mail", "--to", to).exit_code == 0
        assert known.get("mail").rewind == position
    wrong = _call(tmp_path, "rewind", "mail", "--to", "yesterday")
    assert (wrong.exit_code, "expected beginning, end" in wrong.output) == (1, True)
    wrong = _call(tmp_path, "pause", "mial")
    assert wrong.exit_code == 1
    assert "There is no consumer 'mial'; did you mean mail?" in wrong.output


def test_the_command_pauses_a_consumer_of_http(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "penstock.yaml").write_text(f"store: {shop.store.url}\n")
    path = shop.consumer("workers")
    shop.publish("a")
    assert _call(tmp_path, "pause", "workers").exit_code == 0
    deadline = time.monotonic() + 30
    while (body := shop.client.get(path).json())["disabled"] is None:
        assert time.monotonic() < deadline
    assert body["status"]["state"] == "paused"
    assert body["disabled"].endswith(" paused it")
    waiting = Later(lambda: shop.client.get(f"{path}/next", params={"wait_for_ms": 60_000}))
    assert _call(tmp_path, "resume", "workers").exit_code == 0
    assert ids(waiting.result(90)) == ["a"]
