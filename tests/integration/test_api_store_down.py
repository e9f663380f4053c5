"""A store that goes away: the API answers 503 meanwhile, and goes on when it is back."""

from __future__ import annotations

from pathlib import Path

from tests.api_help import Shop, ids, problem, tokens
from tests.waits import Later, await_true

from penstock.embedded.postgres import EmbeddedPostgres

WAIT = {"batch_size": 10, "wait_for_ms": 20_000}


def test_a_store_that_is_killed_and_comes_back(server_dir: Path) -> None:
    folder = server_dir / "api-store"
    with EmbeddedPostgres(folder) as server:
        url = server.create_database("store").replace("postgres@", "postgres:hidden@")
        with Shop(url) as shop:
            path = shop.consumer()
            shop.publish(1, 2, 3)
            held = tokens(shop.client.get(f"{path}/next", params=WAIT))
            acked = shop.client.post(f"{path}/ack", json={"ack_tokens": held[:1]})
            assert acked.status_code == 200
            waiting = Later(lambda: shop.client.get(f"{path}/next", params=WAIT))
            shop.api.until_waiting(1)
            server.kill()
            problem(waiting.result(), 503)
            for answer in (
                shop.client.get(f"{path}/next"),
                shop.client.post(f"{path}/ack", json={"ack_tokens": held}),
                shop.client.get("/v1/streams"),
                shop.client.post("/v1/http-consumers", json={"name": "x", "stream": "events"}),
            ):
                body = problem(answer, 503)
                assert answer.headers["retry-after"] == "1"
                assert "hidden" not in body["detail"]
            server.start()
            two = {"ack_tokens": held[:2]}
            await_true(
                lambda: shop.client.post(f"{path}/ack", json=two).status_code != 503,
                what="the API works again once the store does",
            )
            left = shop.client.get(f"{path}/messages", params={"state": "delivered"}).json()["data"]
            assert [message["record"]["id"] for message in left] == [3]
            waiting = Later(lambda: shop.client.get(f"{path}/next", params=WAIT))
            shop.api.until_waiting(1)
            shop.store.close()
            shop.publish(4)
            assert ids(waiting.result()) == [4]
