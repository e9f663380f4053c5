"""The API's errors: `application/problem+json` (RFC 9457)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import orjson
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.routing import Route

from penstock.config.explain import message_of
from penstock.core.errors import (
    BastionError,
    CaptureError,
    ConfigError,
    PenstockError,
    SinkError,
    StoreError,
    TargetError,
)
from penstock.streams.consumers.types import (
    ConsumerError,
    NameTaken,
    Refused,
    StoreUnavailable,
    TooManyWaiting,
    UnknownConsumer,
    UnknownDeadLetter,
    UnknownStream,
    WrongSetting,
)
from penstock.syncs.errors import SyncError

_STATUS: Final[dict[type[ConsumerError], int]] = {
    UnknownConsumer: 404,
    UnknownDeadLetter: 404,
    UnknownStream: 404,
    WrongSetting: 422,
    NameTaken: 409,
    Refused: 409,
    TooManyWaiting: 429,
    StoreUnavailable: 503,
}
# Of the store's errors those that are no failure of the store; all others are a 503.
_STORE_STATUS: Final = {
    "name_taken": 409,
    "too_many_at_once": 422,
    "backfill_exists": 409,
    "backfill_state": 409,
    "no_backfill": 404,
    "no_stream": 409,
    "source_changed": 409,
    "kind_changed": 409,
}
_AT_FAULT: Final = frozenset(
    {"unknown_table", "no_table", "no_primary_key", "no_sort_by", "refused"}
)
"""What a source's server refuses because of the request."""
_MISCONFIGURED: Final = frozenset({"credential", "connector"})
"""Where a sync's configuration is at fault, and not the API that it reads."""
_UNPREPARED: Final = frozenset({"publication_missing", "slots_exhausted"})
"""What a source's server lacks: it answers, and the request is in order."""
AWAY: Final = 424
"""The status where a server outside does not answer, or refuses: the API itself has not failed."""
_MEDIA_TYPE: Final = "application/problem+json"
# Where FastAPI and pydantic found an error, which is no part of the field's name.
_PLACES: Final = frozenset({"body", "query", "path", "pull", "webhook"})

log = structlog.get_logger("penstock.api")


class FieldError(BaseModel):
    """What is wrong with one field."""

    field: str
    message: str


class ProblemBody(BaseModel):
    """An error's answer, as OpenAPI has it."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[FieldError] = Field(description="The fields at fault, if any.")
    code: str | None = Field(
        None, description="A stable word for what went wrong at the store, a source or a target."
    )
    position: int | None = Field(
        None, description="Where in an expression it is wrong, in characters from 1."
    )


class Problem(Exception):  # noqa: N818 - the standard's word
    """Ends a request with this answer.

    `errors` are pairs of a field and what is wrong with it; `more` are members beside the
    standard's own.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        errors: Iterable[tuple[str, str]] = (),
        *,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.errors = [{"field": field, "message": message} for field, message in errors]
        self.headers = headers
        self.more = more or {}

    def response(self) -> Response:
        """Return the answer."""
        body = {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            "errors": self.errors,
            **self.more,
        }
        try:
            content = orjson.dumps(body)
        except TypeError:  # half of a surrogate pair, in what the text quotes
            content = json.dumps(body).encode()
        return Response(content, self.status, self.headers, _MEDIA_TYPE)


def wrong(field: str, message: str) -> Problem:
    """Return the problem of one field whose value won't do."""
    return Problem(422, f"{field}: {message}.", [(field, message)])


def invalid(errors: Sequence[ErrorDetails]) -> Problem:
    """Return the problem of what pydantic found wrong."""
    if any(error["type"] == "json_invalid" for error in errors):
        return not_json()
    fields = [(_field(error), _message(error)) for error in errors]
    return Problem(422, "; ".join(f"{field}: {text}" for field, text in fields) + ".", fields)


def not_json() -> Problem:
    """Return the problem of a body that can't be read."""
    return Problem(400, "The body is not JSON.")


