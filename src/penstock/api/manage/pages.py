"""Lists by pages: `limit`, `cursor`, and `next` in the answer."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field

from penstock.api.problems import Problem, wrong
from penstock.config.strict import DIGITS

_T = TypeVar("_T")


class Limit(BaseModel):
    """The query of what answers with so many things at most."""

    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, DIGITS] = Field(100, ge=1, le=1000)


class Paged(Limit):
    """The query of a list."""

    cursor: str | None = Field(None, description="The `next` of the page before.")


def after(cursor: str | None, *kinds: type) -> tuple[Any, ...] | None:
    """Return the values in a cursor, which are of these types; None where there is no cursor.

    Raises `Problem` of a text that no answer had as `next`.
    """
    if cursor is None:
        return None
    try:
        values = orjson.loads(base64.urlsafe_b64decode(cursor.encode("ascii") + b"=="))
    except (ValueError, binascii.Error):
        raise _unknown() from None
    if not isinstance(values, list) or [type(value) for value in values] != list(kinds):
        raise _unknown()
    for value in values:
        too_large = isinstance(value, int) and not -(1 << 63) <= value < 1 << 63
        if too_large or (isinstance(value, str) and "\0" in value):
            raise _unknown()
    return tuple(values)


def following(
    found: Sequence[_T], limit: int, values: Callable[[_T], tuple[Any, ...]]
) -> tuple[Sequence[_T], str | None]:
    """Return the page of `limit` from one more that were found, and the cursor of the next one.

    `values` are those of a thing that `after` gives back: where the next page begins behind it.
    """
    if len(found) <= limit:
        return found, None
    return found[:limit], cursor_of(*values(found[limit - 1]))


def paged(
    things: Sequence[_T], query: Paged, name: Callable[[_T], str]
) -> tuple[Sequence[_T], str | None]:
    """Return a page of things that are all at hand, sorted by their names, and the next cursor."""
    last = after(query.cursor, str)
    ordered = sorted(things, key=name)
    if last is not None:
        ordered = [thing for thing in ordered if name(thing) > last[0]]
    return following(ordered[: query.limit + 1], query.limit, lambda thing: (name(thing),))


def cursor_of(*values: Any) -> str:
    """Return the cursor that `after` reads."""
    return base64.urlsafe_b64encode(orjson.dumps(list(values))).decode().rstrip("=")


def _unknown() -> Problem:
    return wrong("cursor", "it is not the `next` of an answer: begin without one")
