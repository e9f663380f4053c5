"""What OpenAPI says of every operation: pages, problems, ETags, summaries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute

from penstock.api.app import Api
from penstock.cli.api_tools import ApiTools

BOUNDED = {
    # A table's columns: Postgres has 1,600 at most.
    "/v1/sources/{source}/tables/{table}/columns",
    # What workers take, and a look at what they would: the newest, never a list to its end.
    "/v1/http-consumers/{consumer}/next", "/v1/consumers/{consumer}/receive",
    "/v1/streams/{stream}/receive", "/v1/http-consumers/{consumer}/messages",
}  # fmt: skip
EXPECTED = {
    *(
        f"/v1/{noun}"
        for noun in (
            "sources", "sinks", "streams", "consumers", "http-consumers", "nats-consumers", "targets",
            "backfills", "tokens", "dead-letters", "audit", "plan", "apply", "export", "check",
            "streams/{stream}/messages", "targets/{target}/test",
            "targets/{target}/uses",
        )
    ),
    *(
        f"/v1/sources/{{source}}/{of}"
        for of in ("tables", "tables/{table}/columns", "slots", "test", "check")
    ),
    *(
        f"/v1/{of}/bastion{rest}"
        for of in ("targets/{target}", "sources/{source}")
        for rest in ("", "/host-key")
    ),
    *(f"/v1/consumers/{{consumer}}/{verb}" for verb in ("receive", "ack", "nack")),
}  # fmt: skip


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return Api("postgresql://nobody@127.0.0.1:1/none", tools=ApiTools()).openapi()


def operations(schema: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, of in schema["paths"].items():
        for method, operation in of.items():
            yield path, method, operation


def answer(schema: dict[str, Any], operation: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of what is answered where all is well."""
    good = next(body for code, body in operation["responses"].items() if code.startswith("2"))
    found: dict[str, Any] = good["content"].get("application/json", {}).get("schema", {})
    while "$ref" in found:
        found = schema["components"]["schemas"][found["$ref"].rpartition("/")[2]]
    return found


def names(operation: dict[str, Any], where: str) -> list[str]:
    return [each["name"] for each in operation.get("parameters", ()) if each["in"] == where]


def test_all_of_it_is_there(schema: dict[str, Any]) -> None:
    assert EXPECTED - set(schema["paths"]) == set()


def test_routes_are_made_once_a_process() -> None:
    one, other = (
        Api("postgresql://nobody@127.0.0.1:1/none", tools=tools) for tools in (ApiTools(), None)
    )
    made = {id(route): route for route in one.routes if isinstance(route, APIRoute)}
    shared = {id(route) for route in other.routes if isinstance(route, APIRoute)}
    assert len(shared) > 100
    assert {made[lacking].path for lacking in made.keys() - shared} == {
        "/v1/check", "/v1/sources/{source}/check", "/v1/try-sink",
        "/v1/sources/{source}/next-changes",
    }  # fmt: skip
    assert shared < made.keys()


def test_lists_come_by_pages(schema: dict[str, Any]) -> None:
    lists = {
        path: operation
        for path, method, operation in operations(schema)
        if method == "get" and "data" in answer(schema, operation).get("properties", {})
    }
    assert lists.keys() >= BOUNDED
    for path, operation in lists.items():
        paged = {"limit", "cursor"} <= set(names(operation, "query"))
        assert paged == (path not in BOUNDED), path
        assert ("next" in answer(schema, operation)["properties"]) == paged, path


def test_every_failure_is_a_problem(schema: dict[str, Any]) -> None:
    for path, method, operation in operations(schema):
        failures = {c: of for c, of in operation["responses"].items() if c.startswith(("4", "5"))}
        assert failures.keys() >= {"400", "401", "403", "404", "422", "503"}, (method, path)
        for code, of in failures.items():
            assert list(of["content"]) == ["application/problem+json"], (method, path, code)


def test_changes_of_entities_take_an_etag(schema: dict[str, Any]) -> None:
    changed = 0
    for path, method, operation in operations(schema):
        entity = path.startswith(
            (
                "/v1/sources/{",
                "/v1/sinks/{",
                "/v1/targets/{",
                "/v1/consumers/{",
                "/v1/http-consumers/{",
            )
        )
        if entity and path.endswith("}") and method in ("put", "patch", "delete"):
            changed += 1
            assert "If-Match" in names(operation, "header"), (method, path)
            assert "412" in operation["responses"], (method, path)
    assert changed == 14


def test_every_operation_is_described(schema: dict[str, Any]) -> None:
    found = [operation["summary"] for _, _, operation in operations(schema)]
    assert all(found)
    ids = [operation["operationId"] for _, _, operation in operations(schema)]
    assert len(ids) == len(set(ids))
