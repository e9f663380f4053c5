"""The Management API's pause of sinks, and the command beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.api_help import Shop, known, problem
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.embedded.handles import Database
from penstock.streams.pauses import paused_sinks

SOURCE = {"type": "postgres", "url": "postgresql://db.invalid/shop", "slot": "shop"}
SINK = {"type": "nats", "source": "shop", "url": "nats://here:4222"}


@pytest.fixture
def shop(database: Database) -> Iterator[Shop]:
    with Shop(database.url) as shop:
        shop.client.put("/v1/sources/shop", json=SOURCE).raise_for_status()
        shop.client.put("/v1/sinks/orders", json=SINK).raise_for_status()
        stream = {"type": "stream", "source": "shop"}
        shop.client.put("/v1/sinks/events", json=stream).raise_for_status()
        yield shop


def test_a_sink_is_paused_and_resumed(shop: Shop) -> None:
    path = "/v1/sinks/orders"
    made = shop.client.get(path).json()
    assert made["paused"] is None
    for _ in range(2):
        assert shop.client.post(f"{path}/pause").json() == {"success": True}
    assert paused_sinks(shop.store) == {("shop", "orders"): "admin"}
    assert shop.client.get(path).json() == {**made, "paused": "admin"}
    listed = shop.client.get("/v1/sinks").json()["data"]
    assert [(each["name"], each["paused"]) for each in listed] == [
        ("events", None),
        ("orders", "admin"),
    ]
    for _ in range(2):
        assert shop.client.post(f"/v1/sinks/{made['id']}/resume").json() == {"success": True}
    assert shop.client.get(path).json() == made
    with shop.api.as_bearer(shop.store.tokens.create("looks", "viewer")) as viewer:
        problem(known(viewer).post(f"{path}/pause"), 403)


def test_what_is_wrong(shop: Shop) -> None:
    for action in ("pause", "resume"):
        missing = problem(shop.client.post(f"/v1/sinks/order/{action}"), 404)
        assert "did you mean orders?" in missing["detail"]
        refused = problem(shop.client.post(f"/v1/sinks/events/{action}"), 409)
        assert "penstock consumer pause CONSUMER" in refused["detail"]
    assert paused_sinks(shop.store) == {}


def test_by_the_command(shop: Shop) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["sink", *arguments, "--store", shop.store.url])
        return result.exit_code, result.output

    assert run("pause", "orders") == (0, "Paused orders. The run does so within seconds.\n")
    (who,) = paused_sinks(shop.store).values()
    assert who
    code, text = run("pause", "events")
    assert (code, text.startswith("Sink events is a stream")) == (1, True)
    code, text = run("resume", "order")
    assert (code, "did you mean orders?" in text) == (1, True)
    assert run("resume", "orders") == (0, "Resumed orders. The run does so within seconds.\n")
    assert paused_sinks(shop.store) == {}
