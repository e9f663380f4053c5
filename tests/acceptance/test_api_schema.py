"""What OpenAPI says and what the API does are the same, whatever is sent: schemathesis."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import schemathesis
from schemathesis import Case, HookContext, engine
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events
from tests.api_help import Shop, tokens
from tests.bastions import SshServer, public
from tests.loopback_api import Answer, LoopbackApi

from penstock.cli.api_tools import ApiTools
from penstock.config.models import SECTIONS
from penstock.embedded.handles import Database
from penstock.streams.nats_consumers import NatsConsumers

_MAX_WAIT = 5  # milliseconds that a receive may wait here
# What a JSON schema can't say: which strings are URLs, tables, secrets, and which settings are whose.
_THERE: dict[str, Any] = {
    "consumer": "workers", "stream": "orders", "source": "shop", "sink": "orders",
    "provider": "mine", "credential": "key", "sync": "copy", "target": "far",
}  # fmt: skip
_THERE_AT: dict[str, dict[str, Any]] = {
    "/v1/nats-consumers/": {"consumer": "mail"},
    "/v1/backfills/": {"id": 1},
    "/v1/dead-letters/": {"id": 1},
}
"""The same below some paths."""
_IDS: set[str] = set()
"""The ids of these."""
PROVIDER = {
    "type": "rest",
    "allow_private": True,
    "paginator": {"type": "single_page"},
    "collections": {"things": {"path": "things"}},
}
NOWHERE = "nats://127.0.0.1:1"
BASTION = {"host": "127.0.0.1", "port": 1, "user": "penstock"}
_SETTINGS = {
    "positive_data_acceptance": {
        "expected-statuses": ["2xx", "404", "409", "412", "422", "424", "428"]
    }
}
# Those of schemathesis, and that of a query too long for a request's head.
_REFUSED = (
    "400", "401", "403", "404", "405", "406", "409", "415", "422", "424", "428", "429", "431",
)  # fmt: skip

_LISTS = (
    "tokens",
    "backfills",
    "dead-letters",
    "streams",
    "http-consumers",
    "nats-consumers",
    "audit",
    "collections",
    "records",
    "events",
    *SECTIONS.values(),
)
_BY_HAND = (
    *(f"GET /v1/{name}" for name in _LISTS),
    "GET /v1/sources/{source}/tables",
    "GET /v1/sources/{source}/slots",
    "POST /v1/http-consumers",
    "PATCH /v1/http-consumers/{consumer}",
    "GET /v1/http-consumers/{consumer}/dead-letters",
    *(
        f"{method} /v1/{kind}s/{{{kind}}}"
        for kind in SECTIONS
        for method in ("PUT", "PATCH", "DELETE")
    ),
    "GET /v1/streams/{stream}/messages",
    "GET /v1/streams/{stream}/messages/{position}",
    "GET /v1/dead-letter-causes",
    "GET /v1/targets/{target}/uses",
    "POST /v1/targets/{target}/test",
    "POST /v1/targets/{target}/bastion/host-key",
    *(f"PUT /v1/{kind}s/{{{kind}}}/bastion/host-key" for kind in ("source", "target")),
    "POST /v1/try-sink",
    "POST /v1/sources/{source}/next-changes",
    "POST /v1/streams/{stream}/try-filters",
    "POST /v1/plan",
    "POST /v1/apply",
    "POST /v1/test-source",
    "POST /v1/tokens",
    "POST /v1/backfills",
    "POST /v1/replay-dead-letters",
    "POST /v1/drop-dead-letters",
    "POST /v1/purge-records",
    *(f"POST /v1/syncs/{{sync}}/{action}" for action in ("run", "backfill", "resume")),
)


def _there(path: str) -> dict[str, Any]:
    """Return what is there for the parts of a path."""
    return _THERE | _THERE_AT.get(path.rpartition("{")[0], {})


@schemathesis.hook
def before_call(_: HookContext, case: Case[Any], kwargs: dict[str, Any]) -> None:
    """Let half of what is sent be about something that is there, and nothing wait."""
    if case.path_parameters.get("name") == "admin":
        case.path_parameters["name"] = "nobody"  # the token that all of this is asked with
    for name, there in _there(case.operation.path).items():
        given = case.path_parameters.get(name)
        if case.method == "DELETE" and name != "id":
            # A test of several steps deletes what it has put: with it the stream would be gone.
            if given in (there, *_IDS):
                case.path_parameters[name] = "nobody"
        elif (isinstance(given, str) and len(given) % 2) or (isinstance(given, int) and given % 2):
            case.path_parameters[name] = there
    for place in (case.query, case.body):
        if isinstance(place, dict) and "wait_for_ms" in place:
            with contextlib.suppress(ValueError, OverflowError):
                wait = int(float(str(place["wait_for_ms"])))
                if _MAX_WAIT < wait <= 300_000:
                    place["wait_for_ms"] = _MAX_WAIT


@pytest.fixture
def shop(database: Database) -> Iterator[Shop]:
    """An API with something of every kind, on a database with a table; no run is there."""
    with (
        LoopbackApi(lambda _: Answer(body=b"[]")) as api,
        Shop(database.url, ApiTools(), "orders") as shop,
    ):
        shop.consumer("workers", max_deliver=3, ack_wait_ms=100)
        shop.publish(*range(50))
        for path, spec in (
            ("sources/shop", {"type": "postgres", "url": database.url}),
            ("sinks/orders", {"type": "stream", "source": "shop"}),
            ("providers/mine", {**PROVIDER, "base_url": api.url}),
            ("credentials/key", {"provider": "mine", "properties": {"api_key": "k"}}),
            ("syncs/copy", {"provider": "mine", "collections": ["things"], "credential": "key"}),
            ("targets/far", {"type": "nats", "url": NOWHERE, "bastion": BASTION}),
            ("consumers/mail", {"type": "nats", "stream": "orders", "target": "far"}),
        ):
            assert shop.client.put(f"/v1/{path}", json=spec).status_code == 201
        NatsConsumers(shop.store).register(shop.stream, "mail", {"url": NOWHERE}, "all")
        _make_a_dead_letter(shop)
        database.execute("CREATE TABLE things (id int PRIMARY KEY)")
        asked = {"sink": "orders", "table": "public.things"}
        assert shop.client.post("/v1/backfills", json=asked).json()["data"][0]["id"] == 1
        yield shop


def test_every_operation(shop: Shop) -> None:
    for path in (
        "sources/shop", "sinks/orders", "consumers/workers", "syncs/copy", "targets/far",
        "consumers/mail",
    ):  # fmt: skip
        _IDS.add(shop.client.get(f"/v1/{path}").json()["id"])
    by_hand = f"^(?:{'|'.join(map(re.escape, _BY_HAND))})$"
    config = SchemathesisConfig.from_dict(
        {
            "seed": 1,
            "generation": {"deterministic": True, "max-examples": 8, "no-shrink": True},
            "checks": {"negative_data_rejection": {"expected-statuses": list(_REFUSED)}},
            # One filter for all of them, as each filter is asked for each value that is drawn.
            "operations": [{"include-name-regex": by_hand, "checks": _SETTINGS}],
            "headers": {"Authorization": f"Bearer {shop.token}"},
        }
    )
    schema = schemathesis.openapi.from_url(f"http://{shop.api.address}/openapi.json", config=config)
    wrong, seen, operations = _run(schema)
    assert not wrong, "\n".join(wrong)
    paths = shop.client.get("/openapi.json").json()["paths"].items()
    labels = {f"{method.upper()} {path}" for path, each in paths for method in each}
    assert not labels - operations
    assert set(seen) >= {200, 201, 400, 401, 404, 405, 409, 422, 424}, seen
    assert max(seen) < 500, seen
    assert shop.client.get("/v1/streams/orders").status_code == 200


def test_every_get_takes_a_name_and_an_id(shop: Shop) -> None:
    (message,) = shop.client.get("/v1/streams/orders/messages?limit=1").json()["data"]
    position = message["position"]
    parts = {"table": "public.things", "position": f"{position['lsn']}:{position['idx']}"}
    seen = set()
    for path, methods in shop.client.get("/openapi.json").json()["paths"].items():
        kinds = [kind for kind in _THERE if f"{{{kind}}}" in path]
        if "get" not in methods or not kinds:
            continue
        (kind,) = kinds
        name = _there(path)[kind]
        id_ = shop.client.get(f"/v1/{kind}s/{name}").json()["id"]
        assert str(uuid.UUID(id_)) == id_
        answers = [shop.client.get(path.format(**parts, **{kind: each})) for each in (name, id_)]
        status = 404 if path == "/v1/sources/{source}/bastion" else 200  # it has none
        assert [answer.status_code for answer in answers] == [status, status], path
        by_name, by_id = [answer.json() for answer in answers]
        # Lags differ, and each receive takes another message.
        assert by_name.keys() == by_id.keys(), path
        for key in ("id", "name"):
            assert by_name.get(key) == by_id.get(key), path
        seen.add(kind)
    assert seen == set(_THERE)


_CHANGES: dict[str, dict[str, Any]] = {
    "source": {"slot": "other"}, "sink": {"max_waiting": 7}, "consumer": {"max_waiting": 7},
    "target": {"url": "nats://127.0.0.1:2"}, "provider": {"base_url": "http://127.0.0.1:2"},
    "credential": {"properties": {"api_key": "other"}}, "sync": {"status": "disabled"},
}  # fmt: skip
"""A change of what is there, by kind."""
_BODIES: dict[str, Any] = {
    "rewind": {"to": "all"},
    "next-changes": {"limit": 1, "wait_for_ms": 100},
    "try-filters": {"filters": {}, "messages": [{"record": {"id": 1}}]},
}
_VARIES = {"data", "info", "status", "milliseconds"}
"""What differs from one receive to the next, or in time."""
_PATHS = {f"/v1/{section}/{{{kind}}}" for kind, section in SECTIONS.items()}
"""Those of the entities, where a dry run is possible."""


def test_every_change_and_action_takes_a_name_and_an_id(shop: Shop) -> None:
    """Each is asked by name, by id, and by an id that nothing has: 404, and nothing is made."""
    with SshServer() as ssh:
        bastion = {"host": "127.0.0.1", "port": ssh.port, "user": "penstock"}
        behind = {"type": "postgres", "url": "postgresql://shop@db.internal/shop"}
        for method, path, spec in (
            ("PUT", "sources/behind", {**behind, "bastion": bastion}),
            ("PUT", "sinks/out", {"type": "nats", "source": "shop", "url": NOWHERE}),
            ("PATCH", "targets/far", {"bastion": bastion}),
        ):
            shop.client.request(method, f"/v1/{path}", json=spec).raise_for_status()
        there, lines = _names(shop), len(_audit(shop))
        bodies = {**_BODIES, "host-key": {"host_key": public(ssh.host_key)}}
        seen = set()
        for path, methods in shop.client.get("/openapi.json").json()["paths"].items():
            for kind in (kind for kind in _THERE if f"{{{kind}}}" in path):
                for method in methods:
                    # A consumer of http-consumers has no dry run: it is deleted below.
                    if method != "get" and (method != "delete" or path in _PATHS):
                        _ask(shop, method, path, kind, bodies)
                        seen.add(kind)
    assert seen == set(_THERE)
    assert _names(shop) == there
    done = _audit(shop)[lines:]
    assert len(done) > 20
    assert done[::2] == done[1::2], "what was done by name, and by id"
    for path, name in (
        ("http-consumers", "workers"), ("consumers", "mail"), ("sinks", "orders"), ("sinks", "out"),
        ("sources", "shop"), ("targets", "far"), ("syncs", "copy"), ("credentials", "key"),
        ("providers", "mine"),
    ):  # fmt: skip
        id_ = shop.client.get(f"/v1/{path}/{name}").json()["id"]
        assert shop.client.delete(f"/v1/{path}/{id_}").status_code == 200
        assert shop.client.get(f"/v1/{path}/{name}").status_code == 404


def _ask(shop: Shop, method: str, path: str, kind: str, bodies: Mapping[str, Any]) -> None:
    name = _there(path)[kind]
    if path.startswith("/v1/sinks/{sink}/"):
        name = "out"  # a stream is not paused
    elif path.startswith("/v1/sources/{source}/bastion"):
        name = "behind"
    entity = shop.client.get(f"/v1/{kind}s/{name}").json()
    last = path.rpartition("/")[2]
    body = bodies.get(last)
    if method in ("put", "patch") and body is None:
        changes = _CHANGES[kind] if path in _PATHS else {"max_deliver": 4}
        body = changes if method == "patch" else entity["spec"] | changes
    elif last in ("ack", "nack", "extend"):
        body = {"ack_ids" if kind == "stream" else "ack_tokens": []}
    unknown = str(uuid.uuid4())
    answers = [
        shop.client.request(
            method, path.format(**{"id": 1, kind: each}), json=body,
            params={"dry_run": True} if path in _PATHS and each != unknown else None,
        )
        for each in (name, entity["id"], unknown)
    ]  # fmt: skip
    by_name, by_id = [answer.json() for answer in answers[:2]]
    status = answers[0].status_code
    assert [answer.status_code for answer in answers] == [status, status, 404], (method, path)
    # Others need it; its bastion or what is behind it is not there.
    assert status == 200 or (name in str(by_name) and status in (409, 424)), by_name
    assert by_name.keys() == by_id.keys(), path
    for key in by_name.keys() - _VARIES:
        assert by_name[key] == by_id[key], (method, path)
    if path in _PATHS and status == 200:
        assert by_id["entity"]["id"] == entity["id"]
        assert by_id["action"] == ("delete" if method == "delete" else "update")


def _names(shop: Shop) -> dict[str, list[str]]:
    """Return the names of all that is there."""
    return {
        of: [each["name"] for each in shop.client.get(f"/v1/{of}").json()["data"]]
        for of in (*SECTIONS.values(), "http-consumers", "nats-consumers", "streams")
    }


def _audit(shop: Shop) -> list[tuple[str, str, str]]:
    """Return what was done, the oldest first."""
    found = shop.client.get("/v1/audit?limit=1000").json()["data"]
    return [(line["kind"], line["name"], line["action"]) for line in reversed(found)]


def _make_a_dead_letter(shop: Shop) -> None:
    path = "/v1/consumers/workers"
    for _ in range(3):
        got = shop.client.post(f"{path}/receive", json={"wait_for_ms": 20_000})
        assert shop.client.post(f"{path}/nack", json={"ack_tokens": tokens(got)}).status_code == 200
    assert len(shop.client.get("/v1/dead-letters").json()["data"]) == 1


def _run(schema: schemathesis.BaseSchema) -> tuple[list[str], Counter[int], set[str]]:
    """Return what went wrong, how often each status was answered, and which operations were called."""
    wrong: dict[str, str] = {}
    operations: set[str] = set()
    seen: Counter[int] = Counter()
    for event in engine.from_schema(schema).execute():
        if isinstance(event, events.NonFatalError):
            wrong[event.label] = f"{event.label}: {event.value}"
        elif isinstance(event, events.FatalError):
            raise event.exception
        elif isinstance(event, events.ScenarioFinished):
            operations.add(event.recorder.label)
            for key, checks in event.recorder.checks.items():
                interaction = event.recorder.interactions[key]
                if interaction.response is not None:
                    seen[interaction.response.status_code] += 1
                for check in checks:
                    if check.failure_info is not None:
                        failure = check.failure_info.failure
                        wrong.setdefault(
                            f"{event.recorder.label} {check.name}",
                            f"{event.recorder.label}: {failure}\n{check.failure_info.code_sample}",
                        )
    return list(wrong.values()), seen, operations