def documented(*codes: int) -> dict[int | str, dict[str, Any]]:
    """Return OpenAPI's description of the answers with these statuses, and of those all have."""
    content = {_MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{ProblemBody.__name__}"}}}
    return {
        code: {"description": HTTPStatus(code).phrase, "content": content}
        for code in sorted({400, 401, 403, 404, 422, 431, 503, *codes})
    }


def handle(app: FastAPI) -> None:
    """Have `app` answer with problems, whatever is raised."""
    for kind in (Problem, PenstockError, RequestValidationError, ValidationError, HTTPException):
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(Exception, _answer)


async def _answer(request: Request, error: Exception) -> Response:
    return response_to(request, error)


def response_to(request: Request, error: Exception) -> Response:
    """Return the answer to a request whose endpoint raised `error`."""
    return _problem(request, error).response()


def problem_of(error: Problem | PenstockError) -> Problem:
    """Return the problem that an error of Penstock's own is for a client."""
    match error:
        case Problem():
            return error
        case ConsumerError():
            return _of_consumer(error)
        case ConfigError():
            return Problem(422, str(error), [("body", each) for each in error.problems])
    status = _status_of(error)
    headers = {"Retry-After": "1"} if status == 503 or error.transient else None
    return Problem(status, str(error), headers=headers, more={"code": error.code})


def _status_of(error: PenstockError) -> int:
    match error:
        case StoreError():
            return _STORE_STATUS.get(error.code, 503)
        case CaptureError() | SinkError() | TargetError() | SyncError() if error.transient:
            return AWAY
        case SyncError() if error.code in _MISCONFIGURED:
            return 409
        case CaptureError() if error.code in _AT_FAULT:
            return 422
        case CaptureError() if error.code in _UNPREPARED:
            return 409
        case SinkError():
            return 409
        case BastionError() | CaptureError() | TargetError() | SyncError():
            return AWAY
    return 500


def _problem(request: Request, error: Exception) -> Problem:
    method, path = request.method, request.url.path
    match error:
        case Problem() | PenstockError():
            return problem_of(error)
        case RequestValidationError():
            return invalid(error.errors())
        case ValidationError():
            return invalid(error.errors(include_url=False, include_input=False))
        case HTTPException(status_code=404):
            return Problem(404, f"There is no {path}: see /docs.")
        case HTTPException(status_code=405):
            allowed = _methods(request)
            return Problem(
                405, f"{path} takes {allowed}, not {method}.", headers={"Allow": allowed}
            )
        case HTTPException():
            return Problem(error.status_code, str(error.detail), headers=error.headers)
    log.error("a request failed", method=method, path=path,
              error=f"{type(error).__name__}: {error}")  # fmt: skip
    return Problem(500, "The server failed. Its log has the cause.")


def _methods(request: Request) -> str:
    """Return the methods of a path; each of its routes has its own alone."""
    routes = (route for route in request.app.routes if isinstance(route, Route))
    matching = (route for route in routes if route.path_regex.match(request.url.path))
    return ", ".join(sorted({method for route in matching for method in route.methods or ()}))


def _of_consumer(error: ConsumerError) -> Problem:
    status = _STATUS.get(type(error), 409)
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    errors = [("name", str(error))] if isinstance(error, NameTaken) else []
    if isinstance(error, WrongSetting):
        errors = [(error.field, error.reason)]
    return Problem(status, str(error), errors, headers=headers)


def _field(error: ErrorDetails) -> str:
    if error["type"] == "union_tag_invalid":
        return "type"
    location = error["loc"]
    while len(location) > 1 and location[0] in _PLACES:
        location = location[1:]
    if location and location[0] in _PLACES and location[0] != "path":  # which a webhook has
        location = ()
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name or "body"


def _message(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return "there is no such field"
    if error["type"] == "union_tag_invalid":
        return f"expected one of {error['ctx']['expected_tags']}"
    text = message_of(error)
    return text[:1].lower() + text[1:]
