"""`penstock run` without a file, or with an empty one, runs what the API has configured."""

from __future__ import annotations

from pathlib import Path

from penstock.embedded.handles import Database

from ..cli import run
from ..pipeline import Penstock
from .api import Api


def test_a_configuration_that_only_the_api_made(tmp_path: Path, database: Database) -> None:
    database.execute("CREATE TABLE items (id bigint PRIMARY KEY)")
    with Penstock(tmp_path) as pipeline:
        pipeline.start().wait_ready()  # without a file
        token = run(tmp_path, "token create ops --role admin").split()[-1]
        api = Api(pipeline, token)
        api("PUT", "/v1/sources/shop", {"type": "postgres", "url": f"{database.url}_missing"})
        api("PUT", "/v1/sinks/events", {"type": "stream", "source": "shop"})
        pipeline.wait_for(lambda: "source shop" in failing(pipeline), 60, "failing")
        assert pipeline.stop() == 1
        (tmp_path / "penstock.yaml").write_text("# Everything is in the store.\n")
        pipeline.start()
        # A source that can't be run does not end the process whose API corrects it.
        pipeline.wait_for(lambda: "source shop" in failing(pipeline), 60, "failing")
        api("PATCH", "/v1/sources/shop", {"url": database.url})
        api("PUT", "/v1/consumers/work", {"type": "pull", "stream": "events"})
        pipeline.wait_ready()
        assert received(pipeline, api, database, 1, 2) == [1, 2]
        # The settings of a stream's own group are its sink's, and the store's alone: no run is replaced.
        assert len(in_flight(api, 10)) == 2
        replaced = changes_of_runs(pipeline)
        api("PATCH", "/v1/sinks/events", {"max_ack_pending": 3, "ack_wait_ms": 600_000})
        group = api("GET", "/v1/http-consumers/events")
        assert (group["max_ack_pending"], group["ack_wait_ms"]) == (3, 600_000)
        more = {"type": "pull", "stream": "events"}
        api("PUT", "/v1/consumers/more", more)  # nor by pull consumers
        api("PATCH", "/v1/consumers/more", {"max_deliver": 3})
        api("DELETE", "/v1/consumers/more")
        assert received(pipeline, api, database, 3, 4, 5) == [3, 4, 5]
        assert changes_of_runs(pipeline) == replaced
        assert in_flight(api, 10) == [3]
        assert in_flight(api, 10) == []
        assert "  shop:\n    type: postgres\n" in run(tmp_path, "export")
        assert pipeline.stop() == 0


def changes_of_runs(pipeline: Penstock) -> int:
    return sum(event["event"] == "the desired state changed" for event in pipeline.events())


def in_flight(api: Api, count: int) -> list[int]:
    """Receive of the stream's own group without an ack; return the ids."""
    path = f"/v1/streams/events/receive?batch_size={count}&wait_for_ms=500"
    return [message["data"]["record"]["id"] for message in api("GET", path)["data"]]


def received(pipeline: Penstock, api: Api, database: Database, *ids: int) -> list[int]:
    """Insert rows, and return those that the worker gets."""
    for row in ids:
        database.execute("INSERT INTO items VALUES (%s)", [row])
    found: list[int] = []

    def all_came() -> bool:
        found.extend(message["record"]["id"] for message in api.receive("work"))
        return len(found) >= len(ids)

    pipeline.wait_for(all_came, 60, "received")
    return found


def failing(pipeline: Penstock) -> set[str]:
    return {problem["subject"] for problem in pipeline.status().get("problems", [])}
