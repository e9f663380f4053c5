"""What a sink's `filter`, `transform` and `route` hold, as the configuration has them.

Syntax is checked here, when the file is read; names and types need the catalog and come later.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Final, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from penstock.config.strict import StrictModel, Whole
from penstock.config.texts import Code, text_and_file
from penstock.core.subject import named

_FUNCTION: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*\Z")
NOT_IN_SUBJECT: Final = re.compile(r"[\x00-\x20\x7f*>]")
"""What no literal of a route to a subject may hold."""


class TransformSettings(StrictModel):
    """How messages are changed: exactly one of `sql`, `lua` and `python` is given."""

    sql: str | None = None
    """A select list that replaces `record`."""
    lua: Code | None = None
    """A program with a function `transform(message)`; in the file the text, or `{file: path}`."""
    python: str | None = None
    """`package.module:function`, which the executors can import."""
    time_limit_ms: Whole = Field(100, ge=1, le=60_000)
    """How long a Lua program may take for one message, in milliseconds."""
    memory_limit_mib: Whole = Field(64, ge=1, le=4_096)
    """How much memory a Lua program may hold, in MiB."""

    @field_validator("lua", mode="before")
    @classmethod
    def _read_lua(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None or isinstance(value, Code):
            return value
        code, file = text_and_file(
            value, info, "a Lua program, or {file: path} where a file holds it"
        )
        if not code.strip():
            raise ValueError("the program is empty: expected a function transform(message)")
        return Code(code=code, file=file)

    @field_validator("sql")
    @classmethod
    def _check_sql(cls, value: str | None) -> str | None:
        if value is not None:
            _check(value, "parse_select")
        return value

    @field_validator("python")
    @classmethod
    def _check_python(cls, value: str | None) -> str | None:
        if value is not None and not _FUNCTION.match(value):
            raise ValueError(f"{value!r} names no function: expected package.module:function")
        return value

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        given = [key for key in ("sql", "lua", "python") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(
                f"{' and '.join(given)} are both set: keep one"
                if given
                else "expected one of sql, lua and python"
            )
        limits = self.model_fields_set & {"time_limit_ms", "memory_limit_mib"}
        if limits and self.lua is None:
            raise ValueError(f"{min(limits)} is for lua alone: remove it")
        return self


class RouteRule(StrictModel):
    """One rule of a list: where `when` holds, a message goes `to` what this template gives."""

    when: Annotated[str, AfterValidator(lambda text: _check(text, "parse_condition"))] | None = None
    to: str = Field(min_length=1)


def _route_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "expression"
    return "rules" if isinstance(value, list | tuple) else None


def _check_rules(rules: tuple[RouteRule, ...]) -> tuple[RouteRule, ...]:
    if not rules:
        raise ValueError("expected at least one rule; leave the key out for none")
    for number, rule in enumerate(rules[:-1], 1):
        if rule.when is None:
            raise ValueError(
                f"rule {number} has no `when`, so those behind it are never reached: put it last"
            )
    return rules


ROUTE_KINDS: Final = ("expression", "rules")
"""The tags of a route's two forms, which stand in the path of a pydantic error."""
RouteSettings = Annotated[
    Annotated[
        Annotated[str, AfterValidator(lambda text: _check(text, "parse_value"))],
        Tag("expression"),
    ]
    | Annotated[
        Annotated[tuple[RouteRule, ...], AfterValidator(_check_rules)],
        Tag("rules"),
    ],
    Discriminator(_route_kind),
]
"""An expression that gives the route, or rules of which the first that matches does."""

Filter = Annotated[str, AfterValidator(lambda text: _check(text, "parse_condition"))]
"""A condition over a message."""


def check_route(route: Any, parse: Callable[[str], object], unsafe: re.Pattern[str]) -> Any:
    """Return `route` if its templates and literals can stand in one; raises `ValueError`.

    `parse` takes the template of a rule, `unsafe` finds what a literal may not hold.
    """
    if isinstance(route, str):
        from penstock import expressions  # noqa: PLC0415 - its parser takes a while to import
        from penstock.expressions.route import literals  # noqa: PLC0415 - as above

        for position, text in literals(expressions.parse_value(route)):
            if (found := unsafe.search(text)) is not None:
                raise ValueError(
                    f"position {position}: {named(found.group())} can't stand in a route"
                )
    for number, rule in enumerate(route if isinstance(route, tuple) else (), 1):
        try:
            parse(rule.to)
        except ValueError as error:
            raise ValueError(f"rule {number}: {error}") from None
    return route


def _check(text: str, parser: str) -> str:
    """Return `text` if `penstock.expressions` can parse it; raises `ValueError` where not."""
    from penstock import expressions  # noqa: PLC0415 - its parser takes a while to import

    parse: Callable[[str], object] = getattr(expressions, parser)
    parse(text)
    return text
