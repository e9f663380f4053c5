"""Targets over HTTP: tests of their connections, and the webhooks that name them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import asyncssh
import pytest
from tests.api_help import TIMEOUT, Shop, problem
from tests.bastions import SshServer, public
from tests.streams_help import make_stream

from penstock.bastion.keys import fingerprint
from penstock.embedded.handles import Database
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.process import free_port

HEADERS = {"X-Key": "hush1"}


@pytest.fixture
def ssh() -> Iterator[SshServer]:
    with SshServer() as server:
        yield server


def put(shop: Shop, path: str, **spec: Any) -> None:
    answer = shop.client.put(path, json=spec)
    assert answer.status_code in (200, 201), answer.text


def behind(ssh: SshServer, **changed: Any) -> dict[str, Any]:
    of = ssh.bastion()
    given = {
        "host": of.host, "port": of.port, "user": of.user, "private_key": of.private_key,
        "host_key": of.host_key,
    }  # fmt: skip
    return given | changed


def test_a_nats_target_answers(shop: Shop, nats_server: EmbeddedNats) -> None:
    put(shop, "/v1/targets/near", type="nats", url=nats_server.url)
    answer = shop.client.post("/v1/targets/near/test")
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["type"], found["jetstream"], found["bastion"]) == ("nats", True, None)
    assert found["version"].startswith("2.")
    assert str(nats_server.port) in found["address"]
    target = shop.client.get("/v1/targets/near").json()
    assert shop.client.post(f"/v1/targets/{target['id']}/test").status_code == 200
    assert problem(shop.client.post("/v1/targets/none/test"), 404)


def test_an_http_target_answers(shop: Shop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        put(shop, "/v1/targets/near", type="http", url=f"{url}/in", headers=HEADERS)
        found = shop.client.post("/v1/targets/near/test").json()
        assert (found["type"], found["address"], found["version"]) == ("http", url, None)
        connection, _ = server.accept()
        with connection:
            assert connection.recv(100) == b"", "nothing is sent"
    refused = problem(shop.client.post("/v1/targets/near/test"), 424)
    assert refused["code"] == "connection_refused"
    assert "hush" not in str(refused)


def test_a_bastions_failure_is_distinguished_from_the_targets(
    shop: Shop, ssh: SshServer, nats_server: EmbeddedNats
) -> None:
    ssh.names["nats.internal", 4222] = ("127.0.0.1", nats_server.port or 0)
    far = {"type": "nats", "url": "nats://nats.internal:4222"}
    put(shop, "/v1/targets/far", **far, bastion=behind(ssh))
    found = shop.client.post("/v1/targets/far/test").json()
    assert found["bastion"] == f"penstock@127.0.0.1:{ssh.port}"
    closed = free_port()
    for status, code, changed in (
        (424, "bastion_host_key", {"bastion": behind(ssh, host_key=None)}),
        (424, "bastion_unreachable", {"bastion": behind(ssh, port=closed)}),
        (424, "unreachable", {"url": f"nats://127.0.0.1:{closed}"}),
        (424, "unreachable", {"type": "http", "url": f"https://127.0.0.1:{closed}"}),
    ):
        put(shop, "/v1/targets/far", **{**far, "bastion": behind(ssh), **changed})
        refused = problem(shop.client.post("/v1/targets/far/test"), status)
        assert refused["code"] == code, refused
        assert "PRIVATE" not in str(refused)


def test_a_source_and_its_bastion(shop: Shop, ssh: SshServer, database: Database) -> None:
    """The same shape: `code` names whose trouble it is."""
    login, _, rest = database.url.rpartition("@")
    where, _, name = rest.partition("/")
    host, _, port = where.partition(":")
    ssh.names["pg.internal", 5432] = (host, int(port))
    source = {"type": "postgres", "url": f"{login}@pg.internal:5432/{name}"}
    put(shop, "/v1/sources/far", **source, bastion=behind(ssh))
    assert shop.client.post("/v1/sources/far/test").json()["database"] == name
    put(shop, "/v1/sources/far", **source, bastion=behind(ssh, host_key=None))
    assert problem(shop.client.post("/v1/sources/far/test"), 424)["code"] == "bastion_host_key"
    put(
        shop,
        "/v1/sources/far",
        **{**source, "url": f"{login}@gone.internal:1/{name}"},
        bastion=behind(ssh),
    )
    assert problem(shop.client.post("/v1/sources/far/test"), 424)["code"] == "unreachable"


def test_a_bastions_keys_are_shown_and_trusted(
    shop: Shop, ssh: SshServer, nats_server: EmbeddedNats, database: Database
) -> None:
    """Of targets and sources alike: the key that Penstock makes is installed, the host key trusted."""
    own = {"host": "127.0.0.1", "port": ssh.port, "user": "penstock"}
    put(shop, "/v1/targets/far", type="nats", url=nats_server.url, bastion=own)
    put(shop, "/v1/sources/db", type="postgres", url=database.url, bastion=own)
    shown_key = public(ssh.host_key)
    for path in ("/v1/targets/far", "/v1/sources/db"):
        found = shop.client.get(f"{path}/bastion").json()
        assert (found["host_key"], found["pinned_by"]) == (None, None)
        assert found["public_key"].startswith("ssh-ed25519 ")
        assert shop.client.get(f"{path}/bastion").json() == found, "the same key each time"
        ssh.kill()
        ssh.user_key = asyncssh.import_public_key(found["public_key"])
        ssh.start()
        asked = shop.client.post(f"{path}/bastion/host-key").json()
        assert asked == {
            "host_key": shown_key, "fingerprint": fingerprint(shown_key), "trusted": False,
        }  # fmt: skip
        problem(
            shop.client.put(f"{path}/bastion/host-key", json={"host_key": "ssh-rsa x"}),
            422,
            "host_key",
        )
        pinned = shop.client.put(f"{path}/bastion/host-key", json={"host_key": shown_key}).json()
        assert (pinned["host_key"], pinned["pinned_by"]) == (shown_key, "store")
        assert shop.client.post(f"{path}/test").status_code == 200
        other = {"host_key": public(asyncssh.generate_private_key("ssh-ed25519"))}
        refused = problem(shop.client.put(f"{path}/bastion/host-key", json=other), 409)
        assert fingerprint(shown_key) in refused["detail"]
        body = {**other, "replace": True}
        assert shop.client.put(f"{path}/bastion/host-key", json=body).status_code == 200
        assert shop.client.post(f"{path}/bastion/host-key").json()["trusted"] is False
    own["host_key"] = shown_key
    put(shop, "/v1/targets/far", type="nats", url=nats_server.url, bastion=own)
    assert shop.client.get("/v1/targets/far/bastion").json()["pinned_by"] == "configuration"
    problem(shop.client.put("/v1/targets/far/bastion/host-key", json=other), 409)
    put(shop, "/v1/targets/near", type="nats", url=nats_server.url)
    problem(shop.client.get("/v1/targets/near/bastion"), 404)
    problem(shop.client.get("/v1/targets/none/bastion"), 404)


def test_what_uses_a_target(shop: Shop, database: Database) -> None:
    put(shop, "/v1/sources/shop", type="postgres", url=database.url)
    put(shop, "/v1/targets/cluster", type="nats", url="nats://n:4222")
    put(shop, "/v1/targets/idle", type="nats", url="nats://n:4222")
    for name in ("a", "b"):
        put(shop, f"/v1/sinks/{name}", type="nats", source="shop", target="cluster")
    targets = shop.client.get("/v1/targets").json()["data"]
    assert [(t["name"], t["sinks"], t["consumers"]) for t in targets] == [
        ("cluster", 2, 0), ("idle", 0, 0)
    ]  # fmt: skip
    first = shop.client.get("/v1/targets/cluster/uses", params={"limit": 1}).json()
    assert first["data"] == [{"kind": "sink", "name": "a", "type": "nats"}]
    rest = shop.client.get("/v1/targets/cluster/uses", params={"cursor": first["next"]}).json()
    assert rest == {"data": [{"kind": "sink", "name": "b", "type": "nats"}], "next": None}
    problem(shop.client.get("/v1/targets/none/uses"), 404)


# Webhooks


def settings(database: Database, name: str) -> dict[str, Any]:
    ((found,),) = database.execute(
        "SELECT settings FROM penstock.consumers WHERE name = %s", [name]
    )
    return dict(found)


def test_a_webhook_names_a_target(shop: Shop, database: Database) -> None:
    put(shop, "/v1/targets/crm", type="http", url="https://crm.example/base/", headers=HEADERS)
    made = shop.client.post(
        "/v1/http-consumers",
        json={"name": "hook", "stream": "events", "type": "webhook", "target": "crm", "path": "/in",
              "headers": {"X-Own": "o"}},
    )  # fmt: skip
    assert made.status_code == 201, made.text
    assert (made.json()["url"], made.json()["target"]) == ("https://crm.example/base/in", "crm")
    assert "hush1" not in made.text
    assert settings(database, "hook")["headers"] == {"X-Key": "hush1", "X-Own": "o"}
    entity = shop.client.get("/v1/consumers/hook").json()["spec"]
    assert (entity["target"], entity["path"], "url" in entity) == ("crm", "/in", False)
    assert list(entity["headers"]) == ["X-Own"], "the target's are its own"
    # Its other settings change, and the target's part stays.
    changed = shop.client.patch("/v1/http-consumers/hook", json={"headers": {"X-Own": "p"}})
    assert changed.status_code == 200, changed.text
    assert settings(database, "hook")["headers"] == {"X-Key": "hush1", "X-Own": "p"}
    # A changed target changes its webhooks; it can't go before them.
    put(
        shop,
        "/v1/targets/crm",
        type="http",
        url="https://other.example",
        headers={"X-Key": "hush2"},
    )
    assert settings(database, "hook")["url"] == "https://other.example/in"
    problem(shop.client.delete("/v1/targets/crm"), 409)
    own = shop.client.patch(
        "/v1/http-consumers/hook", json={"target": None, "path": None, "url": "https://own.example"}
    )
    assert (own.json()["url"], own.json()["target"]) == ("https://own.example", None)
    assert settings(database, "hook")["headers"] == {"X-Own": "p"}
    assert shop.client.delete("/v1/targets/crm").status_code == 200


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"target": "none"}, "target"),
        ({"target": "cluster"}, "target"),
        ({"target": "crm", "url": "https://x.example"}, "body"),
        ({"path": "/in", "url": "https://x.example"}, "body"),
        ({"target": "crm", "path": "in"}, "path"),
        ({}, "body"),
        ({"via": {"name": "crm"}, "url": "https://x.example"}, "via"),
    ],
)
def test_a_target_that_is_refused(shop: Shop, keys: dict[str, Any], field: str) -> None:
    put(shop, "/v1/targets/crm", type="http", url="https://crm.example")
    put(shop, "/v1/targets/cluster", type="nats", url="nats://n:4222")
    body = {"name": "hook", "stream": "events", "type": "webhook", **keys}
    problem(shop.client.post("/v1/http-consumers", json=body), 422, field)
    assert shop.client.get("/v1/http-consumers/hook").status_code == 404


def test_keys_that_no_patch_changes(shop: Shop) -> None:
    make_stream(shop.store, "others")
    shop.consumer("pulled")
    for key, value in (("stream", "others"), ("type", "webhook"), ("target", "crm")):
        problem(shop.client.patch("/v1/http-consumers/pulled", json={key: value}), 422, key)
