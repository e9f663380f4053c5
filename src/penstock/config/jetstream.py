"""What a NATS sink wants of its JetStream stream."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from penstock.config.durations import Duration, shown
from penstock.config.strict import StrictModel, Whole
from penstock.core.subject import overlaps

_NAME_FORBIDDEN: Final = re.compile(r"[\x00-\x20\x7f.*>/\\]")
_PATTERN: Final = re.compile(
    r"(?!\$)(?:\*|[^\x00-\x20\x7f.*>]+)(?:\.(?:\*|[^\x00-\x20\x7f.*>]+))*(?:\.>)?\Z|>\Z"
)


def check_stream_name(value: str) -> str:
    """Return `value` if a stream may be called this; raises `ValueError`."""
    if not value or _NAME_FORBIDDEN.search(value):
        raise ValueError(f"{value!r} cannot name a stream: use letters, digits, '-' and '_'")
    return value


def _limit(value: int) -> int:
    if not value:
        raise ValueError("0 would take nothing: expected a number from 1 on, or -1 for no limit")
    return value


Limit = Annotated[Whole, Field(ge=-1), AfterValidator(_limit)]
"""From 1 on, or -1 for no limit."""


class JetStreamSettings(StrictModel):
    """What a NATS sink wants of its stream, by the names of JetStream; None is whatever there is."""

    name: Annotated[str, AfterValidator(check_stream_name)] | None = None
    """The stream's name; by default the sink's in capitals."""
    subjects: tuple[str, ...] | None = Field(None, min_length=1)
    """What it takes; by default all that the sink's subject template and route can give."""
    retention: Literal["limits", "interest", "workqueue"] | None = None
    storage: Literal["file", "memory"] | None = None
    max_msgs_per_subject: Limit | None = None
    max_age: Duration | None = None
    max_bytes: Limit | None = None
    max_msgs: Limit | None = None
    discard: Literal["old", "new"] | None = None
    duplicate_window: Duration | None = None
    replicas: Annotated[Whole, Field(ge=1, le=5)] | None = None

    @field_validator("subjects")
    @classmethod
    def _check_subjects(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for at, pattern in enumerate(value or ()):
            if not _PATTERN.match(pattern):
                raise ValueError(
                    f"{pattern!r} is no subject of a stream: expected tokens with dots between them,"
                    " '*' for one of them, '>' for all at the end, and no '$' first"
                )
            for other in (value or ())[:at]:
                if overlaps(other, pattern):
                    raise ValueError(
                        f"{other!r} and {pattern!r} take the same subjects: remove one of them"
                    )
        return value

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        window, age = self.duplicate_window, self.max_age
        if window is not None and age is not None and window > age:
            raise ValueError(
                f"duplicate_window ({shown(window)}) is longer than max_age ({shown(age)}), which"
                " JetStream refuses: shorten it"
            )
        return self

    def given(self) -> dict[str, Any]:
        """Return the settings that are set, by name."""
        return {name: getattr(self, name) for name in type(self).model_fields
                if getattr(self, name) is not None}  # fmt: skip
