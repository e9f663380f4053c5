"""Reading requests and writing answers without what FastAPI does for both: JSON bytes go through."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any, Final
from urllib.parse import parse_qsl

import orjson
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from penstock.api.problems import Problem, not_json, wrong

_CONTENT_TYPE: Final = (b"content-type", b"application/json")
_NO_STORE: Final = (b"cache-control", b"no-store")
_SHOWN: Final = 40  # characters of a wrong value that an answer repeats


class BytesRoute(APIRoute):
    """A route whose endpoint takes the request and returns the answer, with nothing in between.

    Dependencies and models in its declaration only document it.
    """

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]  # FastAPI's is a coroutine function
        """Return the endpoint itself."""
        endpoint: Callable[[Request], Awaitable[Response]] = self.endpoint
        return endpoint


class Json(Response):
    """An answer of JSON bytes that no cache keeps."""

    def __init__(self, body: bytes) -> None:
        self.status_code = 200
        self.body = body
        self.background = None
        self.raw_headers = [_CONTENT_TYPE, _NO_STORE, (b"content-length", b"%d" % len(body))]


SUCCESS: Final = b'{"success":true}'


def json_answer(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer of what orjson can write."""
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def query(request: Request, fields: Mapping[str, tuple[int, int, int]]) -> dict[str, int]:
    """Return the query's whole numbers; `fields` has the least, greatest and default of each."""
    values = {name: field[2] for name, field in fields.items()}
    text = request.scope["query_string"]
    if not text:
        return values
    given = set()
    for name, value in parse_qsl(text.decode("latin-1"), keep_blank_values=True):
        if name not in fields:
            raise wrong(_short(name), f"there is no such parameter, only {', '.join(fields)}")
        if name in given:
            raise wrong(name, "given more than once")
        given.add(name)
        number = int(value) if value.isascii() and value.isdigit() and len(value) < 12 else None
        values[name] = within(name, value if number is None else number, *fields[name][:2])
    return values


async def read_object(request: Request) -> dict[str, Any]:
    """Return the body, which must be a JSON object."""
    content = await request.body()
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        raise not_json() from None
    if not isinstance(body, dict):
        raise Problem(422, "The body is not a JSON object.", [("body", "expected an object")])
    return body


def within(name: str, value: object, least: int, most: int) -> int:
    """Return `value` if it is a whole number from `least` to `most`, or raise `Problem`."""
    if type(value) is float and value.is_integer():
        value = int(value)  # 5.0 is a whole number in JSON
    if type(value) is not int or not least <= value <= most:
        raise wrong(name, f"{_short(repr(value))} is not a whole number from {least} to {most}")
    return value


def known(body: Mapping[str, object], *names: str) -> None:
    """Raise `Problem` where the body has another field than these."""
    for name in body:
        if name not in names:
            raise wrong(_short(name), f"there is no such field, only {', '.join(names)}")


def body_of(model: type[BaseModel] | dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    """Return OpenAPI's description of a body that is read by hand."""
    schema = model if isinstance(model, dict) else inline(model)
    return {
        "requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}
    }


@cache
def inline(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's JSON schema with nothing outside of it that it refers to, not to be changed."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolve(part: Any) -> Any:
        if isinstance(part, list):
            return [resolve(member) for member in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            rest = {key: value for key, value in part.items() if key != "$ref"}
            return {**resolve(definitions[part["$ref"].rpartition("/")[2]]), **rest}
        return {key: resolve(value) for key, value in part.items()}

    resolved: dict[str, Any] = resolve(schema)
    return resolved


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
